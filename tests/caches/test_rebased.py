"""Sinks right before the window: as positions counted within the cache have it."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvfun
from kvfun import rounds, tree
from kvfun.codecs import Rope
from kvfun.errors import GeometryError, RollbackError, UnsupportedError
from kvfun.kernels import merge, sink_part

from .test_delayed import block, same

ROPES = (Rope.of(64), Rope.of(32, base=500.0, traditional=True), Rope.of(64, scale=0.5))


def turned(x, rope, positions):
    return rope.rotated(x, rope.angles(mx.array(list(positions), dtype=mx.int32)))


def fed(rope, window, sinks, lengths, batch=1, spec="plain", seed=0):
    """The cache, and keys (before RoPE) and values of all tokens."""
    total = sum(lengths)
    keys, values = block(seed, total, batch)
    cache = kvfun.rebased(kvfun.empty(spec, window=window, sinks=sinks, raw_sinks=0), rope)
    at = 0
    for length in lengths:
        k = turned(keys[:, :, at : at + length], rope, range(at, at + length))
        cache = kvfun.append(cache, k, values[:, :, at : at + length])
        at += length
    return cache, keys, values


def streaming(queries, keys, values, rope, window, sinks, offset, logits=None):
    """StreamingLLM by its definition: what is seen gets positions 0, 1, 2, ... of its own."""
    outs = []
    for i in range(queries.shape[2]):
        t = offset - queries.shape[2] + i
        seen = [p for p in range(t + 1) if p < sinks or p > t - window]
        k = turned(keys[:, :, mx.array(seen)], rope, range(len(seen)))
        q = turned(queries[:, :, i : i + 1], rope, [len(seen) - 1])
        k, v = [mx.repeat(x, 2, axis=1) for x in (k, values[:, :, mx.array(seen)])]
        scores = (q @ k.swapaxes(-1, -2)) * 64**-0.5
        if logits is not None:
            extra = mx.broadcast_to(logits[None, :, None, None], (*scores.shape[:3], 1))
            weights = mx.softmax(mx.concatenate([scores, extra], axis=-1), axis=-1)[..., :-1]
        else:
            weights = mx.softmax(scores, axis=-1)
        outs.append(weights @ v)
    return mx.concatenate(outs, axis=2)


@given(
    rope=st.sampled_from(ROPES),
    window=st.integers(1, 9),
    sinks=st.integers(1, 4),
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    batch=st.integers(1, 2),
    logits=st.booleans(),
)
def test_it_is_streaming_llm_however_tokens_are_fed(rope, window, sinks, lengths, batch, logits):
    cache, keys, values = fed(rope, window, sinks, lengths, batch)
    offset, last = sum(lengths), lengths[-1]
    q0 = mx.random.normal((batch, 4, last, 64), key=mx.random.key(3))
    q = turned(q0, rope, range(offset - last, offset))
    extra = mx.array([0.3, -1.0, 1.0, 0.0]) if logits else None
    expected = streaming(q0, keys, values, rope, window, sinks, offset, extra)
    for phase in ("window", "committed", *(["decode"] if last == 1 else [])):
        out = kvfun.attend(cache, q, phase=phase, sinks=extra)
        assert mx.allclose(out, expected, atol=5e-5).item()
    part = kvfun.attend(cache, q, phase="partial")
    whole = merge([part, sink_part(extra, part)]) if logits else merge([part])
    assert mx.allclose(whole.out, expected, atol=5e-5).item()


@given(window=st.integers(1, 9), total=st.integers(1, 40), seed=st.integers(0, 3))
def test_what_is_fetched_for_one_token_is_where_it_sees_it(window, total, seed):
    rope = ROPES[0]
    cache, keys, values = fed(rope, window, 2, [total], seed=seed)
    k, v = kvfun.fetch(cache)
    seen = [p for p in range(total) if p < 2 or p > total - 1 - window]
    own = turned(keys[:, :, mx.array(seen)], rope, range(len(seen)))
    q0 = mx.random.normal((1, 2, 1, 64), key=mx.random.key(seed))
    here, there = turned(q0, rope, [len(seen) - 1]), turned(q0, rope, [total - 1])
    assert np.allclose(
        np.array(there @ k.swapaxes(-1, -2)), np.array(here @ own.swapaxes(-1, -2)), atol=2e-4
    )
    assert mx.array_equal(v, values[:, :, mx.array(seen)]).item()


def test_as_long_as_nothing_is_dropped_it_is_the_window():
    rope = ROPES[0]
    cache, *_ = fed(rope, 6, 2, [8])
    q = mx.random.normal((1, 4, 3, 64))
    one, other = [kvfun.attend(c, q, phase="window") for c in (cache, cache.inner)]
    assert mx.array_equal(one, other).item()


def test_it_makes_a_difference():
    cache, *_ = fed(ROPES[0], 6, 2, [60])
    q = mx.random.normal((1, 4, 1, 64))
    one, other = [kvfun.attend(c, q) for c in (cache, cache.inner)]
    assert mx.abs(one - other).max().item() > 1e-2


@pytest.mark.parametrize("spec", ["kv4", "turbo-k8v3", "rot-k4v4", "bf16"])
def test_encoded_sinks_and_windows_are_read_as_they_are_stored(spec):
    rope = ROPES[0]
    cache, *_ = fed(rope, 8, 3, [20, 3], spec=spec)
    q = mx.random.normal((1, 4, 1, 64), key=mx.random.key(1))
    k, v = [mx.repeat(x.astype(mx.float32), 2, axis=1) for x in kvfun.fetch(cache)]
    dense = mx.softmax(q @ k.swapaxes(-1, -2) * 64**-0.5, axis=-1) @ v
    exact = spec in ("kv4", "rot-k4v4")  # of others the turned sinks are rounded to 16 bits
    assert mx.allclose(kvfun.attend(cache, q), dense, atol=1e-4 if exact else 1e-2).item()


def test_rows_of_different_lengths_have_distances_of_their_own():
    rope = ROPES[0]
    made = [fed(rope, 5, 2, [n], seed=n)[0] for n in (4, 30, 11)]
    batch = kvfun.stack(made)
    k, v = block(50, 2, 3)
    batch = kvfun.append(batch, k, v)
    made = [kvfun.append(c, k[i : i + 1], v[i : i + 1]) for i, c in enumerate(made)]
    q = mx.random.normal((3, 4, 2, 64), key=mx.random.key(1))
    out = kvfun.attend(batch, q, phase="window")
    for i, cache in enumerate(made):
        one = kvfun.attend(cache, q[i : i + 1], phase="window")
        assert mx.allclose(out[i : i + 1], one, atol=3e-5).item()
    assert all(isinstance(row, kvfun.Rebased) for row in kvfun.unstack(batch))


def test_the_other_verbs_are_the_windows():
    cache, *_ = fed(ROPES[0], 5, 2, [30])
    inner = cache.inner
    assert kvfun.offsets(cache) == (30,)
    assert kvfun.size(cache) == kvfun.size(inner) == 7
    assert kvfun.max_rollback(cache) == kvfun.max_rollback(inner)
    back = kvfun.rollback(cache, 3)
    assert isinstance(back, kvfun.Rebased)
    assert same(kvfun.fetch(back.inner), kvfun.fetch(kvfun.rollback(inner, 3)))
    assert kvfun.convert(cache, "kv8").codec.spec == "kv8"
    with pytest.raises(RollbackError):
        kvfun.rollback(cache, 31)
    turn = kvfun.append(rounds.begin(cache, 2), *block(9, 3))
    assert kvfun.offsets(rounds.rollback(turn, 1)) == (31,)
    leaves, structure = tree.flatten(cache)
    assert tree.equal(tree.unflatten(structure, leaves), cache)
    with pytest.raises(UnsupportedError, match="different distances"):
        kvfun.fetch(cache, queries=2)


@pytest.mark.parametrize("options", [{}, {"window": 4}, {"window": 4, "sinks": 1, "chunk": 3}])
def test_what_has_no_sinks_behind_a_window(options):
    with pytest.raises(GeometryError, match="window with sinks"):
        kvfun.rebased(kvfun.empty("plain", **options), ROPES[0])
    with pytest.raises(UnsupportedError, match="Chain"):
        kvfun.rebased(kvfun.empty("kv4", window=4, sinks=2, raw_sinks=2), ROPES[0])
