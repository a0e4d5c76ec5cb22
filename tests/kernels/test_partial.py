"""Partial results are a monoid: whatever the columns are cut into, merged they are the whole."""

from itertools import pairwise

import hypothesis.strategies as st
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given

from kvfun.errors import ShapeError
from kvfun.kernels import UNFUSED, Partial, merge, sink_part

from . import dense
from .cases import FLOATS, PAIRS, SETS, Case, numbers, raw, tiles_of, wide

LOWEST = mx.finfo(mx.float32).min


def parts_of(case: Case, kernel, cuts: list[int]) -> list[Partial]:
    """The partial results over the columns between the cuts."""
    edges = [0, *sorted(cuts), case.k.shape[2]]
    return [piece(case, kernel, a, b) for a, b in pairwise(edges)]


def piece(case: Case, kernel, start: int, stop: int) -> Partial:
    keys, values = cut(case.keys, start, stop), cut(case.values, start, stop)
    mask, length, columns = case.mask, case.queries.shape[2], case.k.shape[2]
    if isinstance(mask, str):
        # Lower-right alignment: the last columns know which queries see them; others need an array.
        seen = mx.arange(start, stop)[None] <= mx.arange(columns - length, columns)[:, None]
        mask = "causal" if stop == columns else seen
    elif callable(mask):
        whole = case.mask
        mask = lambda a, b, c, d: whole(a, b, start + c, start + d)  # noqa: E731
    elif mask is not None and mask.shape[-1] > 1:
        mask = mask[..., start:stop]
    return kernel(
        case.queries, keys, values, case.codec, scale=case.scale, mask=mask, sinks=None
    )  # fmt: skip


def cut(planes, start: int, stop: int):
    return tuple(plane[:, :, start:stop] for plane in planes)


def check(case: Case, part: Partial) -> None:
    """The partial result is that of all columns."""
    case.check(lambda *given, **rest: part)


@given(
    pair=st.sampled_from(PAIRS),
    heads=st.sampled_from([(1, 1), (2, 3), (1, 8), (3, 1)]),
    batch=st.integers(1, 2),
    length=st.integers(1, 9),
    more=st.integers(0, 30),
    mask=st.sampled_from(list(dense.MASKS)),
    sinks=st.booleans(),
    tile=st.sampled_from([(3, 2), (256, 512)]),
    data=st.data(),
)
def test_any_cut_of_the_columns(pair, heads, batch, length, more, mask, sinks, tile, data):
    (name, spec), (kv_heads, group), columns = pair, heads, length + more
    case = Case(
        spec, batch=batch, kv_heads=kv_heads, group=group, length=length, columns=columns,
        mask=mask, sinks=sinks, seed=more,
    )  # fmt: skip
    cuts = data.draw(st.sets(st.integers(1, columns - 1), max_size=5)) if columns > 1 else set()
    with pytest.MonkeyPatch.context() as patch:
        tiles_of(patch, *tile)
        parts = parts_of(case, SETS[name]["partial"], list(cuts))
        if sinks:
            parts.insert(data.draw(st.integers(0, len(parts))), sink_part(case.sinks, parts[0]))
        check(case, merge(parts))
        middle = data.draw(st.integers(1, max(1, len(parts) - 1)))
        if middle < len(parts):
            check(case, merge([merge(parts[:middle]), merge(parts[middle:])]))
        check(case, merge(data.draw(st.permutations(parts))))


def test_associative():
    case = Case("kv4", length=3, columns=40, mask="causal", seed=1)
    a, b, c = parts_of(case, UNFUSED["partial"], [9, 30])
    ways = [merge([a, b, c]), merge([merge([a, b]), c]), merge([a, merge([b, c])])]
    for other in ways[1:]:
        assert np.abs(wide(other.out) - wide(ways[0].out)).max() < 1e-6
        assert np.abs(wide(other.lse) - wide(ways[0].lse)).max() < 1e-6


def test_one_part_is_returned_as_it_is():
    case = Case("kv4")
    part = case.run(UNFUSED["partial"])
    same = merge([part])
    assert same.out is part.out
    assert same.lse is part.lse
    assert merge([tuple(part)]) == part


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("spec", ["f32", "kv4"])
def test_the_result_is_that_of_the_full_kernels(name, spec, small_tiles):
    for phase, length in (("decode", 1), ("window", 6)):
        case = Case(spec, batch=2, length=length, columns=20, mask="causal", sinks=True)
        full, part = case.run(SETS[name][phase]), case.run(SETS[name]["partial"])
        assert mx.allclose(full, part.out, atol=1e-6)


# -- what a query does not see --------------------------------------------------------------------


