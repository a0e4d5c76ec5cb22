"""Views: a cache as it was, attended by others; and views of several caches as one batch."""

from __future__ import annotations

import functools
import gc
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import kvfun
from kvfun import caches, errors, tree
from kvfun.caches import Extents, layout, own_columns
from kvfun.kernels import merge
from kvfun.testing import (
    BOUNDS,
    Append,
    Handle,
    Shape,
    Verb,
    World,
    attention_bound,
    chains,
    dense_attention,
    digest,
    histories,
    layouts,
    observe,
    shapes,
    small_steps,
    specs,
)

SHAPE = Shape(kv_heads=2, head_dim=64, value_dim=32)


def numbers(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32) if mx.issubdtype(x.dtype, mx.floating) else x)


def equal(x: mx.array, y: mx.array) -> bool:
    return x.shape == y.shape and x.dtype == y.dtype and mx.array_equal(x, y, equal_nan=True).item()


def raises(error: type[Exception], *words: str):
    return pytest.raises(error, match=".*".join(words) or None)


def filled(
    spec: str = "plain", tokens: int = 9, batch: int = 1, seed: int = 5, **policy
) -> kvfun.KV:
    return kvfun.append(kvfun.empty(spec, **policy), *SHAPE.block(seed, batch, tokens))


def queries(count: int = 1, heads: int = 4, batch: int = 1, seed: int = 0) -> mx.array:
    return mx.random.normal((batch, heads, count, 64), key=mx.random.key(seed))


# -- another record: a cache of someone else's, with the verbs that read and nothing else ----------


@kvfun.record
class Foreign:
    """Any cache behind a wall: what the library knows of :class:`kvfun.KV` is not known of it."""

    inner: Any


@kvfun.attend.register(Foreign)
def _(cache: Foreign, queries, **options):
    return kvfun.attend(cache.inner, queries, **options)


@kvfun.fetch.register(Foreign)
def _(cache: Foreign, *, queries: int = 1):
    return kvfun.fetch(cache.inner, queries=queries)


@kvfun.mask.register(Foreign)
def _(cache: Foreign, queries: int = 1):
    return kvfun.mask(cache.inner, queries)


@kvfun.offsets.register(Foreign)
def _(cache: Foreign):
    return kvfun.offsets(cache.inner)


@kvfun.batch_size.register(Foreign)
def _(cache: Foreign):
    return kvfun.batch_size(cache.inner)


@kvfun.size.register(Foreign)
def _(cache: Foreign):
    return kvfun.size(cache.inner)


# -- what is drawn ---------------------------------------------------------------------------------


Drawn = tuple[World, tuple[Verb, ...]]


@st.composite
def handles(draw: st.DrawFn, shape: Shape | None = None) -> Drawn:
    """The history of a cache that holds a token at least; :func:`grown` runs it."""
    shape = draw(shapes()) if shape is None else shape
    spec = specs(shape.head_dim, shape.value_dim)
    recipe = draw(st.one_of(layouts(spec), layouts(spec), chains(spec)))
    world = World(recipe, shape, len(recipe.padding) or draw(st.integers(1, 3)))
    history = (*draw(histories(spec)), Append(draw(st.integers(1, 9)), draw(st.integers(0, 49))))
    return world, history


def grown(drawn: Drawn) -> tuple[World, Handle]:
    """The cache, and what it stands for."""
    world, history = drawn
    return world, world.run(world.begin(), history)


def in_small_steps(test):
    """Buffers grow and compact every few tokens while the test runs."""

    @functools.wraps(test)
    def run(*args, **kwargs):
        with small_steps():
            test(*args, **kwargs)

    return run


def asked(world: World, handle: Handle, count: int, group: int = 2, seed: int = 1) -> mx.array:
    """Queries for every row of a cache."""
    heads = world.shape.kv_heads * group
    return world.shape.queries(seed, handle.batch, heads, count, world.shape.key_dtype)


def own(handle: Handle, row: int, count: int) -> tuple[list[int], np.ndarray, np.ndarray]:
    """The positions that any of a row's last ``count`` tokens sees, one by one; keys and values."""
    reference, found = handle.reference, {}
    offset = reference.offsets[row]
    for query in range(max(0, offset - count), offset):
        keys, values = reference.seen(row, query)
        for place, position in enumerate(reference.visibility.visible(query)):
            found[position] = keys[:, place], values[:, place]
    if not found:
        return [], np.zeros(()), np.zeros(())
    positions = sorted(found)
    keys, values = (np.stack([found[p][side] for p in positions], axis=1) for side in (0, 1))
    return positions, keys, values


def columns_of(found: Extents, row: int) -> list[int]:
    """The columns that extents say are a row's, in order."""
    first, stop = found.pinned[row]
    return [*range(first, stop), *range(found.starts[row], found.ends[row])]


def limit(handle: Handle, given: mx.array, score: float, values: np.ndarray) -> float:
    dtypes = [given.dtype, *[x.dtype for x in kvfun.fetch(handle.cache)]]
    coarsest = max(dtypes, key=BOUNDS.__getitem__)
    return attention_bound(coarsest, score, float(np.abs(values).max(initial=0)))


