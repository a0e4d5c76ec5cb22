"""The plain sequence of keys and values: one row or many, full, sliding, chunked, with sinks."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import mlx.core as mx

from .. import planes as p
from ..codecs import Codec
from ..errors import CodecError, DTypeError, GeometryError, PhaseError, ShapeError
from ..geometry import Geometry, Mask, Policy, Relayout, concat_layout, mask_array
from ..kernels import PHASES, kernels_for
from ..planes import Planes
from ..record import record, replace, static
from . import _verbs as verbs


@attrs.frozen
class Layout:
    """The shape of what a cache accepts, known from the first append on."""

    batch: int
    kv_heads: int
    head_dim: int
    value_dim: int
    key_dtype: mx.Dtype
    value_dtype: mx.Dtype
    padded: bool = attrs.field(default=False, eq=False, repr=False)
    """Whether the codec stores more numbers than a vector has."""

    def accepts(self, keys: mx.array, values: mx.array) -> bool:
        """Whether a block fits."""
        batch, heads, length, _ = shape = keys.shape
        return (
            shape == (self.batch, self.kv_heads, length, self.head_dim)
            and values.shape == (batch, heads, length, self.value_dim)
            and keys.dtype == self.key_dtype
            and values.dtype == self.value_dtype
        )


@record
class KV:
    """Encoded keys and values of a batch of sequences.

    Build one with :func:`kvfun.empty`.
    """

    keys: Planes
    values: Planes
    codec: Codec
    geometry: Geometry = static()
    layout: Layout | None = static(default=None)


def empty(
    spec: str | Codec,
    *,
    window: int | None = None,
    sinks: int = 0,
    chunk: int | None = None,
    reserve: int = 0,
    left_padding: Sequence[int] | None = None,
) -> KV:
    """A cache that holds nothing yet; shapes and dtype come with the first append.

    Args:
        spec: a codec or its spec string, see :func:`kvfun.codecs.parse`.
        window: a sliding window of so many keys, the query's own included.
        sinks: the first positions that stay visible for ever.
        chunk: attention limited to the query's own chunk of positions.
        reserve: tokens that can be rolled back exactly at any time, though the window is full.
        left_padding: padding tokens in front of each row of the first blocks; never visible.

    Raises:
        SpecError, GeometryError: an unknown spec, or a number out of range.

    >>> import kvfun
    >>> kvfun.empty("kv4", window=128, sinks=4).codec.spec
    'kv4'
    """
    policy = Policy(window, sinks, chunk, reserve)
    return KV((), (), Codec.of(spec), Geometry.empty(policy, left_padding))


# -- append ---------------------------------------------------------------------------------------


@verbs.append.register(KV)
def _append(cache: KV, keys: mx.array, values: mx.array) -> KV:
    layout = cache.layout
    try:
        fits = layout is not None and layout.accepts(keys, values)
    except (AttributeError, ValueError):  # not an array, or not of rank 4: said precisely below
        fits = False
    if not fits:
        layout = _checked(cache, keys, values)
    codec, geometry = cache.codec, cache.geometry
    positions = geometry.rows
    plan, geometry = geometry.advance(keys.shape[2])
    new_keys, new_values = codec.keys.encode(keys, positions), codec.values.encode(values, positions)
    planes = p.write(cache.keys + cache.values, plan, new_keys + new_values)
    split = len(new_keys)
    return KV(planes[:split], planes[split:], codec, geometry, layout)


def _checked(cache: KV, keys: mx.array, values: mx.array) -> Layout:
    """The layout of a first block; for a later one, why it does not fit."""
    for name, array in (("keys", keys), ("values", values)):
        if not isinstance(array, mx.array):
            raise DTypeError(f"{name} must be an mlx array, not {type(array).__name__}")
        if array.ndim != 4:
            raise ShapeError(
                f"{name} must be [batch, kv_heads, tokens, head_dim], not {tuple(array.shape)}"
            )
        if not mx.issubdtype(array.dtype, mx.floating):
            raise DTypeError(f"{name} must be floating point, not {array.dtype}")
    if keys.shape[:3] != values.shape[:3]:
        raise ShapeError(
            f"keys {tuple(keys.shape)} and values {tuple(values.shape)} differ in batch, heads or "
            "tokens"
        )
    batch, kv_heads, _, head_dim = keys.shape
    new = Layout(batch, kv_heads, head_dim, values.shape[3], keys.dtype, values.dtype)
    if cache.layout is not None:
        _same(cache.layout, new)
        return cache.layout
    if 0 in (batch, kv_heads, head_dim, new.value_dim):
        raise ShapeError(f"empty axes: keys {tuple(keys.shape)}, values {tuple(values.shape)}")
    cache.geometry.expanded(batch)
    return _for_codec(new, cache.codec)


def _for_codec(layout: Layout, codec: Codec) -> Layout:
    """The layout under a codec that can store its vectors."""
    codec.keys.check(layout.head_dim)
    codec.values.check(layout.value_dim)
    widths = codec.keys.width(layout.head_dim), codec.values.width(layout.value_dim)
    return attrs.evolve(layout, padded=widths != (layout.head_dim, layout.value_dim))


def _same(layout: Layout, other: Layout) -> None:
    for field in attrs.fields(Layout):
        have, got = getattr(layout, field.name), getattr(other, field.name)
        if have != got:
            kind = DTypeError if field.name.endswith("dtype") else ShapeError
            raise kind(f"the cache has {field.name} {have}, got {got}")


# -- reads ----------------------------------------------------------------------------------------


def _filled(cache: KV, verb: str) -> Layout:
    if cache.layout is None:
        raise ShapeError(f"{verb}: the cache is empty, so its shapes are not known yet")
    return cache.layout


def _counted(cache: KV, queries: int) -> int:
    """``queries``, if so many tokens were appended (padding included)."""
    geometry = cache.geometry
    most = max(geometry.end(row) for row in geometry.rows)
    seen = max(row.offset for row in geometry.rows)
    if isinstance(queries, bool) or not isinstance(queries, int) or queries < 1:
        raise ShapeError(f"queries must be an integer >= 1, not {queries!r}")
    if queries > max(most, seen):
        raise ShapeError(
            f"{queries} queries, but the cache holds {seen} tokens; append the queries' own "
            "keys and values first"
        )
    return queries


@verbs.fetch.register(KV)
def _fetch(cache: KV, *, queries: int = 1) -> tuple[mx.array, mx.array]:
    layout = cache.layout or _filled(cache, "fetch")
    spans, codec = cache.geometry.spans(queries), cache.codec
    keys = codec.keys.decode(p.read(cache.keys, spans))
    values = codec.values.decode(p.read(cache.values, spans))
    if layout.padded:
        return _cut(keys, layout.head_dim), _cut(values, layout.value_dim)
    return keys, values


def _cut(x: mx.array, dim: int) -> mx.array:
    return x if x.shape[-1] == dim else x[..., :dim]


@verbs.attend.register(KV)
def _attend(
    cache: KV, queries: mx.array, *, scale=None, phase="decode", kernels=None, sinks=None, mask=None
) -> mx.array:
    layout = _filled(cache, "attend")
    length = _fitting(layout, queries, phase)
    geometry = cache.geometry
    _counted(cache, length)
    if mask is None:
        spans = geometry.cover(length)
        mask = geometry.mask(length, spans)
        if mask is not None and mask != "causal":
            mask = mask_array(mask)
    else:
        spans = geometry.spans(length)
    codec = cache.codec
    width = codec.keys.width(layout.head_dim)
    scale = layout.head_dim**-0.5 if scale is None else scale
    if width != layout.head_dim:
        queries = mx.pad(queries, [(0, 0)] * 3 + [(0, width - layout.head_dim)])
    kernels = kernels_for(codec) if kernels is None else kernels
    kernel = kernels["masked_window" if phase == "window" and _is_array(mask) else phase]
    out = kernel(
        queries,
        p.read(cache.keys, spans),
        p.read(cache.values, spans),
        codec,
        scale=scale,
        mask=mask,
        sinks=sinks,
    )
    return _cut(out, layout.value_dim)


def _is_array(mask) -> bool:
    return isinstance(mask, mx.array)


def _fitting(layout: Layout, queries: mx.array, phase: str) -> int:
    """The number of queries a row, if they fit the cache and the phase."""
    if phase not in ("decode", "window"):
        raise PhaseError(f"phase must be 'decode' or 'window', not {phase!r}")
    if queries.ndim != 4:
        raise ShapeError(
            f"queries must be [batch, heads, L, head_dim], not {tuple(queries.shape)}"
        )
    batch, heads, length, dim = queries.shape
    if batch != layout.batch or dim != layout.head_dim or heads % layout.kv_heads or not heads:
        raise ShapeError(
            f"queries {tuple(queries.shape)} do not fit a cache of batch {layout.batch}, "
            f"{layout.kv_heads} KV heads and head_dim {layout.head_dim}"
        )
    if phase == "decode" and length != 1:
        raise PhaseError(f"'decode' takes one query a row, not {length}; use phase='window'")
    return length


@verbs.mask.register(KV)
def _mask(cache: KV, queries: int = 1) -> Mask:
    return cache.geometry.mask(_counted(cache, queries))


# -- rollback, conversion -------------------------------------------------------------------------


@verbs.rollback.register(KV)
def _rollback(cache: KV, tokens: int | Sequence[int]) -> KV:
    counts = (tokens,) if isinstance(tokens, int) else tuple(tokens)
    if len(counts) not in (1, verbs.batch_size(cache)) or not isinstance(tokens, int) and (
        len(counts) != verbs.batch_size(cache)
    ):
        raise ShapeError(
            f"{len(counts)} counts for a batch of {verbs.batch_size(cache)} rows"
        )
    return replace(cache, geometry=cache.geometry.rolled_back(counts))


@verbs.max_rollback.register(KV)
def _max_rollback(cache: KV) -> tuple[int, ...]:
    return _per_row(cache, cache.geometry.max_rollback())


@verbs.convert.register(KV)
def _convert(cache: KV, spec: str | Codec) -> KV:
    new, old, layout = Codec.of(spec), cache.codec, cache.layout
    if layout is None:
        return replace(cache, codec=new)
    return replace(
        cache,
        keys=_recoded(cache, cache.keys, old.keys, new.keys, layout.head_dim, layout.key_dtype),
        values=_recoded(
            cache, cache.values, old.values, new.values, layout.value_dim, layout.value_dtype
        ),
        codec=new,
        layout=_for_codec(layout, new),
    )


def _recoded(cache: KV, planes: Planes, old, new, dim: int, dtype: mx.Dtype) -> Planes:
    if old.spec == new.spec:
        return planes
    geometry = cache.geometry
    used = max(0, *(geometry.end(row) for row in geometry.rows))
    decoded = _cut(old.decode(p.read(planes, [(0, used)])), dim).astype(dtype)
    relayout = Relayout(geometry.capacity, ((None, ((0, used, 0),) if used else ()),))
    encoded = new.encode(decoded, geometry.rows)
    return tuple([p.lay_out(plane, relayout) for plane in encoded])


# -- rows -----------------------------------------------------------------------------------------


@verbs.batch_size.register(KV)
def _batch_size(cache: KV) -> int:
    return len(cache.geometry.rows) if cache.layout is None else cache.layout.batch


def _per_row(cache: KV, numbers: tuple[int, ...]) -> tuple[int, ...]:
    return numbers if len(numbers) > 1 else numbers * _batch_size(cache)


@verbs.offsets.register(KV)
def _offsets(cache: KV) -> tuple[int, ...]:
    return _per_row(cache, tuple(row.offset for row in cache.geometry.rows))


@verbs.size.register(KV)
def _size(cache: KV) -> int:
    return cache.geometry.size


@verbs.take.register(KV)
def _take(cache: KV, rows: Sequence[int]) -> KV:
    batch = _batch_size(cache)
    rows = list(rows)
    if not rows or any(isinstance(r, bool) or not isinstance(r, int) for r in rows):
        raise ShapeError(f"take needs a list of row numbers, not {rows!r}")
    if any(not -batch <= row < batch for row in rows):
        raise ShapeError(f"rows {rows} of a batch of {batch}")
    rows = [row % batch for row in rows]
    if cache.layout is None:
        chosen = tuple(cache.geometry.expanded(batch)[row] for row in rows)
        return replace(cache, geometry=attrs.evolve(cache.geometry, rows=chosen))
    relayout, geometry = cache.geometry.taken(rows, batch)
    if relayout is None:
        keys, values = p.gather(cache.keys, rows), p.gather(cache.values, rows)
    else:
        keys = p.detach(tuple([p.lay_out(plane, relayout) for plane in cache.keys]))
        values = p.detach(tuple([p.lay_out(plane, relayout) for plane in cache.values]))
    layout = attrs.evolve(cache.layout, batch=len(rows))
    return replace(cache, keys=keys, values=values, geometry=geometry, layout=layout)


@verbs.join.register(KV)
def _join(*caches: KV) -> KV:
    first = caches[0]
    for cache in caches[1:]:
        if cache.codec.spec != first.codec.spec:
            raise CodecError(
                f"cannot batch {first.codec.spec} with {cache.codec.spec}; convert one first"
            )
        if cache.geometry.policy != first.geometry.policy:
            raise GeometryError(
                f"cannot batch {first.geometry.policy} with {cache.geometry.policy}"
            )
    known = [cache for cache in caches if cache.layout is not None]
    batches = [_batch_size(cache) for cache in caches]
    if not known:
        rows = tuple(row for cache in caches for row in cache.geometry.rows)
        return replace(first, geometry=attrs.evolve(first.geometry, rows=rows))
    layout = known[0].layout
    assert layout is not None
    for cache in known[1:]:
        assert cache.layout is not None
        _same(attrs.evolve(layout, batch=cache.layout.batch), cache.layout)
    relayouts, geometry = concat_layout([cache.geometry for cache in caches], batches)
    parts = list(zip(caches, batches, relayouts, strict=True))
    return KV(
        p.join([_placed(c.keys, n, r, known[0].keys) for c, n, r in parts]),
        p.join([_placed(c.values, n, r, known[0].values) for c, n, r in parts]),
        first.codec,
        geometry,
        attrs.evolve(layout, batch=sum(batches)),
    )


def _placed(planes: Planes, batch: int, relayout: Relayout | None, like: Planes) -> Planes:
    """The planes of one part of a batch; zeros for a part that holds nothing yet."""
    if relayout is None:
        return planes
    if not planes:
        return p.zeros(like, batch, relayout.capacity)
    return tuple([p.lay_out(plane, relayout) for plane in planes])
