"""Statistics of a prompt's keys and queries, and how keys are rounded by them."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from operator import add

import mlx.core as mx

from ..errors import CodecError, ShapeError
from ._hadamard import hadamard, signs

QUERY_SHRINKAGE = 0.05

_LEAST = 1e-30
_FLOOR = 1e-7
"""Eigenvalues below this part of the largest are rounding errors."""

_SIZES = 1e-12, 1e12
"""Numbers whose squares, and products of those, are far from the ends of float32."""

_CHAINS = 2
"""Sums of a product that run beside each other."""

_FEW = 1 << 20
"""So many products take less time in few large operations than in many small ones."""


def second_moment(x: mx.array, shrinkage: float) -> mx.array:
    """The mean of ``x x^T`` over the tokens, ``[..., tokens, dim]`` to ``[..., dim, dim]``.

    It is drawn towards the multiple of the identity with its trace, so that it can be inverted.
    That of zeros, of no tokens and of numbers that are not finite is the identity. Where the
    largest number is not between 1e-12 and 1e12 it is that of a multiple of ``x`` that is.

    Raises:
        ShapeError: no axes of tokens and numbers.
    """
    if x.ndim < 2 or not x.shape[-1]:
        raise ShapeError(f"no vectors in the last two axes of {x.shape}")
    if not x.shape[-2]:
        return mx.broadcast_to(mx.eye(x.shape[-1]), (*x.shape[:-2], x.shape[-1], x.shape[-1]))
    x = x.astype(mx.float32)
    size = mx.max(mx.abs(x), axis=(-1, -2), keepdims=True)
    size = mx.where(size > 0, size, 1.0)
    x = x / size  # squares of huge numbers would overflow
    moment = x.swapaxes(-1, -2) @ x / x.shape[-2]
    dim = x.shape[-1]
    mean = mx.mean(mx.diagonal(moment, axis1=-2, axis2=-1), axis=-1)[..., None, None]
    drawn = (1 - shrinkage) * moment + shrinkage * mean * mx.eye(dim)
    size = mx.clip(size, *_SIZES)
    return mx.where(mean > 0, drawn * (size * size), mx.eye(dim))


def query_moment(queries: mx.array, kv_heads: int, shrinkage: float = QUERY_SHRINKAGE) -> mx.array:
    """The second moment of the queries of each KV head, ``[batch, kv_heads, dim, dim]``.

    Raises:
        ShapeError: other axes than ``[batch, heads, length, dim]``, or heads that the KV heads do
            not divide.
    """
    if queries.ndim != 4:
        raise ShapeError(f"queries must be [batch, heads, length, dim], not {queries.shape}")
    batch, heads, length, dim = queries.shape
    if kv_heads < 1 or heads % kv_heads:
        raise ShapeError(f"{heads} query heads are no multiple of {kv_heads} KV heads")
    return second_moment(
        queries.reshape(batch, kv_heads, heads // kv_heads * length, dim), shrinkage
    )


def balanced(
    of_queries: mx.array, of_keys: mx.array, rotation: mx.array | None = None
) -> tuple[mx.array, mx.array]:
    """Matrices ``a``, ``b`` that make the moments of ``keys @ a`` and ``queries @ b`` equal.

    Products stay what they are: ``b`` is the inverse of ``a`` transposed. With ``Sq``, ``Sk`` the
    moments and ``U L U^T = Sq^(1/2) Sk Sq^(1/2)``, ``a`` is ``Sq^(1/2) U L^(-1/4) R`` with a random
    rotation ``R``: both moments become ``R^T L^(1/2) R``, whose diagonal is flat. Then equal errors
    in all numbers of a key are what costs its queries least. Keys keep their mean square.

    Args:
        of_queries: ``[batch, heads, dim, dim]``, positive definite.
        of_keys: the same of the keys.
        rotation: orthogonal ``[dim, dim]`` in place of the random one.

    Raises:
        ShapeError: matrices that are not square, or of two shapes.
    """
    dim = _square(of_queries)
    if of_keys.shape != of_queries.shape:
        raise ShapeError(f"moments of keys {of_keys.shape} and queries {of_queries.shape}")
    turn = _rotation(dim) if rotation is None else rotation
    if turn.shape != (dim, dim):
        raise ShapeError(f"no rotation {turn.shape} of {dim} numbers")
    q, k = _scaled(of_queries), _scaled(of_keys)
    half, inverse_half = _powers(q, 0.5, -0.5)
    values, vectors = _eigen(half @ k @ half)
    a = (half @ vectors * values**-0.25) @ turn
    b = (inverse_half @ vectors * values**0.25) @ turn
    kept = mx.sqrt(_trace(of_keys) / _trace(a.swapaxes(-1, -2) @ of_keys @ a))
    return a * kept, b / kept


def feedback(metric: mx.array) -> mx.array:
    """What errors of earlier numbers do to the target of a later one, ``[..., dim, dim]``.

    With ``metric = U U^T``, ``U`` upper triangular, the cost ``e^T metric e`` is the sum of
    ``U_ii^2 (e_i + sum_{j<i} B_ij e_j)^2``: row ``i`` of the strictly lower ``B`` says what number
    ``i`` has to make up for.

    Raises:
        ShapeError: a metric that is not square.
    """
    _square(metric)
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
    otherwise, and the encoding of a token must not depend on how many come with it. The tokens are
    the last axis meanwhile, so that what belongs together is read together.

    Args:
        y: ``[..., batch, heads, tokens, dim]``.
        lower: of :func:`feedback`, ``[batch, heads, dim, dim]``.
        quantize: from targets ``[..., batch, heads, tokens]`` to the nearest numbers there are.

    Raises:
        ShapeError: a matrix of another size than the vectors.
    """
    _fits(y, lower)
    dim = y.shape[-1]
    rest = mx.contiguous(y.swapaxes(-1, -2))
    columns, wanted, rounded = mx.split(lower, dim, axis=-1), mx.split(rest, dim, axis=-2), []
    for index in range(dim):
        rounded.append(mx.expand_dims(quantize(rest[..., 0, :]), -2))
        # what is left of the error behind it: the target had the earlier ones' in it already
        error = rounded[-1] - wanted[index]
        rest = rest[..., 1:, :] - error * columns[index][..., index + 1 :, :]
    return mx.concatenate(rounded, axis=-2).swapaxes(-1, -2)