@pytest.mark.parametrize("hidden", ["causal", "bool", "-inf", "lowest", "lazy"])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("spec", ["plain", "kv4"])
@pytest.mark.parametrize("name", SETS)
def test_a_part_of_which_nothing_is_seen_does_not_count(name, spec, dtype, hidden, small_tiles):
    """Also where fewer columns than queries are given: then the first queries see none."""
    case = Case(spec, batch=2, length=6, columns=4, dtype=dtype, stored=dtype)
    seen = np.arange(4) <= np.arange(-2, 4)[:, None]
    low = -np.inf if hidden == "-inf" else mx.finfo(dtype).min
    floats = mx.array(np.where(seen, 0, low).astype(np.float32)).astype(dtype)
    bools = mx.array(seen)
    lazy = lambda a, b, c, d: bools[a:b, c:d]  # noqa: E731
    case.mask = {"causal": "causal", "bool": bools, "lazy": lazy}.get(hidden, floats)
    part = case.run(SETS[name]["partial"])
    assert np.isfinite(wide(part.out)).all()
    assert np.isfinite(wide(part.lse)).all()
    wanted, sums = dense.partial(case.queries, case.k, case.v, case.scale, bools)
    assert np.abs(wide(part.out) - wanted)[:, :, 2:].max() < 1e-4
    assert np.abs(wide(part.lse) - sums)[:, :, 2:].max() < 1e-4
    assert wide(part.lse)[:, :, :2].max() <= float(mx.finfo(dtype).min) / 2

    other = Case(spec, batch=2, length=6, columns=9, dtype=dtype, stored=dtype, seed=1)
    other = other.run(UNFUSED["partial"])
    for parts in ([part, other], [other, part]):
        both = merge(parts)
        assert raw(both.out[:, :, :2]) == raw(other.out[:, :, :2])
        assert raw(both.lse[:, :, :2]) == raw(other.lse[:, :, :2])


@pytest.mark.parametrize("name", SETS)
def test_nothing_seen_at_all_stays_finite(name, small_tiles):
    case = Case("kv4", length=6, columns=20)
    case.mask = mx.zeros((6, 20), mx.bool_)
    parts = [case.run(SETS[name]["partial"]) for _ in range(3)]
    both = merge(parts)
    assert np.isfinite(wide(both.out)).all()
    assert np.isfinite(wide(both.lse)).all()
    case.sinks = mx.array([1.0, 2.0, 3.0, 4.0])
    out, lse = case.run(SETS[name]["partial"])
    assert not mx.any(out)
    assert mx.array_equal(lse, mx.broadcast_to(case.sinks[:, None], lse.shape))


@pytest.mark.parametrize("name", SETS)
def test_no_columns(name):
    """What a chain's empty part would be: the neutral element."""
    for spec in ("f32", "kv4", "mxfp8"):
        for sinks in (False, True):
            case = Case(spec, length=2, columns=3, dims=(64, 128), sinks=sinks)
            case.keys, case.values = cut(case.keys, 0, 0), cut(case.values, 0, 0)
            out, lse = case.run(SETS[name]["partial"])
            assert out.shape == (1, 4, 2, 128)
            assert not mx.any(out)
            wanted = case.sinks[:, None] if sinks else mx.array(LOWEST)
            assert mx.array_equal(lse, mx.broadcast_to(wanted, (1, 4, 2)))
            full = case.run(SETS[name]["window"])
            assert not mx.any(full)
            assert full.shape == out.shape


# -- sinks ----------------------------------------------------------------------------------------


def test_the_sinks_part_is_a_key_without_a_value():
    case = Case("f32", batch=2, length=3)
    part = case.run(UNFUSED["partial"])
    for dtype in FLOATS:
        out, lse = sink_part(mx.array([1.0, -2.0, 3.0, 0.5]).astype(dtype), part)
        assert (out.dtype, lse.dtype) == (mx.float32, mx.float32)
        assert (out.shape, lse.shape) == (part.out.shape, part.lse.shape)
        assert not mx.any(out)
        assert lse[1, :, 2].tolist() == [1.0, -2.0, 3.0, 0.5]


def test_sinks_in_one_part_are_sinks_of_the_whole():
    case = Case("kv8", length=3, columns=20, sinks=True)
    first, second = parts_of(case, UNFUSED["partial"], [11])
    check(case, merge([merge([first, sink_part(case.sinks, first)]), second]))


# -- errors ---------------------------------------------------------------------------------------


def test_parts_that_cannot_be_merged():
    with pytest.raises(ShapeError, match="at least one"):
        merge([])
    one = Case("f32", length=3).run(UNFUSED["partial"])
    for other in (Case("f32", length=2), Case("f32", batch=2, length=3), Case("f32", group=1)):
        with pytest.raises(
            ShapeError, match=r"different shapes: \(1, 4, 3, 64\).*\(\d, \d, \d, 64"
        ):
            merge([one, other.run(UNFUSED["partial"])])


def test_sinks_of_another_number_of_heads():
    part = Case("f32").run(UNFUSED["partial"])
    with pytest.raises(ShapeError, match=r"\(4,\), not \(3,\)"):
        sink_part(mx.zeros(3), part)


def test_large_scores_neither_overflow_nor_vanish():
    """The rescaling by the maximum is what keeps exp(1000) out of the sums."""
    rng = np.random.default_rng(0)
    outs = [numbers(rng, 1, 1, 2, 4) for _ in range(3)]
    lses = [mx.array([[[1000.0, -1000.0]]]), mx.array([[[999.0, -999.0]]])]
    out, lse = merge([*zip(outs, lses, strict=False)])
    e = np.exp(1.0)
    assert np.allclose(wide(lse)[0, 0], [1000 + np.log1p(1 / e), -999 + np.log1p(1 / e)])
    shares = np.array([[e, 1], [1, e]]) / (1 + e)
    wanted = shares[:, :1] * wide(outs[0])[0, 0] + shares[:, 1:] * wide(outs[1])[0, 0]
    assert np.allclose(wide(out)[0, 0], wanted, atol=1e-6)
