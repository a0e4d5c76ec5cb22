"""Masks: what is given, and the block of it that a read asks for.

A mask is ``None`` (every query sees every column), ``"causal"`` (aligned at the lower right), a
bool array (true: attend), a float array (added to the scores), or a callable that builds a block of
a mask on demand. An array broadcasts to ``[batch, heads, L, N]``, or of rank 5 to
``[batch, kv_heads, heads // kv_heads, L, N]``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import mlx.core as mx

from ..codecs import Codec
from ..errors import CodecError, DTypeError, ShapeError
from ..planes import Planes

LazyMask = Callable[[int, int, int, int], "mx.array | None"]
"""``mask(first, last, start, stop)``: queries ``[first, last)`` over columns ``[start, stop)``."""

Mask = mx.array | str | LazyMask | None

Block = Callable[[int, int], mx.array | None]
"""The mask of columns ``[start, stop)``, of five axes; none where all queries see them all."""


class Sizes(NamedTuple):
    """The axes of a read: scores are ``[batch, kv_heads, group, queries, columns]``."""

    batch: int
    kv_heads: int
    group: int
    queries: int
    columns: int


def sizes_of(queries: mx.array, keys: Planes, sinks: mx.array | None = None) -> Sizes:
    """The axes of a read.

    Raises:
        ShapeError: query heads that the KV heads do not divide, sinks that are not ``[heads]``.
    """
    batch, heads, length, _ = queries.shape
    kv_heads, columns = keys[0].shape[1:3]
    if heads % kv_heads:
        raise ShapeError(
            f"the queries {tuple(queries.shape)} have {heads} heads, no multiple of the "
            f"{kv_heads} KV heads of the keys"
        )
    if sinks is not None and sinks.shape != (heads,):
        raise ShapeError(
            f"sinks are one logit a query head, ({heads},), not {tuple(sinks.shape)}: the queries "
            f"are {tuple(queries.shape)}"
        )
    return Sizes(batch, kv_heads, heads // kv_heads, length, columns)


def check_codec(kernel: str, codec: Codec) -> None:
    """Raise ``CodecError`` where a kernel is not given two codecs that decode."""
    sides = (codec.keys, codec.values) if type(codec) is Codec else (codec,)
    if len(sides) == 1 or not (hasattr(sides[0], "decode") and hasattr(sides[1], "decode")):
        raise CodecError(
            f"the {kernel} kernel reads planes by a kvfun Codec of two codecs, not by "
            + ", ".join(map(repr, sides))
        )


def is_causal(mask: Mask) -> bool:
    """Whether the mask is ``"causal"``.

    Raises:
        ShapeError: a mask that is none.
    """
    if isinstance(mask, str):
        if mask != "causal":
            raise ShapeError(f"a mask is None, 'causal', an mlx array or a callable, not {mask!r}")
        return True
    return False


def checked(mask: Mask, sizes: Sizes) -> Mask:
    """The mask, an array as :func:`five_axes` has it.

    Raises:
        ShapeError, DTypeError: a mask that does not fit the read, or that is none.
    """
    if isinstance(mask, mx.array):
        return five_axes(mask, sizes)
    if mask is None or is_causal(mask) or callable(mask):
        return mask
    raise ShapeError(f"a mask is None, 'causal', an mlx array or a callable, not {mask!r}")


def by_columns(mask: Mask, sizes: Sizes) -> Block:
    """The mask of all queries, in blocks of columns.

    Raises:
        ShapeError, DTypeError: a mask that does not fit the read.
    """
    mask = checked(mask, sizes)
    if mask is None:
        return lambda start, stop: None
    if isinstance(mask, str):
        return lambda start, stop: _causal(sizes, start, stop)
    if isinstance(mask, mx.array):
        return _pieces(mask)
    return lambda start, stop: _built(mask, sizes, start, stop)


def whole(mask: Mask, sizes: Sizes) -> mx.array | None:
    """All of a mask, of five axes; none where nothing is hidden."""
    return None if mask is None else by_columns(mask, sizes)(0, sizes.columns)


def rows(mask: Mask, first: int, last: int) -> Mask:
    """The queries ``[first, last)`` of a mask from :func:`checked`.

    A causal one stays what it is: whoever cuts the queries cuts the columns behind the last one.
    """
    if mask is None or isinstance(mask, str):
        return mask
    if isinstance(mask, mx.array):
        return mask if mask.ndim < 2 or mask.shape[-2] == 1 else mask[..., first:last, :]
    return lambda a, b, start, stop: mask(first + a, first + b, start, stop)


def four_axes(mask: mx.array, sizes: Sizes) -> mx.array:
    """A mask from :func:`five_axes` as one that broadcasts to ``[batch, heads, L, N]``."""
    if mask.ndim < 5:
        return mask
    batch, kv_heads, group, length, columns = mask.shape
    if kv_heads * group > 1:
        by_head = (batch, sizes.kv_heads, sizes.group, length, columns)
        mask = mx.broadcast_to(mask, by_head)
    return mx.flatten(mask, 1, 2)


def five_axes(mask: mx.array, sizes: Sizes) -> mx.array:
    """A mask as one that broadcasts to ``[batch, kv_heads, group, L, N]``, of rank 5, 2 or 1.

    Raises:
        ShapeError: an axis that fits neither the queries nor the columns nor their heads.
        DTypeError: neither bool nor floating point.
    """
    if mask.dtype != mx.bool_ and not mx.issubdtype(mask.dtype, mx.floating):
        raise DTypeError(f"a mask is bool (true: attend) or floating point, not {mask.dtype}")
    given, heads = mask.shape, sizes.kv_heads * sizes.group
    if mask.ndim > 5:
        raise ShapeError(f"a mask has at most 5 axes, not {mask.ndim}: {tuple(given)}")
    if mask.ndim == 3:
        mask = mask[None]
    if mask.ndim == 4:
        if mask.shape[1] not in (1, heads):
            raise ShapeError(
                f"the mask {tuple(given)} has {mask.shape[1]} heads, the queries {heads}"
            )
        by_head = (1, 1) if mask.shape[1] == 1 else (sizes.kv_heads, sizes.group)
        mask = mx.unflatten(mask, 1, by_head)
    for have, want in zip(mask.shape, sizes[5 - mask.ndim :], strict=True):
        if have not in (1, want):
            raise ShapeError(
                f"the mask {tuple(given)} does not fit batch {sizes.batch}, {heads} query heads "
                f"over {sizes.kv_heads} KV heads, {sizes.queries} queries and {sizes.columns} "
                "columns"
            )
    return mask


def _causal(sizes: Sizes, start: int, stop: int) -> mx.array | None:
    seen_by_all = sizes.columns - sizes.queries + 1
    if stop <= seen_by_all:
        return None
    return lower_right(sizes.queries, sizes.columns, start, stop)


def _pieces(mask: mx.array) -> Block:
    if mask.shape[-1] == 1:
        return lambda start, stop: mask
    return lambda start, stop: mask[..., start:stop]


def _built(mask: LazyMask, sizes: Sizes, start: int, stop: int) -> mx.array | None:
    block = mask(0, sizes.queries, start, stop)
    if block is None:
        return None
    if not isinstance(block, mx.array):
        raise ShapeError(f"a callable mask returns an mlx array, not {block!r}")
    return five_axes(block, sizes._replace(columns=stop - start))


def lower_right(queries: int, columns: int, start: int, stop: int) -> mx.array:
    """Columns ``[start, stop)`` of the causal mask of ``queries`` queries over ``columns``."""
    last = mx.arange(columns - queries, columns)[:, None]
    return mx.arange(start, stop)[None] <= last
