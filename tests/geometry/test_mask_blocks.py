"""A mask built block by block is the mask built at once, for buffers and for parts of chains."""

from __future__ import annotations

import hypothesis.strategies as st
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given

import kvfun
from kvfun.geometry import JoinedMask, MaskArray, _mask, for_kernel, mask_array, mask_block
from kvfun.testing import Append, Rollback, Shape, World, chains, layouts, small_steps


def described(cache, queries: int) -> list[MaskArray]:
    geometry = cache.geometry
    mask = geometry.describe(queries, geometry.spans(queries))
    return list(mask.parts) if isinstance(mask, JoinedMask) else [mask]


@given(
    recipe=st.one_of(layouts(), chains()),
    batch=st.integers(1, 3),
    history=st.lists(
        st.one_of(
            st.integers(1, 17).map(Append),
            st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple).map(Rollback),
        ),
        max_size=4,
    ),
    queries=st.integers(1, 13),
    within=st.sampled_from([None, 1, 4]),
    step=st.tuples(st.integers(1, 5), st.integers(1, 5)),
)
def test_blocks_are_pieces_of_the_whole(recipe, batch, history, queries, within, step):
    with small_steps():
        world = World(recipe, Shape(), len(recipe.padding) or batch)
        cache = world.run(world.begin(), [*history, Append(queries, 1)]).cache
        for mask in described(cache, queries):
            mask = mask._replace(within=within)
            columns = sum(b - a for a, b in mask.spans)
            if columns:
                check(mask, columns, *step)


def check(mask: MaskArray, columns: int, rows: int, width: int) -> None:
    whole = np.array(mask_array(mask))
    for first in range(0, mask.queries, rows):
        last = min(first + rows, mask.queries)
        for start in range(0, columns, width):
            stop = min(start + width, columns)
            wanted, block = (
                whole[..., first:last, start:stop],
                mask_block(mask, first, last, start, stop),
            )
            if block is None:
                assert wanted.all()
            else:
                assert np.array_equal(np.broadcast_to(np.array(block), wanted.shape), wanted)


def test_most_blocks_of_a_long_past_are_seen_by_all():
    """Otherwise every tile of a chunk over a chain would be masked for nothing."""
    k = mx.zeros((1, 1, 4000, 64))
    cache = kvfun.append(kvfun.empty("kv4", residual=64, raw_sinks=4), k, k)
    front, past, tail = described(cache, 100)
    assert mask_block(front, 0, 100, 0, 4) is None
    assert mask_block(past, 0, 100, 0, 3800) is None
    assert mask_block(past, 0, 100, 3800, 3900) is not None
    assert mask_block(past, 90, 100, 3800, 3880) is None
    assert mask_block(tail, 0, 100, 0, 8) is not None


@pytest.mark.parametrize("spec", ["plain", "kv4"])
@pytest.mark.parametrize(
    "options", [{"window": 300}, {"residual": 16}, {"window": 300, "sinks": 2}]
)
def test_attention_is_the_same_under_masks_that_are_never_whole(spec, options, monkeypatch):
    k = mx.random.normal((2, 2, 700, 64), key=mx.random.key(1))
    q = mx.random.normal((2, 4, 600, 64), key=mx.random.key(2))
    cache = kvfun.append(kvfun.empty(spec, **options), k, k)
    cache = kvfun.rollback(cache, [5, 0])
    q = q[:, :, :595]
    whole = kvfun.attend(cache, q, phase="window")
    monkeypatch.setattr(_mask, "WHOLE", 0)
    parts = described(cache, 595)
    assert all(callable(for_kernel(part)) for part in parts)
    assert mx.abs(kvfun.attend(cache, q, phase="window") - whole)[:, :, 5:].max().item() < 1e-5
