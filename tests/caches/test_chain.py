"""Examples, memory and bad input for chains; what holds for every chain is in the laws."""

from __future__ import annotations

import gc

import mlx.core as mx
import numpy as np
import pytest

import kvfun
from kvfun import errors, tree
from kvfun.caches import with_reserve
from kvfun.geometry import round_up
from kvfun.kernels import UNFUSED, merge
from kvfun.testing import Shape, dense_attention, digest, same, small_steps

SHAPE = Shape(kv_heads=2, head_dim=64, value_dim=128)


def block(tokens: int, seed: int = 5, batch: int = 1, shape: Shape = SHAPE):
    return shape.block(seed, batch, tokens)


def queries(count: int = 1, heads: int = 4, batch: int = 1):
    return mx.random.normal((batch, heads, count, 64), key=mx.random.key(count))


def chain(spec: str = "kv4", tokens: int = 100, batch: int = 1, **options) -> kvfun.Chain:
    options = options or {"residual": 8, "block": 4, "raw_sinks": 3}
    cache = kvfun.append(kvfun.empty(spec, **options), *block(tokens, batch=batch))
    assert isinstance(cache, kvfun.Chain)
    return cache


def stored(cache: kvfun.Chain) -> list[tuple[str, tuple[int, int]]]:
    """The codec of every part, and the positions that it holds of the first row."""
    parts = []
    for part in cache.parts:
        row = part.geometry.rows[0]
        first = 0 if part.geometry.policy.sinks else row.first
        parts.append((part.codec.spec, (first, row.offset)))
    return parts


# -- what is stored where -------------------------------------------------------------------------


def test_sinks_and_the_newest_tokens_stay_as_they_came():
    cache = chain(tokens=100)
    assert stored(cache) == [("plain", (0, 3)), ("kv4", (3, 91)), ("plain", (91, 100))]
    (keys, _), (got, _) = block(100), kvfun.fetch(cache)
    same_columns = np.flatnonzero(np.array(keys == got).all(axis=(0, 1, 3)))
    assert {0, 1, 2, *range(91, 100)} <= set(same_columns.tolist())


@pytest.mark.parametrize("tokens", range(1, 40))
def test_the_residual_is_between_its_size_and_a_block_more(tokens):
    cache, k, v = kvfun.empty("kv4", residual=8, block=4), *block(tokens)
    for i in range(tokens):
        cache = kvfun.append(cache, k[:, :, i : i + 1], v[:, :, i : i + 1])
    (_, past), (_, tail) = stored(cache)
    assert past[1] == tail[0]
    assert past[1] % 4 == 0
    assert tokens < 12 or 8 <= tail[1] - tail[0] < 12
    same(cache, kvfun.append(kvfun.empty("kv4", residual=8, block=4), k, v), "one by one")


def test_raw_sinks_alone():
    cache = chain(raw_sinks=3)
    assert stored(cache) == [("plain", (0, 3)), ("kv4", (3, 100))]
    assert kvfun.max_rollback(cache) == (100,)


def test_attention_sinks_are_raw_sinks():
    cache = chain(tokens=100, window=16, sinks=5, residual=8, block=4)
    assert stored(cache)[0] == ("plain", (0, 5))
    assert kvfun.size(cache) == 21


def test_a_rollback_into_the_past_leaves_it_encoded():
    cache = kvfun.rollback(chain(tokens=100), 20)
    assert stored(cache) == [("plain", (0, 3)), ("kv4", (3, 80)), ("plain", (80, 80))]
    again = kvfun.append(cache, *block(9, seed=6))
    assert stored(again)[1:] == [("kv4", (3, 80)), ("plain", (80, 89))]
    again = kvfun.append(again, *block(3, seed=7))
    assert stored(again)[1:] == [("kv4", (3, 84)), ("plain", (84, 92))]
    keys, values = kvfun.fetch(kvfun.rollback(again, 12))
    before, old = kvfun.fetch(kvfun.rollback(chain(tokens=100), 20))
    assert mx.array_equal(keys, before)
    assert mx.array_equal(values, old)


def test_a_rollback_into_the_sinks():
    cache = kvfun.rollback(chain(tokens=100), 98)
    assert kvfun.offsets(cache) == (2,)
    cache = kvfun.append(cache, *block(30, seed=6))
    assert stored(cache) == [("plain", (0, 3)), ("kv4", (3, 23)), ("plain", (23, 32))]


