"""Sealed segments and a live tail: one sequence whose parts are stored in different ways."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import attrs
import mlx.core as mx

from .. import planes as p
from ..codecs import Codec, calibrated, chosen, has_learnt, learns, learnt_from
from ..errors import GeometryError, ShapeError
from ..geometry import (
    Ageing,
    ChainPlan,
    Geometry,
    JoinedMask,
    Mask,
    Policy,
    Segments,
    body_part,
    check_sealable,
    for_kernel,
    stride,
)
from ..kernels import merge, sink_part
from ..record import record, replace, static
from . import _kv
from . import _verbs as verbs
from ._kv import KV, Layout


@record
class Chain:
    """Segments that are no longer written, and a tail that is; each may have its own codec.

    Three uses of one record: a **residual window** (the past encoded in whole blocks, the newest
    tokens as they came), **raw sinks** (the first tokens as they came), and a prefix that was
    sealed (:func:`seal`), whatever its codec. Attention reads every part with the arithmetic of its
    codec; the parts are merged exactly by their log-sum-exp.

    With ageing the last segment takes the oldest tokens of the tail, a block at a time. What is
    encoded stays encoded: a rollback into a segment cuts it, and the tokens that follow begin in
    the tail again.

    Build one with :func:`kvfun.empty` or :func:`seal`.

    >>> import kvfun
    >>> k = mx.zeros((1, 2, 200, 64))
    >>> chain = kvfun.append(kvfun.empty("kv4", residual=32, block=32, raw_sinks=4), k, k)
    >>> [kvfun.offsets(part) for part in chain.parts]
    [(4,), (164,), (200,)]
    """

    segments: tuple[KV, ...]
    tail: KV
    policy: Policy = static(factory=Policy)
    front: int = static(default=0)
    """The first segment takes the positions below this one, and no others."""
    ageing: Ageing | None = static(default=None)
    padding: int = static(default=0, repr=False)
    """The most left padding a row began with."""

    @property
    def parts(self) -> tuple[KV, ...]:
        """The segments and the tail."""
        return (*self.segments, self.tail)

    @property
    def geometry(self) -> Segments:
        """Where every position is."""
        parts = [part.geometry for part in self.segments]
        return Segments(self.policy, (*parts, self.tail.geometry), self.front, self.ageing)

    @property
    def layout(self) -> Layout | None:
        """The shape of what the chain accepts, known from the first append on."""
        return next((part.layout for part in reversed(self.parts) if part.layout is not None), None)

    @property
    def codec(self) -> Codec:
        """The codec that new tokens end up in."""
        return self.tail.codec if self.ageing is None else self.segments[-1].codec

    def with_parts(self, parts: Sequence[KV]) -> Chain:
        """The chain of other parts."""
        *segments, tail = parts
        return replace(self, segments=tuple(segments), tail=tail)


def seal(cache: KV | Chain, spec: str | Codec | None = None) -> Chain:
    """A chain that starts with all that a cache holds: nothing is copied, nothing encoded.

    Tokens appended from now on go to a tail of their own.

    Args:
        cache: the cache; every row must have its sinks, and no padding to come.
        spec: the codec of the tail, by default the one that the cache's tokens end up in.

    Raises:
        SpecError, GeometryError: an unknown spec, or rows that cannot be sealed.

    >>> import kvfun
    >>> k = mx.zeros((1, 2, 5, 64))
    >>> prefix = kvfun.append(kvfun.empty("kv4"), k, k)
    >>> [part.codec.spec for part in seal(prefix, "bf16").parts]
    ['kv4', 'bf16']
    """
    if not isinstance(cache, KV | Chain):
        raise ShapeError(f"only a KV or a Chain can be sealed, not a {type(cache).__name__}")
    parts = cache.parts if isinstance(cache, Chain) else (cache,)
    codec = cache.codec if spec is None else Codec.of(spec)
    geometry = cache.geometry
    check_sealable(geometry)
    offsets = [row.offset for row in geometry.rows]
    tail = KV((), (), _taught(codec, parts), body_part(geometry.policy, offsets))
    return Chain(parts, tail, geometry.policy)


# -- append ---------------------------------------------------------------------------------------


@verbs.append.register(Chain)
def _append(chain: Chain, keys: mx.array, values: mx.array) -> Chain:
    layout = _accepted(chain, keys, values)
    length = keys.shape[2]
    if not length:
        tail = verbs.append(chain.tail, keys, values)
        return chain if tail is chain.tail else replace(chain, tail=tail)
    plan, after = chain.geometry.advance(length)
    if plan.front is None and plan.seal is None:
        return replace(chain, tail=verbs.append(chain.tail, keys, values))
    return chain.with_parts(_written(chain, plan, after, layout, keys, values))


def _accepted(chain: Chain, keys: mx.array, values: mx.array) -> Layout:
    """The layout that a block has, if every part can store it."""
    if chain.tail.layout is not None:
        return _kv.accepted(chain.tail, keys, values)
    layouts = [_kv.accepted(part, keys, values) for part in chain.parts]
    return layouts[-1]


def _written(
    chain: Chain,
    plan: ChainPlan,
    after: Segments,
    layout: Layout,
    keys: mx.array,
    values: mx.array,
) -> list[KV]:
    """The parts after a plan: first the block, then what leaves the tail."""
    parts = list(chain.parts)
    if plan.front is not None:
        front = _put(parts[0], plan.front, after.parts[0], layout, keys, values)
        _learn(parts, front, chain.ageing is not None)
        parts[0] = _trimmed(front, chain.front)
    if plan.seal is None:
        parts[-1] = _put(parts[-1], plan.tail, after.parts[-1], layout, keys, values)
        return parts
    tail = _put(parts[-1], plan.tail, parts[-1].geometry, layout, keys, values)
    gather, past, keep = plan.seal
    old = _kv.decoded(
        tail,
        tuple([p.lay_out(plane, gather) for plane in tail.keys]),
        tuple([p.lay_out(plane, gather) for plane in tail.values]),
    )
    parts[-2] = _put(parts[-2], past, after.parts[-2], layout, *old)
    # Fewer columns are kept than the new buffers have, so these are no views of the old ones.
    kept = [tuple([p.lay_out(x, keep) for x in side]) for side in (tail.keys, tail.values)]
    parts[-1] = replace(tail, keys=kept[0], values=kept[1], geometry=after.parts[-1])
    return parts


def _learn(parts: list[KV], front: KV, ages: bool) -> None:
    """What rows that have all of their raw first tokens by now tell the codec of the next part."""
    index = -2 if ages else -1
    if len(parts) == 2 + ages:
        before = parts[0].geometry.expanded(_kv.filled(front, "append").batch)
        codec = _learnt(parts[index].codec, front, [row.offset for row in before])
        parts[index] = replace(parts[index], codec=codec)


def _learnt(codec: Codec, front: KV, offsets: Sequence[int]) -> Codec:
    """The codec with what raw first tokens tell it, of rows that did not have all of them before.

    Args:
        codec: of what comes after them.
        front: the part of the first tokens.
        offsets: how many of them each row had.
    """
    full = front.geometry.policy.sinks
    start, stop = learnt_from(full)
    batch = _kv.filled(front, "append").batch
    now = [row.offset for row in front.geometry.expanded(batch)]
    complete = [was < full <= row for was, row in zip(offsets, now, strict=True)]
    if not learns(codec) or not any(complete):
        return codec
    keys, values = verbs.fetch_columns(front, ((start, stop),))
    ones, positions = mx.ones((1, 1, stop - start, 1), mx.bool_), mx.arange(start, stop)
    new = calibrated(codec, keys, values, ones, positions[None, None])
    return new if all(complete) else chosen(new, codec, mx.array(complete))


def _taught(codec: Codec, parts: Sequence[KV]) -> Codec:
    """The codec of all parts, with what the first of them that holds any tokens tells it."""
    for part in parts:
        if part.layout is not None and part.geometry.used:
            columns = ((0, part.geometry.used),)
            return _kv.learnt(codec, part, *verbs.fetch_columns(part, columns))
    return codec


def _put(
    part: KV, plan, geometry: Geometry, layout: Layout, keys: mx.array, values: mx.array
) -> KV:
    """A part after its plan for a block; shapes come with the first."""
    layout = _kv.for_codec(layout, part.codec) if part.layout is None else part.layout
    return _kv.written(part, plan, geometry, layout, keys, values)


def _trimmed(part: KV, columns: int) -> KV:
    """A front that is full, without spare columns."""
    geometry = trimmed(part.geometry, columns)
    if geometry is part.geometry:
        return part
    return replace(
        part,
        keys=p.detach(p.read(part.keys, [(0, columns)])),
        values=p.detach(p.read(part.values, [(0, columns)])),
        geometry=geometry,
    )


def trimmed(geometry: Geometry, columns: int) -> Geometry:
    """The same of a front's geometry."""
    full = all(row.offset >= columns for row in geometry.rows)
    if not full or geometry.capacity <= columns:
        return geometry
    return attrs.evolve(geometry, capacity=columns)


