"""Vectors of which one codec stores the first numbers and another the rest."""

from __future__ import annotations

import mlx.core as mx

from ..planes import Planes
from ..record import record, static
from ._pair import VectorCodec


@record
class Concatenated:
    """Two codecs side by side: how a latent and its rotated key are read as one key.

    Args:
        first: stores the first numbers of a vector.
        second: stores the others.
        dims: how many numbers each has.
        split: how many planes the first has.

    >>> from kvfun.codecs import Affine, Plain
    >>> both = Concatenated(Affine(8), Plain(), dims=(64, 16), split=3)
    >>> planes = both.encode(mx.ones((1, 1, 2, 80)))
    >>> both.spec, len(planes), both.decode(planes).shape
    ('kv8|plain', 4, (1, 1, 2, 80))
    """

    first: VectorCodec
    second: VectorCodec
    dims: tuple[int, int] = static()
    split: int = static()

    @property
    def spec(self) -> str:
        """Both specs. No cache can be made of it: it only reads."""
        return f"{self.first.spec}|{self.second.spec}"

    def check(self, head_dim: int) -> None:
        """Raise ``CodecError`` where one of the parts cannot be stored."""
        self.first.check(self.dims[0])
        self.second.check(head_dim - self.dims[0])

    def width(self, head_dim: int) -> int:
        """As many numbers as a vector has: what a part is filled up with is cut off again."""
        return head_dim

    def encode(self, x: mx.array, positions: object = None) -> Planes:
        """The planes of the first, then those of the second."""
        first, second = self.parts(x)
        return self.first.encode(first, positions) + self.second.encode(second, positions)

    def decode(self, planes: Planes) -> mx.array:
        """The numbers that the planes stand for."""
        parts = self.first.decode(planes[: self.split]), self.second.decode(planes[self.split :])
        cut = [part[..., :dim] for part, dim in zip(parts, self.dims, strict=True)]
        return mx.concatenate(cut, axis=-1)

    def parts(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """The two parts of vectors."""
        return x[..., : self.dims[0]], x[..., self.dims[0] :]

    def vector_nbytes(self, head_dim: int, dtype: mx.Dtype) -> int:
        """Exact bytes of one vector."""
        sizes = zip((self.first, self.second), self.dims, strict=True)
        return sum(codec.vector_nbytes(dim, dtype) for codec, dim in sizes)