# -- a view reads as its cache does ----------------------------------------------------------------


@given(handles(), st.integers(1, 4), st.booleans())
@in_small_steps
def test_queries_at_the_tokens_own_positions_get_the_caches_bytes(drawn, count, sinks):
    world, handle = grown(drawn)
    cache = handle.cache
    seen = kvfun.view(cache, queries=count)
    logits = mx.zeros(world.shape.kv_heads * 2) if sinks else None
    for length in sorted({1, handle.block}):
        q = asked(world, handle, length)
        for phase in ("decode", "window") if length == 1 else ("window",):
            options = {"phase": phase, "sinks": logits, "scale": 0.3}
            wanted = kvfun.attend(cache, q, **options)
            assert equal(seen.attend(q, **options), wanted)
            assert equal(kvfun.attend(seen, q, **options), wanted)
        for one, other in zip(
            kvfun.fetch(seen, queries=length), kvfun.fetch(cache, queries=length), strict=True
        ):
            assert equal(one, other)
        assert kvfun.mask(seen, length) == kvfun.mask(cache, length)
    assert seen.offsets == kvfun.offsets(seen) == kvfun.offsets(cache) == handle.reference.offsets
    assert kvfun.size(seen) == kvfun.size(cache)
    assert kvfun.batch_size(seen) == handle.batch
    assert seen.dtype == kvfun.fetch(cache)[0].dtype


@given(handles(), histories(most=4), st.integers(1, 3))
@in_small_steps
def test_nothing_that_happens_later_changes_a_view(drawn, later, count):
    world, handle = grown(drawn)
    seen, q = kvfun.view(handle.cache), asked(world, handle, count)
    assume(seen.width)

    def all_of_it():
        return digest(seen), seen.width, seen.offsets, numbers(seen.attend(q, mask="full"))

    before = all_of_it()
    world.run(handle, [verb for verb in later if verb.__class__.__name__ != "Convert"])
    kvfun.append(kvfun.rollback(handle.cache, 0), *world.shape.block(3, handle.batch, 300))
    after = all_of_it()
    assert before[:3] == after[:3]
    assert np.array_equal(before[3], after[3])


# -- which columns are a row's ---------------------------------------------------------------------


def shown(cache: Any, count: int) -> list[list[int]]:
    """For each row the columns that :func:`own_columns` shows."""
    mask, batch = own_columns(cache, count), kvfun.batch_size(cache)
    columns = kvfun.fetch(cache, queries=count)[0].shape[2]
    mask = mx.ones(columns, mx.bool_) if mask is None else mask
    rows = np.broadcast_to(numbers(mask), (batch, 1, 1, columns)).reshape(batch, columns)
    return [np.flatnonzero(row).tolist() for row in rows]


@given(handles(), st.booleans())
@in_small_steps
def test_a_rows_own_columns_are_those_of_a_list_of_positions(drawn, foreign):
    _, handle = grown(drawn)
    cache = Foreign(handle.cache) if foreign else handle.cache
    for count in sorted({1, handle.block}):
        keys, values = map(numbers, kvfun.fetch(cache, queries=count))
        assert kvfun.view(cache, queries=count).width == keys.shape[2]
        for row, columns in enumerate(shown(cache, count)):
            positions, k, v = own(handle, row, count)
            assert len(columns) == len(positions)
            if positions:
                assert np.array_equal(keys[row][:, columns], k)
                assert np.array_equal(values[row][:, columns], v)


@given(handles(), st.booleans())
@in_small_steps
def test_starts_and_ends_say_where_they_are(drawn, foreign):
    _, handle = grown(drawn)
    cache = Foreign(handle.cache) if foreign else handle.cache
    sinks = handle.reference.visibility.sinks
    for count in sorted({1, handle.block}):
        seen, rows = kvfun.view(cache, queries=count), shown(cache, count)
        try:
            found = seen.extents
        except errors.UnsupportedError:
            assert not isinstance(cache, kvfun.KV)
            assert any(has_holes(columns) for columns in rows)
            continue
        assert found == Extents(seen.width, seen.starts, seen.ends, seen.pinned)
        for row, columns in enumerate(rows):
            assert columns_of(found, row) == columns
            assert found.counts[row] == len(columns)
            first, stop = seen.pinned[row]
            assert 0 <= first <= stop <= seen.starts[row] <= seen.ends[row] <= seen.width
            if isinstance(cache, kvfun.KV):
                assert (first, stop) == (0, max(0, min(sinks, handle.reference.offsets[row])))


def has_holes(columns: list[int]) -> bool:
    """Whether there is more than a run from 0 on and another run."""
    gaps = [b for a, b in zip([-1, *columns], columns, strict=False) if b != a + 1]
    return len(gaps) > 1


