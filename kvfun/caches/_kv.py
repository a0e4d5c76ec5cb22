"""The plain sequence of keys and values: one row or many, full, sliding, chunked, with sinks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import attrs
import mlx.core as mx

from .. import planes as p
from ..codecs import Codec
from ..errors import CodecError, DTypeError, GeometryError, PhaseError, ShapeError
from ..geometry import (
    Geometry,
    Mask,
    MaskArray,
    Policy,
    Relayout,
    concat_layout,
    mask_array,
    stride,
)
from ..kernels import kernels_for
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

    def tokens(self, keys: mx.array, values: mx.array) -> int:
        """How many tokens a block holds, -1 if it does not fit."""
        batch, heads, tokens, _ = shape = keys.shape
        fits = (
            shape == (self.batch, self.kv_heads, tokens, self.head_dim)
            and values.shape == (batch, heads, tokens, self.value_dim)
            and keys.dtype == self.key_dtype
            and values.dtype == self.value_dtype
        )
        return tokens if fits else -1


@record
class KV:
    """Encoded keys and values of a batch of sequences.

    Build one with :func:`kvfun.empty`.

    >>> import kvfun
    >>> k = mx.zeros((1, 2, 5, 64))
    >>> kvfun.append(kvfun.empty("kv8", window=4), k, k)
    KV(
      keys=(u32[1,2,256,16], f32[1,2,256,1], f32[1,2,256,1]),
      values=(u32[1,2,256,16], f32[1,2,256,1], f32[1,2,256,1]),
      codec=Codec('kv8'),
      geometry=Geometry(window=4, capacity=256, offsets=(5,), columns=((0, 5),))
    )
    """

    keys: Planes
    values: Planes
    codec: Codec
    geometry: Geometry = static()
    layout: Layout | None = static(default=None, repr=False)


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
        tokens = layout.tokens(keys, values) if layout is not None else -1
    except (AttributeError, ValueError):  # not an array, or not of rank 4: said precisely below
        tokens = -1
    if tokens < 0:
        layout = _checked(cache, keys, values)
        tokens = keys.shape[2]
    if not tokens:
        return _shaped(cache, layout)
    codec, geometry = cache.codec, cache.geometry
    rows = geometry.rows
    new_keys = codec.keys.encode(keys, rows)
    new = new_keys + codec.values.encode(values, rows)
    step = geometry.step(tokens)
    if step is not None:
        column, geometry = step
        planes = p.write_at(cache.keys + cache.values, column, new)
    else:
        plan, geometry = geometry.advance(tokens)
        planes = p.write(cache.keys + cache.values, plan, new)
    split = len(new_keys)
    return KV(planes[:split], planes[split:], codec, geometry, layout)


def _shaped(cache: KV, layout: Layout | None) -> KV:
    """The cache after a block of no tokens: its shapes are known, if they were not."""
    if cache.layout is not None:
        return cache
    assert layout is not None
    keys, values = _one_zero(cache.codec, layout)
    plan, geometry = cache.geometry.advance(0)
    return KV(p.write((), plan, keys), p.write((), plan, values), cache.codec, geometry, layout)


def _one_zero(codec: Codec, layout: Layout) -> tuple[Planes, Planes]:
    """An encoded token of zeros: what planes look like. No codec has to know of empty blocks."""
    shape = (layout.batch, layout.kv_heads, 1)
    keys = mx.zeros((*shape, layout.head_dim), layout.key_dtype)
    values = mx.zeros((*shape, layout.value_dim), layout.value_dtype)
    return codec.keys.encode(keys), codec.values.encode(values)


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
    if 0 in (batch, kv_heads, head_dim):
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


def _at_least_one(queries: int) -> None:
    if isinstance(queries, bool) or not isinstance(queries, int) or queries < 1:
        raise ShapeError(f"queries must be an integer >= 1, not {queries!r}")


def _counted(cache: KV, queries: int) -> int:
    """``queries``, if so many tokens were appended (padding included)."""
    geometry = cache.geometry
    most = max(geometry.end(row) for row in geometry.rows)
    seen = max(row.offset for row in geometry.rows)
    _at_least_one(queries)
    if queries > max(most, seen):
        raise ShapeError(
            f"{queries} queries, but the cache holds {seen} tokens; append the queries' own "
            "keys and values first"
        )
    return queries


@verbs.fetch.register(KV)
def _fetch(cache: KV, *, queries: int = 1) -> tuple[mx.array, mx.array]:
    layout = cache.layout or _filled(cache, "fetch")
    if queries != 1:
        _at_least_one(queries)
    spans = cache.geometry.spans(queries)
    if not spans:
        return _fetch_nothing(cache.codec, layout)
    return decoded(cache, p.read(cache.keys, spans), p.read(cache.values, spans))


def decoded(cache: KV, keys: Planes, values: Planes) -> tuple[mx.array, mx.array]:
    """What planes read from a cache stand for, ``[batch, kv_heads, columns, dim]``."""
    codec, layout = cache.codec, cache.layout
    k, v = codec.keys.decode(keys), codec.values.decode(values)
    if layout is not None and layout.padded:
        return _cut(k, layout.head_dim), _cut(v, layout.value_dim)
    return k, v


def _fetch_nothing(codec: Codec, layout: Layout) -> tuple[mx.array, mx.array]:
    keys, values = _one_zero(codec, layout)
    return (
        _cut(codec.keys.decode(keys), layout.head_dim)[:, :, :0],
        _cut(codec.values.decode(values), layout.value_dim)[:, :, :0],
    )


def _cut(x: mx.array, dim: int) -> mx.array:
    return x if x.shape[-1] == dim else x[..., :dim]


@verbs.attend.register(KV)
def _attend(
    cache: KV, queries: mx.array, *, scale=None, phase="decode", kernels=None, sinks=None, mask=None
) -> mx.array:
    length = _fitting(_filled(cache, "attend"), queries, phase)
    geometry = cache.geometry
    _counted(cache, length)
    if mask is None:
        spans = geometry.cover(length)
        described = geometry.mask(length, spans)
        mask = mask_array(described) if isinstance(described, MaskArray) else described
    else:
        spans = geometry.spans(length)
        mask = _own_mask(mask, length, spans)
    return attend_columns(
        cache, queries, spans, mask, scale=scale, phase=phase, kernels=kernels, sinks=sinks
    )


def attend_columns(
    cache: KV,
    queries: mx.array,
    spans: Sequence[tuple[int, int]],
    mask: mx.array | str | None,
    *,
    scale: float | None = None,
    phase: str = "decode",
    kernels: Mapping[str, Callable[..., mx.array]] | None = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """Attention over the columns of ``spans`` under a mask over them: ``attend``'s arithmetic.

    The shapes of ``queries`` and ``mask`` are the caller's business; the rest is as in
    :func:`kvfun.attend`.
    """
    layout, codec = _filled(cache, "attend"), cache.codec
    width = codec.keys.width(layout.head_dim)
    scale = layout.head_dim**-0.5 if scale is None else scale
    if sinks is not None:
        _check_sinks(sinks, queries.shape[1])
    if width != layout.head_dim:
        queries = mx.pad(queries, [(0, 0)] * 3 + [(0, width - layout.head_dim)])
    kernels = kernels_for(codec) if kernels is None else kernels
    name = "masked_window" if phase == "window" and isinstance(mask, mx.array) else phase
    if name not in kernels:
        raise PhaseError(f"the kernel set has no {name!r}; it has {sorted(kernels)}")
    out = kernels[name](
        queries,
        p.read(cache.keys, spans),
        p.read(cache.values, spans),
        codec,
        scale=scale,
        mask=mask,
        sinks=sinks,
    )
    return _cut(out, layout.value_dim)


def _own_mask(mask, queries: int, spans: Sequence[tuple[int, int]]) -> mx.array | str | None:
    """A caller's mask, if it fits the queries and the fetched columns."""
    if isinstance(mask, str) and mask in ("causal", "full"):
        return None if mask == "full" else mask
    if not isinstance(mask, mx.array):
        raise ShapeError(f"a mask is an array, 'causal' or 'full', not {mask!r}")
    columns = stride(spans)
    if not columns:
        raise ShapeError("a mask over no columns: all rows are still in their left padding")
    shape = mask.shape[-2:]
    fits = len(shape) == 2 and shape[0] in (1, queries) and shape[1] in (1, columns)
    if mask.ndim > 5 or not fits:
        raise ShapeError(
            f"the mask {tuple(mask.shape)} does not fit {queries} queries and {columns} columns, "
            f"those of fetch(cache, queries={queries})"
        )
    return mask


