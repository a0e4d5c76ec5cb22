"""Fast rotations: orthogonal, inverted by their transpose, and never of a size that MLX botches."""

from zlib import crc32

import hypothesis.strategies as st
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given

from kvfun.codecs._hadamard import (
    SMALL,
    hadamard,
    hadamard_inverse,
    hadamard_order,
    signs,
)
from kvfun.errors import CodecError

from .test_affine import f64

SIZES = sorted(m << k for m in (1, 12, 20, 28) for k in range(11) if m << k <= 1024)
REFUSED = [0, 3, 5, 7, 9, 11, 18, 21, 36, 60, 72, 100, 144, 200, 288, 300, 336, 576, 1000, 1152]


def matrix(dim: int) -> np.ndarray:
    """Column ``i`` is the transform of the ``i``-th unit vector."""
    return f64(hadamard(mx.eye(dim))).T


def sylvester(dim: int) -> np.ndarray:
    result = np.ones((1, 1))
    while len(result) < dim:
        result = np.block([[result, result], [result, -result]])
    return result


@pytest.mark.parametrize("dim", SIZES)
def test_it_is_orthogonal_and_flat(dim):
    h = matrix(dim)
    assert np.abs(h @ h.T - np.eye(dim)).max() < 1e-5
    assert np.abs(np.abs(h) * dim**0.5 - 1).max() < 1e-5


@pytest.mark.parametrize("dim", SIZES)
def test_the_inverse_is_the_transpose(dim):
    h = matrix(dim)
    assert np.abs(f64(hadamard_inverse(mx.eye(dim))) - h).max() < 1e-5
    x = np.random.default_rng(dim).normal(size=(2, 3, 5, dim)).astype(np.float32)
    y = hadamard(mx.array(x))
    assert np.abs(f64(y) - x.astype(float) @ h.T).max() < 1e-5
    assert np.abs(f64(hadamard_inverse(y)) - x).max() < 1e-5
    assert np.abs(f64(hadamard(hadamard_inverse(mx.array(x)))) - x).max() < 1e-5


@pytest.mark.parametrize("dim", SIZES)
def test_it_is_the_product_of_a_small_matrix_and_a_power_of_two(dim):
    order = hadamard_order(dim)
    assert order in SMALL
    small = matrix(order) if order > 1 else np.ones((1, 1))
    power = sylvester(dim // order) / (dim // order) ** 0.5
    assert np.abs(matrix(dim) - np.kron(small, power)).max() < 1e-5


def test_only_orders_of_20_and_28_are_not_symmetric():
    for dim in SIZES:
        h = matrix(dim)
        symmetric = np.abs(h - h.T).max() < 1e-5
        assert symmetric == (hadamard_order(dim) in (1, 12))
        applied_twice = np.abs(h @ h - np.eye(dim)).max() < 1e-4
        assert applied_twice == symmetric


@given(dim=st.sampled_from(SIZES[3:]), seed=st.integers(0, 999), exponent=st.integers(-30, 30))
def test_norms_and_products_stay(dim, seed, exponent):
    x = np.random.default_rng(seed).normal(size=(2, 3, dim)) * 2.0**exponent
    a, b = mx.array(x.astype(np.float32))
    before, after = f64(a) @ f64(b).T, f64(hadamard(a)) @ f64(hadamard(b)).T
    scale = np.linalg.norm(f64(a)) * np.linalg.norm(f64(b))
    assert np.abs(after - before).max() <= 1e-5 * scale


@pytest.mark.parametrize("turn", [hadamard, hadamard_inverse])
@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 3, 80), (0, 0, 112), (3, 0, 128)])
def test_empty_arrays_stay(turn, shape):
    """MLX alone refuses them."""
    out = turn(mx.zeros(shape))
    assert out.shape == shape
    assert out.dtype == mx.float32


