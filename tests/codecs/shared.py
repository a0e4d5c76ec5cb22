"""What the tests of several codecs have in common."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from kvfun.planes import Planes


def planes_of_no_tokens(codec: Any, dim: int) -> Planes:
    """The planes of no tokens, which must look like those of one."""
    planes, one = codec.encode(mx.zeros((2, 3, 0, dim))), codec.encode(mx.zeros((2, 3, 1, dim)))
    for plane, other in zip(planes, one, strict=True):
        assert plane.shape == (2, 3, 0, other.shape[3])
        assert plane.dtype == other.dtype
    return planes
