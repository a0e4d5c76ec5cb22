"""The verify window of two drafts, three grouped query heads a batch."""

from __future__ import annotations

import mlx.core as mx

from ..codecs import Affine, Codec
from ..errors import CodecError, PhaseError, ShapeError
from ..planes import Planes
from ._masks import Mask, is_causal, lower_right
from ._scores import wide
from ._unfused import UNFUSED, masked

QUERIES, HEADS, KV_HEADS, HEAD_DIM = 3, 24, 4, 256
MOST_ROWS, FEWEST_COLUMNS = 2, 8192
CODEC = Affine(4, 64)
TOGETHER = 3
"""Query heads whose queries make one block of rows."""


def grouped_heads(
    queries: mx.array,
    keys: Planes,
    values: Planes,
    codec: Codec,
    *,
    scale: float,
    mask: Mask = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """Three queries of three heads at a time: nine rows of scores for each pass over the keys.

    Shapes: queries ``[B, 24, 3, 256]`` become ``[B, 4, 2, 9, 256]`` over planes with a unit axis.

    Raises:
        ShapeError, CodecError, PhaseError: anything but 3 queries of 24 heads over 4 KV heads,
            256 numbers each, in 1 or 2 rows of at least 8192 columns of 4 bits in groups of 64,
            under no mask or a causal one, without sinks.
    """
    _check(queries, keys, values, codec, mask, sinks)
    batch, columns = queries.shape[0], keys[0].shape[2]
    shape = (batch, KV_HEADS, HEADS // KV_HEADS // TOGETHER, TOGETHER * QUERIES)
    s = _product((wide(queries) * scale).reshape(*shape, HEAD_DIM), keys, transpose=True)
    if mask is not None:
        causal = lower_right(QUERIES, columns, 0, columns)
        s = masked(s, mx.concatenate([causal] * TOGETHER))
    out = _product(mx.softmax(s, axis=-1, precise=True), values, transpose=False)
    return out.reshape(batch, HEADS, QUERIES, HEAD_DIM).astype(queries.dtype)


def _product(x: mx.array, planes: Planes, transpose: bool) -> mx.array:
    packed, scales, biases = [mx.expand_dims(plane, 2) for plane in planes]
    return mx.quantized_matmul(
        x,
        packed,
        scales.astype(x.dtype),
        biases.astype(x.dtype),
        transpose=transpose,
        group_size=CODEC.group_size,
        bits=CODEC.bits,
    )


def _check(queries, keys, values, codec, mask, sinks) -> None:
    """Say what was given and what is read, if it is not that."""
    sides = getattr(codec, "keys", None), getattr(codec, "values", None)
    if any(
        not isinstance(side, Affine) or (side.bits, side.group_size) != (4, 64) for side in sides
    ):
        raise CodecError(f"the grouped-heads kernel reads kv4 (groups of 64), not {codec!r}")
    rows, heads, length, dim = queries.shape
    kv_heads, columns = keys[0].shape[1:3]
    value_dim = values[0].shape[3] * 32 // CODEC.bits
    given = heads, length, kv_heads, dim, value_dim
    if (
        given != (HEADS, QUERIES, KV_HEADS, HEAD_DIM, HEAD_DIM)
        or rows > MOST_ROWS
        or columns < FEWEST_COLUMNS
    ):
        raise ShapeError(
            f"the grouped-heads kernel reads {QUERIES} queries of {HEADS} heads over {KV_HEADS} KV "
            f"heads of {HEAD_DIM} numbers (keys and values), at most {MOST_ROWS} rows and at least "
            f"{FEWEST_COLUMNS} columns; given were queries {tuple(queries.shape)} over {kv_heads} "
            f"KV heads and {columns} columns, values of {value_dim} numbers"
        )
    if sinks is not None or not (mask is None or is_causal(mask)):
        what = "sinks" if sinks is not None else f"a mask that is a {type(mask).__name__}"
        raise PhaseError(
            f"the grouped-heads kernel reads under no mask or 'causal', without sinks, not {what}"
        )


GROUPED_HEADS = {**UNFUSED, "window": grouped_heads, "masked_window": grouped_heads}
"""For the verify window of two drafts alone; its other phases are those of :data:`UNFUSED`."""