@pytest.mark.parametrize("dim", [64, 80, 96, 112])
def test_a_vector_does_not_depend_on_those_beside_it(dim):
    """Bit for bit, forwards: what is stored must not depend on how many tokens come at once."""
    x = mx.array(np.random.default_rng(0).normal(size=(2, 37, dim)).astype(np.float32))
    whole = hadamard(x)
    for a, b in ((0, 1), (1, 4), (4, 37)):
        assert mx.array_equal(hadamard(x[:, a:b]), whole[:, a:b])
    assert mx.array_equal(hadamard(mx.contiguous(x.swapaxes(0, 1)).swapaxes(0, 1)), whole)


# -- sizes that are refused -----------------------------------------------------------------------


@pytest.fixture
def no_mlx(monkeypatch):
    """At some sizes MLX writes past the end of its buffer: it must not be called."""

    def called(*_, **__):
        raise AssertionError("MLX was called")

    monkeypatch.setattr(mx, "hadamard_transform", called)


@pytest.mark.parametrize("dim", REFUSED)
def test_other_sizes_are_errors_and_mlx_is_not_called(dim, no_mlx):
    for call in (
        lambda: hadamard_order(dim),
        lambda: hadamard(mx.zeros((2, dim))),
        lambda: hadamard_inverse(mx.zeros((2, dim))),
        lambda: hadamard(mx.zeros((0, dim))),
        lambda: hadamard_inverse(mx.zeros((0, dim))),
    ):
        with pytest.raises(CodecError, match=f"no fast rotation of {dim} numbers"):
            call()


def test_the_message_says_what_to_do():
    with pytest.raises(CodecError, match=r"power of two, or 12, 20 or 28 .* \(512 and 64\)"):
        hadamard_order(576)


def test_orders():
    assert [hadamard_order(n) for n in (1, 2, 64, 8192)] == [1] * 4
    assert [hadamard_order(n) for n in (12, 96, 192, 384, 12 * 8192)] == [12] * 5
    assert [hadamard_order(n) for n in (20, 80, 160, 320)] == [20] * 4
    assert [hadamard_order(n) for n in (28, 112, 224, 448)] == [28] * 4
    for large in (16384, 12 * 16384, 20 * 16384, 28 * 16384):
        with pytest.raises(CodecError):
            hadamard_order(large)


def test_every_size_is_one_or_an_error():
    for dim in range(1, 1025):
        if dim in SIZES:
            assert dim % hadamard_order(dim) == 0
        else:
            with pytest.raises(CodecError):
                hadamard_order(dim)


# -- signs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dim", "seed", "first", "total", "crc"),
    [
        (16, 42, "+-+-+++++++-++++", 10, 0x0BAD036A),
        (64, 42, "--+-+++-+++++++-", 10, 0x9D370F76),
        (80, 42, "--+-+++-+++++++-", 12, 0xD3A4466B),
        (96, 42, "--+-+++-+++++++-", 8, 0xB1E74898),
        (112, 42, "--+-+++-+++++++-", 10, 0x92F46F2F),
        (128, 42, "--+-+++-+++++++-", 16, 0x29A0F347),
        (256, 42, "--+-+++-+++++++-", 22, 0x1E5AA3E6),
        (128, 7, "-+-++++--+-+--++", 2, 0x78AE9BEA),
    ],
)
def test_signs_stay_what_they_are(dim, seed, first, total, crc):
    """Caches are stored in the coordinates that they lead to."""
    found = signs(dim, seed)
    assert set(found) == {-1, 1}
    assert "".join("+" if sign > 0 else "-" for sign in found[:16]) == first
    assert sum(found) == total
    assert crc32(bytes([sign > 0 for sign in found])) == crc


def test_signs_of_other_seeds_are_others():
    assert signs(128) == signs(128, 42)
    assert len({signs(128, seed) for seed in range(50)}) == 50
    assert all(abs(sum(signs(256, seed))) < 90 for seed in range(50))
