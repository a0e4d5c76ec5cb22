"""Companions: restored as they were, or refused."""

from __future__ import annotations

import attrs
import mlx.core as mx
import pytest

import kvfun
from kvfun import tree
from kvfun.errors import CompanionError
from kvfun.recurrences import ShortConv
from kvfun.reuse import capture, restore
from kvfun.testing import digest


def caches():
    k = mx.random.normal((1, 2, 40, 64))
    _, state = kvfun.advance(
        kvfun.recurrent(), ShortConv(mx.ones((8, 4))), {"x": mx.random.normal((1, 40, 8))}
    )
    return [
        kvfun.append(kvfun.empty("plain"), k, k),
        kvfun.append(kvfun.empty("turbo-k8v3"), k, k),
        kvfun.append(kvfun.empty("kv4", window=8, sinks=2), k, k),
        kvfun.append(kvfun.empty("kv4", residual=8), k, k),
        state,
        kvfun.empty("kv8"),
    ]


def companion(**changes):
    hidden = mx.random.normal((1, 1, 64))
    made = capture("mtp-v1", 41, caches=caches(), arrays={"hidden": hidden}, behind=1, name="x")
    return attrs.evolve(made, **changes)


def test_it_comes_back_as_it_was():
    had = caches()
    hidden = mx.random.normal((1, 1, 64))
    made = capture("mtp-v1", 41, caches=had, arrays={"hidden": hidden}, behind=1)
    found, arrays, metadata = restore(made, "mtp-v1", 41)
    assert metadata == {"behind": 1}
    assert mx.array_equal(arrays["hidden"], hidden).item()
    for one, other in zip(had, found, strict=True):
        assert type(one) is type(other)
        assert kvfun.offsets(one) == kvfun.offsets(other)
        if isinstance(one, kvfun.Recurrent):
            assert digest(one) == digest(other)
        elif one.layout is not None:
            for x, y in zip(kvfun.fetch(one), kvfun.fetch(other), strict=True):
                assert mx.array_equal(x, y).item()


def test_it_survives_what_it_was_captured_from():
    k = mx.random.normal((1, 2, 300, 64))
    cache = kvfun.append(kvfun.empty("plain"), k, k)
    mx.eval(tree.leaves(cache))
    del k
    base = mx.get_active_memory() - kvfun.nbytes(cache)
    made = capture("draft-v1", 300, caches=[cache])
    size = made.nbytes
    mx.eval(tree.leaves(made))
    del cache
    mx.synchronize()
    mx.clear_cache()
    assert mx.get_active_memory() - base <= size + 16_384


def test_missing_foreign_and_of_another_boundary():
    for given, schema, boundary, said in (
        (None, "mtp-v1", 41, "missing"),
        (companion(), "draft-v1", 41, "mtp-v1 where draft-v1"),
        (companion(), "mtp-v1", 42, "of 41 tokens, not of 42"),
    ):
        with pytest.raises(CompanionError, match=said):
            restore(given, schema, boundary)


def changed(**items):
    made = companion()
    merged = {**made.metadata, **items}
    return attrs.evolve(made, items=tuple((k, v) for k, v in merged.items() if v is not ...))


@pytest.mark.parametrize(
    "change",
    [
        {"caches": ...},
        {"caches": 7},
        {"caches": 2},
        {"caches": -1},
        {"caches": "6"},
        {"cache.0": ...},
        {"cache.0": "{}"},
        {"cache.0": "damaged"},
        {"cache.0.arrays": 1},
        {"cache.0.arrays": True},
        {"cache.9": "{}"},
    ],
)
def test_parts_that_do_not_fit_each_other(change):
    with pytest.raises(CompanionError):
        restore(changed(**change), "mtp-v1", 41)


def test_arrays_that_are_missing_or_of_another_shape():
    made = companion()
    for arrays in (
        {n: x for n, x in made.arrays.items() if n != "cache.0.1"},
        {**made.arrays, "cache.0.0": made.arrays["cache.0.0"][:, :, :5]},
        {**made.arrays, "cache.0.9": mx.zeros(3)},
    ):
        with pytest.raises(CompanionError):
            restore(attrs.evolve(made, arrays=arrays), "mtp-v1", 41)


def test_what_cannot_be_captured():
    for args, options in (
        (("", 3), {}),
        ((None, 3), {}),
        (("a", -1), {}),
        (("a", True), {}),
        (("a", 3), {"x": [1]}),
        (("a", 3), {"cached": 1}),
        (("a", 3), {"arrays": {"cache.0.0": mx.zeros(1)}}),
    ):
        with pytest.raises(CompanionError):
            capture(*args, **options)
