"""Keys less their mean: what it is learnt from, that nothing depends on it, and what it is for."""

from itertools import pairwise

import hypothesis.strategies as st
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given

import kvfun
from kvfun import tree
from kvfun.codecs import (
    Affine,
    Centred,
    Codec,
    Plain,
    Rope,
    Rotated,
    VectorCodec,
    learns,
    parse,
    with_rope,
)
from kvfun.codecs._rope import Tables
from kvfun.errors import CodecError, GeometryError, ShapeError
from kvfun.record import replace
from tests.kernels import dense

from .test_affine import FLOATS, f64, raw, vectors

ROPE = Rope.of(64, base=10_000.0)
ROPES = {
    "none": None,
    "half": ROPE,
    "traditional": Rope.of(64, traditional=True),
    "partial": Rope.of(32, base=1e6),
}
FRONT, SKIPPED = 16, 4


def moved(x: np.ndarray, rope: Rope | None, start: int | np.ndarray = 0) -> np.ndarray:
    """Vectors ``[..., tokens, dim]`` at their positions, in float64."""
    if rope is None:
        return x
    turn = np.exp(1j * (start + np.arange(x.shape[-2]))[:, None] * f64(rope.frequencies))
    out, dims = x.astype(np.float64), rope.dims
    one, other = slice(0, dims // 2), slice(dims // 2, dims)
    if rope.traditional:
        one, other = slice(0, dims, 2), slice(1, dims, 2)
    pairs = (x[..., one] + 1j * x[..., other]) * turn
    out[..., one], out[..., other] = pairs.real, pairs.imag
    return out


def array(x: np.ndarray, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.array(x.astype(np.float32)).astype(dtype)


def told(spec: str, rope: Rope | None) -> Codec:
    return with_rope(Codec.of(spec), rope)


def biased(
    seed: int, *shape: int, rope: Rope | None = ROPE, size: float = 100.0
) -> tuple[np.ndarray, np.ndarray]:
    """Keys with a bias before RoPE, one a row and head, on a few channels; and the bias."""
    random = np.random.default_rng(seed)
    bias = np.zeros((*shape[:2], 1, shape[3]))
    bias[..., :: shape[3] // 4] = size * random.choice([-1.0, 1.0], (*shape[:2], 1, 4))
    return moved(random.normal(size=shape) + bias, rope), bias


def grown(cache, keys: mx.array, values: mx.array, *cuts: int):
    for a, b in pairwise([0, *cuts, keys.shape[2]]):
        if a < b:
            cache = kvfun.append(cache, keys[:, :, a:b], values[:, :, a:b])
    return cache


def encoded_bytes(cache) -> list[bytes]:
    """All that is encoded, and what was learnt."""
    tail, used = cache.tail, cache.tail.geometry.used
    planes = [raw(plane[:, :, :used]) for plane in (*tail.keys, *tail.values)]
    return planes + [raw(x) for x in tree.leaves(tail.codec)]


def relative(found: mx.array, wanted: np.ndarray) -> float:
    return float(np.linalg.norm(f64(found) - wanted) / np.linalg.norm(wanted))


# -- biases do not matter -------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1.0, 10.0, 100.0])
@pytest.mark.parametrize("spec", ["rot-k4v4", "rot-k3v3-g32", "rot-k2v2-tcq", "rot-k4v4-log"])
def test_a_constant_of_all_keys_changes_no_attention(spec, size):
    """Softmax does not see it, and neither does the codec. Raw first tokens hold it, too.

    A rounding may tip one vector of so many to another of its scales, and all of its codes.
    """
    random = np.random.default_rng(1)
    keys, bias = random.normal(size=(1, 2, 500, 64)), random.normal(size=(1, 2, 1, 64))
    bias[..., [3, 20, 33, 60]] = size
    bias *= size / np.abs(bias).max()
    values, queries = vectors(2, 1, 2, 500, 64), vectors(3, 1, 4, 7, 64) / 4
    outs = []
    for each in (keys, keys + bias):
        cache = grown(kvfun.empty(told(spec, None)), array(each), values, 5, 30)
        outs.append(kvfun.attend(cache, queries, phase="window"))
        assert cache.tail.codec.keys.mean is not None
    assert relative(outs[1], f64(outs[0])) < 1e-3


@pytest.mark.parametrize("rope", ["half", "traditional", "partial"])
@pytest.mark.parametrize("size", [10.0, 100.0])
def test_a_bias_before_rope_is_stored_exactly(rope, size):
    """What is decoded has it again, at every position; the codec saw nothing of it."""
    rope, random = ROPES[rope], np.random.default_rng(2)
    keys, bias = random.normal(size=(1, 2, 300, 64)), random.normal(size=(1, 2, 1, 64))
    bias *= size / np.abs(bias).max()
    values = vectors(4, 1, 2, 300, 64)
    without, with_bias = moved(keys, rope), moved(keys + bias, rope)
    plain, shifted = [
        grown(kvfun.empty(told("rot-k4v4", rope)), array(each), values, 40)
        for each in (without, with_bias)
    ]
    back = f64(kvfun.fetch(shifted)[0]) - moved(np.broadcast_to(bias, keys.shape), rope)
    decoded = f64(kvfun.fetch(plain)[0])
    # rounding of float32 at this size may tip a number on a boundary, and no more
    assert np.linalg.norm(back - decoded) / np.linalg.norm(decoded) < 2e-2
    assert np.median(np.abs(back - decoded).max(-1)) < 1e-6 * size * 40
    # and attention is that over the exact bias and the keys decoded without it
    queries = vectors(5, 1, 4, 3, 64) / 8
    out = kvfun.attend(shifted, queries, phase="window")
    wanted = dense.attention(
        queries, decoded + with_bias - without, f64(kvfun.fetch(plain)[1]), 64**-0.5, "causal"
    )
    assert relative(out, wanted) < 1e-2


@pytest.mark.parametrize("bits", [3, 4])
def test_the_error_of_keys_does_not_depend_on_their_bias(bits):
    """By a mean of 12 tokens, a twelfth more energy is left to encode than by the true one."""
    errors = []
    for size in (0.0, 1.0, 10.0, 100.0):
        keys, bias = biased(3, 1, 2, 500, 64, size=size)
        cache = grown(kvfun.empty(told(f"rot-k{bits}v4", ROPE)), array(keys), array(keys))
        difference = (f64(kvfun.fetch(cache)[0]) - keys)[:, :, FRONT:]
        rest = (keys - moved(np.broadcast_to(bias, keys.shape), ROPE))[:, :, FRONT:]
        errors.append((difference**2).sum() / (rest**2).sum())
    assert errors == pytest.approx([errors[0]] * 4, rel=0.02)
    assert errors[0] < {4: 0.0080, 3: 0.0330}[bits] * (1 + 1 / 12) * 1.03


def test_eight_bit_keys_of_a_large_mean_are_as_good_as_those_of_none():
    """A mean of 100 deviations costs affine keys two bits and more."""
    errors = {}
    for spec in ("rot-k8v4", "kv8-g32-f16-c", "kv8"):
        for size in (0.0, 100.0):
            keys = np.random.default_rng(0).normal(size=(1, 2, 400, 64)) + size
            cache = grown(kvfun.empty(spec), array(keys), array(keys))
            difference = (f64(kvfun.fetch(cache)[0]) - keys)[:, :, FRONT:]
            errors[spec, size] = (difference**2).mean()
        if spec != "kv8":
            assert errors[spec, 100.0] < 1.2 * errors[spec, 0.0]


# -- gates ----------------------------------------------------------------------------------------

TOKENS, QUERIES, DIM = 4096, 256, 128


def softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def output_error(
    codec: Codec, q: np.ndarray, k: np.ndarray, v: np.ndarray, converted: bool = False
) -> float:
    """Of attention over a whole cache, to exact attention."""
    empty = kvfun.empty("plain" if converted else codec)
    cache = kvfun.append(empty, array(k[None, None]), array(v[None, None]))
    cache = kvfun.convert(cache, codec) if converted else cache
    found = kvfun.attend(cache, array(q[None, None]), phase="window", mask="full")
    return relative(found[0, 0], softmax(q @ k.T / DIM**0.5) @ v)


@pytest.fixture(scope="module")
def rope_bias():
    """Keys with a bias of 100 before RoPE on 4 channels, values with a common mean.

    Queries are small there, such that scores have a deviation of 1.7.
    """
    random, rope = np.random.default_rng(0), Rope.of(DIM, base=1e6)
    channels, bias = [5, 40, 77, 100], np.zeros(DIM)
    bias[channels] = [100.0, -100.0, 100.0, -100.0]
    keys = moved(random.normal(size=(TOKENS, DIM)) + bias, rope)
    queries = random.normal(size=(QUERIES, DIM))
    queries[:, [c % 64 + half for c in channels for half in (0, 64)]] *= 0.1091
    queries = moved(queries, rope, TOKENS - QUERIES)
    assert (queries @ keys.T / DIM**0.5).std(-1).mean() == pytest.approx(1.7, abs=0.01)
    values = 0.9 * random.normal(size=(TOKENS, DIM)) + 0.45 * random.normal(size=DIM)
    return rope, queries, keys, values


@pytest.mark.parametrize(
    ("spec", "gate"),
    [
        ("rot4-c+f32", 0.0075),
        ("rot3-c+f32", 0.0155),
        ("rot3-tcq-c+f32", 0.0130),
        ("kv4-f16-c+f32", 0.0080),
    ],
)
def test_a_bias_before_rope_costs_nothing(rope_bias, spec, gate):
    """Affine keys of 4 bits have an error of 0.07 to 1, plain TurboQuant of 0.26."""
    rope, *data = rope_bias
    assert output_error(told(spec, rope), *data) <= 1.03 * gate
    if spec == "rot4-c+f32":
        # it has to know of RoPE, and does not need to be told the mean
        assert output_error(told(spec, None), *data) > 5 * gate
        assert output_error(parse("rot4-s1-rms+f32"), *data) > 20 * gate


GATES = {
    "rot-k4v4": (0.130, 0.220, 0.215, 0.130),
    "rot-k4v4-g32": (0.115, 0.197, 0.200, 0.115),
    "rot-k3v3": (0.265, 0.405, 0.440, 0.265),
    "rot-k8v3": (0.190, 0.190, 0.190, 0.190),
    "rot-k3v2": (0.435, 0.510, 0.560, 0.435),
    "rot-k2v2-tcq": (0.450, 0.690, 0.870, 0.450),
}
"""Scores of a deviation of 1; of 3; four channels ten times as large; four shifted by 100."""


@pytest.fixture(scope="module")
def kinds_of_keys():
    random = np.random.default_rng(16)  # plain TurboQuant has the reference's errors on these
    keys, values = random.normal(size=(2, TOKENS, DIM))
    queries, channels = random.normal(size=(QUERIES, DIM)), [5, 40, 77, 100]
    loud, shifted, small, quiet = keys.copy(), keys.copy(), queries.copy(), queries.copy()
    loud[:, channels] *= 10
    shifted[:, channels] += [100.0, -98.0, 103.0, -99.0]
    small[:, channels] /= 3
    quiet[:, channels] /= 10
    cases = [(queries, keys), (3 * queries, keys), (small, loud), (quiet, shifted)]
    return [(q, k, values) for q, k in cases]


@pytest.mark.parametrize("spec", GATES)
def test_the_error_of_attention_is_that_of_the_best_in_the_field(kinds_of_keys, spec):
    for data, gate in zip(kinds_of_keys, GATES[spec], strict=True):
        assert output_error(Codec.of(spec), *data, converted=True) <= 1.03 * gate
    if spec in ("rot-k4v4", "rot-k3v3"):  # by a mean of 12 tokens a twelfth more is left of keys
        assert output_error(Codec.of(spec), *kinds_of_keys[3]) <= 1.05 * GATES[spec][3]


@pytest.mark.parametrize(("loud", "gate"), [(1, 0.232), (3, 0.380)])
def test_the_error_of_attention_with_scales_by_32_numbers(loud, gate):
    """A mean of five draws, which differ by a few percent."""
    errors = []
    for seed in (0, 1, 2, 3, 16):
        random = np.random.default_rng(seed)
        keys, values = random.normal(size=(2, TOKENS, DIM))
        queries = loud * random.normal(size=(QUERIES, DIM))
        errors.append(output_error(Codec.of("rot-k3v3-g32"), queries, keys, values, converted=True))
    assert np.mean(errors) <= 1.03 * gate


# -- what the mean is learnt from -----------------------------------------------------------------


def mean_of(keys: np.ndarray, rope: Rope | None, start: int = SKIPPED) -> np.ndarray:
    """The mean of keys that RoPE is undone for, ``[batch, heads, 1, dim]``."""
    back = None if rope is None else Rope(-rope.frequencies, rope.traditional)
    return moved(keys, back, start).mean(2, keepdims=True)


@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize(
    ("front", "start"),
    [(None, 4), (16, 4), (40, 4), (9, 4), (8, 4), (7, 3), (4, 2), (2, 1), (1, 0)],
)
def test_it_is_learnt_from_the_raw_first_tokens_but_the_very_first(name, front, start):
    rope = ROPES[name]
    keys, _ = biased(0, 2, 3, 60, 64, rope=rope, size=5.0)
    cache = kvfun.empty(told("rot-k4v4", rope), raw_sinks=front)
    cache = grown(cache, array(keys), array(keys), 3, 50)
    front = FRONT if front is None else front
    assert cache.front == front
    mean = cache.tail.codec.keys.mean
    assert mean.shape == (2, 3, 1, 64)
    assert mean.dtype == mx.float32
    wanted = mean_of(keys[:, :, start:front], rope, start)
    assert np.abs(f64(mean) - wanted).max() < 1e-5
    assert raw(kvfun.fetch(cache)[0][:, :, :front]) == raw(array(keys[:, :, :front]))
    assert cache.codec is cache.tail.codec


def test_nothing_is_learnt_before_all_of_them_are_there():
    keys = vectors(0, 1, 2, 40, 64)
    cache = kvfun.append(kvfun.empty("rot-k4v4"), keys[:, :, :15], keys[:, :, :15])
    assert cache.tail.codec.keys.mean is None
    once = kvfun.append(cache, keys[:, :, 15:16], keys[:, :, 15:16])
    learnt = once.tail.codec.keys.mean
    assert learnt is not None
    more = kvfun.append(once, keys[:, :, 16:], keys[:, :, 16:])
    assert more.tail.codec.keys.mean is learnt


def test_without_raw_first_tokens_keys_are_stored_as_they_are():
    keys = vectors(0, 1, 2, 40, 64, kind="offset")
    cache = kvfun.append(kvfun.empty(told("rot-k4v4", ROPE), raw_sinks=0), keys, keys)
    assert isinstance(cache, kvfun.KV)
    assert cache.codec.keys.mean is None
    assert not cache.codec.keys.positional
    other = Rotated(4)
    assert raw(kvfun.fetch(cache)[0]) == raw(other.decode(other.encode(keys)))


@given(
    spec=st.sampled_from(["rot-k4v4", "rot-k3v2-log", "rot-k8v4-log", "rot-k2v2-tcq", "kv4-f16-c"]),
    name=st.sampled_from(list(ROPES)),
    cuts=st.lists(st.integers(1, 39), max_size=6),
    dtype=st.sampled_from(FLOATS),
    seed=st.integers(0, 99),
)
def test_how_tokens_come_does_not_matter(spec, name, cuts, dtype, seed):
    """Byte for byte, one by one or all at once."""
    keys = array(biased(seed, 2, 2, 40, 64, rope=ROPES[name], size=20.0)[0], dtype)
    values = vectors(seed, 2, 2, 40, 64, dtype=dtype)
    empty = kvfun.empty(told(spec, ROPES[name]))
    whole, parts = grown(empty, keys, values), grown(empty, keys, values, *sorted(cuts))
    assert encoded_bytes(whole) == encoded_bytes(parts)
    for a, b in zip(kvfun.fetch(whole), kvfun.fetch(parts), strict=True):
        assert raw(a) == raw(b)


@given(
    padding=st.lists(st.integers(0, 25), min_size=2, max_size=3),
    cuts=st.lists(st.integers(1, 59), max_size=4),
    spec=st.sampled_from(["rot-k4v4", "rot-k3v3-log"]),
    seed=st.integers(0, 99),
)
def test_every_row_learns_from_its_own_first_tokens(padding, cuts, spec, seed):
    """A row of a batch with left padding is the row alone, whenever its first tokens are there."""
    batch = len(padding)
    keys, _ = biased(seed, batch, 2, 60, 64, rope=None, size=20.0)
    keys = np.stack([moved(row, ROPE, -pad) for row, pad in zip(keys, padding, strict=True)])
    keys, values = array(keys), vectors(seed, batch, 2, 60, 64)
    codec = told(spec, ROPE)
    together = grown(kvfun.empty(codec, left_padding=padding), keys, values, *sorted(cuts))
    for row, (one, pad) in enumerate(zip(kvfun.unstack(together), padding, strict=True)):
        alone = kvfun.append(
            kvfun.empty(codec), keys[row : row + 1, :, pad:], values[row : row + 1, :, pad:]
        )
        assert kvfun.offsets(one) == kvfun.offsets(alone) == (60 - pad,)
        assert raw(one.tail.codec.keys.mean) == raw(alone.tail.codec.keys.mean)
        for a, b in zip(kvfun.fetch(one), kvfun.fetch(alone), strict=True):
            assert np.abs(f64(a) - f64(b)).max() < 2e-4
        count, stop = alone.tail.geometry.used, one.tail.geometry.used
        ours, theirs = [cache.tail.keys + cache.tail.values for cache in (one, alone)]
        for a, b in zip(ours, theirs, strict=True):
            assert raw(a[:, :, stop - count : stop]) == raw(b[:, :, :count])


def test_first_tokens_that_are_not_finite_do_not_count():
    keys, _ = biased(0, 1, 2, 40, 64, size=10.0)
    bad = keys.copy()
    bad[0, 0, 6, 3], bad[0, 0, 9, 60], bad[0, 1, 15] = np.nan, np.inf, -np.inf
    cache = grown(kvfun.empty(told("rot-k4v4-log", ROPE)), array(bad), array(keys), 10)
    mean = f64(cache.tail.codec.keys.mean)
    assert np.isfinite(mean).all()
    back = Rope(-ROPE.frequencies)
    still = moved(keys, back)
    for head, out in ((0, (6, 9)), (1, (15,))):
        counted = [t for t in range(SKIPPED, FRONT) if t not in out]
        assert np.abs(mean[0, head, 0] - still[0, head, counted].mean(0)).max() < 1e-5
    assert np.isfinite(f64(cache.tail.codec.keys.codec.reference)).all()
    assert np.isfinite(f64(kvfun.fetch(cache)[0][:, :, FRONT:])).all()
    # none at all is as if there were no mean
    cache = grown(kvfun.empty("rot-k4v4"), mx.full((1, 1, 16, 64), mx.nan), mx.ones((1, 1, 16, 64)))
    assert not f64(cache.tail.codec.keys.mean).any()


@pytest.mark.parametrize("name", ROPES)
def test_scales_are_relative_to_what_is_left_of_the_first_tokens(name):
    rope = ROPES[name]
    keys, values = biased(1, 2, 2, 30, 64, rope=rope)[0], vectors(1, 2, 2, 30, 64) * 7
    cache = grown(kvfun.empty(told("rot-k3v3-log", rope)), array(keys), values)
    codec, first = cache.tail.codec, keys[:, :, SKIPPED:FRONT]
    mean = np.broadcast_to(mean_of(first, rope), first.shape)
    for reference, x in (
        (codec.keys.codec.reference, first - moved(mean, rope, SKIPPED)),
        (codec.values.reference, f64(values)[:, :, SKIPPED:FRONT]),
    ):
        rms = np.sqrt((x**2).mean(-1))
        wanted = np.exp(np.log(rms).mean(-1))[..., None, None]
        assert f64(reference) == pytest.approx(wanted, rel=1e-4)


# -- the mean and the rows ------------------------------------------------------------------------


def three(spec: str = "rot-k4v4-log", rope: Rope | None = ROPE):
    """Caches of other lengths and biases: the last has not learnt anything yet."""
    caches = []
    for seed, tokens in enumerate((40, 25, 9)):
        keys = array(biased(seed, 1, 2, tokens, 64, rope=rope)[0])
        caches.append(grown(kvfun.empty(told(spec, rope)), keys, keys))
    return caches


def assert_alike(one, other) -> None:
    """The same tokens, by the same mean; one who learnt nothing has a mean of zero in a batch."""
    assert kvfun.offsets(one) == kvfun.offsets(other)
    for a, b in zip(kvfun.fetch(one), kvfun.fetch(other), strict=True):
        assert np.abs(f64(a) - f64(b)).max() < 2e-4
    means = [cache.tail.codec.keys.mean for cache in (one, other)]
    a, b = [np.zeros((1, 2, 1, 64)) if mean is None else f64(mean) for mean in means]
    assert np.array_equal(a, b)


@pytest.mark.parametrize("name", ["none", "half"])
def test_rows_keep_what_they_have_learnt(name):
    caches = three(rope=ROPES[name])
    batch = kvfun.stack(caches)
    assert batch.tail.codec.keys.mean.shape == (3, 2, 1, 64)
    for row, cache in enumerate(caches):
        assert_alike(kvfun.take(batch, [row]), cache)
    turned = kvfun.take(batch, [2, 0, 0, 1])
    for one, row in zip(kvfun.unstack(turned), (2, 0, 0, 1), strict=True):
        assert_alike(one, caches[row])
    again = kvfun.concat([turned, kvfun.take(batch, [1])])
    assert_alike(kvfun.take(again, [4]), caches[1])
    assert_alike(kvfun.take(again, [0]), caches[2])
    assert again.tail.codec.values.reference.shape == (5, 2, 1, 1)


def test_rows_of_a_batch_learn_when_their_first_tokens_are_there():
    """One has learnt, another not yet: what follows is what would follow each alone."""
    caches = three()
    batch, singles = kvfun.stack(caches), list(caches)
    for seed in (10, 11):
        keys, values = vectors(seed, 3, 2, 6, 64), vectors(seed + 5, 3, 2, 6, 64)
        batch = kvfun.append(batch, keys, values)
        singles = [
            kvfun.append(cache, keys[i : i + 1], values[i : i + 1])
            for i, cache in enumerate(singles)
        ]
        for row, cache in enumerate(singles):
            assert_alike(kvfun.take(batch, [row]), cache)
    assert f64(batch.tail.codec.keys.mean)[2].any()
    queries = vectors(3, 3, 4, 1, 64)
    out = kvfun.attend(batch, queries)
    for row, cache in enumerate(singles):
        alone = kvfun.attend(cache, queries[row : row + 1])
        assert np.abs(f64(out[row]) - f64(alone[0])).max() < 1e-3


def test_forks_keep_the_mean_and_diverge():
    first = three()[0]
    mean = first.tail.codec.keys.mean
    branches = kvfun.fork(first, 2)
    grown_apart = [
        kvfun.append(branch, vectors(seed, 1, 2, 5, 64), vectors(seed, 1, 2, 5, 64))
        for seed, branch in enumerate(branches)
    ]
    assert all(branch.tail.codec.keys.mean is mean for branch in grown_apart)
    assert_alike(kvfun.rollback(grown_apart[0], 5), kvfun.rollback(grown_apart[1], 5))


@pytest.mark.parametrize("kept", [39, 17, 16])
def test_a_rollback_behind_the_first_tokens_keeps_the_mean(kept):
    cache = three()[0]
    mean = cache.tail.codec.keys.mean
    back = kvfun.rollback(cache, 40 - kept)
    assert back.tail.codec.keys.mean is mean
    other = kvfun.append(back, vectors(8, 1, 2, 9, 64), vectors(8, 1, 2, 9, 64))
    assert other.tail.codec.keys.mean is mean


@given(kept=st.integers(0, 15), cuts=st.lists(st.integers(1, 34), max_size=3))
def test_other_first_tokens_after_a_rollback_are_learnt_from_anew(kept, cuts):
    """As a cache that never saw the ones that were taken back."""
    keys, others = [array(biased(seed, 1, 2, 40, 64)[0]) for seed in (1, 2)]
    empty = kvfun.empty(told("rot-k4v4-log", ROPE))
    cache = kvfun.rollback(grown(empty, keys, keys), 40 - kept)
    mixed = mx.concatenate([keys[:, :, :kept], others[:, :, kept:]], axis=2)
    cache = grown(cache, others[:, :, kept:], others[:, :, kept:], *sorted(
        cut for cut in cuts if cut < 40 - kept
    ))  # fmt: skip
    assert encoded_bytes(cache) == encoded_bytes(grown(empty, mixed, mixed))


def test_one_row_of_a_batch_may_learn_anew():
    keys = array(biased(0, 2, 2, 30, 64)[0])
    batch = grown(kvfun.empty(told("rot-k4v4", ROPE)), keys, keys)
    before = f64(batch.tail.codec.keys.mean)
    batch = kvfun.rollback(batch, [20, 5])
    more = array(biased(9, 2, 2, 10, 64)[0])
    batch = kvfun.append(batch, more, more)
    after = f64(batch.tail.codec.keys.mean)
    assert np.array_equal(after[1], before[1])
    wanted = kvfun.append(
        grown(kvfun.empty(told("rot-k4v4", ROPE)), keys[:1, :, :10], keys[:1, :, :10]),
        more[:1],
        more[:1],
    )
    assert np.array_equal(after[0], f64(wanted.tail.codec.keys.mean)[0])
    assert_alike(kvfun.take(batch, [0]), wanted)


# -- windows, residuals ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"window": 20, "sinks": 4},
        {"window": 9, "sinks": 20},
        {"window": 30},
        {"chunk": 25},
        {"residual": 12, "block": 8},
        {"residual": 12, "block": 8, "raw_sinks": 0},
        {"residual": 5, "block": 3, "window": 24, "sinks": 2},
        {"window": 20, "reserve": 6, "left_padding": [0, 7]},
        {"residual": 8, "block": 4, "left_padding": [5, 0]},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["none", "half", "partial"])
def test_a_mean_is_added_at_the_position_of_its_token_wherever_that_lies(name, options):
    """A bias of 100 would show if it came back at any other position."""
    rope, padding = ROPES[name], options.get("left_padding", [0, 0])
    x, _ = biased(0, 2, 2, 90, 64, rope=None)
    keys = np.stack([moved(row, rope, -pad) for row, pad in zip(x, padding, strict=True)])
    values = vectors(1, 2, 2, 90, 64)
    cache = kvfun.empty(told("rot-k4v4", rope), **options)
    for a, b in pairwise([0, 11, 12, 30, 31, 45, 70, 71, 89, 90]):
        cache = kvfun.append(cache, array(keys[:, :, a:b]), values[:, :, a:b])
        if b - a > 1 or max(padding) >= a:
            continue
        for row, one in enumerate(kvfun.unstack(cache)):
            found = f64(kvfun.fetch(one)[0])
            seen = [
                n
                for n in range(b)
                if n >= padding[row] and visible(options, n - padding[row], b - 1 - padding[row])
            ]
            wanted = keys[row : row + 1][:, :, seen]
            assert found.shape == wanted.shape
            error = ((found - wanted) ** 2).sum(-1) / (x[row : row + 1][:, :, seen] ** 2).sum(-1)
            if "raw_sinks" not in options:
                assert ((found - wanted) ** 2).mean() < 0.02
            assert error.max() < 0.05
    queries = vectors(2, 2, 4, 1, 64) / 8
    k, v = map(f64, kvfun.fetch(kvfun.take(cache, [0])))
    wanted = dense.attention(queries[:1], k, v, 64**-0.5)
    assert relative(kvfun.attend(cache, queries)[:1], wanted) < 1e-3


def visible(options: dict, key: int, query: int) -> bool:
    window, chunk = options.get("window"), options.get("chunk")
    if key < options.get("sinks", 0):
        return True
    if chunk is not None and key // chunk != query // chunk:
        return False
    return window is None or key > query - window


# -- conversion -----------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["rot-k4v4", "rot-k3v3-log", "rot-k8v3-g32-log"])
def test_a_chain_with_raw_first_tokens_is_converted_as_it_would_have_been_appended(spec):
    keys, values = array(biased(0, 2, 2, 40, 64)[0]), vectors(1, 2, 2, 40, 64)
    plain = grown(kvfun.empty("plain", raw_sinks=FRONT), keys, values)
    direct = grown(kvfun.empty(told(spec, ROPE)), keys, values)
    assert encoded_bytes(kvfun.convert(plain, told(spec, ROPE))) == encoded_bytes(direct)
    # what has too few tokens learns when they are there
    early = grown(kvfun.empty("plain", raw_sinks=FRONT), keys[:, :, :9], values[:, :, :9])
    early = kvfun.convert(early, told(spec, ROPE))
    assert early.tail.codec.keys.mean is None
    later = kvfun.append(early, keys[:, :, 9:], values[:, :, 9:])
    assert encoded_bytes(later) == encoded_bytes(direct)


@pytest.mark.parametrize(("tokens", "start"), [(40, 4), (9, 4), (7, 3), (4, 2), (1, 0)])
@pytest.mark.parametrize("name", ROPES)
def test_a_plain_cache_learns_from_all_but_the_very_first_tokens(name, tokens, start):
    rope = ROPES[name]
    keys, _ = biased(2, 2, 2, tokens, 64, rope=rope)
    plain = grown(kvfun.empty("plain"), array(keys), array(keys))
    cache = kvfun.convert(plain, told("rot-k4v4", rope))
    wanted = mean_of(keys[:, :, start:], rope, start)
    assert np.abs(f64(cache.codec.keys.mean) - wanted).max() < 1e-4
    again = kvfun.append(cache, array(keys[:, :, -1:]), array(keys[:, :, -1:]))
    assert again.codec.keys.mean is cache.codec.keys.mean


def test_a_window_learns_from_what_its_last_token_sees():
    keys, _ = biased(3, 1, 2, 60, 64)
    plain = grown(kvfun.empty("plain", window=20, sinks=2), array(keys), array(keys), 50, 59)
    mean = kvfun.convert(plain, told("rot-k4v4", ROPE)).codec.keys.mean
    assert np.abs(f64(mean) - mean_of(keys[:, :, 40:], ROPE, 40)).max() < 1e-4


def test_rows_of_a_plain_cache_learn_by_themselves():
    keys, _ = biased(4, 2, 2, 30, 64, rope=None)
    plain = grown(kvfun.empty("plain", left_padding=[0, 11]), array(keys), array(keys))
    mean = f64(kvfun.convert(plain, "rot-k4v4").codec.keys.mean)
    assert np.abs(mean[0] - keys[0, :, 4:].mean(1, keepdims=True)).max() < 1e-4
    assert np.abs(mean[1] - keys[1, :, 15:].mean(1, keepdims=True)).max() < 1e-4


@pytest.mark.parametrize("name", ["none", "half"])
def test_a_chain_without_raw_first_tokens_learns_from_its_oldest_part(name):
    rope = ROPES[name]
    keys, _ = biased(5, 1, 2, 70, 64, rope=rope)
    chain = kvfun.seal(grown(kvfun.empty("plain"), array(keys[:, :, :40]), array(keys[:, :, :40])))
    chain = grown(chain, array(keys[:, :, 40:]), array(keys[:, :, 40:]))
    converted = kvfun.convert(chain, told("rot-k4v4", rope))
    wanted = mean_of(keys[:, :, 4:40], rope)
    for part in converted.parts:
        assert np.abs(f64(part.codec.keys.mean) - wanted).max() < 1e-4
    assert ((f64(kvfun.fetch(converted)[0]) - keys) ** 2).mean() < 0.01
    # a tail of another codec learns from what is sealed
    sealed = kvfun.seal(chain, told("rot-k4v4", rope))
    assert np.abs(f64(sealed.tail.codec.keys.mean) - wanted).max() < 1e-4


def test_a_side_whose_codec_stays_keeps_its_mean_and_its_bytes():
    cache = three()[0]
    codec = replace(told("rot-k4v4-log", ROPE), values=Plain())
    other = kvfun.convert(cache, codec)
    assert other.tail.codec.keys is cache.tail.codec.keys
    for a, b in zip(other.tail.keys, cache.tail.keys, strict=True):
        assert a is b
    same = kvfun.convert(cache, "rot-k4v4-log")
    assert encoded_bytes(same) == encoded_bytes(cache)


def test_a_conversion_to_other_bits_learns_from_the_same_raw_tokens():
    cache = three()[0]
    other = kvfun.convert(cache, told("rot-k5v4", ROPE))
    assert np.array_equal(f64(other.tail.codec.keys.mean), f64(cache.tail.codec.keys.mean))
    assert kvfun.convert(cache, "bf16").tail.codec.keys.spec == "bf16"


# -- means that are given -------------------------------------------------------------------------


def frozen(rope: Rope | None = ROPE, heads: int = 2) -> tuple[Codec, np.ndarray]:
    mean = np.random.default_rng(0).normal(size=(1, heads, 1, 64)) * 30
    keys = Centred(Rotated(4), rope, array(mean), frozen=True)
    return Codec(keys, Rotated(4)), mean


def test_a_given_mean_is_not_learnt():
    codec, mean = frozen()
    assert not learns(codec)
    keys = np.random.default_rng(1).normal(size=(2, 2, 50, 64)) + mean
    keys = moved(keys, ROPE)
    plain = kvfun.empty(codec)
    assert isinstance(plain, kvfun.KV)
    for cache in (plain, kvfun.empty(codec, raw_sinks=16)):
        full = grown(cache, array(keys), array(keys), 7, 30)
        used = full.codec.keys
        assert used.mean is codec.keys.mean
        difference = f64(kvfun.fetch(full)[0]) - keys
        assert (difference**2).mean() < 0.01
        converted = kvfun.convert(grown(kvfun.empty("plain"), array(keys), array(keys)), codec)
        assert converted.codec.keys.mean is codec.keys.mean
    valid, at = mx.ones((1, 1, 50, 1), mx.bool_), mx.arange(50)[None, None]
    assert codec.keys.calibrated(array(keys), valid, at) is codec.keys


def test_rope_is_told_to_those_that_have_no_mean_yet():
    codec, _ = frozen(rope=None)
    assert with_rope(codec, ROPE) is codec
    assert with_rope(Codec.of("kv4"), ROPE).spec == "kv4"
    assert with_rope(Codec.of("rot-k4v4"), ROPE).keys.rope is ROPE
    assert with_rope(with_rope(Codec.of("rot-k4v4"), ROPE), None).keys.rope is None


@pytest.mark.parametrize(
    "mean",
    [
        mx.zeros((1, 2, 1, 32)),
        mx.zeros((1, 2, 1, 128)),
        mx.zeros(64),
        mx.zeros((2, 64)),
        mx.zeros((1, 2, 64)),
        mx.zeros((1, 2, 7, 64)),
        mx.zeros((1, 1, 2, 1, 64)),
    ],
    ids=lambda x: str(x.shape),
)
def test_means_of_other_shapes_are_errors(mean):
    codec = Codec(Centred(Rotated(4), ROPE, mean, frozen=True), Rotated(4))
    with pytest.raises(CodecError, match="mean"):
        codec.keys.check(64)
    block = mx.zeros((1, 2, 3, 64))
    with pytest.raises(CodecError, match="mean"):
        kvfun.append(kvfun.empty(codec), block, block)


@pytest.mark.parametrize("shape", [(1, 3, 1, 64), (4, 2, 1, 64)])
def test_a_mean_of_other_rows_or_heads_is_an_error(shape):
    codec = Codec(Centred(Rotated(4), ROPE, mx.zeros(shape), frozen=True), Rotated(4))
    block = mx.zeros((2, 2, 3, 64))
    with pytest.raises(CodecError, match=r"mean"):
        kvfun.append(kvfun.empty(codec), block, block)


@pytest.mark.parametrize(
    ("codec", "dim", "words"),
    [
        (Centred(Rotated(4), Rope.of(128)), 64, "rot4-c: RoPE of 128 numbers for a head_dim of 64"),
        (Centred(Rotated(4)), 72, "no fast rotation of 72"),
        (Centred(Affine(4)), 80, "no multiple of the group size"),
        (
            Centred(Rotated(4, statistics="bal", basis=(mx.zeros((1, 2, 32, 32)),) * 2)),
            64,
            "no basis of",
        ),
    ],
)
def test_other_head_dims_are_errors(codec, dim, words):
    with pytest.raises(CodecError, match=words):
        codec.check(dim)


def test_what_cannot_be_batched():
    keys = array(biased(0, 1, 2, 30, 64)[0])

    def cache(codec: Codec, **options):
        return grown(kvfun.empty(codec, **options), keys, keys)

    known = cache(told("rot-k4v4", ROPE))
    for rope in (None, Rope.of(32), Rope.of(64, base=1e6), Rope.of(64, traditional=True)):
        other = cache(told("rot-k4v4", rope))
        with pytest.raises(CodecError, match="RoPE"):
            kvfun.concat([known, other])
        with pytest.raises(CodecError, match="RoPE"):
            kvfun.concat([other, known])
    equal = cache(told("rot-k4v4", Rope.of(64, base=10_000.0)))
    assert kvfun.batch_size(kvfun.concat([known, equal])) == 2
    given = cache(frozen()[0], raw_sinks=16)
    for pair in ((known, given), (given, known)):
        with pytest.raises(CodecError, match="given"):
            kvfun.concat(pair)
    with pytest.raises(CodecError, match="convert one first"):
        kvfun.concat([known, cache(told("rot-k3v3", ROPE))])
    with pytest.raises(GeometryError):
        kvfun.concat([known, cache(told("rot-k4v4", ROPE), raw_sinks=4)])


def test_what_cannot_be_batched_for_its_shape_is_said_so():
    codec, _ = frozen()
    cache = kvfun.append(kvfun.empty(codec), mx.zeros((1, 2, 3, 64)), mx.zeros((1, 2, 3, 64)))
    three_heads = kvfun.append(
        kvfun.empty(frozen(heads=3)[0]), mx.zeros((1, 3, 3, 64)), mx.zeros((1, 3, 3, 64))
    )
    with pytest.raises((ShapeError, CodecError)):
        kvfun.concat([cache, three_heads])


# -- decoding and scores --------------------------------------------------------------------------


def centred(spec: str, rope: Rope | None, batch: int = 2) -> tuple[Centred, mx.array]:
    """A codec that has learnt a mean, and the keys it learnt from."""
    keys = array(biased(0, batch, 2, 30, 64, rope=rope, size=30.0)[0])
    codec = told(spec, rope).keys
    valid = mx.ones((1, 1, 30, 1), mx.bool_)
    return codec.calibrated(keys, valid, mx.arange(30)[None, None]), keys


def with_positions(codec: Centred, planes, positions: mx.array):
    return (*planes, positions[..., None]) if codec.positional else planes


INNER = ["rot4-c", "rot3-g32-log-c", "rot2-tcq-c", "kv4-f16-c", "mxfp8-c"]


def side(spec: str, rope: Rope | None, batch: int = 2) -> tuple[Centred, mx.array]:
    if spec != "mxfp8-c":
        return centred(spec, rope, batch)
    codec, keys = centred("kv8-c", rope, batch)
    return replace(codec, codec=parse("mxfp8").keys), keys


@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize("spec", INNER)
def test_scores_of_the_mean_are_what_whole_keys_score_more(spec, name):
    """Bound to the angles of a run of positions, of all positions below some, or of none."""
    codec, keys = side(spec, ROPES[name])
    queries, positions = vectors(3, 2, 2, 5, 64), mx.arange(30)[None, None]
    planes = with_positions(codec, codec.encode(keys, (0,)), positions)
    whole = f64(queries) @ f64(codec.decode(planes)).swapaxes(-1, -2)
    left = f64(queries) @ f64(codec.codec.decode(codec.of_codec(planes))).swapaxes(-1, -2)
    for bound in (codec, codec.bound(30), codec.bound(77), codec.bound(30, (0, 30))):
        more = bound.mean_scores(queries, planes)
        assert more.dtype == mx.float32
        assert np.abs(whole - left - f64(more)).max() < 1e-5 * np.abs(whole).max()
        assert raw(bound.decode(planes)) == raw(codec.decode(planes))
    assert replace(codec, mean=None).mean_scores(queries, planes) is None


@pytest.mark.parametrize("rows", [1, 2])
def test_scores_of_rows_that_have_positions_of_their_own(rows):
    codec, _ = centred("rot4-c", ROPE)
    positions = mx.array([[[7, 3, 200, 64, 65]], [[0, 1, 2, 9000, 8999]]])[:rows]
    keys = vectors(1, 2, 2, 5, 64)
    planes = (*codec.encode(keys, positions[:, 0]), positions[..., None])
    queries = vectors(2, 2, 2, 3, 64)
    whole = f64(queries) @ f64(codec.decode(planes)).swapaxes(-1, -2)
    left = f64(queries) @ f64(codec.codec.decode(planes[:-1])).swapaxes(-1, -2)
    for bound in (codec, codec.bound(9001)):
        more = f64(bound.mean_scores(queries, planes))
        assert np.abs(whole - left - more).max() < 1e-5 * np.abs(whole).max()


@pytest.mark.parametrize(
    ("start", "stop"), [(0, 1), (0, 256), (5, 70), (255, 257), (127, 129), (256, 512), (130, 1000)]
)
def test_products_of_a_run_are_those_of_its_positions(start, stop):
    tables, terms = Tables.of(ROPE, 1000, (start, stop)), vectors(3, 2, 2, 3, ROPE.dims)
    found = tables.products(terms, stop - start)
    wanted = f64(terms) @ f64(mx.concatenate(ROPE.angles(mx.arange(start, stop)), axis=-1)).T
    assert found is not None
    assert found.shape == (2, 2, 3, stop - start)
    assert np.abs(f64(found) - wanted).max() < 2e-6 * np.abs(f64(terms)).max() * ROPE.dims
    assert tables.products(terms, stop - start + 1) is None
    assert Tables.of(ROPE, 1000).products(terms, 0) is None
    assert Tables.of(ROPE, 1000).products(terms, 5) is None


@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize("spec", INNER[:3])
def test_stored_keys_are_whole_keys_in_other_coordinates(spec, name):
    codec, keys = centred(spec, ROPES[name])
    planes = with_positions(codec, codec.encode(keys, (0,)), mx.arange(30)[None, None])
    whole = f64(codec.decode(planes))
    assert (
        np.abs(f64(codec.rotated.enter(array(whole))) - f64(codec.decode_stored(planes))).max()
        < 2e-4
    )
    assert np.abs(f64(codec.rotated.leave(codec.decode_stored(planes))) - whole).max() < 2e-4


def test_a_codec_that_does_not_rotate_says_so():
    with pytest.raises(CodecError, match="kv4-c does not rotate"):
        _ = parse("kv4-c").keys.rotated


@pytest.mark.parametrize("name", ROPES)
def test_positions_may_come_as_starts_or_one_by_one(name):
    codec, keys = centred("rot4-c", ROPES[name])
    at = mx.arange(9, 39)
    wanted = codec.encode(keys, (9,))
    for positions in ([9], (9, 9), at[None], mx.stack([at, at]), at[None, None]):
        for a, b in zip(codec.encode(keys, positions), wanted, strict=True):
            assert raw(a) == raw(b)
    rows = codec.encode(keys, (9, 100))
    other = codec.encode(keys, (100,))
    for a, b, c in zip(rows, wanted, other, strict=True):
        assert raw(a[:1]) == raw(b[:1])
        assert raw(a[1:]) == raw(c[1:])


@pytest.mark.parametrize("spec", ["rot4-c", "kv4-c", "kv8-g32-f16-c", "rot3-g32-c"])
def test_it_is_the_codec_inside_but_for_the_mean(spec):
    codec = parse(spec).keys
    assert isinstance(codec, Centred)
    assert isinstance(codec, VectorCodec)
    assert codec.spec == spec
    assert (codec.bits, codec.options) == (codec.codec.bits, codec.codec.options)
    assert codec.width(64) == codec.codec.width(64)
    assert codec.vector_nbytes(64, mx.bfloat16) == codec.codec.vector_nbytes(64, mx.bfloat16)
    x = vectors(0, 1, 2, 5, 64)
    for a, b in zip(codec.encode(x), codec.codec.encode(x), strict=True):
        assert raw(a) == raw(b)
    assert raw(codec.decode(codec.encode(x))) == raw(codec.codec.decode(codec.codec.encode(x)))
    assert codec.mean_at(None).shape == (1, 1, 1, 1)


def test_a_padded_codec_has_no_mean_where_it_is_padded():
    codec = Centred(Affine(4, 64, pad=True))
    keys = vectors(0, 1, 2, 20, 80, kind="offset")
    codec = codec.calibrated(keys, mx.ones((1, 1, 20, 1), mx.bool_), mx.arange(20)[None, None])
    assert codec.mean.shape == (1, 2, 1, 80)
    planes = codec.encode(keys)
    decoded = f64(codec.decode(planes))
    assert decoded.shape[-1] == 128
    assert np.abs(decoded[..., :80] - f64(keys)).max() < 0.6
    queries = mx.pad(vectors(1, 1, 2, 3, 80), [(0, 0)] * 3 + [(0, 48)])
    more = f64(codec.mean_scores(queries, planes))
    left = f64(codec.codec.decode(planes))
    wanted = f64(queries) @ (decoded - left).swapaxes(-1, -2)
    assert np.abs(more - wanted).max() < 1e-3


@pytest.mark.parametrize("spec", ["rot-k4v4-s1", "rot-k3v3-g32-log-s1", "kv8-g32-f16-c"])
def test_a_row_that_has_learnt_nothing_is_the_same_beside_one_that_has(spec):
    """Down to the signs of zeros, which a rotation back gives and adding a mean takes away."""
    learnt = kvfun.convert(
        kvfun.append(kvfun.empty("plain"), *[mx.random.normal((1, 2, 20, 64))] * 2), spec
    )
    zeros = mx.zeros((1, 2, 3, 64))
    fresh = kvfun.append(kvfun.empty(spec, raw_sinks=0), zeros, zeros)
    beside = kvfun.unstack(kvfun.stack([fresh, learnt]))[0]
    for one, other in zip(kvfun.fetch(fresh), kvfun.fetch(beside), strict=True):
        assert mx.array_equal(one.view(mx.uint32), other.view(mx.uint32)).item()


def test_queries_that_are_all_padding_are_finite():
    """What is read then is a column of a negative position, for which there are no angles."""
    x = mx.random.normal((1, 2, 100, 64))
    told = with_rope(Codec.of("rot-k4v4-s1"), Rope.of(64))
    learnt = kvfun.convert(kvfun.append(kvfun.empty("plain"), x, x), told).codec
    cache = kvfun.append(
        kvfun.empty(learnt, left_padding=[70], raw_sinks=0), x[:, :, :2], x[:, :, :2]
    )
    queries = mx.random.normal((1, 4, 1, 64))
    for phase in ("decode", "window"):
        out = kvfun.attend(cache, queries, phase=phase)
        assert out.shape == queries.shape
        assert mx.all(mx.isfinite(out)).item()
