"""A codec for keys and a codec for values, chosen separately."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import mlx.core as mx

from ..planes import Planes
from ..record import record


@runtime_checkable
class VectorCodec(Protocol):
    """What a codec of keys or of values offers: pure functions of a frozen record.

    Groups run along head_dim, so that encoding ``L`` tokens at once equals encoding them one by
    one, byte for byte.
    """

    @property
    def spec(self) -> str:
        """The canonical spec string of this codec for both sides."""
        ...

    def check(self, head_dim: int) -> None:
        """Raise ``CodecError`` where vectors of ``head_dim`` cannot be stored."""
        ...

    def encode(self, x: mx.array, positions: object = None) -> Planes:
        """``[batch, heads, tokens, head_dim]`` to planes that share axis 2.

        ``positions``, for codecs that need them: the absolute position of the first token, one
        number a row or one for all, or an integer array of all, ``[batch or 1, tokens]``.
        """
        ...

    def width(self, head_dim: int) -> int:
        """Numbers stored for a vector of ``head_dim``; more than that where it is padded."""
        ...

    def decode(self, planes: Planes) -> mx.array:
        """Planes back to ``[batch, heads, tokens, width]``."""
        ...

    def vector_nbytes(self, head_dim: int, dtype: mx.Dtype) -> int:
        """Exact bytes one encoded vector takes, metadata included."""
        ...


@record
class Codec:
    """How a cache stores keys and values.

    >>> Codec.of("k8v4"), Codec.of("k8v4").values
    (Codec('k8v4'), Affine(bits=4, group_size=64, pad=False, half=False))
    """

    keys: VectorCodec
    values: VectorCodec

    def __repr__(self) -> str:
        return f"Codec({self.spec!r})"

    @staticmethod
    def of(spec: str | Codec) -> Codec:
        """The codec of a spec string; a codec is returned as it is."""
        from ._spec import parse

        return spec if isinstance(spec, Codec) else parse(spec)

    @property
    def spec(self) -> str:
        """The canonical spec string, the inverse of :func:`kvfun.codecs.parse`."""
        from ._spec import format

        return format(self)

    def token_nbytes(
        self, kv_heads: int, head_dim: int, value_dim: int, dtype: mx.Dtype = mx.bfloat16
    ) -> int:
        """Exact bytes a token takes in one layer, scales and biases included.

        >>> Codec.of("kv4").token_nbytes(kv_heads=8, head_dim=128, value_dim=128)
        1152
        """
        keys = self.keys.vector_nbytes(head_dim, dtype)
        return kv_heads * (keys + self.values.vector_nbytes(value_dim, dtype))

    def bits_per_element(
        self, head_dim: int, value_dim: int | None = None, dtype: mx.Dtype = mx.bfloat16
    ) -> float:
        """Stored bits for each number of a key or value.

        >>> Codec.of("kv4").bits_per_element(64), Codec.of("kv4-g32").bits_per_element(64)
        (4.5, 5.0)
        """
        value_dim = head_dim if value_dim is None else value_dim
        return self.token_nbytes(1, head_dim, value_dim, dtype) * 8 / (head_dim + value_dim)
