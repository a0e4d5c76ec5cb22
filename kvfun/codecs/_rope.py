"""Rotary position embedding, as far as a codec has to undo it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from jaxtyping import Float, Int

from ..errors import ShapeError
from ..record import record, static

Angles = tuple[mx.array, mx.array]
"""Cosines and sines, ``[..., tokens, dims / 2]``."""

FINE = 256
"""Positions of a block: the angle of a position is that of its block's middle and that from there,
so that there are few to take the sine of."""


@record
class Rope:
    """How a model rotates queries and keys by their positions (Su et al., *RoFormer*, 2021).

    The pair ``i`` of the first ``dims`` numbers of a vector at position ``t`` is rotated by the
    angle ``t * frequencies[i]``; what lies behind them stays.

    Args:
        frequencies: radians a position, ``[dims / 2]``, float32.
        traditional: pairs are neighbours, ``(0, 1), (2, 3)``; else ``(0, dims / 2)`` and so on.
    """

    frequencies: mx.array
    traditional: bool = static(default=False)

    @staticmethod
    def of(
        dims: int,
        base: float | int = 10000.0,
        scale: float | int = 1.0,
        traditional: bool = False,
        wavelengths: Sequence[float] | mx.array | None = None,
    ) -> Rope:
        """The rotation of ``mx.fast.rope`` with the same arguments.

        Args:
            dims: how many numbers of a vector are rotated, an even number.
            base: of the geometric series of frequencies.
            scale: of the positions.
            traditional: see :class:`Rope`.
            wavelengths: MLX's ``freqs``, the inverses of the frequencies, instead of ``base``.

        Raises:
            ShapeError: an odd number of dims, or wavelengths that are not one a pair.

        >>> Rope.of(64, base=100000.0).dims
        64
        """
        if isinstance(dims, bool) or not isinstance(dims, int) or dims < 2 or dims % 2:
            raise ShapeError(f"RoPE rotates pairs: dims must be even and positive, not {dims!r}")
        if wavelengths is None:
            frequencies = mx.power(float(base), -mx.arange(0, dims, 2, dtype=mx.float32) / dims)
        else:
            known: Any = wavelengths
            frequencies = 1.0 / mx.array(known, dtype=mx.float32)
        if frequencies.shape != (dims // 2,):
            raise ShapeError(f"{frequencies.shape} wavelengths for {dims // 2} pairs")
        return Rope(frequencies * scale, traditional)

    @property
    def dims(self) -> int:
        """How many numbers of a vector are rotated."""
        return 2 * self.frequencies.shape[0]

    def angles(self, positions: Int[mx.array, "..."]) -> Angles:
        """Cosines and sines of every position, of negative ones any: as :class:`Tables` has them.

        An angle that were computed at once would differ from theirs by the rounding of a large
        number, and what an encoder takes away with one must come back with the other.
        """
        at = mx.maximum(positions, 0)
        return _sum(self.direct(_middle(at // FINE)), self.direct(_from_middle(at % FINE)))

    def direct(self, positions: mx.array) -> Angles:
        """Cosines and sines, each computed at once."""
        at = positions[..., None].astype(mx.float32) * self.frequencies
        return mx.cos(at), mx.sin(at)

    def rotated(self, x: Float[mx.array, "... dim"], angles: Angles) -> mx.array:
        """Vectors at other positions than 0, or moved on by angles."""
        return self._turned(x, *angles)

    def unrotated(self, x: Float[mx.array, "... dim"], angles: Angles) -> mx.array:
        """The inverse of :meth:`rotated`."""
        cos, sin = angles
        return self._turned(x, cos, -sin)

    def _turned(self, x: mx.array, cos: mx.array, sin: mx.array) -> mx.array:
        one, other = self._pairs(x)
        return self._joined(one * cos - other * sin, one * sin + other * cos, x)

    def _pairs(self, x: mx.array) -> tuple[mx.array, mx.array]:
        dims = self.dims
        if self.traditional:
            return x[..., 0:dims:2], x[..., 1:dims:2]
        return x[..., : dims // 2], x[..., dims // 2 : dims]

    def _joined(self, one: mx.array, other: mx.array, x: mx.array) -> mx.array:
        if self.traditional:
            turned = mx.stack([one, other], axis=-1).reshape(*one.shape[:-1], self.dims)
        else:
            turned = mx.concatenate([one, other], axis=-1)
        rest = x[..., self.dims :]
        if not rest.shape[-1]:
            return turned
        rest = mx.broadcast_to(rest, (*turned.shape[:-1], rest.shape[-1]))
        return mx.concatenate([turned, rest], axis=-1)

    def product_terms(self, queries: mx.array, mean: mx.array) -> tuple[mx.array, mx.array]:
        """``([a | b], constant)`` such that ``q . RoPE_t(mean) = a . cos + b . sin + constant``.

        Args:
            queries: ``[..., dim]``, after RoPE at their own positions.
            mean: ``[..., dim]``, before RoPE; it broadcasts to the queries.

        Returns:
            ``[..., dims]`` and ``[..., 1]``; cosines and sines are those of position ``t``.
        """
        (q, p), (m, n) = self._pairs(queries), self._pairs(mean)
        ab = mx.concatenate([q * m + p * n, p * m - q * n], axis=-1)
        rest = queries[..., self.dims :] * mean[..., self.dims :]
        return ab, mx.sum(rest, axis=-1, keepdims=True)


@record
class Tables:
    """Angles of all positions up to some number, for a few sines only.

    Position ``FINE * i + j`` has the angle of ``coarse[i]`` plus that of ``fine[j]``.

    Args:
        coarse: of the middle of every block.
        fine: of the places in a block, from its middle.
        run: the positions ``[start, stop)`` that are read, where they are one run in every row.
    """

    coarse: Angles
    fine: Angles
    run: tuple[int, int] | None = static(default=None)

    @staticmethod
    def of(rope: Rope, positions: int, run: tuple[int, int] | None = None) -> Tables:
        """Tables for the positions below a number."""
        blocks = max(1, -(-positions // FINE))
        middles, places = _middle(mx.arange(blocks)), _from_middle(mx.arange(FINE))
        return Tables(rope.direct(middles), rope.direct(places), run)

    def products(self, terms: mx.array, positions: int) -> mx.array | None:
        """``a . cos + b . sin`` at the positions of the run, if it has so many.

        The terms of :meth:`Rope.product_terms` move on to the middle of each block, so that one
        small table serves all blocks, and one half of a block the other: no angle of a position is
        ever computed.

        Args:
            terms: ``[batch, heads, queries, dims]``.
            positions: how many are read.

        Returns:
            ``[batch, heads, queries, positions]``; ``None`` where the run is another one.
        """
        start, stop = self.run or (0, 0)
        if stop - start != positions or not positions:
            return None
        first, last = start // FINE, -(-stop // FINE)
        cos, sin = [x[first:last] for x in self.coarse]
        a, b = mx.split(terms[..., None, :], 2, axis=-1)
        even, odd = [
            moved @ mx.contiguous(fine[FINE // 2 :].T)  # as a copy for the sake of slow BLASes
            for moved, fine in zip((a * cos + b * sin, b * cos - a * sin), self.fine, strict=True)
        ]
        found = mx.concatenate([(even - odd)[..., ::-1], even + odd], axis=-1)
        found = found.reshape(*terms.shape[:-1], (last - first) * FINE)
        return found[..., start - first * FINE : stop - first * FINE]

    def angles(self, positions: Int[mx.array, "..."]) -> Angles:
        """Those of every position; of negative ones, any."""
        at = mx.maximum(positions, 0)
        cos, sin = [mx.take(x, at // FINE, axis=0) for x in self.coarse]
        cos_too, sin_too = [mx.take(x, at % FINE, axis=0) for x in self.fine]
        return _sum((cos, sin), (cos_too, sin_too))


def _middle(block: mx.array) -> mx.array:
    return block.astype(mx.float32) * FINE + (FINE - 1) / 2


def _from_middle(place: mx.array) -> mx.array:
    return place.astype(mx.float32) - (FINE - 1) / 2


def _sum(one: Angles, other: Angles) -> Angles:
    """Cosines and sines of the sums of two angles."""
    (cos, sin), (cos_too, sin_too) = one, other
    return cos * cos_too - sin * sin_too, sin * cos_too + cos * sin_too
