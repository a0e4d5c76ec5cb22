"""Moments, balanced bases and rounding with feedback, against float64 that shares no code."""

import io
from itertools import pairwise

import mlx.core as mx
import numpy as np
import pytest

from kvfun.codecs._statistics import (
    balanced,
    cost,
    feedback,
    query_moment,
    round_with_feedback,
    second_moment,
    times,
)
from kvfun.errors import ShapeError

from .test_affine import f64, raw

B, H = 2, 3
DIMS = (64, 80, 128)
KEYS, QUERIES = 0.1, 0.05


def skewed(
    seed: int, tokens: int, dim: int = 64, heads: int = H, spread: float = 1.5
) -> np.ndarray:
    """Correlated vectors whose channels differ by orders of magnitude, otherwise in each head."""
    random = np.random.default_rng(seed)
    size = np.exp(spread * random.standard_normal((B, heads, 1, dim)))
    mixing = random.standard_normal((B, heads, dim, dim)) / dim**0.5
    return (random.standard_normal((B, heads, tokens, dim)) * size @ mixing).astype(np.float32)


def moment(x: np.ndarray, shrinkage: float) -> np.ndarray:
    x = x.astype(np.float64)
    mean = np.einsum("...ni,...nj->...ij", x, x) / x.shape[-2]
    eigenvalue = np.trace(mean, axis1=-2, axis2=-1)[..., None, None] / x.shape[-1]
    return (1 - shrinkage) * mean + shrinkage * eigenvalue * np.eye(x.shape[-1])


def near(got: mx.array, wanted: np.ndarray, tolerance: float) -> bool:
    """Relative to the largest number of each matrix."""
    size = np.abs(wanted).max((-1, -2), keepdims=True)
    return bool((np.abs(f64(got) - wanted) <= tolerance * size).all())


def eighths(x: mx.array) -> mx.array:
    return mx.round(x * 8) / 8


# -- moments --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("tokens", [1, 7, 3000])
def test_second_moments_are_those_in_float64(dim, tokens):
    x = skewed(dim, tokens, dim)
    for shrinkage in (0.0, 0.05, 1.0):
        got = second_moment(mx.array(x), shrinkage)
        assert got.dtype == mx.float32
        assert near(got, moment(x, shrinkage), 1e-5)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_moments_of_short_floats_are_summed_in_float32(dtype):
    x = mx.array(skewed(1, 5000)).astype(dtype)
    assert near(second_moment(x, 0.1), moment(f64(x), 0.1), 1e-5)


