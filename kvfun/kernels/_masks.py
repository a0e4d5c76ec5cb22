"""The shapes of masks: one kernel wants a mask by query head, another by KV head and group."""

from __future__ import annotations

import mlx.core as mx

from ..errors import ShapeError


def four_axes(mask: mx.array, kv_heads: int, group: int) -> mx.array:
    """A mask of rank 5, by KV head and group, as one that broadcasts to ``[B, heads, L, N]``."""
    if mask.ndim < 5:
        return mask
    if mask.shape[1] * mask.shape[2] > 1:
        shape = (mask.shape[0], kv_heads, group, *mask.shape[3:])
        mask = mx.broadcast_to(mask, shape)
    return mx.flatten(mask, 1, 2)


def five_axes(mask: mx.array, kv_heads: int, group: int) -> mx.array:
    """A mask that broadcasts to ``[B, heads, L, N]`` as ``[B, kv_heads, group, L, N]``.

    Raises:
        ShapeError: rank above 5, or an axis of heads that fits neither.
    """
    if mask.ndim <= 2 or mask.ndim == 5:
        return mask
    if mask.ndim > 5:
        raise ShapeError(f"a mask has at most 5 axes, not {mask.ndim}: {tuple(mask.shape)}")
    heads = mask.shape[-3]
    if heads == 1:
        return mx.expand_dims(mask, -3)
    if heads != kv_heads * group:
        raise ShapeError(
            f"the mask {tuple(mask.shape)} has {heads} heads, the queries {kv_heads * group}"
        )
    return mx.unflatten(mask, -3, (kv_heads, group))


def lower_right(queries: int, columns: int, start: int, stop: int) -> mx.array:
    """Columns ``[start, stop)`` of the causal mask of ``queries`` queries over ``columns``."""
    last = mx.arange(columns - queries, columns)[:, None]
    return mx.arange(start, stop)[None] <= last
