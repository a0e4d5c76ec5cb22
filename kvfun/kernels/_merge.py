"""The monoid of attention: partial results over some of the columns, merged to that over all."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import add
from typing import NamedTuple

import mlx.core as mx

from ..errors import ShapeError

LOWEST = mx.finfo(mx.float32).min
"""The log-sum-exp of a query that saw nothing: its weight beside anything seen is exactly 0."""


class Partial(NamedTuple):
    """Attention over some of the columns, and how much they weigh.

    ``out [batch, heads, L, value_dim]`` is normalised over these columns; ``lse [batch, heads, L]``
    is the natural logarithm of the sum of their ``exp(score)``. Both are float32.
    """

    out: mx.array
    lse: mx.array


def merge(parts: Sequence[Partial | tuple[mx.array, mx.array]]) -> Partial:
    """Attention over all columns, from partial results over disjoint sets of them.

    Associative and commutative up to rounding; one part is returned as it is. A part in which a
    query saw nothing does not count. This is the combination of softmaxes of Milakov and
    Gimelshein, *Online normalizer calculation for softmax* (2018), for normalised parts as in
    Dao et al., *Flash-Decoding* (2023).

    Args:
        parts: ``(out, lse)`` each, of one shape; at least one.

    Raises:
        ShapeError: no part at all, or parts of different shapes.

    >>> one = mx.ones((1, 1, 1, 2)), mx.zeros((1, 1, 1))
    >>> other = mx.zeros((1, 1, 1, 2)), mx.full((1, 1, 1), float(mx.log(mx.array(3.0))))
    >>> out, lse = merge([one, other])
    >>> out.tolist(), round(float(mx.exp(lse).item()), 4)
    ([[[[0.25, 0.25]]]], 4.0)
    """
    if len(parts) == 1:
        return Partial(*parts[0])
    _check(parts)
    lses = mx.stack([lse for _, lse in parts], axis=-1)
    weights = mx.softmax(lses, axis=-1)
    shares = mx.split(weights, len(parts), axis=-1)
    out = reduce(add, [part * share for (part, _), share in zip(parts, shares, strict=True)])
    return Partial(out, mx.logsumexp(lses, axis=-1))


def sink_part(sinks: mx.array, like: Partial | tuple[mx.array, mx.array]) -> Partial:
    """What attention sinks alone contribute: keys without a value.

    Args:
        sinks: one logit a query head, ``[heads]``.
        like: a partial result with the shapes of this one.

    Raises:
        ShapeError: sinks that are not ``[heads]``.
    """
    out, lse = like
    if sinks.shape != (lse.shape[1],):
        raise ShapeError(
            f"sinks are one logit a query head, ({lse.shape[1]},), not {tuple(sinks.shape)}"
        )
    logits = mx.broadcast_to(sinks.astype(mx.float32)[:, None], lse.shape)
    return Partial(mx.zeros_like(out), logits)


def nothing(batch: int, heads: int, queries: int, value_dim: int) -> Partial:
    """The neutral element: what queries take from no column."""
    out = mx.zeros((batch, heads, queries, value_dim))
    return Partial(out, mx.full((batch, heads, queries), LOWEST))


def _check(parts: Sequence[Partial | tuple[mx.array, mx.array]]) -> None:
    if not parts:
        raise ShapeError("merge needs at least one partial result")
    out, lse = parts[0]
    for other, weight in parts[1:]:
        if other.shape != out.shape or weight.shape != lse.shape:
            raise ShapeError(
                f"partial results of different shapes: {tuple(out.shape)} with {tuple(lse.shape)} "
                f"and {tuple(other.shape)} with {tuple(weight.shape)}"
            )
