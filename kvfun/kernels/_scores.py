"""The two products of attention over encoded planes, by the type of the codec."""

from __future__ import annotations

from collections.abc import Iterator
from functools import singledispatch

import mlx.core as mx

from ..codecs import Affine, Concatenated, Microscaled, VectorCodec
from ..planes import Planes
from ..planes import columns as columns_of
from ._odd_bits import PIECES, mix_bytes

TILE = 256
"""The fewest columns decoded at once."""

TILE_NUMBERS, GPU_TILE_NUMBERS, GPU_WINDOW_NUMBERS = 1 << 19, 1 << 25, 1 << 23
"""The numbers of the largest array of a tile, where that allows more columns: what a CPU's cache
holds, and enough to fill a GPU. There MLX keeps the arrays of several tiles alive together, so that
windows get smaller ones: on an H200 2,048 queries at 32k take 46 ms and 0.8 GiB (29 ms and 1.8 GiB
with twice, 22 ms and 4.4 GiB with four times the numbers)."""


def on_cpu() -> bool:
    """Whether the CPU is the device in use."""
    return mx.default_device().type == mx.cpu


def working_dtype(dtype: mx.Dtype) -> mx.Dtype:
    """float32 on the CPU, whose products in 16 bits are slow; elsewhere the dtype itself."""
    return mx.float32 if on_cpu() else dtype


def wide(x: mx.array) -> mx.array:
    """The numbers in the dtype that products are computed in on this device."""
    return x.astype(working_dtype(x.dtype))


def tile_columns(numbers: int, queries: int = 1) -> int:
    """Columns of a tile whose largest array has ``numbers`` numbers a column."""
    on_gpu = GPU_TILE_NUMBERS if queries == 1 else GPU_WINDOW_NUMBERS
    most = TILE_NUMBERS if on_cpu() else on_gpu
    return max(TILE, most // numbers // TILE * TILE)


def tiles(planes: Planes, columns: int) -> Iterator[tuple[int, int, Planes]]:
    """The planes in pieces of so many columns, with the columns where each starts and stops."""
    total = planes[0].shape[2]
    for start in range(0, total, columns):
        stop = min(start + columns, total)
        yield start, stop, cut(planes, start, stop)


def cut(planes: Planes, start: int, stop: int) -> Planes:
    """Columns ``[start, stop)``."""
    if (start, stop) == (0, planes[0].shape[2]):
        return planes
    return tuple([columns_of(plane, start, stop) for plane in planes])


def after(planes: Planes, *earlier: mx.array) -> Planes:
    """The same planes, read only when ``earlier`` is there.

    MLX may evaluate what does not depend on each other in any order: all tiles could be decoded
    before the first is used.
    """
    return tuple(mx.depends(list(planes), list(earlier))) if earlier else planes


@singledispatch
def decode(codec: VectorCodec, planes: Planes, dtype: mx.Dtype) -> mx.array:
    """The numbers the planes stand for, in ``dtype``."""
    return codec.decode(planes).astype(dtype)


@decode.register
def _(codec: Affine, planes: Planes, dtype: mx.Dtype) -> mx.array:
    return codec.decode(_scaled(planes, dtype))


@decode.register
def _(codec: Microscaled, planes: Planes, dtype: mx.Dtype) -> mx.array:
    return codec.decode(planes, dtype)


def _scaled(planes: Planes, dtype: mx.Dtype) -> Planes:
    """Affine planes whose numbers come out in ``dtype``: cheaper than to cast them, and exact."""
    packed, scales, biases = planes
    return packed, scales.astype(dtype), biases.astype(dtype)


@singledispatch
def scores(codec: VectorCodec, queries: mx.array, planes: Planes) -> mx.array:
    """``queries @ keys.T``: ``[B, H, L, D]`` and planes of ``[B, H, N, D]`` to ``[B, H, L, N]``."""
    parts = []
    for keys, scale in _decoded(codec, planes, queries, parts):
        part = queries @ keys.swapaxes(-1, -2)
        parts.append(part if scale is None else part * scale)
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1)


@singledispatch
def mix(codec: VectorCodec, weights: mx.array, planes: Planes) -> mx.array:
    """``weights @ values``: ``[B, H, L, N]`` and planes of ``[B, H, N, D]`` to ``[B, H, L, D]``."""
    parts, start = [], 0
    for values, scale in _decoded(codec, planes, weights, parts):
        stop = start + values.shape[2]
        part = weights[..., start:stop]
        part = (part if scale is None else part * scale) @ values
        parts.append(parts[-1] + part if parts else part)
        start = stop
    return parts[-1]