def test_sealed_segments_keep_their_codec():
    k, v = block(10)
    cache = kvfun.seal(kvfun.append(kvfun.empty("kv4"), k, v), "bf16")
    cache = kvfun.seal(kvfun.append(cache, k, v), "kv8")
    cache = kvfun.append(cache, k, v)
    assert stored(cache) == [("kv4", (0, 10)), ("bf16", (10, 20)), ("kv8", (20, 30))]
    back = kvfun.append(kvfun.rollback(cache, 25), k, v)
    assert stored(back) == [("kv4", (0, 5)), ("bf16", (5, 5)), ("kv8", (5, 15))]
    assert {part.codec.spec for part in kvfun.convert(back, "kv3").parts} == {"kv3"}


def test_sealing_copies_nothing_and_leaves_the_cache_alone():
    cache = kvfun.append(kvfun.empty("kv4"), *block(50))
    before, planes = digest(cache), cache.keys
    sealed = kvfun.seal(cache)
    assert sealed.segments[0] is cache
    assert kvfun.nbytes(sealed) == kvfun.nbytes(cache)
    longer = kvfun.append(sealed, *block(5, seed=6))
    assert longer.segments[0].keys is planes
    assert digest(cache) == before
    assert kvfun.codecs.format(sealed.codec) == "kv4"


def test_a_shell_of_an_empty_cache_can_be_sealed():
    cache = kvfun.append(kvfun.seal(kvfun.empty("kv4"), "kv8"), *block(5))
    same(cache, kvfun.append(kvfun.empty("kv8"), *block(5)), "sealed when empty")


def test_converting_keeps_what_is_raw():
    assert [codec for codec, _ in stored(kvfun.convert(chain(), "kv8"))] == [
        "plain",
        "kv8",
        "plain",
    ]
    assert [codec for codec, _ in stored(kvfun.convert(chain(raw_sinks=3), "kv8"))] == [
        "plain",
        "kv8",
    ]


# -- reads ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 5, 30, 100])
@pytest.mark.parametrize("options", [{}, {"residual": 8}, {"raw_sinks": 3}, {"residual": 40}])
def test_attention_is_that_over_the_fetched_columns(count, options):
    cache, q = chain(**options), queries(count)
    phase = "decode" if count == 1 else "window"
    out = np.array(kvfun.attend(cache, q, phase=phase))[0]
    keys, values = (np.array(x)[0] for x in kvfun.fetch(cache, queries=count))
    mask = np.arange(100) <= np.arange(100 - count, 100)[:, None]
    wanted, _ = dense_attention(np.array(q)[0], keys, values, scale=64**-0.5, mask=mask)
    assert np.abs(out - wanted).max() < 1e-5


@pytest.mark.parametrize("options", [{"residual": 8, "block": 4, "raw_sinks": 3}, {"raw_sinks": 3}])
def test_committed_reads_are_decodes_bit_for_bit(options):
    """Without a block that becomes due in between."""
    start, (k, v), q = chain(tokens=100, **options), block(2, seed=6), queries(2)
    outs, cache = [], start
    for i in range(2):
        cache = kvfun.append(cache, k[:, :, i : i + 1], v[:, :, i : i + 1])
        outs.append(kvfun.attend(cache, q[:, :, i : i + 1]))
    together = kvfun.attend(kvfun.append(start, k, v), q, phase="committed")
    assert mx.array_equal(together, mx.concatenate(outs, axis=2))


@pytest.mark.parametrize("spec", ["plain", "kv4"])
@pytest.mark.parametrize("window", [None, 4])
def test_committed_reads_of_one_buffer(spec, window):
    start = kvfun.append(kvfun.empty(spec, window=window, sinks=1), *block(20, batch=2))
    (k, v), q, cache, outs = block(3, 6, batch=2), queries(3, batch=2), start, []
    for i in range(3):
        cache = kvfun.append(cache, k[:, :, i : i + 1], v[:, :, i : i + 1])
        outs.append(kvfun.attend(cache, q[:, :, i : i + 1]))
    together = kvfun.attend(kvfun.append(start, k, v), q, phase="committed")
    assert mx.array_equal(together, mx.concatenate(outs, axis=2))


