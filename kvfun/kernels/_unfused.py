"""Attention op by op: all scores at once, a precise softmax, the mix of the values."""

from __future__ import annotations

import mlx.core as mx

from ..codecs import Codec
from ..planes import Planes
from ._masks import five_axes, lower_right
from ._scores import fold, mix, scores


def unfused(
    queries: mx.array,
    keys: Planes,
    values: Planes,
    codec: Codec,
    *,
    scale: float,
    mask: mx.array | str | None = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """Scores in float32 where that is faster on the device, else in the queries' dtype.

    Hidden columns get the smallest finite score, so that a query that sees nothing yields an
    average and not NaN.
    """
    batch, heads, length, _ = queries.shape
    kv_heads, columns = keys[0].shape[1:3]
    group = heads // kv_heads
    s = scores(codec.keys, fold(queries * scale, kv_heads), keys)
    if mask is not None or sinks is not None:
        s = s.reshape(batch, kv_heads, group, length, columns)
        s = masked(s, mask, lambda: lower_right(length, columns, 0, columns))
        if sinks is not None:
            s = mx.concatenate([_sink_scores(sinks, s), s], axis=-1)
        weights = mx.softmax(s, axis=-1, precise=True)
        if sinks is not None:
            weights = weights[..., 1:]
        weights = weights.reshape(batch, kv_heads, group * length, columns)
    else:
        weights = mx.softmax(s, axis=-1, precise=True)
    out = mix(codec.values, weights, values)
    return out.reshape(batch, heads, length, out.shape[-1]).astype(queries.dtype)


def masked(s: mx.array, mask, causal) -> mx.array:
    """Scores ``[B, kv_heads, group, L, N]`` under a mask; ``causal()`` is the array for a string."""
    if mask is None:
        return s
    if isinstance(mask, str):
        mask = causal()
    else:
        mask = five_axes(mask, *s.shape[1:3])
    if mask.dtype == mx.bool_:
        return mx.where(mask, s, mx.finfo(s.dtype).min)
    return s + mask.astype(s.dtype)


def _sink_scores(sinks: mx.array, s: mx.array) -> mx.array:
    by_head = sinks.astype(s.dtype).reshape(1, s.shape[1], s.shape[2], 1, 1)
    return mx.broadcast_to(by_head, (*s.shape[:4], 1))


UNFUSED = {"decode": unfused, "window": unfused, "masked_window": unfused}
