"""Delayed precision: plain until there are enough tokens, then encoded once, all of them."""

from __future__ import annotations

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvfun
from kvfun import tree
from kvfun.errors import CodecError, GeometryError, RollbackError, SpecError
from kvfun.testing import law_suite

SPECS = ("kv4", "kv8-g32", "k8v4", "bf16+kv4", "turbo-k8v3", "rot-k4v4", "rot-k3v3-log", "mxfp8")
POLICIES = (
    {},
    {"window": 5},
    {"window": 4, "sinks": 2, "reserve": 3},
    {"chunk": 6},
)


def block(seed: int, tokens: int, batch: int = 1):
    keys = mx.random.split(mx.random.key(seed))
    return [mx.random.normal((batch, 2, tokens, 64), key=key) for key in keys]


def fed(cache, lengths, seed=0, batch=1):
    for index, length in enumerate(lengths):
        cache = kvfun.append(cache, *block(seed + index, length, batch))
    return cache


def same(one, other):
    return all(mx.array_equal(a, b, equal_nan=True).item() for a, b in zip(one, other, strict=True))


TestLaws = law_suite(lambda: kvfun.empty("kv4-g32", start=10**6), convertible=False)


@given(
    spec=st.sampled_from(SPECS),
    policy=st.sampled_from(POLICIES),
    start=st.integers(1, 12),
    lengths=st.lists(st.integers(1, 7), min_size=1, max_size=6),
)
def test_it_is_the_plain_cache_until_it_is_due_and_then_what_that_is_converted_to(
    spec, policy, start, lengths
):
    delayed, plain = kvfun.empty(spec, start=start, **policy), kvfun.empty("plain", **policy)
    alone = None
    for index, length in enumerate(lengths):
        k, v = block(index, length)
        if alone is None and sum(lengths[:index]) >= start:
            alone, offset = kvfun.convert(plain, spec), sum(lengths[:index])
        before = kvfun.next_conversion(delayed)
        assert before == (None if delayed.converted else max(0, start - sum(lengths[:index])))
        delayed = kvfun.append(delayed, k, v)
        plain = kvfun.append(plain, k, v)
        alone = None if alone is None else kvfun.append(alone, k, v)
        expected = plain if alone is None else alone
        assert delayed.codec.spec == expected.codec.spec
        assert same(kvfun.fetch(delayed, queries=length), kvfun.fetch(expected, queries=length))
        q = mx.random.normal((1, 4, length, 64), key=mx.random.key(index))
        assert same(
            [kvfun.attend(delayed, q, phase="window")], [kvfun.attend(expected, q, phase="window")]
        )
        assert kvfun.offsets(delayed) == kvfun.offsets(plain)
        assert kvfun.max_rollback(delayed) == kvfun.max_rollback(expected)
        assert kvfun.nbytes(delayed) == kvfun.nbytes(expected)
        if alone is not None:
            assert delayed.floor == offset
    settled = kvfun.settle(delayed)
    assert settled.converted == (sum(lengths) >= start)
    assert kvfun.settle(settled) is settled


@given(
    start=st.integers(1, 9),
    one=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    cut=st.integers(0, 20),
)
def test_once_settled_it_does_not_matter_how_tokens_came_before_the_start(start, one, cut):
    """All that is converted is converted from what came, however it was split."""
    total = sum(one)
    k, v = block(3, total)

    def split(lengths):
        cache, done = kvfun.empty("kv4", start=start), 0
        for length in lengths:
            cache = kvfun.append(
                cache, k[:, :, done : done + length], v[:, :, done : done + length]
            )
            done += length
        return kvfun.settle(cache)

    first = min(cut, total)
    other = [n for n in (first, total - first) if n]
    assert same(kvfun.fetch(split(one)), kvfun.fetch(split(other)))


def test_the_append_that_reaches_the_start_is_read_as_it_came():
    cache = fed(kvfun.empty("kv2", start=8), [3, 5])
    keys, _ = kvfun.fetch(cache)
    assert mx.array_equal(keys[:, :, 3:], block(1, 5)[0]).item()
    assert cache.due
    assert not cache.converted
    after = fed(cache, [1], seed=9)
    assert after.converted
    assert (after.floor, after.codec.spec) == (8, "kv2")
    assert not mx.array_equal(kvfun.fetch(after)[0][:, :, 3:8], keys[:, :, 3:]).item()


def test_a_rollback_does_not_bring_back_what_was_rounded():
    cache = kvfun.settle(fed(kvfun.empty("kv4", start=4), [6]))
    back = kvfun.rollback(cache, 5)
    assert back.converted
    assert (back.floor, kvfun.offsets(back)) == (6, (1,))
    assert same(kvfun.fetch(back), [x[:, :, :1] for x in kvfun.fetch(cache)])
    with pytest.raises(RollbackError):
        kvfun.rollback(cache, 7)


def test_a_rollback_before_it_is_settled_takes_back_what_made_it_due():
    cache = fed(kvfun.empty("kv4", start=4), [3, 2])
    back = kvfun.rollback(cache, 2)
    assert cache.due
    assert not back.due
    assert not fed(back, [1], seed=5).converted


def test_rows_of_a_batch_share_start_and_target():
    early = fed(kvfun.empty("kv4", start=6), [3])
    with pytest.raises(GeometryError, match="start"):
        kvfun.stack([early, fed(kvfun.empty("kv4", start=7), [3])])
    with pytest.raises(GeometryError, match="target"):
        kvfun.stack([early, fed(kvfun.empty("kv8", start=6), [3])])


