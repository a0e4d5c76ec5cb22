"""What a decoder keeps of its encoder, beside what it keeps of itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx
from jaxtyping import Float

from ..codecs import Codec
from ..errors import DTypeError, ShapeError
from ..record import record, replace, static
from . import _verbs as verbs
from ._empty import empty
from ._extents import extents, own_columns, width
from ._kv import KV, rows_of
from ._view import attend_over, layout, view


@record
class Cross:
    """A decoder layer's state: its own keys and values, and those of the encoder's output.

    The encoder's are computed once and never change: each row of the batch says which of their rows
    it reads, so any number of beams share one, and reordering them moves none of it. The verbs are
    those of the cache of the decoder's own tokens; :func:`kvfun.attend_cross` reads the encoder.
    Build one with :func:`kvfun.cross`.

    Args:
        inner: the decoder's own keys and values, any record.
        encoded: the encoder's, a row for each text or sound.
        sources: for each row of ``inner`` the row of ``encoded`` that it reads.
    """

    inner: Any
    encoded: KV
    sources: tuple[int, ...] = static()

    @property
    def codec(self) -> Codec:
        """The codec of the decoder's own keys and values."""
        return self.inner.codec

    @property
    def geometry(self) -> Any:
        """Where every position of the decoder's is."""
        return self.inner.geometry

    @property
    def layout(self) -> Any:
        """The shape of what the cache accepts, known from the first append on."""
        return self.inner.layout


def cross(
    cache: Any,
    keys: Float[mx.array, "sources kv_heads columns head_dim"],
    values: Float[mx.array, "sources kv_heads columns value_dim"],
    *,
    spec: str | Codec = "plain",
    lengths: Sequence[int] | None = None,
) -> Cross:
    """The state of a decoder layer with cross-attention.

    Args:
        cache: for the decoder's own keys and values, of one row or of one a source
            (``kvfun.empty(spec)``).
        keys: the encoder's, ``[sources, kv_heads, columns, head_dim]``.
        values: the encoder's.
        spec: what those are stored in.
        lengths: of each source, where they are padded at the end to be as long as the longest.

    Raises:
        ShapeError, DTypeError, CodecError: keys and values that cannot be, or other numbers of
        rows.

    >>> import kvfun
    >>> encoder = mx.random.normal((1, 2, 1500, 64))
    >>> state = kvfun.cross(kvfun.empty("plain"), encoder, encoder)
    >>> beams = kvfun.take(state, [0] * 5)
    >>> kvfun.nbytes(beams) == kvfun.nbytes(state)
    True
    >>> k = mx.random.normal((5, 2, 1, 64))
    >>> beams = kvfun.append(beams, k, k)
    >>> kvfun.attend_cross(beams, k).shape
    (5, 2, 1, 64)
    """
    encoded = verbs.append(empty(spec, raw_sinks=0), keys, values)
    columns, found = keys.shape[2], keys.shape[0]
    if not columns:
        raise ShapeError("an encoder's output of no columns")
    if lengths is not None:
        if len(lengths) != found or any(not 0 < n <= columns for n in lengths):
            raise ShapeError(f"lengths {list(lengths)} of {found} sources of {columns} columns")
        encoded = verbs.rollback(encoded, [columns - n for n in lengths])
    rows = verbs.batch_size(cache)
    if rows not in (1, found) and found != 1:
        raise ShapeError(f"a cache of {rows} rows for {found} sources")
    sources = tuple(range(found)) if found > 1 else (0,) * rows
    return Cross(cache, encoded, sources)


def attend_cross(
    cache: Cross,
    queries: verbs.Queries,
    *,
    scale: float | None = None,
    kernels: Mapping[str, Callable[..., Any]] | None = None,
) -> mx.array:
    """Attention over the encoder's keys and values: each query sees all of its row's source.

    Rows that share a source are read as more queries of it, so that it is neither copied nor read
    more than once.

    Args:
        cache: a state.
        queries: ``[batch, heads, L, head_dim]``.
        scale: of the scores, by default ``head_dim ** -0.5``.
        kernels: a kernel set, by default the one :func:`kvfun.kernels.kernels_for` chooses.

    Returns:
        ``[batch, heads, L, value_dim]`` in the queries' dtype.

    Raises:
        ShapeError, DTypeError: queries that do not fit.
    """
    if not isinstance(queries, mx.array):
        raise DTypeError(f"queries must be an mlx array, not {type(queries).__name__}")
    sources = _sources(cache, queries)
    found = verbs.batch_size(cache.encoded)
    rows: list[list[int]] = [[] for _ in range(found)]
    for row, source in enumerate(sources):
        rows[source].append(row)
    most = max(map(len, rows))
    # Sources with fewer rows read some of them twice.
    table = [(own * most)[:most] if own else [0] * most for own in rows]
    flat = [row for own in table for row in own]
    batch, heads, length, dim = queries.shape
    together = queries if flat == list(range(batch)) else queries[mx.array(flat)]
    folded = together.reshape(found, most, heads, length, dim).swapaxes(1, 2)
    folded = folded.reshape(found, heads, most * length, dim)
    phase = "decode" if most * length == 1 else "window"
    out = view(cache.encoded).attend(folded, scale, phase, kernels, mask="full")
    out = out.reshape(found, heads, most, length, -1).swapaxes(1, 2)
    out = out.reshape(found * most, heads, length, -1)
    if together is queries:
        return out
    return out[mx.array([flat.index(row) for row in range(batch)])]