# -- reads ----------------------------------------------------------------------------------------


def _filled(chain: Chain, verb: str) -> Layout:
    layout = chain.layout
    if layout is None:
        raise ShapeError(f"{verb}: the cache is empty, so its shapes are not known yet")
    return layout


def _counted(chain: Chain, queries: int) -> int:
    seen = max(row.offset for row in chain.geometry.rows)
    return _kv.counted(queries, seen + chain.padding, seen)


@verbs.fetch.register(Chain)
def _fetch(chain: Chain, *, queries: int = 1) -> tuple[mx.array, mx.array]:
    _filled(chain, "fetch")
    _kv.at_least_one(queries)
    return _read(chain, chain.geometry.spans(queries))


@verbs.fetch_columns.register(Chain)
def _read(chain: Chain, columns: Sequence[Sequence[tuple[int, int]]]) -> tuple[mx.array, mx.array]:
    """The columns of all parts, in one dtype, whichever of them hold any."""
    layout = _filled(chain, "fetch")
    read = [
        verbs.fetch_columns(part, runs)
        if part.layout is not None and runs
        else _kv.fetch_nothing(part.codec, layout)
        for part, runs in zip(chain.parts, columns, strict=True)
    ]
    keys, values = zip(*read, strict=True)
    return mx.concatenate(list(keys), axis=2), mx.concatenate(list(values), axis=2)