def _check_sinks(sinks: mx.array, heads: int) -> None:
    if not isinstance(sinks, mx.array):
        raise DTypeError(f"sinks must be an mlx array, not {type(sinks).__name__}")
    if sinks.shape != (heads,):
        raise ShapeError(f"sinks must be [heads] = ({heads},), not {tuple(sinks.shape)}")


def _fitting(layout: Layout, queries: mx.array, phase: str) -> int:
    """The number of queries a row, if they fit the cache and the phase."""
    if phase not in ("decode", "window"):
        raise PhaseError(f"phase must be 'decode' or 'window', not {phase!r}")
    if not isinstance(queries, mx.array):
        raise DTypeError(f"queries must be an mlx array, not {type(queries).__name__}")
    if not mx.issubdtype(queries.dtype, mx.floating):
        raise DTypeError(f"queries must be floating point, not {queries.dtype}")
    if queries.ndim != 4:
        raise ShapeError(f"queries must be [batch, heads, L, head_dim], not {tuple(queries.shape)}")
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
    if isinstance(tokens, int):
        counts = (tokens,)
    elif isinstance(tokens, Sequence) and not isinstance(tokens, str):
        counts, batch = tuple(tokens), _batch_size(cache)
        if len(counts) != batch:
            raise ShapeError(f"{len(counts)} counts {counts} for a batch of {batch} rows")
    else:
        raise ShapeError(f"tokens must be an integer, or a list of one a row, not {tokens!r}")
    geometry = cache.geometry.rolled_back(counts)
    return cache if cache.layout is None else replace(cache, geometry=geometry)


