"""Positions that several buffers hold together: the integers of a chain."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import attrs

from ..errors import GeometryError, RollbackError
from ._geometry import (
    Geometry,
    Plan,
    Relayout,
    Row,
    _aligned,
    _collapse,
    stride,
)
from ._mask import JoinedMask, Mask, MaskArray
from ._policy import Policy, _at_least

Spans = tuple[tuple[int, int], ...]


@attrs.frozen
class Ageing:
    """When tokens of the live tail are old enough for the codec of the past.

    Whenever a row holds ``residual + block`` unencoded tokens or more, the oldest ``block`` of them
    are encoded, until it does not.
    """

    residual: int = attrs.field(validator=_at_least(1))
    block: int = attrs.field(default=64, validator=_at_least(1))

    def due(self, held: int) -> int:
        """How many of ``held`` unencoded tokens are to be encoded."""
        return max(0, held - self.residual) // self.block * self.block


class Seal(NamedTuple):
    """Tokens that leave the tail for the part before it.

    ``gather`` lays them out side by side (the tail's columns as source), ``past`` writes them
    behind what that part has, ``keep`` lays the tail out anew.
    """

    gather: Relayout
    past: Plan
    keep: Relayout


class ChainPlan(NamedTuple):
    """What a block does to the parts: to the front, to the tail, and then from the tail."""

    front: Plan | None
    tail: Plan
    seal: Seal | None


@attrs.frozen(cache_hash=True)
class Segments:
    """The parts of a chain, oldest first, the live tail last.

    All parts count positions from the beginning of the sequence, and hold runs of them that follow
    one another; a part that holds none of a row says so by ``first == offset``.

    Args:
        policy: who may see whom, across all parts.
        parts: where each part has which positions. Its own policy says what it drops, and which
            of its columns are pinned.
        front: the first part takes the positions below this one, and no others.
        ageing: when the last but one takes tokens from the tail.
    """

    policy: Policy
    parts: tuple[Geometry, ...]
    front: int = 0
    ageing: Ageing | None = None

    def earlier(self, tokens: int) -> Segments:
        """As it was before the last so many tokens, for reading; rows may not have had them."""
        rows = self.whole.expanded(self.batch)
        return self._reaching([row.offset - tokens for row in rows])

    @property
    def tail(self) -> Geometry:
        """The part that takes new tokens."""
        return self.parts[-1]

    @property
    def whole(self) -> Geometry:
        """The geometry of one buffer that would hold all of it; its columns mean nothing."""
        return _whole(self)

    @property
    def rows(self) -> tuple[Row, ...]:
        """The rows of :attr:`whole`."""
        return self.whole.rows

    def _rows(self) -> tuple[Row, ...]:
        parts = self._expanded()
        return _collapse([self._row([part[i] for part in parts]) for i in range(len(parts[0]))])

    def _expanded(self) -> list[tuple[Row, ...]]:
        """For each part its rows, one for each of the batch's (or one that stands for all)."""
        count = self.batch
        return [
            part.rows if len(part.rows) == count else part.expanded(count) for part in self.parts
        ]

    def _row(self, rows: list[Row]) -> Row:
        """Offset, and the first position from which on all are held."""
        filling = self.front and rows[0].offset < self.front
        offset = rows[0].offset if filling else rows[-1].offset
        first, expected = self.policy.sinks, 0
        for row, part in zip(rows, self.parts, strict=True):
            expected = max(expected, min(row.offset, part.policy.sinks))
            if row.first < row.offset:
                first = max(first, row.first) if row.first > expected else first
                expected = row.offset
        return Row(offset, 0, first)

    @property
    def batch(self) -> int:
        """How many rows are told apart; one may stand for all."""
        return max(len(part.rows) for part in self.parts)

    @property
    def floor(self) -> int:
        """The lowest offset that a rollback can reach.

        Sinks have columns of their own only where they were written first; a tail that follows has
        none.
        """
        return 0 if self.front else self.policy.sinks

    @property
    def size(self) -> int:
        """Live positions, of the row that has most."""
        return self.whole.size

    def max_rollback(self) -> tuple[int, ...]:
        """How many tokens each row can give back exactly."""
        whole = self.whole
        return tuple(
            max(0, min(most, row.offset - self.floor))
            for most, row in zip(whole.max_rollback(), whole.rows, strict=True)
        )

    # -- writes --------------------------------------------------------------------------------

    def advance(self, length: int) -> tuple[ChainPlan, Segments]:
        """The plan of appending a block of ``length`` tokens to every row, and what results."""
        return _advanced(self, length)

    def _advance(self, length: int) -> tuple[ChainPlan, Segments]:
        parts, plan = list(self.parts), None
        cuts = None
        if self.front:
            offsets = [row.offset for row in self._expanded()[0]]
            cuts = [min(max(self.front - offset, 0), length) for offset in offsets]
            if any(cuts):
                plan, parts[0] = parts[0].advance(length, tuple((0, cut) for cut in cuts))
        if cuts is not None and any(cuts):
            tail, parts[-1] = parts[-1].advance(length, tuple((cut, length) for cut in cuts))
        else:
            tail, parts[-1] = parts[-1].advance(length)
        seal = None
        if self.ageing is not None:
            seal, parts[-2:] = _sealed(self.ageing, parts[-2], parts[-1])
        return ChainPlan(plan, tail, seal), attrs.evolve(self, parts=tuple(parts))

    # -- reads ---------------------------------------------------------------------------------

    def spans(self, queries: int = 1) -> tuple[Spans, ...]:
        """For each part the columns that any of the last ``queries`` tokens sees.

        Raises:
            GeometryError: such positions have been dropped.
        """
        return _seen(self, queries)[0]

    def cover(self, queries: int = 1) -> tuple[Spans, ...]:
        """The same as :meth:`spans`."""
        return self.spans(queries)

    def mask(self, queries: int, spans: tuple[Spans, ...] | None = None) -> Mask:
        """Which columns of all parts, side by side, each of the last ``queries`` tokens sees."""
        exact, alike = _seen(self, queries)
        if spans is None or spans == exact:
            spans = exact
            if alike:
                return None if queries == 1 else "causal"
        return self.describe(queries, spans)

    def describe(
        self, queries: int, spans: tuple[Spans, ...], within: int | None = None
    ) -> JoinedMask:
        """As :meth:`Geometry.describe`, for the columns of all parts side by side."""
        held = self._expanded()
        offsets = [row.offset for row in self.whole.expanded(len(held[0]))]
        parts = [
            MaskArray(
                queries,
                columns,
                tuple([row._replace(offset=n) for row, n in zip(rows, offsets, strict=True)]),
                self.policy,
                stops=tuple([row.offset for row in rows]),
                pins=part.policy.sinks,
                within=within,
            )
            for part, rows, columns in zip(self.parts, held, spans, strict=True)
        ]
        return JoinedMask(queries, tuple(parts))

    @staticmethod
    def width(spans: Sequence[Spans]) -> int:
        """How many columns the spans of all parts hold together."""
        return sum(stride(runs) for runs in spans)

    def _seen(self, queries: int) -> tuple[tuple[Spans, ...], bool]:
        """The columns of each part, and whether they make one causal read."""
        whole, policy = self.whole, self.policy
        parts = self._expanded()
        rows = whole.expanded(len(parts[0]))
        lows = [whole.lowest(row, queries) for row in rows]
        spans, alike = [], True
        for part, held in zip(self.parts, parts, strict=True):
            runs, exact = _runs(part, held, lows, policy.sinks)
            spans.append(runs)
            alike = alike and exact
        for row, low in zip(rows, lows, strict=True):
            last = max(row.first, policy.lowest(row.offset - 1))
            alike = alike and row.offset >= queries and last == low
        return tuple(spans), alike

    # -- other shapes of the same rows -----------------------------------------------------------

    def rolled_back(self, counts: Sequence[int]) -> Segments:
        """Without the last ``counts[i]`` tokens of row ``i`` (one number stands for all rows).

        Raises:
            RollbackError: a row cannot give back so many tokens.
        """
        whole = self.whole.rolled_back(counts)
        count = max(len(whole.rows), self.batch)
        targets = [row.offset for row in whole.expanded(count)]
        before = [row.offset for row in self.whole.expanded(count)]
        for index, (target, offset) in enumerate(zip(targets, before, strict=True)):
            if target < min(self.floor, offset):
                raise RollbackError(
                    f"row {index} at offset {offset} can give back {offset - self.floor} tokens: "
                    f"its {self.floor} sinks are in a sealed segment"
                )
        return self._reaching(targets)

    def _reaching(self, targets: Sequence[int]) -> Segments:
        """With no position of row ``i`` from ``targets[i]`` on."""
        parts = []
        for part in self.parts:
            held = part.expanded(len(targets)) if len(targets) > 1 else part.rows
            rows = [self._cut(part, row, n) for row, n in zip(held, targets, strict=True)]
            parts.append(attrs.evolve(part, rows=_collapse(rows)))
        return attrs.evolve(self, parts=tuple(parts))

    def _cut(self, part: Geometry, row: Row, target: int) -> Row:
        """A part's row without the positions from ``target`` on."""
        if row.offset <= target:
            return row
        if part.policy.sinks or row.first <= target:
            return row._replace(offset=target)
        restart = max(target, self.front)
        return Row(restart, row.shift + row.first - restart, restart)


def _runs(
    part: Geometry, rows: Sequence[Row], lows: Sequence[int], sinks: int
) -> tuple[Spans, bool]:
    """The visible columns of a part, and whether each row sees exactly those."""
    pins = part.policy.sinks
    pinned: dict[Spans, None] = {}
    bodies: dict[tuple[int, int] | None, None] = {}
    for (offset, shift, first), low in zip(rows, lows, strict=True):
        pinned[_pinned(min(max(offset, 0), pins), low, sinks)] = None
        start = max(first, low)
        bodies[(start + shift, offset + shift) if start < offset else None] = None
    runs = [run for held in pinned for run in held]
    if len(pinned) > 1:
        runs = [(min(run[0] for run in runs), max(run[1] for run in runs))]
    if any(bodies):
        found = [body for body in bodies if body is not None]
        runs.append((min(body[0] for body in found), max(body[1] for body in found)))
    return _touching(runs), len(pinned) == len(bodies) == 1


def _pinned(stop: int, low: int, sinks: int) -> Spans:
    """What is seen of the pinned columns ``[0, stop)``: sinks, and what is not too far back."""
    near = stop if low <= sinks else min(stop, sinks)
    return _touching([run for run in ((0, near), (low, stop)) if run[0] < run[1]])


def _touching(runs: Sequence[tuple[int, int]]) -> Spans:
    """The runs, those that touch or overlap as one."""
    joined: list[tuple[int, int]] = []
    for start, stop in runs:
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        else:
            joined.append((start, stop))
    return tuple(joined)


def _sealed(
    ageing: Ageing, past: Geometry, tail: Geometry
) -> tuple[Seal | None, tuple[Geometry, Geometry]]:
    """What leaves the tail for the past."""
    if not any(ageing.due(tail.held(row)) for row in tail.rows):
        return None, (past, tail)
    held = tail.expanded(max(len(tail.rows), len(past.rows)))
    counts = [ageing.due(tail.held(row)) for row in held]
    most = max(counts)
    sources = [None] if len(counts) == 1 else range(len(counts))
    leaving, kept = [], []
    for source, row, count in zip(sources, held, counts, strict=True):
        start = row.first + row.shift
        leaving.append((source, ((start, start + count, 0),) if count else ()))
        kept.append(row.first + count)
    written, past = past.advance(most, tuple((0, count) for count in counts))
    rows, spans = _aligned(tail.policy, held, kept)
    capacity = ageing.residual + ageing.block
    keep = Relayout(capacity, tuple(zip(sources, spans, strict=True)))
    after = Geometry(tail.policy, capacity, _collapse(rows))
    return Seal(Relayout(most, tuple(leaving)), written, keep), (past, after)


_whole = lru_cache(maxsize=64)(lambda segments: Geometry(segments.policy, 0, segments._rows()))
_advanced = lru_cache(maxsize=64)(Segments._advance)
_seen = lru_cache(maxsize=64)(Segments._seen)


def front_part(front: int, padding: Sequence[int]) -> Geometry:
    """An empty part for the positions below ``front``; padding is not stored."""
    rows = [Row(-pad, 0, front) for pad in padding]
    return Geometry(Policy(sinks=front), 0, _collapse(rows))


def body_part(policy: Policy, starts: Sequence[int]) -> Geometry:
    """An empty part for the positions from ``starts[i]`` on (negative: padding is to come)."""
    own = Policy(policy.window, 0, policy.chunk, policy.reserve)
    rows = [Row(start, -start, max(start, 0)) for start in starts]
    return Geometry(own, 0, _collapse(rows))


def check_sealable(geometry: Geometry | Segments) -> None:
    """Raise ``GeometryError`` where no part can follow what there is."""
    rows, sinks = geometry.rows, geometry.policy.sinks
    if any(row.offset < max(sinks, 0) for row in rows):
        offsets = tuple(row.offset for row in rows)
        raise GeometryError(
            f"rows at offsets {offsets} cannot be sealed: every row must have its {sinks} sinks "
            "and no padding to come; append those first"
        )