@verbs.attend.register(Chain)
def _attend(
    chain: Chain,
    queries: mx.array,
    *,
    scale=None,
    phase="decode",
    kernels=None,
    sinks=None,
    mask=None,
) -> mx.array | tuple[mx.array, mx.array]:
    length = _kv.fitting(_filled(chain, "attend"), queries, phase)
    _counted(chain, length)
    geometry = chain.geometry
    options = {"scale": scale, "phase": phase, "kernels": kernels, "sinks": sinks}
    columns = geometry.spans(length)
    if mask is not None:
        mask = _kv.own_mask(chain, mask, length)
    elif phase == "committed" and length > 1:
        then = [geometry.earlier(n) for n in reversed(range(length))]
        return _kv.one_by_one([_at(chain, g) for g in then], queries, **options)
    else:
        mask = geometry.mask(length)
    return _attend_columns(chain, queries, columns, mask, **options)


@verbs.attend_columns.register(Chain)
def _attend_columns(
    chain: Chain,
    queries: mx.array,
    columns: Sequence[Sequence[tuple[int, int]]],
    mask=None,
    *,
    scale: float | None = None,
    phase: str = "decode",
    kernels: Mapping[str, Callable[..., mx.array]] | None = None,
    sinks: mx.array | None = None,
) -> mx.array | tuple[mx.array, mx.array]:
    if sinks is not None:
        _kv.check_sinks(sinks, queries.shape[1])
    masks = masks_of(mask, queries.shape[2], [stride(runs) for runs in columns])
    reads = [
        (part, runs, mask)
        for part, runs, mask in zip(chain.parts, columns, masks, strict=True)
        if stride(runs)
    ]
    if not reads:
        raise ShapeError("no row holds a token that its queries see")
    options = {"scale": scale, "kernels": kernels}
    if len(reads) == 1:
        ((part, runs, mask),) = reads
        return verbs.attend_columns(part, queries, runs, mask, phase=phase, sinks=sinks, **options)
    partials = [
        verbs.attend_columns(part, queries, runs, mask, phase="partial", **options)
        for part, runs, mask in reads
    ]
    if sinks is not None:
        partials.append(sink_part(sinks, partials[0]))
    out, lse = merge(partials)
    return (out, lse) if phase == "partial" else out.astype(queries.dtype)


def masks_of(mask: object, queries: int, counts: Sequence[int]) -> list:
    """A mask over the columns of all parts, cut into that of each."""
    if mask is None:
        return [None] * len(counts)
    if isinstance(mask, JoinedMask):
        return [for_kernel(part) for part in mask.parts]
    total, done, cut = sum(counts), 0, []
    for count in counts:
        cut.append(_piece(mask, queries, total, done, done + count))
        done += count
    return cut


def _piece(mask, queries: int, total: int, start: int, stop: int):
    """The mask of columns ``[start, stop)`` of ``total``."""
    if isinstance(mask, str):
        if stop <= total - queries + 1:
            return None
        return mask if stop == total else partial(_causal, total - queries - start)
    if callable(mask):
        return lambda first, last, a, b: mask(first, last, start + a, start + b)
    return mask if mask.shape[-1] == 1 else mask[..., start:stop]


def _causal(last: int, first_query: int, stop_query: int, start: int, stop: int) -> mx.array:
    """A block of the mask whose query ``i`` sees the columns up to ``last + i``."""
    return mx.arange(start, stop)[None] <= last + mx.arange(first_query, stop_query)[:, None]