def _sources(cache: Cross, queries: mx.array) -> tuple[int, ...]:
    batch = queries.shape[0] if queries.ndim == 4 else 0
    sources = _of_rows(cache, batch)
    if len(sources) != batch:
        raise ShapeError(
            f"queries {tuple(queries.shape)} should be [{len(sources)}, heads, L, head_dim]"
        )
    return sources


def _of_rows(cache: Cross, batch: int) -> tuple[int, ...]:
    """The source of each row; a single one that has no token yet becomes as many as there are."""
    fresh = len(cache.sources) == 1 and cache.inner.layout is None
    return cache.sources * batch if fresh and batch else cache.sources


@verbs.append.register(Cross)
def _append(cache: Cross, keys: mx.array, values: mx.array) -> Cross:
    inner = verbs.append(cache.inner, keys, values)
    sources = _of_rows(cache, verbs.batch_size(inner))
    if len(sources) != verbs.batch_size(inner):
        raise ShapeError(f"a block of {verbs.batch_size(inner)} rows for sources {cache.sources}")
    return Cross(inner, cache.encoded, sources)


@verbs.rollback.register(Cross)
def _rollback(cache: Cross, tokens: int | Sequence[int]) -> Cross:
    return replace(cache, inner=verbs.rollback(cache.inner, tokens))


@verbs.with_reserve.register(Cross)
def _with_reserve(cache: Cross, tokens: int) -> Cross:
    return replace(cache, inner=verbs.with_reserve(cache.inner, tokens))


@verbs.convert.register(Cross)
def _convert(cache: Cross, spec: str | Codec) -> Cross:
    return replace(cache, inner=verbs.convert(cache.inner, spec))


@verbs.batch_size.register(Cross)
def _batch_size(cache: Cross) -> int:
    return len(cache.sources)


@verbs.take.register(Cross)
def _take(cache: Cross, rows: Sequence[int]) -> Cross:
    chosen = rows_of(rows, len(cache.sources))
    sources = [cache.sources[row] for row in chosen]
    inner = cache.inner
    if verbs.batch_size(inner) == 1 < len(cache.sources):  # it has no token yet
        chosen = [0] * len(chosen)
    inner = verbs.take(inner, chosen)
    used = sorted({*sources})
    if len(used) == verbs.batch_size(cache.encoded):
        return Cross(inner, cache.encoded, tuple(sources))
    places = {source: index for index, source in enumerate(used)}
    return Cross(inner, verbs.take(cache.encoded, used), tuple([places[s] for s in sources]))


@verbs.join.register(Cross)
def _join(*caches: Cross) -> Cross:
    shared: list[KV] = []
    sources: list[int] = []
    for cache in caches:
        place = next((i for i, one in enumerate(shared) if one is cache.encoded), len(shared))
        if place == len(shared):
            shared.append(cache.encoded)
        before = sum(verbs.batch_size(one) for one in shared[:place])
        sources += [before + source for source in cache.sources]
    inner = verbs.concat([_spread(cache) for cache in caches])
    return Cross(inner, verbs.concat(shared), tuple(sources))


def _spread(cache: Cross) -> Any:
    """The decoder's own cache with as many rows as the state has."""
    rows = len(cache.sources)
    same = verbs.batch_size(cache.inner) == rows
    return cache.inner if same else verbs.take(cache.inner, [0] * rows)


verbs.reads(
    Cross,
    "inner",
    *(verbs.fetch, verbs.fetch_columns, verbs.attend, verbs.attend_columns, verbs.mask),
    *(verbs.max_rollback, verbs.offsets, verbs.size),
    *(width, own_columns, extents, layout, attend_over),
)
