"""TurboQuant as vllm-metal and mlx-bun store it: affine keys, and rotated values in a codebook."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from functools import cache
from itertools import pairwise
from math import floor, inf
from struct import pack
from typing import Any

import mlx.core as mx
from jaxtyping import Float

from ..errors import CodecError
from ..planes import Planes
from ..record import record, static
from ._hadamard import hadamard
from ._lookup import lookup, rank
from ._packing import fields, packed
from ._plain import half
from ._turbo_tables import BOUNDARIES_3, CENTROIDS, SIGNS

HEAD_DIMS = tuple(SIGNS)
KEY_BITS = (2, 4, 5, 8)
VALUE_BITS = tuple(CENTROIDS)

_GROUP = 32
_EPSILON = 1e-8
_OVERFLOW = 65520.0
"""The smallest number that float16 rounds to infinity."""


@record
class TurboKeys:
    """The keys of ``turbo-k8v3``: ``bits`` a number in groups of 32, scale and zero in float16.

    Three planes: ``int8 [..., head_dim]`` for 8 bits, else ``uint8 [..., head_dim * bits / 8]``, a
    stream of bits in which number ``i`` has those from ``i * bits`` on, the lowest first; scales
    and zeros, ``float16 [..., head_dim / 32]``. A number is ``(stored + zero) * scale``. Zeros are
    whole numbers, which float16 rounds beyond 2048: keys far from zero that differ little need
    another codec.

    The planes are those of vllm-metal and mlx-bun, byte for byte, but where theirs come back as NaN
    or infinity. A group of equal numbers, or whose zero is beyond float16, is stored as its middle
    (as ``(0 + 1) * scale``), and a scale ends at 65504, so that finite numbers stay finite (to
    1e38). A group with a number that is not finite comes back as numbers that are not, and no other
    does.

    Args:
        bits: 2, 4, 5 or 8.

    Raises:
        CodecError: other bits.

    References:
        ``vllm_metal/attention/caches/turboquant.py`` of vllm-project/vllm-metal, 2026. Its keys are
        not rotated, unlike those of Zandieh et al., *TurboQuant*, 2025.

    >>> TurboKeys(8).vector_nbytes(128, mx.bfloat16), TurboKeys(4).spec
    (144, 'turbo-k4')
    """

    bits: int = static()

    def __attrs_post_init__(self) -> None:
        _check_bits("keys", self.bits, KEY_BITS)

    @property
    def spec(self) -> str:
        """The canonical spec string of this side."""
        return f"turbo-k{self.bits}"

    def check(self, head_dim: int) -> None:
        """Raise ``CodecError`` for a ``head_dim`` that the format does not have."""
        _check_dim(self.spec, head_dim)

    def width(self, head_dim: int) -> int:
        """Numbers stored for a vector of ``head_dim``: all, and no more."""
        return head_dim

    def encode(
        self, x: Float[mx.array, "batch heads tokens head_dim"], positions: object = None
    ) -> Planes:
        """Numbers (packed, but for 8 bits), scales and zeros."""
        groups = _grouped(x.astype(mx.float32))
        low, high = mx.min(groups, -1, keepdims=True), mx.max(groups, -1, keepdims=True)
        least, most = self._range
        scale = (high - low) / (most - least)
        step = scale + _EPSILON
        zero = mx.round((high + low) / (2 * step) if self.bits == 8 else low / step)
        flat = ((low == high) & (low != 0)) | (mx.abs(zero) >= _OVERFLOW)
        # dividing by infinity stores 0 for all of a flat group
        step, shift = mx.where(flat, inf, step), mx.where(flat, 0.0, zero)
        numbers = mx.clip(mx.round(groups / step - shift), least, most)
        numbers = mx.flatten(numbers, -2, -1)
        scale = mx.where(flat, (low + high) / 2, scale)
        zero = mx.where(flat, 1.0, zero).astype(mx.float16)
        return self._stored(numbers), half(scale).squeeze(-1), zero.squeeze(-1)

    @property
    def _range(self) -> tuple[int, int]:
        """The least and the largest number stored."""
        return (-127, 127) if self.bits == 8 else (0, (1 << self.bits) - 1)

    def _stored(self, numbers: mx.array) -> mx.array:
        if self.bits == 8:
            return numbers.astype(mx.int8)
        return packed(numbers.astype(mx.uint8), self.bits)

    def decode(self, planes: Planes, dtype: mx.Dtype = mx.bfloat16) -> mx.array:
        """The numbers the planes stand for, ``[batch, heads, tokens, head_dim]``, rounded once."""
        stored, scales, zeros = planes
        numbers = stored if self.bits == 8 else fields(stored, self.bits, 1)
        out = _grouped(numbers.astype(mx.float32)) + _wide(zeros)
        return mx.flatten(out * _wide(scales), -2, -1).astype(dtype)

    @property
    def quantization(self) -> dict[str, Any]:
        """What MLX's functions on the :meth:`affine` planes have to be told."""
        return {"group_size": _GROUP, "bits": self.bits}

    def affine(self, planes: Planes) -> Planes:
        """The same numbers as planes of ``mx.quantized_matmul``.

        They are packed ``uint32``, scales and biases ``float32``. ``mx.dequantize`` makes of them
        the numbers that :meth:`decode` does, to the last bit.
        """
        stored, scales, zeros = planes
        scales, zeros = scales.astype(mx.float32), zeros.astype(mx.float32)
        words = stored.view(mx.uint32)
        if self.bits == 8:  # unsigned, so 128 more
            words, zeros = words ^ 0x80808080, zeros - 128
        return words, scales, zeros * scales

    def vector_nbytes(self, head_dim: int, dtype: mx.Dtype) -> int:
        """Exact bytes of one vector of one head, scales and zeros included; in any ``dtype``."""
        return head_dim * self.bits // 8 + 4 * (head_dim // _GROUP)


