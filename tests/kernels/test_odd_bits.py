"""Values of 3 and 5 bits, mixed as bytes, are what MLX's quantized product makes of them."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfun.codecs import Affine
from kvfun.kernels import UNFUSED, _scores
from kvfun.kernels._odd_bits import PIECES, _tables, mix_bytes

from .cases import Case, numbers, peak, wide


@given(
    bits=st.sampled_from(list(PIECES)),
    group=st.sampled_from([32, 64, 128]),
    batch=st.integers(1, 2),
    heads=st.integers(1, 3),
    rows=st.integers(1, 9),
    columns=st.integers(1, 40),
    groups=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_mix(bits, group, batch, heads, rows, columns, groups, seed):
    rng, codec = np.random.default_rng(seed), Affine(bits, group)
    planes = codec.encode(numbers(rng, batch, heads, columns, groups * group))
    weights = numbers(rng, batch, heads, rows, columns)
    wanted = wide(weights) @ wide(codec.decode(planes))
    out = mix_bytes(weights, planes, bits, group)
    assert out.dtype == mx.float32
    most = (np.abs(wide(weights)) @ (np.abs(wide(codec.decode(planes))) + 8)).max()
    assert np.abs(wide(out) - wanted).max() <= 2.0**-22 * most


@pytest.mark.parametrize("bits", list(PIECES))
@pytest.mark.parametrize("count", [32, 64])
def test_every_bit_is_in_one_piece_and_worth_a_power_of_two(bits, count):
    masks, powers = _tables(bits, count)
    bytes_ = np.array(masks).view(np.uint8)
    for place, byte in np.ndindex(bytes_.shape):
        for other in range(place):
            assert not bytes_[place, byte] & bytes_[other, byte]
    assert np.array(np.bitwise_or.reduce(bytes_)[: count * bits // 8] == 255).all()
    assert not bytes_[:, count * bits // 8 :].any()
    assert ((np.array(powers) > 0).sum(0) <= 2).all()


def test_only_in_float32_on_the_cpu(monkeypatch):
    calls = []
    monkeypatch.setattr(
        _scores, "mix_bytes", lambda *given: calls.append(given[2]) or mix_bytes(*given)
    )
    for spec in ("kv2", "kv3", "kv4", "kv5", "kv6", "kv8"):
        Case(spec).check(UNFUSED["decode"])
    assert calls == [3, 5]
    monkeypatch.setattr(_scores, "on_cpu", lambda: False)
    Case("kv3").check(UNFUSED["decode"])
    assert calls == [3, 5]


class Long(Case):
    oracle = False


@pytest.mark.parametrize("spec", ["kv3", "kv5"])
def test_bytes_are_spread_out_tile_by_tile(spec):
    """All at once they would be 4 bytes a number: as much as a decoded copy."""
    taken = [
        peak(Long(spec, columns=n, dims=(64, 64), dtype=mx.bfloat16), UNFUSED["decode"])
        for n in (65536, 262144)
    ]
    scores = 4 * (262144 - 65536) * 4  # of four query heads; there are two such arrays
    assert taken[1] - taken[0] < 3 * scores
