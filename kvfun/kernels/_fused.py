"""MLX's fused attention over plain numbers."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from ..codecs import Codec
from ..planes import Planes
from ._committed import committed
from ._masks import Mask, Sizes, check_codec, four_axes, is_causal, sizes_of, whole
from ._scores import working_dtype
from ._tiled import TILED, in_blocks, tiled
from ._unfused import of_nothing, unfused


def fused(
    queries: mx.array,
    keys: Planes,
    values: Planes,
    codec: Codec,
    *,
    scale: float,
    mask: Mask = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """``mx.fast.scaled_dot_product_attention``, in the queries' dtype."""
    check_codec("fused", codec)
    sizes = sizes_of(queries, keys, sinks)
    if not sizes.columns:
        return of_nothing(queries, values, codec).out.astype(queries.dtype)
    k, v = codec.keys.decode(keys), codec.values.decode(values)
    return attention(queries, k, v, scale, mask, sinks, sizes).astype(queries.dtype)


def attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    mask: Mask,
    sinks: mx.array | None,
    sizes: Sizes,
) -> mx.array:
    """MLX's kernel over decoded numbers, under any mask."""
    if is_causal(mask) and sizes.columns >= sizes.queries:
        hidden: mx.array | str | None = "causal"
    elif (hidden := whole(mask, sizes)) is not None:
        hidden = _finite(four_axes(hidden, sizes), queries.dtype)
    sinks = None if sinks is None else sinks.astype(queries.dtype)
    return mx.fast.scaled_dot_product_attention(
        queries, keys, values, scale=scale, mask=hidden, sinks=sinks
    )


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

    def kernel(
        queries: mx.array, keys: Planes, values: Planes, codec: Codec, *, mask: Mask = None, **rest
    ) -> mx.array:
        dtypes = {queries.dtype, *[plane.dtype for plane in (*keys, *values)]}
        read = other
        if dtypes == {working_dtype(queries.dtype)}:
            read = _fused_in_blocks if callable(mask) else fused
        return read(queries, keys, values, codec, mask=mask, **rest)

    return kernel


_fused_in_blocks = in_blocks(fused)
"""A mask that is built on demand is never whole."""

_decode, _window = _where_it_suits(unfused), _where_it_suits(tiled)

FUSED = {
    "decode": _decode,
    "window": _window,
    "masked_window": _window,
    "committed": committed(_decode),
    "partial": TILED["partial"],
}
"""MLX's fused kernel, which returns no log-sum-exp: a partial read is that of :data:`TILED`."""