@record
class TurboValues:
    """The values of ``turbo-k8v3``: rotated, then ``bits`` a number in a codebook for normal ones.

    A vector's signs are changed at random (the same ones always) and it is multiplied by a Hadamard
    matrix; what comes out is nearly normally distributed, whatever went in. Groups of 32 are
    divided by their RMS and rounded to the nearest number of the codebook.

    Two planes: bytes ``uint8 [..., head_dim * bits / 8]`` in which index ``i`` has the bits from
    ``i * bits`` on, the lowest first, and scales ``float16 [..., head_dim / 32]``. They are those
    of vllm-metal and mlx-bun, but for scales beyond float16, which end at 65504.

    A decoded vector is off by a part of its length: a third for 2 bits, 18 % for 3, 9.5 % for 4,
    4.9 % for 5 and 1 % for 8 (a bad codebook: ``Affine(8)`` takes as many bytes and errs less). In
    its own direction it is short by 10.6, 2.7, 0.7, 0.2 and 0 %, and so is the mean of many.

    A vector with a number that is not finite, or beyond 1e17, comes back with numbers that are not,
    and no other does.

    Args:
        bits: 2, 3, 4, 5 or 8.

    Raises:
        CodecError: other bits.

    References:
        ``vllm_metal/attention/caches/turboquant.py`` of vllm-project/vllm-metal, 2026, after
        Zandieh et al., *TurboQuant*, 2025.

    >>> TurboValues(3).vector_nbytes(128, mx.bfloat16), TurboValues(3).spec
    (56, 'turbo-v3')
    """

    bits: int = static()

    def __attrs_post_init__(self) -> None:
        _check_bits("values", self.bits, VALUE_BITS)

    @property
    def spec(self) -> str:
        """The canonical spec string of this side."""
        return f"turbo-v{self.bits}"

    def check(self, head_dim: int) -> None:
        """Raise ``CodecError`` for a ``head_dim`` that the format does not have."""
        _check_dim(self.spec, head_dim)

    def width(self, head_dim: int) -> int:
        """Numbers stored for a vector of ``head_dim``: all, and no more."""
        return head_dim

    def encode(
        self, x: Float[mx.array, "batch heads tokens head_dim"], positions: object = None
    ) -> Planes:
        """Packed indices and scales."""
        groups = _grouped(self.enter(x))
        scale = mx.sqrt(mx.mean(groups * groups, axis=-1, keepdims=True))
        index = mx.flatten(_index(groups / (scale + _EPSILON), self.bits), -2, -1)
        return packed(index, self.bits), half(scale.squeeze(-1))

    def decode(self, planes: Planes, dtype: mx.Dtype = mx.bfloat16) -> mx.array:
        """The numbers the planes stand for, ``[batch, heads, tokens, head_dim]``, rounded once."""
        return self.leave(self.decode_stored(planes)).astype(dtype)

    def decode_stored(self, planes: Planes) -> mx.array:
        """The stored numbers, which are the rotated ones, ``float32 [..., head_dim]``.

        Sums of them may be rotated back once instead of each: ``leave`` is linear.
        """
        packed, scales = planes
        numbers = _grouped(_looked_up(packed, self.bits))
        return mx.flatten(numbers * _wide(scales), -2, -1)

    def enter(self, x: mx.array) -> mx.array:
        """``H (s * x) / sqrt(head_dim)`` along the last axis, in float32: orthogonal."""
        return hadamard(x.astype(mx.float32) * _signs(x.shape[-1]))

    def leave(self, x: mx.array) -> mx.array:
        """The inverse of :meth:`enter`, ``s * (H x) / sqrt(head_dim)``."""
        return hadamard(x.astype(mx.float32)) * _signs(x.shape[-1])

    def vector_nbytes(self, head_dim: int, dtype: mx.Dtype) -> int:
        """Exact bytes of one vector of one head, scales included; ``dtype`` does not matter."""
        return head_dim * self.bits // 8 + 2 * (head_dim // _GROUP)


