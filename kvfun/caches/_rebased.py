"""Attention sinks that stay near: positions counted within the cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx

from ..codecs import Codec, Rope
from ..errors import GeometryError, UnsupportedError
from ..geometry import Geometry, for_kernel, stride
from ..kernels import merge, sink_part
from ..record import record, replace
from . import _kv
from . import _verbs as verbs
from ._chain import masks_of
from ._extents import extents, own_columns, width
from ._kv import KV, Layout
from ._view import layout


@record
class Rebased:
    """A window with sinks in which the sinks are always right before the window.

    Without it a sink is as far away as its position says, ever further than a model has learnt to
    look. Here positions count within the cache (Xiao et al., *StreamingLLM*, 2024): keys and
    queries come with RoPE at their absolute positions, and the products of queries with sinks are
    those that the shorter distance has, as RoPE makes them a function of it alone. Nothing that is
    stored changes.

    Build one with ``kvfun.rebased(cache, rope)``.

    Args:
        inner: a window with sinks.
        rope: the rotation that keys and queries went through.
    """

    inner: KV
    rope: Rope

    @property
    def codec(self) -> Codec:
        """The codec of what is held."""
        return self.inner.codec

    @property
    def geometry(self) -> Geometry:
        """Where every position is."""
        return self.inner.geometry

    @property
    def layout(self) -> Layout | None:
        """The shape of what the cache accepts, known from the first append on."""
        return self.inner.layout

    @property
    def keys(self) -> Any:
        """The keys' planes."""
        return self.inner.keys

    @property
    def values(self) -> Any:
        """The values' planes."""
        return self.inner.values


def rebased(cache: KV, rope: Rope) -> Rebased:
    """A window whose sinks stay right before it, whatever was dropped in between.

    Args:
        cache: a window with sinks (``kvfun.empty(spec, window=1024, sinks=4, raw_sinks=0)``).
        rope: the rotation that keys and queries go through.

    Raises:
        GeometryError: no window, or no sinks, or a chunk.
        UnsupportedError: a record other than a :class:`kvfun.KV`.

    >>> import kvfun
    >>> from kvfun.codecs import Rope
    >>> cache = kvfun.rebased(kvfun.empty("kv4", window=8, sinks=2), Rope.of(64))
    >>> k = mx.random.normal((1, 2, 20, 64))
    >>> kvfun.size(kvfun.append(cache, k, k))
    10
    """
    if not isinstance(cache, KV):
        raise UnsupportedError(f"rebased takes a KV with a window, not a {type(cache).__name__}")
    policy = cache.geometry.policy
    if policy.window is None or not policy.sinks or policy.chunk is not None:
        raise GeometryError(f"rebased takes a window with sinks and without a chunk, not {policy}")
    return Rebased(cache, rope)


def _gaps(cache: Rebased, queries: int) -> list[list[int]]:
    """For each row how far the sinks are from the window of each of the last tokens."""
    policy = cache.geometry.policy
    assert policy.window is not None
    behind = policy.window + policy.sinks
    return [
        [max(0, row.offset - queries + i + 1 - behind) for i in range(queries)]
        for row in cache.geometry.rows
    ]


def _turned(cache: Rebased, queries: mx.array, gaps: list[list[int]]) -> mx.array:
    """Queries as they meet sinks: as near as if nothing were in between."""
    angles = cache.rope.angles(mx.array(gaps, dtype=mx.int32)[:, None])
    return cache.rope.unrotated(queries.astype(mx.float32), angles).astype(queries.dtype)


@verbs.attend.register(Rebased)
def _attend(
    cache: Rebased, queries: mx.array, *, phase: str = "decode", mask: Any = None, **options: Any
) -> Any:
    length = _kv.fitting(_kv.filled(cache.inner, "attend"), queries, phase)
    geometry = cache.geometry
    _kv.own_count(cache.inner, length)
    columns = geometry.spans(length)
    if mask is not None:
        mask = _kv.own_mask(cache, mask, length)
    elif phase == "committed" and length > 1:
        then = [geometry.earlier(n) for n in reversed(range(length))]
        earlier = [replace(cache, inner=replace(cache.inner, geometry=g)) for g in then]
        return _kv.one_by_one(earlier, queries, phase="committed", **options)
    else:
        mask = for_kernel(geometry.mask(length, columns))
    return _attend_columns(cache, queries, columns, mask, phase=phase, **options)


