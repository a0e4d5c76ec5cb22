"""Scales of one byte: fine near a reference, coarse far from it, monotone everywhere."""

import hypothesis.strategies as st
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given

from kvfun.codecs import _log_scale
from kvfun.codecs._log_scale import decode, encode, factors

from .test_affine import f64

FACTORS = np.array(factors())
OCTAVES = np.log2(FACTORS[1:255])
"""Of codes 1 to 254."""

positive = st.floats(-15.9, 15.9).map(lambda octaves: float(np.float32(2.0**octaves)))
references = st.floats(-12, 12).map(lambda octaves: float(np.float32(2.0**octaves)))


def codes_of(scales, reference=1.0) -> np.ndarray:
    codes = encode(mx.array(scales, dtype=mx.float32), reference)
    assert codes.dtype == mx.uint8
    return np.array(codes).astype(int)


def test_the_table():
    """Two octaves of 32 steps each on either side; from there 21 steps double the distance."""
    assert len(FACTORS) == 256
    assert FACTORS[0] == 0
    assert np.isnan(FACTORS[255])
    assert (np.diff(FACTORS[:255]) > 0).all()
    assert FACTORS[128] == 1
    fine = 2.0 ** (np.arange(-64, 65) / 32)
    assert FACTORS[64:193] == pytest.approx(fine, rel=1e-12)
    assert FACTORS[129] / FACTORS[128] == pytest.approx(2 ** (1 / 32), rel=1e-12)
    assert OCTAVES[128:] == pytest.approx(-OCTAVES[1:127][::-1], rel=1e-12)
    assert OCTAVES[192 - 1 + 21] == pytest.approx(4)
    assert OCTAVES[192 - 1 + 42] == pytest.approx(8)
    assert OCTAVES[0] == pytest.approx(-16)
    assert OCTAVES[-1] == pytest.approx(2 * 2 ** (62 / 21))


@pytest.mark.parametrize("reference", [1.0, 0.013, 777.0])
def test_a_scale_of_the_table_is_stored_as_itself(reference):
    scales = decode(mx.arange(1, 255).astype(mx.uint8), reference)
    assert codes_of(scales, reference).tolist() == list(range(1, 255))
    assert f64(scales) == pytest.approx(FACTORS[1:255] * reference, rel=1e-6)


@given(scale=positive, reference=references)
def test_the_nearest_by_the_logarithm(scale, reference):
    """But for the middle of two coarse steps, which is taken of the logarithms' logarithms."""
    (code,) = codes_of([scale * reference], reference)
    wanted = np.log2(np.float32(scale * reference) / np.float32(reference))
    distances = np.abs(OCTAVES - wanted)
    assert distances[code - 1] <= distances.min() * (1 + 4e-2) + 2e-5
    assert distances[code - 1] <= distances.min() + 4e-4 * abs(wanted) + 2e-5


@given(scale=st.floats(0.25, 4), reference=references)
def test_near_the_reference_a_scale_is_off_by_half_a_fine_step(scale, reference):
    codes = encode(mx.array([scale * reference]), reference)
    off = np.log2(f64(decode(codes, reference))[0] / (scale * reference))
    assert abs(off) <= 1 / 64 + 1e-5


@given(scale=st.floats(-16.2, 15.6).map(lambda octaves: 2.0**octaves))
def test_far_away_it_is_off_by_a_sixtieth_of_the_distance(scale):
    decoded = f64(decode(encode(mx.array([scale]))))[0]
    off = abs(np.log2(decoded / scale))
    assert off <= max(1 / 64, abs(np.log2(scale)) * (2 ** (1 / 42) - 1)) * 1.02 + 1e-5


@given(
    st.lists(st.floats(0, width=32, allow_nan=False, allow_infinity=False), min_size=2), references
)
def test_it_is_monotone(scales, reference):
    """From zero to the largest numbers, far out of the table's range."""
    scales = np.sort(np.array(scales, np.float32))
    codes = codes_of(scales, reference)
    assert (np.diff(codes) >= 0).all()
    assert codes.max() <= 254
    decoded = f64(decode(encode(mx.array(scales), reference), reference))
    assert (np.diff(decoded) >= 0).all()
    assert np.isfinite(decoded).all()


def test_it_is_monotone_all_along():
    scales = 2.0 ** np.linspace(-20, 20, 40_001)
    codes = codes_of(scales)
    assert set(np.diff(codes)) == {0, 1}
    assert (codes[0], codes[-1]) == (1, 254)


def test_what_is_out_of_range_gets_the_last_code_there_is():
    assert codes_of([1e-38, 1e-30, 2.0**-17, 2.0**-16]).tolist() == [1] * 4
    assert codes_of([2.0**15.5, 2.0**17, 1e30, 3.4e38]).tolist() == [254] * 4
    assert codes_of([1.0], 1e-38).tolist() == [254]
    assert codes_of([1e38, 3e38], 1e-38).tolist() == [254] * 2  # the quotient is infinite
    assert codes_of([1e-38], 3e38).tolist() == [1]  # and here it is zero


def test_zero_is_zero_and_what_is_below():
    for reference in (1.0, 1e-20, 1e20):
        assert codes_of([0.0, -0.0, -1.0, -1e30], reference).tolist() == [0] * 4
        assert f64(decode(mx.zeros(3, mx.uint8), reference)).tolist() == [0] * 3


def test_what_is_not_finite_comes_back_as_nan_and_harms_no_other():
    scales = [1.0, np.nan, 2.0, np.inf, 4.0, -np.inf, 0.5]
    codes = codes_of(scales)
    assert codes.tolist() == [128, 255, 160, 255, 192, 255, 96]
    decoded = f64(decode(mx.array(codes.astype(np.uint8)), 3.0))
    assert np.isnan(decoded[[1, 3, 5]]).all()
    assert decoded[[0, 2, 4, 6]].tolist() == [3.0, 6.0, 12.0, 1.5]


def test_every_row_and_head_has_its_own_reference():
    reference = mx.array([0.5, 2.0, 8.0, 1e-3, 1e3, 1.0]).reshape(2, 3, 1, 1)
    scales = mx.ones((2, 3, 5, 4)) * reference * 2
    codes = encode(scales, reference)
    assert (np.array(codes) == 160).all()
    decoded = decode(codes, reference)
    assert decoded.dtype == mx.float32
    assert f64(decoded) == pytest.approx(f64(scales), rel=1e-6)


@pytest.mark.parametrize("shape", [(0,), (2, 0, 3), (1, 1, 0, 1)])
def test_no_scales(shape):
    codes = encode(mx.zeros(shape))
    assert codes.shape == shape
    assert codes.dtype == mx.uint8
    assert decode(codes).shape == shape


def test_steps_an_octave():
    assert _log_scale.FINE == 32
