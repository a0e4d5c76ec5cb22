"""Trees: the laws of flattening, and MLX's transformations over records."""

import math
import operator
import pickle
from enum import Enum
from typing import Any, NamedTuple

import attrs
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfun import tree
from kvfun.errors import TreeError
from kvfun.record import record, replace, static


@record
class Geometry:
    window: Any = static(default=None)
    offset: Any = static(default=0)


@record
class Cache:
    keys: Any
    values: Any = None
    geometry: Any = static(factory=Geometry)


class Pair(NamedTuple):
    first: Any
    second: Any


class Phase(Enum):
    decode = 1
    window = 2


DTYPES = [mx.float32, mx.bfloat16, mx.float16, mx.int32, mx.uint8, mx.bool_, mx.complex64]

arrays = st.builds(
    lambda shape, dtype, seed: (mx.arange(math.prod(shape)) + seed).reshape(shape).astype(dtype),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from(DTYPES),
    st.integers(0, 5),
)
statics = st.one_of(
    st.integers(-2, 2),
    st.booleans(),
    st.floats(),
    st.text(max_size=3),
    st.binary(max_size=2),
    st.sampled_from([Phase.decode, int, mx.bfloat16, len, 2 + 1j, frozenset({1})]),
)


def nodes(children):
    several = st.lists(children, max_size=3)
    return st.one_of(
        several,
        several.map(tuple),
        st.dictionaries(st.text(max_size=3), children, max_size=3),
        st.builds(Pair, children, children),
        st.builds(Cache, children, children, st.builds(Geometry, statics, statics)),
    )


trees = st.recursive(st.one_of(arrays, statics, st.none()), nodes, max_leaves=8)

CACHE = {
    "layers": [Cache(mx.zeros((2, 3)), mx.ones(4), Geometry(8)), Cache(mx.array(5))],
    "pair": Pair(mx.array([1, 2]), "label"),
    "none": None,
}


# Laws


@given(trees)
def test_unflatten_after_flatten_is_the_identity(t):
    leaves, structure = tree.flatten(t)
    rebuilt = tree.unflatten(structure, leaves)
    assert tree.equal(rebuilt, t)
    assert tree.structure(rebuilt) == structure
    assert hash(tree.structure(rebuilt)) == hash(structure)
    assert all(map(operator.is_, tree.leaves(rebuilt), leaves))


@given(trees)
def test_map_of_the_identity_is_the_identity(t):
    assert tree.equal(tree.map(lambda x: x, t), t)
    assert tree.equal(tree.map(lambda x, _: x, t, t), t)


@given(trees)
def test_paths_name_every_leaf(t):
    found = tree.paths(t)
    assert [id(x) for _, x in found] == [id(x) for x in tree.leaves(t)]
    assert len(found) == tree.structure(t).num_leaves
    for path, leaf in found:
        assert eval(f"t{path}", {"t": t}) is leaf


@given(trees)
def test_at_a_leaf_get_set_and_apply_agree(t):
    for path, leaf in tree.paths(t):
        place = tree.at(t, eval(f"lambda t: t{path}"))
        assert place.get() is leaf
        assert tree.equal(place.set(leaf), t)
        assert tree.at(place.set("new"), eval(f"lambda t: t{path}")).get() == "new"
        assert tree.equal(place.apply(lambda x: x), t)


@given(trees)
def test_every_structure_can_be_shown(t):
    assert repr(tree.structure(t)).startswith("Structure(")


@given(trees)
def test_nbytes_is_the_sum_over_leaves(t):
    assert tree.nbytes(t) == sum(x.nbytes for x in {id(x): x for x in tree.leaves(t)}.values())


# Structure


def test_leaves_are_in_order_and_dict_keys_sorted():
    t = {"b": mx.array(2), "a": mx.array(1)}
    assert [x.item() for x in tree.leaves(t)] == [1, 2]
    assert [path for path, _ in tree.paths(t)] == ["['a']", "['b']"]
    assert list(tree.map(lambda x: x, t)) == ["b", "a"]
    assert tree.structure(t) == tree.structure({"a": mx.array(1), "b": mx.array(2)})


def test_paths_of_records_and_named_tuples():
    assert [path for path, _ in tree.paths(CACHE)] == [
        "['layers'][0].keys",
        "['layers'][0].values",
        "['layers'][1].keys",
        "['pair'].first",
    ]


