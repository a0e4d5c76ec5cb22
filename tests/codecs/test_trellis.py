"""The nearest path is found, whatever stands beside it, and every number is where it should be."""

import importlib
from itertools import product
from pathlib import Path

import hypothesis.strategies as st
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given

from kvfun.codecs import _trellis
from kvfun.codecs._trellis import BITS, STEP, check, decode, encode
from kvfun.codecs._trellis_tables import TABLES
from kvfun.errors import CodecError

ROOT = Path(__file__).parents[2]
EVERY = [(bits, dim) for bits in BITS for dim in (32, 64, 96, 128)]
FINDERS = (_trellis._many, _trellis._few)


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def raw(x):
    return bytes(memoryview(mx.contiguous(x).view(mx.uint8)))


def followed(words, bits, dim):
    """The numbers of a vector's words, bit by bit."""
    stream = "".join(f"{int(word):032b}" for word in words)
    state, numbers = 0, []
    for at in range(dim):
        for bit in stream[at * bits : (at + 1) * bits]:
            state = (2 * state + int(bit)) % 256
        numbers.append(TABLES[bits][state] / 8192)
    return np.array(numbers)


def least_error(y, bits, weights=None):
    """The least squared error of any path, ``[vectors]``: forward over all states, in float64."""
    y = np.asarray(y, np.float64)
    weights = np.ones_like(y) if weights is None else np.broadcast_to(weights, y.shape)
    table, states = np.array(TABLES[bits]) / 8192, np.arange(256)
    costs = np.full((len(y), 256), np.inf)
    costs[:, 0] = 0
    for at in range(y.shape[1]):
        after = np.full_like(costs, np.inf)
        for new in range(2**bits):
            to = ((states << bits) | new) & 255
            error = weights[:, at, None] * (y[:, at, None] - table[to]) ** 2
            np.minimum.at(after, (slice(None), to), costs + error)
        costs = after
    return costs.min(axis=1)


def error(y, words, bits, weights=1.0):
    numbers = np.array(decode(words, bits, y.shape[-1]), np.float64)
    return np.sum(weights * (y - numbers) ** 2, axis=-1)


# -- tables ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", BITS)
def test_a_table_has_256_opposite_numbers_of_16_bits(bits):
    table = np.array(TABLES[bits])
    assert table.shape == (256,)
    assert table.dtype.kind == "i"
    assert np.abs(table).max() < 2**15
    assert np.array_equal(table[128:], -table[:128])
    assert len(set(TABLES[bits])) > 250


@pytest.mark.parametrize("bits", BITS)
def test_a_states_number_is_the_mean_of_those_that_meet_it(bits):
    y = normal(1, 4000, 64)
    numbers = np.array(decode(encode(mx.array(y), bits), bits, 64, raw=True)).astype(int)
    table, at, counts = np.unique(numbers, return_inverse=True, return_counts=True)
    means = np.bincount(at.reshape(-1), y.reshape(-1)) / counts
    assert len(table) > 250
    noise = np.mean((y - numbers * STEP) ** 2) / np.mean(counts)
    assert np.average((means - table * STEP) ** 2, weights=counts) < 1.6 * noise


@pytest.fixture
def finder(monkeypatch):
    """The benchmark that finds the tables."""
    if not (ROOT / "bench").is_dir():
        pytest.skip("the benchmarks are not installed with kvfun")
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("bench.trellis_tables")


def test_the_tables_are_as_their_script_writes_them(finder):
    entries = [finder.rows(bits, TABLES[bits][:128]) for bits in BITS]
    assert finder.FILE.read_text() == finder.HEAD + "".join(entries) + finder.TAIL


def test_the_script_runs_and_finds_the_same_again(finder, capsys):
    for _ in range(2):
        finder.main(["--bits", "2", "--rounds", "60", "--starts", "2"])
    printed = [
        [line for line in half.splitlines() if not line.startswith("#")]
        for half in capsys.readouterr().out.split(finder.TAIL)
    ]
    assert printed[0] == printed[1]
    assert len(printed[0]) > 16
    search = finder.Search(2)
    start, later = [finder.found(search, 0, rounds) for rounds in (1, 60)]
    assert finder.distortion(search, later, 9, 4) < 0.95 * finder.distortion(search, start, 9, 4)


def test_the_scripts_paths_are_as_near_as_the_codecs(finder):
    y = normal(0, finder.DIM, finder.COUNT)
    half = (np.array(TABLES[3][:128]) / finder.UNITS).astype(np.float32)
    numbers = np.concatenate([half, -half])[finder.Search(3)(y, half)]
    found = error(y.T, encode(mx.array(y.T), 3), 3)
    assert np.allclose(np.sum((y - numbers) ** 2, axis=0), found, rtol=1e-4)


# -- words ----------------------------------------------------------------------------------------


