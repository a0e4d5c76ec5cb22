"""Attention op by op: all scores at once, a precise softmax, the mix of the values."""

from __future__ import annotations

import mlx.core as mx

from ..codecs import Codec
from ..planes import Planes
from ._masks import five_axes, lower_right
from ._scores import fold, mix, scores, wide


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
    """The scores of all queries at once, in the dtype that suits the device.

    Hidden columns get the smallest finite score, so that a query that sees nothing yields an
    average and not NaN.
    """
    batch, heads, length, _ = queries.shape
    kv_heads, columns = keys[0].shape[1:3]
    group = heads // kv_heads
    s = scores(codec.keys, fold(wide(queries) * scale, kv_heads), keys)
    if mask is not None or sinks is not None:
        if isinstance(mask, str):
            mask = lower_right(length, columns, 0, columns)
        elif mask is not None:
            mask = five_axes(mask, kv_heads, group)
        s = masked(s.reshape(batch, kv_heads, group, length, columns), mask)
        if sinks is not None:
            s = mx.concatenate([_sink_scores(sinks, s), s], axis=-1)
    weights = mx.softmax(s, axis=-1, precise=True)
    if sinks is not None:
        weights = weights[..., 1:]
    out = mix(codec.values, weights.reshape(batch, kv_heads, group * length, columns), values)
    return out.reshape(batch, heads, length, out.shape[-1]).astype(queries.dtype)


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


UNFUSED = {"decode": unfused, "window": unfused, "masked_window": unfused}