def test_a_bare_array_is_a_tree():
    x = mx.array(1)
    assert tree.paths(x) == [("", x)]
    assert tree.map(lambda x: 2, x) == 2


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (1, True),
        (1, 1.0),
        (1.0, True),
        (0.0, -0.0),
        (0, None),
        ((1, 2), (1, True)),
        ([1], (1,)),
        (Pair(1, 2), (1, 2)),
        (frozenset({1}), frozenset({1.0})),
        (b"a", "a"),
        (Geometry(1), Geometry(1.0)),
        (Geometry(None), Geometry(0)),
        (mx.float16, mx.bfloat16),
        ({"a": 1}, {"b": 1}),
        (None, ()),
        (None, mx.array(0)),
    ],
)
def test_different_statics_are_different_structures(a, b):
    for wrap in (lambda x: x, lambda x: [x], lambda x: Cache(x)):
        assert tree.structure(wrap(a)) != tree.structure(wrap(b))
    if not any(isinstance(x, list | dict | mx.array) for x in (a, b)):
        assert tree.structure(Cache(None, None, a)) != tree.structure(Cache(None, None, b))


@pytest.mark.parametrize("make", [lambda: float("nan"), lambda: Geometry(3), lambda: (1, 2.0)])
def test_equal_statics_are_equal_structures(make):
    a, b = (tree.structure(Cache(None, None, make())) for _ in "ab")
    assert (a, hash(a)) == (b, hash(b))


def test_structure_is_shown_with_stars():
    assert repr(tree.structure((mx.zeros(3), None, [2, mx.array(1)]))) == (
        "Structure((*, None, [2, *]))"
    )


def test_structure_pickles_when_its_static_values_do():
    structure = tree.structure(CACHE)
    assert pickle.loads(pickle.dumps(structure)) == structure


def test_unflatten_takes_any_leaves_and_runs_no_constructor():
    structure = tree.structure(Cache(mx.array(1), mx.array(2)))
    assert tree.unflatten(structure, iter(["a", {1, 2}])).values == {1, 2}


def test_unflatten_with_a_wrong_count_says_so():
    structure = tree.structure(Cache(mx.array(1)))
    for given_leaves in ([], [1, 2]):
        with pytest.raises(TreeError, match=rf"{len(given_leaves)} leaves .* of 1"):
            tree.unflatten(structure, given_leaves)


class Plain(list):
    pass


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({1, 2}, "set"),
        (bytearray(b"a"), "bytearray"),
        (np.zeros(2), r"mx\.array"),
        ({1: "a"}, "keys must be strings"),
        (Plain(), "Plain"),
        (Cache(None, None, [1]), "list"),
        (Cache(None, None, mx.array(1)), "child instead of static"),
        (Cache(None, None, (1, Geometry(mx.array(1)))), "child instead of static"),
    ],
)
def test_what_cannot_be_in_a_tree_is_named_with_its_path(bad, says):
    where = r"tree\[0\]\.values\['deep'\]"
    with pytest.raises(TreeError, match=f"{where}.*{says}"):
        tree.flatten([Cache(None, {"deep": bad})])


def test_a_bad_static_field_is_named():
    with pytest.raises(TreeError, match=r"tree\[1\]\.geometry "):
        tree.flatten([1, Cache(None, None, {})])


# Comparing and measuring


def test_map_of_several_trees():
    a, b = Cache(mx.array(1), [mx.array(2)]), Cache(mx.array(10), [mx.array(20)])
    total = tree.map(lambda x, y: x + y, a, b)
    assert tree.equal(total, Cache(mx.array(11), [mx.array(22)]))


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (Cache(mx.array(1), [2, mx.array(3)], Geometry(5)), r"tree\.geometry .*Geometry"),
        (Cache(mx.array(1), [True, mx.array(3)]), r"tree\.values\[0\] .*2 \(int\).*True \(bool\)"),
        (Cache(mx.array(1), [2, None]), r"tree\.values\[1\] is an array .* None"),
        (Cache(mx.array(1), [2]), r"tree\.values has 2 items .* 1"),
        (Cache({"a": mx.array(1)}, [2, mx.array(3)]), r"tree\.keys is an array .* a dict"),
        ((1, 2), r"tree is a Cache .* a tuple"),
    ],
)
def test_map_names_the_first_difference(other, says):
    with pytest.raises(TreeError, match=says):
        tree.map(lambda x, y: x, Cache(mx.array(1), [2, mx.array(3)]), other)


