"""Rounds: a block of tokens that follow one another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from ..caches import (
    KV,
    Chain,
    Cross,
    Delayed,
    Latent,
    Ragged,
    Rebased,
    Recurrent,
    advance,
    attend_over,
    extents,
    layout,
    own_columns,
    settle,
    width,
)
from ..caches import _verbs as verbs
from ..caches._recurrent import replayed
from ..errors import RoundError
from ..record import record, static


@record
class Replay:
    """What a recurrent state is gone back by: the one before a block, and the block's inputs.

    Args:
        before: the cache before the block.
        recurrence: what the block went through.
        inputs: the block's.
    """

    before: Recurrent
    recurrence: Any
    inputs: dict[str, mx.array]


@record
class Round:
    """A cache, and a block of tokens in it that nothing is decided about yet.

    It reads as its cache does. It takes one append, of ``drafts + 1`` tokens at most, and nothing
    else that changes it but :func:`commit` and :func:`rollback`.

    Args:
        cache: the cache, with the block once it was appended.
        drafts: tokens that may follow the pending one.
        block: tokens of the verify block, 0 before it was appended.
        replay: of a recurrent cache, what it was before the block, and what the block is.
    """

    cache: Any
    drafts: int = static()
    block: int = static(default=0)
    replay: Replay | None = None

    @property
    def geometry(self) -> Any:
        """Where every position is, the block's too."""
        return self.cache.geometry

    @property
    def layout(self) -> Any:
        """The shape of what the cache accepts."""
        return self.cache.layout


def begin(cache: Any, drafts: int) -> Any:
    """A round of a cache, or of each cache in a tuple or list.

    Conversions that are due (:class:`kvfun.Delayed`) are made first: what is not decided counts
    towards none.

    The caches of this library can take back their last append whatever was dropped before, so any
    number of drafts fits. The append to a round of another record that could not is refused, and
    the cache is what it was.

    Args:
        cache: any record, or several.
        drafts: the most tokens that may follow the pending one.

    Raises:
        RoundError: no number of drafts, or a round inside a round.
    """
    if isinstance(drafts, bool) or not isinstance(drafts, int) or drafts < 0:
        raise RoundError(f"drafts must be an integer >= 0, not {drafts!r}")
    if isinstance(cache, tuple | list):
        return type(cache)([begin(each, drafts) for each in cache])
    if isinstance(cache, Round):
        raise RoundError("a round inside a round: commit the first one, or roll it back")
    return Round(settle(cache), drafts)


def commit(turn: Any) -> Any:
    """The cache, or each of several, with all tokens of the block."""
    return _decided(turn, lambda each: each.cache)


def rollback(turn: Any, keep: int | Sequence[int]) -> Any:
    """The cache, or each of several, with the first tokens of the block.

    Args:
        turn: a round, or several.
        keep: how many tokens of the block stay, the pending one included: accepted drafts + 1. One
            number, or one a row.

    Raises:
        RoundError: nothing was appended, or ``keep`` is out of range.
    """
    return _decided(turn, lambda each: _kept(each, keep))


def _decided(turn: Any, decide: Callable[[Round], Any]) -> Any:
    if isinstance(turn, tuple | list):
        return type(turn)([_decided(each, decide) for each in turn])
    if not isinstance(turn, Round):
        raise RoundError(f"a {type(turn).__name__} is no round: begin one first")
    return decide(turn)


def _kept(turn: Round, keep: int | Sequence[int]) -> Any:
    rejected = _rejected(turn, keep)
    if turn.replay is None:
        return verbs.rollback(turn.cache, rejected)
    many = rejected if isinstance(rejected, list) else [rejected]
    if not any(many):
        return turn.cache
    kept = [turn.block - number for number in many]
    return replayed(turn.replay.before, turn.replay.recurrence, turn.replay.inputs, kept)


def _rejected(turn: Round, keep: int | Sequence[int]) -> int | list[int]:
    """How many tokens each row gives back."""
    if not turn.block:
        raise RoundError("nothing was appended to the round")
    if type(keep) is int and 0 <= keep <= turn.block:
        return turn.block - keep
    many = isinstance(keep, Sequence) and not isinstance(keep, str)
    numbers: list[Any] = list(keep) if isinstance(keep, Sequence) else [keep]
    batch = verbs.batch_size(turn.cache)
    if many and len(numbers) != batch:
        raise RoundError(f"keep has {len(numbers)} numbers for {batch} rows")
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, int):
            raise RoundError(f"keep must be an integer, or one a row, not {keep!r}")
        if not 0 <= number <= turn.block:
            raise RoundError(
                f"keep must be from 0 to the block's {turn.block} tokens, not {keep!r}"
            )
    rejected = [turn.block - number for number in numbers]
    return rejected if many else rejected[0]


_EXACT = (KV, Chain, Delayed, Latent, Ragged, Rebased)
"""Records that can always take back their last append, whole."""


@verbs.append.register(Round)
def _append(turn: Round, keys: mx.array, values: mx.array, *more: Any) -> Round:
    _no_block_yet(turn)
    cache = verbs.append(turn.cache, keys, values, *more)
    tokens = keys.shape[2]
    _not_too_long(turn, tokens)
    if not isinstance(cache.inner if isinstance(cache, Cross) else cache, _EXACT):
        short = [most for most in verbs.max_rollback(cache) if most < tokens]
        if short:
            raise RoundError(
                f"the cache can take back {short[0]} of the block's {tokens} tokens only: fewer "
                "drafts, or a larger reserve"
            )
    return Round(cache, turn.drafts, tokens)


@advance.register(Round)
def _advance(turn: Round, recurrence: Any, inputs: dict[str, mx.array]) -> tuple[Any, Round]:
    _no_block_yet(turn)
    if isinstance(turn.cache, Recurrent) and turn.cache.ahead is not None:
        raise RoundError("a round within a padded block: finalize the cache first")
    out, cache = advance(turn.cache, recurrence, inputs)
    tokens = next(iter(inputs.values())).shape[1]
    _not_too_long(turn, tokens)
    return out, Round(cache, turn.drafts, tokens, Replay(turn.cache, recurrence, inputs))


def _no_block_yet(turn: Round) -> None:
    if turn.block:
        raise RoundError("a round has one block: commit it, or roll it back, before the next")


def _not_too_long(turn: Round, tokens: int) -> None:
    if tokens > turn.drafts + 1:
        raise RoundError(
            f"a block of {tokens} tokens in a round of {turn.drafts} drafts and a pending token"
        )


verbs.reads(
    Round,
    "cache",
    *(verbs.fetch, verbs.fetch_columns, verbs.attend, verbs.attend_columns, verbs.mask),
    *(verbs.max_rollback, verbs.batch_size, verbs.offsets, verbs.size),
    *(width, own_columns, extents, layout, attend_over),
)


def _undecided(turn: Round, *_: Any, **__: Any) -> Any:
    raise RoundError("a round is not decided yet: commit it, or roll it back, first")


for _verb in (verbs.rollback, verbs.convert, verbs.take, verbs.join, verbs.with_reserve):
    _verb.register(Round, _undecided)