Tile = tuple[mx.array, "mx.array | None"]
"""Decoded numbers; and the scale of every vector, ``[B, H, 1, N]``, where it is apart from them."""


@singledispatch
def read_tile(codec: VectorCodec, planes: Planes, dtype: mx.Dtype) -> Tile:
    """A tile in ``dtype``; a codec with one scale a vector may leave that to the product."""
    return decode(codec, planes, dtype), None


@singledispatch
def tile_numbers(codec: VectorCodec, planes: Planes) -> int:
    """Numbers of a vector, for the size of tiles."""
    return planes[0].shape[-1]


def _decoded(
    codec: VectorCodec, planes: Planes, like: mx.array, done: list[mx.array]
) -> Iterator[Tile]:
    """Decoded in the dtype of ``like``: whole if they are stored in it, else tile by tile.

    A tile is decoded when the last product ``done`` is there.
    """
    if len(planes) == 1 and planes[0].dtype == like.dtype:
        yield codec.decode(planes), None
        return
    batch, heads, rows, _ = like.shape
    columns = tile_columns(batch * heads * max(tile_numbers(codec, planes), rows))
    for _, _, tile in tiles(planes, columns):
        yield read_tile(codec, after(tile, *done[-1:]), like.dtype)


@scores.register
def _(codec: Affine, queries: mx.array, planes: Planes) -> mx.array:
    return _quantized(codec, queries, _scaled(planes, queries.dtype), transpose=True)


@scores.register
def _(codec: Microscaled, queries: mx.array, planes: Planes) -> mx.array:
    if _decoded_faster(codec, queries):
        return scores.dispatch(object)(codec, queries, planes)
    return _quantized(codec, queries, planes, transpose=True)


@scores.register
def _(codec: Concatenated, queries: mx.array, planes: Planes) -> mx.array:
    first, second = [
        mx.pad(part, [(0, 0)] * 3 + [(0, side.width(dim) - dim)])
        for part, side, dim in zip(
            codec.parts(queries), (codec.first, codec.second), codec.dims, strict=True
        )
    ]
    one = scores(codec.first, first, planes[: codec.split])
    return one + scores(codec.second, second, after(planes[codec.split :], one))


@tile_numbers.register
def _(codec: Concatenated, planes: Planes) -> int:
    return sum(codec.dims)


@mix.register
def _(codec: Affine, weights: mx.array, planes: Planes) -> mx.array:
    if codec.bits in PIECES and weights.dtype == mx.float32 and on_cpu():
        return _mix_bytes(codec, weights, planes)
    return _quantized(codec, weights, _scaled(planes, weights.dtype), transpose=False)


@mix.register
def _(codec: Microscaled, weights: mx.array, planes: Planes) -> mx.array:
    if _decoded_faster(codec, weights):
        return mix.dispatch(object)(codec, weights, planes)
    return _quantized(codec, weights, planes, transpose=False)


def _decoded_faster(codec: Microscaled, x: mx.array) -> bool:
    """Whether tiles are better decoded: MLX's CPU kernel converts E4M3 anew for every row."""
    return codec.bits == 8 and x.shape[2] > 1 and on_cpu()


def _mix_bytes(codec: Affine, weights: mx.array, planes: Planes) -> mx.array:
    batch, heads, rows, _ = weights.shape
    done: list[mx.array] = []
    size = tile_columns(batch * heads * max(planes[0].shape[-1] * 32 // codec.bits, rows))
    for start, stop, tile in tiles(planes, size):
        numbers = _scaled(after(tile, *done), weights.dtype)
        part = mix_bytes(weights[..., start:stop], numbers, codec.bits, codec.group_size)
        done = [done[0] + part if done else part]
    return done[0]


def _quantized(
    codec: Affine | Microscaled, x: mx.array, planes: Planes, transpose: bool
) -> mx.array:
    return mx.quantized_matmul(x, *planes, transpose=transpose, **codec.quantization)


def fold(queries: mx.array, kv_heads: int) -> mx.array:
    """Query heads of one KV head as more queries: ``[B, Hq, L, D]`` to ``[B, Hkv, G * L, D]``.

    A key is then read once for its whole group.
    """
    batch, heads, length, dim = queries.shape
    return queries.reshape(batch, kv_heads, heads // kv_heads * length, dim)