def _check_bits(side: str, bits: Any, allowed: tuple[int, ...]) -> None:
    if type(bits) is not int or bits not in allowed:
        raise CodecError(f"bits of turbo {side} must be one of {allowed}, not {bits!r}")


def _check_dim(spec: str, head_dim: int) -> None:
    if head_dim not in HEAD_DIMS:
        raise CodecError(f"{spec}: head_dim must be one of {HEAD_DIMS}, not {head_dim}")


# -- groups -----------------------------------------------------------------------------------


def _grouped(x: mx.array) -> mx.array:
    return mx.unflatten(x, -1, (x.shape[-1] // _GROUP, _GROUP))


def _wide(x: mx.array) -> mx.array:
    """One number a group, in float32, for each of the group."""
    return x.astype(mx.float32)[..., None]


# -- rotation ---------------------------------------------------------------------------------


@cache
def _signs(dim: int) -> mx.array:
    return mx.array([1.0 if bit == "1" else -1.0 for bit in f"{int(SIGNS[dim], 16):0{dim}b}"])


# -- the codebooks ----------------------------------------------------------------------------


@cache
def _boundaries(bits: int) -> tuple[float, ...]:
    """Between which numbers an index is used: midway between centroids, in float32."""
    if bits == 3:
        return BOUNDARIES_3
    return tuple(array("f", [(a + b) / 2 for a, b in pairwise(array("f", CENTROIDS[bits]))]))


def _index(x: mx.array, bits: int) -> mx.array:
    """How many boundaries are below each number; ``uint8``, of NaN any that fits."""
    if bits > 4:
        return _index_by_cell(x, bits)
    return rank(x, _boundaries(bits))


def _index_by_cell(x: mx.array, bits: int) -> mx.array:
    """The same for many boundaries: one is compared with, the only one near the number.

    Numbers divided by the RMS of 32 are below 6. The cell of NaN is undefined, but a cell.
    """
    cell = mx.floor(x * _CELLS).astype(mx.int16).view(mx.uint16) & (16 * _CELLS - 1)
    found = mx.unflatten(lookup(_cells(bits), cell).view(mx.uint32), -1, (x.shape[-1], 2))
    return found[..., 1].astype(mx.uint8) + (x > found[..., 0].view(mx.float32)).view(mx.uint8)


_CELLS = 128
"""Cells a unit: so many that there are never two boundaries in one."""


@cache
def _cells(bits: int) -> mx.array:
    """For each cell of [-8, 8) its boundary, ``float32``, and how many are below, ``uint32``.

    Both are one word of 64 bits; negative cells come last.
    """
    boundaries, words = _boundaries(bits), bytearray()
    cells = [floor(_CELLS * boundary) for boundary in boundaries]
    for cell in (*range(8 * _CELLS), *range(-8 * _CELLS, 0)):
        below = bisect_left(cells, cell)
        words += pack("fI", boundaries[below] if cell in cells[below:] else inf, below)
    return _words(words)


_TOGETHER = {2: 2, 3: 2, 4: 2, 5: 2, 8: 1}
"""Numbers looked up at once: an entry may be up to eight bytes."""


def _looked_up(packed: mx.array, bits: int) -> mx.array:
    """The centroids of packed indices, ``float32 [..., numbers]``."""
    return lookup(_rows(bits), fields(packed, bits, _TOGETHER[bits])).view(mx.float32)


@cache
def _rows(bits: int) -> mx.array:
    """The centroids of as many indices as are looked up at once: by the bits of those.

    Two are one word of 64 bits.
    """
    count = _TOGETHER[bits]
    centroids, last = CENTROIDS[bits], (1 << bits) - 1
    fields = range(0, bits * count, bits)
    rows = [[centroids[i >> at & last] for at in fields] for i in range(1 << bits * count)]
    if count == 1:
        return mx.array(centroids)
    return _words(array("f", [number for row in rows for number in row]))


def _words(data: Any) -> mx.array:
    """A buffer as words of 64 bits, which MLX does not take in a list."""
    words: Any = memoryview(data).cast("B").cast("Q")
    return mx.array(words)
