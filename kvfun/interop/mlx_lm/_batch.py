"""Several texts read by one model at once, each as if it were alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import mlx.core as mx

from ... import tree
from ...caches import KV, Delayed, Recurrent, concat, rollback, take
from ...caches._recurrent import chosen
from ...errors import KVFunError, ShapeError, UnsupportedError
from ._attention import attention_where_possible
from ._make import PromptCache
from ._shell import KVFunCache
from ._states import KVFunCacheList, KVFunStates, leaves_of

Blocks = Sequence[Sequence[int]]
"""Tokens of each row."""


@attrs.define
class _Group:
    """Rows whose caches are one batch."""

    rows: list[int]
    caches: PromptCache


class Batch:
    """A model and several texts, each with caches of its own: no token of one row touches another.

    Blocks of different lengths are read in pieces in which every row has a token or is put back
    where it was, so that padding never stays anywhere, whatever a model does with masks (some of
    mlx-lm's recurrent layers ignore them). That takes as many calls of the model as there are
    different lengths, of as many columns together as the longest block has.

    Attention reads the caches encoded (:func:`attention`), where the model's can be routed.

    Rows are held as one batch where their caches can be one. A recurrent layer without a token is
    not the same as one with zeros in all models, so rows join when they have begun.

    Args:
        model: an mlx-lm model.
        caches: one list of caches a text, from :func:`make_prompt_cache`, new ones or such as have
            been read into. They are taken over.

    >>> from mlx_lm.models import llama
    >>> from kvfun.interop.mlx_lm import make_prompt_cache
    >>> model = llama.Model(llama.ModelArgs("llama", 64, 2, 128, 2, 1e-5, 100))
    >>> batch = Batch(model, [make_prompt_cache(model, "kv4-g32") for _ in range(2)])
    >>> logits = batch.read([[1, 2, 3], [4]])
    >>> [x.shape for x in logits], batch.offsets
    ([(3, 100), (1, 100)], (3, 1))
    """

    def __init__(self, model: Any, caches: Sequence[PromptCache]):
        if not caches:
            raise ShapeError("a batch has at least one row")
        self.model = model
        self._counts = [0] * len(caches)
        self._groups = []
        for row, each in enumerate(caches):
            for leaf in leaves_of(each):
                if not isinstance(leaf, KVFunCache | KVFunStates):
                    raise UnsupportedError(f"a {type(leaf).__name__}: make the caches with kvfun")
                if isinstance(leaf, KVFunCache) and leaf.record.layout is not None:
                    self._counts[row] = leaf.record.geometry.rows[0].offset
            self._groups.append(_Group([row], each))
        self._join()

    @property
    def offsets(self) -> tuple[int, ...]:
        """Tokens that each row has seen."""
        return tuple(self._counts)

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The rows that are one batch."""
        return tuple([tuple(group.rows) for group in self._groups])

    @property
    def nbytes(self) -> int:
        """Bytes held by all caches."""
        return sum(leaf.nbytes for group in self._groups for leaf in leaves_of(group.caches))

    def read(self, blocks: Blocks) -> list[mx.array]:
        """Let each row read some tokens.

        Args:
            blocks: tokens of each row; none where it reads nothing.

        Returns:
            Logits behind each token of each row, ``[tokens, vocabulary]``.

        Raises:
            ShapeError: not one block a row, or no token at all.
        """
        if len(blocks) != len(self._counts) or not any(len(block) for block in blocks):
            raise ShapeError(
                f"{len(blocks)} blocks, {[*map(len, blocks)]}, for {len(self._counts)}"
            )
        found: list[list[mx.array]] = [[] for _ in blocks]
        waiting, self._groups = self._groups, []
        left = [list(block) for block in blocks]
        with attention_where_possible(self.model):
            while waiting:
                waiting += self._step(waiting.pop(), left, found)
        for row, block in enumerate(blocks):
            self._counts[row] += len(block)
        self._groups.sort(key=lambda group: group.rows[0])
        self._join()
        return [mx.concatenate(x) if x else mx.zeros((0, 0)) for x in found]

    def evaluate(self) -> None:
        """Compute what all caches hold: else a prompt's whole graph is kept until somebody does."""
        for group in self._groups:
            mx.eval([tree.leaves(leaf.record) for leaf in leaves_of(group.caches)])

    def rows(self, kept: Sequence[int]) -> None:
        """Keep some rows only, in this order."""
        groups = []
        for group in self._groups:
            inside = [row for row in kept if row in group.rows]
            if inside:
                where = [group.rows.index(row) for row in inside]
                renamed = [kept.index(row) for row in inside]
                groups.append(_Group(renamed, _taken(group.caches, where)))
        if sum(len(group.rows) for group in groups) != len(kept):
            raise ShapeError(f"rows {list(kept)} of a batch of {len(self._counts)}")
        self._groups = groups
        self._counts = [self._counts[row] for row in kept]

    def row(self, index: int) -> PromptCache:
        """A row's caches, by themselves."""
        group = next(group for group in self._groups if index in group.rows)
        return _taken(group.caches, [group.rows.index(index)])

    # -- steps ------------------------------------------------------------------------------------

    def _step(self, group: _Group, left: list[list[int]], found: list[list[mx.array]]):
        """Read as far as all of a group's rows that read anything go; the groups that go on."""
        lengths = [len(left[row]) for row in group.rows]
        active = [length > 0 for length in lengths]
        if not any(active):
            self._groups.append(group)
            return []
        if not all(active) and not _can_stand_still(group.caches):
            return [_part(group, active), _part(group, [not one for one in active])]
        tokens = min(length for length in lengths if length)
        before = [leaf.record for leaf in leaves_of(group.caches) if isinstance(leaf, KVFunStates)]
        block = [left[row][:tokens] or [0] * tokens for row in group.rows]
        logits = self.model(mx.array(block), cache=group.caches)
        for index, row in enumerate(group.rows):
            if active[index]:
                found[row].append(logits[index])
                left[row] = left[row][tokens:]
        _count(group.caches, tokens)
        if all(active):
            return [group]
        return _put_back(group, before, active, tokens)

    def _join(self) -> None:
        """One batch of all groups that can be one."""
        joined: list[_Group] = []
        for group in self._groups:
            for other in joined:
                together = _joined([other.caches, group.caches])
                if together is not None:
                    other.rows += group.rows
                    other.caches = together
                    break
            else:
                joined.append(group)
        self._groups = joined


def _count(caches: PromptCache, tokens: int) -> None:
    for leaf in leaves_of(caches):
        if isinstance(leaf, KVFunStates) and not leaf.counts:
            leaf.told(tokens)


def _can_stand_still(caches: PromptCache) -> bool:
    """Whether rows can be put back after a block, to the very bits that they had.

    Blocks of a chain may be encoded in between, for good.
    """
    records = [leaf.record for leaf in leaves_of(caches)]
    kinds = [r.inner if isinstance(r, Delayed) else r for r in records]
    return all(isinstance(kind, KV | Recurrent) for kind in kinds)


def _put_back(
    group: _Group, before: list[Recurrent], active: list[bool], tokens: int
) -> list[_Group]:
    """The group after a block that only some rows have read; two where states differ in shape."""
    states = [leaf for leaf in leaves_of(group.caches) if isinstance(leaf, KVFunStates)]
    for leaf in leaves_of(group.caches):
        if isinstance(leaf, KVFunCache):
            counts = [0 if one else tokens for one in active]
            leaf.record, leaf.block = rollback(leaf.record, counts), 1
    pairs = list(zip(before, states, strict=True))
    if all(old.layout == leaf.record.layout for old, leaf in pairs):
        for old, leaf in pairs:
            leaf.put(chosen(active, leaf.record, old))
        return [group]
    going = _part(group, active)
    for old, leaf in pairs:
        leaf.put(old)
    return [going, _part(group, [not one for one in active])]


def _part(group: _Group, chosen: Sequence[bool]) -> _Group:
    """Some rows of a group."""
    inside = [index for index, one in enumerate(chosen) if one]
    return _Group([group.rows[index] for index in inside], _taken(group.caches, inside))


def _taken(caches: PromptCache, rows: list[int]) -> PromptCache:
    return _mapped([caches], lambda records: take(records[0], rows))


def _joined(parts: Sequence[PromptCache]) -> PromptCache | None:
    """One list of caches of the rows of several; ``None`` where they cannot be one batch."""
    leaves = [[leaf.record for leaf in leaves_of(part)] for part in parts]
    for records in zip(*leaves, strict=True):
        began = {bool(record.layout) for record in records}
        if len(began) > 1:
            return None
    try:
        return _mapped(parts, concat)
    except KVFunError:  # codecs, windows or shapes that differ: they stay apart
        return None


def _mapped(parts: Sequence[PromptCache], change: Any) -> PromptCache:
    """Caches whose records are made of the records of several, all of them before any is held."""
    made = PromptCache([_made([part[i] for part in parts], change) for i in range(len(parts[0]))])
    made.reasons = parts[0].reasons
    return made


def _made(entries: Sequence[Any], change: Any) -> Any:
    first = entries[0]
    if isinstance(first, KVFunCacheList):
        columns = zip(*[entry.caches for entry in entries], strict=True)
        return KVFunCacheList(*[_made(column, change) for column in columns])
    record = change([entry.record for entry in entries])
    box = first.__copy__()
    if isinstance(box, KVFunStates):
        box.put(record)
    else:
        box.record = record
    return box
