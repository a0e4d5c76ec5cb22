"""TurboQuant's format: published vectors, and a NumPy model that shares no code with it."""

from itertools import pairwise, product
from zlib import crc32

import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given

import kvfun
from kvfun.codecs import Affine, Codec, TurboKeys, TurboValues, VectorCodec, parse
from kvfun.errors import CodecError, SpecError

from .shared import planes_of_no_tokens
from .test_affine import FLOATS, KINDS, f64, raw, vectors

DIMS = (64, 128, 256, 512)
KEY_BITS, VALUE_BITS = (2, 4, 5, 8), (2, 3, 4, 5, 8)
KEYS, VALUES = [*map(TurboKeys, KEY_BITS)], [*map(TurboValues, VALUE_BITS)]
SIDES = KEYS + VALUES
f32 = np.float32

# -- the format in NumPy --------------------------------------------------------------------------


def bits_packed(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Bit by bit: bit ``j`` of number ``i`` is bit ``i * bits + j`` of the row."""
    rows = numbers.reshape(-1, numbers.shape[-1]).astype(int)
    out = np.zeros((len(rows), rows.shape[1] * bits // 8), np.uint8)
    for row, i, j in product(range(len(rows)), range(rows.shape[1]), range(bits)):
        place = i * bits + j
        out[row, place // 8] |= (rows[row, i] >> j & 1) << place % 8
    return out.reshape(*numbers.shape[:-1], -1)


def bits_unpacked(packed: np.ndarray, bits: int) -> np.ndarray:
    stream = np.unpackbits(packed, axis=-1, bitorder="little")
    return np.packbits(
        stream.reshape(*packed.shape[:-1], -1, bits), axis=-1, bitorder="little"
    ).squeeze(-1)


def in_groups(x: np.ndarray) -> np.ndarray:
    return x.reshape(*x.shape[:-1], -1, 32)


def half(x: np.ndarray) -> np.ndarray:
    return np.where(np.isinf(x), x, np.clip(x, -65504, 65504)).astype(np.float16)


@np.errstate(divide="ignore", over="ignore")
def model_keys(x: np.ndarray, bits: int) -> tuple[np.ndarray, ...]:
    groups = in_groups(x.astype(f32))
    low, high = groups.min(-1, keepdims=True), groups.max(-1, keepdims=True)
    if bits == 8:
        least, most = -127, 127
        scale = (high - low) / f32(254)
        zero = np.round((high + low) / (f32(2) * (scale + f32(1e-8))))
    else:
        least, most = 0, 2**bits - 1
        scale = (high - low) / f32(most)
        zero = np.round(low / (scale + f32(1e-8)))
    numbers = np.clip(np.round(groups / (scale + f32(1e-8)) - zero), least, most)
    constant = (low == high) & (low != 0) | np.isinf(zero.astype(np.float16))
    numbers = np.where(constant, 0, numbers).reshape(x.shape)
    scale = half(np.where(constant, (low + high) / f32(2), scale))
    zero = np.where(constant, 1, zero).astype(np.float16)
    stored = numbers.astype(np.int8) if bits == 8 else bits_packed(numbers, bits)
    return stored, scale[..., 0], zero[..., 0]


def model_keys_decoded(planes: tuple[np.ndarray, ...], bits: int) -> np.ndarray:
    stored, scales, zeros = planes
    numbers = stored if bits == 8 else bits_unpacked(stored, bits)
    out = (in_groups(numbers.astype(f32)) + zeros.astype(f32)[..., None]) * scales.astype(f32)[
        ..., None
    ]
    return out.reshape(numbers.shape)


def sylvester(dim: int) -> np.ndarray:
    matrix = np.ones((1, 1))
    while len(matrix) < dim:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix


def signs(dim: int) -> np.ndarray:
    return 1 - 2 * np.array(mx.random.randint(0, 2, (dim,), key=mx.random.key(42)))


LM_3 = np.array([0.24509, 0.75601, 1.34391, 2.15195], f32)
BOUNDARIES_3 = np.array([-1.74793, -1.04996, -0.50055, 0, 0.50055, 1.04996, 1.74793], f32)


def lloyd(bits: int) -> np.ndarray:
    """Lloyd's iteration over samples, by sums of the sorted ones."""
    x = np.sort(np.array(mx.random.normal((200_000,), key=mx.random.key(0))))
    sums = np.concatenate([[0], np.cumsum(x, dtype=np.float64)])
    centroids = np.linspace(x[0], x[-1], 2**bits, dtype=f32)
    for _ in range(500):
        edges = np.searchsorted(x, (centroids[1:] + centroids[:-1]) / f32(2), "right")
        edges = np.concatenate([[0], edges, [len(x)]])
        counts = np.diff(edges)
        means = np.diff(sums[edges]).astype(f32) / np.maximum(counts, 1).astype(f32)
        before, centroids = centroids, np.where(counts > 0, means, centroids)
        if np.abs(centroids - before).max() < (1e-4 if bits >= 5 else 1e-6):
            break
    return centroids


def codebook(bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Centroids as the codec decodes them, and the boundaries by the format's rule."""
    count, planes = 2**bits, []
    for start in range(0, count, 32):
        index = (start + np.arange(64) % 32) % count
        packed = index.astype(np.uint8) if bits == 8 else bits_packed(index[None], bits)[0]
        planes.append((packed[None, None, None], np.ones((1, 1, 1, 2), np.float16)))
    decoded = [TurboValues(bits).decode_stored(tuple(map(mx.array, p))) for p in planes]
    centroids = np.concatenate([np.array(d)[0, 0, 0, :32] for d in decoded])[:count]
    if bits == 3:
        return centroids, BOUNDARIES_3
    return centroids, (centroids[1:] + centroids[:-1]) / f32(2)


def numpy_planes(planes) -> tuple[np.ndarray, ...]:
    return tuple(map(np.array, planes))


def assert_same(planes, expected) -> None:
    for plane, other in zip(planes, expected, strict=True):
        plane = np.array(plane)
        assert plane.dtype == other.dtype
        assert plane.shape == other.shape
        assert plane.tobytes() == np.ascontiguousarray(other).tobytes()


def same_planes(whole, pieces) -> None:
    for plane, parts in zip(whole, zip(*pieces, strict=True), strict=True):
        assert raw(plane) == raw(mx.concatenate(parts, axis=2))


# -- published vectors ----------------------------------------------------------------------------


def wave(dim: int) -> mx.array:
    i = np.arange(dim)
    return mx.array((np.sin(0.7 * i + 0.3) * (1 + 0.01 * i)).astype(f32))[None, None, None]


def distortion(decoded: mx.array, x: mx.array) -> float:
    return float(((f64(decoded) - f64(x)) ** 2).sum() / (f64(x) ** 2).sum())


@pytest.mark.parametrize(
    ("dim", "first", "total", "crc"),
    [
        (64, "+---+++-++-+-+-+-++-", 6, 0x46B1EF50),
        (128, "-+--++++-----+---++-", 10, 0x753D12AA),
        (256, "+-++-+++++", -8, 0xE556F7A1),
        (512, "-+----+---", 12, 0xF34AA3DD),
    ],
)
def test_the_signs_are_the_published_ones(dim, first, total, crc):
    """A constant, times the transform of which only the first number is not zero."""
    constant = mx.zeros((dim,))
    constant[0] = dim**0.5
    used = np.array(TurboValues(3).leave(constant)).round(5)
    assert set(used.tolist()) == {-1, 1}
    assert "".join("+" if sign > 0 else "-" for sign in used[: len(first)]) == first
    assert used.sum() == total
    assert crc32((used > 0).astype(np.uint8).tobytes()) == crc
    assert np.array_equal(used, signs(dim))


@pytest.mark.parametrize(
    ("dim", "y", "scales", "first", "crc", "error"),
    [
        (
            64,
            [0.20527, -0.10438, 0.38883, 0.88984],
            [0.9697, 0.8887],
            [28, 75, 214, 180, 41, 41, 194, 8, 145, 220, 20, 127],
            0xEB91CCE0,
            0.03526,
        ),
        (
            128,
            [-1.05365, -1.03646, 0.86217, 0.92183],
            [1.172, 1.12, 1.329, 1.107],
            [82, 27, 83, 154, 104, 77, 65, 165, 213, 36, 177, 16],
            0x2323A960,
            0.03333,
        ),
    ],
)
def test_values_of_the_published_vectors(dim, y, scales, first, crc, error):
    codec, x = TurboValues(3), wave(dim)
    assert np.array(codec.enter(x))[0, 0, 0, :4] == pytest.approx(y, abs=1e-5)
    packed, stored = codec.encode(x)
    assert np.array(stored).ravel() == pytest.approx(scales, rel=4e-4)
    assert packed[0, 0, 0, :12].tolist() == first
    assert crc32(raw(packed)) == crc
    assert distortion(codec.decode((packed, stored), mx.float32), x) == pytest.approx(error, 2e-4)
    if dim == 64:
        index = bits_unpacked(np.array(packed), 3)[0, 0, 0, :16]
        assert index.tolist() == [4, 3, 4, 5, 4, 4, 5, 6, 4, 6, 6, 4, 2, 2, 2, 1]


@pytest.mark.parametrize(
    ("bits", "scales", "zeros", "first", "error"),
    [
        (8, [0.0098, 0.01224], [2, -3], [28, 85, 101, 69, 2, -68, -108, -98], 1.22e-5),
        (4, [0.166, 0.2073], [-7, -8], [9, 12, 13, 11, 7, 3, 1, 1], 0.00347),
    ],
)
def test_keys_of_the_published_vector(bits, scales, zeros, first, error):
    codec, x = TurboKeys(bits), wave(64)
    planes = codec.encode(x)
    stored = np.array(planes[0]) if bits == 8 else bits_unpacked(np.array(planes[0]), bits)
    assert stored[0, 0, 0, :8].tolist() == first
    assert np.array(planes[1]).ravel() == pytest.approx(scales, rel=5e-4)
    assert planes[2].reshape(-1).tolist() == zeros
    assert distortion(codec.decode(planes, mx.float32), x) == pytest.approx(error, rel=2e-3)


def test_the_model_packs_as_the_published_rule_of_3_bits():
    v = np.random.default_rng(0).integers(0, 8, 8)
    expected = [
        v[0] | v[1] << 3 | (v[2] & 3) << 6,
        v[2] >> 2 | v[3] << 1 | v[4] << 4 | (v[5] & 1) << 7,
        v[5] >> 1 | v[6] << 2 | v[7] << 5,
    ]
    assert bits_packed(v, 3).tolist() == expected
    for bits in (2, 3, 4, 5):
        v = np.random.default_rng(bits).integers(0, 2**bits, (3, 64))
        assert np.array_equal(bits_unpacked(bits_packed(v, bits), bits), v)


def test_the_codebook_of_3_bits_is_the_published_one():
    assert np.array_equal(codebook(3)[0], np.concatenate([-LM_3[::-1], LM_3]))


def test_the_codebook_of_2_bits_is_the_published_one():
    assert codebook(2)[0] == pytest.approx([-1.51447, -0.45823, 0.44863, 1.51215], abs=6e-6)


@pytest.mark.parametrize(
    ("bits", "crc"),
    [(2, 0x486C72C1), (3, 0xC80AB035), (4, 0xAA4521F), (5, 0x5DCC3EF), (8, 0xF6E8C1E2)],
)
def test_the_codebooks_stay_what_they_are(bits, crc):
    """Caches hold indices into them."""
    assert crc32(codebook(bits)[0].tobytes()) == crc


@pytest.mark.parametrize("bits", [2, 4, 5, 8])
def test_the_other_codebooks_are_those_of_lloyds_iteration(bits):
    """The last bits are a matter of the samples', and so of the processor's, last bits."""
    assert np.abs(codebook(bits)[0] - lloyd(bits)).max() < 1e-4


def normal_distortion(bits: int) -> float:
    """Of normally distributed numbers, by the sum over a fine grid."""
    centroids, boundaries = codebook(bits)
    x = np.linspace(-8, 8, 2_000_001)
    density = np.exp(-x * x / 2) / np.exp(-x * x / 2).sum()
    return float(((x - centroids[np.searchsorted(boundaries, x)]) ** 2 * density).sum())


@pytest.mark.parametrize(
    ("bits", "best", "excess", "near"),
    [
        (2, 0.11748185, 0.0001, 1e-4),
        (3, 0.03454776, 0.0, 1e-4),
        (4, 0.00950101, 0.0007, 1e-4),
        (5, 0.00250467, 0.0028, 1e-4),
        (8, 1.05e-4, 0.0, 0.06),
    ],
)
def test_the_codebooks_have_the_published_distortion(bits, best, excess, near):
    assert normal_distortion(bits) == pytest.approx(best * (1 + excess), rel=near)


# -- the codec is the model -----------------------------------------------------------------------

key_numbers = hnp.arrays(
    f32,
    (1, 1, 2, 64),
    elements=st.floats(-1e4, 1e4, width=32, allow_subnormal=False) | st.integers(-3, 3).map(float),
)


@given(x=key_numbers, bits=st.sampled_from(KEY_BITS))
def test_keys_of_any_numbers_are_the_models_byte_for_byte(x, bits):
    codec, expected = TurboKeys(bits), model_keys(x, bits)
    planes = codec.encode(mx.array(x))
    assert_same(planes, expected)
    decoded = np.array(codec.decode(planes, mx.float32))
    assert np.array_equal(decoded, model_keys_decoded(expected, bits))
    assert np.isfinite(decoded).all()


def vectors_of(bits):
    """Bits of a side, and all that makes vectors for them."""
    return given(
        bits=st.sampled_from(bits),
        dim=st.sampled_from(DIMS),
        kind=st.sampled_from(KINDS),
        shape=st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 4)),
        dtype=st.sampled_from(FLOATS),
        seed=st.integers(0, 999),
    )


