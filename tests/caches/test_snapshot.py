"""Snapshots: the same cache, sharing nothing, no larger than what it holds."""

from __future__ import annotations

import gc

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvfun
from kvfun import tree
from kvfun.recurrences import ShortConv
from kvfun.testing import chains, digest, layouts, small_steps
from kvfun.testing._checks import observe, same_seen


def block(seed, batch, tokens, dim=64):
    keys = mx.random.split(mx.random.key(seed))
    return [mx.random.normal((batch, 1, tokens, dim), key=key) for key in keys]


@given(
    recipe=st.one_of(layouts(), layouts(), chains()),
    seed=st.integers(0, 10**6),
    data=st.data(),
)
def test_whatever_comes_next_it_is_the_same_cache(recipe, seed, data):
    batch = len(recipe.padding) or data.draw(st.integers(1, 3))
    with small_steps():
        cache = other = recipe()
        for step in range(data.draw(st.integers(1, 6))):
            verb = data.draw(st.sampled_from(("append", "append", "append", "rollback", "take")))
            if verb == "append":
                tokens = block(seed + step, batch, data.draw(st.integers(1, 7)))
                cache, other = [kvfun.append(c, *tokens) for c in (cache, other)]
            elif verb == "rollback" and cache.layout is not None:
                most = min(*kvfun.max_rollback(cache), *kvfun.max_rollback(other), 9)
                count = data.draw(st.integers(0, most))
                cache, other = [kvfun.rollback(c, count) for c in (cache, other)]
            elif verb == "take" and cache.layout is not None:
                rows = data.draw(st.lists(st.integers(0, batch - 1), min_size=1, max_size=3))
                cache, other = [kvfun.take(c, rows) for c in (cache, other)]
                batch = len(rows)
            was = digest(other)
            kept, other = other, kvfun.snapshot(other)
            assert digest(kept) == was
            if cache.layout is None:
                continue
            assert kvfun.offsets(cache) == kvfun.offsets(other)
            assert kvfun.nbytes(other) <= kvfun.nbytes(kept)
            reserve = max(recipe.reserve, 1)
            for most, own in zip(kvfun.max_rollback(kept), kvfun.max_rollback(other), strict=True):
                assert own >= min(most, reserve)
            if max(kvfun.offsets(cache)) > 0:
                same_seen(observe(cache), observe(other), "a snapshot")


CONV = ShortConv(mx.ones((8, 4)))
RECORDS = {
    "plain": lambda: kvfun.empty("plain"),
    "kv4": lambda: kvfun.empty("kv4"),
    "window": lambda: kvfun.empty("kv8", window=32, sinks=4, raw_sinks=0),
    "chain": lambda: kvfun.empty("kv4", residual=16, raw_sinks=4),
    "learning": lambda: kvfun.empty("rot-k4v4-log"),
    "delayed": lambda: kvfun.empty("kv4", start=500),
    "ragged": lambda: kvfun.ragged([kvfun.empty("kv4"), kvfun.empty("plain")]),
    "cross": lambda: kvfun.cross(kvfun.empty("plain"), *block(7, 1, 300)),
    "recurrent": lambda: kvfun.recurrent(2),
}


def filled(name, tokens=700):
    cache = RECORDS[name]()
    if name == "recurrent":
        return kvfun.advance(cache, CONV, {"x": mx.random.normal((2, tokens, 8))})[1]
    return kvfun.append(cache, *block(3, 2, tokens))


def settled():
    gc.collect()
    mx.synchronize()
    mx.clear_cache()
    return mx.get_active_memory()


@pytest.mark.parametrize("name", RECORDS)
def test_it_keeps_nothing_of_the_cache_alive(name):
    cache = filled(name)
    mx.eval(tree.leaves(cache))
    base = settled() - kvfun.nbytes(cache)
    kept = kvfun.snapshot(cache)
    size = kvfun.nbytes(kept)  # known before anything is computed
    mx.eval(tree.leaves(kept))
    del cache
    assert settled() - base <= size + 16_384
    assert sum(x.nbytes for x in tree.leaves(kept)) == size


@pytest.mark.parametrize("name", [n for n in RECORDS if n not in ("ragged", "recurrent", "cross")])
def test_the_cache_is_written_in_place_again(name):
    cache = filled(name, 300)  # neither full, nor due to be converted
    mx.eval(tree.leaves(cache))
    kept = kvfun.snapshot(cache)
    mx.eval(tree.leaves(kept))
    tokens = block(5, 2, 1)
    mx.eval(tokens)
    before = settled()
    mx.reset_peak_memory()
    cache = kvfun.append(cache, *tokens)
    mx.eval(tree.leaves(cache))
    assert mx.get_peak_memory() - before < kvfun.nbytes(cache) / 4


@pytest.mark.parametrize("length", [100, 1000, 5000])
def test_a_window_takes_as_much_at_any_length(length):
    cache = kvfun.append(kvfun.empty("plain", window=64), *block(1, 1, length))
    assert kvfun.nbytes(kvfun.snapshot(cache)) == 65 * 2 * 64 * 4  # one to be rolled back


def test_several_at_once():
    caches = [filled("plain", 5), filled("recurrent", 5)]
    kept = kvfun.snapshot(caches)
    assert isinstance(kept, list)
    assert all(
        tree.leaves(a)[0] is not tree.leaves(b)[0] for a, b in zip(kept, caches, strict=True)
    )
    assert isinstance(kvfun.snapshot(tuple(caches)), tuple)
    assert kvfun.snapshot(kvfun.empty("kv4")).layout is None
    x = mx.array(3.5)
    assert kvfun.snapshot(x).item() == 3.5
    odd = mx.array([float("nan"), -0.0, float("inf")])
    assert mx.array_equal(kvfun.snapshot(odd).view(mx.uint32), odd.view(mx.uint32)).item()