@given(handles())
@in_small_steps
def test_a_record_that_registers_nothing_is_asked_for_its_mask(drawn):
    _, handle = grown(drawn)
    for count in sorted({1, handle.block}):
        assert shown(handle.cache, count) == shown(Foreign(handle.cache), count)
        assert (
            kvfun.view(handle.cache, count).width == kvfun.view(Foreign(handle.cache), count).width
        )
    for name in ("batch", "kv_heads", "head_dim", "value_dim"):
        assert getattr(layout(handle.cache), name) == getattr(layout(Foreign(handle.cache)), name)


def test_columns_of_sinks_and_ragged_rows_by_hand():
    assert kvfun.view(filled(window=4)).extents == Extents(4, (0,), (4,), ((0, 0),))
    assert kvfun.view(filled(window=4), queries=3).extents == Extents(6, (0,), (6,), ((0, 0),))
    assert kvfun.view(filled(window=4, sinks=2)).extents == Extents(6, (2,), (6,), ((0, 2),))
    assert kvfun.view(filled(sinks=2)).extents == Extents(9, (2,), (9,), ((0, 2),))
    assert kvfun.view(filled(tokens=1, sinks=2)).extents == Extents(1, (1,), (1,), ((0, 1),))
    two = kvfun.concat([filled(tokens=9, window=4, sinks=2), filled(tokens=3, window=4, sinks=2)])
    assert kvfun.view(two).extents == Extents(6, (2, 5), (6, 6), ((0, 2), (0, 2)))
    short = kvfun.concat([filled(tokens=9, window=4, sinks=2), filled(tokens=1, window=4, sinks=2)])
    assert kvfun.view(short).extents == Extents(6, (2, 6), (6, 6), ((0, 2), (0, 1)))
    back = kvfun.rollback(filled(batch=2), [0, 3])
    assert kvfun.view(back).extents == Extents(9, (0, 0), (9, 6), ((0, 0), (0, 0)))
    padded = kvfun.append(kvfun.empty("plain", left_padding=[2, 5]), *SHAPE.block(5, 2, 4))
    assert kvfun.view(padded).extents == Extents(2, (0, 2), (2, 2), ((0, 0), (0, 0)))
    assert shown(padded, 3) == shown(Foreign(padded), 3) == [[0, 1], []]


def test_a_row_with_holes_has_no_start_and_end_but_can_be_attended():
    @kvfun.record
    class Holes:
        inner: Any

    @kvfun.mask.register(Holes)
    def _(cache, queries=1):
        return mx.array([[column % 3 != 1 for column in range(9)]] * queries)

    for verb in (kvfun.offsets, kvfun.batch_size):
        verb.register(Holes, lambda cache, verb=verb: verb(cache.inner))
    kvfun.fetch.register(
        Holes, lambda cache, *, queries=1: kvfun.fetch(cache.inner, queries=queries)
    )
    kvfun.attend.register(Holes, lambda cache, q, **more: kvfun.attend(cache.inner, q, **more))
    seen = kvfun.view(Holes(filled()))
    assert seen.width == 9
    with raises(errors.UnsupportedError, r"\[0, 2, 3, 5, 6, 8\]", "holes"):
        _ = seen.starts
    for count in (1, 3):
        out = seen.attend(queries(count), mask="full")
        keys, values = kvfun.fetch(seen)
        alone = mx.array([0, 2, 3, 5, 6, 8])
        wanted = mx.fast.scaled_dot_product_attention(
            queries(count), keys[:, :, alone], values[:, :, alone], scale=64**-0.5
        )
        assert mx.allclose(out, wanted, atol=1e-5)


# -- queries at later positions, and masks of the caller's -----------------------------------------


@given(handles(), st.integers(1, 5), st.sampled_from((1, 1, 2)), st.booleans(), st.booleans())
@in_small_steps
def test_full_is_dense_attention_over_each_rows_own_columns(drawn, length, count, sinks, foreign):
    world, handle = grown(drawn)
    count = min(count, max(1, handle.block))
    cache = Foreign(handle.cache) if foreign else handle.cache
    seen = kvfun.view(cache, queries=count)
    assume(seen.width)
    q = asked(world, handle, length)
    logits = mx.arange(q.shape[1]) / 7 if sinks else None
    out = seen.attend(q, scale=0.2, sinks=logits, mask="full")
    assert out.shape == (*q.shape[:3], world.shape.value_dim)
    assert out.dtype == q.dtype
    assert mx.all(mx.isfinite(out)).item()
    for row in range(handle.batch):
        positions, keys, values = own(handle, row, count)
        if not positions:
            continue
        wanted, score = dense_attention(
            numbers(q)[row],
            keys,
            values,
            scale=0.2,
            sinks=None if logits is None else numbers(logits),
        )
        error = np.abs(numbers(out)[row] - wanted).max()
        assert error <= limit(handle, q, score, values)


