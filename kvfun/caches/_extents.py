"""Which of the fetched columns are a row's own: host integers for every cache record."""

from __future__ import annotations

from collections.abc import Sequence
from functools import singledispatch
from typing import Any, NamedTuple

import mlx.core as mx

from ..errors import UnsupportedError
from ..geometry import Geometry, mask_array, stride
from . import _verbs as verbs


class Extents(NamedTuple):
    """Where the columns of every row are, among those of ``fetch(cache, queries=queries)``.

    A row owns the columns that any of its last ``queries`` tokens sees: ``[start, end)``, and in
    front of them its attention sinks, ``[first, stop)`` of ``pinned``. The two hold its tokens in
    temporal order; they may touch, they never overlap, and either may be empty (``start == end``:
    a row that is all sinks; ``first == stop``: no sinks, or none seen yet). Nothing else that is
    fetched is the row's: it is left padding, a longer row's past, sinks that a short row has not
    reached, or what was rolled back. ``end`` is behind the row's last token, and is ``width`` where
    the rows end together. Sinks are the very first columns that are fetched (``first == 0``), but
    for views that were combined, where a narrower one begins further right.
    """

    width: int
    starts: tuple[int, ...]
    ends: tuple[int, ...]
    pinned: tuple[tuple[int, int], ...]

    @property
    def counts(self) -> tuple[int, ...]:
        """How many columns each row owns."""
        rows = zip(self.starts, self.ends, self.pinned, strict=True)
        return tuple(end - start + stop - first for start, end, (first, stop) in rows)


@singledispatch
def width(cache: Any, queries: int = 1) -> int:
    """How many columns ``fetch(cache, queries=queries)`` returns; nothing is computed for it.

    Raises:
        ShapeError, GeometryError: as ``fetch``.
    """
    return verbs.fetch(cache, queries=queries)[0].shape[2]


@singledispatch
def own_columns(cache: Any, queries: int = 1) -> mx.array | None:
    """The columns of ``fetch(cache, queries=queries)`` that are each row's own, as a mask.

    It shows every query all that any of the row's last ``queries`` tokens sees, and nothing else.
    A record that registers nothing is asked for its :func:`kvfun.mask`.

    Returns:
        A bool array ``[1, width]`` where rows are alike, else ``[batch, 1, 1, width]``; ``None``
        where each row owns all columns.

    Raises:
        ShapeError, GeometryError: as ``fetch``.
    """
    mask = verbs.mask(cache, queries)
    if mask is None or isinstance(mask, str):  # the last query sees all
        return None
    seen = mask if isinstance(mask, mx.array) else mask_array(mask)
    assert seen is not None
    offsets = mx.array(verbs.offsets(cache)).reshape(-1, 1, 1, 1)
    token = mx.arange(queries)[:, None] >= queries - offsets  # and no padding
    return mx.any(seen & token, axis=(1, 2), keepdims=True)


@singledispatch
def extents(cache: Any, queries: int = 1) -> Extents:
    """The columns that are each row's own, of those of ``fetch(cache, queries=queries)``.

    Of a record that registers nothing, :func:`own_columns` is computed for it.

    Raises:
        ShapeError, GeometryError: as ``fetch``.
        UnsupportedError: a record whose rows own other columns than sinks in front and a run.

    >>> import kvfun
    >>> k = mx.zeros((1, 1, 9, 32))
    >>> extents(kvfun.append(kvfun.empty("plain", window=4, sinks=2), k, k))
    Extents(width=6, starts=(2,), ends=(6,), pinned=((0, 2),))
    """
    columns, own = width(cache, queries), own_columns(cache, queries)
    shown = mx.ones(columns, mx.bool_) if own is None else own.reshape(-1, columns)
    rows: Any = mx.broadcast_to(shown, (verbs.batch_size(cache), columns)).tolist()
    starts, ends, pinned = zip(*map(_runs, rows), strict=True)
    return Extents(columns, starts, ends, pinned)


def _runs(seen: Sequence[bool]) -> tuple[int, int, tuple[int, int]]:
    """``start``, ``end`` and the sinks of the columns a row owns."""
    columns = [column for column, own in enumerate(seen) if own]
    if not columns:
        return 0, 0, (0, 0)
    end = columns[-1] + 1
    start = max([0, *[c + 1 for c in range(end) if not seen[c]]])
    pinned = len([column for column in columns if column < start])
    if not all(seen[:pinned]):
        raise UnsupportedError(
            f"a row that owns the columns {columns} has no start and end: there are holes in it"
        )
    return start, end, (0, pinned)


def of_geometry(geometry: Geometry, queries: int) -> Extents:
    """The extents of a buffer, one entry for each of ``geometry.rows``."""
    spans, sinks = geometry.spans(queries), geometry.policy.sinks
    columns = stride(spans)
    # Where two runs are fetched, the second moves up to the first.
    moved = spans[-1][0] - (spans[0][1] if len(spans) > 1 else 0) if spans else 0
    starts, ends, pinned = [], [], []
    for row in geometry.rows:
        pins = max(0, min(row.offset, sinks))
        low = geometry.lowest(row, queries)
        if low < row.offset:
            run = (low + row.shift - moved, row.offset + row.shift - moved)
        else:
            run = (min(max(geometry.end(row) - moved, pins), columns),) * 2
        starts.append(run[0])
        ends.append(run[1])
        pinned.append((0, pins))
    return Extents(columns, tuple(starts), tuple(ends), tuple(pinned))


def as_mask(extents: Extents) -> mx.array | None:
    """Extents as :func:`own_columns` gives them."""
    if all(count == extents.width for count in extents.counts):
        return None
    rows = [(a, b, *pins) for a, b, pins in zip(*extents[1:], strict=True)]
    alike = len({*rows}) == 1
    start, end, first, stop = mx.array(rows[:1] if alike else rows).T.reshape(4, -1, 1, 1, 1)
    column = mx.arange(extents.width)
    seen = ((start <= column) & (column < end)) | ((first <= column) & (column < stop))
    return seen[0, 0] if alike else seen
