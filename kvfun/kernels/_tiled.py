"""Attention tile by tile with an online softmax: memory for one tile of scores, never for all."""

from __future__ import annotations

import mlx.core as mx

from ..codecs import Codec
from ..planes import Planes
from ._masks import five_axes, lower_right
from ._scores import after, cut, decode, fold, tile_columns, tiles, wide
from ._unfused import masked

BLOCK = 512
"""Queries computed at once."""


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
    """Products in the dtype that suits the device, their sums and the softmax in float32.

    Of a block of :data:`BLOCK` queries and a tile of columns at a time there are scores, and
    decoded keys and values; causal blocks read no column that they do not see.
    """
    length, columns = queries.shape[2], keys[0].shape[2]
    if length <= BLOCK:
        return _block(queries, keys, values, codec, scale, mask, sinks)
    done: list[mx.array] = []
    for first in range(0, length, BLOCK):
        last = min(first + BLOCK, length)
        stop = columns - length + last if isinstance(mask, str) else columns
        (block,) = after((queries[:, :, first:last],), *done[-1:])
        k, v = cut(keys, 0, stop), cut(values, 0, stop)
        done.append(_block(block, k, v, codec, scale, _rows(mask, first, last), sinks))
    return mx.concatenate(done, axis=2)


def _block(
    queries: mx.array,
    keys: Planes,
    values: Planes,
    codec: Codec,
    scale: float,
    mask: mx.array | str | None,
    sinks: mx.array | None,
) -> mx.array:
    """Milakov and Gimelshein, *Online normalizer calculation for softmax* (2018)."""
    batch, heads, length, _ = queries.shape
    kv_heads, columns = keys[0].shape[1:3]
    group = heads // kv_heads
    shape = (batch, kv_heads, group, length)
    q = fold(wide(queries) * scale, kv_heads)
    if isinstance(mask, mx.array):
        mask = five_axes(mask, kv_heads, group)
    if sinks is None:
        top = mx.full((*shape, 1), mx.finfo(mx.float32).min)
        total = mx.zeros((*shape, 1))
    else:
        by_head = sinks.astype(mx.float32).reshape(1, kv_heads, group, 1, 1)
        top, total = mx.broadcast_to(by_head, (*shape, 1)), mx.ones((*shape, 1))
    out, earlier = mx.array(0.0), ()
    size = tile_columns(max(batch * kv_heads * queries.shape[3], batch * heads * length))
    for (start, stop, k), (_, _, v) in zip(tiles(keys, size), tiles(values, size), strict=True):
        k = decode(codec.keys, after(k, *earlier), q.dtype)
        s = (q @ k.swapaxes(-1, -2)).astype(mx.float32).reshape(*shape, stop - start)
        s = masked(s, _columns(mask, length, columns, start, stop))
        new = mx.maximum(top, mx.max(s, axis=-1, keepdims=True))
        weights, fade = mx.exp(s - new), mx.exp(top - new)
        total = total * fade + mx.sum(weights, axis=-1, keepdims=True)
        weights = weights.astype(q.dtype).reshape(batch, kv_heads, -1, stop - start)
        v = decode(codec.values, after(v, weights), q.dtype)
        part = (weights @ v).astype(mx.float32)
        out = out * fade + part.reshape(*shape, part.shape[-1])
        top, earlier = new, (out, total)
    return (out / total).reshape(batch, heads, length, -1).astype(queries.dtype)


def _rows(mask: mx.array | str | None, first: int, last: int) -> mx.array | str | None:
    """The mask of queries ``[first, last)``."""
    if not isinstance(mask, mx.array) or mask.ndim < 2 or mask.shape[-2] == 1:
        return mask
    return mask[..., first:last, :]


def _columns(
    mask: mx.array | str | None, length: int, columns: int, start: int, stop: int
) -> mx.array | None:
    """The mask of columns ``[start, stop)``; none where all queries see them."""
    if isinstance(mask, str):
        seen_by_all = columns - length + 1
        return None if stop <= seen_by_all else lower_right(length, columns, start, stop)
    return mask if mask is None or mask.shape[-1] == 1 else mask[..., start:stop]


TILED = {"decode": tiled, "window": tiled, "masked_window": tiled}
