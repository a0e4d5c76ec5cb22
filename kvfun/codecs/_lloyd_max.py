"""The best scalar codebooks for normally distributed numbers (Max 1960, Lloyd 1982)."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

STEP = 2.0**-13
"""Centroids are multiples of this: within 6.1e-5 of the exact ones, and fit for 16-bit integers."""

_HALVES = {
    2: (0.4527800346, 1.5104176085),
    3: (0.2450941789, 0.7560052812, 1.3439092785, 2.1519457045),
    4: (
        *(0.1283950299, 0.3880482995, 0.6567591185, 0.9423404565),
        *(1.2562311973, 1.6180463860, 2.0690172265, 2.7325895710),
    ),
    5: (
        *(0.0658896598, 0.1980518297, 0.3313783058, 0.4666995230),
        *(0.6049336240, 0.7471357037, 0.8945651174, 1.0487833199),
        *(1.2118043806, 1.3863403396, 1.5762280786, 1.7872332177),
        *(2.0287283994, 2.3177394042, 2.6911195774, 3.2607324934),
    ),
}
"""The positive half of each symmetric codebook."""

BITS = tuple(_HALVES)


@cache
def integers(bits: int) -> tuple[int, ...]:
    """The positive centroids as multiples of :data:`STEP`, ascending."""
    return tuple([round(c / STEP) for c in _HALVES[bits]])


@cache
def magnitudes(bits: int) -> tuple[float, ...]:
    """The positive centroids, ascending.

    >>> magnitudes(2)
    (0.4527587890625, 1.5103759765625)
    """
    return tuple([STEP * n for n in integers(bits)])


@cache
def boundaries(bits: int) -> tuple[float, ...]:
    """Where a magnitude changes from one centroid to the next: midway."""
    return tuple([(low + high) / 2 for low, high in pairwise(magnitudes(bits))])
