"""Vectors without their mean: what keys have in common is stored once, and never rounded."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from jaxtyping import Float

from ..errors import CodecError
from ..planes import Planes
from ..record import record, replace, static
from ._pair import VectorCodec
from ._rope import Rope, Tables
from ._rotated import Rotated


@record
class Centred:
    """Keys less their mean, by another codec.

    Most of a key is the same for all tokens of a head, before RoPE rotates it. That part is a
    ``mean`` of the cache's own, taken from keys that RoPE is undone for where it is known, and the
    codec stores what is left. What is decoded has the mean again, at the token's own position, so
    attention is that over whole keys; a kernel may add the product of query and mean to the scores
    instead.

    The mean is learnt once and then stays: from a chain's raw first tokens, when a row has all of
    them; from what a cache holds when it is converted. Without one, keys are stored as they are.

    Args:
        codec: of what is left.
        rope: the RoPE that keys went through; ``None`` where they went through none, or through
            one that is not known.
        mean: ``[batch, heads, 1, dim]``, float32, before RoPE.
        tables: angles of the positions that are read; a cache gives them to a kernel.
        frozen: the mean was given, and is not learnt.

    References:
        Hooper et al., *KVQuant*, 2024 (keys before RoPE).
    """

    codec: VectorCodec
    rope: Rope | None = None
    mean: mx.array | None = None
    tables: Tables | None = None
    frozen: bool = static(default=False)

    per_row = ("mean",)

    @property
    def positional(self) -> bool:
        """Whether positions have to be known to decode."""
        return self.rope is not None and self.mean is not None

    @property
    def spec(self) -> str:
        """The canonical spec string: it does not tell what was learnt."""
        return f"{self.codec.spec}-c"

    @property
    def bits(self) -> int:
        """Bits a number."""
        return self.codec.bits  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def options(self) -> str:
        """Those of the codec inside."""
        return self.codec.options  # pyright: ignore[reportAttributeAccessIssue]

    def check(self, head_dim: int) -> None:
        """Raise ``CodecError`` where vectors of ``head_dim`` cannot be stored."""
        self.codec.check(head_dim)
        if self.rope is not None and self.rope.dims > head_dim:
            raise CodecError(
                f"{self.spec}: RoPE of {self.rope.dims} numbers for a head_dim of {head_dim}"
            )
        mean = self.mean
        if mean is not None and (mean.ndim != 4 or mean.shape[2:] != (1, head_dim)):
            raise CodecError(
                f"{self.spec}: a mean is [batch, heads, 1, head_dim], not {mean.shape}, for a "
                f"head_dim of {head_dim}"
            )

    def width(self, head_dim: int) -> int:
        """Numbers stored for a vector of ``head_dim``."""
        return self.codec.width(head_dim)

    def vector_nbytes(self, head_dim: int, dtype: mx.Dtype) -> int:
        """Exact bytes of one vector of one head; the mean of all is not among them."""
        return self.codec.vector_nbytes(head_dim, dtype)

    def encode(
        self, x: Float[mx.array, "batch heads tokens head_dim"], positions: Any = None
    ) -> Planes:
        """The planes of what is left of ``x``.

        Args:
            x: keys, after RoPE.
            positions: of the first token, one number a row or one for all; or an array of all,
                ``[batch, tokens]``.
        """
        left = self.without_mean(x, positions)
        if not isinstance(self.codec, Rotated):
            left = left.astype(x.dtype)
        return self.codec.encode(left, positions)

    def without_mean(self, x: mx.array, positions: Any = None) -> mx.array:
        """Keys less their mean, float32."""
        x = x.astype(mx.float32)
        mean = self.mean_at(_positions_of(positions, x.shape[2]))
        if any(n not in (1, m) for n, m in zip(mean.shape[:2], x.shape[:2], strict=True)):
            raise CodecError(f"{self.spec}: a mean {mean.shape} for vectors {x.shape}")
        return x - mean

    def decode(self, planes: Planes) -> mx.array:
        """Whole keys, float32; where they are positional the last plane has the positions."""
        return self.with_mean(self.codec.decode(self.of_codec(planes)).astype(mx.float32), planes)

    def decode_stored(self, planes: Planes) -> mx.array:
        """The same in the coordinates of the codec inside."""
        keys = self.rotated.decode_stored(self.of_codec(planes))
        if self.mean is None:
            return keys
        return keys + self.rotated.enter(self.mean_at(self._positions(planes)))

    @property
    def rotated(self) -> Rotated:
        """The codec inside, where it rotates.

        Raises:
            CodecError: it does not.
        """
        if not isinstance(self.codec, Rotated):
            raise CodecError(f"{self.spec} does not rotate")
        return self.codec

    def of_codec(self, planes: Planes) -> Planes:
        """The planes of the codec inside: all but positions."""
        return planes[:-1] if self.positional else planes

    def with_mean(self, x: mx.array, planes: Planes) -> mx.array:
        """Decoded vectors with the mean again."""
        mean = self.mean_at(self._positions(planes))
        if mean.shape[-1] > 1:  # what is filled up has none
            mean = mx.pad(mean, [(0, 0)] * 3 + [(0, x.shape[-1] - mean.shape[-1])])
        return x + mean

    def _positions(self, planes: Planes) -> mx.array | None:
        return planes[-1][..., 0] if self.positional else None

    def mean_at(self, positions: mx.array | None) -> mx.array:
        """The mean at ``[batch or 1, 1, tokens]``, ``[batch, heads, tokens or 1, dim]``.

        Not to have one is to have zero: a row that has learnt nothing is the same alone as beside
        one that has, down to the signs of zeros.
        """
        if self.mean is None:
            return mx.zeros((1, 1, 1, 1))
        if self.rope is None or positions is None:
            return self.mean
        return self.rope.rotated(self.mean, self._angles(positions))

    def _angles(self, positions: mx.array) -> tuple[mx.array, mx.array]:
        assert self.rope is not None
        return (self.tables or self.rope).angles(positions)

    def mean_scores(
        self, queries: Float[mx.array, "batch heads queries dim"], planes: Planes
    ) -> mx.array | None:
        """The products of queries and the mean of each key: to be added to the scores.

        Args:
            queries: by KV head.
            planes: of the keys, positions last where they are positional.

        Returns:
            ``[batch, heads, queries, columns or 1]``, ``None`` without a mean.
        """
        if self.mean is None:
            return None
        dim = self.mean.shape[-1]
        queries, mean = queries[..., :dim].astype(mx.float32), self.mean
        if self.rope is None:
            return mx.sum(queries * mean, axis=-1, keepdims=True)
        terms, constant = self.rope.product_terms(queries, mean)
        at = planes[-1]
        found = None if self.tables is None else self.tables.products(terms, at.shape[2])
        if found is None:
            angles = mx.concatenate(list(self._angles(at[..., 0])), axis=-1)
            found = _products(terms, angles.swapaxes(-1, -2))
        return found + constant

    def bound(self, positions: int, run: tuple[int, int] | None = None) -> Centred:
        """With the angles of the positions below a number, where they are needed.

        Args:
            positions: all that are read are below.
            run: those that are read, where they are one run.
        """
        if not self.positional or self.rope is None:
            return self
        return replace(self, tables=Tables.of(self.rope, positions, run))

    def of_first(self, positions: int) -> Centred:
        """For a read of the first positions of the run alone."""
        if self.tables is None or self.tables.run is None:
            return self
        start, _ = self.tables.run
        return replace(self, tables=replace(self.tables, run=(start, start + positions)))

    # -- what it learns ---------------------------------------------------------------------------

    def calibrated(self, x: mx.array, valid: mx.array, positions: mx.array) -> Centred:
        """With the mean of keys, and what the codec inside learns from what is left of them.

        Args:
            x: ``[batch, heads, tokens, dim]``, after RoPE.
            valid: bool ``[batch, 1, tokens, 1]``: which of them count.
            positions: ``[batch, 1, tokens]``.
        """
        if self.frozen:
            return self
        x = x.astype(mx.float32)
        counts = valid & mx.all(mx.isfinite(x), axis=-1, keepdims=True)
        x = mx.where(counts, x, 0.0)
        angles = None if self.rope is None else self.rope.angles(positions)
        still = x if self.rope is None or angles is None else self.rope.unrotated(x, angles)
        total = mx.sum(counts.astype(mx.float32), axis=2, keepdims=True)
        mean = mx.sum(still, axis=2, keepdims=True) / mx.maximum(total, 1.0)
        learnt = replace(self, mean=mean)
        if not isinstance(self.codec, Rotated):
            return learnt
        left = x - learnt.mean_at(positions)
        return replace(learnt, codec=self.codec.calibrated(left, counts))


def _products(terms: mx.array, angles: mx.array) -> mx.array:
    """``[B, H, L, d]`` times ``[B, 1, d, N]`` or ``[d, N]``: one product for all heads."""
    batch, heads, queries, dims = terms.shape
    if angles.ndim == 2 or angles.shape[0] == 1:
        flat = terms.reshape(batch * heads * queries, dims)
        products = flat @ angles.reshape(dims, angles.shape[-1])
    else:
        products = terms.reshape(batch, 1, heads * queries, dims) @ angles
    return products.reshape(batch, heads, queries, angles.shape[-1])


def _positions_of(positions: Any, tokens: int) -> mx.array | None:
    """``[batch or 1, 1, tokens]`` of rows or positions."""
    if positions is None:
        return mx.zeros((1, 1, tokens), mx.int32)
    if isinstance(positions, mx.array):
        return positions[:, None] if positions.ndim == 2 else positions
    return mx.array(list(positions), dtype=mx.int32)[:, None, None] + mx.arange(tokens)
