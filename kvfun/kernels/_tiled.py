"""Attention tile by tile with an online softmax: memory for one tile of scores, never for all."""

from __future__ import annotations

import mlx.core as mx

from ..codecs import Codec
from ..planes import Planes
from ._masks import five_axes, lower_right
from ._scores import fold
from ._unfused import masked

TILE = 1024
"""Columns decoded at once."""


def tiled(
    queries: mx.array,
    keys: Planes,
    values: Planes,
    codec: Codec,
    *,
    scale: float,
    mask: mx.array | str | None = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """Online softmax in float32 over tiles of :data:`TILE` columns, each decoded when it is read.

    See Milakov and Gimelshein, *Online normalizer calculation for softmax* (2018).
    """
    batch, heads, length, _ = queries.shape
    kv_heads, columns = keys[0].shape[1:3]
    group = heads // kv_heads
    q = fold(queries.astype(mx.float32) * scale, kv_heads)
    shape = (batch, kv_heads, group, length)
    if sinks is None:
        top = mx.full((*shape, 1), mx.finfo(mx.float32).min)
        total = mx.zeros((*shape, 1))
    else:
        top = mx.broadcast_to(sinks.astype(mx.float32).reshape(1, kv_heads, group, 1, 1), (*shape, 1))
        total = mx.ones((*shape, 1))
    out = mx.array(0.0)
    for start in range(0, columns, TILE):
        stop = min(start + TILE, columns)
        k = codec.keys.decode(_tile(keys, start, stop)).astype(mx.float32)
        s = (q @ k.swapaxes(-1, -2)).reshape(*shape, stop - start)
        s = masked(
            s,
            _columns(mask, kv_heads, group, start, stop),
            lambda a=start, b=stop: lower_right(length, columns, a, b),
        )
        new = mx.maximum(top, mx.max(s, axis=-1, keepdims=True))
        weights, fade = mx.exp(s - new), mx.exp(top - new)
        v = codec.values.decode(_tile(values, start, stop)).astype(mx.float32)
        part = weights.reshape(batch, kv_heads, group * length, stop - start) @ v
        out = out * fade + part.reshape(*shape, part.shape[-1])
        total = total * fade + mx.sum(weights, axis=-1, keepdims=True)
        top = new
    return (out / total).reshape(batch, heads, length, -1).astype(queries.dtype)


def _tile(planes: Planes, start: int, stop: int) -> Planes:
    return tuple([plane[:, :, start:stop] for plane in planes])


def _columns(mask, kv_heads: int, group: int, start: int, stop: int):
    if not isinstance(mask, mx.array):
        return mask
    mask = five_axes(mask, kv_heads, group)
    return mask if mask.shape[-1] == 1 else mask[..., start:stop]


TILED = {"decode": tiled, "window": tiled, "masked_window": tiled}