def test_map_names_different_dict_keys():
    with pytest.raises(TreeError, match=r"tree\[0\] has keys \('a',\) .* \('b',\)"):
        tree.map(lambda x, y: x, [{"a": 1}], [{"b": 1}])


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_compares_bytes(dtype):
    x = mx.array([[0, 1, 1]]).astype(dtype)
    assert tree.equal([x], [mx.array([[0, 1, 1]]).astype(dtype)])
    assert not tree.equal([x], [mx.array([[0, 1, 0]]).astype(dtype)])
    assert not tree.equal([x], [x.reshape(3)])
    assert not tree.equal([x], [x.astype(mx.int16)])


def test_equal_of_nans_zeros_and_views():
    nan = mx.array([float("nan"), 1.0])
    assert tree.equal(nan, nan + 0)
    assert not tree.equal(mx.array(0.0), mx.array(-0.0))
    x = mx.arange(12).reshape(3, 4)
    assert tree.equal(x.T[1:, ::2], mx.array(np.arange(12).reshape(3, 4).T[1:, ::2].tolist()))
    assert tree.equal(mx.zeros((0, 3)), mx.zeros((0, 3)))


def test_nbytes_counts_an_object_once_and_evaluates_nothing():
    before = mx.get_active_memory()
    lazy = mx.zeros((1024, 1024)) + 1
    assert tree.nbytes((lazy, Cache(lazy), mx.zeros(3, mx.bool_))) == 4 * 1024**2 + 3
    assert mx.get_active_memory() - before < lazy.nbytes


def test_evaluate_evaluates():
    lazy = mx.zeros((1024, 1024)) + 1
    before = mx.get_active_memory()
    assert tree.evaluate([Cache(lazy)], "static") is None
    assert mx.get_active_memory() - before > 0.9 * lazy.nbytes


# at


def test_at_changes_a_copy_and_shares_the_rest():
    new = tree.at(CACHE, lambda t: t["layers"][0].keys).set("new")
    assert new["layers"][0].keys == "new"
    assert new["layers"][1] is CACHE["layers"][1]
    assert CACHE["layers"][0].keys.shape == (2, 3)


def test_at_reaches_static_fields_subtrees_named_tuples_and_the_root():
    assert tree.at(CACHE, lambda t: t["layers"][0].geometry.window).get() == 8
    changed = tree.at(CACHE, lambda t: t["layers"][-1].geometry.window).apply(lambda w: 16)
    assert changed["layers"][1].geometry.window == 16
    assert tree.at(CACHE, lambda t: t["layers"]).set(())["layers"] == ()
    for where in (lambda t: t["pair"].second, lambda t: t["pair"][1]):
        pair = tree.at(CACHE, where).set("x")["pair"]
        assert (type(pair), pair.second) == (Pair, "x")
    assert tree.at(CACHE, lambda t: t).set(3) == 3


def test_at_reaches_into_static_attrs_classes():
    @attrs.frozen
    class Policy:
        window: int
        sinks: int = 0

    cache = Cache(mx.array(1), None, Policy(8, 4))
    assert tree.at(cache, lambda c: c.geometry.window).set(16).geometry == Policy(16, 4)
    with pytest.raises(TreeError, match=r"tree\.geometry is a Policy"):
        tree.at(cache, lambda c: c.geometry.chunk)


def test_at_runs_validators():
    @record
    class Bits:
        bits: int = static(validator=attrs.validators.in_([4, 8]))

    with pytest.raises(ValueError, match="bits"):
        tree.at([Bits(4)], lambda t: t[0].bits).set(5)


def test_at_several_places():
    place = tree.at(CACHE, lambda t: (t["none"], t["layers"][0].geometry))
    assert place.get() == (None, CACHE["layers"][0].geometry)
    new = place.set((1, 2))
    assert (new["none"], new["layers"][0].geometry) == (1, 2)
    assert place.apply(lambda x: repr(x))["none"] == "None"
    with pytest.raises(TreeError, match="2 places"):
        place.set((1,))
    with pytest.raises(TreeError, match="2 places"):
        place.set(1)


