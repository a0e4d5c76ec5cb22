"""Where the positions of every row are, and the plan of a write."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

import attrs

from ..errors import GeometryError, RollbackError
from ._mask import Mask, MaskArray
from ._policy import Policy, round_up


class Row(NamedTuple):
    """One row of a batch. Position ``p`` is in column ``p`` if it is a sink, else ``p + shift``.

    ``offset`` counts the tokens seen (negative while left padding is still to come); ``first`` is
    the lowest position behind the sinks that is still held.
    """

    offset: int
    shift: int
    first: int


class Write(NamedTuple):
    """Tokens ``[start, stop)`` of a block go to columns from ``column`` on, in one row or all."""

    row: int | None
    start: int
    stop: int
    column: int


class Relayout(NamedTuple):
    """A new buffer of ``capacity`` columns made of pieces of the old one, zero elsewhere.

    ``rows`` holds for each new row ``(source row, ((start, stop, column), ...))``: columns
    ``[start, stop)`` of the source row go to ``column``. One entry with source row ``None`` moves
    all rows alike.
    """

    capacity: int
    rows: tuple[tuple[int | None, tuple[tuple[int, int, int], ...]], ...]

    @classmethod
    def keeping(cls, used: int, capacity: int) -> Relayout:
        """The first ``used`` columns stay where they are, in a buffer of ``capacity``."""
        return cls(capacity, ((None, ((0, used, 0),) if used else ()),))


class Plan(NamedTuple):
    """What a write does to every plane: first the new layout (if any), then the writes."""

    relayout: Relayout | None
    writes: tuple[Write, ...]


_tuple = tuple.__new__
"""Builds a NamedTuple twice as fast as calling its class: a token costs a few of them."""


def _collapse(rows: Sequence[Row]) -> tuple[Row, ...]:
    """One row stands for all when all are alike."""
    return (rows[0],) if all(row == rows[0] for row in rows) else tuple(rows)


def _further(rows: Sequence[Row], taken: Iterable[tuple[int, int]]) -> list[Row]:
    """The rows after each took tokens ``[start, stop)`` of a block."""
    return [
        row._replace(offset=row.offset + stop - start)
        for row, (start, stop) in zip(rows, taken, strict=True)
    ]


def stride(spans: Iterable[tuple[int, int]]) -> int:
    """How many columns the spans hold together."""
    return sum(stop - start for start, stop in spans)


@attrs.frozen(cache_hash=True, repr=False)
class Geometry:
    """The columns of one buffer in temporal order.

    ``rows`` has one entry a row of the batch, or a single entry that stands for all of them.
    """

    policy: Policy = attrs.field(factory=Policy)
    capacity: int = 0
    rows: tuple[Row, ...] = (Row(0, 0, 0),)

    def __repr__(self) -> str:
        said = {
            field.name: getattr(self.policy, field.name)
            for field in attrs.fields(Policy)
            if field.init and getattr(self.policy, field.name) != field.default
        }
        said["capacity"] = self.capacity
        said["offsets"] = tuple(row.offset for row in self.rows)
        said["columns"] = tuple((row.first + row.shift, self.end(row)) for row in self.rows)
        return f"Geometry({', '.join(f'{name}={value}' for name, value in said.items())})"

    @classmethod
    def empty(cls, policy: Policy, left_padding: Sequence[int] | None = None) -> Geometry:
        """A geometry that holds nothing yet.

        Args:
            policy: who may see whom.
            left_padding: padding tokens at the front of the first blocks, one number a row.

        Raises:
            GeometryError: a negative padding.
        """
        pads = tuple(left_padding) if left_padding is not None else (0,)
        if not pads or any(isinstance(p, bool) or not isinstance(p, int) or p < 0 for p in pads):
            raise GeometryError(f"left_padding must be integers >= 0, one a row, not {pads!r}")
        if policy.sinks:
            rows = [Row(-pad, 0, policy.sinks) for pad in pads]
        else:
            rows = [Row(-pad, pad, 0) for pad in pads]
        return cls(policy, 0, _collapse(rows))

    # -- numbers a caller asks for ------------------------------------------------------------

    def expanded(self, batch: int) -> tuple[Row, ...]:
        """The rows, one entry for each of ``batch`` rows.

        Raises:
            GeometryError: the geometry holds another number of rows.
        """
        if len(self.rows) == batch:
            return self.rows
        if len(self.rows) == 1:
            return self.rows * batch
        raise GeometryError(f"the geometry has {len(self.rows)} rows, not {batch}")

    def end(self, row: Row) -> int:
        """The column behind the row's last token."""
        sinks = self.policy.sinks
        return row.offset + row.shift if row.offset >= sinks else self._short_end(row)

    def _short_end(self, row: Row) -> int:
        if self.policy.sinks == 0:
            return row.offset + row.shift
        if row.shift == 0:
            return max(row.offset, 0)
        return self.policy.sinks + row.shift

    @property
    def used(self) -> int:
        """The columns up to the last row's end; what lies behind them was never written."""
        return max(0, *(self.end(row) for row in self.rows))

    def held(self, row: Row) -> int:
        """How many tokens of the row the buffer still holds behind the sinks."""
        return max(0, row.offset - row.first)

    def live(self, row: Row) -> int:
        """How many positions the row's last token sees."""
        if row.offset <= 0:
            return 0
        low = max(row.first, self.policy.lowest(row.offset - 1))
        return min(row.offset, self.policy.sinks) + max(0, row.offset - low)

    @property
    def size(self) -> int:
        """Live columns: the positions the last token sees, of the row that has most."""
        return max(self.live(row) for row in self.rows)

    def max_rollback(self) -> tuple[int, ...]:
        """How many tokens each row can give back exactly."""
        return tuple(self.policy.reachable(row.offset, row.first) for row in self.rows)

    # -- writes --------------------------------------------------------------------------------

    def step(self, length: int) -> tuple[int, Geometry] | None:
        """The column to which a whole block goes in every row, and the geometry afterwards.

        ``None`` if something has to move for it: then :meth:`advance` has a plan. The step of one
        token, which is nearly every step, takes this way.
        """
        rows, policy, capacity = self.rows, self.policy, self.capacity
        if len(rows) != 1 or not length:
            return None
        ((offset, shift, first),) = rows
        column, limit = offset + shift, policy.limit
        if column + length > capacity or (limit is not None and capacity > limit):
            return None
        if offset < policy.sinks and not shift == 0 <= offset:
            return None
        row = _tuple(Row, (offset + length, shift, first))
        return column, Geometry(policy, capacity, (row,))

    def advance(
        self, length: int, ranges: tuple[tuple[int, int], ...] | None = None
    ) -> tuple[Plan, Geometry]:
        """The plan of appending a block of ``length`` tokens to every row, and what results.

        Bounded geometries compact when the block does not fit: what no query may ask for any more
        is dropped and the rows end at one column again. A block of no tokens only makes the first
        buffer, so that there is one whenever something was appended.

        Args:
            length: tokens of the block.
            ranges: the tokens ``[start, stop)`` of it that each row takes; all of them by default.
        """
        if ranges is None:
            step = self.step(length)
            if step is not None:
                column, after = step
                return Plan(None, (Write(None, 0, length, column),)), after
        return _advanced(self, length, ranges)

    def _advance(
        self, length: int, ranges: tuple[tuple[int, int], ...] | None
    ) -> tuple[Plan, Geometry]:
        limit = self.policy.limit
        if length == 0 and self.capacity:
            return Plan(None, ()), self
        rows = self.rows if ranges is None else self.expanded(len(ranges))
        taken = ((0, length),) * len(rows) if ranges is None else ranges
        after = _further(rows, taken)
        needed = max(1, *(self.end(row) for row in after))
        moved = Geometry(self.policy, self.capacity, rows)
        relayout = None
        if needed > self.capacity or (limit is not None and self.capacity > limit):
            if limit is None or (needed <= limit and self.capacity <= limit):
                relayout, moved = moved._grown(round_up(needed))
            else:
                relayout, moved = moved._compacted(taken)
        result = Geometry(self.policy, moved.capacity, _collapse(_further(moved.rows, taken)))
        return Plan(relayout, moved._writes(taken)), result

    def _grown(self, capacity: int) -> tuple[Relayout, Geometry]:
        relayout = Relayout.keeping(self.used, capacity)
        return relayout, Geometry(self.policy, capacity, self.rows)

    def _compacted(
        self, taken: Sequence[tuple[int, int]], back: int = 0
    ) -> tuple[Relayout, Geometry]:
        """Drop what a write lets go (one of ``back`` tokens ago), and align the ends."""
        policy = self.policy
        assert policy.limit is not None
        kept = [max(row.first, policy.kept(row.offset - back)) for row in self.rows]
        rows, spans = _aligned(policy, self.rows, kept)
        total = max(self.end(row) for row in _further(rows, taken))
        capacity = policy.limit if total <= policy.limit else round_up(total)
        sources = [None] if len(rows) == 1 else range(len(rows))
        relayout = Relayout(capacity, tuple(zip(sources, spans, strict=True)))
        return relayout, Geometry(policy, capacity, tuple(rows))

    def compacted(self) -> tuple[Relayout, Geometry]:
        """Only the columns that a later query or rollback may ask for, and no spare ones.

        Of what a window has let go a rollback of ``reserve`` tokens is kept, or of one.
        """
        if self.policy.limit is None:
            relayout, after = Relayout.keeping(self.used, self.used), self
        else:
            relayout, after = self._compacted(((0, 0),) * len(self.rows), back=1)
        capacity = max(1, after.used)  # what was ever written to has a buffer
        relayout = Relayout(capacity, relayout.rows)
        return relayout, Geometry(self.policy, capacity, _collapse(after.rows))

    def _writes(self, taken: Sequence[tuple[int, int]]) -> tuple[Write, ...]:
        pieces = [
            [(start + a, start + b, column) for a, b, column in self._pieces(row, stop - start)]
            for row, (start, stop) in zip(self.rows, taken, strict=True)
        ]
        if all(piece == pieces[0] for piece in pieces):
            return tuple(Write(None, *piece) for piece in pieces[0])
        return tuple(Write(i, *piece) for i, row in enumerate(pieces) for piece in row)

    def _pieces(self, row: Row, length: int) -> list[tuple[int, int, int]]:
        """``(start, stop, column)`` of the runs of a block that are stored together."""
        if length == 0:
            return []
        offset, shift, _ = row
        stop = offset + length
        sinks = self.policy.sinks
        if sinks == 0 or offset >= sinks or shift == 0 <= offset:
            return [(0, length, offset + shift)]
        runs = [(max(offset, 0), min(stop, sinks), 0), (max(offset, sinks), stop, shift)]
        return [(a - offset, b - offset, a + move) for a, b, move in runs if a < b]

    # -- reads ---------------------------------------------------------------------------------

    def lowest(self, row: Row, queries: int) -> int:
        """The lowest held position behind the sinks that the row's last ``queries`` tokens see.

        Raises:
            GeometryError: such a position has been dropped.
        """
        low = self.policy.lowest(row.offset - queries)
        if low < row.first and row.first > self.policy.sinks:
            raise GeometryError(
                f"the last {queries} tokens of a row at offset {row.offset} see positions from "
                f"{low} on, but positions before {row.first} have been dropped; "
                "read the block right after appending it, or ask for a larger reserve"
            )
        return max(low, row.first)

    def spans(self, queries: int = 1) -> tuple[tuple[int, int], ...]:
        """The columns that any of the last ``queries`` tokens sees: at most two runs.

        The first run, if there are two, holds the sinks.
        """
        policy, rows = self.policy, self.rows
        if len(rows) != 1 or policy.sinks:
            return _spans(self, queries)
        (row,) = rows
        low = 0 if policy.limit is None else self.lowest(row, queries)
        return ((low + row.shift, row.offset + row.shift),) if low < row.offset else ()

    def _spans(self, queries: int) -> tuple[tuple[int, int], ...]:
        rows, sinks = self.rows, self.policy.sinks
        lows = [(self.lowest(row, queries), row) for row in rows]
        runs = [(low + row.shift, row.offset + row.shift) for low, row in lows if low < row.offset]
        if not runs:
            pinned = min(sinks, max(row.offset for row in rows))
            return ((0, pinned),) if pinned > 0 else ()
        start, stop = min(run[0] for run in runs), max(run[1] for run in runs)
        if not sinks:
            return ((start, stop),)
        return ((0, stop),) if start == sinks else ((0, sinks), (start, stop))

    def positions(self, columns: Iterable[tuple[int, int]]) -> tuple[tuple[range, ...], ...]:
        """For each of ``rows`` the positions that columns are for, as runs of them.

        A column that the row has nothing in has a number nevertheless, maybe a negative one.
        """
        sinks, columns = self.policy.sinks, tuple(columns)
        result = []
        for row in self.rows:
            runs = []
            for start, stop in columns:
                pinned = min(max(start, sinks), stop)
                runs += [range(start, pinned), range(pinned - row.shift, stop - row.shift)]
            result.append(tuple([run for run in runs if run]))
        return tuple(result)

    def starts(self, plan: Plan, batch: int) -> tuple[int, ...]:
        """The position of a block's first token, by the plan that led here: a number a row, or one.

        A row that took not the first token of the block is told where that would be.
        """
        sinks, rows = self.policy.sinks, self.rows
        if any(write.row is not None for write in plan.writes):
            rows = self.expanded(batch)
        starts = [0] * len(rows)
        for index, row in enumerate(rows):
            mine = [w for w in plan.writes if w.row is None or w.row == index]
            if mine:
                _, start, _, column = mine[-1]
                starts[index] = column - start - (row.shift if column >= sinks else 0)
        return tuple(starts)

    def cover(self, queries: int = 1) -> tuple[tuple[int, int], ...]:
        """One run of columns that contains :meth:`spans`, so that a read is one slice.

        It has at least one column, if the buffer has any: queries that are all padding need one.
        """
        spans = self.spans(queries)
        if len(spans) > 1:
            return ((spans[0][0], spans[-1][1]),)
        return spans or (((0, 1),) if self.capacity else ())

    def mask(self, queries: int, spans: tuple[tuple[int, int], ...] | None = None) -> Mask:
        """Which of the columns in ``spans`` each of the last ``queries`` tokens sees.

        Returns:
            ``None`` (all see all), ``"causal"`` (aligned at the lower right) or a
            :class:`MaskArray`, which :func:`mask_array` turns into a bool array.
        """
        if queries == 1 and len(self.rows) == 1 and self.rows[0].offset > 0:
            exact = self.spans()
            if spans is None or spans == exact:
                return None
        return _mask(self, queries, spans)

    def _mask(self, queries: int, spans: tuple[tuple[int, int], ...] | None) -> Mask:
        exact = self.spans(queries)
        spans = exact if spans is None else spans
        if spans == exact and self._alike(queries):
            row = self.rows[0]
            if queries == 1:
                return None
            last = max(row.first, self.policy.lowest(row.offset - 1))
            if self.lowest(row, queries) == last:
                return "causal"
        return self.describe(queries, spans)

    def describe(
        self, queries: int, spans: tuple[tuple[int, int], ...], within: int | None = None
    ) -> MaskArray:
        """The mask over the columns of ``spans`` as a description, whatever it comes to.

        Args:
            queries: the last so many tokens.
            spans: the columns.
            within: a window of the reader's own, which hides sinks too.
        """
        return MaskArray(queries, spans, self.rows, self.policy, within=within)

    @staticmethod
    def width(spans: Iterable[tuple[int, int]]) -> int:
        """How many columns the spans hold together."""
        return stride(spans)

    def _alike(self, queries: int) -> bool:
        """Whether every row sees the same columns, all of them filled."""
        if any(row.offset < queries for row in self.rows):
            return False
        if len(self.rows) == 1:
            return True
        if any(row.offset < self.policy.sinks for row in self.rows):
            return False
        columns = {
            (
                self.lowest(row, queries) + row.shift,
                max(row.first, self.policy.lowest(row.offset - 1)) + row.shift,
                self.end(row),
            )
            for row in self.rows
        }
        return len(columns) == 1

    # -- other shapes of the same rows -----------------------------------------------------------

    def rolled_back(self, counts: Sequence[int]) -> Geometry:
        """Without the last ``counts[i]`` tokens of row ``i`` (one number stands for all rows).

        Raises:
            RollbackError: a row cannot give back so many tokens.
        """
        rows = self.rows
        if len(counts) == len(rows) == 1:  # the way of nearly every rollback
            ((count,), ((offset, shift, first),)) = counts, rows
            if type(count) is int and 0 <= count <= self.policy.reachable(offset, first):
                row = _tuple(Row, (offset - count, shift, first))
                return Geometry(self.policy, self.capacity, (row,))
        if len(counts) != len(rows):
            rows = self.expanded(len(counts)) if len(counts) > 1 else rows
            counts = tuple(counts) * len(rows) if len(counts) == 1 else counts
        for index, (row, count) in enumerate(zip(rows, counts, strict=True)):
            most = self.policy.reachable(row.offset, row.first)
            if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= most:
                raise RollbackError(
                    f"row {index} at offset {row.offset} can give back 0 to {most} tokens, "
                    f"not {count!r}; ask max_rollback first, or build the cache with a larger "
                    "reserve"
                )
        after = [
            row._replace(offset=row.offset - count) for row, count in zip(rows, counts, strict=True)
        ]
        return attrs.evolve(self, rows=_collapse(after))

    def earlier(self, tokens: int) -> Geometry:
        """As it was before the last so many tokens, for reading; rows may not have had them."""
        rows = [row._replace(offset=row.offset - tokens) for row in self.rows]
        return Geometry(self.policy, self.capacity, tuple(rows))

    def taken(self, indices: Sequence[int], batch: int) -> tuple[Relayout | None, Geometry]:
        """Rows ``indices`` of the batch, in that order; ``None`` where columns stay put."""
        rows = self.expanded(batch)
        chosen = [rows[i] for i in indices]
        if len(_collapse(chosen)) == 1 and len(self.rows) == 1:
            return None, self
        held = [row.first for row in chosen]
        moved, spans = _aligned(self.policy, chosen, held)
        capacity = round_up(max(1, *(self.end(row) for row in moved)))
        relayout = Relayout(capacity, tuple(zip(indices, spans, strict=True)))
        return relayout, Geometry(self.policy, capacity, _collapse(moved))