@pytest.mark.parametrize("cache", [chain(), kvfun.append(kvfun.empty("kv4"), *block(100))])
def test_partial_reads_merge_with_others(cache):
    q, (k, v) = queries(), block(7, seed=9)
    other = kvfun.append(kvfun.empty("plain"), k, v)
    parts = [kvfun.attend(part, q, phase="partial") for part in (cache, other)]
    for out, lse in parts:
        assert out.dtype == lse.dtype == mx.float32
        assert out.shape == (1, 4, 1, 128)
        assert lse.shape == (1, 4, 1)
    out, _ = merge(parts)
    keys, values = kvfun.fetch(cache)
    keys, values = mx.concatenate([keys, k], axis=2), mx.concatenate([values, v], axis=2)
    wanted = mx.fast.scaled_dot_product_attention(q, keys, values, scale=64**-0.5)
    assert mx.abs(out - wanted).max().item() < 1e-5


def test_a_read_of_one_part_is_that_of_a_plain_cache():
    young = chain(tokens=10, residual=16)
    plain = kvfun.append(kvfun.empty("plain"), *block(10))
    assert mx.array_equal(kvfun.attend(young, queries()), kvfun.attend(plain, queries()))


def test_a_fetch_has_one_dtype_whatever_is_filled():
    shape = Shape(2, 64, 64, mx.bfloat16, mx.bfloat16)
    for spec in ("f32", "kv4", "bf16"):
        cache = kvfun.empty(spec, residual=8, block=4, raw_sinks=2)
        dtypes = set()
        for _ in range(4):
            cache = kvfun.append(cache, *block(5, shape=shape))
            dtypes |= {x.dtype for x in kvfun.fetch(cache)}
        assert dtypes == {mx.float32 if spec == "f32" else mx.bfloat16}


def test_a_reserve_set_later():
    k, v = block(1)
    with small_steps():
        cache = kvfun.empty("kv4", window=8, residual=4, block=4)
        for _ in range(50):
            cache = kvfun.append(cache, k, v)
        cache = with_reserve(cache, 20)
        for step in range(60):
            cache = kvfun.append(cache, k, v)
            assert step < 30 or kvfun.max_rollback(cache)[0] >= 20


# -- memory ---------------------------------------------------------------------------------------


def test_bytes_to_the_last_one():
    cache = chain(tokens=1000, residual=64, raw_sinks=4)
    raw = 2 * (64 + 128) * 4
    encoded = cache.codec.token_nbytes(2, 64, 128, mx.float32)
    past = cache.segments[1].geometry.capacity
    assert past == round_up(cache.tail.geometry.rows[0].first - 4)
    assert kvfun.nbytes(cache) == raw * (4 + 64 + 64) + encoded * past


def test_raw_sinks_have_no_spare_columns_in_batches_either():
    batch = kvfun.stack([chain(tokens=100), chain(tokens=37)])
    for cache in (chain(), batch, kvfun.take(batch, [1, 0, 1]), *kvfun.unstack(batch)):
        assert cache.segments[0].geometry.capacity == 3
        assert all(plane.shape[2] == 3 for plane in cache.segments[0].keys)


def test_a_block_that_left_the_tail_is_not_kept_alive():
    cache = chain(tokens=4000, residual=8, block=4, raw_sinks=3)
    tree.evaluate(cache)
    gc.collect()
    before = mx.get_active_memory()
    held = kvfun.nbytes(cache)
    del cache
    gc.collect()
    assert before - mx.get_active_memory() <= held + (1 << 16)


def test_a_token_is_written_in_place():
    cache = chain(tokens=100, residual=2000, block=64)
    k, v = block(1)
    tree.evaluate(cache)
    for _ in range(3):
        cache = kvfun.append(cache, k, v)
        tree.evaluate(cache)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    cache = kvfun.append(cache, k, v)
    tree.evaluate(cache)
    assert mx.get_peak_memory() - before < kvfun.nbytes(cache) / 4


@pytest.mark.parametrize("options", [{}, {"residual": 64, "raw_sinks": 4}])
def test_a_chunk_over_a_long_past_allocates_less_than_plain_numbers_do(options):
    """2,048 tokens at 32k: cache and all that attention allocates, against bf16 unfused."""
    shape = Shape(1, 64, 64, mx.bfloat16, mx.bfloat16)
    ours = peak_of_a_chunk(kvfun.empty("kv4", **options), None, shape)
    plain = peak_of_a_chunk(kvfun.empty("bf16"), None, shape)
    unfused = peak_of_a_chunk(kvfun.empty("bf16"), UNFUSED, shape)
    assert ours <= 0.35 * unfused
    assert ours < plain


