"""The plain sequence of keys and values: one row or many, full, sliding, chunked, with sinks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs
import mlx.core as mx

from .. import planes as p
from ..codecs import (
    Codec,
    Plain,
    VectorCodec,
    calibrated,
    has_learnt,
    joined,
    learns,
    learnt_from,
    of_rows,
    unlearnt,
)
from ..errors import CodecError, DTypeError, GeometryError, PhaseError, ShapeError
from ..geometry import (
    Geometry,
    Mask,
    Plan,
    Relayout,
    concat_layout,
    for_kernel,
)
from ..kernels import kernels_for
from ..planes import Planes
from ..record import record, replace, static
from . import _verbs as verbs
from ._extents import own_columns, width

READS = ("decode", "window", "committed", "partial")
"""The phases a caller may name; ``masked_window`` follows from the mask."""


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


# -- append ---------------------------------------------------------------------------------------


@verbs.append.register(KV)
def _append(cache: KV, keys: mx.array, values: mx.array) -> KV:
    layout = accepted(cache, keys, values)
    tokens = keys.shape[2]
    if not tokens:
        return _shaped(cache, layout)
    codec, geometry = cache.codec, cache.geometry
    step = geometry.step(tokens)
    if step is None:
        plan, geometry = geometry.advance(tokens)
        return written(cache, plan, geometry, layout, keys, values)
    starts = (geometry.rows[0].offset,)
    column, geometry = step
    new_keys = codec.keys.encode(keys, starts)
    new = new_keys + codec.values.encode(values, starts)
    planes = p.write_at(cache.keys + cache.values, column, new)
    split = len(new_keys)
    return KV(planes[:split], planes[split:], codec, geometry, layout)


def accepted(cache: KV, keys: mx.array, values: mx.array) -> Layout:
    """The cache's layout, or with a first block the one it comes to have.

    Raises:
        ShapeError, DTypeError, CodecError: a block that does not fit.
    """
    layout = cache.layout
    try:
        if layout is not None and layout.tokens(keys, values) >= 0:
            return layout
    except (AttributeError, ValueError):  # not an array, or not of rank 4: said precisely below
        pass
    return _checked(cache, keys, values)


def written(
    cache: KV,
    plan: Plan,
    geometry: Geometry,
    layout: Layout | None,
    keys: mx.array,
    values: mx.array,
) -> KV:
    """The cache after a plan of its geometry for a block."""
    codec, starts = cache.codec, geometry.starts(plan, keys.shape[0])
    new_keys = codec.keys.encode(keys, starts)
    new = new_keys + codec.values.encode(values, starts)
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
    return for_codec(new, cache.codec)


def for_codec(layout: Layout, codec: Codec) -> Layout:
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


def filled(cache: KV, verb: str) -> Layout:
    if cache.layout is None:
        raise ShapeError(f"{verb}: the cache is empty, so its shapes are not known yet")
    return cache.layout


def at_least_one(queries: int) -> None:
    if isinstance(queries, bool) or not isinstance(queries, int) or queries < 1:
        raise ShapeError(f"queries must be an integer >= 1, not {queries!r}")


def own_count(cache: KV, queries: int) -> int:
    """``queries``, if so many tokens were appended (padding included)."""
    geometry = cache.geometry
    most = max(geometry.end(row) for row in geometry.rows)
    seen = max(row.offset for row in geometry.rows)
    return counted(queries, max(most, seen), seen)


def counted(queries: int, most: int, seen: int) -> int:
    """``queries``, if a cache of ``seen`` tokens may be asked for so many (at most ``most``)."""
    at_least_one(queries)
    if queries > most:
        raise ShapeError(
            f"{queries} queries, but the cache holds {seen} tokens; append the queries' own "
            "keys and values first"
        )
    return queries


@verbs.fetch.register(KV)
def _fetch(cache: KV, *, queries: int = 1) -> tuple[mx.array, mx.array]:
    layout = cache.layout or filled(cache, "fetch")
    if queries != 1:
        at_least_one(queries)
    spans = cache.geometry.spans(queries)
    return _read(cache, spans) if spans else fetch_nothing(cache.codec, layout)


@verbs.fetch_columns.register(KV)
def _read(cache: KV, columns: Sequence[tuple[int, int]]) -> tuple[mx.array, mx.array]:
    codec, keys = _keys_at(cache, columns)
    return decoded(cache, keys, p.read(cache.values, columns), codec)


def _keys_at(cache: KV, columns: Sequence[tuple[int, int]]) -> tuple[Codec, Planes]:
    """The keys' planes in columns, and the codec that reads them.

    A codec that has to know positions gets them as one more plane, made for the read.
    """
    codec, keys = cache.codec, p.read(cache.keys, columns)
    if not getattr(codec.keys, "positional", False):
        return codec, keys
    runs = cache.geometry.positions(columns)
    end = max(1, *[row.offset for row in cache.geometry.rows])
    first, *others = runs
    run = None
    if len(first) == 1 and all(row == first for row in others):
        (one,) = first
        run = (one.start, one.stop) if one.start >= 0 and one.stop <= end else None
    codec = replace(codec, keys=codec.keys.bound(end, run))  # pyright: ignore
    return codec, (*keys, _as_array(runs)[..., None])


def positions_of(geometry: Geometry, columns: Sequence[tuple[int, int]]) -> mx.array:
    """The positions that columns are for, ``int32 [batch or 1, 1, columns]``."""
    return _as_array(geometry.positions(columns))


def _as_array(positions: Sequence[Sequence[range]]) -> mx.array:
    rows = []
    for runs in positions:
        parts = [mx.arange(run.start, run.stop, dtype=mx.int32) for run in runs]
        rows.append(parts[0] if len(parts) == 1 else mx.concatenate(parts or [mx.zeros(0)]))
    return mx.stack(rows)[:, None].astype(mx.int32)


def decoded(
    cache: KV, keys: Planes, values: Planes, codec: Codec | None = None
) -> tuple[mx.array, mx.array]:
    """What planes read from a cache stand for, ``[batch, kv_heads, columns, dim]``."""
    codec, layout = codec or cache.codec, cache.layout
    k, v = codec.keys.decode(keys), codec.values.decode(values)
    if layout is None:
        return k, v
    if layout.padded:
        k, v = _cut(k, layout.head_dim), _cut(v, layout.value_dim)
    return _as_fed(codec.keys, k, layout.key_dtype), _as_fed(codec.values, v, layout.value_dtype)


def _as_fed(codec: VectorCodec, x: mx.array, dtype: mx.Dtype) -> mx.array:
    """Decoded numbers in the dtype they came in; what is plain stays in the one it is stored in."""
    return x if isinstance(codec, Plain) else x.astype(dtype)


def fetch_nothing(codec: Codec, layout: Layout) -> tuple[mx.array, mx.array]:
    codec = Codec(unlearnt(codec.keys), codec.values)
    keys, values = _one_zero(codec, layout)
    k = _cut(codec.keys.decode(keys), layout.head_dim)[:, :, :0]
    v = _cut(codec.values.decode(values), layout.value_dim)[:, :, :0]
    return _as_fed(codec.keys, k, layout.key_dtype), _as_fed(codec.values, v, layout.value_dtype)


def _cut(x: mx.array, dim: int) -> mx.array:
    return x if x.shape[-1] == dim else x[..., :dim]


@verbs.attend.register(KV)
def _attend(
    cache: KV, queries: mx.array, *, scale=None, phase="decode", kernels=None, sinks=None, mask=None
) -> mx.array | tuple[mx.array, mx.array]:
    length = fitting(filled(cache, "attend"), queries, phase)
    geometry = cache.geometry
    own_count(cache, length)
    options = {"scale": scale, "phase": phase, "kernels": kernels, "sinks": sinks}
    if mask is not None:
        spans = geometry.spans(length)
        mask = own_mask(cache, mask, length)
        return _attend_columns(cache, queries, spans, mask, **options)
    spans = geometry.cover(length)
    described = geometry.mask(length, spans)
    if phase == "committed" and length > 1 and described != "causal":
        then = [geometry.earlier(n) for n in reversed(range(length))]
        return one_by_one([replace(cache, geometry=g) for g in then], queries, **options)
    return _attend_columns(cache, queries, spans, for_kernel(described), **options)


def one_by_one(caches: Iterable[Any], queries: mx.array, **options) -> mx.array:
    """Query ``i`` over the ``i``-th cache: the one that held its token last."""
    outs = [
        verbs.attend(cache, queries[:, :, index : index + 1], **options)
        for index, cache in enumerate(caches)
    ]
    return mx.concatenate(outs, axis=2)


@verbs.attend_columns.register(KV)
def _attend_columns(
    cache: KV,
    queries: mx.array,
    columns: Sequence[tuple[int, int]],
    mask=None,
    *,
    scale: float | None = None,
    phase: str = "decode",
    kernels: Mapping[str, Callable[..., mx.array]] | None = None,
    sinks: mx.array | None = None,
) -> mx.array | tuple[mx.array, mx.array]:
    layout = filled(cache, "attend")
    codec, keys = _keys_at(cache, columns)
    values = p.read(cache.values, columns)
    options: Any = {"scale": scale, "phase": phase, "kernels": kernels, "sinks": sinks}
    return attend_planes(queries, keys, values, codec, layout, mask, **options)


def attend_planes(
    queries: mx.array,
    keys: Planes,
    values: Planes,
    codec: Codec,
    layout: Layout,
    mask: Any = None,
    *,
    scale: float | None = None,
    phase: str = "decode",
    kernels: Mapping[str, Callable[..., mx.array]] | None = None,
    sinks: mx.array | None = None,
) -> mx.array | tuple[mx.array, mx.array]:
    """Attention over encoded planes, by the kernel of a phase; ``codec`` is one that reads them."""
    width = codec.keys.width(layout.head_dim)
    scale = layout.head_dim**-0.5 if scale is None else scale
    if sinks is not None:
        check_sinks(sinks, queries.shape[1])
    if width != layout.head_dim:
        queries = mx.pad(queries, [(0, 0)] * 3 + [(0, width - layout.head_dim)])
    kernels = kernels_for(codec, dtype=queries.dtype) if kernels is None else kernels
    plain = mask is None or isinstance(mask, str)
    kernel = kernel_of(kernels, phase if plain or phase != "window" else "masked_window")
    out = kernel(queries, keys, values, codec, scale=scale, mask=mask, sinks=sinks)
    if phase == "partial":
        return _cut(out[0], layout.value_dim), out[1]
    return _cut(out, layout.value_dim)


def kernel_of(kernels: Mapping[str, Callable[..., mx.array]], phase: str):
    """The kernel of a phase.

    Raises:
        PhaseError: the set has none.
    """
    if phase not in kernels:
        raise PhaseError(f"the kernel set has no {phase!r}; it has {sorted(kernels)}")
    return kernels[phase]


def own_mask(cache: Any, mask: Any, length: int, queries: int | None = None) -> Any:
    """A caller's mask, if it fits so many queries and the fetched columns.

    Args:
        cache: any record.
        mask: an array, ``"causal"`` or ``"full"``.
        length: how many queries attend.
        queries: the columns are those of ``fetch(cache, queries=queries)``; ``length`` by default.
    """
    queries = length if queries is None else queries
    named = isinstance(mask, str)
    if mask not in ("causal", "full") if named else not isinstance(mask, mx.array):
        raise ShapeError(f"a mask is an array, 'causal' or 'full', not {mask!r}")
    columns = width(cache, queries)
    if not columns:
        raise ShapeError("a mask over no columns: all rows are still in their left padding")
    if isinstance(mask, str):
        return own_columns(cache, queries) if mask == "full" else mask
    shape = mask.shape[-2:]
    fits = len(shape) == 2 and shape[0] in (1, length) and shape[1] in (1, columns)
    if mask.ndim > 5 or not fits:
        raise ShapeError(
            f"the mask {tuple(mask.shape)} does not fit {length} queries and {columns} columns, "
            f"those of fetch(cache, queries={queries})"
        )
    return mask


def check_sinks(sinks: mx.array, heads: int) -> None:
    if not isinstance(sinks, mx.array):
        raise DTypeError(f"sinks must be an mlx array, not {type(sinks).__name__}")
    if sinks.shape != (heads,):
        raise ShapeError(f"sinks must be [heads] = ({heads},), not {tuple(sinks.shape)}")


def fitting(layout: Layout, queries: mx.array, phase: str) -> int:
    """The number of queries a row, if they fit the cache and the phase."""
    if phase not in READS:
        raise PhaseError(f"phase must be one of {', '.join(READS)}, not {phase!r}")
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
    return cache.geometry.mask(own_count(cache, queries))


# -- rollback, conversion -------------------------------------------------------------------------


@verbs.rollback.register(KV)
def _rollback(cache: KV, tokens: int | Sequence[int]) -> KV:
    geometry = cache.geometry.rolled_back(counts_of(tokens, _batch_size(cache)))
    if cache.layout is None:
        return cache
    return KV(cache.keys, cache.values, cache.codec, geometry, cache.layout)


def counts_of(tokens: int | Sequence[int], batch: int) -> tuple[int, ...]:
    """One count for all rows, or one a row."""
    if isinstance(tokens, int):
        return (tokens,)
    if not isinstance(tokens, Sequence) or isinstance(tokens, str):
        raise ShapeError(f"tokens must be an integer, or a list of one a row, not {tokens!r}")
    if len(tokens) != batch:
        raise ShapeError(f"{len(tokens)} counts {tuple(tokens)} for a batch of {batch} rows")
    return tuple(tokens)


@verbs.max_rollback.register(KV)
def _max_rollback(cache: KV) -> tuple[int, ...]:
    return _per_row(cache, cache.geometry.max_rollback())


@verbs.with_reserve.register(KV)
def _with_reserve(cache: KV, tokens: int) -> KV:
    policy = attrs.evolve(cache.geometry.policy, reserve=tokens)
    return replace(cache, geometry=attrs.evolve(cache.geometry, policy=policy))


@verbs.convert.register(KV)
def _convert(cache: KV, spec: str | Codec) -> KV:
    new, old, layout = Codec.of(spec), cache.codec, cache.layout
    if layout is None:
        return replace(cache, codec=new if has_learnt(new) else kept(old, new))
    after, used = for_codec(layout, new), cache.geometry.used
    if not used:
        codec = new if has_learnt(new) else kept(old, new)
        keys, values = [
            planes if before is now else p.zeros(one, layout.batch, cache.geometry.capacity)
            for planes, before, now, one in zip(
                (cache.keys, cache.values),
                (old.keys, old.values),
                (codec.keys, codec.values),
                _one_zero(codec, layout),
                strict=True,
            )
        ]
        return replace(cache, keys=keys, values=values, codec=codec, layout=after)
    columns = ((0, used),)
    keys, values = _read(cache, columns)
    codec = kept(old, learnt(new, cache, keys, values))
    positions = positions_of(cache.geometry, columns)[:, 0]
    relayout = Relayout.keeping(used, cache.geometry.capacity)
    sides = [
        planes
        if before is now
        else tuple([p.lay_out(plane, relayout) for plane in now.encode(x.astype(dtype), positions)])
        for planes, before, now, x, dtype in (
            (cache.keys, old.keys, codec.keys, keys, layout.key_dtype),
            (cache.values, old.values, codec.values, values, layout.value_dtype),
        )
    ]
    return replace(cache, keys=sides[0], values=sides[1], codec=codec, layout=after)


def kept(old: Codec, new: Codec) -> Codec:
    """The new codec, but the old one of a side whose codec stays: what is encoded stays that."""
    sides = [
        have if have.spec == wanted.spec else wanted
        for have, wanted in ((old.keys, new.keys), (old.values, new.values))
    ]
    return Codec(*sides)


def learnt(codec: Codec, cache: KV, keys: mx.array, values: mx.array) -> Codec:
    """The codec with what it learns from all that the last token sees but the very first tokens.

    Args:
        codec: what the tokens are to be encoded by.
        cache: where they are.
        keys: its first columns, decoded.
        values: the same of the values.
    """
    if not learns(codec) or has_learnt(codec):
        return codec
    valid, positions = learnt_from_columns(cache.geometry, keys.shape[2])
    return calibrated(codec, keys, values, valid, positions)


def learnt_from_columns(geometry: Geometry, columns: int) -> tuple[mx.array, mx.array]:
    """Which of the first columns a codec learns from, and their positions.

    Returns:
        bool ``[batch or 1, 1, columns, 1]`` and ``int32 [batch or 1, 1, columns]``.
    """
    column, valid = mx.arange(columns), []
    for row in geometry.rows:
        start, _ = learnt_from(row.offset)
        seen = geometry.policy.lowest(row.offset - 1)
        low = max(row.first, seen, start) + row.shift
        valid.append((column >= low) & (column < geometry.end(row)))
    return mx.stack(valid)[:, None, :, None], positions_of(geometry, ((0, columns),))


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
    rows = rows_of(rows, batch)
    codec = of_rows(cache.codec, rows)
    if cache.layout is None:
        chosen = tuple(cache.geometry.expanded(batch)[row] for row in rows)
        return replace(cache, codec=codec, geometry=attrs.evolve(cache.geometry, rows=chosen))
    relayout, geometry = cache.geometry.taken(rows, batch)
    if relayout is None:
        keys, values = p.gather(cache.keys, rows), p.gather(cache.values, rows)
    else:
        keys = p.detach(tuple([p.lay_out(plane, relayout) for plane in cache.keys]))
        values = p.detach(tuple([p.lay_out(plane, relayout) for plane in cache.values]))
    layout = attrs.evolve(cache.layout, batch=len(rows))
    return KV(keys, values, codec, geometry, layout)


def rows_of(rows: Sequence[int], batch: int) -> list[int]:
    """Row numbers of a batch, counted from its beginning."""
    listed = isinstance(rows, Sequence) and len(rows) > 0
    if not listed or any(isinstance(r, bool) or not isinstance(r, int) for r in rows):
        raise ShapeError(f"take needs a list of row numbers, not {rows!r}")
    if any(not -batch <= row < batch for row in rows):
        raise ShapeError(f"rows {rows} of a batch of {batch}")
    return [row % batch for row in rows]


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
    codec = joined([cache.codec for cache in caches], batches)
    if not known:
        rows = tuple(row for cache in caches for row in cache.geometry.rows)
        return replace(first, codec=codec, geometry=attrs.evolve(first.geometry, rows=rows))
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
        codec,
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