def test_queries_are_grouped_by_the_head_they_read():
    x = skewed(2, 50, heads=6)
    got = query_moment(mx.array(x), 2)
    for head in range(2):
        group = [x[:, h] for h in range(6) if h // 3 == head]
        assert near(got[:, head], moment(np.concatenate(group, axis=1), QUERIES), 2e-6)
    assert near(query_moment(mx.array(x), 6, 0.3), moment(x, 0.3), 2e-6)


def test_query_heads_that_do_not_divide_are_refused():
    with pytest.raises(ShapeError, match="6 query heads"):
        query_moment(mx.zeros((1, 6, 5, 64)), 4)


def test_moments_of_nothing_to_go_by_are_the_identity():
    x = skewed(3, 20)
    x[0, 0] = 0
    x[0, 1, 4, 5], x[0, 2, 4, 5], x[1, 0, 4, 5] = np.nan, np.inf, -np.inf
    got = f64(second_moment(mx.array(x), 0.1))
    for odd in (got[0, 0], got[0, 1], got[0, 2], got[1, 0]):
        assert np.array_equal(odd, np.eye(64))
    assert near(mx.array(got[1, 1:].astype(np.float32)), moment(x[1, 1:], 0.1), 2e-6)


# -- a balanced basis -----------------------------------------------------------------------------


def check_balanced(of_queries: mx.array, of_keys: mx.array, equal: float = 5e-3) -> None:
    """What a basis promises, in float64; moments are equal to the rounding of their square root."""
    a, b = map(f64, balanced(of_queries, of_keys))
    q, k = f64(of_queries), f64(of_keys)
    dim = a.shape[-1]
    products = a @ b.swapaxes(-1, -2)
    assert np.abs(products - np.eye(dim)).max() < 5e-5
    new_k = a.swapaxes(-1, -2) @ k @ a
    new_q = b.swapaxes(-1, -2) @ q @ b
    trace_k, trace_q = (np.trace(x, axis1=-2, axis2=-1)[..., None, None] for x in (new_k, new_q))
    kept = np.trace(k, axis1=-2, axis2=-1)[..., None, None]
    assert np.abs(trace_k / kept - 1).max() < 1e-5
    unit_k, unit_q = new_k / trace_k * dim, new_q / trace_q * dim
    assert np.abs(unit_k - unit_q).max() < equal
    for unit in (unit_k, unit_q):
        flat = np.diagonal(unit, axis1=-2, axis2=-1)
        assert np.abs(flat - 1).max() < equal
    # the product of the traces is the least there is: that of the roots of the product's spectrum
    least = np.sqrt(np.linalg.eigvals(q @ k).real.clip(0)).sum(-1) ** 2
    assert np.abs(trace_k * trace_q / least[..., None, None] - 1).max() < equal / 10


@pytest.mark.parametrize("dim", DIMS)
def test_a_balanced_basis_makes_both_moments_equal_and_flat(dim):
    q, k = mx.array(skewed(4, 500, dim)), mx.array(skewed(5, 300, dim))
    check_balanced(second_moment(q, QUERIES), second_moment(k, KEYS))


@pytest.mark.parametrize("dim", DIMS)
def test_a_balanced_basis_keeps_the_products(dim):
    q, k = mx.array(skewed(4, 60, dim)), mx.array(skewed(5, 40, dim))
    a, b = balanced(second_moment(q, QUERIES), second_moment(k, KEYS))
    wanted = f64(q) @ f64(k).swapaxes(-1, -2)
    got = f64(q @ b) @ f64(times(k, a)).swapaxes(-1, -2)
    lengths = [np.linalg.norm(f64(x), axis=-1) for x in (q, k)]
    assert (np.abs(got - wanted) <= 1e-5 * lengths[0][..., None] * lengths[1][..., None, :]).all()


def test_a_basis_does_not_depend_on_the_size_of_its_moments():
    q, k = second_moment(mx.array(skewed(6, 90)), 0.05), second_moment(mx.array(skewed(7, 90)), 0.1)
    a, b = balanced(q, k)
    for of_queries, of_keys in ((2.0**40, 2.0**-40), (2.0**-40, 2.0**40), (2.0**60, 2.0**60)):
        other = balanced(q * of_queries, k * of_keys)
        assert mx.allclose(other[0], a, rtol=1e-4, atol=1e-5).item()
        assert mx.allclose(other[1], b, rtol=1e-4, atol=1e-5).item()


@pytest.mark.parametrize("size", [1e-12, 1.0, 1e12])
def test_prompts_of_hardly_anything_are_balanced(size):
    one, constant = skewed(8, 1) * size, np.repeat(skewed(9, 1), 30, axis=2) * size
    many, zeros = skewed(10, 200) * size, np.zeros((B, H, 5, 64), np.float32)
    for q, k in ((one, many), (many, one), (constant, many), (zeros, many), (many, zeros)):
        moments = [second_moment(mx.array(x), 0.1) for x in (q, k)]
        check_balanced(*moments, equal=2e-2)
        assert mx.isfinite(feedback(moments[0])).all().item()


# -- feedback -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", DIMS)
def test_feedback_leaves_the_least_that_later_numbers_cannot_make_up_for(dim):
    metric = query_moment(mx.array(skewed(11, 400, dim)), H)
    lower, m = f64(feedback(metric)), f64(metric)
    assert not np.triu(lower).any()
    for index in (1, 2, dim // 2, dim - 1):
        # errors before it given, all from it on are free: those that cost least
        later, before = m[..., index:, index:], m[..., index:, :index]
        wanted = np.linalg.solve(later, before)[..., 0, :]
        size = np.abs(wanted).max(-1, keepdims=True) + 1e-3
        assert (np.abs(lower[..., index, :index] - wanted) <= 1e-3 * size).all()


def test_feedback_of_independent_errors_is_none():
    assert not mx.any(feedback(mx.eye(64)[None, None] * 3.0)).item()
    metric = mx.eye(64) * mx.arange(1, 65)
    assert not mx.any(feedback(metric)).item()


def by_solving(y: np.ndarray, m: np.ndarray) -> np.ndarray:
    """Rounded to eighths in float64, by what least squares say of each number's target."""
    dim = y.shape[-1]
    errors = np.zeros_like(y)
    for i in range(dim):
        gain = np.linalg.solve(m[..., i:, i:], m[..., i:, :i])[..., 0, :] if i else m[..., 0, :0]
        target = y[..., i] - np.einsum("...j,...nj->...n", gain, errors[..., :i])
        errors[..., i] = np.round(target * 8) / 8 - y[..., i]
    return y + errors


@pytest.mark.parametrize("dim", DIMS[:2])
def test_rounding_is_that_of_least_squares(dim):
    metric = query_moment(mx.array(skewed(12, 400, dim)), H)
    y = mx.array(skewed(13, 40, dim, spread=0.3))
    got = f64(round_with_feedback(y, feedback(metric), eighths))
    # a target midway between two numbers may go up here and down there, and all behind it change
    wanted = by_solving(f64(y), f64(metric))
    same = (np.abs(got - wanted) < 1e-6).all(-1)
    assert same.mean() > 0.9
    # and each target, from the errors that were made, is rounded to the nearest number
    gain = f64(feedback(metric))
    targets = f64(y) - (got - f64(y)) @ gain.swapaxes(-1, -2)
    assert np.abs(got - targets).max() < 1 / 16 + 1e-4


def test_rounding_costs_less_than_to_the_nearest_where_errors_are_correlated():
    metric = query_moment(mx.array(skewed(14, 400)), H)
    y = mx.array(skewed(15, 200, spread=0.3))
    fed = f64(cost(round_with_feedback(y, feedback(metric), eighths) - y, metric)).mean(-1)
    plain = f64(cost(eighths(y) - y, metric)).mean(-1)
    assert (fed < 0.7 * plain).all()


def test_rounding_without_correlation_is_to_the_nearest():
    y = mx.array(skewed(16, 50))
    lower = feedback(mx.broadcast_to(mx.eye(64), (B, H, 64, 64)))
    assert raw(round_with_feedback(y, lower, eighths)) == raw(eighths(y))


@pytest.mark.parametrize("dim", DIMS)
def test_a_cost_is_that_in_float64(dim):
    metric = query_moment(mx.array(skewed(17, 300, dim)), H)
    error = mx.array(np.stack([skewed(18, 9, dim), skewed(19, 9, dim)]))
    wanted = np.einsum("sbhni,bhij,sbhnj->sbhn", f64(error), f64(metric), f64(error))
    got = f64(cost(error, metric))
    assert got.shape == (2, B, H, 9)
    scale = np.einsum("sbhni,sbhni->sbhn", f64(error), f64(error)) * np.abs(f64(metric)).max()
    assert (np.abs(got - wanted) <= 1e-5 * scale).all()


# -- tokens and candidates ------------------------------------------------------------------------

CUTS = (0, 1, 2, 5, 13, 29, 30, 65, 130)


@pytest.mark.parametrize("dim", DIMS)
def test_a_token_does_not_depend_on_the_others(dim):
    metric = query_moment(mx.array(skewed(20, 300, dim)), H)
    y, lower = mx.array(skewed(21, CUTS[-1], dim)), feedback(metric)

    def everything(x: mx.array) -> list[mx.array]:
        rounded = round_with_feedback(x, lower, eighths)
        return [times(x, metric), rounded, cost(rounded - x, metric)[..., None]]

    whole = everything(y)
    parts = zip(*[everything(y[:, :, i:j]) for i, j in pairwise(CUTS)], strict=True)
    for one, other in zip(whole, parts, strict=True):
        assert raw(one) == raw(mx.concatenate(list(other), axis=2))


def test_what_is_encoded_is_no_matrix_product():
    """OpenBLAS, Accelerate and GPUs round those of one token and of many otherwise."""
    metric, y = mx.eye(64)[None, None] * 2, mx.array(skewed(21, 9))
    for one in (times(y, metric), round_with_feedback(y, metric, eighths), cost(y, metric)):
        graph = io.StringIO()
        mx.export_to_dot(graph, one)
        assert "Multiply" in graph.getvalue()
        assert "atmul" not in graph.getvalue()


def test_a_row_and_a_head_do_not_depend_on_the_others():
    metric = query_moment(mx.array(skewed(20, 300)), H)
    y, lower = mx.array(skewed(21, 40)), feedback(metric)
    whole, turned = round_with_feedback(y, lower, eighths), times(y, metric)
    for row, head in ((0, 0), (1, 2)):
        one = slice(row, row + 1), slice(head, head + 1)
        assert raw(round_with_feedback(y[one], lower[one], eighths)) == raw(whole[one])
        assert raw(times(y[one], metric[one])) == raw(turned[one])


def test_candidates_are_rounded_as_each_would_be():
    metric = query_moment(mx.array(skewed(22, 300)), H)
    y, lower = mx.array(skewed(23, 33)), feedback(metric)
    sizes = mx.array([0.5, 0.8, 1.0, 1.3, 2.0])
    steps = (sizes.reshape(-1, 1, 1, 1) * (0.1 + mx.abs(y[..., 0]))).astype(mx.float32)

    def with_step(step: mx.array):
        return lambda targets: mx.round(targets / step) * step

    together = round_with_feedback(mx.broadcast_to(y, (5, *y.shape)), lower, with_step(steps))
    assert together.shape == (5, *y.shape)
    costs = cost(together - y, metric)
    for index in range(5):
        alone = round_with_feedback(y, lower, with_step(steps[index]))
        assert raw(together[index]) == raw(alone)
        assert raw(costs[index]) == raw(cost(alone - y, metric))


def test_nothing_is_evaluated():
    """Of arrays that no memory can hold, results are described as of any."""
    huge = mx.broadcast_to(mx.random.normal((1, 1, 1, 64)), (64, 64, 2**24, 64)) * 2
    metric = second_moment(huge, 0.05)
    a, b = balanced(metric, metric)
    lower = feedback(metric)
    rounded = round_with_feedback(huge, lower, eighths)
    assert a.shape == b.shape == lower.shape == (64, 64, 64, 64)
    assert rounded.shape == huge.shape
    assert cost(rounded - huge, metric).shape == huge.shape[:-1]


# -- what is odd ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_keys_and_queries_of_one_direction_are_balanced(dim):
    """The spectrum of both is that of each squared: the least of it is lost in float32."""
    one = np.repeat(skewed(24, 1, dim, heads=12), 9, axis=2)
    moments = [second_moment(mx.array(one), shrinkage) for shrinkage in (QUERIES, KEYS)]
    check_balanced(*moments, equal=5e-2)


@pytest.mark.parametrize("shrinkage", [1e-3, 0.0])
def test_moments_that_are_hardly_or_not_definite_give_a_basis_still(shrinkage):
    q, k = mx.array(skewed(25, 3)), mx.array(skewed(26, 3))
    a, b = map(f64, balanced(second_moment(q, shrinkage), second_moment(k, shrinkage)))
    assert np.abs(a @ b.swapaxes(-1, -2) - np.eye(64)).max() < 2e-2


@pytest.mark.parametrize("of_queries", [1e-30, 1e-20, 1e20, 1e30])
@pytest.mark.parametrize("of_keys", [1e-30, 1e30])
def test_norms_whose_squares_are_no_float32(of_queries, of_keys):
    q, k = mx.array(skewed(27, 90)), mx.array(skewed(28, 90))
    q, k = q / mx.max(mx.abs(q)) * of_queries, k / mx.max(mx.abs(k)) * of_keys
    moments = second_moment(q, QUERIES), second_moment(k, KEYS)
    check_balanced(*moments)
    assert mx.isfinite(feedback(moments[0])).all().item()
    x, size = f64(q), np.abs(f64(q)).max((-1, -2), keepdims=True)
    scale = np.clip(size, 1e-12, 1e12) / size
    assert near(moments[0], moment(x * scale, QUERIES), 1e-5)


def test_no_tokens_have_the_identity():
    for x in (mx.zeros((B, H, 0, 64)), mx.zeros((0, 64))):
        got = second_moment(x, 0.1)
        assert got.shape == (*x.shape[:-2], 64, 64)
        assert mx.array_equal(got, mx.broadcast_to(mx.eye(64), got.shape)).item()


def test_a_rotation_may_be_given():
    q, k = (second_moment(mx.array(skewed(seed, 90)), 0.1) for seed in (29, 30))
    turn = np.linalg.qr(np.random.default_rng(31).standard_normal((64, 64)))[0]
    a, _ = balanced(q, k, mx.array(turn.astype(np.float32)))
    plain = balanced(q, k, mx.eye(64))
    assert mx.allclose(a, plain[0] @ mx.array(turn.astype(np.float32)), atol=1e-4).item()
    new_k = f64(plain[0]).swapaxes(-1, -2) @ f64(k) @ f64(plain[0])
    off = new_k - new_k * np.eye(64)
    assert np.abs(off).max() < 1e-2 * np.abs(new_k).max()


@pytest.mark.parametrize("dim", [20, 36, 72])
def test_sizes_with_and_without_a_hadamard_matrix(dim):
    q, k = (second_moment(mx.array(skewed(seed, 90, dim)), 0.1) for seed in (32, 33))
    a, b = map(f64, balanced(q, k))
    assert np.abs(a @ b.swapaxes(-1, -2) - np.eye(dim)).max() < 5e-5
    new_k = a.swapaxes(-1, -2) @ f64(k) @ a
    spectrum, flat = np.linalg.eigvalsh(new_k), np.diagonal(new_k, axis1=-2, axis2=-1)
    assert (flat.max(-1) < 0.6 * spectrum.max(-1)).all()


@pytest.mark.parametrize("dim", [1, 2, 6, 20, 63])
def test_products_of_any_size(dim):
    x, matrix = skewed(34, 40, dim), skewed(35, dim, dim)
    wanted = x.astype(np.float64) @ matrix.astype(np.float64)
    for tokens in (1, 40):
        got = f64(times(mx.array(x[:, :, :tokens]), mx.array(matrix)))
        assert np.abs(got - wanted[:, :, :tokens]).max() < 1e-5 * np.abs(wanted).max()


def test_shapes_that_do_not_fit_are_refused():
    square, wide = mx.zeros((B, H, 64, 64)), mx.zeros((B, H, 64, 32))
    y = mx.zeros((B, H, 5, 64))
    for bad in (
        lambda: second_moment(mx.zeros(64), 0.1),
        lambda: second_moment(mx.zeros((3, 0)), 0.1),
        lambda: query_moment(y[0], 1),
        lambda: query_moment(y, 0),
        lambda: query_moment(y, 2),
        lambda: balanced(square, wide),
        lambda: balanced(wide, wide),
        lambda: balanced(square, square[:1]),
        lambda: balanced(square, square, mx.eye(32)),
        lambda: feedback(wide),
        lambda: feedback(mx.zeros(64)),
        lambda: round_with_feedback(y, wide, eighths),
        lambda: round_with_feedback(y[..., :32], square, eighths),
        lambda: cost(y[..., :32], square),
        lambda: times(y, wide),
    ):
        with pytest.raises(ShapeError):
            bad()
