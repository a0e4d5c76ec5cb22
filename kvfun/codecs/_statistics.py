"""Statistics of a prompt's keys and queries, and how keys are rounded by them."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from operator import add

import mlx.core as mx

from ..errors import ShapeError
from ._hadamard import hadamard, signs

QUERY_SHRINKAGE = 0.05
_LEAST = 1e-30


def second_moment(x: mx.array, shrinkage: float) -> mx.array:
    """The mean of ``x x^T`` over the tokens, ``[..., tokens, dim]`` to ``[..., dim, dim]``.

    It is drawn towards the multiple of the identity with its trace, so that it can be inverted;
    that of zeros is the identity.
    """
    x = x.astype(mx.float32)
    size = mx.max(mx.abs(x), axis=(-1, -2), keepdims=True)
    size = mx.where(size > 0, size, 1.0)
    x = x / size  # squares of huge numbers would overflow
    moment = x.swapaxes(-1, -2) @ x / max(1, x.shape[-2])
    dim = x.shape[-1]
    mean = mx.mean(mx.diagonal(moment, axis1=-2, axis2=-1), axis=-1)[..., None, None]
    drawn = (1 - shrinkage) * moment + shrinkage * mean * mx.eye(dim)
    return mx.where(mean > 0, drawn * (size * size), mx.eye(dim))


def query_moment(queries: mx.array, kv_heads: int, shrinkage: float = QUERY_SHRINKAGE) -> mx.array:
    """The second moment of the queries of each KV head, ``[batch, kv_heads, dim, dim]``.

    Raises:
        ShapeError: heads that the KV heads do not divide.
    """
    batch, heads, length, dim = queries.shape
    if heads % kv_heads:
        raise ShapeError(f"{heads} query heads are no multiple of {kv_heads} KV heads")
    return second_moment(
        queries.reshape(batch, kv_heads, heads // kv_heads * length, dim), shrinkage
    )


def balanced(of_queries: mx.array, of_keys: mx.array) -> tuple[mx.array, mx.array]:
    """Matrices ``a``, ``b`` that make the moments of ``keys @ a`` and ``queries @ b`` equal.

    Products stay what they are: ``b`` is the inverse of ``a`` transposed. With ``Sq``, ``Sk`` the
    moments and ``U L U^T = Sq^(1/2) Sk Sq^(1/2)``, ``a`` is ``Sq^(1/2) U L^(-1/4) R`` with a random
    rotation ``R``: both moments become ``R^T L^(1/2) R``, whose diagonal is flat. Then equal errors
    in all numbers of a key are what costs its queries least. Keys keep their mean square.
    """
    q, k = _scaled(of_queries), _scaled(of_keys)
    half, inverse_half = _powers(q, 0.5, -0.5)
    values, vectors = mx.linalg.eigh(_symmetric(half @ k @ half), stream=mx.cpu)
    values = mx.maximum(values, _LEAST)[..., None, :]
    dim = q.shape[-1]
    turn = hadamard(mx.eye(dim) * mx.array(signs(dim), dtype=mx.float32)[:, None])
    a = (half @ vectors * values**-0.25) @ turn
    b = (inverse_half @ vectors * values**0.25) @ turn
    kept = mx.sqrt(_trace(of_keys) / _trace(a.swapaxes(-1, -2) @ of_keys @ a))
    return a * kept, b / kept


def feedback(metric: mx.array) -> mx.array:
    """What errors of earlier numbers do to the target of a later one, ``[..., dim, dim]``.

    With ``metric = U U^T``, ``U`` upper triangular, the cost ``e^T metric e`` is the sum of
    ``U_ii^2 (e_i + sum_{j<i} B_ij e_j)^2``: row ``i`` of the strictly lower ``B`` says what number
    ``i`` has to make up for.
    """
    flipped = _scaled(metric)[..., ::-1, ::-1]
    lower = mx.linalg.cholesky(_symmetric(flipped), stream=mx.cpu)
    upper = lower[..., ::-1, ::-1]
    ratios = upper / mx.diagonal(upper, axis1=-2, axis2=-1)[..., None, :]
    return mx.tril(ratios.swapaxes(-1, -2), -1)


def round_with_feedback(
    y: mx.array, lower: mx.array, quantize: Callable[[mx.array], mx.array]
) -> mx.array:
    """Round the numbers of a vector one after another, each making up for the errors before it.

    Products and sums are one at a time: matrix products of other numbers of tokens may be rounded
    otherwise, and the encoding of a token must not depend on how many come with it.

    Args:
        y: ``[..., batch, heads, tokens, dim]``.
        lower: of :func:`feedback`, ``[batch, heads, dim, dim]``.
        quantize: from targets ``[..., batch, heads, tokens]`` to the nearest numbers there are.
    """
    rest, rounded = y, []
    for index in range(y.shape[-1]):
        target = rest[..., 0]
        rounded.append(quantize(target))
        # what is left of the error behind it: the target had the earlier ones' in it already
        error = rounded[-1] - y[..., index]
        rest = rest[..., 1:] - error[..., None] * lower[..., None, index + 1 :, index]
    return mx.stack(rounded, axis=-1)


def cost(error: mx.array, metric: mx.array) -> mx.array:
    """``e^T metric e`` of errors ``[..., batch, heads, tokens, dim]``, without the last axis."""
    turned = times(error, metric)
    return mx.sum(turned * error, axis=-1)


def times(x: mx.array, matrix: mx.array) -> mx.array:
    """``x @ matrix``, the same bits for a token whatever is beside it."""
    dim = matrix.shape[-2]
    return reduce(add, [x[..., i : i + 1] * matrix[..., None, i, :] for i in range(dim)])


def _scaled(moment: mx.array) -> mx.array:
    """With a mean eigenvalue of 1."""
    return moment / mx.maximum(_trace(moment) / moment.shape[-1], _LEAST)


def _trace(matrix: mx.array) -> mx.array:
    return mx.sum(mx.diagonal(matrix, axis1=-2, axis2=-1), axis=-1)[..., None, None]


def _symmetric(matrix: mx.array) -> mx.array:
    return (matrix + matrix.swapaxes(-1, -2)) / 2


def _powers(matrix: mx.array, *powers: float) -> list[mx.array]:
    """Powers of positive definite matrices."""
    values, vectors = mx.linalg.eigh(_symmetric(matrix), stream=mx.cpu)
    values = mx.maximum(values, _LEAST)[..., None, :]
    return [vectors * values**power @ vectors.swapaxes(-1, -2) for power in powers]