def mask_of(seed: int, ranks: tuple[int, ...], shape: tuple[int, ...]) -> mx.array:
    """A mask that broadcasts to ``shape`` (rank 5): bool or added, of a rank, some axes of 1."""
    random = np.random.default_rng(seed)
    rank = ranks[seed % len(ranks)]
    if rank <= 4:
        batch, kv_heads, group, *rest = shape
        shape = (batch, kv_heads * group, *rest)
    shape = tuple(1 if random.random() < 0.3 else n for n in shape[len(shape) - rank :])
    if rank == 5 and 1 in shape[1:3]:
        shape = (shape[0], 1, 1, *shape[3:])
    if seed % 2:
        return mx.array(random.standard_normal(shape).astype(np.float32))
    seen = random.random(shape) < 0.6
    seen[..., -1] = True
    return mx.array(seen)


def spread(mask: mx.array, shape: tuple[int, ...]) -> np.ndarray:
    """The mask at its full size ``[batch, kv_heads, group, L, N]``."""
    batch, kv_heads, group, *rest = shape
    if mask.ndim == 5:
        return np.broadcast_to(numbers(mask), shape)
    by_head = np.broadcast_to(numbers(mask), (batch, kv_heads * group, *rest))
    return by_head.reshape(shape)


@given(handles(), st.integers(1, 5), st.integers(1, 3), st.integers(0, 99), st.booleans())
@in_small_steps
def test_masks_of_every_rank_are_over_the_views_columns(drawn, length, count, seed, foreign):
    world, handle = grown(drawn)
    count = min(count, max(1, handle.block))
    seen = kvfun.view(Foreign(handle.cache) if foreign else handle.cache, queries=count)
    assume(seen.width)
    q, kv_heads = asked(world, handle, length), world.shape.kv_heads
    shape = (handle.batch, kv_heads, 2, length, seen.width)
    mask = mask_of(seed, (2, 3, 4, 5), shape)
    full = spread(mask, shape)
    given = [(mask, full)]
    if length <= seen.width:
        lower = np.tril(np.ones((length, seen.width), bool), seen.width - length)
        given.append(("causal", np.broadcast_to(lower, shape)))
    keys, values = map(numbers, kvfun.fetch(handle.cache, queries=count))
    for mask, array in given:
        out = seen.attend(q, mask=mask)
        for row in range(handle.batch):
            wanted, score = dense_attention(
                numbers(q)[row],
                keys[row],
                values[row],
                scale=q.shape[3] ** -0.5,
                mask=array[row].reshape(-1, length, seen.width),
            )
            error = np.abs(numbers(out)[row] - wanted).max()
            assert error <= limit(handle, q, score, values)


@given(handles(), st.integers(1, 3))
@in_small_steps
def test_a_cache_shows_each_row_its_own_columns_too(drawn, count):
    """``attend(cache, mask="full")`` is the view's."""
    world, handle = grown(drawn)
    count = min(count, max(1, handle.block))
    assume(max(handle.reference.offsets) >= count)
    q, seen = asked(world, handle, count), kvfun.view(handle.cache, queries=count)
    wanted = seen.attend(q, mask="full")
    assert equal(kvfun.attend(handle.cache, q, phase="window", mask="full"), wanted)


def test_stale_columns_and_padding_are_nobodys():
    cache = kvfun.append(kvfun.empty("plain", left_padding=[0, 3]), *SHAPE.block(5, 2, 9))
    loud = mx.full((2, 2, 4, 64), 40.0), mx.full((2, 2, 4, 32), 1e4)
    cache = kvfun.rollback(kvfun.append(cache, *loud), [1, 4])
    out = kvfun.view(cache).attend(queries(2, batch=2), mask="full")
    assert mx.max(mx.abs(out[0])).item() > 9e3
    assert mx.max(mx.abs(out[1])).item() < 10


# -- several as one --------------------------------------------------------------------------------


Part = tuple[World, Handle, Any]


@st.composite
def several(draw: st.DrawFn) -> list[tuple[Drawn, int, bool]]:
    """Caches alike in heads and dims, but in nothing else; :func:`views_of` looks at them."""
    shape = draw(shapes())
    dtypes, out = st.sampled_from((mx.float32, mx.bfloat16, mx.float16)), []
    for _ in range(draw(st.integers(1, 3))):
        dims = shape.kv_heads, shape.head_dim, shape.value_dim
        drawn = draw(handles(Shape(*dims, draw(dtypes), shape.value_dtype)))
        out.append((drawn, draw(st.integers(1, 3)), draw(st.integers(0, 3)) == 0))
    return out


def views_of(drawn: list[tuple[Drawn, int, bool]]) -> list[Part]:
    parts = []
    for one, count, foreign in drawn:
        world, handle = grown(one)
        cache = Foreign(handle.cache) if foreign else handle.cache
        seen = kvfun.view(cache, queries=min(count, max(1, handle.block)))
        assume(seen.width)
        parts.append((world, handle, seen))
    return parts


