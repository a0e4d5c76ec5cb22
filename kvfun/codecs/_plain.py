"""Plain storage: the numbers themselves, in a dtype of choice."""

from __future__ import annotations

import mlx.core as mx
from jaxtyping import Float

from ..errors import CodecError
from ..planes import Planes
from ..record import record, static

DTYPES = {"bf16": mx.bfloat16, "f16": mx.float16, "f32": mx.float32}


@record
class Plain:
    """Numbers as they are (``dtype=None``) or rounded to ``"bf16"``, ``"f16"`` or ``"f32"``.

    >>> Plain("bf16").vector_nbytes(64, mx.float32)
    128
    """

    dtype: str | None = static(default=None)

    def __attrs_post_init__(self) -> None:
        if self.dtype is not None and self.dtype not in DTYPES:
            raise CodecError(f"dtype must be one of {', '.join(DTYPES)}, not {self.dtype!r}")

    @property
    def spec(self) -> str:
        """The canonical spec string."""
        return self.dtype or "plain"

    def width(self, head_dim: int) -> int:
        """Numbers stored for a vector of ``head_dim``: all, and no more."""
        return head_dim

    def check(self, head_dim: int) -> None:
        """Any head_dim is stored."""

    def encode(
        self, x: Float[mx.array, "batch heads tokens head_dim"], positions: object = None
    ) -> Planes:
        """One plane ``[batch, heads, tokens, head_dim]``."""
        return (x if self.dtype is None else x.astype(DTYPES[self.dtype]),)

    def decode(self, planes: Planes) -> mx.array:
        """The stored numbers, ``[batch, heads, tokens, head_dim]``."""
        return planes[0]

    def vector_nbytes(self, head_dim: int, dtype: mx.Dtype) -> int:
        """Exact bytes of one vector of one head that arrives in ``dtype``."""
        return head_dim * (DTYPES[self.dtype] if self.dtype else dtype).size


LARGEST_HALF = 65504.0
"""The largest number of float16."""


def half(x: mx.array) -> mx.array:
    """In float16; finite numbers stay finite."""
    return mx.where(mx.isinf(x), x, mx.clip(x, -LARGEST_HALF, LARGEST_HALF)).astype(mx.float16)
