"""MLX's fused attention over plain numbers."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from ..codecs import Codec
from ..planes import Planes
from ._masks import four_axes
from ._scores import working_dtype
from ._tiled import tiled
from ._unfused import unfused


def fused(
    queries: mx.array,
    keys: Planes,
    values: Planes,
    codec: Codec,
    *,
    scale: float,
    mask: mx.array | str | None = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """``mx.fast.scaled_dot_product_attention``, in the queries' dtype."""
    if isinstance(mask, mx.array):
        kv_heads = keys[0].shape[1]
        mask = _finite(four_axes(mask, kv_heads, queries.shape[1] // kv_heads), queries.dtype)
    out = mx.fast.scaled_dot_product_attention(
        queries,
        codec.keys.decode(keys),
        codec.values.decode(values),
        scale=scale,
        mask=mask,
        sinks=None if sinks is None else sinks.astype(queries.dtype),
    )
    return out if out.dtype == queries.dtype else out.astype(queries.dtype)


def _finite(mask: mx.array, dtype: mx.Dtype) -> mx.array:
    """Half the lowest number for -inf, so that a query that sees nothing yields no NaN."""
    if mask.dtype == mx.bool_:
        return mask
    return mx.maximum(mask.astype(dtype), mx.finfo(dtype).min / 2)


def _where_it_suits(other: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """The fused kernel, or ``other`` where that is faster.

    Which is where the fused one would first promote a copy of all that is stored, and on the CPU
    in 16 bits (1.3 to 7 times).
    """

    def kernel(queries: mx.array, keys: Planes, values: Planes, codec: Codec, **rest) -> mx.array:
        dtypes = {queries.dtype, *[plane.dtype for plane in (*keys, *values)]}
        read = fused if dtypes == {working_dtype(queries.dtype)} else other
        return read(queries, keys, values, codec, **rest)

    return kernel


FUSED = {
    "decode": _where_it_suits(unfused),
    "window": _where_it_suits(tiled),
    "masked_window": _where_it_suits(tiled),
}
