"""The test run checks the shapes in signatures; the verbs keep their own errors."""

import os

import mlx.core as mx
import pytest
from jaxtyping import TypeCheckError

import kvfun
from kvfun.codecs import Affine, Plain
from kvfun.errors import ShapeError

pytestmark = pytest.mark.skipif(
    os.environ.get("KVFUN_TYPECHECK") == "0", reason="KVFUN_TYPECHECK=0"
)


@pytest.mark.parametrize("codec", [Plain(), Affine(4)])
@pytest.mark.parametrize("x", [mx.zeros((2, 64)), mx.zeros((1, 1, 1, 64), mx.int32)])
def test_codecs_are_given_what_their_signatures_say(codec, x):
    with pytest.raises(TypeCheckError):
        codec.encode(x)


def test_verbs_say_more_than_a_signature():
    with pytest.raises(ShapeError):
        kvfun.append(kvfun.empty("plain"), mx.zeros((2, 64)), mx.zeros((2, 64)))
