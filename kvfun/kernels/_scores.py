"""The two products of attention over encoded planes, by the type of the codec."""

from __future__ import annotations

from functools import singledispatch

import mlx.core as mx

from ..codecs import Affine, VectorCodec
from ..planes import Planes


def _wide(x: mx.array) -> mx.array:
    """float32 where the device computes quantized products fastest in it: the CPU, tenfold."""
    return x.astype(mx.float32) if mx.default_device().type == mx.cpu else x


@singledispatch
def scores(codec: VectorCodec, queries: mx.array, planes: Planes) -> mx.array:
    """``queries @ keys.T``: ``[B, H, L, D]`` with planes of ``[B, H, N, D]`` to ``[B, H, L, N]``."""
    keys = codec.decode(planes)
    return _wide(queries) @ _wide(keys).swapaxes(-1, -2)


@singledispatch
def mix(codec: VectorCodec, weights: mx.array, planes: Planes) -> mx.array:
    """``weights @ values``: ``[B, H, L, N]`` with planes of ``[B, H, N, D]`` to ``[B, H, L, D]``."""
    return weights @ codec.decode(planes).astype(weights.dtype)


@scores.register
def _(codec: Affine, queries: mx.array, planes: Planes) -> mx.array:
    return _quantized(codec, _wide(queries), planes, transpose=True)


@mix.register
def _(codec: Affine, weights: mx.array, planes: Planes) -> mx.array:
    return _quantized(codec, weights, planes, transpose=False)


def _quantized(codec: Affine, x: mx.array, planes: Planes, transpose: bool) -> mx.array:
    packed, scales, biases = planes
    return mx.quantized_matmul(
        x,
        packed,
        scales.astype(x.dtype),
        biases.astype(x.dtype),
        transpose=transpose,
        group_size=codec.group_size,
        bits=codec.bits,
    )


def fold(queries: mx.array, kv_heads: int) -> mx.array:
    """Query heads of one KV head as more queries: ``[B, Hq, L, D]`` to ``[B, Hkv, G * L, D]``.

    A key is then read once for its whole group.
    """
    batch, heads, length, dim = queries.shape
    return queries.reshape(batch, kv_heads, heads // kv_heads * length, dim)