@given(several(), st.integers(1, 4), st.integers(0, 99), st.booleans())
@in_small_steps
def test_combined_views_are_each_alone(parts, length, seed, sinks):
    parts = views_of(parts)
    views = [seen for *_, seen in parts]
    both = kvfun.combine(views)
    batches = [handle.batch for _, handle, _ in parts]
    shape, batch = parts[0][0].shape, sum(batches)
    q = shape.queries(seed, batch, shape.kv_heads * 2, length, mx.float32)
    logits = mx.arange(q.shape[1]) / 5 if sinks else None
    assert both.width == max(seen.width for seen in views)
    full = (batch, shape.kv_heads, 2, length, both.width)
    mask = mask_of(seed, (2, 3, 4, 5), full)
    masks = [mask, "full"]
    masks += ["causal"] if all(length <= seen.width for seen in views) else []
    shortest = min(max(handle.reference.offsets) for _, handle, _ in parts)
    masks += [None] if length <= min(shortest, *[max(1, h.block) for _, h, _ in parts]) else []
    for mask in masks:
        out = both.attend(q, scale=0.3, sinks=logits, mask=mask)
        assert out.shape == (*q.shape[:3], shape.value_dim)
        done = 0
        for seen, count in zip(views, batches, strict=True):
            rows, own_mask = slice(done, done + count), mask
            if isinstance(mask, mx.array):
                cut = spread(mask, full)[rows, ..., both.width - seen.width :]
                own_mask = mx.array(np.ascontiguousarray(cut))
            wanted = seen.attend(q[rows], scale=0.3, sinks=logits, mask=own_mask)
            assert equal(out[rows], wanted)
            done += count


@given(several())
@in_small_steps
def test_combined_columns_are_aligned_at_the_right(parts):
    parts = views_of(parts)
    views = [seen for *_, seen in parts]
    both = kvfun.combine(views)
    assert both.offsets == kvfun.offsets(both) == tuple(n for seen in views for n in seen.offsets)
    assert kvfun.size(both) == max(map(kvfun.size, views))
    assert kvfun.batch_size(both) == sum(map(kvfun.batch_size, views))
    keys = [kvfun.fetch(seen)[0] for seen in views]
    assert both.dtype == mx.concatenate([x[:, :, :0] for x in keys]).dtype
    rows = shown_by(both)
    for seen in views:
        moved = both.width - seen.width
        for columns in shown_by(seen):
            assert rows.pop(0) == [column + moved for column in columns]
    try:
        parts_of = [seen.extents for seen in views]
    except errors.UnsupportedError:
        return
    ends = [end - each.width for each in parts_of for end in each.ends]
    assert [end - both.width for end in both.ends] == ends
    assert [columns_of(both.extents, row) for row in range(len(ends))] == shown_by(both)


def shown_by(seen: Any) -> list[list[int]]:
    """For each row of a view the columns that a query sees that sees all of its own."""
    mask = seen.own_columns
    mask = mx.ones(seen.width, mx.bool_) if mask is None else mask
    batch = kvfun.batch_size(seen)
    rows = np.broadcast_to(numbers(mask), (batch, 1, 1, seen.width)).reshape(batch, seen.width)
    return [np.flatnonzero(row).tolist() for row in rows]


@given(several())
@in_small_steps
def test_fetch_and_mask_of_a_combination_show_what_each_shows(parts):
    parts = views_of(parts)
    views = [seen for *_, seen in parts]
    both = kvfun.combine(views)
    for count in sorted({1, min(max(1, handle.block) for _, handle, _ in parts)}):
        wanted = [row for seen in views for row in observe(seen, count)]
        for ours, theirs in zip(observe(both, count), wanted, strict=True):
            for (keys, values), (k, v) in zip(ours, theirs, strict=True):
                assert np.array_equal(keys, k)
                assert np.array_equal(values, v)
        keys, values = kvfun.fetch(both, queries=count)
        assert keys.dtype == both.dtype
        widths = [caches.width(seen, count) for seen in views]
        assert keys.shape[2] == values.shape[2] == max(widths) == caches.width(both, count)
        done = 0
        for seen, width in zip(views, widths, strict=True):
            rows = slice(done, done + kvfun.batch_size(seen))
            front = keys.shape[2] - width
            assert not mx.any(keys[rows, :, :front]).item()
            assert not mx.any(values[rows, :, :front]).item()
            done = rows.stop


@given(several(), st.integers(1, 2))
@in_small_steps
def test_the_verb_attends_a_combination_like_any_cache(parts, count):
    """A mask is over ``fetch(cache, queries=L)`` there, whatever the views were made for."""
    parts = views_of(parts)
    assume(all(count <= min(handle.block, *handle.reference.offsets) for _, handle, _ in parts))
    views = [seen for *_, seen in parts]
    both, shape = kvfun.combine(views), parts[0][0].shape
    q = shape.queries(1, kvfun.batch_size(both), shape.kv_heads, count, mx.float32)
    keys, values = map(numbers, kvfun.fetch(both, queries=count))
    random = np.random.default_rng(count)
    mask = random.random((count, keys.shape[2])) < 0.7
    mask[:, -1] = True
    out = numbers(kvfun.attend(both, q, phase="window", mask=mx.array(mask)))
    alone = numbers(kvfun.attend(both, q, phase="window"))
    done = 0
    for _, handle, seen in parts:
        rows, front = slice(done, done + handle.batch), keys.shape[2] - caches.width(seen, count)
        assert np.array_equal(alone[rows], numbers(kvfun.attend(seen, q[rows], phase="window")))
        for row in range(rows.start, rows.stop):
            wanted, score = dense_attention(
                numbers(q)[row],
                keys[row][:, front:],
                values[row][:, front:],
                scale=q.shape[3] ** -0.5,
                mask=mask[:, front:],
            )
            error = np.abs(out[row] - wanted).max()
            assert error <= limit(handle, q, score, values[row])
        done = rows.stop


