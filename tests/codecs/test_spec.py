"""Spec strings: parse and format are inverse, over all there are."""

from itertools import product

import attrs
import mlx.core as mx
import pytest

from kvfun.codecs import (
    BITS,
    DTYPES,
    GROUP_SIZES,
    MODES,
    Affine,
    Codec,
    Microscaled,
    Plain,
    format,
    parse,
)
from kvfun.errors import CodecError, KVFunError, SpecError

AFFINE = [Affine(*options) for options in product(BITS, GROUP_SIZES, (False, True))]
MICROSCALED = [Microscaled(*options) for options in product(MODES, (False, True))]
SIDES = [Plain(None), *map(Plain, DTYPES), *AFFINE, *MICROSCALED]
CODECS = [Codec(keys, values) for keys, values in product(SIDES, SIDES)]


def same(a: Codec, b: Codec) -> bool:
    sides = [(x, getattr(b, side)) for side, x in attrs.asdict(a, recurse=False).items()]
    return all(type(x) is type(y) and attrs.astuple(x) == attrs.astuple(y) for x, y in sides)


def test_every_codec_has_a_spec_of_its_own_that_names_it():
    specs = [codec.spec for codec in CODECS]
    assert len(set(specs)) == len(CODECS) == 46**2
    for codec, spec in zip(CODECS, specs, strict=True):
        assert same(parse(spec), codec)
        assert format(parse(spec)) == spec


@pytest.mark.parametrize(
    ("spec", "canonical"),
    [
        ("bf16", "bf16"),
        ("plain", "plain"),
        ("kv4", "kv4"),
        ("kv4-g64", "kv4"),
        ("kv4-g64-pad", "kv4-pad"),
        ("kv4-g32", "kv4-g32"),
        ("k4v4", "kv4"),
        ("k8v4", "k8v4"),
        ("k8v4-g128-pad", "k8v4-g128-pad"),
        ("kv8+kv4", "k8v4"),
        ("kv8-g32+kv4-g32", "k8v4-g32"),
        ("kv8-g32+kv4", "kv8-g32+kv4"),
        ("kv4-pad+kv4", "kv4-pad+kv4"),
        ("bf16+bf16", "bf16"),
        ("bf16+kv4", "bf16+kv4"),
        ("k4v4+f16", "kv4+f16"),
        ("plain+f32", "plain+f32"),
        ("mxfp8", "mxfp8"),
        ("nvfp4-pad", "nvfp4-pad"),
        ("mxfp4+mxfp4", "mxfp4"),
        ("mxfp8+mxfp4", "mxfp8+mxfp4"),
        ("mxfp8-pad+mxfp8", "mxfp8-pad+mxfp8"),
        ("k4v4+mxfp8", "kv4+mxfp8"),
    ],
)
def test_canonical_forms(spec, canonical):
    assert parse(spec).spec == canonical
    assert same(parse(canonical), parse(spec))


UNKNOWN = """
|kv|k|v4|kv1|kv7|kv9|kv16|kv0|kv04|kv-4|kv4.0|kv+4|k8|k8v|v4k8|k8v7|k7v8|k8v04|kv4-|kv4-g|kv4-g0|
kv4-g16|kv4-g032|kv4-g48|kv4-g256|kv4g32|kv4-32|kv4-pad-g32|kv4-pad-pad|kv4-g32-g32|KV4|BF16|bf32|
fp16|float16|int8| kv4|kv4 |kv 4|kv٤|kv²|k8v4+kv4|kv4+k8v4|k8v4+k8v4|kv4+|+kv4|+|kv4+kv4+kv4|
kv4+kv7|bf16-g32|plain-pad|kv4-g99999|mxfp8?|mxfp6|mxfp8-g32|nvfp4-g16|
mxfp8-pad-pad|mxfp8pad|MXFP8|nvfp8|kmxfp8|mxfp8+|mxfp8+mxfp4+mxfp4|k8v4+mxfp8|none|auto
""".replace("\n", "").split("|")


@pytest.mark.parametrize("spec", UNKNOWN)
def test_an_unknown_spec_is_an_error_that_names_it(spec):
    with pytest.raises(SpecError) as error:
        parse(spec)
    assert repr(spec) in str(error.value)


def test_a_number_without_end_is_an_unknown_spec():
    with pytest.raises(SpecError):
        parse("kv4-g" + "9" * 10_000)


@pytest.mark.parametrize("spec", [None, 4, b"kv4", ["kv4"], Affine(4)])
def test_what_is_no_string_is_an_error_that_names_it(spec):
    with pytest.raises(SpecError) as error:
        Codec.of(spec)
    assert repr(spec) in str(error.value)


def test_a_codec_is_its_own_spec():
    codec = parse("kv4")
    assert Codec.of(codec) is codec
    assert same(Codec.of("kv4"), codec)


@pytest.mark.parametrize(
    "arguments",
    [(0,), (1,), (7,), (16,), (True,), (4.0,), ("4",), (None,), (4, 16), (4, 48), (4, 64.0)],
)
def test_an_affine_codec_of_other_bits_or_groups_cannot_be_made(arguments):
    with pytest.raises(CodecError, match=f"not {arguments[-1]!r}"):
        Affine(*arguments)


@pytest.mark.parametrize("dtype", ["", "bfloat16", "kv4", mx.bfloat16, 16])
def test_a_plain_codec_of_another_dtype_cannot_be_made(dtype):
    with pytest.raises(CodecError, match="dtype must be one of"):
        Plain(dtype)


def test_a_spec_error_is_a_codec_error_and_a_value_error():
    assert issubclass(SpecError, CodecError)
    assert issubclass(SpecError, KVFunError)
    assert issubclass(SpecError, ValueError)