def peak_of_a_chunk(cache, kernels, shape: Shape) -> int:
    """The peak above what was there before, the chunk's own numbers and result left out."""
    k = mx.random.normal((1, 1, 2048, 64)).astype(mx.bfloat16)
    q = mx.random.normal((1, 2, 2048, 64)).astype(mx.bfloat16)
    mx.eval(k, q)
    gc.collect()
    base = mx.get_active_memory()
    for _ in range(15):
        cache = kvfun.append(cache, k, k)
        tree.evaluate(cache)
    mx.reset_peak_memory()
    cache = kvfun.append(cache, k, k)
    mx.eval(kvfun.attend(cache, q, phase="window", kernels=kernels))
    return mx.get_peak_memory() - base


# -- bad input ------------------------------------------------------------------------------------


def raises(error, *words):
    return pytest.raises(error, match=".*".join(words) or None)


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ({"residual": -1}, ("residual", "-1")),
        ({"residual": 1.5}, ("residual", "1.5")),
        ({"residual": True}, ("residual", "True")),
        ({"raw_sinks": -3}, ("raw_sinks", "-3")),
        ({"residual": 8, "block": 0}, ("block", "0")),
    ],
)
def test_numbers_that_make_no_chain(numbers, words):
    with raises(errors.GeometryError, *words):
        kvfun.empty("kv4", **numbers)


def test_rows_that_cannot_be_sealed():
    with raises(errors.GeometryError, r"\(2,\)", "3 sinks"):
        kvfun.seal(kvfun.append(kvfun.empty("kv4", window=8, sinks=3), *block(2)))
    with raises(errors.GeometryError, "padding to come"):
        kvfun.seal(kvfun.append(kvfun.empty("kv4", left_padding=[3, 0]), *block(2, batch=2)))
    with raises(errors.ShapeError, "KV or a Chain", "int"):
        kvfun.seal(3)
    with raises(errors.SpecError, "kv9"):
        kvfun.seal(chain(), "kv9")


def test_sinks_in_a_sealed_segment_cannot_be_taken_back():
    cache = kvfun.seal(kvfun.append(kvfun.empty("kv4", window=8, sinks=3), *block(6)))
    assert kvfun.max_rollback(cache) == (3,)
    with raises(errors.RollbackError, "row 0 at offset 6", "3 sinks", "sealed"):
        kvfun.rollback(cache, 4)


def test_chains_that_cannot_be_one_batch():
    for other, error, words in (
        (chain(residual=9, block=4, raw_sinks=3), errors.GeometryError, ("ageing", "residual=9")),
        (chain(residual=8, block=4, raw_sinks=2), errors.GeometryError, ("front", "2")),
        (chain("kv8"), errors.CodecError, ("kv4", "kv8")),
        (kvfun.seal(chain()), errors.GeometryError, ("front", "3", "0")),
    ):
        with raises(error, *words):
            kvfun.concat([chain(), other])


def test_a_kernel_set_that_cannot_read_parts():
    kernels = {name: UNFUSED[name] for name in ("decode", "window")}
    with raises(errors.PhaseError, "'partial'", "decode"):
        kvfun.attend(chain(), queries(), kernels=kernels)


def test_reads_that_do_not_fit():
    with raises(errors.ShapeError, "empty"):
        kvfun.attend(kvfun.empty("kv4", residual=8), queries())
    with raises(errors.ShapeError, "101 queries", "100 tokens"):
        kvfun.attend(chain(), queries(101), phase="window")
    with raises(errors.ShapeError, r"\(3,\)"):
        kvfun.attend(chain(), queries(), sinks=mx.zeros(3))
    with raises(errors.PhaseError, "one query"):
        kvfun.attend(chain(), queries(2), phase="decode")
    with raises(errors.PhaseError, "verify"):
        kvfun.attend(chain(), queries(2), phase="verify")


def test_blocks_that_do_not_fit():
    k, v = block(3)
    for cache in (kvfun.empty("kv4", residual=8), chain()):
        with raises(errors.ShapeError):
            kvfun.append(cache, k[0], v[0])
        with raises(errors.DTypeError):
            kvfun.append(cache, k.astype(mx.int32), v)
    with raises(errors.CodecError, "80"):
        kvfun.append(
            kvfun.empty("kv4", residual=8), mx.zeros((1, 1, 2, 80)), mx.zeros((1, 1, 2, 64))
        )