def test_combining_is_associative_and_one_is_itself():
    views = [
        kvfun.view(filled(spec, n)) for spec, n in (("kv4-g32", 9), ("bf16", 4), ("kv8-g32", 12))
    ]
    a, b, c = views
    assert kvfun.combine([a]) is a
    all_of_them = kvfun.combine(views)
    assert kvfun.combine([all_of_them]) is all_of_them
    q = queries(2, batch=3)
    for nested in (
        kvfun.combine([kvfun.combine([a, b]), c]),
        kvfun.combine([a, kvfun.combine([b, c])]),
    ):
        assert nested.extents == all_of_them.extents
        for mask in (None, "full", "causal"):
            assert equal(nested.attend(q, mask=mask), all_of_them.attend(q, mask=mask))
    assert all_of_them.width == 12
    assert all_of_them.starts == (3, 8, 0)
    assert all_of_them.ends == (12, 12, 12)


@pytest.mark.parametrize("mask", [None, "full"])
def test_other_phases_are_those_of_the_caches(mask):
    """Partial reads are pairs; of two halves of a cache they merge into a read of the whole."""
    q, parts = queries(2, batch=2), [filled("bf16"), filled("kv8-g32", seed=6)]
    both = kvfun.combine([kvfun.view(cache) for cache in parts])
    wanted = both.attend(q, mask=mask)
    out, sums = both.attend(q, phase="partial", mask=mask)
    assert mx.allclose(out, wanted, atol=1e-3)
    assert sums.shape == (2, 4, 2)
    assert mx.allclose(both.attend(q, phase="committed", mask=mask), wanted, atol=1e-3)
    keys, values = SHAPE.block(5, 1, 9)
    halves = [kvfun.append(kvfun.empty("plain"), keys[:, :, s], values[:, :, s]) for s in HALVES]
    whole = kvfun.view(filled()).attend(queries(3), mask="full")
    read = [kvfun.view(half).attend(queries(3), phase="partial", mask="full") for half in halves]
    assert mx.allclose(merge(read)[0], whole, atol=1e-5)


HALVES = slice(0, 5), slice(5, 9)


# -- values ----------------------------------------------------------------------------------------


def test_views_are_records():
    cache = filled("kv4-g32")
    both = kvfun.combine([kvfun.view(cache), kvfun.view(filled("bf16"), queries=2)])
    for seen in (kvfun.view(cache, queries=3), both):
        leaves, structure = tree.flatten(seen)
        again = tree.unflatten(structure, leaves)
        assert tree.equal(again, seen)
        assert again.extents == seen.extents
        q = queries(2, batch=kvfun.batch_size(seen))
        compiled = tree.compile(lambda seen, q: seen.attend(q, mask="full"))
        assert mx.allclose(compiled(seen, q), seen.attend(q, mask="full"), atol=1e-5)
    assert kvfun.nbytes(kvfun.view(cache)) == kvfun.nbytes(cache)
    assert all(
        x is y for x, y in zip(tree.leaves(kvfun.view(cache)), tree.leaves(cache), strict=True)
    )


def test_a_view_of_a_view_looks_at_the_cache():
    seen = kvfun.view(filled(window=4))
    assert kvfun.view(seen, queries=3).width == 6
    assert kvfun.view(seen, queries=3).cache is seen.cache
    both = kvfun.combine([seen, kvfun.view(filled())])
    assert kvfun.view(both, queries=3).width == 9
    assert kvfun.view(both, queries=3).starts == (3, 0)


MB = 2**20


def settled(cache: kvfun.KV) -> kvfun.KV:
    tree.evaluate(cache)
    gc.collect()
    mx.synchronize()
    mx.clear_cache()
    return cache


@pytest.mark.parametrize("spec", ["f16", "kv8"])
@pytest.mark.parametrize("together", [False, True])
def test_a_view_costs_nothing_and_the_next_append_is_in_place_once_it_is_gone(spec, together):
    shape = Shape(4, 128, 128, mx.float16, mx.float16)
    tokens, held = shape.block(5, 1, 8192 - 100), shape.block(3, 1, 1)
    mx.eval(*tokens, *held)
    cache = settled(kvfun.append(kvfun.empty(spec), *tokens))
    size, before = kvfun.nbytes(cache), mx.get_active_memory()
    seen: Any = kvfun.view(cache)
    seen = kvfun.combine([seen, seen]) if together else seen
    assert seen.width == 8192 - 100
    assert mx.get_active_memory() == before
    cache = kvfun.append(cache, *held)
    settled(cache)
    assert mx.get_active_memory() - before >= 0.9 * size  # both values are there
    assert seen.width == 8192 - 100
    del seen
    settled(cache)
    assert mx.get_active_memory() - before < MB
    mx.reset_peak_memory()
    cache = kvfun.append(cache, *held)
    settled(cache)
    assert mx.get_peak_memory() - before < MB + size // 16


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize(
    "verb",
    [
        lambda c: kvfun.append(c, *SHAPE.block(1, 1, 1)),
        lambda c: kvfun.rollback(c, 1),
        kvfun.max_rollback,
        lambda c: kvfun.convert(c, "kv4"),
    ],
)
def test_a_view_is_read_only(verb, together):
    seen: Any = kvfun.view(filled())
    seen = kvfun.combine([seen, seen]) if together else seen
    with raises(errors.UnsupportedError, "read-only"):
        verb(seen)


