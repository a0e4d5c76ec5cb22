"""Attention over latents (MLA) that are expanded to every head's keys and values, tile by tile."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from ..codecs import Codec, Concatenated
from ..planes import Planes
from ._masks import Sizes
from ._merge import Partial
from ._scores import after, decode, wide
from ._tiled import Tile, in_blocks, in_tiles, out_of
from ._unfused import masked, weights_and_lse


def expanded(up_keys: mx.array, up_values: mx.array) -> Mapping[str, Any]:
    """A kernel set for windows over latents.

    Its keys are latents and rotated keys (a :class:`kvfun.codecs.Concatenated`), its queries have
    numbers for the heads' own keys and, behind them, rotated ones. A tile of latents becomes keys
    and values of all heads when it is read, and nothing is left of them afterwards.

    Args:
        up_keys: ``[heads, head_dim, rank]``: a head's key is ``up_keys @ latent``.
        up_values: ``[heads, rank, value_dim]``: its value is ``latent @ up_values``.
    """
    heads, dim, _ = up_keys.shape
    value_dim = up_values.shape[2]

    def reader(queries: mx.array, codec: Codec, scale: float, sizes: Sizes) -> Tile:
        own, rotated = mx.split(wide(queries) * scale, [dim], axis=-1)
        keys_up, values_up = up_keys.astype(own.dtype), up_values.astype(own.dtype)

        def read(keys: Planes, values: Planes, mask: mx.array | None) -> Partial:
            assert isinstance(codec.keys, Concatenated)
            latents, turned = codec.keys.parts(decode(codec.keys, keys, own.dtype))
            s = own @ (keys_up @ latents.swapaxes(-1, -2)) + rotated @ turned.swapaxes(-1, -2)
            s = s.astype(mx.float32)
            if mask is not None:
                s = masked(s.reshape(*sizes[:4], s.shape[-1]), mask).reshape(s.shape)
            weights, lse = weights_and_lse(s)
            (latents,) = after((latents,), weights)
            out = weights.astype(own.dtype) @ (latents @ values_up)
            return Partial(out.astype(mx.float32), lse)

        return read

    tiles = in_tiles("expanded", reader, heads * (dim + value_dim))
    whole = in_blocks(out_of(tiles))
    return {"window": whole, "masked_window": whole, "partial": in_blocks(tiles)}
