"""MLX's fused attention over one decoded tile after the other, merged."""

from __future__ import annotations

import mlx.core as mx

from ..codecs import Codec
from ..planes import Planes
from ._committed import committed
from ._fused import attention
from ._masks import Mask, Sizes, check_codec, sizes_of
from ._merge import LOWEST, Partial
from ._scores import after, decode, fold, wide
from ._tiled import Tile, in_blocks, in_tiles, out_of, tile_size
from ._unfused import masked


def _composing(queries: mx.array, codec: Codec, scale: float, sizes: Sizes) -> Tile:
    q = wide(queries)
    folded = fold(q * scale, sizes.kv_heads)

    def read(keys: Planes, values: Planes, mask: mx.array | None) -> Partial:
        k = decode(codec.keys, keys, q.dtype)
        s = (folded @ k.swapaxes(-1, -2)).astype(mx.float32)
        s = masked(s if mask is None else s.reshape(*sizes[:4], s.shape[-1]), mask)
        lse = mx.logsumexp(s, axis=-1).reshape(queries.shape[:3])
        v = decode(codec.values, after(values, lse), q.dtype)
        tile = sizes._replace(columns=k.shape[2])
        out = attention(q, k, v, scale, mask, None, tile).astype(mx.float32)
        if mask is not None:  # a kernel may yield NaN where a query sees nothing of the tile
            out = mx.where((lse > LOWEST / 2)[..., None], out, 0)
        return Partial(out, lse)

    return read


_tile_by_tile = in_tiles("composed", _composing)


def _at_once(
    queries: mx.array,
    keys: Planes,
    values: Planes,
    codec: Codec,
    *,
    scale: float,
    mask: Mask = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """The fused kernel on decoded numbers where one tile holds them all; else tile by tile."""
    check_codec("composed", codec)
    sizes = sizes_of(queries, keys, sinks)
    if not 0 < sizes.columns <= tile_size(queries, sizes):
        options = {"scale": scale, "mask": mask, "sinks": sinks}
        return out_of(_tile_by_tile)(queries, keys, values, codec, **options)
    q = wide(queries)
    k = decode(codec.keys, keys, q.dtype)
    v = decode(codec.values, values, q.dtype)
    return attention(q, k, v, scale, mask, sinks, sizes).astype(queries.dtype)


composed = in_blocks(_at_once)
"""MLX's fused kernel on one decoded tile of columns after the other.

It returns no log-sum-exp: where there are several tiles, each one's is computed from a product of
its own.
"""

composed_partial = in_blocks(_tile_by_tile)
"""The result of :data:`composed` with its log-sum-exp."""

COMPOSED = {
    "decode": composed,
    "window": composed,
    "masked_window": composed,
    "committed": committed(composed),
    "partial": composed_partial,
}
"""Tiles of decoded numbers, read by MLX's fused kernel."""
