"""Rows of different records and codecs as one batch: each is the cache it came from."""

from __future__ import annotations

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvfun
from kvfun.errors import RollbackError, ShapeError
from kvfun.geometry import mask_array

from .test_delayed import block, same

MAKERS = (
    lambda: kvfun.empty("plain"),
    lambda: kvfun.empty("kv4"),
    lambda: kvfun.empty("kv4", window=4),
    lambda: kvfun.empty("bf16", window=3, sinks=2, reserve=2),
    lambda: kvfun.empty("kv8", chunk=5),
    lambda: kvfun.empty("kv4", residual=3, block=2, raw_sinks=1),
    lambda: kvfun.empty("rot-k4v4", raw_sinks=3),
    lambda: kvfun.empty("kv8", start=6),
)
makers = st.lists(st.sampled_from(MAKERS), min_size=2, max_size=4)


@given(
    made=makers,
    before=st.lists(st.integers(1, 7), min_size=4, max_size=4),
    steps=st.lists(
        st.tuples(st.sampled_from(("append", "rollback", "take", "reserve")), st.integers(1, 4)),
        max_size=5,
    ),
    data=st.data(),
)
def test_each_row_is_the_cache_it_came_from(made, before, steps, data):
    alone = [kvfun.append(make(), *block(i, before[i])) for i, make in enumerate(made)]
    batch = kvfun.ragged(alone)
    last = min(before[: len(alone)])
    for seed, (verb, n) in enumerate(steps):
        if verb == "append":
            k, v = block(60 + seed, n, len(alone))
            batch = kvfun.append(batch, k, v)
            alone = [kvfun.append(c, k[i : i + 1], v[i : i + 1]) for i, c in enumerate(alone)]
            last = n
        elif verb == "rollback":
            counts = [min(n, kvfun.max_rollback(c)[0]) for c in alone]
            batch = kvfun.rollback(batch, counts)
            alone = [kvfun.rollback(c, k) for c, k in zip(alone, counts, strict=True)]
            last = 1
        elif verb == "take":
            rows = data.draw(st.lists(st.sampled_from(range(len(alone))), min_size=1, max_size=4))
            batch, alone = kvfun.take(batch, rows), [alone[row] for row in rows]
        else:
            batch = kvfun.caches.with_reserve(batch, n)
            alone = [kvfun.caches.with_reserve(c, n) for c in alone]
        check(batch, alone, last)


def check(batch, alone, last):
    assert kvfun.offsets(batch) == tuple(kvfun.offsets(c)[0] for c in alone)
    assert kvfun.batch_size(batch) == len(alone)
    assert kvfun.max_rollback(batch) == tuple(kvfun.max_rollback(c)[0] for c in alone)
    assert kvfun.size(batch) == max(kvfun.size(c) for c in alone)
    if any(kvfun.offsets(c)[0] < last for c in alone):
        return
    q = mx.random.normal((len(alone), 4, last, 64), key=mx.random.key(7))
    out = kvfun.attend(batch, q, phase="window")
    fetched, columns = kvfun.fetch(batch, queries=last), kvfun.caches.width(batch, last)
    mask = kvfun.mask(batch, last)
    shown = mask if isinstance(mask, mx.array) else mask_array(mask, queries=last, columns=columns)
    extents = kvfun.caches.extents(batch, last)
    for index, cache in enumerate(alone):
        one = kvfun.attend(cache, q[index : index + 1], phase="window")
        assert mx.allclose(out[index : index + 1], one, atol=2e-5).item()
        own = [*range(*extents.pinned[index]), *range(extents.starts[index], extents.ends[index])]
        assert own
        for side, theirs in zip(fetched, kvfun.fetch(cache, queries=last), strict=True):
            row = side[index : index + 1, :, mx.array(own)]
            assert mx.array_equal(row, theirs.astype(row.dtype)).item()
        if shown is not None and shown.ndim == 4:
            others = [column for column in range(columns) if column not in own]
            assert not others or not mx.any(shown[index, ..., mx.array(others)]).item()


def test_neighbours_that_are_alike_become_one():
    k, v = block(0, 3)
    one, other = [kvfun.append(kvfun.empty(spec), k, v) for spec in ("kv4", "kv8")]
    batch = kvfun.ragged([one, one, other, one])
    assert [kvfun.batch_size(part) for part in batch.parts] == [2, 1, 1]
    assert isinstance(kvfun.ragged([one, one]), kvfun.KV)
    narrow = kvfun.append(kvfun.empty("kv4", window=4), k, v)
    assert [kvfun.batch_size(part) for part in kvfun.ragged([one, narrow, one]).parts] == [1, 1, 1]
    assert isinstance(kvfun.take(batch, [0, 1, 3]), kvfun.KV)
    again = kvfun.concat([batch, kvfun.ragged([one, other])])
    assert [kvfun.batch_size(part) for part in again.parts] == [2, 1, 2, 1]
    assert isinstance(kvfun.convert(batch, "f32"), kvfun.KV)


def test_what_does_not_fit_changes_nothing():
    k, v = block(0, 3)
    one, other = [kvfun.append(kvfun.empty(spec), k, v) for spec in ("kv4", "kv8")]
    batch = kvfun.ragged([one, other])
    held = kvfun.fetch(batch)
    for keys in (k, mx.zeros((3, 2, 1, 64)), mx.zeros((2, 2, 64)), None):
        with pytest.raises(ShapeError):
            kvfun.append(batch, keys, keys)
    with pytest.raises(RollbackError):
        kvfun.rollback(batch, [1, 4])
    with pytest.raises(ShapeError):
        kvfun.rollback(batch, [1])
    with pytest.raises(ShapeError):
        kvfun.take(batch, [2])
    with pytest.raises(ShapeError):
        kvfun.ragged([])
    narrow = kvfun.append(kvfun.empty("kv8-g32"), k[..., :32], v[..., :32])
    with pytest.raises(ShapeError):
        kvfun.ragged([one, narrow])
    assert same(kvfun.fetch(batch), held)