@pytest.mark.parametrize(
    ("where", "says"),
    [
        (lambda t: t["layers"][2], r"tree\['layers'\]\[2\] is not .* list"),
        (lambda t: t["layers"]["0"], "not in the tree"),
        (lambda t: t["layers"][0:1], "not in the tree"),
        (lambda t: t["missing"], r"tree\['missing'\] is not in the tree"),
        (lambda t: t.layers, r"tree\.layers is not in the tree: tree is a dict"),
        (lambda t: t["layers"][0].other, r"\.other is not .*Cache"),
        (lambda t: t["layers"][0].keys[0], r"\.keys\[0\] is not .* array"),
        (lambda t: t["layers"][0].keys.shape, "not in the tree"),
        (lambda t: t.keys(), "cannot call"),
        (lambda t: list(t["layers"]), "cannot iterate"),
        (lambda t: CACHE["layers"][0], "must return a part"),
        (lambda t: (t["pair"], t["pair"].first), "overlap"),
        (lambda t: (t["layers"][1], t["layers"][-1]), "overlap"),
    ],
)
def test_at_somewhere_else_is_an_error(where, says):
    with pytest.raises(TreeError, match=says):
        tree.at(CACHE, where)


# compile


def _double(t):
    return tree.map(lambda x: x + x, t)


@settings(max_examples=8, deadline=None)
@given(trees)
def test_compiled_function_equals_the_function(t):
    t = tree.map(lambda x: x.astype(mx.float32), t)
    compiled = tree.compile(_double)
    assert tree.equal(compiled(t), _double(t))
    assert tree.equal(compiled(t), _double(t))
    assert compiled.traces == 1


def test_compile_traces_again_exactly_when_the_structure_changes():
    step = tree.compile(lambda c, n=1: replace(c, keys=c.keys + n))
    cache = Cache(mx.zeros(3), None, Geometry(8))
    seen = []
    for c, kwargs in [
        (cache, {}),
        (replace(cache, keys=mx.ones(3)), {}),
        (replace(cache, geometry=Geometry(8)), {}),
        (replace(cache, geometry=Geometry(9)), {}),
        (cache, {"n": 1}),
        (cache, {"n": True}),
        (cache, {"n": 1.0}),
        (cache, {"n": mx.array(1)}),
        (cache, {"n": mx.array(2)}),
        (replace(cache, keys=mx.zeros(4)), {}),
        (replace(cache, keys=mx.zeros(3, mx.float16)), {}),
        (cache, {}),
    ]:
        out = step(c, **kwargs)
        assert tree.equal(out, replace(c, keys=c.keys + kwargs.get("n", 1)))
        seen.append(step.traces)
    assert seen == [1, 1, 1, 2, 3, 4, 5, 6, 6, 7, 8, 8]


def test_compile_keeps_one_output_structure_a_shape():
    grow = tree.compile(lambda x: {"small": x} if x.size < 3 else [x, Geometry(x.size)])
    small, large = mx.zeros(2), mx.zeros(3)
    for _ in range(2):
        assert list(grow(small)) == ["small"]
        assert grow(large)[1].window == 3
    assert grow.traces == 2


def test_compile_shapeless_traces_once_a_rank():
    double = tree.compile(_double, shapeless=True)
    for x in (mx.ones(2), mx.ones(5), mx.ones((1, 2))):
        assert tree.equal(double(x), 2 * x)
    assert double.traces == 2


def test_compile_of_no_arrays_and_of_methods():
    assert tree.compile(lambda s: (s, None))("a") == ("a", None)

    @record
    class Scale:
        by: mx.array

        @tree.compile
        def __call__(self, x):
            return x * self.by

    assert Scale(mx.array(3))(mx.array(2)).item() == 6


def test_compile_recovers_from_an_error_in_the_trace():
    fail = [True]

    def f(x):
        if fail:
            fail.pop()
            raise ValueError("once")
        return [x + 1]

    compiled = tree.compile(f)
    with pytest.raises(ValueError, match="once"):
        compiled(mx.array(1))
    assert compiled(mx.array(1))[0].item() == 2


