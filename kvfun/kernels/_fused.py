"""MLX's fused attention over decoded planes: the set for plain numbers."""

from __future__ import annotations

import mlx.core as mx

from ..codecs import Codec
from ..planes import Planes
from ._masks import four_axes


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
        mask = four_axes(mask, kv_heads, queries.shape[1] // kv_heads)
    out = mx.fast.scaled_dot_product_attention(
        queries,
        codec.keys.decode(keys),
        codec.values.decode(values),
        scale=scale,
        mask=mask,
        sinks=sinks,
    )
    return out if out.dtype == queries.dtype else out.astype(queries.dtype)


FUSED = {"decode": fused, "window": fused, "masked_window": fused}
