"""Trellis-coded numbers: every window of 8 bits of a stream stands for one of 256 numbers.

Number ``i`` of a vector adds ``bits`` bits to the stream, and the last 8 bits, its own ones lowest,
are its *state*: the index of its value in a table of 256. Before the stream there are zeros, so no
start is stored. Neighbours share bits, so only ``2**bits`` of the 256 values can follow one
another; the encoder takes the path that is nearest to the vector as a whole, found by dynamic
programming over the bits that two states share (Viterbi 1967), and gets nearer than any table of
``2**bits`` numbers can.

The stream fills words from their highest bit down, so a state is a shift and a mask of a word, or
of two neighbours, and numbers are decoded independently of one another. States that differ in their
highest bit alone have opposite values: half a table and a sign will do.
"""

from __future__ import annotations

from functools import cache
from math import inf, lcm
from typing import Any

import mlx.core as mx

from ..errors import CodecError
from ._lookup import lookup
from ._trellis_tables import TABLES

BITS = tuple(TABLES)
STEP = 2.0**-13
"""Values are multiples of this, and fit for 16-bit integers."""

_BLOCK = 2048
"""Vectors encoded at once: until their paths are traced back, 1 KiB >> bits is kept a number."""
_FEW = 48
"""So many vectors take less time in few large operations than in many small ones."""
_TOGETHER = {1: 4, 2: 4, 3: 4, 4: 2}
"""How many numbers are looked up at once: an entry may have up to 8 bytes."""


def check(bits: int, dim: int) -> None:
    """Raise ``CodecError`` where there is no table, or where a vector fills no whole words."""
    if type(bits) is not int or bits not in TABLES:
        raise CodecError(f"bits must be one of {BITS}, not {bits!r}")
    if dim <= 0 or dim * bits % 32:
        raise CodecError(f"{dim} numbers of {bits} bits fill no whole words of 32 bits")


