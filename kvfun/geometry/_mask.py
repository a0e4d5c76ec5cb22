"""Masks as descriptions, and the one function that makes them arrays."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Literal, NamedTuple

import mlx.core as mx
from jaxtyping import Bool

from ._policy import Policy

if TYPE_CHECKING:
    from ._geometry import Row


class MaskArray(NamedTuple):
    """The description of a mask that needs an array: integers only, hashable."""

    queries: int
    spans: tuple[tuple[int, int], ...]
    rows: tuple[Row, ...]
    policy: Policy


Mask = None | Literal["causal"] | MaskArray
"""``None``: all queries see all columns. ``"causal"``: query ``i`` of ``L`` sees columns up to
``N - L + i``. Otherwise a description."""

_memo = threading.local()  # per thread: an unevaluated array belongs to its thread's stream


def mask_array(mask: Mask, *, queries: int = 0, columns: int = 0) -> Bool[mx.array, "..."] | None:
    """The bool array (true: attend) of a mask.

    Args:
        mask: a description.
        queries: ``L``, needed for ``"causal"``.
        columns: ``N``, needed for ``"causal"``.

    Returns:
        ``[L, N]`` where the rows are alike, else ``[B, 1, L, N]``; ``None`` for ``None``. Every
        query sees at least one column, so no softmax is empty: a padding token, which nobody asks
        for, sees the first column of the read.
    """
    if mask is None:
        return None
    if mask == "causal":
        return mx.arange(columns)[None] <= mx.arange(columns - queries, columns)[:, None]
    assert isinstance(mask, MaskArray)
    # The layers of a model ask for the same mask one after another.
    if getattr(_memo, "mask", None) != mask:
        _memo.mask, _memo.array = mask, _build(mask)
    return _memo.array


def _build(mask: MaskArray) -> mx.array:
    policy, rows = mask.policy, mask.rows
    columns = [mx.arange(start, stop, dtype=mx.int32) for start, stop in mask.spans]
    column = mx.concatenate(columns or [mx.arange(0, dtype=mx.int32)])[None]
    index = mx.arange(mask.queries, dtype=mx.int32)[:, None]
    if len(rows) == 1:
        offset, shift, first = rows[0]
    else:
        numbers = mx.array(rows, dtype=mx.int32).reshape(len(rows), 3, 1, 1, 1)
        offset, shift, first = numbers[:, 0], numbers[:, 1], numbers[:, 2]
    query = index + (offset - mask.queries)
    position = column - shift
    seen = position >= first
    if policy.window is not None:
        seen = seen & (position > query - policy.window)
    if policy.chunk is not None:
        seen = seen & (position // policy.chunk == query // policy.chunk)
    seen = seen & (position <= query)
    if policy.sinks:
        seen = mx.where(column < policy.sinks, column <= query, seen)
    if any(row.offset < mask.queries for row in rows):
        seen = mx.where(query < 0, column == (mask.spans or ((0, 0),))[0][0], seen)
    return seen
