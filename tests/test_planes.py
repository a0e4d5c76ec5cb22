"""Planes: every operation against NumPy, and who owns the memory afterwards."""

from __future__ import annotations

import gc

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvfun
from kvfun import planes as p
from kvfun.geometry import Geometry, Plan, Policy, Relayout, Write

MB = 2**20
KINDS = [  # dtypes and widths of planes that are stored side by side
    ((mx.float32, 8),),
    ((mx.bfloat16, 5), (mx.bfloat16, 1)),
    ((mx.uint32, 4), (mx.float16, 2), (mx.float16, 2)),
    ((mx.uint8, 3), (mx.int8, 1), (mx.uint32, 1)),
    ((mx.uint32, 0), (mx.float16, 7)),
]


def numbers(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32) if array.dtype == mx.bfloat16 else array)


def same(planes: p.Planes, expected) -> None:
    assert len(planes) == len(expected)
    for plane, want in zip(planes, expected, strict=True):
        assert np.array_equal(numbers(plane), want)


def made(kinds, batch: int, columns: int, seed: int = 0, heads: int = 2) -> p.Planes:
    """Planes of whole numbers that every dtype holds exactly; none is zero."""
    rng = np.random.default_rng(seed)
    return tuple(
        mx.array(rng.integers(1, 127, (batch, heads, columns, width))).astype(dtype)
        for dtype, width in kinds
    )


def laid_out(plane: np.ndarray, relayout: Relayout) -> np.ndarray:
    rows = relayout.rows
    if rows[0][0] is None:
        rows = [(row, rows[0][1]) for row in range(len(plane))]
    new = np.zeros((len(rows), plane.shape[1], relayout.capacity, plane.shape[3]), plane.dtype)
    for target, (source, pieces) in zip(new, rows, strict=True):
        for start, stop, column in pieces:
            target[:, column : column + stop - start] = plane[source, :, start:stop]
    return new


def written(plane: np.ndarray | None, plan: Plan, block: np.ndarray) -> np.ndarray:
    if plane is None:
        assert plan.relayout is not None
        new = np.zeros((*block.shape[:2], plan.relayout.capacity, block.shape[3]), block.dtype)
    elif plan.relayout is not None:
        new = laid_out(plane, plan.relayout)
    else:
        new = plane.copy()
    for row, start, stop, column in plan.writes:
        rows = slice(None) if row is None else slice(row, row + 1)
        new[rows, :, column : column + stop - start] = block[rows, :, start:stop]
    return new


@st.composite
def relayouts(draw, batch: int, columns: int) -> Relayout:
    """Any new layout: pieces in order, none over another."""

    def pieces():
        cuts = sorted(draw(st.lists(st.integers(0, columns), max_size=6)))
        spans = [(a, b) for a, b in zip(cuts[::2], cuts[1::2], strict=False) if a < b]
        found, column = [], 0
        for start, stop in spans:
            column += draw(st.integers(0, 3))
            found.append((start, stop, column))
            column += stop - start
        return tuple(found), column

    if draw(st.booleans()):
        spans, used = pieces()
        rows = ((None, spans),)
    else:
        sources = draw(st.lists(st.integers(0, batch - 1), min_size=1, max_size=4))
        layouts = [pieces() for _ in sources]
        rows = tuple((row, spans) for row, (spans, _) in zip(sources, layouts, strict=True))
        used = max(used for _, used in layouts)
    return Relayout(max(1, used + draw(st.integers(0, 4))), rows)


# -- against NumPy --------------------------------------------------------------------------------


@pytest.mark.parametrize("kinds", KINDS, ids=str)
@given(data=st.data(), batch=st.integers(1, 3), columns=st.integers(1, 12))
def test_lay_out(kinds, data, batch, columns):
    planes = made(kinds, batch, columns)
    relayout = data.draw(relayouts(batch, columns))
    expected = [laid_out(numbers(plane), relayout) for plane in planes]
    new = tuple(p.lay_out(plane, relayout) for plane in planes)
    same(new, expected)
    assert [plane.dtype for plane in new] == [dtype for dtype, _ in kinds]


