"""Cross-attention: beams over one encoder output are states of their own that share it."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvfun
from kvfun import rounds, tree
from kvfun.errors import DTypeError, RollbackError, ShapeError
from kvfun.testing import digest

DIM, HEADS, KV = 64, 4, 2


def normal(seed, *shape):
    return mx.random.normal(shape, key=mx.random.key(seed))


def softmax(x):
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def dense(queries, keys, values):
    """Float64 attention of one row, everything seen."""
    q, k, v = [np.array(x.astype(mx.float32)).astype(np.float64) for x in (queries, keys, values)]
    k, v = [np.repeat(x, q.shape[0] // k.shape[0], axis=0) for x in (k, v)]
    return softmax(q @ k.swapaxes(-1, -2) * DIM**-0.5) @ v


@given(data=st.data(), seed=st.integers(0, 2**31 - 1))
def test_every_row_sees_all_of_its_source_and_nothing_else(data, seed):
    found = data.draw(st.integers(1, 3))
    columns = data.draw(st.integers(1, 40))
    spec = data.draw(st.sampled_from(("plain", "kv8", "kv4")))
    lengths = data.draw(
        st.none() | st.lists(st.integers(1, columns), min_size=found, max_size=found)
    )
    rows = data.draw(st.lists(st.integers(0, found - 1), min_size=1, max_size=6))
    length = data.draw(st.integers(1, 4))
    keys, values = normal(seed, found, KV, columns, DIM), normal(seed + 1, found, KV, columns, DIM)
    state = kvfun.cross(kvfun.empty("plain"), keys, values, spec=spec, lengths=lengths)
    state = kvfun.take(state, rows)
    queries = normal(seed + 2, len(rows), HEADS, length, DIM)
    out = kvfun.attend_cross(state, queries)
    assert out.shape == queries.shape
    for row, source in enumerate(rows):
        stop = columns if lengths is None else lengths[source]
        one = [x[source : source + 1, :, :stop] for x in (keys, values)]
        k, v = kvfun.fetch(kvfun.append(kvfun.empty(spec), *one), queries=1)
        np.testing.assert_allclose(
            np.array(out[row]), dense(queries[row], k[0], v[0]), rtol=1e-4, atol=1e-5
        )


@given(data=st.data(), seed=st.integers(0, 2**31 - 1))
def test_beams_are_states_of_their_own(data, seed):
    """Random reorders and appends: each row is what a copy of its own would be."""
    keys = normal(seed, 2, KV, 9, DIM)
    state = kvfun.cross(kvfun.empty("plain"), keys, keys)
    alone = [kvfun.cross(kvfun.empty("plain"), keys[i : i + 1], keys[i : i + 1]) for i in range(2)]
    for step in range(data.draw(st.integers(1, 5))):
        rows = data.draw(st.lists(st.integers(0, len(alone) - 1), min_size=1, max_size=4))
        state, alone = kvfun.take(state, rows), [alone[row] for row in rows]
        block = normal(seed + step + 1, len(rows), KV, data.draw(st.integers(1, 3)), DIM)
        state = kvfun.append(state, block, block)
        alone = [kvfun.append(a, block[i : i + 1], block[i : i + 1]) for i, a in enumerate(alone)]
        if data.draw(st.booleans()):
            state, alone = kvfun.rollback(state, 1), [kvfun.rollback(a, 1) for a in alone]
        assert kvfun.offsets(state) == tuple(kvfun.offsets(a)[0] for a in alone)
        queries = normal(seed + 99, len(rows), HEADS, 1, DIM)
        for row, a in enumerate(alone):
            query = queries[row : row + 1]
            if kvfun.offsets(a)[0]:
                mine = kvfun.fetch(kvfun.take(state, [row]))
                for x, y in zip(mine, kvfun.fetch(a), strict=True):
                    assert mx.array_equal(x, y).item()
            got, wanted = kvfun.attend_cross(state, queries)[row], kvfun.attend_cross(a, query)[0]
            assert mx.allclose(got, wanted, rtol=1e-4, atol=1e-5).item()


def test_reordering_beams_moves_nothing_of_the_encoder():
    keys = normal(0, 1, KV, 1500, DIM)
    state = kvfun.cross(kvfun.empty("plain"), keys, keys)
    five = kvfun.append(kvfun.take(state, [0] * 5), *[normal(1, 5, KV, 3, DIM)] * 2)
    other = kvfun.take(five, [4, 4, 0, 1, 2])
    assert other.encoded is state.encoded
    mx.eval(tree.leaves(five))
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(tree.leaves(kvfun.take(five, [4, 4, 0, 1, 2])))
    # a reorder takes as much as the decoder's own keys and values
    assert mx.get_peak_memory() - before <= kvfun.nbytes(five.inner) + 4096
    shared = kvfun.nbytes(state.encoded)
    assert kvfun.nbytes(five) == shared + kvfun.nbytes(five.inner)


def test_reading_by_many_beams_copies_nothing_of_the_encoder():
    keys = normal(0, 1, 6, 1500, DIM)
    state = kvfun.take(kvfun.cross(kvfun.empty("plain"), keys, keys), [0] * 8)
    queries = normal(1, 8, 6, 1, DIM)
    mx.eval(tree.leaves(state), queries)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(kvfun.attend_cross(state, queries))
    copies = 8 * kvfun.nbytes(state.encoded)
    assert mx.get_peak_memory() - before < copies / 8


def test_sources_that_no_row_reads_any_more_are_let_go():
    keys = normal(0, 3, KV, 20, DIM)
    state = kvfun.cross(kvfun.empty("plain"), keys, keys)
    kept = kvfun.take(state, [2, 0, 2])
    assert kvfun.batch_size(kept.encoded) == 2
    assert kept.sources == (1, 0, 1)
    query = normal(1, 1, HEADS, 1, DIM)
    one = kvfun.attend_cross(kvfun.take(kept, [0]), query)
    assert mx.allclose(one, kvfun.attend_cross(kvfun.take(state, [2]), query)).item()


def test_states_of_one_source_stay_together_in_a_batch():
    keys = normal(0, 1, KV, 20, DIM)
    state = kvfun.cross(kvfun.empty("plain"), keys, keys)
    k = normal(1, 1, KV, 3, DIM)
    one, other = kvfun.append(state, k, k), kvfun.append(state, k[:, :, :2], k[:, :, :2])
    both = kvfun.stack([one, other])
    assert both.encoded is state.encoded
    assert both.sources == (0, 0)
    assert kvfun.offsets(both) == (3, 2)
    foreign = kvfun.cross(kvfun.empty("plain"), *[normal(2, 1, KV, 5, DIM)] * 2)
    three = kvfun.concat([both, kvfun.append(foreign, k, k)])
    assert three.sources == (0, 0, 1)
    assert kvfun.offsets(kvfun.concat([state, kvfun.take(state, [0, 0])])) == (0, 0, 0)
    queries = normal(3, 3, HEADS, 1, DIM)
    got = kvfun.attend_cross(three, queries)[2:]
    wanted = kvfun.attend_cross(foreign, queries[2:])
    assert mx.allclose(got, wanted, rtol=1e-4, atol=1e-5).item()


def test_the_decoders_own_verbs():
    keys = normal(0, 1, KV, 20, DIM)
    state = kvfun.cross(kvfun.empty("kv8", window=8), keys, keys, spec="kv4")
    k = normal(1, 1, KV, 12, DIM)
    full = kvfun.append(state, k, k)
    was = digest(full)
    assert kvfun.size(full) == 8
    assert kvfun.convert(full, "kv4").codec.spec == "kv4"
    assert kvfun.convert(full, "kv4").encoded is full.encoded
    assert kvfun.max_rollback(full) == kvfun.max_rollback(full.inner)
    turn = kvfun.append(rounds.begin(full, 2), k[:, :, :3], k[:, :, :3])
    kept = rounds.rollback(turn, 1)
    assert kvfun.offsets(kept) == (13,)
    with pytest.raises(RollbackError):
        kvfun.rollback(state, 1)
    assert digest(full) == was
    assert tree.equal(full, tree.unflatten(tree.structure(full), tree.leaves(full)))
    out = kvfun.attend(full, normal(2, 1, HEADS, 1, DIM))
    assert mx.array_equal(out, kvfun.attend(full.inner, normal(2, 1, HEADS, 1, DIM))).item()


def test_what_does_not_fit():
    keys = normal(0, 2, KV, 5, DIM)
    for lengths in ([5], [0, 5], [5, 6]):
        with pytest.raises(ShapeError, match="lengths"):
            kvfun.cross(kvfun.empty("plain"), keys, keys, lengths=lengths)
    with pytest.raises(ShapeError, match="no columns"):
        kvfun.cross(kvfun.empty("plain"), keys[:, :, :0], keys[:, :, :0])
    k = normal(1, 3, KV, 2, DIM)
    three = kvfun.append(kvfun.empty("plain"), k, k)
    with pytest.raises(ShapeError, match="3 rows for 2 sources"):
        kvfun.cross(three, keys, keys)
    assert kvfun.cross(three, keys[:1], keys[:1]).sources == (0, 0, 0)
    state = kvfun.cross(kvfun.empty("plain"), keys, keys)
    with pytest.raises(ShapeError, match="3 rows"):
        kvfun.append(state, k, k)
    for queries in (normal(0, 3, HEADS, 1, DIM), normal(0, 2, HEADS, DIM)):
        with pytest.raises(ShapeError, match="should be"):
            kvfun.attend_cross(state, queries)
    with pytest.raises(ShapeError):
        kvfun.attend_cross(state, normal(0, 2, HEADS, 1, 32))
    with pytest.raises(DTypeError):
        kvfun.attend_cross(state, [1.0])
