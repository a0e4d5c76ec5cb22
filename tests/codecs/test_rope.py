"""RoPE as ``mx.fast.rope`` has it and as float64 has, and the same angles whoever asks."""

import hypothesis.strategies as st
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given

from kvfun.codecs._rope import FINE, Rope, Tables
from kvfun.errors import ShapeError

from .test_affine import f64, raw, vectors

ROPES = {
    "half": {"dims": 64},
    "traditional": {"dims": 64, "traditional": True},
    "partial": {"dims": 32, "base": 500000.0},
    "partial, traditional": {"dims": 48, "traditional": True, "base": 1e6},
    "slow": {"dims": 64, "scale": 0.25},
    "wavelengths": {"dims": 64, "wavelengths": np.geomspace(1, 4e5, 32).tolist()},
    "wavelengths, partial": {
        "dims": 16, "wavelengths": np.geomspace(2, 900, 8).tolist(), "traditional": True,
        "scale": 1.5,
    },
    "two": {"dims": 2},
}  # fmt: skip
DIM = 64


def fast(x: mx.array, offset: int, name: str) -> mx.array:
    options = {"base": 10000.0, "scale": 1.0, "traditional": False, **ROPES[name]}
    wavelengths = options.pop("wavelengths", None)
    if wavelengths is not None:
        options |= {"base": None, "freqs": mx.array(wavelengths)}
    return mx.fast.rope(x, offset=offset, **options)


