"""What does not fit is refused at the call, and the message names both sides."""

import mlx.core as mx
import numpy as np
import pytest

from kvfun.codecs import Affine, Codec
from kvfun.errors import CodecError, DTypeError, KVFunError, ShapeError
from kvfun.kernels import PHASES, kernels_for

from .cases import SETS, Case

EVERY = [(name, phase) for name in SETS for phase in PHASES]


@pytest.fixture(params=EVERY, ids=[f"{name}-{phase}" for name, phase in EVERY])
def kernel(request):
    name, phase = request.param
    return SETS[name][phase]


@pytest.mark.parametrize("spec", ["f32", "kv4"])
def test_sinks(kernel, spec):
    case = Case(spec, columns=20)
    for shape in [(3,), (1, 4), (), (5,)]:
        case.sinks = mx.zeros(shape)
        with pytest.raises(ShapeError, match=r"\(4,\), not \(.*queries are \(1, 4, 1, 64\)"):
            case.run(kernel)


@pytest.mark.parametrize("spec", ["f32", "kv4"])
def test_heads_that_do_not_divide(kernel, spec):
    case = Case(spec, kv_heads=2, columns=20)
    case.queries = case.queries[:, :3]
    with pytest.raises(ShapeError, match=r"\(1, 3, 1, 64\) have 3 heads.*2 KV heads"):
        case.run(kernel)


def test_codecs(kernel):
    case = Case("kv4", columns=20)
    for codec, named in (
        ("kv4", "'kv4'"),
        (None, "None"),
        (Affine(4), r"Affine\(bits=4"),
        (Codec(Affine(4), None), r"Affine\(bits=4.*, None"),
    ):
        case.codec = codec
        with pytest.raises(CodecError, match=rf"(fused|tiled|composed) kernel.*not by {named}"):
            case.run(kernel)


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((1, 3, 1, 20), "has 3 heads, the queries 4"),
        ((2, 1, 20), "has 2 heads, the queries 4"),
        ((1, 1, 1, 1, 1, 20), "at most 5 axes"),
        ((2, 20), r"\(2, 20\) does not fit batch 1, 4 query heads.* 1 queries and 20 columns"),
        ((1, 19), r"\(1, 19\) does not fit"),
        ((19,), r"\(19,\) does not fit"),
        ((2, 1, 1, 20), r"\(2, 1, 1, 20\) does not fit"),
        ((1, 4, 1, 1, 20), r"\(1, 4, 1, 1, 20\) does not fit.* over 2 KV heads"),
        ((1, 2, 3, 1, 20), r"\(1, 2, 3, 1, 20\) does not fit"),
    ],
)
def test_masks(kernel, shape, words):
    case = Case("kv4", columns=20)
    case.mask = mx.ones(shape, mx.bool_)
    with pytest.raises(ShapeError, match=words):
        case.run(kernel)


@pytest.mark.parametrize("mask", ["full", "", np.ones((1, 20), bool), 1, [[True] * 20]])
def test_what_is_no_mask(kernel, mask):
    case = Case("kv4", columns=20)
    case.mask = mask
    with pytest.raises(ShapeError, match="a mask is None, 'causal'"):
        case.run(kernel)


def test_masks_of_integers(kernel):
    """Added to the scores they would be a silent mistake."""
    case = Case("kv4", columns=20)
    case.mask = mx.ones((1, 20), mx.int32)
    with pytest.raises(DTypeError, match=r"bool.*floating point, not .*int32"):
        case.run(kernel)


def test_dtypes_that_queries_cannot_have():
    with pytest.raises(DTypeError, match="int32"):
        kernels_for(Codec.of("kv4"), dtype=mx.int32)


def test_the_errors_are_those_of_kvfun():
    assert issubclass(ShapeError, KVFunError)
    assert issubclass(CodecError, ValueError)