def test_compile_keeps_no_argument_alive():
    compiled = tree.compile(_double)
    x = mx.zeros((1024, 1024)) + 1
    mx.eval(x, compiled(x))
    before = mx.get_active_memory()
    del x
    assert before - mx.get_active_memory() > 0.9 * 4 * 1024**2


# vmap


def test_vmap_equals_a_loop():
    def f(c, y, scale):
        return Cache(c.keys @ y * scale, {"n": c.values + 1}, c.geometry)

    c = Cache(mx.arange(24.0).reshape(4, 2, 3), mx.arange(4))
    y = mx.arange(3.0)
    got = tree.vmap(f, in_axes=(0, None, None))(c, y, 2)
    rows = [f(tree.map(lambda x, i=i: x[i], c), y, 2) for i in range(4)]
    want = tree.map(lambda *xs: mx.stack(xs), *rows)
    assert tree.structure(got) == tree.structure(want)
    assert tree.equal(got.values, want.values)
    assert mx.allclose(got.keys, want.keys)


def test_vmap_axes():
    x = mx.arange(6).reshape(2, 3)
    got = tree.vmap(lambda t: [t["x"] * 2], in_axes=1, out_axes=1)({"x": x})
    assert tree.equal(got, [x * 2])
    by_keyword = tree.vmap(lambda t, *, y: t + y.sum())(x, y=mx.array([1, 1]))
    assert tree.equal(by_keyword, x + 2)


def test_vmap_with_nothing_mapped_is_an_error():
    with pytest.raises(TreeError, match="no array is mapped"):
        tree.vmap(lambda x: x, in_axes=None)(mx.zeros(2))
    with pytest.raises(TreeError, match="do not fit 1"):
        tree.vmap(lambda x: x, in_axes=(0, 0))(mx.zeros(2))


# value_and_grad


PARAMETERS = {
    "w": mx.array([1.0, 2.0]),
    "half": [mx.array(3.0, mx.float16), "static"],
    "steps": mx.array(2),
}


def _loss(p, power=2):
    return (p["w"] ** power).sum() * p["half"][0].astype(mx.float32) * p["steps"]


def test_gradient_is_analytic_with_none_for_integers():
    value, gradient = tree.value_and_grad(_loss)(PARAMETERS)
    assert value.item() == 30
    assert gradient["w"].tolist() == [12, 24]
    assert (gradient["half"][0].item(), gradient["half"][0].dtype) == (10, mx.float16)
    assert (gradient["half"][1], gradient["steps"]) == ("static", None)
    assert tree.equal(tree.grad(_loss)(PARAMETERS), gradient)


def test_gradient_of_several_arguments_and_of_a_later_one():
    def f(a, b, *, c):
        return (a.keys * b * c).sum()

    a, b = Cache(mx.array(2.0)), mx.array(5.0)
    first, second = tree.grad(f, (0, 1))(a, b, c=3)
    assert (first.keys.item(), second.item()) == (15, 6)
    assert tree.grad(f, 1)(a, b, c=3).item() == 6


def test_gradient_with_aux():
    def f(p):
        return (p["w"] * 3).sum(), Cache(p["w"] + 1, "seen")

    (value, aux), gradient = tree.value_and_grad(f, has_aux=True)(PARAMETERS)
    assert (value.item(), aux.keys.tolist(), aux.values) == (9, [2, 3], "seen")
    alone, again = tree.grad(f, has_aux=True)(PARAMETERS)
    assert tree.equal((alone, again), (gradient, aux))
    assert gradient["w"].tolist() == [3, 3]


def test_gradient_errors():
    with pytest.raises(TreeError, match="no floating"):
        tree.grad(lambda x: x)(mx.array(1))
    with pytest.raises(TreeError, match=r"scalar array, not \(2,\)"):
        tree.grad(lambda x: x)(mx.zeros(2))
    with pytest.raises(TreeError, match="scalar array, not float"):
        tree.grad(lambda x: 1.0)(mx.zeros(2))


def test_transformations_compose():
    slope = tree.compile(tree.vmap(tree.grad(lambda p: (p["w"] ** 3).sum())))
    got = slope({"w": mx.array([[1.0], [2.0]])})
    assert mx.allclose(got["w"], mx.array([[3.0], [12.0]]))
    assert slope.traces == 1