def encode(y: mx.array, bits: int, weights: mx.array | None = None) -> mx.array:
    """The nearest path for each vector of numbers near N(0, 1): ``uint32 [..., dim * bits / 32]``.

    A vector's words do not depend on the vectors beside it, bit for bit.

    Args:
        y: ``[..., dim]``.
        bits: new bits a number.
        weights: what squared errors count, if not 1 each; broadcasts to ``y``.

    Raises:
        CodecError: no table for these bits, or vectors that fill no whole words.
    """
    dim = y.shape[-1]
    check(bits, dim)
    lead, count = y.shape[:-1], y.size // dim
    if not count:
        return mx.zeros((*lead, dim * bits // 32), mx.uint32)
    rows = [y.astype(mx.float32).reshape(count, dim)]
    if weights is not None:
        rows.append(mx.broadcast_to(weights.astype(mx.float32), y.shape).reshape(count, dim))
    done = []
    for at in range(0, count, _BLOCK):
        block = [x[at : at + _BLOCK] for x in rows]
        # one block after the other, or the costs of all of them would be there at once
        done.append(_encode(mx.depends(block, done[-1:]) if done else block, bits))
    words = done[0] if len(done) == 1 else mx.concatenate(done, axis=0)
    return words.reshape(*lead, -1)


def decode(words: mx.array, bits: int, dim: int, *, raw: bool = False) -> mx.array:
    """The numbers of each path, ``float32 [..., dim]``.

    Args:
        words: ``uint32 [..., dim * bits / 32]``.
        bits: new bits a number.
        dim: the length of a vector.
        raw: whole numbers, in units of :data:`STEP`.

    Raises:
        CodecError: no table for these bits, or words that are not of such vectors.
    """
    check(bits, dim)
    if words.dtype != mx.uint32 or words.shape[-1] * 32 != dim * bits:
        raise CodecError(f"{words.dtype} {words.shape} are no {dim} numbers of {bits} bits")
    found = lookup(_windows(bits), _indices(words, bits))
    numbers = found.view(mx.int16).astype(mx.float32)
    return numbers if raw else numbers * STEP


# -- the nearest path -----------------------------------------------------------------------------


def _encode(rows: list[mx.array], bits: int) -> mx.array:
    """Words of one block, ``[vectors, words]``: of its numbers, and of their weights if any."""
    twice, *weights = [mx.contiguous(x.T) for x in (2 * rows[0], *rows[1:])]
    if weights:
        twice = twice * weights[0]
    few = len(rows[0]) <= _FEW
    return _packed((_few if few else _many)(twice, weights[0] if weights else None, bits), bits)


def _many(twice: mx.array, weights: mx.array | None, bits: int) -> mx.array:
    """The states of each path, ``uint32 [dim, vectors]``.

    Only costs by the bits that two states share are kept. On the way back a path's candidates are
    added up once more, which is less than to note for every state where it came from.
    """
    values = _values(bits)
    shared, count = values.shape[0], twice.shape[1]
    half, after, kept = shared // 2, values[:, :, None], [_start(shared, count)]
    squares = after * after
    for at in range(len(twice) - 1):
        # states that differ in their oldest bit alone have opposite values, and one successor
        cost, product = kept[-1], after[:half] * twice[at]
        square = squares[:half] if weights is None else squares[:half] * weights[at]
        least = mx.minimum(cost[:half, None] - product, cost[half:, None] + product) + square
        kept.append(_least(mx.flatten(least, 0, 1), shared))
    square = squares if weights is None else squares * weights[-1]
    full = _sum(kept[-1][:, None], after * twice[-1], square)
    last = mx.argmin(mx.flatten(full, 0, 1), axis=0)
    path, before = [last >> bits], mx.contiguous(values.reshape(-1, shared))
    for at in range(len(twice) - 2, -1, -1):
        older, cost = path[-1] >> bits, kept[at].reshape(1 << bits, -1, count)
        cost = mx.take_along_axis(cost, older[None, None], axis=1).squeeze(1)
        value = mx.take(before, path[-1], axis=1)
        square = value * value if weights is None else value * value * weights[at]
        best = mx.argmin(_sum(cost, value * twice[at], square), axis=0)
        path.append((best << (8 - 2 * bits)) | older)
    return _states(mx.stack(path[::-1]), last[None], bits)


def _few(twice: mx.array, weights: mx.array | None, bits: int) -> mx.array:
    """What :func:`_many` gives, bit for bit, in fewer and larger operations."""
    values = _values(bits)
    shared, count = values.shape[0], twice.shape[1]
    after, cost, kept = values[:, :, None], _start(shared, count), []
    products, squares = after * twice[:, None, None], after * after
    if weights is not None:
        squares = squares * weights[:, None, None]
    for at in range(len(twice)):
        square = squares if weights is None else squares[at]
        kept.append(mx.flatten(_sum(cost[:, None], products[at], square), 0, 1))
        cost = mx.min(mx.unflatten(kept[-1], 0, (-1, shared)), axis=0)
    last = mx.argmin(kept.pop(), axis=0, keepdims=True)
    best = mx.argmin(mx.stack(kept).reshape(len(kept), -1, shared, count), axis=1)
    older = mx.arange(shared, dtype=mx.uint32)[:, None] >> bits
    path, before = [last >> bits], (best << (8 - 2 * bits)) | older
    for at in range(len(kept) - 1, -1, -1):
        path.append(mx.take_along_axis(before[at], path[-1], axis=0))
    return _states(mx.concatenate(path[::-1]), last, bits)


def _states(shared: mx.array, last: mx.array, bits: int) -> mx.array:
    """States from the bits of each that are of the one before, and from the last one."""
    new = mx.concatenate([shared[1:], last]) & ((1 << bits) - 1)
    return (shared << bits) | new


def _start(shared: int, count: int) -> mx.array:
    """Costs before the first number: the stream begins after zeros."""
    return mx.broadcast_to(mx.array([0.0] + [inf] * (shared - 1))[:, None], (shared, count))


def _sum(cost: mx.array, product: mx.array, square: mx.array) -> mx.array:
    """The cost of paths to some states, and from there to their next ones.

    A squared error, without the square of the number itself, that all paths share. Wherever sums
    are made they are rounded in this order: else equally good paths would depend on how.
    """
    return (cost - product) + square


def _least(full: mx.array, shared: int) -> mx.array:
    """Costs by the bits that states share with those after them."""
    while full.shape[0] > shared:
        half = full.shape[0] // 2
        full = mx.minimum(full[:half], full[half:])
    return full


@cache
def _values(bits: int) -> mx.array:
    """The table, by the bits that a state shares with the one before and by its new ones."""
    size = 1 << bits
    return mx.array([[STEP * n for n in TABLES[bits][i : i + size]] for i in range(0, 256, size)])


# -- words ----------------------------------------------------------------------------------------


def _packed(states: mx.array, bits: int) -> mx.array:
    """``[vectors, words]`` from ``[dim, vectors]``: each word from the states in it."""
    each, left, right = _fields(bits, states.shape[0])
    fresh = (1 << (8 // bits * bits)) - 1
    return mx.contiguous(mx.sum((states[each] & fresh) << left >> right, axis=1).T)


@cache
def _fields(bits: int, dim: int) -> tuple[mx.array, mx.array, mx.array]:
    """For every word the states it is made of, and how far each is shifted, left and right."""
    size = 8 // bits * bits
    rows = [
        [
            (end, start + 32 - end)
            for end in range(size, dim * bits + 1, size)
            if start < end < start + 32 + size
        ]
        for start in range(0, dim * bits, 32)
    ]
    return (
        mx.array([[end // bits - 1 for end, _ in row] for row in rows]),
        mx.array([[[max(0, left)] for _, left in row] for row in rows], dtype=mx.uint32),
        mx.array([[[max(0, -left)] for _, left in row] for row in rows], dtype=mx.uint32),
    )


def _indices(words: mx.array, bits: int) -> mx.array:
    """Where :func:`_windows` has the numbers, so many together as it looks up at once."""
    step = bits * _TOGETHER[bits]
    size, period = 8 - bits + step, lcm(step, 32) // 32
    before = mx.concatenate([mx.zeros_like(words[..., :1]), words[..., :-1]], axis=-1)
    words, before = [mx.unflatten(x, -1, (-1, period)) for x in (words, before)]
    parts = []
    for end in range(step, 32 * period + 1, step):
        word, used = divmod(end - 1, 32)
        low = 31 - used
        part = words[..., word] >> low if low else words[..., word]
        if low + size > 32:
            part = part | (before[..., word] << (32 - low))
        parts.append(part & ((1 << size) - 1))
    return mx.flatten(mx.stack(parts, axis=-1), -2, -1)


@cache
def _windows(bits: int) -> mx.array:
    """For each window of the stream the numbers it stands for, as one word."""
    one = [n.to_bytes(2, "little", signed=True) for n in TABLES[bits]]
    rows = one
    for _ in range(_TOGETHER[bits] - 1):
        rows = [rows[i >> bits] + one[i & 255] for i in range(len(rows) << bits)]
    words: Any = memoryview(b"".join(rows))
    return mx.array(words.cast({2: "I", 4: "Q"}[_TOGETHER[bits]]))