@pytest.mark.parametrize("kinds", KINDS, ids=str)
@given(data=st.data(), batch=st.integers(1, 3), columns=st.integers(1, 12))
def test_write_any_plan(kinds, data, batch, columns):
    planes = made(kinds, batch, columns)
    relayout = data.draw(st.none() | relayouts(batch, columns))
    capacity, rows = columns, batch
    if relayout is not None:
        capacity = relayout.capacity
        rows = batch if relayout.rows[0][0] is None else len(relayout.rows)
    length = data.draw(st.integers(0, capacity))
    writes = []
    for _ in range(data.draw(st.integers(0, 3))):
        start = data.draw(st.integers(0, length))
        stop = data.draw(st.integers(start, length))
        column = data.draw(st.integers(0, capacity - stop + start))
        writes.append(Write(data.draw(st.none() | st.integers(0, rows - 1)), start, stop, column))
    plan, block = Plan(relayout, tuple(writes)), made(kinds, rows, length, seed=1)
    before = [numbers(plane) for plane in planes]
    expected = [written(old, plan, numbers(new)) for old, new in zip(before, block, strict=True)]
    same(p.write(planes, plan, block), expected)
    same(planes, before)


@pytest.mark.parametrize("kinds", KINDS, ids=str)
@given(
    lengths=st.lists(st.sampled_from([0, 1, 2, 100, 255, 256, 300]), min_size=1, max_size=5),
    paddings=st.lists(st.integers(0, 3), min_size=1, max_size=3),
    policy=st.sampled_from([Policy(), Policy(window=5, sinks=2), Policy(chunk=64)]),
)
def test_write_the_plans_of_a_geometry(kinds, lengths, paddings, policy):
    """From no planes at all on; every version stays what it was."""
    geometry, planes = Geometry.empty(policy, paddings), ()
    expected = [None] * len(kinds)
    versions = []
    for step, length in enumerate(lengths):
        plan, geometry = geometry.advance(length)
        block = made(kinds, len(paddings), length, seed=step)
        planes = p.write(planes, plan, block)
        expected = [
            written(old, plan, numbers(new)) for old, new in zip(expected, block, strict=True)
        ]
        assert all(plane.shape[2] == geometry.capacity for plane in planes)
        versions.append((planes, expected))
    for found, want in versions:
        same(found, want)


@pytest.mark.parametrize("kinds", KINDS, ids=str)
@pytest.mark.parametrize("spans", [(), ((0, 9),), ((2, 5),), ((0, 1), (4, 9)), ((3, 3), (1, 2))])
def test_read(kinds, spans):
    planes = made(kinds, 2, 9)
    columns = [column for start, stop in spans for column in range(start, stop)]
    same(p.read(planes, spans), [numbers(plane)[:, :, columns] for plane in planes])


@pytest.mark.parametrize("kinds", KINDS, ids=str)
@pytest.mark.parametrize("rows", [[0], [2, 0, 1], (1, 1, 1, 0)], ids=str)
def test_gather(kinds, rows):
    planes = made(kinds, 3, 4)
    same(p.gather(planes, rows), [numbers(plane)[list(rows)] for plane in planes])


@pytest.mark.parametrize("kinds", KINDS, ids=str)
def test_join_detach_and_zeros(kinds):
    parts = [made(kinds, batch, 4, seed=batch) for batch in (1, 3, 2)]
    together = [np.concatenate([numbers(x) for x in arrays]) for arrays in zip(*parts, strict=True)]
    joined = p.join(parts)
    same(joined, together)
    same(p.detach(joined), together)
    cut = tuple(plane[1:3, :, 1:3] for plane in joined)
    same(p.detach(cut), [want[1:3, :, 1:3] for want in together])
    for plane, like in zip(p.zeros(joined, 5, 7), joined, strict=True):
        assert plane.shape == (5, like.shape[1], 7, like.shape[3])
        assert plane.dtype == like.dtype
        assert not numbers(plane).any()


