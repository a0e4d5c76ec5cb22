"""Small numbers side by side in bytes, and tables that turn bytes into what they stand for.

Sign and magnitude are apart, so that a GPU decodes them with masks: 2 and 4 bits are fields of a
byte (the sign is the highest bit of a field, field ``j`` of a byte is number ``j``), 3 and 5 bits
are a plane of 2- or 4-bit magnitudes and a plane of signs, eight a byte. Bytes are little-endian
words to whoever reads more of them at once.
"""

from __future__ import annotations

from functools import cache

import mlx.core as mx

from ..planes import Planes
from ._lookup import lookup

MULTIPLE = 16
"""The length of a vector must be a multiple of this: every plane has whole pairs of bytes."""


def pack(magnitudes: mx.array, negative: mx.array, bits: int) -> Planes:
    """Planes of bytes from magnitudes (``uint8``, below ``2**(bits-1)``) and signs (bool)."""
    sign = negative.view(mx.uint8)
    if bits in (2, 4):
        return (packed(magnitudes | (sign << (bits - 1)), bits),)
    return packed(magnitudes, bits - 1), packed(sign, 1)


def unpack(planes: Planes, bits: int, halves: tuple[int, ...]) -> mx.array:
    """What the numbers stand for, ``int16 [..., n]``: ``halves`` by magnitude, with the sign.

    Several numbers at once are looked up as one word.
    """
    words = _words(bits, halves)
    table = words.view({2: mx.uint32, 4: mx.uint64}[words.shape[1]]).reshape(-1)
    if bits == 4:
        return lookup(table, planes[0].view(mx.uint16)).view(mx.int16)
    if bits == 2:
        return lookup(table, planes[0]).view(mx.int16)
    magnitudes, sign = planes
    count = 8 // (bits - 1)
    pieces = mx.arange(0, 8, count, dtype=mx.uint8)
    part = (sign[..., None] >> pieces) & (2**count - 1)
    part = part.reshape(magnitudes.shape).astype(mx.uint16)
    return lookup(table, magnitudes | (part << 8)).view(mx.int16)


@cache
def _words(bits: int, halves: tuple[int, ...]) -> mx.array:
    """For each index the numbers it stands for, ``int16 [indices, numbers]``."""
    if bits in (2, 4):
        code = [n if sign == 0 else -n for sign in (0, 1) for n in halves]
        indices, fields = range(2**16 if bits == 4 else 2**8), range(0, 4 * bits, bits)
        rows = [[code[i >> at & (2**bits - 1)] for at in fields] for i in indices]
        return mx.array(rows, dtype=mx.int16)
    size, count = bits - 1, 8 // (bits - 1)
    rows = [
        [(-1) ** (i >> (8 + j) & 1) * halves[i >> (size * j) & (2**size - 1)] for j in range(count)]
        for i in range(2 ** (8 + count))
    ]
    return mx.array(rows, dtype=mx.int16)


# -- streams of bits -------------------------------------------------------------------------------


def packed(x: mx.array, bits: int) -> mx.array:
    """``uint8 [..., n]`` below ``2**bits`` to bytes ``[..., n * bits / 8]``: a stream of bits.

    Eight numbers are one word, in which pairs, then fours, then all are pushed together.
    """
    if bits == 8:
        return x
    words, count = x.view(mx.uint64), 1
    while count < 8:
        low, high, shift = _pairs(bits, count)
        words, count = (words & low) | ((words & high) >> shift), 2 * count
    used = mx.unflatten(words.view(mx.uint8), -1, (words.shape[-1], 8))[..., :bits]
    return mx.flatten(used, -2, -1)


def fields(stream: mx.array, bits: int, together: int) -> mx.array:
    """The inverse of :func:`packed`, with so many numbers in an element of the result."""
    if bits * together == 8:
        return stream
    if bits in (2, 4):
        words = stream.view(mx.uint16 if bits == 2 else mx.uint32).astype(mx.uint64)
    else:
        words = mx.unflatten(stream, -1, (stream.shape[-1] // bits, bits))
        words = mx.pad(words, [(0, 0)] * (words.ndim - 1) + [(0, 8 - bits)])
        words = words.view(mx.uint64).squeeze(-1)
    count = 4
    while count >= together:
        low, high, shift = _pairs(bits, count)
        words, count = (words & low) | ((words << shift) & high), count // 2
    return words.view({1: mx.uint8, 2: mx.uint16, 4: mx.uint32}[together])


def _pairs(bits: int, count: int) -> tuple[int, int, int]:
    """Where the even and the odd ones of runs of so many numbers are, spread over a word.

    And how far the odd ones are from the even ones beside them.
    """
    run, size = (1 << bits * count) - 1, 8 * count
    low = sum(run << at for at in range(0, 64, 2 * size))
    return low, low << size, size - bits * count
