"""Fast orthogonal transforms along the last axis, for the sizes that MLX computes rightly."""

from __future__ import annotations

import random
from functools import cache

import mlx.core as mx

from ..errors import CodecError

SMALL = (1, 12, 20, 28)
"""Orders ``m`` of Hadamard matrices for sizes ``m * 2**k``. MLX (0.32.4) takes others as well, and
writes past the end of its buffer at 72, 288 and 576 on the CPU."""

_LARGEST = 8192
"""The largest factor ``2**k``: half of what MLX's Metal kernels take."""


def hadamard_order(dim: int) -> int:
    """The ``m`` of ``dim = m * 2**k``.

    Raises:
        CodecError: a size without a fast transform.
    """
    for small in SMALL:
        if dim % small == 0 and _is_power_of_two(dim // small) and dim // small <= _LARGEST:
            return small
    raise CodecError(
        f"no fast rotation of {dim} numbers: head_dim must be a power of two, or 12, 20 or 28 "
        "times one; a head_dim such as 576 is rotated in parts (512 and 64)"
    )


def _is_power_of_two(n: int) -> bool:
    return n > 0 and n & (n - 1) == 0


def hadamard(x: mx.array) -> mx.array:
    """``x H^T / sqrt(d)`` along the last axis, an orthogonal transform.

    Raises:
        CodecError: a size without one; MLX is not called.
    """
    hadamard_order(x.shape[-1])
    return mx.hadamard_transform(x) if x.size else x


def hadamard_inverse(x: mx.array) -> mx.array:
    """The inverse of :func:`hadamard`: its transpose, which is itself for symmetric matrices.

    Those of order 20 and 28 are not symmetric. The matrix of ``m * 2**k`` is the Kronecker product
    of the small one and that of the power of two.
    """
    dim = x.shape[-1]
    small = hadamard_order(dim)
    if small in (1, 12) or not x.size:
        return hadamard(x)
    parts = x.reshape(*x.shape[:-1], small, dim // small)
    parts = mx.hadamard_transform(parts).swapaxes(-1, -2)
    columns = mx.hadamard_transform(mx.eye(small, dtype=x.dtype))  # row i: the i-th column
    return (parts @ columns.T).swapaxes(-1, -2).reshape(x.shape)


@cache
def signs(dim: int, seed: int = 42) -> tuple[int, ...]:
    """Random signs, the same in every version of everything."""
    bits = random.Random(f"kvfun {seed}").getrandbits(dim)
    return tuple([1 - 2 * (bits >> i & 1) for i in range(dim)])
