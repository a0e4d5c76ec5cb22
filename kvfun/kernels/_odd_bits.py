"""Sums of values of 3 or 5 bits, computed as sums of bytes: three times as fast on the CPU.

There MLX unpacks such numbers again for every row of weights, slowly, as they cross the borders of
bytes; bytes it multiplies ten times as fast. A number is the sum of its pieces in one or two bytes,
each times a power of two; a byte holds pieces of three or four numbers. So the bytes are masked as
often, and mixed; the numbers' own sums are then a small matrix times those of the pieces.
"""

from __future__ import annotations

from functools import cache

import mlx.core as mx

from ..planes import Planes

PIECES = {3: 4, 5: 3}
"""Numbers that have a piece in one byte, at most."""


def mix_bytes(weights: mx.array, planes: Planes, bits: int, group_size: int) -> mx.array:
    """``weights @ values`` in float32: ``[B, H, L, N]`` and affine planes to ``[B, H, L, D]``."""
    packed, scales, biases = planes
    count = min(group_size, 64)  # numbers that are mixed as one group of bytes
    masks, powers = _tables(bits, count)
    repeats = group_size // count
    if repeats > 1:
        scales, biases = mx.repeat(scales, repeats, -1), mx.repeat(biases, repeats, -1)
    words = mx.unflatten(packed, -1, (scales.shape[-1], count * bits // 32))
    words = mx.pad(words, [(0, 0)] * 4 + [(0, masks.shape[1] - words.shape[-1])])
    none, size = mx.zeros_like(scales), 4 * masks.shape[1]
    sums = []
    for mask in masks:
        pieces = mx.flatten(words & mask, -2, -1)
        part = mx.quantized_matmul(
            weights, pieces, scales, none, transpose=False, group_size=size, bits=8
        )
        sums.append(mx.unflatten(part, -1, (-1, size)))
    out = mx.concatenate(sums, axis=-1) @ powers + (weights @ biases)[..., None]
    return mx.flatten(out, -2, -1)


@cache
def _tables(bits: int, count: int) -> tuple[mx.array, mx.array]:
    """Masks of pieces, ``uint32 [pieces, words]``, and what each is worth in which number.

    The latter is ``[pieces * bytes, count]``.
    """
    size = 32 if count * bits <= 256 else 64
    masks = [[0] * size for _ in range(PIECES[bits])]
    powers = [[0.0] * count for _ in range(PIECES[bits] * size)]
    for bit in range(count * bits):
        number, byte = bit // bits, bit // 8
        place = number % PIECES[bits]
        masks[place][byte] |= 1 << bit % 8
        powers[place * size + byte][number] = 2.0 ** (8 * byte - bits * number)
    words = [[int.from_bytes(row[i : i + 4], "little") for i in range(0, size, 4)] for row in masks]
    return mx.array(words, mx.uint32), mx.array(powers)