@verbs.max_rollback.register(KV)
def _max_rollback(cache: KV) -> tuple[int, ...]:
    return _per_row(cache, cache.geometry.max_rollback())


@verbs.convert.register(KV)
def _convert(cache: KV, spec: str | Codec) -> KV:
    new, old, layout = Codec.of(spec), cache.codec, cache.layout
    if layout is None:
        return replace(cache, codec=new)
    after = _for_codec(layout, new)
    return replace(
        cache,
        keys=_recoded(cache, cache.keys, old.keys, new.keys, layout.head_dim, layout.key_dtype),
        values=_recoded(
            cache, cache.values, old.values, new.values, layout.value_dim, layout.value_dtype
        ),
        codec=new,
        layout=after,
    )


def _recoded(cache: KV, planes: Planes, old, new, dim: int, dtype: mx.Dtype) -> Planes:
    if old.spec == new.spec:
        return planes
    geometry, used = cache.geometry, cache.geometry.used
    if not used:
        layout = cache.layout
        assert layout is not None
        zero = mx.zeros((layout.batch, layout.kv_heads, 1, dim), dtype)
        return p.zeros(new.encode(zero), layout.batch, geometry.capacity)
    decoded = _cut(old.decode(p.read(planes, [(0, used)])), dim).astype(dtype)
    relayout = Relayout.keeping(used, geometry.capacity)
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
    listed = isinstance(rows, Sequence) and len(rows) > 0
    if not listed or any(isinstance(r, bool) or not isinstance(r, int) for r in rows):
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
        p.join([_placed(c.keys, n, r, geometry, known[0].keys) for c, n, r in parts]),
        p.join([_placed(c.values, n, r, geometry, known[0].values) for c, n, r in parts]),
        first.codec,
        geometry,
        attrs.evolve(layout, batch=sum(batches)),
    )


def _placed(
    planes: Planes, batch: int, relayout: Relayout | None, geometry: Geometry, like: Planes
) -> Planes:
    """The planes of one part of a batch; zeros for a part that holds nothing yet."""
    if not planes:
        return p.zeros(like, batch, geometry.capacity)
    if relayout is None:
        return planes
    return tuple([p.lay_out(plane, relayout) for plane in planes])
