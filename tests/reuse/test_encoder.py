"""Encoder outputs by content."""

from __future__ import annotations

import threading

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvfun
from kvfun import tree
from kvfun.errors import BudgetError, CorruptError
from kvfun.reuse import EncoderOutputs, content_key
from kvfun.service import EncoderCache

CONTENTS = st.lists(
    st.one_of(
        st.binary(max_size=6),
        st.text(max_size=6),
        st.lists(st.integers(0, 3), max_size=4).map(lambda x: mx.array(x, mx.int32)),
        st.lists(st.integers(0, 3), max_size=4).map(lambda x: mx.array(x, mx.float32)),
    ),
    max_size=3,
)


def said(content):
    if isinstance(content, mx.array):
        return ("array", str(content.dtype), tuple(content.shape), tuple(content.tolist()))
    return (type(content).__name__, content)


@given(one=CONTENTS, other=CONTENTS, names=st.tuples(*[st.sampled_from(("a", "ab"))] * 2))
def test_keys_are_equal_where_contents_are(one, other, names):
    same = names[0] == names[1] and list(map(said, one)) == list(map(said, other))
    assert (content_key(names[0], *one) == content_key(names[1], *other)) == same


def test_keys_tell_apart_what_could_run_together():
    assert content_key("a", b"bc") != content_key("ab", b"c")
    assert content_key("a", b"b", b"c") != content_key("a", b"bc")
    assert content_key("a", b"1") != content_key("a", "1")
    assert content_key("a", mx.zeros((2, 3))) != content_key("a", mx.zeros((3, 2)))
    assert content_key("a", bytearray(b"x")) == content_key("a", memoryview(b"x"))


@given(
    sizes=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 40)), max_size=30),
    capacity=st.integers(160, 400),
)
def test_the_least_recently_used_go_first(sizes, capacity):
    """Against a plain list of keys, oldest first."""
    store, order, lengths = EncoderOutputs({}, capacity), [], {}
    for name, size in sizes:
        key = f"{name}:{size}"
        found, store = store.take(key)
        assert (found is None) == (key not in order)
        if found is None:
            old = store
            store = store.put(key, mx.zeros(size))
            assert [*old.entries] == order  # the old value is what it was
            lengths[key] = 4 * size
        order = [x for x in order if x != key]
        while sum(lengths[x] for x in order) + lengths[key] > capacity:
            order.pop(0)
        order.append(key)
        assert [*store.entries] == order
        assert store.nbytes == sum(lengths[x] for x in order) <= capacity


def test_what_was_taken_outlives_the_store():
    store = EncoderOutputs({}, 1000).put("a", mx.arange(100.0))
    found, store = store.take("a")
    store = store.put("b", mx.zeros(200))
    assert store.take("a")[0] is None
    assert found[99].item() == 99
    assert store.without("b").entries == {}


def test_an_output_is_in_buffers_of_its_own():
    whole = mx.random.normal((8, 5000))
    mx.eval(whole)
    store = EncoderOutputs({}, 1 << 20).put("a", whole[3])
    mx.eval(tree.leaves(store))
    before = mx.get_active_memory()
    del whole
    mx.synchronize()
    mx.clear_cache()
    assert before - mx.get_active_memory() >= 8 * 5000 * 4


def test_what_is_refused():
    store = EncoderOutputs({}, 100).put("a", mx.zeros(20))
    with pytest.raises(BudgetError, match="400 bytes for a store of 100"):
        store.put("b", mx.zeros(100))
    with pytest.raises(CorruptError, match="a: "):
        store.put("a", mx.zeros(10))
    assert store.put("a", mx.ones(20)).nbytes == 80


def test_caches_can_be_stored_too():
    keys = mx.random.normal((1, 2, 30, 64))
    encoded = kvfun.cross(kvfun.empty("plain"), keys, keys).encoded
    store = EncoderOutputs({}, 1 << 20).put("sound", encoded)
    again = store.take("sound")[0]
    assert mx.array_equal(kvfun.fetch(again)[0], keys).item()


# -- the box --------------------------------------------------------------------------------------


def test_a_lease_survives_eviction():
    outputs = EncoderCache(100)
    with outputs.lease("a", lambda: mx.ones(20)) as one:
        assert outputs.nbytes == outputs.leased_nbytes == 80
        outputs.put("b", mx.zeros(25))
        assert outputs.take("a") is None
        assert outputs.leased_nbytes == 80
        assert mx.sum(one).item() == 20
        with outputs.lease("b", lambda: pytest.fail("it is there")) as other:
            assert other.shape == (25,)
            assert outputs.leased_nbytes == 180
    assert outputs.leased_nbytes == 0
    assert outputs.state.nbytes == 100


def test_what_is_too_large_is_handed_out_and_not_stored():
    outputs = EncoderCache(100)
    with outputs.lease("a", lambda: mx.ones(50)) as one:
        assert one.shape == (50,)
        assert (outputs.nbytes, outputs.leased_nbytes) == (0, 200)
    with pytest.raises(BudgetError):
        outputs.put("a", mx.ones(50))


def test_one_computes_and_the_others_wait():
    outputs, computed, started = EncoderCache(1 << 20), [], threading.Barrier(6)
    found = []

    def compute():
        computed.append(1)
        return mx.array([1.0, 2.0])

    def ask():
        started.wait()
        with outputs.lease("a", compute) as one:
            found.append(one.tolist())

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert computed == [1]
    assert found == [[1.0, 2.0]] * 6
    assert outputs.leased_nbytes == 0
    assert not outputs._pending


def test_who_fails_leaves_nothing_and_the_next_tries_again():
    outputs = EncoderCache(1 << 20)

    def fails():
        raise OSError("no such sound")

    with pytest.raises(OSError, match="no such sound"), outputs.lease("a", fails):
        pass
    with outputs.lease("a", lambda: mx.ones(3)) as one:
        assert one.shape == (3,)
    with pytest.raises(KeyError, match="x"), outputs.lease("a", fails) as one:
        raise KeyError("x")
    assert (outputs.leased_nbytes, outputs._pending) == (0, {})
