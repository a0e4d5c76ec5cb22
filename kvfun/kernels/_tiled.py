"""Attention tile by tile with an online softmax: memory for one tile of scores, never for all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from ..codecs import Codec
from ..planes import Planes
from ._committed import committed
from ._masks import Mask, Sizes, by_columns, check_codec, checked, is_causal, rows, sizes_of
from ._merge import Partial, merge
from ._scores import after, cut, decode, fold, tile_columns, wide
from ._unfused import (
    UNFUSED,
    masked,
    of_nothing,
    unfused,
    unfused_partial,
    weights_and_lse,
    with_sinks,
)

BLOCK = 512
"""Queries computed at once."""

FEW = 8
"""Queries of a KV head whose scores are all computed at once where a set leaves the choice: their
scores take less memory than the keys, and without a fast BLAS tiles are slower."""

Kernel = Callable[..., Any]
"""With the signature of every kernel: to an array, or to a :class:`Partial`."""

Tile = Callable[[Planes, Planes, "mx.array | None"], Partial]
"""Reads one tile: its keys, its values and its mask of five axes."""

Reader = Callable[[mx.array, Codec, float, Sizes], Tile]
"""From queries, codec, scale and sizes, what reads the tiles one by one."""


def in_tiles(name: str, reader: Reader, numbers: int = 0) -> Kernel:
    """A kernel that reads one tile of columns after the other and merges what it has read.

    Milakov and Gimelshein, *Online normalizer calculation for softmax* (2018).

    Args:
        name: what errors call it.
        reader: what reads a tile.
        numbers: those that a column becomes while it is read, where that is more than a key has.
    """

    def kernel(
        queries: mx.array,
        keys: Planes,
        values: Planes,
        codec: Codec,
        *,
        scale: float,
        mask: Mask = None,
        sinks: mx.array | None = None,
    ) -> Partial:
        check_codec(name, codec)
        sizes = sizes_of(queries, keys, sinks)
        hidden, read = by_columns(mask, sizes), reader(queries, codec, scale, sizes)
        done: Partial | None = None
        size = tile_size(queries, sizes, numbers)
        for start in range(0, sizes.columns, size):
            stop = min(start + size, sizes.columns)
            k, v = cut(keys, start, stop), cut(values, start, stop)
            part = read(after(k, *done or ()), v, hidden(start, stop))
            done = part if done is None else merge([done, part])
        return with_sinks(of_nothing(queries, values, codec) if done is None else done, sinks)

    return kernel


def tile_size(queries: mx.array, sizes: Sizes, numbers: int = 0) -> int:
    """Columns that are read at once."""
    batch, heads, length, head_dim = queries.shape
    most = max(sizes.kv_heads * head_dim, heads * length, numbers)
    return tile_columns(batch * most, length)


def in_blocks(kernel: Kernel) -> Kernel:
    """The same for :data:`BLOCK` queries at a time; causal ones read no column they do not see."""

    def blocks(
        queries: mx.array,
        keys: Planes,
        values: Planes,
        codec: Codec,
        *,
        scale: float,
        mask: Mask = None,
        sinks: mx.array | None = None,
    ) -> Any:
        length, columns = queries.shape[2], keys[0].shape[2]
        if length <= BLOCK:
            return kernel(queries, keys, values, codec, scale=scale, mask=mask, sinks=sinks)
        hidden_behind, mask = is_causal(mask), checked(mask, sizes_of(queries, keys))
        done: list = []
        for first in range(0, length, BLOCK):
            last = min(first + BLOCK, length)
            stop = max(0, columns - length + last) if hidden_behind else columns
            (block,) = after((queries[:, :, first:last],), *_arrays(done[-1:]))
            k, v, part = cut(keys, 0, stop), cut(values, 0, stop), rows(mask, first, last)
            done.append(kernel(block, k, v, codec, scale=scale, mask=part, sinks=sinks))
        return _joined(done)

    return blocks


def _arrays(results: list) -> list[mx.array]:
    return [x for result in results for x in ([result] if isinstance(result, mx.array) else result)]


def _joined(results: list) -> mx.array | Partial:
    if isinstance(results[0], mx.array):
        return mx.concatenate(results, axis=2)
    return Partial(*[mx.concatenate(list(axis), axis=2) for axis in zip(*results, strict=True)])


def out_of(kernel: Kernel) -> Callable[..., mx.array]:
    """The result of a partial kernel over all columns, in the queries' dtype."""

    def whole(queries: mx.array, *planes, **rest) -> mx.array:
        return kernel(queries, *planes, **rest).out.astype(queries.dtype)

    return whole


def by_length(few: Kernel, many: Kernel) -> Kernel:
    """One kernel for a single query a row and up to :data:`FEW` a KV head, another for more."""

    def kernel(queries: mx.array, keys: Planes, values: Planes, codec: Codec, **rest) -> Any:
        _, heads, length, _ = queries.shape
        read = few if length == 1 or heads * length <= FEW * keys[0].shape[1] else many
        return read(queries, keys, values, codec, **rest)

    return kernel


def _decoding(queries: mx.array, codec: Codec, scale: float, sizes: Sizes) -> Tile:
    """Products in the dtype that suits the device, their sums and the softmax in float32."""
    q = fold(wide(queries) * scale, sizes.kv_heads)

    def read(keys: Planes, values: Planes, mask: mx.array | None) -> Partial:
        k = decode(codec.keys, keys, q.dtype)
        s = (q @ k.swapaxes(-1, -2)).astype(mx.float32)
        s = masked(s if mask is None else s.reshape(*sizes[:4], s.shape[-1]), mask)
        weights, lse = weights_and_lse(s)
        weights = weights.astype(q.dtype).reshape(*q.shape[:3], s.shape[-1])
        out = weights @ decode(codec.values, after(values, weights), q.dtype)
        out = out.reshape(*queries.shape[:3], out.shape[-1])
        return Partial(out.astype(mx.float32), lse.reshape(queries.shape[:3]))

    return read


_tile_by_tile = in_tiles("tiled", _decoding)

tiled_partial = in_blocks(_tile_by_tile)
"""Of a block of :data:`BLOCK` queries and a tile of columns at a time there are scores, and decoded
keys and values."""

tiled = in_blocks(out_of(_tile_by_tile))
"""The result of :data:`tiled_partial` alone, in the queries' dtype."""

TILED = {
    **UNFUSED,
    "window": tiled,
    "masked_window": tiled,
    "partial": by_length(unfused_partial, tiled_partial),
}
"""One query: its scores are a single row, so nothing is gained by tiles. More: tiles, so that
neither the score matrix nor a decoded copy of the cache is ever whole."""


def _tiled_causal(
    queries: mx.array, keys: Planes, values: Planes, codec: Codec, *, mask: Mask = None, **rest
) -> mx.array:
    """Tiles, but for a mask that is an array."""
    read = unfused if isinstance(mask, mx.array) else tiled
    return read(queries, keys, values, codec, mask=mask, **rest)


TILED_CAUSAL = {**TILED, "window": _tiled_causal, "masked_window": unfused}
"""Tiles for causal windows only: masks that are arrays are applied to all scores at once."""

ALL_TILED = {
    "decode": tiled,
    "window": tiled,
    "masked_window": tiled,
    "committed": committed(tiled),
    "partial": tiled_partial,
}
"""Tiles for a single query too, so that every product is one of decoded numbers."""
