"""mxfp8, mxfp4 and nvfp4: the formats by their specification, and what MLX makes of numbers."""

from itertools import cycle, pairwise, product

import hypothesis.strategies as st
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given

import kvfun
from kvfun.codecs import MODES, Affine, Codec, Microscaled, parse
from kvfun.errors import CodecError
from kvfun.kernels import _scores
from kvfun.kernels._scores import decode, mix, scores
from tests.kernels import dense

from .shared import planes_of_no_tokens
from .test_affine import FLOATS, KINDS, f64, raw, vectors

# -- the formats, from the specification ----------------------------------------------------------


def small_floats(exponent_bits: int, fraction_bits: int, bias: int) -> np.ndarray:
    """The numbers of all codes of a format with a sign bit, denormals and no infinities."""
    codes = np.arange(1 << (1 + exponent_bits + fraction_bits))
    fraction = codes % (1 << fraction_bits) / (1 << fraction_bits)
    exponent = codes >> fraction_bits & (1 << exponent_bits) - 1
    size = np.where(exponent == 0, 2 * fraction, 1 + fraction) * 2.0 ** (exponent - bias)
    return np.where(codes >> (exponent_bits + fraction_bits), -size, size)


E2M1 = small_floats(2, 1, bias=1)
E4M3 = small_floats(4, 3, bias=7)
E4M3[[0x7F, 0xFF]] = np.nan
E8M0 = 2.0 ** (np.arange(256) - 127.0)
E8M0[255] = np.nan

NUMBERS = {"mxfp8": E4M3, "mxfp4": E2M1, "nvfp4": E2M1}
SCALES = {"mxfp8": E8M0, "mxfp4": E8M0, "nvfp4": E4M3}
GROUP = {"mxfp8": 32, "mxfp4": 32, "nvfp4": 16}
MOST = {"mxfp8": 448, "mxfp4": 6, "nvfp4": 6}
VALID = {"mxfp8": range(18, 248), "mxfp4": range(24, 253), "nvfp4": range(127)}
"""The scales that encoding makes."""


