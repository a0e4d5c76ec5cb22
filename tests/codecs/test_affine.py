"""What is stored: the same bytes however it is cut, near to what it was, and so many bytes."""

from itertools import pairwise, product

import hypothesis.strategies as st
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given

from kvfun.codecs import BITS, DTYPES, GROUP_SIZES, Affine, Codec, Plain, parse
from kvfun.errors import CodecError

DIMS = (64, 96, 128, 256)
EVERY = [
    pytest.param(Affine(bits, group), dim, id=f"{Affine(bits, group).spec}-{dim}")
    for bits, group, dim in product(BITS, GROUP_SIZES, DIMS)
    if dim % group == 0
]
ODD = [
    pytest.param(Affine(bits, group, pad=True), dim, id=f"{bits}-{group}-{dim}")
    for bits, group, dim in product(BITS, GROUP_SIZES, (1, 20, 48, 80, 96, 192))
    if dim % group
]
FLOATS = list(DTYPES.values())


def raw(x: mx.array) -> bytes:
    return bytes(memoryview(mx.contiguous(x).view(mx.uint8)))


def f64(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32), np.float64)


def vectors(seed: int, *shape: int, kind: str = "normal", dtype: mx.Dtype = mx.float32) -> mx.array:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=shape)
    if kind == "tails":
        x = np.clip(rng.standard_cauchy(size=shape), -1e4, 1e4)
    elif kind == "offset":
        x = x + 50
    elif kind == "one outlier":
        x[..., 3] = 200
    elif kind == "constant":
        x = np.broadcast_to(rng.normal(size=(*shape[:-1], 1)), shape)
    elif kind == "zeros":
        x = np.zeros(shape)
    elif kind == "negative":
        x = -np.abs(x) - 1
    return mx.array(x.astype(np.float32)).astype(dtype)


KINDS = ("normal", "tails", "offset", "one outlier", "constant", "zeros", "negative")


def check_near(codec: Affine, x: mx.array) -> None:
    """Each number is decoded as the nearest of its group's levels; those nearly reach its range."""
    planes = codec.encode(x)
    out = f64(codec.decode(planes))[..., : x.shape[-1]]
    shape = (*x.shape[:3], -1, codec.group_size)
    wanted, got = f64(x).reshape(shape), out.reshape(shape)
    scales, biases = (f64(plane)[..., None] for plane in planes[1:])
    highest = 2**codec.bits - 1
    levels = biases + scales * np.arange(highest + 1)
    nearest = np.abs(wanted[..., None] - levels[..., None, :]).min(-1)
    # scales and biases are rounded to the dtype of the vectors, and so is the result
    eps = {mx.float32: 2.0**-22, mx.bfloat16: 2.0**-7, mx.float16: 2.0**-10}[x.dtype]
    rounding = eps * (np.abs(biases) + highest * np.abs(scales)) + 1e-6
    error = np.abs(got - wanted)
    assert (error <= nearest + rounding).all()
    low, high = wanted.min(-1, keepdims=True), wanted.max(-1, keepdims=True)
    step = (high - low) / highest
    assert (error <= step + rounding).all()
    inside = (wanted >= levels.min(-1, keepdims=True)) & (wanted <= levels.max(-1, keepdims=True))
    assert (error <= np.where(inside, np.abs(scales) / 2, np.inf) + rounding).all()


@pytest.mark.parametrize(("codec", "dim"), EVERY)
def test_decoded_is_near_to_what_was_encoded(codec, dim):
    for seed, kind in enumerate(KINDS):
        check_near(codec, vectors(seed, 1, 2, 5, dim, kind=kind))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bits", BITS)
