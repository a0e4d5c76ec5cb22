"""Every codec through the whole cache: append, fetch, attend."""

import mlx.core as mx
import numpy as np
import pytest

import kvfun
from kvfun.errors import CodecError
from tests.kernels import dense

from .test_affine import raw, vectors


def appended(spec: str, key_dim: int, value_dim: int, dtype: mx.Dtype = mx.float32):
    keys = vectors(0, 2, 2, 7, key_dim, dtype=dtype)
    values = vectors(1, 2, 2, 7, value_dim, dtype=dtype)
    cache = kvfun.empty(spec)
    for start, stop in ((0, 4), (4, 5), (5, 7)):
        cache = kvfun.append(cache, keys[:, :, start:stop], values[:, :, start:stop])
    return cache, keys, values


AFFINE = [2, 3, 4, 5, 6, 8]
MICROSCALED = [("mxfp8", 64, 96), ("mxfp4", 128, 128), ("nvfp4", 80, 48), ("mxfp4-pad", 80, 72)]


@pytest.mark.parametrize("bits", AFFINE)
@pytest.mark.parametrize(
    ("suffix", "key_dim", "value_dim"),
    [
        ("", 64, 64),
        ("-pad", 80, 80),
        ("-g32", 96, 96),
        ("-pad", 96, 64),
        ("", 128, 128),
        ("", 256, 256),
        ("", 192, 128),
        ("-g128", 256, 128),
        ("-g128-pad", 80, 72),
    ],
)
def test_append_fetch_attend(bits, suffix, key_dim, value_dim):
    check(f"kv{bits}{suffix}", key_dim, value_dim)


@pytest.mark.parametrize(("spec", "key_dim", "value_dim"), MICROSCALED)
def test_append_fetch_attend_microscaled(spec, key_dim, value_dim):
    check(spec, key_dim, value_dim)


def check(spec: str, key_dim: int, value_dim: int) -> None:
    cache, keys, values = appended(spec, key_dim, value_dim)
    codec = cache.codec
    k, v = kvfun.fetch(cache)
    assert k.shape == keys.shape
    assert v.shape == values.shape
    decoded = codec.keys.decode(codec.keys.encode(keys)).astype(mx.float32)
    assert raw(k) == raw(decoded[..., :key_dim])
    decoded = codec.values.decode(codec.values.encode(values)).astype(mx.float32)
    assert raw(v) == raw(decoded[..., :value_dim])
    k, v = np.array(k, np.float64), np.array(v, np.float64)
    for length, phase, mask in ((1, "decode", None), (3, "window", "causal")):
        queries = vectors(2, 2, 4, length, key_dim)
        out = kvfun.attend(cache, queries, phase=phase)
        assert out.shape == (2, 4, length, value_dim)
        wanted = dense.attention(queries, k, v, key_dim**-0.5, mask)
        limit = dense.allowed(queries, k, v, key_dim**-0.5, mx.float32)
        assert np.abs(np.array(out, np.float64) - wanted).max() <= limit


TWO = ["bf16+kv4", "kv8+bf16", "f16+kv3-g32", "plain+kv4", "bf16+nvfp4", "mxfp8+kv4"]


@pytest.mark.parametrize("spec", TWO)
def test_two_kinds_of_codec(spec):
    cache, keys, _ = appended(spec, 64, 128, mx.bfloat16)
    k, v = kvfun.fetch(cache)
    queries = vectors(3, 2, 4, 1, 64)
    out = kvfun.attend(cache, queries)
    wanted = dense.attention(
        queries,
        dense.decoded(cache.codec.keys, cache.codec.keys.encode(keys)),
        np.array(v.astype(mx.float32), np.float64),
        64**-0.5,
    )
    assert k.shape == keys.shape
    assert np.abs(np.array(out, np.float64) - wanted).max() < 0.02


@pytest.mark.parametrize(("key_dim", "value_dim"), [(80, 64), (64, 80), (16, 16)])
def test_a_group_that_does_not_divide_is_refused_at_the_first_append(key_dim, value_dim):
    cache = kvfun.empty("kv4")
    odd = key_dim if key_dim % 64 else value_dim
    with pytest.raises(CodecError, match=f"head_dim {odd} is no multiple of the group size 64"):
        kvfun.append(cache, mx.zeros((1, 1, 1, key_dim)), mx.zeros((1, 1, 1, value_dim)))
    assert kvfun.size(cache) == 0
