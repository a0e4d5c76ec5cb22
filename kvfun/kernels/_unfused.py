"""Attention op by op: all scores at once, a precise softmax, the mix of the values."""

from __future__ import annotations

import mlx.core as mx

from ..codecs import Codec
from ..planes import Planes
from ._committed import committed
from ._masks import Mask, Sizes, check_codec, sizes_of, whole
from ._merge import Partial, merge, nothing, sink_part
from ._scores import fold, mix, scores, wide


def unfused(
    queries: mx.array,
    keys: Planes,
    values: Planes,
    codec: Codec,
    *,
    scale: float,
    mask: Mask = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """The scores of all queries at once, in the dtype that suits the device.

    Hidden columns get the smallest finite score, so that a query that sees nothing yields an
    average and not NaN.
    """
    check_codec("unfused", codec)
    sizes = sizes_of(queries, keys, sinks)
    if not sizes.columns:
        return of_nothing(queries, values, codec).out.astype(queries.dtype)
    s = _all_scores(queries, keys, codec, scale, mask, sizes)
    if sinks is not None:
        s = s.reshape(*sizes)
        s = mx.concatenate([_sink_scores(sinks, s), s], axis=-1)
    weights = mx.softmax(s, axis=-1, precise=True)
    if sinks is not None:
        weights = weights[..., 1:]
    return _mixed(weights, values, codec, sizes).astype(queries.dtype)


def unfused_partial(
    queries: mx.array,
    keys: Planes,
    values: Planes,
    codec: Codec,
    *,
    scale: float,
    mask: Mask = None,
    sinks: mx.array | None = None,
) -> Partial:
    """The same with the log-sum-exp of the scores, see :class:`Partial`."""
    check_codec("unfused", codec)
    sizes = sizes_of(queries, keys, sinks)
    if not sizes.columns:
        return with_sinks(of_nothing(queries, values, codec), sinks)
    s = _all_scores(queries, keys, codec, scale, mask, sizes, mx.float32)
    weights, lse = weights_and_lse(s)
    out = _mixed(weights.astype(wide(queries).dtype), values, codec, sizes)
    return with_sinks(Partial(out.astype(mx.float32), lse.reshape(out.shape[:3])), sinks)


def weights_and_lse(s: mx.array) -> tuple[mx.array, mx.array]:
    """The softmax of scores ``[..., N]`` and their log-sum-exp ``[...]``, from one ``exp``.

    On a CPU the exponentials cost more than anything else does for one query.
    """
    top = mx.max(s, axis=-1, keepdims=True)
    weights = mx.exp(s - top)
    total = mx.sum(weights, axis=-1, keepdims=True)
    return weights / total, (top + mx.log(total)).squeeze(-1)


def _all_scores(
    queries: mx.array,
    keys: Planes,
    codec: Codec,
    scale: float,
    mask: Mask,
    sizes: Sizes,
    dtype: mx.Dtype | None = None,
) -> mx.array:
    """Scores under the mask, ``[B, kv_heads, group * L, N]`` or with ``group`` and ``L`` apart."""
    s = scores(codec.keys, fold(wide(queries) * scale, sizes.kv_heads), keys)
    s = s if dtype is None else s.astype(dtype)
    hidden = whole(mask, sizes)
    return s if hidden is None else masked(s.reshape(*sizes), hidden)


def _mixed(weights: mx.array, values: Planes, codec: Codec, sizes: Sizes) -> mx.array:
    """Values by their weights, ``[batch, heads, L, value_dim]``."""
    batch, kv_heads, group, length, columns = sizes
    weights = weights.reshape(batch, kv_heads, group * length, columns)
    out = mix(codec.values, weights, values)
    return out.reshape(batch, kv_heads * group, length, out.shape[-1])


def with_sinks(part: Partial, sinks: mx.array | None) -> Partial:
    """The part with the sinks as one more key, which has no value."""
    return part if sinks is None else merge([part, sink_part(sinks, part)])


def of_nothing(queries: mx.array, values: Planes, codec: Codec) -> Partial:
    """What queries take from planes without a column."""
    batch, heads, length, _ = queries.shape
    column = tuple([mx.zeros((*p.shape[:2], 1, p.shape[3]), p.dtype) for p in values])
    return nothing(batch, heads, length, codec.values.decode(column).shape[-1])


def masked(s: mx.array, mask: mx.array | None) -> mx.array:
    """Scores ``[B, kv_heads, group, L, N]`` under a mask that broadcasts to them."""
    if mask is None:
        return s
    lowest = mx.finfo(s.dtype).min
    if mask.dtype == mx.bool_:
        return mx.where(mask, s, lowest)
    return mx.maximum(s + mask.astype(s.dtype), lowest)


def _sink_scores(sinks: mx.array, s: mx.array) -> mx.array:
    by_head = sinks.astype(s.dtype).reshape(1, s.shape[1], s.shape[2], 1, 1)
    return mx.broadcast_to(by_head, (*s.shape[:4], 1))


UNFUSED = {
    "decode": unfused,
    "window": unfused,
    "masked_window": unfused,
    "committed": committed(unfused),
    "partial": unfused_partial,
}
"""mlx-lm's arithmetic (``mlx_lm.models.base.quantized_scaled_dot_product_attention``): a precise
softmax, and the lowest finite number for what is hidden."""