def test_the_tables_are_those_of_the_specification():
    assert E2M1.tolist()[:8] == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert (E4M3[0x01], E4M3[0x08], E4M3[0x38], E4M3[0x7E]) == (2.0**-9, 2.0**-6, 1, 448)
    assert (E8M0[0], E8M0[127], E8M0[254]) == (2.0**-127, 1, 2.0**127)
    for table in (E2M1, E4M3):
        assert np.array_equal(table[len(table) // 2 :], -table[: len(table) // 2], equal_nan=True)


def codes(mode: str, planes) -> tuple[np.ndarray, np.ndarray]:
    """The code of each number and of its group's scale, by the layout that MLX documents."""
    bits = Microscaled(mode).bits
    words = np.array(planes[0])[..., None] >> np.arange(0, 32, bits, dtype=np.uint32)
    numbers = (words & (1 << bits) - 1).reshape(*planes[0].shape[:-1], -1)
    return numbers, np.repeat(np.array(planes[1]), GROUP[mode], axis=-1)


def packed(mode: str, numbers: np.ndarray) -> mx.array:
    bits = Microscaled(mode).bits
    words = numbers.astype(np.uint64).reshape(*numbers.shape[:-1], -1, 32 // bits)
    shifted = words << np.arange(0, 32, bits, dtype=np.uint64)
    return mx.array(shifted.sum(-1).astype(np.uint32))


def meant(mode: str, planes) -> np.ndarray:
    """What the planes stand for, in float64."""
    numbers, scales = codes(mode, planes)
    return NUMBERS[mode][numbers] * SCALES[mode][scales]


def every_pair(mode: str):
    """Planes ``[1, 1, scales, ...]`` of every number under every scale that encoding makes."""
    count = max(GROUP[mode], len(NUMBERS[mode]))
    numbers = np.tile(np.arange(count) % len(NUMBERS[mode]), (len(VALID[mode]), 1))
    scales = np.array(VALID[mode], np.uint8)[:, None].repeat(count // GROUP[mode], 1)
    return packed(mode, numbers[None, None]), mx.array(scales[None, None])


@pytest.mark.parametrize("mode", MODES)
def test_every_number_under_every_scale_is_decoded_exactly(mode):
    """In bfloat16, so in float32 too; float16 holds them down to its denormals."""
    codec, planes = Microscaled(mode), every_pair(mode)
    wanted = meant(mode, planes)
    used = np.abs(wanted) <= codec.largest(mx.float32)  # nor is NaN
    assert used.mean() > 0.9
    assert np.abs(wanted[used & (wanted != 0)]).min() >= 2.0**-126  # no denormals anywhere
    for dtype in (mx.bfloat16, mx.float32):
        out = codec.decode(planes, dtype)
        assert out.dtype == dtype
        assert np.array_equal(f64(out)[used], wanted[used])
        assert raw(decode(codec, planes, dtype)) == raw(out)
    assert codec.decode(planes).dtype == mx.bfloat16
    fits = used & (np.abs(wanted) < 65504)
    rounded = wanted[fits].astype(np.float16)
    for out in (codec.decode(planes, mx.float16), decode(codec, planes, mx.float16)):
        assert out.dtype == mx.float16
        assert np.array_equal(np.array(out)[fits], rounded)
    normal = fits & (np.abs(wanted) >= 2.0**-14)
    assert np.array_equal(f64(out)[normal], wanted[normal])


# -- encoding -------------------------------------------------------------------------------------


def nearest(levels: np.ndarray, x: np.ndarray) -> np.ndarray:
    """The distance to the nearest of the levels, which are sorted here."""
    levels = np.unique(levels[np.isfinite(levels)])
    right = np.clip(np.searchsorted(levels, x), 1, len(levels) - 1)
    return np.minimum(np.abs(x - levels[right - 1]), np.abs(x - levels[right]))


def check_nearest(mode: str, x: mx.array) -> None:
    """Each number is the nearest under its scale, and the scale the one that suits the largest."""
    codec = Microscaled(mode)
    planes = codec.encode(x)
    wanted, got = f64(x), meant(mode, planes)
    _, scale_codes = codes(mode, planes)
    assert {*scale_codes.ravel().tolist()} <= {*VALID[mode]}
    scales = SCALES[mode][scale_codes]
    groups = np.abs(wanted).reshape(*x.shape[:-1], -1, GROUP[mode])
    largest = np.repeat(groups.max(-1), GROUP[mode], axis=-1)
    if mode == "nvfp4":
        asked = np.minimum(largest / 6, 448)
        assert (np.abs(scales - asked) <= nearest(E4M3, asked) * (1 + 1e-6)).all()
    else:  # up to a power of two; older MLX (0.32.2) rounded to the nearest
        ratio = largest / MOST[mode] / scales
        assert ((largest < 2.0**-100) | (ratio > 0.5 - 1e-6) & (ratio < 2**0.5 + 1e-6)).all()
    with np.errstate(divide="ignore", invalid="ignore"):
        inside = np.where(scales > 0, wanted / scales, 0)
    best = np.where(scales > 0, nearest(NUMBERS[mode], inside) * scales, np.abs(wanted))
    # the quotient is rounded where the scale is no power of two
    assert (np.abs(got - wanted) <= best + 1e-6 * np.abs(wanted) + 2.0**-100).all()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("dim", [32, 64, 96, 128, 256])
@pytest.mark.parametrize("mode", MODES)
def test_numbers_are_stored_as_the_nearest_of_their_group(mode, dim, dtype):
    for seed, kind in enumerate(KINDS):
        check_nearest(mode, vectors(seed, 1, 2, 5, dim, kind=kind, dtype=dtype))


def worst(mode: str, x: np.ndarray) -> np.ndarray:
    """The largest error that the format's fraction allows, where no number is clipped."""
    size, group = np.abs(x), np.abs(x).reshape(*x.shape[:-1], -1, GROUP[mode])
    largest = np.repeat(group.max(-1), GROUP[mode], axis=-1)
    if mode == "mxfp8":  # half a step of 2^-3; denormals end at 2^-9 of a scale
        return np.maximum(size / 16, largest / 224 * 2.0**-10)
    if mode == "mxfp4":  # 4 to 6 is the widest step, and a scale may be twice what it needs to be
        return np.maximum(size / 4, largest / 3 * 0.25)
    # a scale is off by 1/16 at most, or by half its smallest
    return np.maximum(np.maximum(size / 4, largest / 6 * 17 / 16 * 0.25), 6 * 2.0**-10)


@given(
    mode=st.sampled_from(MODES),
    exponent=st.integers(-12, 11),
    seed=st.integers(0, 999),
    kind=st.sampled_from(["normal", "tails", "one outlier", "constant"]),
    dtype=st.sampled_from(FLOATS),
)
def test_the_error_of_a_number_is_bounded(mode, exponent, seed, kind, dtype):
    x = vectors(seed, 1, 1, 2, 64, kind=kind)
    x = (x / mx.abs(x).max() * 2.0**exponent).astype(dtype)
    codec = Microscaled(mode)
    check_nearest(mode, x)
    planes, wanted = codec.encode(x), f64(x)
    error = np.abs(f64(codec.decode(planes)) - wanted)
    # by older MLX (0.32.2), which rounds half of the scales down, and by scales that end at 448
    clipped = np.abs(wanted) - MOST[mode] * SCALES[mode][codes(mode, planes)[1]]
    assert (error <= np.maximum(worst(mode, wanted), clipped) * (1 + 1e-5)).all()


@pytest.mark.parametrize("mode", ["mxfp8", "mxfp4"])
def test_what_was_decoded_is_encoded_as_the_same_numbers(mode):
    codec = Microscaled(mode)
    for seed, kind in enumerate(KINDS):
        once = codec.decode(codec.encode(vectors(seed, 1, 2, 5, 64, kind=kind)))
        assert mx.array_equal(codec.decode(codec.encode(once)), once)


@pytest.mark.parametrize("mode", MODES)
def test_equal_numbers_have_equal_planes_whatever_their_dtype(mode):
    """Also where a scale in 16 bits would be rounded, or zero."""
    codec = Microscaled(mode)
    for exponent, dtype in product((-20, -12, 0, 9), (mx.bfloat16, mx.float16)):
        x = (vectors(0, 1, 2, 50, 64, kind="tails") / 1e4 * 2.0**exponent).astype(dtype)
        for a, b in zip(codec.encode(x), codec.encode(x.astype(mx.float32)), strict=True):
            assert raw(a) == raw(b)


@pytest.mark.parametrize("mode", MODES)
def test_the_order_in_memory_does_not_matter(mode):
    x = vectors(0, 2, 5, 3, 64)
    for y in (x.swapaxes(1, 2), x[:, ::2, 1:, 64:0:-2], mx.repeat(x, 32, axis=2).swapaxes(2, 3)):
        for a, b in zip(*map(Microscaled(mode).encode, (y, mx.contiguous(y))), strict=True):
            assert raw(a) == raw(b)


# -- extremes -------------------------------------------------------------------------------------

EXTREMES = [
    0.0,
    1e-45,
    1e-40,
    1.1e-38,
    1e-36,
    1e-30,
    3e-30,
    6e-8,
    6e-5,
    0.005,
    0.0058,
    0.0059,
    0.01,
]
EXTREMES += [447.9, 448.1, 2687.0, 2689.0, 49152.0, 61440.0, 65504.0, 1e6, 1e12, 1e30, 3e38, 3.4e38]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("number", EXTREMES)
def test_a_finite_number_is_fetched_as_a_finite_number_near_it(mode, number, dtype):
    """MLX alone makes inf of 65504 in float16, 1e37 of 1e-40, and 0 of 1e12 in nvfp4."""
    x = mx.array([number, -number, number / 2, 0.0] * 8).astype(dtype)[None, None, None]
    wanted = f64(x)
    if not np.isfinite(wanted).all():
        pytest.skip("not a number of this dtype")
    cache = kvfun.append(kvfun.empty(mode), x, x)
    most = Microscaled(mode).largest(dtype)
    held = np.where(np.abs(wanted) < 2.0**-100, 0, np.clip(wanted, -most, most))
    bound = np.maximum(worst(mode, held), 0.3 * np.abs(held))
    for out in kvfun.fetch(cache):
        assert out.dtype == dtype
        assert (np.abs(f64(out) - held) <= bound + (2.0**-24 if dtype == mx.float16 else 0)).all()
        assert np.abs(f64(out)).max() <= most


@pytest.mark.parametrize("mode", MODES)
def test_the_largest_number_is_one_of_the_format_and_of_the_dtype(mode):
    codec = Microscaled(mode)
    for dtype in FLOATS:
        most = codec.largest(dtype)
        assert f64(mx.array(most).astype(dtype)) == most
        for sign in (1, -1):
            x = mx.full((1, 1, 1, 32), sign * most).astype(dtype)
            assert (f64(codec.decode(codec.encode(x))) == sign * most).all()


def test_zeros_and_their_signs():
    for mode, dtype in product(MODES, FLOATS):
        codec = Microscaled(mode)
        for zero in (0.0, -0.0):
            planes = codec.encode(mx.full((1, 1, 2, 64), zero).astype(dtype))
            assert not planes[0].any()
            assert raw(codec.decode(planes)) == bytes(2 * 64 * 2)


# -- any cut --------------------------------------------------------------------------------------

DIMS = (32, 64, 96, 128, 160, 192, 256)
EVERY = [pytest.param(Microscaled(mode), dim, id=f"{mode}-{dim}") for mode in MODES for dim in DIMS]
EVERY += [pytest.param(Microscaled("nvfp4"), dim, id=f"nvfp4-{dim}") for dim in (16, 48, 80, 112)]
ODD = [
    pytest.param(Microscaled(mode, pad=True), dim, id=f"{mode}-{dim}")
    for mode in MODES
    for dim in (1, 20, 40, 72, 80, 100)
    if dim % GROUP[mode]
]


def same_planes(whole, pieces) -> None:
    for plane, parts in zip(whole, zip(*pieces, strict=True), strict=True):
        assert raw(plane) == raw(mx.concatenate(parts, axis=2))


@pytest.mark.parametrize(("codec", "dim"), EVERY + ODD)
def test_many_tokens_at_once_are_one_by_one_byte_for_byte(codec, dim):
    for dtype, heads, tokens in product(FLOATS, (1, 2), (1, 4, 5)):
        x = vectors(dim, 1, heads, tokens, dim, kind="tails", dtype=dtype)
        single = [codec.encode(x[:, :, i : i + 1]) for i in range(tokens)]
        same_planes(codec.encode(x), single)


@given(
    spec=st.sampled_from(["mxfp8", "mxfp4", "nvfp4", "mxfp8+mxfp4", "bf16+nvfp4", "nvfp4-pad"]),
    shape=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 9)),
    kind=st.sampled_from(KINDS),
    dtype=st.sampled_from(FLOATS),
    cuts=st.lists(st.integers(0, 9), max_size=3),
    seed=st.integers(0, 99),
)
def test_any_cut_is_byte_exact(spec, shape, kind, dtype, cuts, seed):
    codec = parse(spec)
    for side, dim in ((codec.keys, 64), (codec.values, 80 if "nvfp4" in spec else 96)):
        if spec.startswith("bf16") or dim % 32 == 0 or "nvfp4" in side.spec:
            x = vectors(seed, *shape, dim, kind=kind, dtype=dtype)
            edges = [0, *sorted(min(cut, shape[2]) for cut in cuts), shape[2]]
            pieces = [side.encode(x[:, :, a:b]) for a, b in pairwise(edges) if a < b]
            same_planes(side.encode(x), pieces)


@pytest.mark.parametrize(("codec", "dim"), EVERY + ODD)
def test_no_tokens(codec, dim):
    """MLX alone refuses them, where the affine codec's planes are empty."""
    planes = planes_of_no_tokens(codec, dim)
    for dtype in FLOATS:
        assert decode(codec, planes, dtype).shape == (2, 3, 0, codec.width(dim))


# -- padding --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("codec", "dim"), ODD)
def test_padding_leaves_the_other_numbers_as_they_are(codec, dim):
    x = vectors(1, 1, 2, 3, dim, kind="tails")
    width = codec.width(dim)
    assert width == -(-dim // codec.group_size) * codec.group_size
    planes = codec.encode(x)
    out = codec.decode(planes)
    assert not out[..., dim:].any()
    within = mx.broadcast_to(x[..., -1:], (*x.shape[:3], width - dim))
    other = Microscaled(codec.mode).encode(mx.concatenate([x, within], axis=-1))
    assert raw(planes[1]) == raw(other[1])
    assert raw(out[..., :dim]) == raw(codec.decode(other)[..., :dim])


@pytest.mark.parametrize(("codec", "dim"), EVERY)
def test_padding_is_nothing_where_the_group_divides(codec, dim):
    x = vectors(2, 1, 2, 2, dim)
    padded = Microscaled(codec.mode, pad=True)
    codec.check(dim)
    assert padded.width(dim) == codec.width(dim) == dim
    for a, b in zip(codec.encode(x), padded.encode(x), strict=True):
        assert raw(a) == raw(b)


@pytest.mark.parametrize(("codec", "dim"), ODD)
def test_a_group_that_does_not_divide_is_an_error_that_says_what_to_do(codec, dim):
    codec.check(dim)
    with pytest.raises(CodecError) as error:
        Microscaled(codec.mode).check(dim)
    message = str(error.value)
    for part in (f"{codec.mode}: head_dim {dim} is no", f"{codec.group_size};", codec.spec):
        assert part in message


def test_a_head_dim_of_80():
    block = mx.zeros((1, 1, 1, 80))
    with pytest.raises(CodecError, match=r"head_dim 80 .* 32; pad: mxfp8-pad"):
        kvfun.append(kvfun.empty("mxfp8"), block, block)
    for spec in ("nvfp4", "mxfp8-pad"):
        assert kvfun.size(kvfun.append(kvfun.empty(spec), block, block)) == 1


@pytest.mark.parametrize("mode", ["mxfp6", "", "mxfp8-pad", "affine", None, 8, ["mxfp8"]])
def test_another_mode_cannot_be_made(mode):
    with pytest.raises(CodecError, match="mode must be one of mxfp8, mxfp4, nvfp4, not"):
        Microscaled(mode)


# -- bytes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("codec", "dim"), EVERY + ODD)
def test_the_stated_bytes_are_the_bytes_of_a_column(codec, dim):
    for dtype, tokens in product(FLOATS, (1, 3)):
        planes = codec.encode(vectors(0, 2, 3, tokens, dim, dtype=dtype))
        assert [plane.dtype for plane in planes] == [mx.uint32, mx.uint8]
        measured = sum(plane.nbytes for plane in planes)
        assert codec.vector_nbytes(dim, dtype) * 2 * 3 * tokens == measured


@pytest.mark.parametrize(
    ("spec", "dim", "bits"),
    [
        ("mxfp8", 128, 8.25),
        ("mxfp4", 128, 4.25),
        ("nvfp4", 128, 4.5),
        ("nvfp4", 80, 4.5),
        ("mxfp8-pad", 80, 8.25 * 96 / 80),
        ("mxfp8+mxfp4", 64, 6.25),
        ("bf16+nvfp4", 64, 10.25),
        ("kv4+mxfp8", 64, (4.5 + 8.25) / 2),
    ],
)
def test_bits_an_element(spec, dim, bits):
    codec = Codec.of(spec)
    assert codec.bits_per_element(dim) == pytest.approx(bits, rel=1e-12)
    assert codec.token_nbytes(8, dim, dim) == round(bits * 2 * 8 * dim / 8)


# -- reads ----------------------------------------------------------------------------------------


def check_product(out: mx.array, x: mx.array, y: np.ndarray) -> None:
    assert out.dtype == x.dtype
    assert out.shape == (*x.shape[:-1], y.shape[-1])
    limit = 1e-6 * (np.abs(f64(x)) @ np.abs(y)) + 1e-30
    assert (np.abs(f64(out) - f64(x) @ y) <= limit).all()


@pytest.mark.parametrize("decoded", [False, True])
@pytest.mark.parametrize("dim", [32, 80, 128])
@pytest.mark.parametrize("mode", MODES)
def test_products_are_those_of_the_decoded_numbers(mode, dim, decoded, monkeypatch):
    """For any count of columns, also columns out of the middle of a buffer."""
    monkeypatch.setattr(_scores, "_decoded_faster", lambda codec, x: decoded)
    codec = Microscaled(mode, pad=True)
    whole, width = codec.encode(vectors(0, 2, 3, 75, dim, kind="tails")), codec.width(dim)
    for columns, rows in zip(range(1, 71), cycle((1, 3)), strict=False):
        planes = tuple(plane[:, :, 2 : 2 + columns] for plane in whole)
        stored = dense.decoded(codec, planes)
        queries, weights = vectors(1, 2, 3, rows, width), vectors(2, 2, 3, rows, columns)
        check_product(scores(codec, queries, planes), queries, stored.swapaxes(-1, -2))
        check_product(mix(codec, weights, planes), weights, stored)


def test_bytes_are_decoded_once_for_several_rows_on_the_cpu(monkeypatch):
    several, one = mx.zeros((1, 1, 2, 64)), mx.zeros((2, 8, 1, 64))
    assert [_scores._decoded_faster(Microscaled(mode), several) for mode in MODES] == [1, 0, 0]
    assert not _scores._decoded_faster(Microscaled("mxfp8"), one)
    monkeypatch.setattr(_scores, "on_cpu", lambda: False)
    assert not _scores._decoded_faster(Microscaled("mxfp8"), several)


@pytest.mark.parametrize("dtypes", product(FLOATS, FLOATS), ids=str)
@pytest.mark.parametrize("spec", ["mxfp8", "mxfp4", "nvfp4", "mxfp8+kv4", "bf16+mxfp4"])
def test_fetch_hands_out_the_dtypes_that_were_appended(spec, dtypes):
    cache = kvfun.empty(spec)
    none = kvfun.append(
        cache, mx.zeros((1, 1, 0, 64), dtypes[0]), mx.zeros((1, 1, 0, 64), dtypes[1])
    )
    keys, values = (vectors(i, 1, 1, 3, 64, dtype=dtype) for i, dtype in enumerate(dtypes))
    stored = mx.bfloat16 if spec.startswith("bf16") else dtypes[0]
    for full in (kvfun.append(cache, keys, values), kvfun.append(none, keys, values)):
        k, v = kvfun.fetch(full)
        assert (k.dtype, v.dtype) == (stored, dtypes[1])
        codec = full.codec
        assert raw(k) == raw(codec.keys.decode(codec.keys.encode(keys)).astype(stored))
        assert raw(v) == raw(codec.values.decode(codec.values.encode(values)).astype(dtypes[1]))
    k, v = kvfun.fetch(none)
    assert (k.dtype, v.dtype) == (stored, dtypes[1])
    assert k.shape == v.shape == (1, 1, 0, 64)


def test_conversion_goes_by_way_of_the_dtype_that_was_appended():
    keys, values = vectors(0, 1, 2, 5, 64, dtype=mx.float16), vectors(1, 1, 2, 5, 64)
    cache = kvfun.append(kvfun.empty("mxfp8"), keys, values)
    again = kvfun.append(kvfun.empty("kv4"), *kvfun.fetch(cache))
    converted = kvfun.convert(cache, "kv4")
    for a, b in zip(converted.keys + converted.values, again.keys + again.values, strict=True):
        assert a.dtype == b.dtype
        assert raw(a) == raw(b)


def test_affine_and_microscaled_are_told_apart():
    assert Affine(4).quantization.get("mode", "affine") == "affine"
    for mode in MODES:
        assert Microscaled(mode).quantization == {
            "mode": mode,
            "group_size": GROUP[mode],
            "bits": 8 if mode == "mxfp8" else 4,
        }
