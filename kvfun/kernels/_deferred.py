"""Attention in the coordinates that vectors are stored in: queries enter, the output leaves, once.

Scores are products, and the output is a sum of values: a rotation of all keys is one of the
queries, and that of all values one of the output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
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
from ._scores import after, decode, fold, mix, scores, tile_columns, tiles, wide, working_dtype
from ._tiled import TILED, Kernel
from ._unfused import UNFUSED


@record
class Stored:
    """A codec whose vectors are read in the coordinates that they are stored in."""

    codec: Rotated | TurboValues | Centred

    def decode(self, planes: Planes) -> mx.array:
        """What the planes stand for, not rotated back."""
        return self.codec.decode_stored(planes)

    @property
    def rotated(self) -> Rotated | TurboValues:
        """The codec that rotates."""
        return self.codec.rotated if isinstance(self.codec, Centred) else self.codec


def rotates(codec: VectorCodec) -> bool:
    """Whether vectors are stored in other coordinates than they came in."""
    inner = codec.codec if isinstance(codec, Centred) else codec
    return isinstance(inner, Rotated | TurboValues)


def _stored(codec: Any, queried: bool = False) -> Any:
    """With ``queried``, only a codec that says how queries become those of what is stored."""
    inner = codec.codec if isinstance(codec, Centred) else codec
    return Stored(codec) if isinstance(inner, Rotated) or rotates(codec) > queried else codec


def deferred(kernel: Kernel) -> Kernel:
    """A kernel that rotates queries and output instead of keys and values.

    Args:
        kernel: with the signature of every kernel.
    """

    def reading(queries: mx.array, keys: Planes, values: Planes, codec: Codec, **rest: Any) -> Any:
        check_codec("deferred", codec)
        sizes_of(queries, keys)
        inner, asked = Codec(_stored(codec.keys, queried=True), _stored(codec.values)), queries
        if isinstance(inner.keys, Stored) and isinstance(inner.keys.rotated, Rotated):
            asked = _by_head(inner.keys.rotated.enter_queries, queries, keys[0].shape[1])
        asked = asked.astype(working_dtype(queries.dtype))  # not rounded before it is turned back
        out = kernel(asked, keys, values, inner, **rest)
        whole, lse = out if isinstance(out, Partial) else (out, None)
        if isinstance(inner.values, Stored):
            whole = _by_head(inner.values.rotated.leave, whole, values[0].shape[1])
        if lse is not None:
            return Partial(whole, lse)
        return whole.astype(queries.dtype)

    return reading


def _by_head(turn: Callable[[mx.array], mx.array], x: mx.array, kv_heads: int) -> mx.array:
    """``turn`` applied to vectors of query heads, which may differ by KV head."""
    return turn(fold(x.astype(mx.float32), kv_heads)).reshape(x.shape)


def _tiles(codec: Stored, planes: Planes, like: mx.array, done: list) -> Iterator[Planes]:
    """Planes tile by tile, each read when the last product is there."""
    batch, heads, rows, _ = like.shape
    width = max(4 * planes[0].nbytes // planes[0].size * planes[0].shape[-1], rows)
    for _, _, tile in tiles(planes, tile_columns(batch * heads * width)):
        yield after(tile, *done[-1:])


def _numbers(
    codec: Rotated | TurboValues, tile: Planes, dtype: mx.Dtype
) -> tuple[mx.array, mx.array | None]:
    """Decoded but for one scale a vector, or decoded.

    Products with whole numbers are beyond float16, and the scales that belong to them too small.
    """
    if isinstance(codec, Rotated) and dtype != mx.float16:
        numbers, scales = codec.codes_and_scales(tile)
        if scales.shape[-1] == 1:
            return numbers, scales.squeeze(-1)[:, :, None]
    return codec.decode_stored(tile), None


@scores.register
def _(codec: Stored, queries: mx.array, planes: Planes) -> mx.array:
    inner = codec.rotated
    stored = codec.codec.of_codec(planes) if isinstance(codec.codec, Centred) else planes
    parts: list[mx.array] = []
    for tile in _tiles(codec, stored, queries, parts):
        numbers, scale = _numbers(inner, tile, queries.dtype)
        part = queries @ numbers.astype(queries.dtype).swapaxes(-1, -2)
        parts.append(part if scale is None else part * scale.astype(part.dtype))
    found = parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1)
    if isinstance(codec.codec, Centred) and isinstance(inner, Rotated):
        return _with_mean(codec.codec, inner.leave_queries(queries), planes, found)
    return found


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


@mix.register
def _(codec: Stored, weights: mx.array, planes: Planes) -> mx.array:
    inner, parts, start = codec.rotated, [], 0
    if isinstance(codec.codec, Centred):
        return mix.dispatch(object)(codec, weights, planes)
    for tile in _tiles(codec, planes, weights, parts):
        stop = start + tile[0].shape[2]
        numbers, scale = _numbers(inner, tile, weights.dtype)
        part = weights[..., start:stop]
        part = part if scale is None else part * scale.astype(part.dtype)
        part = part @ numbers.astype(part.dtype)
        parts.append(parts[-1] + part if parts else part)
        start = stop
    return parts[-1]


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
