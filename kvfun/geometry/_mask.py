"""Masks as descriptions, and the functions that make them arrays."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
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
    stops: tuple[int, ...] | None = None
    """For each row the position behind the last that is stored here, where others follow elsewhere.
    """
    pins: int | None = None
    """Columns that hold the position of their number; the policy's sinks, if not said."""
    within: int | None = None
    """A reader's own window, which hides sinks too."""


class JoinedMask(NamedTuple):
    """Descriptions of the masks of a chain's parts, whose columns stand side by side."""

    queries: int
    parts: tuple[MaskArray, ...]


Mask = None | Literal["causal"] | MaskArray | JoinedMask
"""``None``: all queries see all columns. ``"causal"``: query ``i`` of ``L`` sees columns up to
``N - L + i``. Otherwise a description."""

Block = Callable[[int, int, int, int], "mx.array | None"]
"""``block(first, last, start, stop)``: the mask of those queries and columns, none if all see all.
"""

WHOLE = 1 << 20
"""Masks up to so many entries are built at once, and kept for the other layers of a model; larger
ones block by block as they are read."""

_memo = threading.local()  # per thread: an unevaluated array belongs to its thread's stream


def mask_array(mask: Mask, *, queries: int = 0, columns: int = 0) -> Bool[mx.array, "..."] | None:
    """The bool array (true: attend) of a mask.

    Args:
        mask: a description.
        queries: ``L``, needed for ``"causal"``.
        columns: ``N``, needed for ``"causal"``.

    Returns:
        ``[L, N]`` where the rows are alike, else ``[B, 1, L, N]``; ``None`` for ``None``. Every
        query of a :class:`MaskArray` without ``stops`` sees at least one column, so no softmax is
        empty: a padding token, which nobody asks for, sees the first column of the read.
    """
    if mask is None:
        return None
    if mask == "causal":
        return mx.arange(columns)[None] <= mx.arange(columns - queries, columns)[:, None]
    assert isinstance(mask, MaskArray | JoinedMask)
    # The layers of a model ask for the same mask one after another.
    if getattr(_memo, "mask", None) != mask:
        _memo.mask, _memo.array = mask, _whole(mask)
    return _memo.array


def for_kernel(mask: Mask) -> mx.array | str | Block | None:
    """A mask as kernels take it: large ones as a function that builds them block by block."""
    if not isinstance(mask, MaskArray):
        return mask if mask is None or isinstance(mask, str) else mask_array(mask)
    if _entries(mask) <= WHOLE:
        return mask_array(mask)
    return partial(mask_block, mask)


def _entries(mask: MaskArray) -> int:
    columns = sum(stop - start for start, stop in mask.spans)
    return len(mask.rows) * mask.queries * columns


def mask_block(mask: MaskArray, first: int, last: int, start: int, stop: int) -> mx.array | None:
    """Queries ``[first, last)`` and columns ``[start, stop)`` of a mask; none if all see all."""
    spans, done = [], 0
    for a, b in mask.spans:
        low, high = max(start - done, 0), min(stop - done, b - a)
        if low < high:
            spans.append((a + low, a + high))
        done += b - a
    if _all_seen(mask, first, last, spans):
        return None
    return _build(mask, first, last, tuple(spans))


def _all_seen(mask: MaskArray, first: int, last: int, spans: list[tuple[int, int]]) -> bool:
    """Whether every one of the queries sees every column of the spans."""
    policy, pins = mask.policy, mask.policy.sinks if mask.pins is None else mask.pins
    for index, (offset, shift, held) in enumerate(mask.rows):
        query = offset - mask.queries
        stop = min(offset if mask.stops is None else mask.stops[index], query + first + 1)
        lowest = policy.lowest(query + last - 1)
        nearest = -1 if mask.within is None else query + last - mask.within
        for start, end in spans:
            pinned = start < pins
            if pinned and end > pins and (shift or held > pins):
                return False  # pinned columns and others in one run, with a gap of positions
            low, high = (start, end) if pinned else (start - shift, end - shift)
            near = low >= max(lowest, nearest) or (high <= policy.sinks and low >= nearest)
            if not near or high > stop or not (pinned or low >= held):
                return False
    return bool(spans)


def _whole(mask: MaskArray | JoinedMask) -> mx.array:
    if isinstance(mask, MaskArray):
        return _build(mask, 0, mask.queries, mask.spans)
    parts = [_build(part, 0, part.queries, part.spans) for part in mask.parts]
    if len({part.ndim for part in parts}) > 1:
        parts = [part if part.ndim == 4 else part[None, None] for part in parts]
    batch = max(part.shape[0] for part in parts)
    if parts[0].ndim == 4:
        parts = [mx.broadcast_to(part, (batch, *part.shape[1:])) for part in parts]
    return mx.concatenate(parts, axis=-1)


def _build(mask: MaskArray, start: int, stop: int, spans: tuple[tuple[int, int], ...]) -> mx.array:
    """Queries ``[start, stop)`` of the mask, over the columns of ``spans``."""
    policy, rows = mask.policy, mask.rows
    columns = [mx.arange(a, b, dtype=mx.int32) for a, b in spans]
    column = mx.concatenate(columns or [mx.arange(0, dtype=mx.int32)])[None]
    index = mx.arange(start, stop, dtype=mx.int32)[:, None]
    stops = None if mask.stops is None else mask.stops[0]
    if len(rows) == 1:
        offset, shift, first = rows[0]
    else:
        numbers = mx.array(rows, dtype=mx.int32).reshape(len(rows), 3, 1, 1, 1)
        offset, shift, first = numbers[:, 0], numbers[:, 1], numbers[:, 2]
        if mask.stops is not None:
            stops = mx.array(mask.stops, dtype=mx.int32).reshape(-1, 1, 1, 1)
    query = index + (offset - mask.queries)
    position = column - shift
    seen = _near(policy, position, query, (position >= first) & (position <= query))
    pins = policy.sinks if mask.pins is None else mask.pins
    if pins:
        pinned = column <= query
        if pins > policy.sinks:
            pinned = mx.where(column < policy.sinks, pinned, _near(policy, column, query, pinned))
        seen = mx.where(column < pins, pinned, seen)
        position = mx.where(column < pins, column, position)
    if mask.within is not None:
        seen = seen & (position > query - mask.within)
    if stops is not None:
        return seen & (position < stops)
    if any(row.offset < mask.queries for row in rows):
        seen = mx.where(query < 0, column == (mask.spans or ((0, 0),))[0][0], seen)
    return seen


def _near(policy: Policy, position: mx.array, query: mx.array, seen: mx.array) -> mx.array:
    """What is seen, of that what is within the query's window and chunk."""
    if policy.window is not None:
        seen = seen & (position > query - policy.window)
    if policy.chunk is not None:
        seen = seen & (position // policy.chunk == query // policy.chunk)
    return seen
