"""The laws of ``kvfun.testing`` on the project's own cache, and proof that they can fail."""

from __future__ import annotations

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from kvfun import caches, geometry, record, replace, static
from kvfun import testing as t
from kvfun.errors import RollbackError, ShapeError
from kvfun.testing import LAWS, CacheMachine, Recipe, check_laws, law_suite, layouts
from kvfun.testing._oracle import Visibility
from kvfun.testing._suite import SLOW

TestLaws = law_suite(layouts())

TestMachine = CacheMachine.TestCase


class LargeMachine(CacheMachine):
    small = False


TestLargeMachine = LargeMachine.TestCase
TestLargeMachine.settings = settings(max_examples=max(5, settings().max_examples // 4))

FAMILIES = ("plain", "bf16", "f16", "f32", "kv8", "kv4", "kv4-g32", "kv3", "kv5", "kv6", "kv2")
FAMILIES += ("k8v4", "bf16+kv4", "kv4-pad")
WINDOWS = {
    "full": {},
    "window": {"window": 4},
    "sinks": {"window": 3, "sinks": 2, "reserve": 2},
    "chunk": {"chunk": 4},
    "both": {"window": 5, "chunk": 7, "sinks": 1},
}


@pytest.mark.parametrize("spec", FAMILIES)
@pytest.mark.parametrize("window", WINDOWS)
def test_all_laws_of_every_layout_and_family(spec, window):
    dim = 96 if spec.endswith("-pad") else 64
    case = t.Case(
        shape=t.Shape(2, dim, 64, mx.bfloat16, mx.bfloat16),
        batch=2,
        before=(t.Append(5), t.Rollback((2, 1)), t.Append(9, 3), t.Join((2,), 1)),
        blocks=(3, 11),
        later=(t.Append(1, 6), t.Take((1, 0)), t.Rollback((1,)), t.Append(6, 1)),
        others=((), (t.Append(3),)),
        spec="kv8" if dim == 64 else "kv8-g32",
        group=2,
        query_dtype=mx.bfloat16,
        sinks=True,
    )
    quick = {name: law for name, law in LAWS.items() if name not in SLOW}
    check_laws(Recipe(spec, **WINDOWS[window]), case, quick)


# -- another record: anyone's, with nothing but the verbs ----------------------------------------


@record
class Joined:
    """A cache that concatenates: the simplest thing that could work, for one row or many."""

    keys: mx.array | None = None
    values: mx.array | None = None

    def with_all(self, change):
        return replace(self, keys=change(self.keys), values=change(self.values))


def length(cache: Joined) -> int:
    return 0 if cache.keys is None else cache.keys.shape[2]


@caches.append.register(Joined)
def _append(cache, keys, values):
    if cache.keys is None:
        return replace(cache, keys=keys, values=values)
    return replace(
        cache,
        keys=mx.concatenate([cache.keys, keys], axis=2),
        values=mx.concatenate([cache.values, values], axis=2),
    )


@caches.fetch.register(Joined)
def _fetch(cache, *, queries=1):
    if cache.keys is None:
        raise ShapeError("empty")
    return cache.keys, cache.values


@caches.mask.register(Joined)
def _mask(cache, queries=1):
    return None if queries == 1 else "causal"


@caches.attend.register(Joined)
def _attend(cache, queries, *, scale=None, phase="decode", kernels=None, sinks=None, mask=None):
    own = "causal" if phase == "window" else None
    return mx.fast.scaled_dot_product_attention(
        queries,
        *_fetch(cache),
        scale=queries.shape[-1] ** -0.5 if scale is None else scale,
        mask=own if mask is None else mask,
        sinks=sinks,
    ).astype(queries.dtype)


@caches.rollback.register(Joined)
def _rollback(cache, tokens):
    counts = [tokens] if isinstance(tokens, int) else list(tokens)
    if len(set(counts)) != 1 or not 0 <= counts[0] <= length(cache):
        raise RollbackError(f"{counts} of {length(cache)}")
    if cache.keys is None:
        return cache
    return cache.with_all(lambda x: x[:, :, : length(cache) - counts[0]])


@caches.max_rollback.register(Joined)
def _max_rollback(cache):
    return (length(cache),) * caches.batch_size(cache)


@caches.batch_size.register(Joined)
def _batch_size(cache):
    return 1 if cache.keys is None else cache.keys.shape[0]


@caches.offsets.register(Joined)
def _offsets(cache):
    return (length(cache),) * caches.batch_size(cache)


@caches.size.register(Joined)
def _size(cache):
    return length(cache)


ALONE = {name: law for name, law in LAWS.items() if name != "rows_are_caches"}
"""It has no ragged batches: ``stack`` is not its business."""


class TestThirdParty(law_suite(Joined, laws=ALONE, allowed=("append",), convertible=False)):
    pass


# -- caches that are wrong: some law must say so -------------------------------------------------


@record
class Broken:
    """A correct cache inside, one verb of it wrong."""

    inner: caches.KV
    fault: str = static()


def wrapped(verb):
    """Register a verb that does the right thing, unless there is a fault of its name."""
    name = verb.__name__.lstrip("_")

    def call(cache, *args, **kwargs):
        if cache.fault in FAULTS.get(name, {}):
            return FAULTS[name][cache.fault](cache, *args, **kwargs)
        result = verb(cache.inner, *args, **kwargs)
        return Broken(result, cache.fault) if isinstance(result, caches.KV) else result

    verb.register(Broken, call)


FAULTS: dict[str, dict] = {}


def fault(function):
    verb, name = function.__name__.split("__")
    FAULTS.setdefault(verb, {})[name] = function
    return function


for verb in (
    *(caches.append, caches.fetch, caches.attend, caches.rollback, caches.max_rollback),
    *(caches.convert, caches.take, caches.batch_size, caches.offsets, caches.size, caches.mask),
):
    wrapped(verb)


@caches.join.register(Broken)
def _join(*parts):
    if parts[0].fault == "joins_in_reverse":
        parts = parts[::-1]
    return Broken(caches.concat([part.inner for part in parts]), parts[0].fault)


@fault
def fetch__window_off_by_one(cache, *, queries=1):
    keys, values = caches.fetch(cache.inner, queries=queries)
    return (
        (keys[:, :, 1:], values[:, :, 1:]) if keys.shape[2] >= 4 + queries - 1 else (keys, values)
    )


@fault
def mask__window_off_by_one(cache, queries=1):
    inner = cache.inner
    return "causal" if queries > 1 and caches.size(inner) == 4 else caches.mask(inner, queries)


@fault
def append__mutates_in_place(cache, keys, values):
    inner = caches.append(cache.inner, keys, values)
    if inner.keys and cache.inner.keys and inner.keys[0].shape == cache.inner.keys[0].shape:
        cache.inner.keys[0][:] = inner.keys[0]
    return Broken(inner, cache.fault)


@fault
def rollback__moves_the_offset_only(cache, tokens):
    """The tokens stay where they are, and what comes next lands behind them."""
    caches.rollback(cache.inner, tokens)
    counts = (tokens,) if isinstance(tokens, int) else tuple(tokens)
    inner = cache.inner
    after = [
        row._replace(offset=row.offset - counts[0], shift=row.shift + counts[0])
        for row in inner.geometry.rows
    ]
    layout = geometry.Geometry(inner.geometry.policy, inner.geometry.capacity, tuple(after))
    return Broken(replace(inner, geometry=layout), cache.fault)


@fault
def mask__stale_columns_are_visible(cache, queries=1):
    mask = caches.mask(cache.inner, queries)
    return "causal" if isinstance(mask, geometry.MaskArray) and queries > 1 else None


@fault
def attend__stale_columns_are_visible(cache, queries, **options):
    options.pop("mask", None)
    inner = cache.inner
    total = caches.fetch(inner, queries=queries.shape[2])[0].shape[2]
    everything = mx.ones((queries.shape[2], total), mx.bool_)
    return caches.attend(inner, queries, mask=everything, **options)


@fault
def convert__requantizes(cache, spec):
    """Encodes again what it has, though the codec stays."""
    return Broken(caches.convert(caches.convert(cache.inner, "kv2-g32"), spec), cache.fault)


@fault
def convert__starts_again_from_what_is_visible(cache, spec):
    inner = cache.inner
    if not caches.size(inner):
        return Broken(caches.convert(inner, spec), cache.fault)
    fresh = caches.empty(spec, window=4, reserve=2)
    return Broken(caches.append(fresh, *caches.fetch(inner)), cache.fault)


@fault
def max_rollback__promises_too_much(cache):
    return tuple(n + 1 for n in caches.max_rollback(cache.inner))


@fault
def take__the_other_row(cache, rows):
    return Broken(caches.take(cache.inner, [-1 - row for row in rows]), cache.fault)


@fault
def append__drops_the_last(cache, keys, values):
    keys = (
        mx.concatenate([keys[:, :, :-1], keys[:, :, -1:] * 0], axis=2)
        if keys.shape[2] > 8
        else keys
    )
    return Broken(caches.append(cache.inner, keys, values), cache.fault)


@fault
def attend__ignores_the_scale(cache, queries, **options):
    return caches.attend(cache.inner, queries, **{**options, "scale": None})


@fault
def attend__ignores_the_sinks(cache, queries, **options):
    return caches.attend(cache.inner, queries, **{**options, "sinks": None})


@fault
def append__hoards(cache, keys, values):
    inner = caches.append(cache.inner, keys, values)
    larger = [
        tuple(mx.concatenate([x, x[:, :, :8]], axis=2) for x in planes)
        for planes in (inner.keys, inner.values)
    ]
    return Broken(replace(inner, keys=larger[0], values=larger[1]), cache.fault)


@t.bound.register(Broken)
def _bound(cache, *, block, appended):
    return t.bound(cache.inner, block=block, appended=appended)


CAUGHT_BY = {
    "window_off_by_one": "append_is_associative",
    "drops_the_last": "append_is_associative",
    "moves_the_offset_only": "rollback_undoes_append",
    "stale_columns_are_visible": "rollback_undoes_append",
    "promises_too_much": "rollback_is_exact",
    "mutates_in_place": "handles_keep_their_bytes",
    "requantizes": "convert_encodes_once",
    "starts_again_from_what_is_visible": "convert_encodes_once",
    "joins_in_reverse": "rows_are_caches",
    "the_other_row": "rows_are_caches",
    "ignores_the_scale": "attention_is_dense",
    "ignores_the_sinks": "attention_is_dense",
    "hoards": "bytes_are_accounted",
}


def broken(name: str) -> Recipe:
    make = lambda: Broken(caches.empty("kv4-g32", window=4, reserve=2), name)  # noqa: E731
    return Recipe("kv4-g32", window=4, reserve=2, make=make)


def run_law(name: str, recipe: Recipe, examples: int) -> None:
    @settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )
    @given(t.cases())
    def run(case):
        LAWS[name](recipe, case)

    run()


@pytest.mark.parametrize(("name", "law"), CAUGHT_BY.items())
def test_a_broken_cache_breaks_its_law(name, law):
    with pytest.raises((AssertionError, RollbackError)):
        run_law(law, broken(name), examples=100)


@pytest.mark.parametrize("law", sorted({*CAUGHT_BY.values()}))
def test_the_same_cache_without_a_fault_breaks_none(law):
    run_law(law, broken("none"), examples=15)


class BrokenMachine(CacheMachine):
    recipes = st.just(broken("mutates_in_place"))


def test_the_machine_sees_a_cache_that_changes():
    from hypothesis.stateful import run_state_machine_as_test

    quick = settings(
        max_examples=50, phases=[Phase.generate], derandomize=True, database=None, deadline=None
    )
    with pytest.raises(AssertionError, match="changed after it was made"):
        run_state_machine_as_test(BrokenMachine, settings=quick)


# -- the oracle, against numbers worked out by hand ----------------------------------------------


@pytest.mark.parametrize(
    ("rule", "query", "expected"),
    [
        (Visibility(), 3, [0, 1, 2, 3]),
        (Visibility(window=1), 3, [3]),
        (Visibility(window=2), 0, [0]),
        (Visibility(window=2, sinks=2), 5, [0, 1, 4, 5]),
        (Visibility(chunk=3), 5, [3, 4, 5]),
        (Visibility(chunk=3), 6, [6]),
        (Visibility(window=2, chunk=3, sinks=1), 4, [0, 3, 4]),
        (Visibility(window=2, chunk=3, sinks=1), 3, [0, 3]),
    ],
)
def test_what_the_oracle_sees(rule, query, expected):
    assert rule.visible(query) == expected


def test_dense_attention_by_hand():
    import numpy as np

    keys = np.array([[[0.0], [np.log(3.0)]]])
    values = np.array([[[4.0], [8.0]]])
    queries = np.ones((2, 1, 1))
    out, score = t.dense_attention(queries, keys, values, scale=1.0)
    assert np.allclose(out, 7.0)
    assert score == pytest.approx(np.log(3.0))
    out, _ = t.dense_attention(queries, keys, values, scale=1.0, sinks=np.log([4.0, 1e-30]))
    assert np.allclose(out[:, 0, 0], [(4 + 24) / 8, 7.0])
    out, _ = t.dense_attention(
        queries, keys, values, scale=1.0, mask=np.array([[[True, False]], [[False, True]]])
    )
    assert np.allclose(out[:, 0, 0], [4.0, 8.0])


def test_small_steps_are_put_back():
    before = geometry._policy.STEP, geometry._policy.SLACK

    def fails_inside():
        with t.small_steps(step=4, slack=4):
            cache = caches.append(caches.empty("plain", window=2), *t.Shape().block(0, 1, 5))
            assert cache.geometry.capacity == 8
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fails_inside()
    after = geometry._policy.STEP, geometry._policy.SLACK
    assert after == before
    cache = caches.append(caches.empty("plain", window=2), *t.Shape().block(0, 1, 5))
    assert cache.geometry.capacity % 256 == 0