@pytest.mark.parametrize("count", [0, -1, 1.5, True, "2", None])
def test_a_number_of_queries_that_is_none(count):
    with raises(errors.ShapeError, "queries", repr(count)):
        kvfun.view(filled(), queries=count)


def test_an_empty_cache_can_be_looked_at_but_not_read():
    seen = kvfun.view(kvfun.empty("kv4"))
    assert seen.offsets == (0,)
    for read in (
        lambda: seen.dtype,
        lambda: seen.attend(queries()),
        lambda: seen.attend(queries(), mask="full"),
        lambda: kvfun.combine([seen, seen]),
        lambda: kvfun.fetch(seen),
    ):
        with raises(errors.ShapeError, "empty"):
            read()


def test_columns_that_were_dropped():
    cache = kvfun.empty("plain", window=4)
    for start in range(0, 600, 20):
        cache = kvfun.append(cache, *SHAPE.block(start, 1, 20))
    with raises(errors.GeometryError, "dropped"):
        _ = kvfun.view(cache, queries=599).width


def test_no_columns():
    padded = kvfun.append(kvfun.empty("plain", left_padding=[4, 2]), *SHAPE.block(5, 2, 2))
    seen = kvfun.view(padded)
    assert seen.width == 0
    for mask in ("full", mx.ones((1, 1), mx.bool_)):
        with raises(errors.ShapeError, "no columns"):
            seen.attend(queries(batch=2), mask=mask)


def calls_that_do_not_fit():
    q = queries(2)
    return {
        "unknown phase": (errors.PhaseError, q, {"phase": "verify"}, ("verify",)),
        "decode of two": (errors.PhaseError, q, {"phase": "decode"}, ("decode", "2")),
        "rank": (errors.ShapeError, q[0], {}, (r"\(4, 2, 64\)",)),
        "batch": (errors.ShapeError, queries(2, batch=2), {}, ("2, 4, 2, 64", "batch 1")),
        "head_dim": (errors.ShapeError, q[..., :32], {}, ("32", "head_dim 64")),
        "heads": (errors.ShapeError, q[:, :3], {}, ("3", "2 KV heads")),
        "none": (errors.ShapeError, q[:, :, :0], {}, ("0",)),
        "numpy": (errors.DTypeError, np.array(q), {}, ("ndarray",)),
        "integers": (errors.DTypeError, q.astype(mx.int32), {}, ("int32",)),
        "sinks": (errors.ShapeError, q, {"sinks": mx.zeros(3)}, ("4", "3")),
        "columns": (errors.ShapeError, q, {"mask": mx.zeros((2, 99))}, ("99", "9 columns")),
        "queries": (errors.ShapeError, q, {"mask": mx.zeros((3, 9))}, ("3, 9", "2 queries")),
        "mask of rank 1": (errors.ShapeError, q, {"mask": mx.zeros(9)}, ("9",)),
        "mask of rank 6": (errors.ShapeError, q, {"mask": mx.zeros((1,) * 5 + (9,))}, ("9",)),
        "unknown mask": (errors.ShapeError, q, {"mask": "left"}, ("left",)),
        "numpy mask": (errors.ShapeError, q, {"mask": np.ones((2, 9), bool)}, ("mask", "array")),
        "kernels": (errors.PhaseError, q, {"kernels": {"decode": print}}, ("window", "decode")),
    }


@pytest.mark.parametrize("name", calls_that_do_not_fit())
@pytest.mark.parametrize("kind", ["view", "foreign", "combined"])
def test_calls_that_do_not_fit(name, kind):
    error, given, options, words = calls_that_do_not_fit()[name]
    seen: Any = kvfun.view(Foreign(filled()) if kind == "foreign" else filled())
    if kind == "combined":
        half = kvfun.append(kvfun.empty("kv8-g32"), *SHAPE.block(5, 1, 9))
        seen = kvfun.combine([seen, kvfun.view(half)])
        if isinstance(given, mx.array) and given.ndim == 4:
            given = mx.concatenate([given, given])
        words = tuple(w.replace("batch 1", "batch 2").replace("2, 4, 2", "4, 4, 2") for w in words)
    with raises(error, *words):
        seen.attend(given, **{"mask": "full", **options})
    assert seen.attend(queries(batch=kvfun.batch_size(seen))).shape[1:] == (4, 1, 32)


