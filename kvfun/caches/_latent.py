"""Multi-head latent attention: one compressed vector and one rotated key for all heads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import mlx.core as mx
from jaxtyping import Float

from .. import planes as p
from ..codecs import Codec, Concatenated, learns
from ..errors import PhaseError, ShapeError, UnsupportedError
from ..geometry import mask_array
from ..kernels import TILED, expanded, kernels_for
from ..kernels._scores import after, scores, tile_columns, tiles, wide
from ..record import record, replace, static
from . import _kv
from . import _verbs as verbs
from ._empty import empty
from ._extents import extents, own_columns, width
from ._kv import KV, Layout
from ._view import attend_over, layout


@record
class Latent:
    """Latents and rotated keys, and on layers with an index the keys of that.

    What multi-head latent attention (DeepSeek-AI, *DeepSeek-V2*, 2024) keeps of a token, whatever
    the number of heads; and the index keys of sparse attention (DSA, *DeepSeek-V3.2*, 2025). They
    are the keys and values of ordinary caches, so every codec, window and batch is to be had. Build
    one with :func:`kvfun.latent`; read it with :func:`kvfun.attend_latent`.

    Args:
        inner: latents ``[batch, 1, tokens, rank]`` as keys, rotated keys as values.
        index: index keys ``[batch, 1, tokens, index_dim]`` as keys, and values of no numbers.
    """

    inner: KV
    index: KV | None = None

    @property
    def codec(self) -> Codec:
        """What latents and rotated keys are stored in."""
        return self.inner.codec

    @property
    def geometry(self) -> Any:
        """Where every position is, the same for all three."""
        return self.inner.geometry

    @property
    def layout(self) -> Layout | None:
        """The shape of what the cache accepts, known from the first append on."""
        return self.inner.layout


def latent(
    spec: str | Codec = "plain", *, index: str | Codec | None = None, **options: Any
) -> Latent:
    """The cache of a layer with latent attention, without a token yet.

    Args:
        spec: what latents and rotated keys are stored in (``"kv8+plain"`` for one of each).
        index: what index keys are stored in, on a layer that has them.
        options: ``window``, ``sinks``, ``chunk``, ``reserve``, ``left_padding`` of
            :func:`kvfun.empty`.

    Raises:
        SpecError, GeometryError: as there.
        UnsupportedError: a codec that learns from the first tokens, or tokens that wait.

    >>> import kvfun
    >>> latents, turned = mx.zeros((1, 1, 3, 512)), mx.zeros((1, 1, 3, 64))
    >>> cache = kvfun.append(kvfun.latent("kv8"), latents, turned)
    >>> kvfun.offsets(cache)
    (3,)
    """
    made = [empty(each, raw_sinks=0, **options) for each in (spec, index) if each is not None]
    for cache in made:
        if not isinstance(cache, KV) or learns(cache.codec):
            raise UnsupportedError(
                f"latents are stored as they come, not in {cache.codec.spec} with {options}"
            )
    return Latent(*made)  # pyright: ignore


# -- writing --------------------------------------------------------------------------------------


@verbs.append.register(Latent)
def _append(
    cache: Latent,
    keys: Float[mx.array, "batch 1 tokens rank"],
    values: Float[mx.array, "batch 1 tokens rope_dim"],
    index: Float[mx.array, "batch 1 tokens index_dim"] | None = None,
) -> Latent:
    if (index is None) != (cache.index is None):
        raise ShapeError(
            "this layer has index keys: append(cache, latents, rotated, index)"
            if index is None
            else "this layer has no index: append(cache, latents, rotated)"
        )
    _kv.accepted(cache.inner, keys, values)
    if keys.shape[1] != 1:
        raise ShapeError(f"latents are [batch, 1, tokens, rank], not {tuple(keys.shape)}")
    if index is None or cache.index is None:
        return Latent(verbs.append(cache.inner, keys, values))
    if index.ndim != 4 or index.shape[:3] != keys.shape[:3]:
        raise ShapeError(f"index keys {tuple(index.shape)} of latents {tuple(keys.shape)}")
    nothing = index[..., :0]
    _kv.accepted(cache.index, index, nothing)
    return Latent(
        verbs.append(cache.inner, keys, values), verbs.append(cache.index, index, nothing)
    )


def _both(cache: Latent, change: Callable[[KV], KV]) -> Latent:
    index = cache.index
    return Latent(change(cache.inner), None if index is None else change(index))


@verbs.rollback.register(Latent)
def _rollback(cache: Latent, tokens: int | Sequence[int]) -> Latent:
    return _both(cache, lambda each: verbs.rollback(each, tokens))


@verbs.with_reserve.register(Latent)
def _with_reserve(cache: Latent, tokens: int) -> Latent:
    return _both(cache, lambda each: verbs.with_reserve(each, tokens))


@verbs.take.register(Latent)
def _take(cache: Latent, rows: Sequence[int]) -> Latent:
    return _both(cache, lambda each: verbs.take(each, rows))


@verbs.convert.register(Latent)
def _convert(cache: Latent, spec: str | Codec) -> Latent:
    if learns(Codec.of(spec)):
        raise UnsupportedError(f"latents are stored as they come, not in {Codec.of(spec).spec}")
    return replace(cache, inner=verbs.convert(cache.inner, spec))


@verbs.join.register(Latent)
def _join(*caches: Latent) -> Latent:
    indices = [cache.index for cache in caches if cache.index is not None]
    if len(indices) not in (0, len(caches)):
        raise ShapeError("cannot batch layers with an index and layers without")
    inner = verbs.concat([cache.inner for cache in caches])
    return Latent(inner, verbs.concat(indices) if indices else None)


verbs.reads(
    Latent,
    "inner",
    *(verbs.fetch, verbs.fetch_columns, verbs.mask),
    *(verbs.max_rollback, verbs.batch_size, verbs.offsets, verbs.size),
    *(width, own_columns, extents, layout, attend_over),
)


# -- reading --------------------------------------------------------------------------------------


@record
class Selection:
    """Which tokens of its context each query looks at.

    Args:
        chosen: bool ``[batch, queries, columns]`` over the columns that the queries see; ``None``
            where they look at all of them.
        rows: where the tokens of each row were.
        queries: how many.
        top_k: the most that each looks at.
    """

    chosen: mx.array | None
    rows: tuple[Any, ...] = static(repr=False)
    queries: int = static()
    top_k: int = static()

    @property
    def contexts(self) -> tuple[int, ...]:
        """For each row the tokens that there were."""
        return tuple([row.offset for row in self.rows])


def index_scores(
    cache: Latent,
    queries: Float[mx.array, "batch index_heads queries index_dim"],
    weights: Float[mx.array, "batch queries index_heads"],
) -> mx.array:
    """How much each of the last tokens wants to look at what it sees.

    ``heads ** -0.5 * sum_h w_h relu(q_h . k * dim ** -0.5)``, tile by tile, so that there are no
    scores of single heads for all columns.

    Returns:
        ``[batch, queries, columns]`` in float32; minus infinity where a query sees nothing.

    Raises:
        ShapeError: no index, or queries that do not fit.
    """
    if cache.index is None:
        raise ShapeError("this layer has no index keys")
    index = cache.index
    length = _kv.fitting(_kv.filled(index, "index_scores"), queries, "window")
    batch, heads, _, dim = queries.shape
    if weights.shape != (batch, length, heads):
        raise ShapeError(f"weights {tuple(weights.shape)}, not {(batch, length, heads)}")
    _kv.own_count(index, length)
    geometry, codec = index.geometry, index.codec
    spans = geometry.spans(length)
    total = codec.keys.width(dim)
    folded = mx.pad(wide(queries) * dim**-0.5, [(0, 0)] * 3 + [(0, total - dim)])
    folded = folded.reshape(batch, 1, heads * length, total)
    shares = (weights.astype(mx.float32) * heads**-0.5).swapaxes(1, 2)[..., None]
    parts: list[mx.array] = []
    for _, _, tile in tiles(p.read(index.keys, spans), tile_columns(batch * heads * length)):
        found = scores(codec.keys, folded, after(tile, *parts[-1:])).astype(mx.float32)
        found = mx.maximum(found.reshape(batch, heads, length, -1), 0)
        parts.append(mx.sum(found * shares, axis=1))
    found = mx.concatenate(parts, axis=-1)
    hidden = mask_array(geometry.mask(length, spans), queries=length, columns=found.shape[-1])
    if hidden is None:
        return found
    hidden = hidden[:, 0] if hidden.ndim == 4 else hidden
    return mx.where(hidden, found, -mx.inf)


def select(
    cache: Latent,
    queries: Float[mx.array, "batch index_heads queries index_dim"],
    weights: Float[mx.array, "batch queries index_heads"],
    top_k: int,
) -> Selection:
    """The tokens that each of the last ones looks at: all, or ``top_k`` where there are more.

    Those with the highest scores; of equal ones the earlier.

    Args:
        cache: a layer with an index, which already holds the queries' own tokens.
        queries: of the index's heads, after RoPE.
        weights: of each of them.
        top_k: how many.

    Raises:
        ShapeError: as :func:`index_scores`, or no number of tokens.
    """
    if isinstance(top_k, bool) or not isinstance(top_k, int) or top_k < 1:
        raise ShapeError(f"top_k must be an integer >= 1, not {top_k!r}")
    geometry, batch = cache.geometry, verbs.batch_size(cache)
    rows, length = geometry.expanded(batch), queries.shape[2]
    if max(geometry.live(row) for row in rows) <= top_k:
        if cache.index is None:
            raise ShapeError("this layer has no index keys")
        return Selection(None, rows, length, top_k)
    found = index_scores(cache, queries, weights)
    if found.shape[-1] <= top_k:
        return Selection(None, rows, length, top_k)
    last = found.shape[-1] - top_k
    least = mx.partition(found, last, axis=-1)[..., last, None]
    above, equal = found > least, (found == least) & (found > -mx.inf)
    room = top_k - mx.sum(above, axis=-1, keepdims=True)
    earlier = mx.cumsum(equal.astype(mx.int32), axis=-1)
    return Selection(above | (equal & (earlier <= room)), rows, length, top_k)


def attend_latent(
    cache: Latent,
    queries: Float[mx.array, "batch heads queries head_dim"],
    rotated: Float[mx.array, "batch heads queries rope_dim"],
    up_keys: Float[mx.array, "heads head_dim rank"],
    up_values: Float[mx.array, "heads rank value_dim"],
    *,
    scale: float | None = None,
    phase: str = "decode",
    selection: Selection | None = None,
    kernels: Mapping[str, Callable[..., Any]] | None = None,
) -> Any:
    """Attention of the last tokens over latents.

    One query a row is multiplied into the latents' space and reads them as they are (absorbed). In
    a window latents are expanded to the heads' keys and values, a tile at a time, unless it is so
    short that absorbing costs less.

    Args:
        cache: a cache that already holds the queries' own tokens.
        queries: the part without a position.
        rotated: the part after RoPE.
        up_keys: a head's key is ``up_keys @ latent``, and the rotated key behind it.
        up_values: a head's value is ``latent @ up_values``.
        scale: of the scores, by default ``(head_dim + rope_dim) ** -0.5``.
        phase: as in :func:`kvfun.attend`: ``decode``, ``window``, ``committed`` or ``partial``.
        selection: from :func:`select`, of this layer or of one whose choice it shares.
        kernels: a kernel set for absorbed reads.

    Returns:
        ``[batch, heads, queries, value_dim]``; of a partial read, that and the log-sum-exp.

    Raises:
        ShapeError, PhaseError: queries, weights or a selection that do not fit.
    """
    length = _fitting(cache, queries, rotated, up_keys, up_values, phase)
    scale = (queries.shape[3] + rotated.shape[3]) ** -0.5 if scale is None else scale
    chosen = _chosen(cache, selection, length)
    if phase == "window" and not _absorbing_costs_less(up_keys, up_values, rotated):
        together = mx.concatenate([queries, rotated.astype(queries.dtype)], axis=-1)
        read = _as_keys(cache, together.shape[3], up_values.shape[2])
        sets = expanded(up_keys, up_values)
        mask = None if chosen is None else chosen[:, None]
        return verbs.attend(read, together, scale=scale, phase=phase, kernels=sets, mask=mask)
    if phase == "partial" and chosen is not None:
        raise PhaseError("a partial read has no selection: merge what was selected whole")
    pieces = range(length) if phase == "committed" else None
    absorbed = _each(queries, up_keys, pieces)
    together = mx.concatenate([absorbed, rotated.astype(absorbed.dtype)], axis=-1)
    rank = up_values.shape[1]
    read = _as_keys(cache, together.shape[3], rank)
    kernels = _kernels(read.codec) if kernels is None else kernels
    options: Any = {"scale": scale, "phase": phase, "kernels": kernels}
    if chosen is None:
        out = verbs.attend(read, together, **options)
    elif length == 1 or phase == "committed":
        out = _gathered(read, together, chosen, selection, **options)
    else:
        out = verbs.attend(read, together, mask=chosen[:, None], **options)
    if phase == "partial":
        return _each(out[0], up_values.astype(mx.float32), None), out[1]
    return _each(out, up_values, pieces)


def _each(x: mx.array, weight: mx.array, pieces: Any) -> mx.array:
    """``x @ weight`` for every head; token by token where each must be as if it were alone."""
    weight = weight.astype(x.dtype)
    if pieces is None:
        return x @ weight
    return mx.concatenate([mx.contiguous(x[:, :, i : i + 1]) @ weight for i in pieces], axis=2)


def _fitting(
    cache: Latent,
    queries: mx.array,
    rotated: mx.array,
    up_keys: mx.array,
    up_values: mx.array,
    phase: str,
) -> int:
    known = _kv.filled(cache.inner, "attend_latent")
    shapes = [tuple(x.shape) for x in (queries, rotated, up_keys, up_values)]
    if queries.ndim == rotated.ndim == 4 and up_keys.ndim == up_values.ndim == 3:
        _, heads, length, dim = queries.shape
        wanted = [
            (known.batch, heads, length, dim),
            (known.batch, heads, length, known.value_dim),
            (heads, dim, known.head_dim),
            (heads, known.head_dim, up_values.shape[2]),
        ]
        if shapes == wanted and length:
            if phase not in _kv.READS:
                raise PhaseError(f"phase must be one of {', '.join(_kv.READS)}, not {phase!r}")
            if phase == "decode" and length != 1:
                raise PhaseError(f"'decode' takes one query a row, not {length}: use 'window'")
            return length
    raise ShapeError(
        f"queries, rotated ones, up_keys and up_values {shapes} do not fit latents of "
        f"{known.batch} rows, rank {known.head_dim} and {known.value_dim} rotated numbers"
    )


def _absorbing_costs_less(up_keys: mx.array, up_values: mx.array, rotated: mx.array) -> bool:
    """Multiplications for each column: with every query in latent space, or expanded once."""
    _, dim, rank = up_keys.shape
    length, rope_dim, value_dim = rotated.shape[2], rotated.shape[3], up_values.shape[2]
    absorbed = length * (2 * rank + rope_dim)
    return absorbed <= length * (dim + rope_dim + value_dim) + rank * (dim + value_dim)


def _as_keys(cache: Latent, head_dim: int, value_dim: int) -> KV:
    """The cache as one of a single head whose keys are latents and rotated keys together."""
    inner, known = cache.inner, cache.inner.layout
    assert known is not None
    sides = inner.codec.keys, inner.codec.values
    dims = known.head_dim, known.value_dim
    codec = Codec(Concatenated(*sides, dims=dims, split=len(inner.keys)), inner.codec.keys)
    layout = attrs.evolve(known, head_dim=head_dim, value_dim=value_dim, padded=False)
    return KV(inner.keys + inner.values, inner.keys, codec, inner.geometry, layout)


def _kernels(codec: Codec) -> Mapping[str, Any]:
    """Tiles are decoded side by side: queries cannot be rotated for one part of the keys only."""
    found = kernels_for(codec)
    return found if found is kernels_for(Codec.of("kv8")) else TILED


def _chosen(cache: Latent, selection: Selection | None, length: int) -> mx.array | None:
    """The selected columns, if not all.

    Raises:
        ShapeError: a selection for other rows, contexts or queries.
    """
    if selection is None:
        return None
    rows = cache.geometry.expanded(verbs.batch_size(cache))
    if selection.rows != rows or selection.queries != length:
        raise ShapeError(
            f"selected for {selection.queries} queries of contexts {selection.contexts}, not for "
            f"{length} of {tuple([row.offset for row in rows])}"
        )
    return selection.chosen


def _gathered(
    cache: KV,
    queries: mx.array,
    chosen: mx.array,
    selection: Selection | None,
    *,
    phase: str,
    **options: Any,
) -> mx.array:
    """Each query over the columns that were selected for it, and no others."""
    assert selection is not None
    length, columns = queries.shape[2], chosen.shape[-1]
    spans = cache.geometry.spans(length)
    keys, values = p.read(cache.keys, spans), p.read(cache.values, spans)
    assert cache.layout is not None
    number = mx.arange(columns)
    outs = []
    for i in range(length):
        # behind the selected ones, in order, come those that are not
        place = mx.where(chosen[:, i], number, number + columns)
        place = mx.sort(place, axis=-1)[:, : selection.top_k]
        own = place < columns
        index = (place % columns)[:, None, :, None]
        few, fewer = [
            tuple([mx.take_along_axis(x, index, axis=2) for x in planes])
            for planes in (keys, values)
        ]
        query, mask = mx.contiguous(queries[:, :, i : i + 1]), own[:, None, None]
        outs.append(
            _kv.attend_planes(query, few, fewer, cache.codec, cache.layout, mask, **options)
        )
    return outs[0] if length == 1 else mx.concatenate(outs, axis=2)
