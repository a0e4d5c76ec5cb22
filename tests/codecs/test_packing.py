"""Signs and magnitudes in bytes, against a model that sets one bit after another."""

from itertools import pairwise, product

import hypothesis.strategies as st
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given

from kvfun.codecs import _lloyd_max
from kvfun.codecs._lookup import lookup
from kvfun.codecs._packing import MULTIPLE, pack, unpack

from .test_affine import raw

BITS = (2, 3, 4, 5)
PLANES = {2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1)}
"""The bits of a number in each plane."""

# -- the model ------------------------------------------------------------------------------------


def in_bits(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Bit ``j`` of number ``i`` is bit ``i * bits + j`` of the row, the lowest of a byte first."""
    rows = numbers.reshape(-1, numbers.shape[-1])
    out = np.zeros((len(rows), rows.shape[1] * bits // 8), np.uint8)
    for row, i, j in product(range(len(rows)), range(rows.shape[1]), range(bits)):
        place = i * bits + j
        out[row, place // 8] |= (int(rows[row, i]) >> j & 1) << place % 8
    return out.reshape(*numbers.shape[:-1], out.shape[1])


def model(magnitudes: np.ndarray, negative: np.ndarray, bits: int) -> list[np.ndarray]:
    if bits in (2, 4):
        return [in_bits(magnitudes + (negative << (bits - 1)), bits)]
    return [in_bits(magnitudes, bits - 1), in_bits(negative, 1)]


def fields(plane: np.ndarray, bits: int) -> np.ndarray:
    """Every number of a row of bytes."""
    at = np.arange(plane.shape[-1] * 8 // bits) * bits
    numbers = [[plane[..., (i + j) // 8] >> (i + j) % 8 & 1 for j in range(bits)] for i in at]
    return np.stack([sum(bit.astype(int) << j for j, bit in enumerate(n)) for n in numbers], -1)


def meant(planes: list[np.ndarray], bits: int, halves: tuple[int, ...]) -> np.ndarray:
    if bits in (2, 4):
        codes = fields(planes[0], bits)
        magnitudes, negative = codes & (2 ** (bits - 1) - 1), codes >> (bits - 1)
    else:
        magnitudes, negative = fields(planes[0], bits - 1), fields(planes[1], 1)
    return np.array(halves)[magnitudes] * (1 - 2 * negative)


@st.composite
def codes(draw):
    """Magnitudes and signs of any leading axes."""
    bits = draw(st.sampled_from(BITS))
    lead = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
    shape = (*lead, MULTIPLE * draw(st.integers(1, 6)))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    magnitudes = random.integers(0, 2 ** (bits - 1), shape).astype(np.uint8)
    return bits, magnitudes, random.integers(0, 2, shape).astype(np.uint8)


def packed(bits: int, magnitudes: np.ndarray, negative: np.ndarray):
    return pack(mx.array(magnitudes), mx.array(negative.astype(bool)), bits)


# -- bit by bit -----------------------------------------------------------------------------------


@given(codes())
def test_planes_are_the_models(given):
    bits, magnitudes, negative = given
    planes = packed(bits, magnitudes, negative)
    expected = model(magnitudes.astype(int), negative.astype(int), bits)
    assert len(planes) == len(expected) == len(PLANES[bits])
    for plane, other, each in zip(planes, expected, PLANES[bits], strict=True):
        assert plane.dtype == mx.uint8
        assert plane.shape == (*magnitudes.shape[:-1], magnitudes.shape[-1] * each // 8)
        assert np.array_equal(np.array(plane), other)


@given(codes())
def test_numbers_are_those_of_the_model(given):
    """Of bytes that no encoder wrote, too."""
    bits, magnitudes, negative = given
    halves = _lloyd_max.integers(bits)
    planes = model(magnitudes.astype(int), negative.astype(int), bits)
    numbers = unpack(tuple(map(mx.array, planes)), bits, halves)
    assert numbers.dtype == mx.int16
    assert numbers.shape == magnitudes.shape
    assert np.array_equal(np.array(numbers), meant(planes, bits, halves))
    signed = np.array(halves)[magnitudes] * (1 - 2 * negative.astype(int))
    assert np.array_equal(np.array(numbers), signed)


@given(codes())
def test_what_is_packed_is_unpacked(given):
    bits, magnitudes, negative = given
    halves = tuple([3 * n + 1 for n in range(2 ** (bits - 1))])
    numbers = np.array(unpack(packed(bits, magnitudes, negative), bits, halves)).astype(int)
    assert np.array_equal(np.abs(numbers), 3 * magnitudes.astype(int) + 1)
    assert np.array_equal(numbers < 0, negative.astype(bool))


@pytest.mark.parametrize("bits", BITS)
def test_every_byte_is_unpacked(bits):
    """Each byte of magnitudes under each of signs."""
    halves = _lloyd_max.integers(bits)
    if bits in (2, 4):
        planes = [np.arange(256, dtype=np.uint8)[:, None].repeat(2 * bits, 1)]
        planes[0][:, 1] = planes[0][::-1, 0]
    else:
        high, low = np.divmod(np.arange(2**16), 256)
        each = 2 * (bits - 1)
        planes = [low.astype(np.uint8)[:, None].repeat(each, 1)]
        planes.append(high.astype(np.uint8)[:, None].repeat(2, 1))
    numbers = unpack(tuple(map(mx.array, planes)), bits, halves)
    assert np.array_equal(np.array(numbers), meant(planes, bits, halves))


# -- the layout as it is documented ---------------------------------------------------------------


def one(bits: int, at: int, magnitude: int, negative: bool) -> list[list[int]]:
    """The planes where one number of 16 is not zero."""
    magnitudes, signs = np.zeros(16, np.uint8), np.zeros(16, np.uint8)
    magnitudes[at], signs[at] = magnitude, negative
    return [plane.tolist() for plane in packed(bits, magnitudes, signs)]


def test_two_and_four_bits_are_fields_with_the_sign_on_top():
    assert one(2, 0, 1, False) == [[0b01, 0, 0, 0]]
    assert one(2, 0, 0, True) == [[0b10, 0, 0, 0]]
    assert one(2, 3, 1, True) == [[0b11 << 6, 0, 0, 0]]
    assert one(2, 5, 1, False) == [[0, 0b01 << 2, 0, 0]]
    assert one(4, 0, 5, False) == [[0b0101, *[0] * 7]]
    assert one(4, 1, 7, True) == [[0b1111 << 4, *[0] * 7]]
    assert one(4, 15, 0, True) == [[*[0] * 7, 0b1000 << 4]]


def test_three_and_five_bits_are_a_plane_of_magnitudes_and_one_of_signs():
    assert one(3, 0, 3, False) == [[0b11, 0, 0, 0], [0, 0]]
    assert one(3, 6, 2, True) == [[0, 0b10 << 4, 0, 0], [1 << 6, 0]]
    assert one(3, 15, 0, True) == [[0] * 4, [0, 1 << 7]]
    assert one(5, 0, 15, False) == [[0b1111, *[0] * 7], [0, 0]]
    assert one(5, 9, 6, True) == [[0, 0, 0, 0, 0b0110 << 4, 0, 0, 0], [0, 1 << 1]]


@pytest.mark.parametrize("bits", BITS)
def test_bytes_of_a_vector(bits):
    for dim in (16, 64, 80, 112, 128, 256):
        planes = packed(bits, np.zeros((1, dim), np.uint8), np.zeros((1, dim), np.uint8))
        assert sum(plane.nbytes for plane in planes) == dim * bits // 8
        assert all(plane.shape[-1] % 2 == 0 for plane in planes)  # pairs of bytes


# -- cuts -----------------------------------------------------------------------------------------


@given(
    bits=st.sampled_from(BITS),
    cuts=st.lists(st.integers(0, 9), max_size=3),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_cut_of_the_tokens_is_byte_exact(bits, cuts, seed):
    random = np.random.default_rng(seed)
    magnitudes = random.integers(0, 2 ** (bits - 1), (2, 3, 9, 32)).astype(np.uint8)
    negative = random.integers(0, 2, magnitudes.shape).astype(np.uint8)
    whole, halves = packed(bits, magnitudes, negative), _lloyd_max.integers(bits)
    numbers = unpack(whole, bits, halves)
    for a, b in pairwise([0, *sorted(cuts), 9]):
        if a == b:
            continue
        piece = packed(bits, magnitudes[:, :, a:b], negative[:, :, a:b])
        for plane, other in zip(piece, whole, strict=True):
            assert raw(plane) == raw(other[:, :, a:b])
        # planes that are cut are read in place, wherever in a buffer they lie
        views = tuple([plane[:, :, a:b] for plane in whole])
        assert raw(unpack(views, bits, halves)) == raw(numbers[:, :, a:b])


@pytest.mark.parametrize("bits", BITS)
def test_the_order_in_memory_does_not_matter(bits):
    random = np.random.default_rng(bits)
    magnitudes = random.integers(0, 2 ** (bits - 1), (2, 5, 3, 32)).astype(np.uint8)
    negative = random.integers(0, 2, magnitudes.shape).astype(np.uint8)
    whole, halves = packed(bits, magnitudes, negative), _lloyd_max.integers(bits)
    turned = pack(
        mx.array(magnitudes).swapaxes(1, 2), mx.array(negative.astype(bool)).swapaxes(1, 2), bits
    )
    for plane, other in zip(turned, whole, strict=True):
        assert raw(plane) == raw(other.swapaxes(1, 2))
    views = tuple([plane.swapaxes(1, 2) for plane in whole])
    assert raw(unpack(views, bits, halves)) == raw(unpack(whole, bits, halves).swapaxes(1, 2))


# -- looking up -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [mx.uint8, mx.uint16, mx.uint32, mx.int32])
@pytest.mark.parametrize("shape", [(), (0,), (7,), (2, 3, 5), (2, 0, 5)])
def test_a_lookup_takes_one_entry_for_every_index(dtype, shape):
    table = np.random.default_rng(0).integers(0, 2**63, 200).astype(np.uint64)
    index = np.random.default_rng(1).integers(0, 200, shape)
    found = lookup(mx.array(table), mx.array(index).astype(dtype))
    assert found.dtype == mx.uint64
    assert np.array_equal(np.array(found), table[index])
