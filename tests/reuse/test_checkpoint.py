"""Checkpoints: what a rollback cannot give, and nothing else."""

from __future__ import annotations

import gc

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvfun
from kvfun import tree
from kvfun.errors import CompanionError, RollbackError, ShapeError
from kvfun.reuse import Kept, capture, checkpoint, keep, nearest, resume
from kvfun.testing import RECURRENCES
from kvfun.testing._checks import observe, same_seen

MAKE = RECURRENCES["gated delta"]
RULE, _ = MAKE(mx.random.key(0), 1, 1, mx.float32)


def model():
    """A hybrid's caches: full, sliding, recurrent, nothing, and a layer with two."""
    return (
        kvfun.empty("kv8"),
        kvfun.empty("plain", window=8, sinks=2),
        kvfun.recurrent(),
        None,
        (kvfun.empty("plain"), kvfun.recurrent()),
    )


def read(caches, seed, tokens, batch=1):
    """The caches after some more tokens."""
    if isinstance(caches, tuple):
        return tuple([read(each, seed, tokens, batch) for each in caches])
    if caches is None:
        return None
    if isinstance(caches, kvfun.Recurrent):
        _, inputs = MAKE(mx.random.key(seed), batch, tokens, mx.float32)
        return kvfun.advance(caches, RULE, inputs)[1]
    k = mx.random.normal((batch, 2, tokens, 64), key=mx.random.key(seed))
    return kvfun.append(caches, k, k * 0.5)


def same(one, other):
    if isinstance(one, tuple):
        for a, b in zip(one, other, strict=True):
            same(a, b)
    elif isinstance(one, kvfun.Recurrent):
        assert one.offsets == other.offsets
        for name, x in one.states.items():
            assert mx.array_equal(x, other.states[name]).item()
    elif one is not None:
        assert kvfun.offsets(one) == kvfun.offsets(other)
        same_seen(observe(one), observe(other), "a layer")


@given(
    before=st.integers(1, 300),
    after=st.integers(0, 300),
    batch=st.integers(1, 2),
    more=st.booleans(),
)
def test_going_back_is_never_having_gone_on(before, after, batch, more):
    there = read(model(), 1, before, batch)
    kept = checkpoint(there)
    assert kept.offsets == (before,) * batch
    gone = read(there, 2, after, batch) if after else there
    back = resume(kept, gone)
    same(back, there)
    if more:
        same(read(back, 3, 5, batch), read(there, 3, 5, batch))


def test_it_is_as_large_at_any_length():
    sizes = {checkpoint(read(model(), 1, length)).nbytes for length in (50, 500, 3000)}
    assert len(sizes) == 1
    (size,) = sizes
    state = kvfun.nbytes(read(kvfun.recurrent(), 1, 1))
    assert size == 2 * state + (9 + 2) * 2 * 2 * 64 * 4


def test_it_shares_no_buffer_with_the_caches():
    caches = read(model(), 1, 400)
    mx.eval(tree.leaves(caches))
    gc.collect()
    mx.synchronize()
    mx.clear_cache()
    base = mx.get_active_memory() - tree.nbytes(caches)
    kept = checkpoint(caches)
    size = kept.nbytes
    mx.eval(tree.leaves(kept))
    del caches
    gc.collect()
    mx.synchronize()
    mx.clear_cache()
    assert mx.get_active_memory() - base <= size + 16_384


def test_what_cannot_be_gone_back_to():
    caches = read(model(), 1, 20)
    kept = checkpoint(caches)
    with pytest.raises(RollbackError, match="20"):
        resume(kept, read(model(), 1, 10))
    with pytest.raises(ShapeError, match="layers"):
        resume(kept, caches[:3])
    with pytest.raises(ShapeError, match="rows"):
        resume(kept, read(model(), 1, 30, batch=2))
    with pytest.raises(ShapeError, match="one boundary"):
        checkpoint((read(kvfun.empty("plain"), 1, 3), read(kvfun.empty("plain"), 1, 4)))
    with pytest.raises(ShapeError, match="one boundary"):
        checkpoint((None,))


def test_a_conversion_cannot_be_taken_back():
    cache = read(kvfun.empty("kv4", start=10), 1, 8)
    kept = checkpoint([cache])
    assert kept.nbytes == 0
    same(resume(kept, [read(cache, 2, 1)])[0], cache)
    gone = kvfun.settle(read(cache, 2, 4))
    with pytest.raises(RollbackError, match="converted at"):
        resume(kept, [gone])
    both = kvfun.ragged([kvfun.empty("kv4"), kvfun.empty("plain")])
    both = read(both, 1, 5, batch=2)
    assert checkpoint([both]).parts == (None,)


def test_companions_belong_to_the_boundary():
    caches = read(model(), 1, 20)
    draft = read(kvfun.empty("kv4"), 4, 19)
    companion = capture("draft-v1", 20, caches=[draft])
    kept = checkpoint(caches, [companion])
    assert kept.companions["draft-v1"] is companion
    assert kept.nbytes == checkpoint(caches).nbytes + companion.nbytes
    for wrong in ([capture("draft-v1", 19)], [companion, companion]):
        with pytest.raises(CompanionError):
            checkpoint(caches, wrong)


# -- spacing --------------------------------------------------------------------------------------


@given(spacing=st.integers(1, 300), steps=st.lists(st.integers(1, 400), min_size=1, max_size=200))
def test_few_boundaries_and_never_far_back(spacing, steps):
    kept, boundary, seen = Kept({}, spacing), 0, []
    for step in steps:
        boundary += step
        seen.append(boundary)
        kept = keep(kept, boundary, -boundary)
        assert boundary in kept.items
        assert all(x == -each for each, x in kept.items.items())
        assert {*kept.items} <= {*seen}
    assert len(kept.items) <= 2 * (boundary // spacing).bit_length() + 1


@given(count=st.integers(1, 400), place=st.integers(1, 400), spacing=st.sampled_from((1, 16, 256)))
def test_the_gap_is_at_most_thrice_the_way_back(count, place, spacing):
    kept = Kept({}, spacing)
    for chunk in range(1, count + 1):
        kept = keep(kept, chunk * spacing, chunk)
    place = min(place, count)
    found = nearest(kept, place * spacing)
    back = (count - place) * spacing
    gap = place * spacing - (found[0] if found else 0)
    assert gap <= max(3 * back, 0)
    if found:
        assert found[1] * spacing == found[0]


def test_a_boundary_comes_behind_the_others():
    kept = keep(keep(Kept({}, 4), 4, "a"), 8, "b")
    assert keep(kept, 8, "c").items == {4: "a", 8: "c"}
    assert nearest(kept, 3) is None
    for boundary in (7, 0, True, 1.0):
        with pytest.raises(ShapeError, match="boundary"):
            keep(kept, boundary, "d")


def test_a_hybrid_resumes_at_a_boundary_and_reads_the_gap_again():
    """As one who wants the first 144 tokens of a text of 192 does it."""
    caches, kept = model(), Kept({}, spacing=16)
    for chunk in range(12):
        caches = read(caches, 100 + chunk, 16)
        kept = keep(kept, 16 * (chunk + 1), checkpoint(caches))
    boundary, found = nearest(kept, 144)
    assert boundary == 128
    back = resume(found, caches)
    for chunk in range(boundary // 16, 9):
        back = read(back, 100 + chunk, 16)
    alone = model()
    for chunk in range(9):
        alone = read(alone, 100 + chunk, 16)
    same(back, alone)