@vectors_of(KEY_BITS)
def test_keys_are_the_models_byte_for_byte(bits, dim, kind, shape, dtype, seed):
    codec, x = TurboKeys(bits), vectors(seed, *shape, dim, kind=kind, dtype=dtype)
    expected = model_keys(np.array(x.astype(mx.float32)), bits)
    planes = codec.encode(x)
    assert_same(planes, expected)
    assert np.array_equal(codec.decode(planes, mx.float32), model_keys_decoded(expected, bits))


@given(
    bits=st.sampled_from(VALUE_BITS),
    dim=st.sampled_from([64, 256]),
    power=st.integers(-9, 9),
    seed=st.integers(0, 9999),
)
def test_values_of_whole_numbers_are_the_models_byte_for_byte(bits, dim, power, seed):
    """Where no sum is rounded, whatever its order: the roots of 64 and 256 are whole, too."""
    codec = TurboValues(bits)
    x = np.random.default_rng(seed).integers(-2, 3, (1, 2, 3, dim)) * 2.0**power
    y = ((x * signs(dim)) @ sylvester(dim) / dim**0.5).astype(f32)
    assert np.array_equal(codec.enter(mx.array(x.astype(f32))), y)
    groups = in_groups(y)
    scale = np.sqrt((groups.astype(np.float64) ** 2).mean(-1, keepdims=True).astype(f32))
    centroids, boundaries = codebook(bits)
    index = np.searchsorted(boundaries, groups / (scale + f32(1e-8)), "left").reshape(x.shape)
    packed = index.astype(np.uint8) if bits == 8 else bits_packed(index, bits)
    expected = packed, scale[..., 0].astype(np.float16)
    planes = codec.encode(mx.array(x.astype(f32)))
    assert_same(planes, expected)
    stored = (in_groups(centroids[index]) * expected[1].astype(f32)[..., None]).reshape(x.shape)
    assert np.array_equal(codec.decode_stored(planes), stored)
    exact = (stored.astype(np.float64) @ sylvester(dim)) / dim**0.5 * signs(dim)
    most = np.abs(stored).max(initial=0)
    assert np.abs(f64(codec.decode(planes, mx.float32)) - exact).max() <= 1e-6 * most * dim**0.5


