"""Affine quantization: groups along head_dim with a scale and a bias each (``mx.quantize``)."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from jaxtyping import Float

from ..errors import CodecError
from ..planes import Planes
from ..record import record, static
from ._plain import half

BITS = (2, 3, 4, 5, 6, 8)
GROUP_SIZES = (32, 64, 128)


@record
class Affine:
    """``bits`` a number in groups of ``group_size`` along head_dim.

    Three planes: packed ``uint32 [..., width * bits / 32]``, scales and biases
    ``[..., width / group_size]`` in the dtype of the vectors, or in float16. Groups never cross a
    token, so any cut along the token axis is byte-exact, and encoding many tokens at once equals
    encoding them one by one.

    A number is decoded as the nearest of its group's levels, half a step away at most. Zero is a
    level where the group has both signs, so the levels may end up to one step before the group's
    smallest or largest number.

    Args:
        bits: 2, 3, 4, 5, 6 or 8.
        group_size: 32, 64 or 128.
        pad: store a head_dim that the group does not divide, filled up to the next multiple with
            copies of the last number (which leave its group's scale as it is).
        half: store scales and biases in float16, whatever the dtype of the vectors.

    Raises:
        CodecError: other bits or group sizes.

    >>> Affine(4).vector_nbytes(128, mx.bfloat16)
    72
    """

    bits: int = static()
    group_size: int = static(default=64)
    pad: bool = static(default=False)
    half: bool = static(default=False)

    def __attrs_post_init__(self) -> None:
        if type(self.bits) is not int or self.bits not in BITS:
            raise CodecError(f"bits must be one of {BITS}, not {self.bits!r}")
        if type(self.group_size) is not int or self.group_size not in GROUP_SIZES:
            raise CodecError(f"group_size must be one of {GROUP_SIZES}, not {self.group_size!r}")

    @property
    def quantization(self) -> dict[str, Any]:
        """What MLX's functions on the planes have to be told."""
        return {"group_size": self.group_size, "bits": self.bits}

    @property
    def options(self) -> str:
        """The part of the spec behind the bits."""
        group = "" if self.group_size == 64 else f"-g{self.group_size}"
        return group + ("-pad" if self.pad else "") + ("-f16" if self.half else "")

    @property
    def spec(self) -> str:
        """The canonical spec string; the group appears only when it is not 64."""
        return f"kv{self.bits}{self.options}"

    def width(self, head_dim: int) -> int:
        """Numbers stored for a vector of ``head_dim``."""
        return -(-head_dim // self.group_size) * self.group_size if self.pad else head_dim

    def check(self, head_dim: int) -> None:
        """Raise ``CodecError`` where the group does not divide ``head_dim``."""
        if not self.pad and head_dim % self.group_size:
            fit = [g for g in GROUP_SIZES if head_dim % g == 0]
            hint = f"use a group size of {fit}" if fit else "no group size divides it"
            raise CodecError(
                f"{self.spec}: head_dim {head_dim} is no multiple of the group size "
                f"{self.group_size}; {hint}, or pad: {self.spec}-pad"
            )

    def encode(
        self, x: Float[mx.array, "batch heads tokens head_dim"], positions: object = None
    ) -> Planes:
        """Packed numbers, scales and biases."""
        extra = self.width(x.shape[-1]) - x.shape[-1]
        if extra:
            last = mx.broadcast_to(x[..., -1:], (*x.shape[:-1], extra))
            x = mx.concatenate([x, last], axis=-1)
        if self.half:
            x = half(x)
        return tuple(mx.quantize(x, **self.quantization))

    def decode(self, planes: Planes) -> mx.array:
        """The numbers the planes stand for, ``[batch, heads, tokens, width]``.

        They are rounded once, to the dtype of the vectors: sums of rounded products would be off
        by what the largest number of the group is rounded by. With ``half`` that dtype is not
        known, and they are float32.
        """
        packed, scales, biases = planes
        exact = scales.astype(mx.float32), biases.astype(mx.float32)
        numbers = mx.dequantize(packed, *exact, **self.quantization)
        return numbers if self.half else numbers.astype(scales.dtype)

    def vector_nbytes(self, head_dim: int, dtype: mx.Dtype) -> int:
        """Exact bytes of one vector of one head, scales and biases included."""
        width, size = self.width(head_dim), mx.float16.size if self.half else dtype.size
        return width * self.bits // 8 + 2 * (width // self.group_size) * size
