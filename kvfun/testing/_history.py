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
from ..codecs import Codec, learns
from ..errors import KVFunError
from ..geometry import Policy, body_part
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


@attrs.frozen
class Seal:
    """Freeze all there is as a segment; what comes is stored by ``spec``, or as up to now."""

    spec: str | None = None


Verb = Append | Rollback | Convert | Take | Join | Seal


@attrs.frozen(eq=False)
class Handle:
    """A cache, and what it stands for.

    Args:
        cache: the cache.
        reference: the tokens of its rows.
        spec: its codec as far as known; that of the live tail.
        block: tokens of the last append that are still there: so many queries can be asked.
        largest: tokens of the last append that had any; in a batch, of the row with most. With a
            residual, the most since one was encoded.
        appended: how many tokens were appended in all.
        sealed: the codecs of the sealed segments.
        dtypes: of the raw keys and values, once some were appended.
    """

    cache: Any
    reference: Reference
    spec: str | None
    block: int = 0
    largest: int = 0
    appended: int = 0
    sealed: tuple[str | None, ...] = ()
    dtypes: tuple[mx.Dtype, ...] = ()

    @property
    def codecs(self) -> tuple[str | None, ...]:
        """The codecs of all parts, of the live ones last: what a batch must agree in."""
        return (*self.sealed, *self.reference.schedule.parts(self.spec))

    @property
    def stored(self) -> set[str]:
        """The specs of the codecs, and of those that the tokens in sealed segments are in."""
        tokens = {spec for row in self.reference.rows if row is not None for spec in row.codecs}
        return {spec for spec in (*tokens, *self.codecs) if spec is not None}

    @property
    def chained(self) -> bool:
        """Whether its tokens may be stored in more than one way."""
        return bool(self.sealed) or self.reference.schedule.ages

    @property
    def floor(self) -> int:
        """The offset below which no row can be rolled back."""
        return self.reference.visibility.sinks if self.sealed else 0

    @property
    def sealable(self) -> bool:
        """Whether ``seal`` may be called: no padding is to come, and all sinks are there."""
        return min(self.reference.offsets) >= self.reference.visibility.sinks

    @property
    def batch(self) -> int:
        """How many rows."""
        return len(self.reference.rows)

    @property
    def has_tail(self) -> bool:
        """Whether a row has tokens in the live tail, behind the sealed segments."""
        return any(row is not None and row.count > row.tail for row in self.reference.rows)

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
        rows = (None,) * max(1, len(pads))
        reference = Reference(recipe.visibility, rows, pads, recipe.schedule)
        handle = Handle(recipe(), reference, recipe.spec)
        return self.run(handle, [Append(max(pads) + 1)]) if pads else handle

    def decoded(
        self,
        spec: str | None,
        keys: mx.array,
        values: mx.array,
        cache: Any = None,
        offsets: Sequence[int] = (0,),
    ) -> tuple[np.ndarray, np.ndarray]:
        """What the codec makes of a block, read back right after appending it to an empty cache.

        A cache that ages would show the block raw: that of its codec alone is asked. A codec that
        learns is that of the ``cache``, and may depend on where the block is.
        """
        recipe = self.recipe.unpadded()
        tokens = keys.shape[2]
        if tokens == 0:
            return to_numpy(keys), to_numpy(values)
        codec = getattr(cache, "codec", None)
        if isinstance(codec, Codec) and codec.spec == spec and learns(codec):
            alone = caches.KV((), (), codec, body_part(Policy(), offsets))
            alone = caches.append(alone, keys, values)
            k, v = map(to_numpy, caches.fetch_columns(alone, ((0, tokens),)))
            return k, v
        elif recipe.ages:
            assert spec is not None, "a recipe that ages must say by which spec"
            cache = caches.empty(spec, raw_sinks=0)
        else:
            cache = recipe() if spec == recipe.spec else caches.convert(recipe(), spec)
        cache = caches.append(cache, keys, values)
        k, v = map(to_numpy, caches.fetch(cache, queries=tokens))
        assert k.shape == keys.shape, f"a block {keys.shape} was appended, {k.shape} came back"
        assert v.shape == values.shape, f"a block {values.shape} was appended, {v.shape} came back"
        return k, v

    def one(self, handle: Handle) -> Any:
        """The plain ``KV`` that a started cache stands for, of its tokens as they are shown."""
        dtypes, rows = [x.dtype for x in caches.fetch(handle.cache)], []
        for row, tokens in enumerate(handle.reference.rows):
            assert tokens is not None
            padding = (tokens.padding,) if tokens.padding else ()
            numbers = zip(handle.reference.shown(row), dtypes, strict=True)
            block = [from_numpy(x[None]).astype(dtype) for x, dtype in numbers]
            rows.append(caches.append(self.recipe.plain(padding)(), *block))
        return caches.concat(rows)

    def run(self, handle: Handle, history: Sequence[Verb]) -> Handle:
        """The handle after all verbs of a history."""
        for verb in history:
            handle = self.apply(handle, verb)
        return handle

    def apply(self, handle: Handle, verb: Verb) -> Handle:
        """The handle after a verb, made valid for it first."""
        return self.exactly(handle, self.resolve(verb, handle))

    def resolve(self, verb: Verb, *alike: Handle) -> Verb:
        """The verb with arguments that are valid for all of the handles, which have equal rows.

        A seal that must be refused, or would make an empty segment, appends nothing instead.
        """
        if isinstance(verb, Seal):
            fits = all(handle.sealable and handle.has_tail for handle in alike)
            return verb if fits else Append(0)
        return resolve(verb, *[handle.cache for handle in alike])

    def exactly(self, handle: Handle, verb: Verb) -> Handle:
        """The handle after a verb whose arguments are valid."""
        if isinstance(verb, Append):
            batch = handle.batch if handle.started or handle.batch > 1 else self.batch
            return self.append(handle, *self.shape.block(verb.seed, batch, verb.tokens))
        if isinstance(verb, Rollback):
            return self.rollback(handle, verb.amounts)
        if isinstance(verb, Convert):
            return self.convert(handle, verb.spec)
        if isinstance(verb, Seal):
            return self.seal(handle, verb.spec)
        if isinstance(verb, Take):
            return attrs.evolve(
                handle,
                cache=caches.take(handle.cache, list(verb.rows)),
                reference=handle.reference.take(verb.rows),
            )
        others = [
            self._like(handle, length, verb.seed + index)
            for index, length in enumerate(verb.lengths)
        ]
        return self.concat([*others, handle] if verb.front else [handle, *others])

    def _like(self, handle: Handle, tokens: int, seed: int) -> Handle:
        """A new cache of one row that can be batched with a handle; its tail has ``tokens``."""
        world = attrs.evolve(self, recipe=self.recipe.unpadded(), batch=1)
        other, rule = world.begin(), self.recipe.schedule
        spec = handle.codecs[bool(rule.first)]
        other = self.convert(other, spec) if other.spec != spec else other
        for index in range(len(rule.parts(spec)), len(handle.codecs)):
            few = max(1, self.recipe.sinks) + index
            other = self.append(other, *self.shape.block(seed + index, 1, few))
            other = self.seal(other, handle.codecs[index])
            if other.codecs != handle.codecs[: index + 1]:  # the raw parts were converted as well
                other = self.convert(other, spec)
        return self.append(other, *self.shape.block(seed, 1, tokens))

    def append(self, handle: Handle, keys: mx.array, values: mx.array) -> Handle:
        """Append a block."""
        tokens, cache = keys.shape[2], caches.append(handle.cache, keys, values)
        offsets = handle.reference.offsets
        reference = handle.reference.append(
            *self.decoded(handle.spec, keys, values, cache, offsets),
            raw_keys=to_numpy(keys),
            raw_values=to_numpy(values),
            spec=handle.spec,
        )
        return attrs.evolve(
            handle,
            cache=cache,
            reference=reference,
            block=tokens,
            largest=_largest(handle, reference, tokens),
            appended=handle.appended + tokens,
            dtypes=(keys.dtype, values.dtype),
        )

    def seal(self, handle: Handle, spec: str | None) -> Handle:
        """Freeze what there is; an ageing tail has no codec of its own to go on with."""
        if handle.reference.schedule.ages:
            spec = spec or handle.spec
        return attrs.evolve(
            handle,
            cache=self.recipe.seal(handle.cache, spec),
            reference=handle.reference.seal(),
            spec=spec or handle.spec,
            sealed=handle.codecs,
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
        """Convert; a side whose codec stays keeps its numbers, the other is decoded and encoded.

        Tokens that are raw stay raw: what they will be encoded as is made of the raw numbers.
        """
        assert spec is not None
        rule, cache = handle.reference.schedule, caches.convert(handle.cache, spec)
        rows = []
        for index, row in enumerate(handle.reference.rows):
            if row is not None:
                keys, values = map(from_numpy, row.shown(rule))
                new = self.decoded(
                    spec,
                    keys[None].astype(self.shape.key_dtype),
                    values[None].astype(self.shape.value_dtype),
                    _only(cache, index),
                )
                kept = row.is_encoded(rule) & _stays(row.codecs, spec)
                row = row.recoded(new[0][0], new[1][0], kept, spec)
            rows.append(row)
        return attrs.evolve(
            handle,
            cache=cache,
            reference=attrs.evolve(handle.reference, rows=tuple(rows)),
            spec=spec,
            sealed=(spec,) * len(handle.sealed),
        )

    def concat(
        self, handles: Sequence[Handle], join: Callable[[list[Any]], Any] = caches.concat
    ) -> Handle:
        """Batch handles of the same codecs."""
        first = handles[0]
        return attrs.evolve(
            first,
            cache=join([handle.cache for handle in handles]),
            reference=first.reference.concat(*[handle.reference for handle in handles[1:]]),
            block=min(handle.block for handle in handles),
            largest=max(handle.largest for handle in handles),
            appended=sum(handle.appended for handle in handles),
            dtypes=next((handle.dtypes for handle in handles if handle.dtypes), ()),
        )


def _only(cache: Any, row: int) -> Any:
    """The cache of one row of a batch, if what its codec has learnt may differ by row."""
    codec = getattr(cache, "codec", None)
    return caches.take(cache, [row]) if isinstance(codec, Codec) and learns(codec) else cache


def _largest(handle: Handle, after: Reference, tokens: int) -> int:
    """What a buffer may hold a whole block for: the last append that had any tokens.

    With a residual the encoded tokens are written only when a block is old enough: until then they
    may still lie as a large one brought them.
    """
    before = handle.reference.encoded
    if (
        handle.reference.schedule.residual
        and before * (len(after.rows) // len(before)) == after.encoded
    ):
        return max(tokens, handle.largest)
    return tokens or handle.largest


def _stays(codecs: Sequence[str | None], spec: str) -> np.ndarray:
    """``[2, n]``: whether the keys, and the values, of each token are in the codec of ``spec``."""
    after = Codec.of(spec)
    stays = np.zeros((2, len(codecs)), bool)
    for token, before in enumerate(codecs):
        if before is not None:
            codec = Codec.of(before)
            stays[0, token] = codec.keys.spec == after.keys.spec
            stays[1, token] = codec.values.spec == after.values.spec
    return stays


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