@verbs.attend_columns.register(Rebased)
def _attend_columns(
    cache: Rebased,
    queries: mx.array,
    columns: Sequence[tuple[int, int]],
    mask: Any = None,
    *,
    scale: float | None = None,
    phase: str = "decode",
    kernels: Mapping[str, Callable[..., Any]] | None = None,
    sinks: mx.array | None = None,
) -> Any:
    gaps, inner = _gaps(cache, queries.shape[2]), cache.inner
    options: Any = {"scale": scale, "kernels": kernels}
    near, far = _split(columns, cache.geometry.policy.sinks)
    if not any(gap for row in gaps for gap in row) or not far:
        return verbs.attend_columns(
            inner, queries, columns, mask, phase=phase, sinks=sinks, **options
        )
    if sinks is not None:
        _kv.check_sinks(sinks, queries.shape[1])
    masks = masks_of(mask, queries.shape[2], [stride(far), stride(near)])
    turned = _turned(cache, queries, gaps)
    parts: list[Any] = [
        verbs.attend_columns(inner, q, runs, own, phase="partial", **options)
        for q, runs, own in zip((turned, queries), (far, near), masks, strict=True)
        if runs
    ]
    if sinks is not None:
        parts.append(sink_part(sinks, parts[0]))
    out, lse = merge(parts)
    return (out, lse) if phase == "partial" else out.astype(queries.dtype)


Spans = tuple[tuple[int, int], ...]


def _split(columns: Sequence[tuple[int, int]], sinks: int) -> tuple[Spans, Spans]:
    """The columns behind the sinks', and theirs."""
    far = tuple([(a, min(b, sinks)) for a, b in columns if a < sinks])
    near = tuple([(max(a, sinks), b) for a, b in columns if b > sinks])
    return near, far


@verbs.fetch.register(Rebased)
def _fetch(cache: Rebased, *, queries: int = 1) -> tuple[mx.array, mx.array]:
    """Sinks are where the last token sees them.

    Raises:
        UnsupportedError: several tokens that see them at different distances.
    """
    if any(len({*row}) > 1 for row in _gaps(cache, queries)):
        raise UnsupportedError(
            f"the last {queries} tokens see the sinks at different distances, which keys cannot "
            "have: attend, or fetch for one token"
        )
    return _fetch_columns(cache, cache.geometry.spans(queries))


@verbs.fetch_columns.register(Rebased)
def _fetch_columns(cache: Rebased, columns: Sequence[tuple[int, int]]) -> tuple[mx.array, mx.array]:
    keys, values = verbs.fetch_columns(cache.inner, columns)
    _, far = _split(columns, cache.geometry.policy.sinks)
    gaps, count = _gaps(cache, 1), stride(far)
    if not count or not any(gap for row in gaps for gap in row):
        return keys, values
    angles = cache.rope.angles(mx.array(gaps, dtype=mx.int32)[:, None])
    sinks = cache.rope.rotated(keys[:, :, :count].astype(mx.float32), angles).astype(keys.dtype)
    return mx.concatenate([sinks, keys[:, :, count:]], axis=2), values


def _changed(verb: Callable[..., Any]) -> Callable[..., Any]:
    def change(cache: Rebased, *args: Any, **kwargs: Any) -> Rebased:
        return replace(cache, inner=verb(cache.inner, *args, **kwargs))

    return change


for _verb in (verbs.append, verbs.rollback, verbs.convert, verbs.take, verbs.with_reserve):
    _verb.register(Rebased, _changed(_verb))

verbs.reads(
    Rebased,
    "inner",
    *(verbs.mask, verbs.max_rollback, verbs.batch_size, verbs.offsets, verbs.size),
    *(width, own_columns, extents, layout),
)


@verbs.join.register(Rebased)
def _join(*caches: Rebased) -> Rebased:
    return replace(caches[0], inner=verbs.join(*[cache.inner for cache in caches]))
