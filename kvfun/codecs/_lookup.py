"""Looking numbers up in a table, as fast as MLX can."""

from __future__ import annotations

import mlx.core as mx


def lookup(table: mx.array, index: mx.array) -> mx.array:
    """``table[index]``, for a table of one axis.

    On the CPU ``mx.take`` costs 5 ns an index, ``mx.take_along_axis`` 0.6 ns (MLX 0.32.4); an entry
    may be up to 8 bytes, so that several small numbers come at once.
    """
    flat = index.reshape(index.size)
    return mx.take_along_axis(table, flat, axis=0).reshape(index.shape)