@verbs.mask.register(Chain)
def _mask(chain: Chain, queries: int = 1) -> Mask:
    return chain.geometry.mask(_counted(chain, queries))


# -- rollback, conversion, rows -------------------------------------------------------------------


@verbs.rollback.register(Chain)
def _rollback(chain: Chain, tokens: int | Sequence[int]) -> Chain:
    after = chain.geometry.rolled_back(_kv.counts_of(tokens, _batch_size(chain)))
    return chain if chain.layout is None else _at(chain, after)


def _at(chain: Chain, geometry: Segments) -> Chain:
    """The same arrays under another geometry."""
    parts = zip(chain.parts, geometry.parts, strict=True)
    return chain.with_parts([replace(part, geometry=g) for part, g in parts])


@verbs.max_rollback.register(Chain)
def _max_rollback(chain: Chain) -> tuple[int, ...]:
    return _per_row(chain, chain.geometry.max_rollback())


@verbs.with_reserve.register(Chain)
def _with_reserve(chain: Chain, tokens: int) -> Chain:
    """A part that drops nothing has no use for a reserve."""
    parts = [
        part if part.geometry.policy.limit is None else verbs.with_reserve(part, tokens)
        for part in chain.parts
    ]
    policy = attrs.evolve(chain.policy, reserve=tokens)
    return replace(chain.with_parts(parts), policy=policy)


@verbs.convert.register(Chain)
def _convert(chain: Chain, spec: str | Codec) -> Chain:
    """What stays as it came stays: the front, and with ageing the tail."""
    live = chain.tail if chain.ageing is None else chain.segments[-1]
    codec = _kv.kept(chain.codec, Codec.of(spec))
    if not chain.front:
        codec = _taught(codec, chain.parts)
    elif chain.segments[0].layout is not None and not has_learnt(codec):
        codec = _learnt(codec, chain.segments[0], (0,) * _batch_size(chain))
    if live.geometry.used:  # what is encoded in it stays, and so does what new tokens go by
        codec = _kv.kept(chain.codec, codec)
    kept = {0} if chain.front else set()
    kept |= {len(chain.segments)} if chain.ageing is not None else set()
    return chain.with_parts(
        [
            part if index in kept else verbs.convert(part, codec)
            for index, part in enumerate(chain.parts)
        ]
    )


@verbs.batch_size.register(Chain)
def _batch_size(chain: Chain) -> int:
    layout = chain.layout
    return chain.geometry.batch if layout is None else layout.batch


def _per_row(chain: Chain, numbers: tuple[int, ...]) -> tuple[int, ...]:
    return numbers if len(numbers) > 1 else numbers * _batch_size(chain)


@verbs.offsets.register(Chain)
def _offsets(chain: Chain) -> tuple[int, ...]:
    return _per_row(chain, tuple(row.offset for row in chain.geometry.rows))


@verbs.size.register(Chain)
def _size(chain: Chain) -> int:
    return chain.geometry.size


@verbs.take.register(Chain)
def _take(chain: Chain, rows: Sequence[int]) -> Chain:
    batch = _batch_size(chain)
    rows = _kv.rows_of(rows, batch)
    return _trimmed_front(
        chain.with_parts([verbs.take(_spread(part, batch), rows) for part in chain.parts])
    )


@verbs.join.register(Chain)
def _join(*chains: Chain) -> Chain:
    first = chains[0]
    for other in chains[1:]:
        for name in ("policy", "front", "ageing"):
            have, got = getattr(first, name), getattr(other, name)
            if have != got:
                raise GeometryError(f"cannot batch chains of {name} {have} and {got}")
        if len(other.parts) != len(first.parts):
            raise GeometryError(
                f"cannot batch chains of {len(first.parts)} and {len(other.parts)} parts"
            )
    parts = zip(
        *[[_spread(part, _batch_size(chain)) for part in chain.parts] for chain in chains],
        strict=True,
    )
    joined = replace(
        first.with_parts([verbs.join(*column) for column in parts]),
        padding=max(chain.padding for chain in chains),
    )
    return _trimmed_front(joined)


def _spread(part: KV, batch: int) -> KV:
    """A part that was never written knows no batch: a row for each of the chain's."""
    if part.layout is not None:
        return part
    rows = part.geometry.expanded(batch)
    return replace(part, geometry=attrs.evolve(part.geometry, rows=rows))


def _trimmed_front(chain: Chain) -> Chain:
    if not chain.front or chain.segments[0].layout is None:
        return chain
    front, *rest = chain.segments
    return replace(chain, segments=(_trimmed(front, chain.front), *rest))