@st.composite
def streams(draw):
    bits, dim = draw(st.sampled_from(EVERY))
    lead = draw(st.lists(st.integers(0, 3), max_size=3))
    seed = draw(st.integers(0, 2**32 - 1))
    words = np.random.default_rng(seed).integers(0, 2**32, (*lead, dim * bits // 32), np.uint32)
    return bits, dim, words


@given(streams())
def test_numbers_are_those_of_the_stream_bit_by_bit(stream):
    bits, dim, words = stream
    numbers = decode(mx.array(words), bits, dim)
    assert numbers.dtype == mx.float32
    assert numbers.shape == (*words.shape[:-1], dim)
    for at in np.ndindex(*words.shape[:-1]):
        assert np.array_equal(np.array(numbers)[at], followed(words[at], bits, dim))


@given(streams())
def test_raw_numbers_are_whole(stream):
    bits, dim, words = stream
    numbers = np.array(decode(mx.array(words), bits, dim, raw=True))
    assert numbers.dtype == np.float32
    assert np.array_equal(numbers, np.round(numbers))
    assert np.array_equal(numbers * STEP, np.array(decode(mx.array(words), bits, dim)))


@given(streams())
def test_what_lies_on_a_path_is_encoded_as_that_path(stream):
    bits, dim, words = stream
    y = decode(mx.array(words), bits, dim)
    assert not error(np.array(y), encode(y, bits), bits).any()


@pytest.mark.parametrize("bits", BITS)
def test_words_may_be_a_part_of_others(bits):
    words = mx.array(np.random.default_rng(0).integers(0, 2**32, (3, 2, 5, 2 * bits), np.uint32))
    numbers = decode(words, bits, 64)
    assert mx.array_equal(decode(words[:, :, 1:4], bits, 64), numbers[:, :, 1:4])
    turned = mx.contiguous(words.swapaxes(0, -1)).swapaxes(0, -1)
    assert mx.array_equal(decode(turned, bits, 64), numbers)


# -- the nearest path -----------------------------------------------------------------------------


@pytest.mark.parametrize("find", FINDERS)
@pytest.mark.parametrize(("bits", "dim"), [(1, 11), (2, 6), (3, 4), (4, 3)])
def test_no_other_path_is_nearer(find, bits, dim):
    y = 1.5 * normal(bits, 5, dim)
    found = np.array(find(mx.array(2 * y.T), None, bits))
    table, nearest = np.array(TABLES[bits]) / 8192, np.full(len(y), np.inf)
    for news in product(range(2**bits), repeat=dim):
        state, path = 0, []
        for new in news:
            state = ((state << bits) | new) & 255
            path.append(state)
        nearest = np.minimum(nearest, np.sum((y - table[path]) ** 2, axis=1))
    assert found.shape == (dim, len(y))
    before = np.concatenate([np.zeros((1, len(y)), int), found[:-1]])
    assert np.array_equal(found >> bits, before & (255 >> bits))
    assert np.allclose(np.sum((y - table[found.T]) ** 2, axis=1), nearest, rtol=1e-5)


@given(st.sampled_from(EVERY), st.sampled_from((1, 5, 60)), st.integers(0, 99))
def test_no_path_is_nearer_by_an_independent_search(shape, count, seed):
    bits, dim = shape
    y = normal(seed, count, dim) * np.float32(1 + seed % 3)
    found = error(y, encode(mx.array(y), bits), bits)
    assert np.allclose(found, least_error(y, bits), rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("count", [5, 60])
@pytest.mark.parametrize("bits", BITS)
def test_weights_count_errors(bits, count):
    y, weights = normal(0, count, 64), np.random.default_rng(1).uniform(0, 4, 64)
    weights = weights.astype(np.float32)
    words = encode(mx.array(y), bits, mx.array(weights))
    found = error(y, words, bits, weights)
    assert np.allclose(found, least_error(y, bits, weights), rtol=2e-5, atol=1e-4)
    assert (found < error(y, encode(mx.array(y), bits), bits, weights)).mean() > 0.9
    ones = mx.ones((count, 1))
    assert raw(encode(mx.array(y), bits, ones)) == raw(encode(mx.array(y), bits))


GATES = {(2, 64): 0.0805, (2, 128): 0.0780, (3, 64): 0.0215, (3, 128): 0.0208}


@pytest.mark.parametrize(("bits", "dim"), GATES)
def test_normal_numbers_are_this_near(bits, dim):
    y = normal(7, 4000, dim)
    assert error(y, encode(mx.array(y), bits), bits).mean() / dim < GATES[bits, dim]


# -- what stands beside ---------------------------------------------------------------------------


@pytest.mark.parametrize(("bits", "dim"), EVERY)
def test_a_vectors_words_do_not_depend_on_the_others(bits, dim):
    y = mx.array(normal(bits, 130, dim))
    words = encode(y, bits)
    for cut in (1, 30, 65, 129):
        apart = mx.concatenate([encode(y[:cut], bits), encode(y[cut:], bits)])
        assert raw(apart) == raw(words)
    order = np.random.default_rng(0).permutation(130)
    assert raw(encode(y[mx.array(order)], bits)) == raw(words[mx.array(order)])


@given(st.sampled_from(BITS), st.integers(1, 60), st.integers(2, 40), st.integers(0, 99))
def test_few_and_many_vectors_give_the_same_states(bits, count, dim, seed):
    twice = mx.array(normal(seed, dim, count))
    # coarse numbers, so that many paths are equally near
    for y in (twice, mx.round(twice)):
        few, many = [find(y, None, bits) for find in FINDERS]
        assert raw(few) == raw(many)
    weights = mx.array(np.random.default_rng(seed).uniform(0, 2, (dim, count)).astype(np.float32))
    few, many = [find(twice, weights, bits) for find in FINDERS]
    assert raw(few) == raw(many)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38, 0.0])
@pytest.mark.parametrize("bits", BITS)
def test_odd_vectors_leave_the_others_alone(bits, bad):
    y = normal(3, 100, 32)
    words = np.array(encode(mx.array(y), bits))
    y[17] = bad
    y[60, 5] = bad
    spoilt = encode(mx.array(y), bits)
    others = [at for at in range(100) if at not in (17, 60)]
    assert np.array_equal(np.array(spoilt)[others], words[others])
    assert np.isfinite(np.array(decode(spoilt, bits, 32))).all()
    alone = mx.concatenate([encode(mx.array(y[at : at + 1]), bits) for at in (17, 60)])
    assert np.array_equal(np.array(alone), np.array(spoilt)[[17, 60]])


@pytest.mark.parametrize("bits", BITS)
def test_blocks_do_not_show(monkeypatch, bits):
    y = mx.array(normal(4, 301, 32))
    weights = mx.array(np.random.default_rng(1).uniform(0, 2, (301, 1)).astype(np.float32))
    words, weighted = encode(y, bits), encode(y, bits, weights)
    for size in (1, 50, 100, 300, 301):
        monkeypatch.setattr(_trellis, "_BLOCK", size)
        assert raw(encode(y, bits)) == raw(words)
        assert raw(encode(y, bits, weights)) == raw(weighted)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("lead", [(), (1,), (3,), (2, 3), (2, 3, 5), (0,), (2, 0), (2, 0, 3)])
def test_axes_in_front_stay(bits, lead):
    y = mx.array(normal(5, *lead, 64))
    words = encode(y, bits)
    assert words.dtype == mx.uint32
    assert words.shape == (*lead, 2 * bits)
    assert decode(words, bits, 64).shape == y.shape
    flat = encode(y.reshape(-1, 64), bits)
    assert raw(words.reshape(-1, 2 * bits)) == raw(flat)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_halves_are_encoded_as_float32(dtype):
    y = mx.array(normal(6, 9, 64)).astype(dtype)
    assert raw(encode(y, 2)) == raw(encode(y.astype(mx.float32), 2))
    assert raw(encode(mx.contiguous(y.T).T, 2)) == raw(encode(y, 2))


def test_nothing_is_computed_before_it_is_asked_for_and_memory_is_bounded():
    y = mx.array(normal(8, 5000, 64))
    encode(y[:1], 2)
    mx.eval(y, _trellis._values(2))
    mx.synchronize()
    mx.reset_peak_memory()
    live = mx.get_active_memory()
    words = encode(y, 2)
    assert mx.get_peak_memory() - live < 2**16
    mx.eval(words)
    assert mx.get_peak_memory() - live < 400 * 64 * _trellis._BLOCK


# -- what cannot be -------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [0, 5, 8, -1, 2.0, True, "2", None])
def test_other_bits_are_errors(bits):
    for call in (
        lambda: check(bits, 64),
        lambda: encode(mx.zeros((2, 64)), bits),
        lambda: decode(mx.zeros((2, 4), mx.uint32), bits, 64),
    ):
        with pytest.raises(CodecError, match="bits must be one of"):
            call()


@pytest.mark.parametrize(
    ("bits", "dim"), [(1, 16), (2, 8), (2, 40), (3, 16), (3, 80), (4, 4), (2, 0)]
)
def test_dims_that_fill_no_words_are_errors(bits, dim):
    for call in (
        lambda: check(bits, dim),
        lambda: encode(mx.zeros((2, dim)), bits),
        lambda: decode(mx.zeros((2, 4), mx.uint32), bits, dim),
    ):
        with pytest.raises(CodecError, match="whole words"):
            call()


@pytest.mark.parametrize(
    "words", [mx.zeros((2, 3), mx.uint32), mx.zeros((2, 4), mx.int32), mx.zeros((2, 8), mx.uint16)]
)
def test_words_of_others_are_errors(words):
    with pytest.raises(CodecError, match="64 numbers of 2 bits"):
        decode(words, 2, 64)
