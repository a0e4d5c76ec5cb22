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
        return (_fields(magnitudes | (sign << (bits - 1)), bits),)
    return _fields(magnitudes, bits - 1), _fields(sign, 1)


def _fields(x: mx.array, bits: int) -> mx.array:
    """``[..., n]`` numbers of so many bits as bytes ``[..., n * bits / 8]``, the first one lowest.

    All numbers of a byte are moved at once, as parts of one word.
    """
    count = 8 // bits
    word, done = x.view({2: mx.uint16, 4: mx.uint32, 8: mx.uint64}[count]), 1
    while done < count:
        word = word | (word >> ((8 - bits) * done))
        done *= 2
    return word.astype(mx.uint8)


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