# -- memory ---------------------------------------------------------------------------------------

COLUMNS = 32 * 1024
SMALL = 0.5 * MB
"""A block, its encoding and what else a token needs for a moment."""


class Memory:
    """What a piece of work holds at most and at the end, beyond what there was before."""

    def __enter__(self):
        gc.collect()
        mx.synchronize()
        mx.clear_cache()
        self.before = mx.get_active_memory()
        mx.reset_peak_memory()
        return self

    def __exit__(self, *_):
        gc.collect()
        mx.synchronize()
        self.held = mx.get_active_memory() - self.before
        # The peak is only noted when something is allocated.
        self.peak = max(mx.get_peak_memory() - self.before, 0)


def normal(tokens: int, batch: int = 1) -> mx.array:
    x = mx.random.normal((batch, 4, tokens, 128)).astype(mx.float16)
    mx.eval(x)
    return x


def settled(cache: kvfun.KV) -> kvfun.KV:
    mx.eval(cache.keys, cache.values)
    return cache


def filled(spec: str, tokens: int, batch: int = 1, **policy) -> kvfun.KV:
    keys, values = normal(tokens, batch), normal(tokens, batch)
    return settled(kvfun.append(kvfun.empty(spec, **policy), keys, values))


BIG = [
    ("f16", {}),  # 64 MB
    ("kv4", {}),
    ("k8v4", {}),
    ("f16", {"window": COLUMNS // 2, "sinks": 4}),
]


@pytest.fixture(params=BIG, ids=str)
def big(request):
    """A big cache with room for more; a window has just compacted."""
    spec, policy = request.param
    cache = filled(spec, COLUMNS - 200, **policy)
    block = normal(1)
    return [settled(kvfun.append(cache, block, block))]  # the list is its only owner


def test_an_append_to_a_value_nobody_keeps_is_done_in_place(big):
    block = normal(1)
    before = kvfun.nbytes(big[0])
    with Memory() as memory:
        for _ in range(50):
            big.append(kvfun.append(big.pop(), block, block))
            settled(big[0])
    assert kvfun.nbytes(big[0]) == before
    assert memory.peak < SMALL
    assert memory.held < SMALL


def test_an_append_to_a_value_that_is_kept_makes_one_copy(big):
    (old,) = big
    size = kvfun.nbytes(old)
    before = [mx.array(plane) for plane in (*old.keys, *old.values)]
    mx.eval(before)
    block = normal(1)
    with Memory() as memory:
        new = settled(kvfun.append(old, block, block))
    assert memory.peak < size + SMALL
    assert size - SMALL < memory.held < size + SMALL
    column = old.geometry.end(old.geometry.rows[0])
    for plane, was, after in zip(
        (*old.keys, *old.values), before, (*new.keys, *new.values), strict=True
    ):
        assert mx.array_equal(plane, was)
        assert mx.array_equal(after[:, :, :column], was[:, :, :column])
        assert after[:, :, column].astype(mx.float32).sum() != 0
        assert mx.array_equal(after[:, :, column + 1 :], was[:, :, column + 1 :])


@pytest.mark.parametrize("spec", ["f16", "kv4"])
def test_growth_holds_the_old_and_the_new_buffer_for_a_moment(spec):
    caches = [filled(spec, COLUMNS)]
    old, block = kvfun.nbytes(caches[0]), normal(1)
    with Memory() as memory:
        caches.append(settled(kvfun.append(caches.pop(), block, block)))
    new = kvfun.nbytes(caches[0])
    assert new == old * (COLUMNS + 256) // COLUMNS
    assert memory.held < new - old + SMALL
    assert memory.peak < new + new - old + SMALL


def test_a_compaction_copies_only_the_window():
    window = COLUMNS // 2
    caches, block = [filled("f16", COLUMNS, window=window)], normal(1)
    bound = kvfun.nbytes(caches[0]) * (window + 512) // COLUMNS
    with Memory() as memory:  # from the long block to a buffer of the window
        caches.append(settled(kvfun.append(caches.pop(), block, block)))
    assert kvfun.nbytes(caches[0]) <= bound
    assert memory.peak < bound + SMALL
    assert memory.held < 0
    size = kvfun.nbytes(caches[0])
    with Memory() as memory:  # over the next compaction
        for _ in range(5):
            block = normal(100)
            caches.append(settled(kvfun.append(caches.pop(), block, block)))
    assert kvfun.nbytes(caches[0]) == size
    assert memory.peak < size + 2 * SMALL
    assert memory.held < SMALL


@pytest.mark.parametrize("paddings", [None, [0, 1, 2, 3]], ids=str)
@pytest.mark.parametrize("spec", ["f16", "kv4"])
def test_a_row_taken_out_does_not_keep_the_batch(spec, paddings):
    with Memory() as memory:
        batch = filled(spec, 4096, batch=4, left_padding=paddings)
        taken = settled(kvfun.take(batch, [2]))
        row = settled(kvfun.unstack(batch)[1])
        whole = kvfun.nbytes(batch)
        del batch
    assert kvfun.nbytes(row) <= whole / 4
    assert memory.held < kvfun.nbytes(row) + kvfun.nbytes(taken) + SMALL


def test_detach_frees_the_parent():
    with Memory() as memory:
        parent = mx.zeros((1, 4, 4096, 512))
        mx.eval(parent)
        (part,) = p.detach((parent[:, :, :16],))
        (row,) = p.detach((mx.zeros((8, 1, 1024, 256))[2:3],))
        mx.eval(part, row)
        del parent
    assert memory.held < part.nbytes + row.nbytes + 65536


def test_a_fork_holds_nothing_new_until_it_is_appended_to():
    cache, block = filled("f16", COLUMNS // 2), normal(1)
    size = kvfun.nbytes(cache)
    with Memory() as memory:
        branches = list(kvfun.fork(cache, 8))
        settled(branches[3])
    assert memory.peak == 0
    assert memory.held == 0
    with Memory() as memory:
        branches[3] = settled(kvfun.append(branches[3], block, block))
        branches[3] = settled(kvfun.append(branches[3], block, block))
    assert memory.held < size * 1.1


def test_a_first_block_that_fills_the_buffer_does_not_keep_its_parent_alive():
    parent = mx.random.normal((1, 8, 256, 4 * 64))  # such as keys and values of one projection
    mx.eval(parent)
    keys, values = parent[..., :64], parent[..., 64:128]
    gc.collect()
    before = mx.get_active_memory()
    cache = kvfun.append(kvfun.empty("plain"), keys, values)
    kvfun.tree.evaluate(cache)
    assert mx.array_equal(kvfun.fetch(cache)[1], values)
    del parent, keys, values
    gc.collect()
    assert mx.get_active_memory() - before <= kvfun.nbytes(cache) - 8 * 256 * 4 * 64 * 4 + 65536


@pytest.mark.parametrize("shape", [(1, 2, 9, 4), (1, 1, 9, 4)])
def test_slices_of_16_bits_on_cuda_have_buffers_of_their_own(shape, monkeypatch):
    """MLX's fused kernel for one query reads past the end of the buffer of such a slice there."""
    plane = mx.random.normal(shape).astype(mx.bfloat16)
    mx.eval(plane)
    spans = ((3, 9),)
    view = p.read((plane,), spans)[0]
    monkeypatch.setattr(p, "_on_cuda", lambda: True)
    mx.eval(view)
    before = mx.get_active_memory()
    own = p.read((plane,), spans)[0]
    mx.eval(own)
    assert mx.get_active_memory() - before >= own.nbytes
    assert mx.array_equal(own, view)
    start = p.read((plane,), ((0, 6),))[0]
    before = mx.get_active_memory()
    mx.eval(start)
    assert mx.get_active_memory() == before