def test_masks_and_queries_of_another_batch():
    both = kvfun.combine([kvfun.view(filled()), kvfun.view(filled("kv8-g32", batch=2))])
    for rank in (4, 5):
        with raises(errors.ShapeError, "2", "batch of 3"):
            both.attend(queries(batch=3), mask=mx.zeros((2, *(1,) * (rank - 2), 9)))
    for verb in (both.attend, lambda q: kvfun.attend(both, q)):
        with raises(errors.ShapeError, "2, 4, 1, 64", "batch 3"):
            verb(queries(batch=2))


def test_views_that_cannot_be_combined():
    seen = kvfun.view(filled())
    for shape, said in (
        (Shape(3, 64, 32), r"\(3, 64, 32\)"),
        (Shape(2, 32, 32), r"\(2, 32, 32\)"),
        (Shape(2, 64, 64), r"\(2, 64, 64\)"),
    ):
        other = kvfun.view(kvfun.append(kvfun.empty("plain"), *shape.block(5, 1, 3)))
        with raises(errors.ShapeError, r"\(2, 64, 32\)", said):
            kvfun.combine([seen, other])
    with raises(errors.ShapeError, "at least one"):
        kvfun.combine([])
    with raises(TypeError, "KV", "kvfun.view"):
        kvfun.combine([seen, filled()])


# -- from end to end -------------------------------------------------------------------------------


class Draft:
    """Two layers with weights of their own that read a target's keys and values and write none."""

    def __init__(self, heads: int, dim: int, value_dim: int, hidden: int, layers: int = 2):
        keys = iter(mx.random.split(mx.random.key(3), 4 * layers))

        def weight(rows: int, columns: int) -> mx.array:
            return mx.random.normal((rows, columns), key=next(keys)) / rows**0.5

        self.heads, self.dim = heads, dim
        self.layers = [
            (
                weight(hidden, heads * dim),
                weight(heads * value_dim, hidden),
                weight(hidden, 2 * hidden),
                weight(2 * hidden, hidden),
            )
            for _ in range(layers)
        ]

    def __call__(self, x: mx.array, seen: Any) -> mx.array:
        """``[batch, L, hidden]`` at the positions behind the view's."""
        batch, length, _ = x.shape
        for query, out, up, down in self.layers:
            q = (x @ query).reshape(batch, length, self.heads, self.dim).swapaxes(1, 2)
            q = mx.fast.rope(
                q, self.dim, traditional=False, base=1e4, scale=1.0, offset=mx.array(seen.offsets)
            )
            mixed = seen.attend(q, mask="full").swapaxes(1, 2).reshape(batch, length, -1)
            x = x + mixed @ out
            x = x + mx.maximum(x @ up, 0) @ down
        return x


def test_a_draft_model_reads_its_targets_cache():
    """Rows of two codecs and of unequal length, a window among them, over some rounds."""
    hidden, draft = 48, Draft(4, 64, 32, 48)
    rows = [filled("kv8-g32", 7, window=6, seed=11), filled("bf16", 20, seed=12)]
    x = mx.random.normal((2, 3, hidden), key=mx.random.key(4))
    for number in range(4):
        views = [kvfun.view(row) for row in rows]
        together = draft(x, kvfun.combine(views))
        for row, seen in enumerate(views):
            assert mx.allclose(together[row : row + 1], draft(x[row : row + 1], seen), atol=1e-4)
            keys, values = map(numbers, kvfun.fetch(rows[row]))
            assert keys.shape[2] == (6 if row == 0 else 20 + 3 * number)
            assert np.allclose(
                numbers(together[row]),
                drafted(draft, numbers(x[row]), keys[0], values[0], seen.offsets[0]),
                atol=2e-3,
            )
        accepted = [SHAPE.block(10 * number + row, 1, 3) for row in range(2)]
        rows = [kvfun.append(row, *block) for row, block in zip(rows, accepted, strict=True)]
        x = together


def drafted(draft: Draft, x: np.ndarray, keys, values, offset: int) -> np.ndarray:
    """The same for one row, in float64 over the decoded tokens."""
    x = x.astype(np.float64)
    length, half = x.shape[0], draft.dim // 2
    angles = (offset + np.arange(length))[:, None] * 1e4 ** (-np.arange(half) / half)
    cos, sin = np.cos(angles), np.sin(angles)
    for query, out, up, down in draft.layers:
        q = (x @ numbers(query)).reshape(length, draft.heads, draft.dim).swapaxes(0, 1)
        a, b = q[..., :half], q[..., half:]
        q = np.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)
        mixed, _ = dense_attention(q, keys, values, scale=draft.dim**-0.5)
        x = x + mixed.swapaxes(0, 1).reshape(length, -1) @ numbers(out)
        x = x + np.maximum(x @ numbers(up), 0) @ numbers(down)
    return x


def test_the_public_names():
    assert kvfun.view is caches.view
    assert kvfun.View is caches.View
    assert kvfun.combine is caches.combine
