"""The codebooks of normal numbers, against Lloyd's iteration in float64."""

from functools import cache
from itertools import pairwise
from math import erfc, exp, pi, sqrt
from statistics import NormalDist

import numpy as np
import pytest

from kvfun.codecs import _lloyd_max

BITS = (2, 3, 4, 5)
PUBLISHED = {2: 0.11748185, 3: 0.03454776, 4: 0.00950101, 5: 0.00250467}
"""The least distortion of a unit normal number by so many bits (Max 1960, table I)."""


def density(x: float) -> float:
    return exp(-x * x / 2) / sqrt(2 * pi)


def mass(low: float, high: float) -> float:
    """The probability of ``[low, high)``, both positive: no difference of numbers near 1."""
    return (erfc(low / sqrt(2)) - erfc(high / sqrt(2))) / 2


@cache
def lloyd(bits: int) -> tuple[float, ...]:
    """The positive centroids where each is the mean of what is nearest to it."""
    count = 2 ** (bits - 1)
    quantile = NormalDist().inv_cdf
    centroids = [sqrt(3) * quantile((i + 0.5) / (2 * count)) for i in range(count, 2 * count)]
    for _ in range(20_000):
        midway = [(a + b) / 2 for a, b in pairwise(centroids)]
        edges = [0.0, *midway, 40.0]
        means = [(density(a) - density(b)) / mass(a, b) for a, b in pairwise(edges)]
        moved = max(abs(a - b) for a, b in zip(means, centroids, strict=True))
        centroids = means
        if moved < 1e-11:
            break
    return tuple(centroids)


def distortion(centroids: np.ndarray, boundaries: np.ndarray) -> float:
    """The mean squared error of unit normal numbers, by a fine grid."""
    x = np.linspace(-9, 9, 900_001)
    weights = np.exp(-x * x / 2)
    found = centroids[np.searchsorted(boundaries, x)]
    return float(((x - found) ** 2 * weights).sum() / weights.sum())


def codebook(bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Both halves, ascending."""
    half, edges = np.array(_lloyd_max.magnitudes(bits)), np.array(_lloyd_max.boundaries(bits))
    centroids = np.concatenate([-half[::-1], half])
    return centroids, np.concatenate([-edges[::-1], [0.0], edges])


def test_the_bits_that_there_are():
    assert _lloyd_max.BITS == BITS


@pytest.mark.parametrize("bits", BITS)
def test_centroids_are_those_of_lloyds_iteration(bits):
    exact = lloyd(bits)
    assert len(_lloyd_max.magnitudes(bits)) == len(exact) == 2 ** (bits - 1)
    assert np.abs(np.array(_lloyd_max.magnitudes(bits)) - exact).max() < 1e-4
    assert np.abs(np.array(_lloyd_max.magnitudes(bits)) - exact).max() <= _lloyd_max.STEP / 2 + 1e-9
    assert np.abs(np.array(_lloyd_max._HALVES[bits]) - exact).max() < 2e-9


@pytest.mark.parametrize("bits", BITS)
def test_centroids_are_whole_numbers_of_steps_that_fit_16_bits(bits):
    numbers = _lloyd_max.integers(bits)
    assert all(type(n) is int for n in numbers)
    assert list(numbers) == sorted({*numbers})
    assert 0 < numbers[0] < numbers[-1] < 2**15
    assert _lloyd_max.magnitudes(bits) == tuple([n * 2.0**-13 for n in numbers])
    assert _lloyd_max.STEP == 2.0**-13


@pytest.mark.parametrize("bits", BITS)
def test_boundaries_are_midway(bits):
    half = _lloyd_max.magnitudes(bits)
    edges = _lloyd_max.boundaries(bits)
    assert len(edges) == len(half) - 1
    for low, edge, high in zip(half, edges, half[1:], strict=False):
        assert edge - low == high - edge > 0
    assert np.array_equal(edges, np.array(edges, np.float32))  # exact in what compares them


@pytest.mark.parametrize("bits", BITS)
def test_the_distortion_is_the_least_there_is(bits):
    centroids, boundaries = codebook(bits)
    found = distortion(centroids, boundaries)
    assert found == pytest.approx(PUBLISHED[bits], rel=0.01)
    assert found == pytest.approx(PUBLISHED[bits], rel=2e-5)
    half = np.array(lloyd(bits))
    exact = np.concatenate([-half[::-1], half])
    assert found >= distortion(exact, (exact[1:] + exact[:-1]) / 2) - 1e-12


@pytest.mark.parametrize(
    ("bits", "first"),
    [
        (2, (3709, 12373)),
        (3, (2008, 6193, 11009, 17629)),
        (4, (1052, 3179, 5380, 7720)),
        (5, (540, 1622, 2715, 3823)),
    ],
)
def test_the_tables_stay_what_they_are(bits, first):
    """Caches hold indices into them."""
    assert _lloyd_max.integers(bits)[:4] == first