def exact(x: np.ndarray, positions, name: str) -> np.ndarray:
    """By complex numbers, in float64, with the frequencies as float32 has them."""
    rope, dims = Rope.of(**ROPES[name]), ROPES[name]["dims"]
    turn = np.exp(1j * np.array(positions)[:, None] * f64(rope.frequencies))
    out = x.astype(np.float64)
    if rope.traditional:
        one, other = slice(0, dims, 2), slice(1, dims, 2)
    else:
        one, other = slice(0, dims // 2), slice(dims // 2, dims)
    pairs = (x[..., one] + 1j * x[..., other]) * turn
    out[..., one], out[..., other] = pairs.real, pairs.imag
    return out


@pytest.mark.parametrize("name", ROPES)
def test_frequencies_are_the_geometric_series_or_those_that_were_given(name):
    options = {"base": 10000.0, "scale": 1.0, **ROPES[name]}
    dims = options["dims"]
    known = options["base"] ** (np.arange(0, dims, 2) / dims)
    wanted = options["scale"] / np.array(options.get("wavelengths", known))
    rope = Rope.of(**ROPES[name])
    assert f64(rope.frequencies) == pytest.approx(wanted, rel=2e-6)
    assert rope.frequencies.dtype == mx.float32
    assert rope.dims == dims
    assert rope.traditional == options.get("traditional", False)


@pytest.mark.parametrize("offset", [0, 1, 63, 64, 128, 256, 1000])
@pytest.mark.parametrize("name", ROPES)
def test_vectors_are_rotated_as_mlx_does_it(name, offset):
    rope, x = Rope.of(**ROPES[name]), vectors(offset, 2, 3, 70, DIM)
    ours = rope.rotated(x, rope.angles(mx.arange(offset, offset + 70)))
    assert ours.shape == x.shape
    assert ours.dtype == mx.float32
    most = 1e-5 + (offset + 70) * 6e-7
    assert np.abs(f64(ours) - f64(fast(x, offset, name))).max() < most


@pytest.mark.parametrize("offset", [0, 100, 4095, 32_768, 131_072, 200_000])
@pytest.mark.parametrize("name", ROPES)
def test_the_angles_are_exact_but_for_the_rounding_of_float32(name, offset):
    """Half a unit in the last place of the angle, which MLX's own have, too; near the start that
    of half a block."""
    rope, x = Rope.of(**ROPES[name]), vectors(1, 1, 2, 40, DIM)
    positions = np.arange(offset, offset + 40)
    wanted = exact(f64(x), positions, name)
    size = np.abs(f64(x)).max() * 2**0.5
    fastest = f64(rope.frequencies).max()
    allowed = size * (max(offset, FINE / 2) * fastest * 2.0**-24 + 2e-6)
    angles = rope.angles(mx.array(positions))
    assert np.abs(f64(rope.rotated(x, angles)) - wanted).max() <= allowed
    # what lies behind the rotated numbers stays, bit for bit
    assert raw(rope.rotated(x, angles)[..., rope.dims :]) == raw(x[..., rope.dims :])
    # and unrotated it is what it was, whatever the angle's rounding
    again = rope.unrotated(rope.rotated(x, angles), angles)
    assert np.abs(f64(again) - f64(x)).max() <= 4e-6 * size
    back = rope.rotated(rope.unrotated(x, angles), angles)
    assert np.abs(f64(back) - f64(x)).max() <= 4e-6 * size


def test_a_mean_is_rotated_to_every_position():
    """One vector a head, and behind the rotated part the same for all."""
    rope, mean = Rope.of(32), vectors(0, 2, 3, 1, DIM)
    positions = mx.array([[5, 6, 7, 100], [0, 1, 2, 3]])[:, None]
    out = rope.rotated(mean, rope.angles(positions))
    assert out.shape == (2, 3, 4, DIM)
    for row, column in np.ndindex(2, 4):
        one = rope.rotated(mean[row, :, 0], rope.angles(positions[row, 0, column]))
        assert np.abs(f64(out[row, :, column]) - f64(one)).max() < 1e-6


# -- one angle for one position -------------------------------------------------------------------


@given(
    name=st.sampled_from(list(ROPES)),
    positions=st.lists(st.integers(0, 200_000), min_size=1, max_size=40),
    more=st.integers(0, 300),
)
def test_tables_have_the_same_angles_bit_for_bit(name, positions, more):
    """What an encoder takes away with one must come back with the other."""
    rope = Rope.of(**ROPES[name])
    tables = Tables.of(rope, max(positions) + 1 + more)
    at = mx.array(positions)
    for ours, theirs in zip(tables.angles(at), rope.angles(at), strict=True):
        assert ours.shape == theirs.shape == (len(positions), rope.dims // 2)
        assert raw(ours) == raw(theirs)


def test_an_angle_does_not_depend_on_what_else_is_asked_for():
    rope = Rope.of(64)
    positions = mx.array([0, 1, 63, 64, 65, 4097, 70_000, 199_999])
    whole = rope.angles(positions)
    for n, position in enumerate(positions.tolist()):
        for at in (mx.array(position), mx.array([[position]]), mx.arange(position, position + 33)):
            for part, all_of_them in zip(rope.angles(at), whole, strict=True):
                assert raw(part.reshape(-1, 32)[0]) == raw(all_of_them[n])


@pytest.mark.parametrize("count", [1, 2, FINE - 1, FINE, FINE + 1, 2 * FINE, 1000])
def test_tables_reach_to_the_number_of_positions(count):
    rope = Rope.of(16)
    tables = Tables.of(rope, count)
    blocks = -(-count // FINE)
    assert tables.coarse[0].shape == (blocks, 8)
    assert tables.fine[0].shape == (FINE, 8)
    at = mx.arange(count)
    for ours, theirs in zip(tables.angles(at), rope.angles(at), strict=True):
        assert raw(ours) == raw(theirs)


def test_tables_of_nothing_and_positions_below_zero_are_finite():
    """Padding has positions below zero: any angle, and no NaN."""
    rope = Rope.of(16)
    below = mx.array([-5, -1, 0])
    for angles in (rope.angles(below), Tables.of(rope, 0).angles(below)):
        cos, sin = map(f64, angles)
        assert np.isfinite(cos).all()
        assert np.isfinite(sin).all()
        assert cos**2 + sin**2 == pytest.approx(1, abs=1e-5)
    for shape in ((0,), (2, 1, 0)):
        assert rope.angles(mx.zeros(shape, mx.int32))[0].shape == (*shape, 8)


# -- products -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ROPES)
def test_products_with_a_rotated_vector_are_sums_of_cosines_and_sines(name):
    rope, random = Rope.of(**ROPES[name]), np.random.default_rng(3)
    with mx.stream(mx.cpu):
        queries, mean = random.normal(size=(2, 3, 5, DIM)), random.normal(size=(2, 3, 1, DIM))
        terms, constant = rope.product_terms(
            mx.array(queries, dtype=mx.float64), mx.array(mean, dtype=mx.float64)
        )
        assert terms.shape == (2, 3, 5, rope.dims)
        assert constant.shape == (2, 3, 5, 1)
        terms, constant = np.array(terms), np.array(constant)
    for position in (0, 1, 77, 5000, 200_000):
        angle = position * f64(rope.frequencies)
        found = terms @ np.concatenate([np.cos(angle), np.sin(angle)]) + constant[..., 0]
        wanted = (queries * exact(mean, [position], name)).sum(-1)
        assert found == pytest.approx(wanted, rel=1e-10, abs=1e-10)


# -- what cannot be -------------------------------------------------------------------------------


@pytest.mark.parametrize("dims", [0, -2, 1, 7, 63, True, False])
def test_other_dims_are_errors(dims):
    with pytest.raises(ShapeError, match="dims must be even and positive"):
        Rope.of(dims)


@pytest.mark.parametrize("dims", [64.0, "64", None])
def test_dims_of_another_type_are_errors(dims):
    with pytest.raises((ShapeError, TypeError)):  # TypeError where signatures are checked
        Rope.of(dims)


@pytest.mark.parametrize("wavelengths", [[], [1.0], [1.0] * 31, [1.0] * 33, [[1.0] * 32]])
def test_wavelengths_are_one_a_pair(wavelengths):
    with pytest.raises(ShapeError, match="for 32 pairs"):
        Rope.of(64, wavelengths=mx.array(wavelengths))
    if wavelengths[:1] != [[1.0] * 32]:
        with pytest.raises(ShapeError, match="for 32 pairs"):
            Rope.of(64, wavelengths=wavelengths)