@vectors_of(VALUE_BITS)
def test_values_are_the_models_but_for_ties(bits, dim, kind, shape, dtype, seed):
    """Rounded sums may tip a number that is all but on a boundary, and no other."""
    codec, x = TurboValues(bits), vectors(seed, *shape, dim, kind=kind, dtype=dtype)
    y = in_groups((f64(x) * signs(dim)) @ sylvester(dim) / dim**0.5)
    scale = np.sqrt((y * y).mean(-1, keepdims=True))
    packed, scales = numpy_planes(codec.encode(x))
    index = in_groups(packed if bits == 8 else bits_unpacked(packed, bits))
    slack = 4e-7 * np.abs(f64(x)).max() * dim**0.5 / (scale + 1e-8) + 1e-6
    boundaries, n = codebook(bits)[1], y / (scale + 1e-8)
    assert (np.searchsorted(boundaries, n - slack) <= index).all()
    assert (index <= np.searchsorted(boundaries, n + slack)).all()
    if kind == "normal":
        assert (index == np.searchsorted(boundaries, n)).mean() > 0.99
    expected = scale[..., 0]
    assert (np.abs(scales - expected) <= np.abs(expected) * 2.0**-10.99 + 2.0**-24).all()


@pytest.mark.parametrize("bits", VALUE_BITS)
def test_a_number_on_a_boundary_has_the_lower_index(bits):
    """And the next one the higher: every boundary, through the codec's own comparison."""
    from kvfun.codecs._turbo import _index

    centroids, boundaries = codebook(bits)
    above = np.nextafter(boundaries, f32(9))
    for x, expected in ((boundaries, range(len(boundaries))), (above, range(1, len(above) + 1))):
        padded = np.resize(x, (1, 32 * -(-len(x) // 32)))
        found = np.array(_index(mx.array(padded), bits))
        assert found.dtype == np.uint8
        assert found[0, : len(x)].tolist() == [*expected]
    x = np.random.default_rng(bits).uniform(-5.8, 5.8, (64, 32)).astype(f32)
    assert np.array_equal(_index(mx.array(x), bits), np.searchsorted(boundaries, x))
    assert np.array_equal(_index(mx.array(centroids[None]), bits)[0], np.arange(2**bits))


@pytest.mark.parametrize("bits", VALUE_BITS)
def test_every_index_at_every_place_is_decoded(bits):
    rng = np.random.default_rng(bits)
    index = np.concatenate([rng.permutation(2**bits) for _ in range(-(-4096 // 2**bits))])
    index = index[:4096].reshape(1, 2, -1, 64)
    packed = index.astype(np.uint8) if bits == 8 else bits_packed(index, bits)
    scales = rng.uniform(0.5, 2, (*index.shape[:3], 2)).astype(np.float16)
    out = TurboValues(bits).decode_stored((mx.array(packed), mx.array(scales)))
    expected = codebook(bits)[0][in_groups(index)] * scales.astype(f32)[..., None]
    assert out.dtype == mx.float32
    assert np.array_equal(out, expected.reshape(index.shape))


# -- groups that are constant, zero, or out of range ----------------------------------------------


@pytest.mark.parametrize("codec", KEYS, ids=lambda codec: codec.spec)
def test_a_constant_group_is_stored_as_the_constant(codec):
    """The format's own formulas make NaN of it."""
    for number in (1.0, -3.0, 0.1, 1e-3, 1e-4, -65504.0, 1e-7):
        x = vectors(0, 1, 1, 2, 64)
        x[..., 32:] = number
        stored, scales, zeros = codec.encode(x)
        wanted = np.float16(number)
        assert (np.array(scales)[..., 1] == wanted).all()
        assert (np.array(zeros)[..., 1] == 1).all()
        assert not stored[..., stored.shape[-1] // 2 :].any()
        out = codec.decode((stored, scales, zeros), mx.float32)
        assert (f64(out)[..., 32:] == float(wanted)).all()
        assert distortion(out[..., :32], x[..., :32]) < 0.3


@pytest.mark.parametrize("codec", SIDES, ids=lambda codec: codec.spec)
def test_zeros_come_back(codec):
    for zero in (0.0, -0.0):
        planes = codec.encode(mx.full((1, 1, 2, 64), zero))
        assert not planes[1].any()
        assert not codec.decode(planes).any()
        if isinstance(codec, TurboKeys):
            assert not planes[0].any()
            assert not planes[2].any()


@pytest.mark.parametrize("codec", KEYS, ids=lambda codec: codec.spec)
@pytest.mark.parametrize(
    ("middle", "spread"), [(100, 3e-3), (50, 1e-3), (-1000, 0.03), (0.5, 3e-5)]
)
def test_a_group_whose_zero_is_beyond_float16_is_stored_as_its_middle(codec, middle, spread):
    """The format's own formulas make an infinity of it."""
    x = middle + spread * np.linspace(-0.5, 0.5, 64).astype(f32)[None, None, None]
    out = f64(codec.decode(codec.encode(mx.array(x)), mx.float32))
    assert (np.abs(out - middle) <= spread + abs(middle) * 2.0**-10).all()


@pytest.mark.parametrize("codec", KEYS, ids=lambda codec: codec.spec)
def test_a_zero_that_float16_holds_is_kept(codec):
    """Up to 65519: it is rounded down to 65504."""
    low = f32(1)
    steps = 254 if codec.bits == 8 else 2**codec.bits - 1
    seen = set()
    for zero in range(65400, 65640):
        high = low + low * steps / zero
        x = np.tile(np.linspace(low, high, 32, dtype=f32), 2)[None, None, None]
        expected = model_keys(x, codec.bits)
        assert_same(codec.encode(mx.array(x)), expected)
        seen |= {*expected[2].ravel().tolist()}
    assert {1.0, 65504.0} <= seen


@pytest.mark.parametrize("codec", SIDES, ids=lambda codec: codec.spec)
def test_finite_numbers_stay_finite(codec):
    for number in (65504.0, 1e5, 1e8, 1e12, 1e16):
        mixed = mx.array(np.resize([number, -number, number / 3, 0, 1], 64).astype(f32))
        for x in (mixed, mx.abs(mixed), mx.full((64,), number)):
            planes = codec.encode(x[None, None, None])
            for plane in planes[1:]:
                assert np.isfinite(plane).all()
            assert np.isfinite(codec.decode(planes, mx.float32)).all()


@pytest.mark.parametrize("codec", SIDES, ids=lambda codec: codec.spec)
@pytest.mark.parametrize("bad", [[np.nan], [np.inf], [-np.inf], [np.inf, -np.inf], [np.nan] * 64])
def test_what_is_not_finite_harms_no_other_token(codec, bad):
    x = np.array(vectors(0, 2, 2, 3, 128))
    good = codec.encode(mx.array(x))
    x[0, 1, 1, : len(bad)] = bad
    planes = codec.encode(mx.array(x))
    token = np.zeros((2, 2, 3), bool)
    token[0, 1, 1] = True
    for plane, other in zip(planes, good, strict=True):
        assert np.array_equal(np.array(plane)[~token], np.array(other)[~token])
    out, whole = (f64(codec.decode(p, mx.float32)) for p in (planes, good))
    assert np.array_equal(out[~token], whole[~token])
    harmed = out[token]
    if isinstance(codec, TurboKeys):  # and no other group
        groups = -(-len(bad) // 32)
        assert not np.isfinite(harmed[:, : 32 * groups]).any()
        assert np.array_equal(harmed[:, 32 * groups :], whole[token][:, 32 * groups :])
    else:
        assert not np.isfinite(harmed).all()


# -- any cut --------------------------------------------------------------------------------------

EVERY = [pytest.param(*p, id=f"{p[0].spec}-{p[1]}") for p in product(SIDES, DIMS)]


@pytest.mark.parametrize(("codec", "dim"), EVERY)
def test_many_tokens_at_once_are_one_by_one_byte_for_byte(codec, dim):
    for dtype, kind in product(FLOATS, KINDS):
        x = vectors(dim, 2, 2, 4, dim, kind=kind, dtype=dtype)
        whole = codec.encode(x)
        same_planes(whole, [codec.encode(x[:, :, i : i + 1]) for i in range(4)])
        for row, head in product(range(2), range(2)):
            alone = codec.encode(x[row : row + 1, head : head + 1])
            for plane, other in zip(whole, alone, strict=True):
                assert raw(plane[row, head]) == raw(other[0, 0])


@given(
    spec=st.sampled_from(["turbo-k8v3", "turbo-k4v2", "turbo-k5v5", "turbo-k2v8", "turbo-k8v4"]),
    shape=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 9)),
    dims=st.tuples(st.sampled_from(DIMS), st.sampled_from(DIMS)),
    kind=st.sampled_from(KINDS),
    dtype=st.sampled_from(FLOATS),
    cuts=st.lists(st.integers(0, 9), max_size=3),
    seed=st.integers(0, 99),
)
def test_any_cut_is_byte_exact(spec, shape, dims, kind, dtype, cuts, seed):
    codec = parse(spec)
    edges = [0, *sorted(min(cut, shape[2]) for cut in cuts), shape[2]]
    spans = [(a, b) for a, b in pairwise(edges) if a < b]
    for side, dim in zip((codec.keys, codec.values), dims, strict=True):
        x = vectors(seed, *shape, dim, kind=kind, dtype=dtype)
        whole = side.encode(x)
        same_planes(whole, [side.encode(x[:, :, a:b]) for a, b in spans])
        decoded = side.decode(whole)
        for a, b in spans:
            piece = side.decode(tuple(plane[:, :, a:b] for plane in whole))
            assert raw(piece) == raw(decoded[:, :, a:b])


@pytest.mark.parametrize("codec", SIDES, ids=lambda codec: codec.spec)
def test_the_order_in_memory_does_not_matter(codec):
    x = vectors(0, 2, 5, 4, 128)
    for y in (x.swapaxes(1, 2), x[:, ::2, 1:, 126:62:-1], mx.repeat(x, 32, axis=2).swapaxes(2, 3)):
        if y.shape[-1] not in DIMS:
            continue
        planes = codec.encode(mx.contiguous(y))
        for a, b in zip(codec.encode(y), planes, strict=True):
            assert raw(a) == raw(b)
        turned = [mx.contiguous(p.swapaxes(1, 3)).swapaxes(1, 3) for p in planes]
        assert raw(codec.decode(tuple(turned))) == raw(codec.decode(planes))


@pytest.mark.parametrize(("codec", "dim"), EVERY)
def test_no_tokens(codec, dim):
    planes = planes_of_no_tokens(codec, dim)
    for dtype in FLOATS:
        assert codec.decode(planes, dtype).shape == (2, 3, 0, dim)


def test_positions_do_not_matter():
    x = vectors(0, 1, 2, 3, 64)
    for codec in SIDES:
        for a, b in zip(codec.encode(x), codec.encode(x, ((3, 0, 0),)), strict=True):
            assert raw(a) == raw(b)


# -- dtypes and bytes -----------------------------------------------------------------------------


@pytest.mark.parametrize("codec", SIDES, ids=lambda codec: codec.spec)
def test_equal_numbers_have_equal_planes_whatever_their_dtype(codec):
    for exponent, dtype in product((-20, 0, 9), (mx.bfloat16, mx.float16)):
        x = (vectors(0, 1, 2, 50, 64, kind="tails") / 1e4 * 2.0**exponent).astype(dtype)
        for a, b in zip(codec.encode(x), codec.encode(x.astype(mx.float32)), strict=True):
            assert raw(a) == raw(b)


@pytest.mark.parametrize("codec", SIDES, ids=lambda codec: codec.spec)
def test_decoded_numbers_are_rounded_once(codec):
    planes = codec.encode(vectors(0, 1, 2, 50, 64, dtype=mx.float16))
    exact = codec.decode(planes, mx.float32)
    for dtype in FLOATS:
        out = codec.decode(planes, dtype)
        assert out.dtype == dtype
        assert raw(out) == raw(exact.astype(dtype))
    assert raw(codec.decode(planes)) == raw(exact.astype(mx.bfloat16))


@pytest.mark.parametrize(("codec", "dim"), EVERY)
def test_the_stated_bytes_are_the_bytes_of_a_column(codec, dim):
    keys = isinstance(codec, TurboKeys)
    for dtype, tokens in product(FLOATS, (1, 3)):
        planes = codec.encode(vectors(0, 2, 3, tokens, dim, dtype=dtype))
        numbers = mx.int8 if keys and codec.bits == 8 else mx.uint8
        assert [plane.dtype for plane in planes] == [numbers] + [mx.float16] * (2 if keys else 1)
        assert planes[0].shape == (2, 3, tokens, dim * codec.bits // 8)
        assert all(plane.shape == (2, 3, tokens, dim // 32) for plane in planes[1:])
        measured = sum(plane.nbytes for plane in planes)
        assert codec.vector_nbytes(dim, dtype) * 2 * 3 * tokens == measured
        assert codec.vector_nbytes(dim, dtype) == dim * codec.bits // 8 + dim // 32 * (
            4 if keys else 2
        )
    assert codec.width(dim) == dim
    codec.check(dim)


@pytest.mark.parametrize(
    ("spec", "bits"),
    [
        ("turbo-k8v8", 8.75),
        ("turbo-k8v4", 6.75),
        ("turbo-k8v3", 6.25),
        ("turbo-k8v2", 5.75),
        ("turbo-k4v3", 4.25),
        ("turbo-k4v2", 3.75),
        ("bf16+turbo-v3", 9.75),
    ],
)
def test_bits_an_element(spec, bits):
    assert Codec.of(spec).bits_per_element(128) == bits
    assert Codec.of(spec).token_nbytes(8, 128, 128) == bits * 2 * 8 * 128 / 8


def test_a_token_of_a_head_of_128_takes_200_bytes():
    assert parse("turbo-k8v3").token_nbytes(1, 128, 128) == 200


# -- rotation -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", DIMS)
def test_the_rotation_is_orthogonal_and_the_published_one(dim):
    codec, eye = TurboValues(3), mx.eye(dim)
    rotation = f64(codec.enter(eye))  # row i: the rotated i-th unit vector
    assert np.abs(rotation @ rotation.T - np.eye(dim)).max() < 1e-6
    assert np.abs(rotation - signs(dim)[:, None] * sylvester(dim) / dim**0.5).max() < 1e-7
    assert np.abs(f64(codec.leave(eye)) - rotation.T).max() < 1e-7
    x = vectors(0, 2, 3, 4, dim)
    assert np.abs(f64(codec.leave(codec.enter(x)) - x)).max() < 1e-5
    for function in (codec.enter, codec.leave):
        short = x.astype(mx.bfloat16)
        assert function(short).dtype == mx.float32
        assert raw(function(short)) == raw(function(short.astype(mx.float32)))


@pytest.mark.parametrize(
    ("codec", "dim"), [p for p in EVERY if isinstance(p.values[0], TurboValues)]
)
def test_decoded_is_what_is_stored_rotated_back(codec, dim):
    planes = codec.encode(vectors(0, 2, 3, 4, dim, kind="tails"))
    stored = codec.decode_stored(planes)
    assert stored.shape == (2, 3, 4, dim)
    assert raw(codec.decode(planes, mx.float32)) == raw(codec.leave(stored))


@pytest.mark.parametrize("codec", VALUES, ids=lambda codec: codec.spec)
def test_a_mixture_may_be_rotated_back_instead(codec):
    planes = codec.encode(vectors(0, 1, 2, 50, 128))
    weights = mx.softmax(vectors(1, 1, 2, 3, 50), axis=-1)
    late = codec.leave(weights @ codec.decode_stored(planes))
    early = weights @ codec.decode(planes, mx.float32)
    assert np.abs(f64(late - early)).max() < 1e-6


@pytest.mark.parametrize("codec", KEYS, ids=lambda codec: codec.spec)
def test_keys_are_planes_of_mlx_too(codec):
    for seed, (kind, dim) in enumerate(product((*KINDS, "far"), (64, 128))):
        x = vectors(seed, 2, 3, 40, dim, kind="normal" if kind == "far" else kind)
        if kind == "far":
            x = x * 0.05 + 400
        planes = tuple(plane[:, :, 3:36] for plane in codec.encode(x))
        decoded, affine = codec.decode(planes, mx.float32), codec.affine(planes)
        assert [plane.dtype for plane in affine] == [mx.uint32, mx.float32, mx.float32]
        assert mx.array_equal(mx.dequantize(*affine, **codec.quantization), decoded)
    queries = vectors(1, 2, 3, 2, dim)
    out = mx.quantized_matmul(queries, *affine, transpose=True, **codec.quantization)
    exact = f64(queries) @ f64(decoded).swapaxes(-1, -2)
    assert np.abs(f64(out) - exact).max() < 1e-6 * np.abs(exact).max() * dim


# -- how near -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("codec", "published"),
    [
        (TurboKeys(2), 0.166),
        (TurboKeys(4), 0.00653),
        (TurboKeys(5), 0.00153),
        (TurboKeys(8), 2.3e-5),
        (TurboValues(2), 0.1117),
        (TurboValues(3), 0.0325),
        (TurboValues(4), 0.00893),
        (TurboValues(5), 0.00238),
        (TurboValues(8), 1.0e-4),
    ],
    ids=lambda x: getattr(x, "spec", None),
)
def test_the_error_is_the_published_one(codec, published):
    """Of normal numbers; 5 and 8 bits of values by the tables' distortion."""
    x = vectors(7, 1, 1, 4000, 128)
    assert distortion(codec.decode(codec.encode(x), mx.float32), x) == pytest.approx(
        published, 0.03
    )


@pytest.mark.parametrize(
    ("bits", "one", "four"), [(2, 0.1029, 0.0963), (3, 0.0307, 0.0302), (4, 0.0085, 0.00842)]
)
def test_channels_that_stand_out_cost_values_nothing(bits, one, four):
    for count, published in ((1, one), (4, four)):
        x = vectors(8, 1, 1, 4000, 128)
        x[..., 5 : 5 + 17 * count : 17] *= 10
        codec = TurboValues(bits)
        error = distortion(codec.decode(codec.encode(x), mx.float32), x)
        assert error == pytest.approx(published, rel=0.05)


@pytest.mark.parametrize(
    ("bits", "part", "short"),
    [(2, 1 / 3, 0.106), (3, 0.18, 0.027), (4, 0.095, 0.007), (5, 0.049, 0.002), (8, 0.01, 0)],
)
def test_the_stated_errors_of_values(bits, part, short):
    codec, x = TurboValues(bits), vectors(9, 1, 1, 4000, 128)
    out = codec.decode(codec.encode(x), mx.float32)
    assert distortion(out, x) ** 0.5 == pytest.approx(part, rel=0.03)
    along = (f64(out) * f64(x)).sum() / (f64(x) ** 2).sum()
    assert 1 - along == pytest.approx(short, abs=1.5e-3)


def test_affine_values_of_8_bits_take_as_much_and_err_less():
    x = vectors(10, 1, 1, 4000, 128, dtype=mx.bfloat16)
    turbo, affine = TurboValues(8), Affine(8)
    assert turbo.vector_nbytes(128, x.dtype) == affine.vector_nbytes(128, x.dtype)
    exact = distortion(turbo.decode(turbo.encode(x), mx.float32), x)
    packed, scales, biases = affine.encode(x)
    wide = packed, scales.astype(mx.float32), biases.astype(mx.float32)
    assert distortion(affine.decode(wide), x) < 0.6 * exact


# -- specs and what cannot be ---------------------------------------------------------------------


@pytest.mark.parametrize(("keys", "values"), product(KEYS, VALUES))
def test_the_spec_of_a_pair_names_it(keys, values):
    codec = Codec(keys, values)
    assert codec.spec == f"turbo-k{keys.bits}v{values.bits}"
    for spec in (codec.spec, f"turbo-k{keys.bits}+turbo-v{values.bits}"):
        again = parse(spec)
        assert isinstance(again.keys, TurboKeys)
        assert isinstance(again.values, TurboValues)
        assert (again.keys.bits, again.values.bits) == (keys.bits, values.bits)
        assert again.spec == codec.spec


@pytest.mark.parametrize("other", ["plain", "bf16", "kv4", "kv4-g32-pad", "mxfp8", "nvfp4-pad"])
def test_the_spec_of_one_side_names_it(other):
    for codec in KEYS:
        spec = f"{codec.spec}+{other}"
        assert codec.spec == f"turbo-k{codec.bits}"
        assert parse(spec).spec == spec
        assert isinstance(parse(spec).keys, TurboKeys)
        assert parse(spec).keys.bits == codec.bits
        assert parse(spec).values.spec == other
    for codec in VALUES:
        spec = f"{other}+{codec.spec}"
        assert codec.spec == f"turbo-v{codec.bits}"
        assert parse(spec).spec == spec
        assert isinstance(parse(spec).values, TurboValues)
        assert parse(spec).values.bits == codec.bits
        assert parse(spec).keys.spec == other


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("turbo-k8", "'turbo-k8' is for keys only; turbo-k<bits>v<bits> names both"),
        ("turbo-v3", "'turbo-v3' is for values only"),
        ("turbo-v3+kv4", "'turbo-v3' is for values only"),
        ("turbo-v3+turbo-k8", "'turbo-v3' is for values only"),
        ("bf16+turbo-k8", "'turbo-k8' is for keys only"),
        ("turbo-k8+turbo-k8", "'turbo-k8' is for keys only"),
        ("turbo-v3+turbo-v3", "'turbo-v3' is for values only"),
        ("turbo-k8v3+kv4", "'turbo-k8v3' already names two codecs"),
        ("kv4+turbo-k8v3", "'turbo-k8v3' already names two codecs"),
        ("turbo-k3v3", r"bits of turbo keys must be one of \(2, 4, 5, 8\), not 3"),
        ("turbo-k6v3", "not 6"),
        ("turbo-k16v3", "not 16"),
        ("turbo-k8v6", r"bits of turbo values must be one of \(2, 3, 4, 5, 8\), not 6"),
        ("turbo-k3+kv4", "not 3"),
        ("bf16+turbo-v7", "not 7"),
        ("turbo-k8+kv7", "kv7"),
        *[(spec, "unknown codec spec") for spec in ("turbo", "turbo-", "turbo-kv4", "turbo-8")],
        *[
            (spec, "unknown codec spec")
            for spec in ("turbo-v3k8", "turbo-k8v", "turbo-kv", "turbok8v3")
        ],
        *[(spec, "unknown codec spec") for spec in ("turbo-k8v3-g32", "turbo-k08v3", "TURBO-k8v3")],
        *[(spec, "unknown codec spec") for spec in ("turbo-k8v3 ", "turbo-k٤v3", "turbo-k8-pad")],
    ],
)
def test_a_bad_spec_is_an_error_that_says_what_is_wrong(spec, message):
    with pytest.raises(SpecError, match=message) as error:
        parse(spec)
    assert repr(spec) in str(error.value)


@pytest.mark.parametrize("bits", [0, 1, 3, 6, 7, 16, -2, True, 4.0, "4", None, (4,)])
def test_keys_of_other_bits_cannot_be_made(bits):
    with pytest.raises(CodecError, match=r"turbo keys must be one of \(2, 4, 5, 8\), not"):
        TurboKeys(bits)


@pytest.mark.parametrize("bits", [0, 1, 6, 7, 16, -2, True, 4.0, "4", None, (4,)])
def test_values_of_other_bits_cannot_be_made(bits):
    with pytest.raises(CodecError, match=r"turbo values must be one of \(2, 3, 4, 5, 8\), not"):
        TurboValues(bits)


@pytest.mark.parametrize("dim", [0, 1, 16, 32, 63, 80, 96, 192, 288, 320, 576, 1024])
def test_another_head_dim_is_an_error_that_says_which_there_are(dim):
    """MLX would write past its buffers at 288 and 576."""
    for codec in SIDES:
        with pytest.raises(CodecError) as error:
            codec.check(dim)
        assert str(error.value) == (
            f"{codec.spec}: head_dim must be one of (64, 128, 256, 512), not {dim}"
        )
    if dim:
        block, fine = mx.zeros((1, 1, 1, dim)), mx.zeros((1, 1, 1, 64))
        for spec in ("turbo-k8v3", "bf16+turbo-v3"):
            with pytest.raises(CodecError, match="head_dim must be one of"):
                kvfun.append(kvfun.empty(spec), fine, block)
        for spec in ("turbo-k8v3", "turbo-k8+bf16"):
            with pytest.raises(CodecError, match="head_dim must be one of"):
                kvfun.append(kvfun.empty(spec), block, fine)


def test_they_are_vector_codecs():
    for codec in SIDES:
        assert isinstance(codec, VectorCodec)
    assert repr(TurboKeys(8)) == "TurboKeys(bits=8)"


# -- in a cache -----------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["turbo-k8v3", "turbo-k5v5", "bf16+turbo-v2", "turbo-k4+kv4"])
def test_a_cache_holds_what_the_codecs_make(spec):
    codec, cache = Codec.of(spec), kvfun.empty(spec)
    keys, values = vectors(0, 2, 3, 9, 128), vectors(1, 2, 3, 9, 64)
    keys, values = keys.astype(mx.bfloat16), values.astype(mx.bfloat16)
    for a, b in pairwise((0, 1, 4, 9)):
        cache = kvfun.append(cache, keys[:, :, a:b], values[:, :, a:b])
    for out, side, x in zip(
        kvfun.fetch(cache), (codec.keys, codec.values), (keys, values), strict=True
    ):
        assert raw(out) == raw(side.decode(side.encode(x)).astype(x.dtype))
