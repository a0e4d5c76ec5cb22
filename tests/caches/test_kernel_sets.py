"""Law 7 for every kernel set: over any cache it says what dense float64 attention says."""

from __future__ import annotations

import hypothesis.strategies as st
import mlx.core as mx
import pytest
from hypothesis import given

from kvfun import caches, kernels
from kvfun.testing import Append, Shape, World, chains, histories, layouts, small_steps
from kvfun.testing import _checks as checks

SETS = kernels.SETS


def test_every_set_has_a_name_but_that_of_one_shape_of_model():
    public = [getattr(kernels, name) for name in kernels.__all__]
    sets = [each for each in public if isinstance(each, dict) and each is not SETS]
    unnamed = [each for each in sets if not any(each is known for known in SETS.values())]
    assert unnamed == [kernels.GROUPED_HEADS]


@pytest.mark.parametrize("name", SETS)
@given(
    recipe=st.one_of(layouts(), chains()),
    history=histories(most=4),
    heads=st.sampled_from([(1, 1), (1, 8), (2, 2), (1, 3), (2, 4)]),
    count=st.integers(1, 7),
    batch=st.integers(1, 3),
    sinks=st.booleans(),
    seed=st.integers(0, 49),
)
def test_every_set_over_every_cache(name, recipe, history, heads, count, batch, sinks, seed):
    kv_heads, group = heads
    with small_steps():
        world = World(recipe, Shape(kv_heads), len(recipe.padding) or batch)
        handle = world.run(world.begin(), (*history, Append(count, seed)))
        queries = world.shape.queries(seed, handle.batch, kv_heads * group, count, mx.float32)
        logits = mx.zeros(kv_heads * group) if sinks else None
        with pytest.MonkeyPatch.context() as patch:
            attend = caches.attend
            patch.setattr(
                checks.caches,
                "attend",
                lambda *given, **options: attend(*given, kernels=SETS[name], **options),
            )
            checks.attends(handle, queries, name, sinks=logits)
            checks.attends(handle, queries, name, phase="committed", sinks=logits)
            checks.attends(handle, queries[:, :, -1:], name, phase="decode", sinks=logits)
