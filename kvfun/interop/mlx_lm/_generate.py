"""Speculative generation that is exact for every architecture."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple, Protocol

import mlx.core as mx

from ...caches import next_conversion, rollback
from ...codecs import Codec
from ...errors import ShapeError, UnsupportedError
from ...scheme import KvScheme
from ._attention import attention_where_possible
from ._make import PromptCache, make_prompt_cache
from ._shell import KVFunCache
from ._states import KVFunStates, leaves_of

STEP = 512
"""Tokens of a prompt that are read at once."""

Probabilities = Callable[[mx.array], mx.array]


class Generated(NamedTuple):
    """One token of the output."""

    token: int
    from_draft: bool
    """Whether it was a draft that was accepted."""


class Proposal(NamedTuple):
    """Drafts, and the probabilities that they were drawn from; none for certain ones."""

    tokens: list[int]
    probabilities: list[mx.array] | None = None


class Drafter(Protocol):
    """Proposes tokens that may follow."""

    def propose(self, tokens: Sequence[int], most: int) -> Proposal:
        """At most so many drafts behind all tokens so far, the pending one the last of them."""
        ...


class PromptLookup:
    """Drafts what followed the last tokens when they were there before (Saxena, 2023).

    Args:
        longest: tokens that are looked for, fewer if those were never there.

    >>> PromptLookup().propose([5, 6, 7, 8, 5, 6], most=2)
    Proposal(tokens=[7, 8], probabilities=None)
    """

    def __init__(self, longest: int = 3):
        self.longest = longest

    def propose(self, tokens: Sequence[int], most: int) -> Proposal:
        """See :class:`Drafter`."""
        tokens = list(tokens)
        for size in range(min(self.longest, len(tokens) - 1), 0, -1):
            wanted = tokens[-size:]
            for start in range(len(tokens) - size - 1, -1, -1):
                if tokens[start : start + size] == wanted:
                    return Proposal(tokens[start + size : start + size + most])
        return Proposal([])


class DraftModel:
    """Drafts of a smaller model, which reads along in caches of its own.

    Args:
        model: an mlx-lm model with the same tokens.
        spec: what its caches store.
        temp: the temperature that it draws with; 0 takes the likeliest.
    """

    def __init__(
        self,
        model: Any,
        spec: str | Codec | KvScheme = "plain",
        temp: float = 0.0,
        probabilities: Probabilities | None = None,
    ):
        self.model, self.spec = model, spec
        self.probabilities = probabilities or _softmax(temp)
        self.reader: Reader | None = None

    def propose(self, tokens: Sequence[int], most: int) -> Proposal:
        """See :class:`Drafter`."""
        if not most:
            return Proposal([])
        if self.reader is None:
            self.reader = Reader(self.model, make_prompt_cache(self.model, self.spec))
        self.reader.back_to(_common(self.reader.tokens, tokens[:-1]))
        self.reader.keep_in_reserve(most)
        drafts, found = [], []
        unread = self.reader.prefilled(list(tokens[len(self.reader.tokens) :]))
        for _ in range(most):
            chances = self.probabilities(self.reader.read(unread)[0, -1])
            found.append(chances)
            drafts.append(_drawn(chances))
            unread = drafts[-1:]
        return Proposal(drafts, found)


class Reader:
    """A model, its caches and all tokens that they hold; it can go back exactly.

    Windows can always take back the last append, so that it is one. Recurrent states are kept as
    they were before it, and what stays of it is read again.

    Args:
        model: an mlx-lm model.
        caches: from :func:`make_prompt_cache`, empty.
    """

    def __init__(self, model: Any, caches: PromptCache):
        self.model, self.caches = model, caches
        self.tokens: list[int] = []
        self._history: list[tuple[int, list[Any]]] = []
        leaves = list(leaves_of(caches))
        self._shells = [leaf for leaf in leaves if isinstance(leaf, KVFunCache)]
        self._states = [leaf for leaf in leaves if isinstance(leaf, KVFunStates)]
        if len(self._shells) + len(self._states) != len(leaves):
            kinds = {type(leaf).__name__ for leaf in leaves} - {"KVFunCache", "KVFunStates"}
            raise UnsupportedError(f"{sorted(kinds)} cannot go back: make the caches with kvfun")

    @property
    def replays(self) -> bool:
        """Whether going back means reading again."""
        return bool(self._states)

    @property
    def room(self) -> int | None:
        """How many tokens may be read at once without a conversion among them."""
        ahead = [next_conversion(shell.record) for shell in self._shells]
        return min([max(1, n) for n in ahead if n is not None], default=None)

    def keep_in_reserve(self, tokens: int) -> None:
        """Let windows take back several reads, of so many tokens together."""
        for shell in self._shells:
            shell.keep_in_reserve(tokens)

    def prefilled(self, tokens: list[int]) -> list[int]:
        """Read all but the last tokens in chunks; those that are left are one chunk at most."""
        while len(tokens) > (size := min(STEP, self.room or STEP)):
            mx.eval(self.read(tokens[:size]))
            self.back_to(len(self.tokens))
            tokens = tokens[size:]
        return tokens

    def read(self, tokens: Sequence[int]) -> mx.array:
        """Logits behind each of some more tokens, ``[1, tokens, vocabulary]``."""
        self._history.append((len(self.tokens), self._marked()))
        self.tokens += tokens
        logits = self.model(mx.array([list(tokens)]), cache=self.caches)
        for state in self._states:
            if not state.counts:
                state.told(len(tokens))
        return logits

    def back_to(self, count: int) -> None:
        """Hold the first ``count`` tokens only; what was decided before the last reads stays."""
        if count == len(self.tokens):
            self._history.clear()
            return
        while self._history and self._history[-1][0] >= count:
            self._undo()
        if count < len(self.tokens):
            again = self.tokens[self._history[-1][0] : count] if self._history else None
            if again is None:
                raise UnsupportedError(f"{len(self.tokens)} tokens are decided, not {count}")
            if self.replays:
                self._undo()
                self.read(again)
            else:
                self._trim(len(self.tokens) - count)
        self._history.clear()

    def _marked(self) -> list[Any]:
        """What recurrent layers keep now; of others the length is enough to go back."""
        return [state.record for state in self._states]

    def _undo(self) -> None:
        """Take back the last read, whole."""
        start, states = self._history.pop()
        self._trim(len(self.tokens) - start)
        for state, kept in zip(self._states, states, strict=True):
            state.put(kept)

    def _trim(self, tokens: int) -> None:
        for shell in self._shells:
            shell.record = rollback(shell.record, tokens)
            shell.block = 1
        del self.tokens[len(self.tokens) - tokens :]


def speculative_generate(
    model: Any,
    prompt: Sequence[int],
    drafter: Drafter | None = None,
    *,
    spec: str | Codec | KvScheme = "plain",
    num_drafts: int = 4,
    max_tokens: int = 256,
    temp: float = 0.0,
    probabilities: Probabilities | None = None,
    stop: Sequence[int] = (),
    **options: Any,
) -> Iterator[Generated]:
    """Tokens of a model, several of which are verified at once where they were guessed.

    At temperature 0 these are the tokens that the model says one by one; otherwise they are
    distributed as those. Windowed and chunked layers take back exactly what was rejected;
    recurrent ones keep the state from before, and what was accepted is read again.

    Args:
        model: an mlx-lm model.
        prompt: tokens, one at least.
        drafter: who guesses, by default :class:`PromptLookup`; or a :class:`DraftModel`.
        spec: what the model's caches store.
        num_drafts: guesses a round.
        max_tokens: of the output.
        temp: the temperature; 0 is greedy.
        probabilities: from logits ``[..., vocabulary]`` to probabilities, instead of ``temp``.
        stop: tokens that end the output, and are its last.
        options: those of :func:`make_prompt_cache`.

    Raises:
        ShapeError: no prompt, or numbers out of range.
        UnsupportedError: a model that cannot run on such caches.

    References:
        Leviathan et al., *Fast Inference from Transformers via Speculative Decoding*, 2023.
    """
    prompt = [int(token) for token in prompt]
    for name, number, least in (("num_drafts", num_drafts, 0), ("max_tokens", max_tokens, 0)):
        if isinstance(number, bool) or not isinstance(number, int) or number < least:
            raise ShapeError(f"{name} must be an integer >= {least}, not {number!r}")
    if not prompt:
        raise ShapeError("a prompt has one token at least")
    chances = probabilities or _softmax(temp)
    drafter = PromptLookup() if drafter is None else drafter
    reader = Reader(model, make_prompt_cache(model, spec, **options))
    return _rounds(reader, prompt, drafter, num_drafts, max_tokens, chances, frozenset(stop))


def _rounds(
    reader: Reader,
    prompt: list[int],
    drafter: Drafter,
    num_drafts: int,
    max_tokens: int,
    chances: Probabilities,
    stop: frozenset[int],
) -> Iterator[Generated]:
    tokens, said = list(prompt), 0
    while said < max_tokens:
        with _routed(reader.model, getattr(drafter, "model", None)):
            if not said and len(prompt) > 1:
                mx.eval(reader.read(reader.prefilled(prompt[:-1])))
                reader.back_to(len(prompt) - 1)
            most = min(num_drafts, max_tokens - said - 1)
            room = reader.room
            most = most if room is None else min(most, room - 1)
            proposal = drafter.propose(tokens, most)
            block = [tokens[-1], *proposal.tokens[:most]]
            accepted, following = _verified(reader, block, proposal, chances)
        for index, token in enumerate([*block[1 : accepted + 1], following]):
            tokens.append(token)
            said += 1
            yield Generated(token, from_draft=index < accepted)
            if token in stop or said == max_tokens:
                return


def _verified(
    reader: Reader, block: list[int], proposal: Proposal, chances: Probabilities
) -> tuple[int, int]:
    """How many drafts are accepted, and the token behind them; the rest is taken back."""
    before = len(reader.tokens)
    logits = reader.read(block)
    found = chances(logits[0].astype(mx.float32))
    accepted, following = _accepted(found, block[1:], proposal.probabilities)
    reader.back_to(before + accepted + 1)
    return accepted, following


def _accepted(
    found: mx.array, drafts: list[int], drawn_from: list[mx.array] | None
) -> tuple[int, int]:
    """Accept each draft with ``min(1, p / q)``; at the first that is not, draw from the rest.

    Args:
        found: ``[drafts + 1, vocabulary]``, the model's probabilities behind each token.
        drafts: the guesses.
        drawn_from: what each was drawn from; ``None``: it was certain.
    """
    if not drafts:
        return 0, _drawn(found[0])
    index = mx.array(drafts)[:, None]
    p = mx.take_along_axis(found[:-1], index, axis=-1)[:, 0]
    q = mx.ones_like(p)
    if drawn_from is not None:
        others = mx.stack(drawn_from[: len(drafts)])
        q = mx.take_along_axis(others, index, axis=-1)[:, 0]
    taken: Any = (mx.random.uniform(shape=p.shape) * q < p).tolist()
    count = next((i for i, one in enumerate(taken) if not one), len(drafts))
    if count == len(drafts):
        return count, _drawn(found[count])
    if drawn_from is not None:
        other = drawn_from[count]
    else:
        other = (mx.arange(found.shape[-1]) == drafts[count]).astype(mx.float32)
    left = mx.maximum(found[count] - other, 0.0)
    return count, _drawn(left / mx.sum(left))


def _drawn(chances: mx.array) -> int:
    """A token by its probabilities."""
    token: Any = mx.random.categorical(mx.log(chances)).item()
    return token


def _softmax(temp: float) -> Probabilities:
    """Probabilities at a temperature; at 0 all of it is the likeliest token's."""
    if isinstance(temp, bool) or not isinstance(temp, int | float) or not temp >= 0:
        raise ShapeError(f"temp must be a number >= 0, not {temp!r}")

    def greedy(logits: mx.array) -> mx.array:
        best = mx.argmax(logits, axis=-1, keepdims=True)
        return (mx.arange(logits.shape[-1]) == best).astype(mx.float32)

    def warm(logits: mx.array) -> mx.array:
        return mx.softmax(logits.astype(mx.float32) / temp, axis=-1)

    return warm if temp else greedy


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many first tokens two texts share."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _routed(*models: Any) -> ExitStack:
    """Attention over encoded caches, of those models whose attention can be replaced."""
    stack = ExitStack()
    for model in models:
        if model is not None:
            stack.enter_context(attention_where_possible(model))
    return stack