# The layers of a model ask the same of equal geometries, one after another: the first answers for
# all, and hands them one and the same geometry, which makes the next look-up a comparison by
# identity.
_advanced = lru_cache(maxsize=64)(Geometry._advance)
_spans = lru_cache(maxsize=64)(Geometry._spans)
_mask = lru_cache(maxsize=64)(Geometry._mask)


def _aligned(policy: Policy, rows: Sequence[Row], kept: Sequence[int]):
    """The rows with positions from ``kept`` on, moved so that all of them end at one column."""
    sinks = policy.sinks
    widths = [max(0, row.offset - low) for row, low in zip(rows, kept, strict=True)]
    end = sinks + max(widths)
    moved, spans = [], []
    for row, low, width in zip(rows, kept, widths, strict=True):
        pinned = max(0, min(row.offset, sinks))
        low = min(low, max(row.offset, sinks))
        base = max(row.offset, sinks) if sinks else row.offset
        pieces = [(0, pinned, 0)] if pinned else []
        if width:
            pieces.append((low + row.shift, row.offset + row.shift, end - width))
        moved.append(Row(row.offset, end - base, low))
        spans.append(tuple(pieces))
    return moved, spans


def concat_layout(
    geometries: Sequence[Geometry], batches: Sequence[int]
) -> tuple[tuple[Relayout | None, ...], Geometry]:
    """How buffers become one batch: a new layout for each, and the geometry of the whole.

    Raises:
        GeometryError: the policies differ.
    """
    policy = geometries[0].policy
    for other in geometries[1:]:
        if other.policy != policy:
            raise GeometryError(f"cannot batch {policy} with {other.policy}")
    if all(g == geometries[0] and len(g.rows) == 1 for g in geometries):
        return (None,) * len(geometries), geometries[0]
    rows = [row for g, n in zip(geometries, batches, strict=True) for row in g.expanded(n)]
    moved, spans = _aligned(policy, rows, [row.first for row in rows])
    geometry = Geometry(policy, 0, tuple(moved))
    capacity = round_up(max(1, *(geometry.end(row) for row in moved)))
    relayouts, done = [], 0
    for count in batches:
        part = spans[done : done + count]
        relayouts.append(Relayout(capacity, tuple(zip(range(count), part, strict=True))))
        done += count
    return tuple(relayouts), Geometry(policy, capacity, _collapse(moved))
