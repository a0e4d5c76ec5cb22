"""Histories: verbs with their arguments, run on a cache and on the reference side by side.

Arguments are drawn without knowing the cache; :func:`resolve` makes them valid for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import mlx.core as mx
import numpy as np

from .. import caches
from ..codecs import Codec
from ..errors import KVFunError
from ._oracle import Reference, from_numpy, to_numpy
from ._recipes import Recipe, Shape

MAX_BATCH = 4


@attrs.frozen
class Append:
    """Append a block of ``tokens``, its numbers by ``seed``."""

    tokens: int
    seed: int = 0


@attrs.frozen
class Rollback:
    """Roll back ``amounts[i]`` tokens of row ``i``, or ``amounts[0]`` of all; at most what can."""

    amounts: tuple[int, ...]


@attrs.frozen
class Convert:
    """Convert to ``spec``."""

    spec: str


@attrs.frozen
class Take:
    """Take rows, each modulo the batch size."""

    rows: tuple[int, ...]


@attrs.frozen
class Join:
    """Concatenate with new caches of one row and ``lengths`` tokens each, behind or in front."""

    lengths: tuple[int, ...]
    seed: int = 0
    front: bool = False


Verb = Append | Rollback | Convert | Take | Join


@attrs.frozen(eq=False)
class Handle:
    """A cache, and what it stands for.

    Args:
        cache: the cache.
        reference: the tokens of its rows.
        spec: its codec as far as known.
        block: tokens of the last append that are still there: so many queries can be asked.
        largest: tokens of the last append that had any; in a batch, of the row with most.
        appended: how many tokens were appended in all.
    """

    cache: Any
    reference: Reference
    spec: str | None
    block: int = 0
    largest: int = 0
    appended: int = 0

    @property
    def batch(self) -> int:
        """How many rows."""
        return len(self.reference.rows)

    @property
    def started(self) -> bool:
        """Whether anything was appended."""
        return any(row is not None for row in self.reference.rows)


@attrs.frozen
class World:
    """The recipe and the shape that all handles of one example have in common."""

    recipe: Recipe
    shape: Shape
    batch: int = 1

    def begin(self) -> Handle:
        """An empty cache; with left padding, one that has read the padding and a token."""
        recipe = self.recipe
        pads = recipe.padding
        reference = Reference(recipe.visibility, (None,) * max(1, len(pads)), pads)
        handle = Handle(recipe(), reference, recipe.spec)
        return self.run(handle, [Append(max(pads) + 1)]) if pads else handle

    def decoded(
        self, spec: str | None, keys: mx.array, values: mx.array
    ) -> tuple[np.ndarray, np.ndarray]:
        """What the codec makes of a block, read back right after appending it to an empty cache."""
        recipe = self.recipe.unpadded()
        tokens = keys.shape[2]
        if tokens == 0:
            return to_numpy(keys), to_numpy(values)
        cache = recipe() if spec == recipe.spec else caches.convert(recipe(), spec)
        cache = caches.append(cache, keys, values)
        k, v = map(to_numpy, caches.fetch(cache, queries=tokens))
        assert k.shape == keys.shape, f"a block {keys.shape} was appended, {k.shape} came back"
        assert v.shape == values.shape, f"a block {values.shape} was appended, {v.shape} came back"
        return k, v

    def run(self, handle: Handle, history: Sequence[Verb]) -> Handle:
        """The handle after all verbs of a history."""
        for verb in history:
            handle = self.apply(handle, verb)
        return handle

    def apply(self, handle: Handle, verb: Verb) -> Handle:
        """The handle after a verb, made valid for it first."""
        return self.exactly(handle, resolve(verb, handle.cache))

    def exactly(self, handle: Handle, verb: Verb) -> Handle:
        """The handle after a verb whose arguments are valid."""
        if isinstance(verb, Append):
            batch = handle.batch if handle.started or handle.batch > 1 else self.batch
            return self.append(handle, *self.shape.block(verb.seed, batch, verb.tokens))
        if isinstance(verb, Rollback):
            return self.rollback(handle, verb.amounts)
        if isinstance(verb, Convert):
            return self.convert(handle, verb.spec)
        if isinstance(verb, Take):
            return attrs.evolve(
                handle,
                cache=caches.take(handle.cache, list(verb.rows)),
                reference=handle.reference.take(verb.rows),
            )
        others = []
        for index, length in enumerate(verb.lengths):
            block = self.shape.block(verb.seed + index, 1, length)
            other = attrs.evolve(self, recipe=self.recipe.unpadded(), batch=1).begin()
            other = self.convert(other, handle.spec) if other.spec != handle.spec else other
            others.append(self.append(other, *block))
        return self.concat([*others, handle] if verb.front else [handle, *others])

    def append(self, handle: Handle, keys: mx.array, values: mx.array) -> Handle:
        """Append a block."""
        tokens = keys.shape[2]
        return Handle(
            caches.append(handle.cache, keys, values),
            handle.reference.append(*self.decoded(handle.spec, keys, values)),
            handle.spec,
            tokens,
            tokens or handle.largest,
            handle.appended + tokens,
        )

    def rollback(self, handle: Handle, counts: Sequence[int]) -> Handle:
        """Roll back, one number a row or one for all."""
        spread = tuple(counts) if len(counts) > 1 else tuple(counts) * handle.batch
        argument = counts[0] if len(counts) == 1 else list(counts)
        return attrs.evolve(
            handle,
            cache=caches.rollback(handle.cache, argument),
            reference=handle.reference.rollback(spread),
            block=max(0, handle.block - max(spread)),
        )

    def convert(self, handle: Handle, spec: str | None) -> Handle:
        """Convert; a side whose codec stays keeps its numbers, the other is decoded and encoded."""
        assert spec is not None
        before = None if handle.spec is None else Codec.of(handle.spec)
        after = Codec.of(spec)
        rows = []
        for row in handle.reference.rows:
            if row is None:
                rows.append(row)
                continue
            keys = from_numpy(row.keys[None]).astype(self.shape.key_dtype)
            values = from_numpy(row.values[None]).astype(self.shape.value_dtype)
            new_keys, new_values = self.decoded(spec, keys, values)
            if before is None or before.keys.spec != after.keys.spec:
                row = attrs.evolve(row, keys=new_keys[0])
            if before is None or before.values.spec != after.values.spec:
                row = attrs.evolve(row, values=new_values[0])
            rows.append(row)
        return attrs.evolve(
            handle,
            cache=caches.convert(handle.cache, spec),
            reference=attrs.evolve(handle.reference, rows=tuple(rows)),
            spec=spec,
        )

    def concat(
        self, handles: Sequence[Handle], join: Callable[[list[Any]], Any] = caches.concat
    ) -> Handle:
        """Batch handles of one spec."""
        first = handles[0]
        return Handle(
            join([handle.cache for handle in handles]),
            first.reference.concat(*[handle.reference for handle in handles[1:]]),
            first.spec,
            min(handle.block for handle in handles),
            max(handle.largest for handle in handles),
            sum(handle.appended for handle in handles),
        )


def resolve(verb: Verb, *alike: Any) -> Verb:
    """The verb with arguments that are valid for all of the caches, which have equal rows."""
    batch = caches.batch_size(alike[0])
    if isinstance(verb, Rollback):
        most = [min(row) for row in zip(*map(caches.max_rollback, alike), strict=True)]
        if len(verb.amounts) == 1 or batch == 1:
            return Rollback((verb.amounts[0] % (min(most) + 1),))
        amounts = [verb.amounts[i % len(verb.amounts)] for i in range(batch)]
        return Rollback(tuple(a % (n + 1) for a, n in zip(amounts, most, strict=True)))
    if isinstance(verb, Take):
        return Take(tuple(row % batch for row in verb.rows))
    if isinstance(verb, Join) and batch + len(verb.lengths) > MAX_BATCH:
        return Take(tuple(range(batch)))
    return verb


def refused(call: Callable[..., Any], *args: Any, **kwargs: Any) -> KVFunError:
    """The error of a call that must be refused with one of :mod:`kvfun.errors`."""
    try:
        call(*args, **kwargs)
    except KVFunError as error:
        return error
    raise AssertionError(f"{getattr(call, '__name__', call)} took arguments it must refuse")
