"""Attention in the coordinates that vectors are stored in: queries enter, the output leaves, once.

Scores are products, and the output is a sum of values: a rotation of all keys is one of the
queries, and that of all values one of the output.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx

from ..codecs import Centred, Codec, Plain, Rotated, TurboKeys, TurboValues, VectorCodec
from ..planes import Planes
from ..record import record
from ._committed import committed
from ._composed import COMPOSED
from ._fused import FUSED
from ._masks import check_codec, sizes_of
from ._merge import Partial
from ._scores import decode, fold, read_tile, scores, tile_numbers, wide, working_dtype
from ._tiled import TILED, Kernel
from ._unfused import UNFUSED


@record
class Stored:
    """A codec whose vectors are read in the coordinates that they are stored in."""

    codec: Rotated | TurboValues | Centred

    def decode(self, planes: Planes) -> mx.array:
        """What the planes stand for, not rotated back."""
        return self.codec.decode_stored(planes)


def rotates(codec: VectorCodec) -> bool:
    """Whether vectors are stored in other coordinates than they came in."""
    return isinstance(_inside(codec), Rotated | TurboValues)


def _inside(codec: Any) -> Any:
    return codec.codec if isinstance(codec, Centred) else codec


def deferred(kernel: Kernel) -> Kernel:
    """A kernel that rotates queries and output instead of keys and values.

    Args:
        kernel: with the signature of every kernel.
    """

    def reading(queries: mx.array, keys: Planes, values: Planes, codec: Codec, **rest: Any) -> Any:
        check_codec("deferred", codec)
        sizes_of(queries, keys)
        k: Any = codec.keys
        v: Any = codec.values
        asked, turned = queries, _inside(codec.keys)
        if isinstance(turned, Rotated):  # which says how queries become those of what is stored
            k, asked = Stored(k), _by_head(turned.enter_queries, queries, keys[0].shape[1])
        v = Stored(v) if rotates(v) else v
        asked = asked.astype(working_dtype(queries.dtype))  # not rounded before it is turned back
        out = kernel(asked, keys, values, Codec(k, v), **rest)
        whole, lse = out if isinstance(out, Partial) else (out, None)
        if isinstance(v, Stored):
            whole = _by_head(_inside(codec.values).leave, whole, values[0].shape[1])
        if lse is not None:
            return Partial(whole, lse)
        return whole.astype(queries.dtype)

    return reading


def _by_head(turn: Callable[[mx.array], mx.array], x: mx.array, kv_heads: int) -> mx.array:
    """``turn`` applied to vectors of query heads, which may differ by KV head."""
    return turn(fold(x.astype(mx.float32), kv_heads)).reshape(x.shape)


@tile_numbers.register
def _(codec: Stored, planes: Planes) -> int:
    """Several numbers are in an element of packed planes: about four in a byte."""
    return 4 * planes[0].itemsize * planes[0].shape[-1]


@read_tile.register
def _(codec: Stored, planes: Planes, dtype: mx.Dtype) -> tuple[mx.array, mx.array | None]:
    """With one scale a vector it stays apart, and numbers are whole ones.

    Products with those are beyond float16, and the scales that belong to them too small.
    """
    if isinstance(codec.codec, Rotated) and dtype != mx.float16:
        numbers, scales = codec.codec.codes_and_scales(planes)
        if scales.shape[-1] == 1:
            return numbers.astype(dtype), scales.squeeze(-1)[:, :, None].astype(dtype)
    return codec.decode(planes).astype(dtype), None


@scores.register
def _(codec: Stored, queries: mx.array, planes: Planes) -> mx.array:
    if not isinstance(codec.codec, Centred):
        return scores.dispatch(object)(codec, queries, planes)
    centred, inner = codec.codec, codec.codec.rotated
    found = scores(Stored(inner), queries, centred.of_codec(planes))
    return _with_mean(centred, inner.leave_queries(queries), planes, found)


@scores.register
def _(codec: Centred, queries: mx.array, planes: Planes) -> mx.array:
    if rotates(codec):
        return scores.dispatch(object)(codec, queries, planes)
    found = scores(codec.codec, queries, codec.of_codec(planes))
    return _with_mean(codec, queries, planes, found)


def _with_mean(codec: Centred, queries: mx.array, planes: Planes, found: mx.array) -> mx.array:
    more = codec.mean_scores(queries, planes)
    return found if more is None else (found + more).astype(found.dtype)


@decode.register
def _(codec: TurboKeys | TurboValues, planes: Planes, dtype: mx.Dtype) -> mx.array:
    return codec.decode(planes, dtype)


@scores.register
def _(codec: TurboKeys, queries: mx.array, planes: Planes) -> mx.array:
    packed, *scales = codec.affine(planes)
    scales = [scale.astype(queries.dtype) for scale in scales]
    return mx.quantized_matmul(queries, packed, *scales, transpose=True, **codec.quantization)


def densely(kernel: Kernel) -> Kernel:
    """A kernel over keys and values that are decoded first, all of them."""

    def reading(queries: mx.array, keys: Planes, values: Planes, codec: Codec, **rest: Any) -> Any:
        check_codec("dense", codec)
        if not keys[0].shape[2]:
            return kernel(queries, keys, values, codec, **rest)
        dtype = wide(queries).dtype
        k, v = decode(codec.keys, keys, dtype), decode(codec.values, values, dtype)
        out = kernel(wide(queries), (k,), (v,), _PLAIN, **rest)
        return out if isinstance(out, Partial) else out.astype(queries.dtype)

    return reading


_PLAIN = Codec(Plain(), Plain())


def _all(change: Callable[[Kernel], Kernel], kernels: Mapping[str, Kernel]) -> dict[str, Kernel]:
    """A set of kernels, each changed, whose committed reads are its own decoding."""
    changed = {phase: change(kernel) for phase, kernel in kernels.items()}
    return {**changed, "committed": committed(changed["decode"])}


DEFERRED = _all(deferred, TILED)
"""Attention over rotated keys and values as they are stored: queries are rotated instead, and the
output is rotated back once."""

DEFERRED_COMPOSED = _all(deferred, COMPOSED)
"""The same with MLX's fused kernel on decoded tiles, for GPUs."""

DENSE = _all(densely, FUSED)
"""Keys and values are decoded, and MLX's fused kernel reads them."""

UNCOMPOSED = _all(densely, UNFUSED)
"""Op by op: keys and values are decoded, then scores, softmax and mix. The reference for others."""
