"""Microscaled formats: groups of small floats along head_dim that share a scale of one byte."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from jaxtyping import Float

from ..errors import CodecError
from ..planes import Planes
from ..record import record, static

MODES = ("mxfp8", "mxfp4", "nvfp4")

_GROUPS = {"mxfp8": (32, 8), "mxfp4": (32, 4), "nvfp4": (16, 4)}
"""Numbers that share a scale, and the bits of each."""

_LEADING = {"mxfp8": 1.875, "mxfp4": 1.5}
"""The largest significand of a number in [1, 2)."""

_LARGEST_NVFP4 = 6.0 * 448.0
"""The largest number times the largest scale."""

_SMALLEST = 2.0**-100
"""Numbers nearer to zero are stored as zero: MLX's scales (0.32.4) wrap around below 2^-127, so
that 1e-40 would come back as 1e37, and GPUs compute with no number below 2^-126."""


@record
class Microscaled:
    """A format of the OCP MX specification (``"mxfp8"``, ``"mxfp4"``) or NVIDIA's ``"nvfp4"``.

    =========  =======  ==================================  ================  ================
    mode       group    numbers                             scale             bits an element
    =========  =======  ==================================  ================  ================
    ``mxfp8``  32       E4M3: 3 bits of fraction, to 448    a power of two    8.25
    ``mxfp4``  32       0, 0.5, 1, 1.5, 2, 3, 4, 6 and -    a power of two    4.25
    ``nvfp4``  16       the same                            E4M3, to 448      4.5
    =========  =======  ==================================  ================  ================

    Two planes: packed ``uint32 [..., width * bits / 32]`` and scales ``uint8
    [..., width / group]``. Groups never cross a token. They hold no dtype: equal numbers have equal
    planes in whatever dtype they come, but for those that float16 clips.

    A number is decoded as the nearest that its group's scale allows, and exactly so in bfloat16 and
    float32. Finite numbers stay finite: those that would be rounded up beyond their dtype's range
    are clipped to the format's last number within it. Without a scale for a whole tensor, nvfp4
    clips at 2688, and groups all below 0.006 become zero.

    Args:
        mode: ``"mxfp8"``, ``"mxfp4"`` or ``"nvfp4"``.
        pad: store a head_dim that the group does not divide, filled up to the next multiple with
            zeros (which leave their group's scale as it is).

    Raises:
        CodecError: another mode.

    References:
        Open Compute Project, *OCP Microscaling Formats (MX) Specification* 1.0 (2023).

    >>> Microscaled("mxfp8").vector_nbytes(128, mx.bfloat16)
    132
    """

    mode: str = static()
    pad: bool = static(default=False)

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.mode, str) or self.mode not in MODES:
            raise CodecError(f"mode must be one of {', '.join(MODES)}, not {self.mode!r}")

    @property
    def group_size(self) -> int:
        """Numbers that share a scale."""
        return _GROUPS[self.mode][0]

    @property
    def bits(self) -> int:
        """Bits of a number without its part of the scale."""
        return _GROUPS[self.mode][1]

    @property
    def quantization(self) -> dict[str, Any]:
        """What MLX's functions on the planes have to be told."""
        group_size, bits = _GROUPS[self.mode]
        return {"group_size": group_size, "bits": bits, "mode": self.mode}

    @property
    def spec(self) -> str:
        """The canonical spec string."""
        return self.mode + ("-pad" if self.pad else "")

    def width(self, head_dim: int) -> int:
        """Numbers stored for a vector of ``head_dim``."""
        return -(-head_dim // self.group_size) * self.group_size if self.pad else head_dim

    def check(self, head_dim: int) -> None:
        """Raise ``CodecError`` where the group does not divide ``head_dim``."""
        if not self.pad and head_dim % self.group_size:
            raise CodecError(
                f"{self.spec}: head_dim {head_dim} is no multiple of the format's group size "
                f"{self.group_size}; pad: {self.spec}-pad"
            )

    def largest(self, dtype: mx.Dtype) -> float:
        """The largest number that one of ``dtype`` is stored as."""
        if self.mode == "nvfp4":
            return _LARGEST_NVFP4
        return _LEADING[self.mode] * 2.0 ** (15 if dtype == mx.float16 else 127)

    def encode(
        self, x: Float[mx.array, "batch heads tokens head_dim"], positions: object = None
    ) -> Planes:
        """Packed numbers and scales."""
        most, extra = self.largest(x.dtype), self.width(x.shape[-1]) - x.shape[-1]
        x = x.astype(mx.float32)  # in 16 bits MLX divides by rounded scales
        x = mx.where(mx.abs(x) < _SMALLEST, 0.0, mx.clip(x, -most, most))
        if extra:
            x = mx.pad(x, [(0, 0)] * 3 + [(0, extra)])
        return _quantized(x, self.quantization)

    def decode(self, planes: Planes, dtype: mx.Dtype = mx.bfloat16) -> mx.array:
        """The numbers the planes stand for, ``[batch, heads, tokens, width]``.

        They are exact in bfloat16 and float32. Float16 is rounded to, below its normal numbers;
        MLX's own way to it multiplies by a scale in float16, which may be zero.
        """
        exact = mx.float32 if dtype == mx.float32 else mx.bfloat16
        return _dequantized(planes, self.quantization, exact).astype(dtype)

    def vector_nbytes(self, head_dim: int, dtype: mx.Dtype) -> int:
        """Exact bytes of one vector of one head, scales included; ``dtype`` does not matter."""
        width = self.width(head_dim)
        return width * self.bits // 8 + width // self.group_size


def _quantized(x: mx.array, quantization: dict[str, Any]) -> Planes:
    tokens = x.shape[2]
    if tokens and x.size % 32 == 0:
        return tuple(mx.quantize(x, **quantization))
    return tuple([plane[:, :, :tokens] for plane in mx.quantize(_longer(x), **quantization)])


def _dequantized(planes: Planes, quantization: dict[str, Any], dtype: mx.Dtype) -> mx.array:
    packed, scales = planes
    tokens = packed.shape[2]
    if tokens and packed.size % 4 == 0:
        return mx.dequantize(packed, scales, **quantization, dtype=dtype)
    packed, scales = _longer(packed), _longer(scales)
    return mx.dequantize(packed, scales, **quantization, dtype=dtype)[:, :, :tokens]


def _longer(x: mx.array) -> mx.array:
    """With tokens of zeros behind, so that there are some, and an even number.

    On the CPU, MLX (0.32.4) refuses no tokens, and an odd count of groups of 16.
    """
    return mx.pad(x, [(0, 0), (0, 0), (0, 2 - x.shape[2] % 2), (0, 0)])