@given(
    spec=st.sampled_from(("kv4", "rot-k4v4", "turbo-k8v3")),
    policy=st.sampled_from(POLICIES),
    start=st.integers(1, 9),
    before=st.lists(st.integers(1, 9), min_size=2, max_size=4),
    later=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3)), max_size=4),
    data=st.data(),
)
def test_each_row_of_a_batch_is_the_cache_it_came_from(spec, policy, start, before, later, data):
    """Rows convert at their own time: as alone, through appends, rollbacks and choosing rows."""
    alone = [fed(kvfun.empty(spec, start=start, **policy), [n], i) for i, n in enumerate(before)]
    batch = kvfun.stack(alone)
    seed = 50
    for length, back in later:
        k, v = block(seed, length, len(alone))
        seed += 1
        batch = kvfun.append(batch, k, v)
        alone = [kvfun.append(c, k[i : i + 1], v[i : i + 1]) for i, c in enumerate(alone)]
        assert kvfun.max_rollback(batch) == tuple(kvfun.max_rollback(c)[0] for c in alone)
        q = mx.random.normal((len(alone), 4, length, 64), key=mx.random.key(seed))
        together = kvfun.attend(batch, q, phase="window")
        for index, cache in enumerate(alone):
            one = kvfun.attend(cache, q[index : index + 1], phase="window")
            assert mx.allclose(together[index : index + 1], one, atol=2e-5).item()
        counts = [min(back, kvfun.max_rollback(c)[0]) for c in alone]
        batch = kvfun.rollback(batch, counts)
        alone = [kvfun.rollback(c, n) for c, n in zip(alone, counts, strict=True)]
        if data.draw(st.booleans()):
            rows = data.draw(st.permutations(range(len(alone))))[: max(1, len(alone) - 1)]
            batch, alone = kvfun.take(batch, rows), [alone[row] for row in rows]
        if data.draw(st.booleans()):
            batch, alone = kvfun.settle(batch), [kvfun.settle(cache) for cache in alone]
        waits = [kvfun.next_conversion(c) for c in alone if kvfun.next_conversion(c) is not None]
        assert kvfun.next_conversion(batch) == (min(waits) if waits else None)
        assert kvfun.offsets(batch) == tuple(kvfun.offsets(c)[0] for c in alone)
        for row, cache in zip(kvfun.unstack(batch), alone, strict=True):
            assert (row.converted, row.floor) == (cache.converted, cache.floor)
            assert row.codec.spec == cache.codec.spec
            if kvfun.size(cache):
                assert same(kvfun.fetch(row), kvfun.fetch(cache))


def test_a_batch_is_one_cache_again_when_all_rows_are_converted():
    caches = [fed(kvfun.empty("kv4", start=6), [n], n) for n in (7, 2, 6)]
    batch = kvfun.settle(kvfun.stack(caches))
    assert isinstance(batch.inner, kvfun.Ragged)
    assert [part.codec.spec for part in batch.inner.parts] == ["kv4", "plain", "kv4"]
    assert batch.floors == (7, 0, 6)
    assert not batch.converted
    batch = kvfun.settle(fed(batch, [4], 30, batch=3))
    assert isinstance(batch.inner, kvfun.KV)
    assert batch.floors == (7, 6, 6)
    assert batch.converted


def test_converting_it_by_hand_ends_the_waiting():
    cache = fed(kvfun.empty("kv4", start=100), [6])
    assert kvfun.convert(cache, "kv8").codec.spec == "kv8"
    assert isinstance(kvfun.convert(cache, "kv8"), kvfun.KV)


def test_what_cannot_be_encoded_later_is_refused_at_once():
    k = mx.zeros((1, 2, 3, 40))
    with pytest.raises(CodecError, match="40"):
        kvfun.append(kvfun.empty("kv4", start=100), k, k)


@pytest.mark.parametrize("start", [-1, True, 2.5, "8"])
def test_bad_starts(start):
    with pytest.raises(GeometryError, match="start"):
        kvfun.empty("kv4", start=start)


@pytest.mark.parametrize("options", [{"residual": 8}, {"raw_sinks": 4}])
def test_nothing_else_stays_raw_beside_a_start(options):
    with pytest.raises(GeometryError, match="wait"):
        kvfun.empty("kv4", start=8, **options)


def test_an_unknown_target():
    with pytest.raises(SpecError):
        kvfun.empty("kv7", start=8)


def test_it_is_a_tree_and_old_handles_keep_their_bytes():
    before = fed(kvfun.empty("rot-k4v4", start=6), [7])
    held = [mx.array(x) for x in kvfun.fetch(before)]
    after = kvfun.settle(before)
    leaves, structure = tree.flatten(after)
    assert tree.equal(tree.unflatten(structure, leaves), after)
    assert same(kvfun.fetch(before), held)
    assert kvfun.nbytes(after) < kvfun.nbytes(before)


def test_one_layer_is_held_twice_at_most_while_it_is_converted():
    """Exact memory: the plain copy of a layer goes when its encoded one is there."""
    made = [fed(kvfun.empty("kv4", start=1024), [1024], seed=i) for i in range(4)]
    mx.eval([tree.leaves(cache) for cache in made])
    plain, encoded = kvfun.nbytes(made[0]), None
    mx.synchronize()
    mx.reset_peak_memory()
    base = mx.get_active_memory()
    for index in range(4):
        made[index] = kvfun.settle(made[index])
        mx.eval(tree.leaves(made[index]))
        encoded = kvfun.nbytes(made[index])
    assert encoded < plain / 5
    assert mx.get_peak_memory() - base < 2.5 * plain
    assert mx.get_active_memory() <= base - 4 * (plain - encoded) + 65536