def test_decoded_is_near_in_every_dtype(bits, dtype):
    for seed, kind in enumerate(KINDS):
        x = vectors(seed, 1, 2, 5, 128, kind=kind, dtype=dtype)
        check_near(Affine(bits), x)
        assert Affine(bits).decode(Affine(bits).encode(x)).dtype == dtype


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bits", BITS)
def test_decoded_numbers_are_rounded_once(bits, dtype):
    codec = Affine(bits)
    packed, scales, biases = codec.encode(vectors(0, 1, 2, 50, 64, kind="tails", dtype=dtype))
    exact = codec.decode((packed, scales.astype(mx.float32), biases.astype(mx.float32)))
    assert raw(codec.decode((packed, scales, biases))) == raw(exact.astype(dtype))


@pytest.mark.parametrize("bits", BITS)
def test_constant_vectors_and_zeros_come_back(bits):
    codec = Affine(bits)
    zeros = mx.zeros((1, 1, 2, 64))
    assert mx.array_equal(codec.decode(codec.encode(zeros)), zeros)
    for number in (1.0, -3.0, 1e-3, 1e4):
        x = mx.full((1, 1, 2, 64), number)
        assert mx.allclose(codec.decode(codec.encode(x)), x, rtol=1e-6, atol=1e-6)


def test_an_outlier_costs_only_its_own_group():
    x = vectors(0, 1, 1, 4, 128)
    x[..., 0] = 1000
    other = Affine(4).decode(Affine(4).encode(x))[..., 64:]
    assert mx.abs(other - x[..., 64:]).max() < 0.5


@pytest.mark.parametrize(("codec", "dim"), EVERY + ODD)
def test_many_tokens_at_once_are_one_by_one_byte_for_byte(codec, dim):
    for dtype in FLOATS:
        x = vectors(dim, 2, 2, 4, dim, kind="tails", dtype=dtype)
        whole = codec.encode(x)
        single = [codec.encode(x[:, :, i : i + 1]) for i in range(4)]
        for plane, parts in zip(whole, zip(*single, strict=True), strict=True):
            assert raw(plane) == raw(mx.concatenate(parts, axis=2))


@given(
    spec=st.sampled_from(
        ["kv2", "kv3-g32", "kv4", "kv5-pad", "kv6-g32", "k8v4", "bf16+kv4", "f16"]
    ),
    shape=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 9)),
    dims=st.tuples(st.sampled_from([64, 128]), st.sampled_from([64, 192])),
    dtype=st.sampled_from(FLOATS),
    cuts=st.lists(st.integers(0, 9), max_size=3),
    seed=st.integers(0, 99),
)
def test_any_cut_is_byte_exact(spec, shape, dims, dtype, cuts, seed):
    codec = parse(spec)
    for side, dim in zip((codec.keys, codec.values), dims, strict=True):
        x = vectors(seed, *shape, dim, kind="tails", dtype=dtype)
        edges = [0, *sorted(min(cut, shape[2]) for cut in cuts), shape[2]]
        pieces = [side.encode(x[:, :, a:b]) for a, b in pairwise(edges) if a < b]
        for plane, parts in zip(side.encode(x), zip(*pieces, strict=True), strict=True):
            assert raw(plane) == raw(mx.concatenate(parts, axis=2))


def test_positions_do_not_matter_to_plain_and_affine_codecs():
    x = vectors(0, 1, 2, 3, 64)
    for codec in (Plain(), Plain("bf16"), Affine(4)):
        for a, b in zip(codec.encode(x), codec.encode(x, ((3, 0, 0),)), strict=True):
            assert raw(a) == raw(b)