def cost(error: mx.array, metric: mx.array) -> mx.array:
    """``e^T metric e`` of errors ``[..., batch, heads, tokens, dim]``, without the last axis."""
    turned = times(error, metric)
    return mx.sum(turned * error, axis=-1)


def times(x: mx.array, matrix: mx.array) -> mx.array:
    """``x @ matrix``, the same bits for a token whatever is beside it.

    Every product and sum is an operation of its own, in an order of its own: few vectors are
    multiplied by all rows at once and many by one row after another, with the same result.

    Raises:
        ShapeError: a matrix of another size than the vectors.
    """
    _fits(x, matrix)
    dim = matrix.shape[-2]
    chains = _CHAINS if dim % _CHAINS == 0 else 1
    length = dim // chains
    if x.size * matrix.shape[-1] <= _FEW:
        products = x[..., None] * matrix[..., None, :, :]
        products = products.reshape(*products.shape[:-2], chains, length, matrix.shape[-1])
        sums = reduce(add, [products[..., i, :] for i in range(length)])
        return reduce(add, [sums[..., i, :] for i in range(chains)])

    def chain(start: int) -> mx.array:
        rows = range(start, start + length)
        return reduce(add, [x[..., i : i + 1] * matrix[..., None, i, :] for i in rows])

    return reduce(add, [chain(start) for start in range(0, dim, length)])


def _square(matrix: mx.array) -> int:
    if matrix.ndim < 2 or matrix.shape[-1] != matrix.shape[-2]:
        raise ShapeError(f"no square matrix: {matrix.shape}")
    return matrix.shape[-1]


def _fits(x: mx.array, matrix: mx.array) -> None:
    if x.ndim < 2 or x.shape[-1] != _square(matrix):
        raise ShapeError(f"vectors {x.shape} and a matrix {matrix.shape}")


def _rotation(dim: int) -> mx.array:
    """Random signs and a Hadamard matrix, or any orthogonal matrix where there is none."""
    try:
        return hadamard(mx.eye(dim) * mx.array(signs(dim), dtype=mx.float32)[:, None])
    except CodecError:
        random = mx.random.normal((dim, dim), key=mx.random.key(42))
        return mx.linalg.qr(random, stream=mx.cpu)[0]


def _scaled(moment: mx.array) -> mx.array:
    """With a mean eigenvalue of 1."""
    return moment / mx.maximum(_trace(moment) / moment.shape[-1], _LEAST)


def _trace(matrix: mx.array) -> mx.array:
    return mx.sum(mx.diagonal(matrix, axis1=-2, axis2=-1), axis=-1)[..., None, None]


def _symmetric(matrix: mx.array) -> mx.array:
    return (matrix + matrix.swapaxes(-1, -2)) / 2


def _eigen(matrix: mx.array) -> tuple[mx.array, mx.array]:
    """Eigenvalues of positive definite matrices ``[..., 1, dim]``, and their vectors."""
    values, vectors = mx.linalg.eigh(_symmetric(matrix), stream=mx.cpu)
    least = mx.maximum(_FLOOR * values[..., -1:], _LEAST)
    return mx.maximum(values, least)[..., None, :], vectors


def _powers(matrix: mx.array, *powers: float) -> list[mx.array]:
    """Powers of positive definite matrices."""
    values, vectors = _eigen(matrix)
    return [vectors * values**power @ vectors.swapaxes(-1, -2) for power in powers]