# -- padding --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("codec", "dim"), ODD)
def test_padding_leaves_the_other_numbers_as_they_are(codec, dim):
    """Full groups have the bytes they have alone; in the last any filling within it is as good."""
    x = vectors(1, 1, 2, 3, dim)
    width = codec.width(dim)
    assert width == -(-dim // codec.group_size) * codec.group_size
    full = dim // codec.group_size * codec.group_size
    padded = codec.encode(x)
    plain = Affine(codec.bits, codec.group_size)
    if full:
        for a, b in zip(plain.encode(x[..., :full]), padded, strict=True):
            assert raw(a) == raw(b[..., : a.shape[-1]])
    within = mx.broadcast_to(x[..., full : full + 1], (*x.shape[:3], width - dim))
    other = plain.decode(plain.encode(mx.concatenate([x, within], axis=-1)))
    assert codec.decode(padded).shape[-1] == width
    assert raw(codec.decode(padded)[..., :dim]) == raw(other[..., :dim])


@pytest.mark.parametrize(("codec", "dim"), EVERY)
def test_padding_is_nothing_where_the_group_divides(codec, dim):
    x = vectors(2, 1, 1, 2, dim)
    padded = Affine(codec.bits, codec.group_size, pad=True)
    assert padded.width(dim) == dim
    for a, b in zip(codec.encode(x), padded.encode(x), strict=True):
        assert raw(a) == raw(b)


@pytest.mark.parametrize(("codec", "dim"), ODD)
def test_a_group_that_does_not_divide_is_an_error_that_says_what_to_do(codec, dim):
    plain = Affine(codec.bits, codec.group_size)
    codec.check(dim)
    with pytest.raises(CodecError) as error:
        plain.check(dim)
    message = str(error.value)
    assert plain.spec in message
    assert f"head_dim {dim}" in message
    assert f"group size {codec.group_size}" in message
    assert f"{plain.spec}-pad" in message
    fits = [group for group in GROUP_SIZES if dim % group == 0]
    assert str(fits) in message if fits else "no group size divides it" in message


# -- bytes ----------------------------------------------------------------------------------------

BYTES = [Plain(None), *map(Plain, DTYPES), *(p.values[0] for p in EVERY[:: len(DIMS)])]
BYTES += [Affine(bits, group, pad) for bits in BITS for group in GROUP_SIZES for pad in (0, 1)]


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_stated_bytes_are_the_bytes_of_a_column(dtype):
    for codec, dim in product(BYTES, (32, 64, 80, 96, 128, 256)):
        if isinstance(codec, Affine) and not codec.pad and dim % codec.group_size:
            continue
        for tokens in (1, 3):
            planes = codec.encode(vectors(0, 2, 3, tokens, dim, dtype=dtype))
            measured = sum(plane.nbytes for plane in planes)
            assert codec.vector_nbytes(dim, dtype) * 2 * 3 * tokens == measured


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("spec", ["plain", "bf16", "kv3", "k8v4", "bf16+kv4", "kv6-g32+f16"])
@pytest.mark.parametrize(("key_dim", "value_dim"), [(64, 64), (192, 128)])
def test_the_stated_bytes_of_a_token(spec, dtype, key_dim, value_dim):
    codec = parse(spec)
    keys = codec.keys.encode(vectors(0, 1, 3, 1, key_dim, dtype=dtype))
    values = codec.values.encode(vectors(1, 1, 3, 1, value_dim, dtype=dtype))
    measured = sum(plane.nbytes for plane in keys + values)
    assert codec.token_nbytes(3, key_dim, value_dim, dtype) == measured
    bits = codec.bits_per_element(key_dim, value_dim, dtype)
    assert bits == measured * 8 / (3 * (key_dim + value_dim))


@pytest.mark.parametrize(
    ("spec", "bits"),
    [("bf16", 16), ("kv4", 4.5), ("kv4-g32", 5), ("k8v4", 6.5), ("kv3-g128", 3.25)],
)
def test_bits_an_element(spec, bits):
    assert Codec.of(spec).bits_per_element(128) == bits
    assert Codec.of(spec).token_nbytes(8, 128, 128) == bits * 2 * 8 * 128 / 8


# -- plain ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("stored", [None, *DTYPES])
def test_plain_numbers_are_rounded_once(stored, dtype):
    x = vectors(0, 1, 2, 3, 24, dtype=dtype)
    codec = Plain(stored)
    planes = codec.encode(x)
    assert raw(codec.decode(planes)) == raw(x if stored is None else x.astype(DTYPES[stored]))
    assert codec.width(24) == 24
    codec.check(1)
