"""The oracle of the geometry: lists of tokens, and a buffer of cells that plans are applied to.

Nothing here computes a column. Tokens are numbered, plans move and write the numbers in Python
lists, and what must hold is asked of the cells by looking the tokens up.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import count

import numpy as np
import pytest

from kvfun.errors import GeometryError, RollbackError
from kvfun.geometry import (
    Geometry,
    MaskArray,
    Plan,
    Policy,
    Relayout,
    _geometry,
    _policy,
    concat_layout,
    mask_array,
)

PADDING = -1
_numbers = count()


@contextmanager
def steps(step: int, slack: int) -> Iterator[None]:
    """Buffers that grow by ``step`` and compact every ``slack`` columns, so that both are seen."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_policy, "STEP", step)
        patch.setattr(_policy, "SLACK", slack)
        forget()
        yield
    forget()


def forget() -> None:
    """Drop what was answered under other steps."""
    for answers in (_geometry._advanced, _geometry._spans, _geometry._mask):
        answers.cache_clear()


def sees(policy: Policy, query: int, position: int) -> bool:
    """The definition of visibility."""
    if position > query:
        return False
    in_window = policy.window is None or position > query - policy.window
    in_chunk = policy.chunk is None or position // policy.chunk == query // policy.chunk
    return position < policy.sinks or (in_window and in_chunk)


@cache
def seen_from(policy: Policy, query: int) -> tuple[int, ...]:
    """The positions that a query sees."""
    return tuple(p for p in range(query + 1) if sees(policy, query, p))


@lru_cache(maxsize=4096)
def table(policy: Policy, offset: int, length: int, positions: tuple[int, ...]) -> np.ndarray:
    """The definition again, for the last queries over columns; position -1 is no position."""
    q = np.arange(offset - length, offset)[:, None]
    p = np.array(positions, int)[None]
    near = np.ones((length, len(positions)), bool)
    if policy.window is not None:
        near &= q - p < policy.window
    if policy.chunk is not None:
        near &= q // policy.chunk == p // policy.chunk
    seen = (p >= 0) & (p <= q) & ((p < policy.sinks) | near)
    return np.where(q < 0, np.arange(len(positions)) == 0, seen)  # padding needs one column


@lru_cache(maxsize=4096)
def triangle(length: int, columns: int) -> np.ndarray:
    """What "causal" means, aligned at the lower right."""
    return np.arange(columns) <= np.arange(columns - length, columns)[:, None]


@lru_cache(maxsize=4096)
def drawn(mask: MaskArray) -> np.ndarray:
    """The array of a description, ``[B or 1, L, N]``."""
    array = np.array(mask_array(mask))
    columns = sum(stop - start for start, stop in mask.spans)
    assert array.dtype == bool
    if len(mask.rows) == 1:
        assert array.shape == (mask.queries, columns)
        return array[None]
    assert array.shape == (len(mask.rows), 1, mask.queries, columns)
    return array[:, 0]


@dataclass(frozen=True)
class Line:
    """One sequence: its tokens by position, and what it must be able to give back."""

    padding: int = 0  # still to come
    tokens: tuple[int, ...] = ()
    last: int = 0  # tokens of the last append that are still there
    peak: int = 0  # the highest offset it has had

    @property
    def offset(self) -> int:
        return len(self.tokens) - self.padding


class Oracle:
    """A batch of lists, the geometry that claims to describe it, and the cells of its buffer."""

    def __init__(self, policy: Policy, geometry: Geometry, lines, cells, block: int = 0):
        self.policy = policy
        self.geometry = geometry
        self.lines: tuple[Line, ...] = tuple(lines)
        self.cells: tuple[tuple[int | None, ...], ...] = tuple(map(tuple, cells))
        self.block = block  # the longest last block of any part

    @classmethod
    def empty(cls, policy: Policy, paddings: Sequence[int] | None = None, batch: int = 1) -> Oracle:
        """Nothing yet."""
        paddings = (0,) * batch if paddings is None else tuple(paddings)
        left = paddings if any(paddings) or len(paddings) > 1 else None
        geometry = Geometry.empty(policy, left)
        return cls(policy, geometry, [Line(p) for p in paddings], [()] * len(paddings))

    # -- what is done, by lists ----------------------------------------------------------------

    def append(self, length: int) -> Oracle:
        """Append tokens to every row, as the plan says."""
        plan, geometry = self.geometry.advance(length)
        lines, blocks = [], []
        for line in self.lines:
            pads = min(line.padding, length)
            new = tuple(next(_numbers) for _ in range(length - pads))
            tokens = line.tokens + new
            peak = max(line.peak, len(tokens))
            last = len(new) if length else line.last
            lines.append(Line(line.padding - pads, tokens, last, peak))
            blocks.append([PADDING] * pads + list(new))
        cells = _apply(plan, self.cells, blocks, self.lines, geometry.capacity)
        return Oracle(self.policy, geometry, lines, cells, length or self.block)

    def rollback(self, *counts: int) -> Oracle:
        """Give tokens back; one number stands for all rows."""
        geometry = self.geometry.rolled_back(counts)
        counts = counts * len(self.lines) if len(counts) == 1 else counts
        lines = [
            replace(
                line,
                tokens=line.tokens[: len(line.tokens) - n],
                last=max(0, line.last - n),
            )
            for line, n in zip(self.lines, counts, strict=True)
        ]
        return Oracle(self.policy, geometry, lines, self.cells, self.block)

    def take(self, *rows: int) -> Oracle:
        """Rows of the batch, in that order."""
        relayout, geometry = self.geometry.taken(rows, len(self.lines))
        lines = [self.lines[row] for row in rows]
        if relayout is None:
            cells = [self.cells[row] for row in rows]
        else:
            cells = _laid_out(relayout, self.cells, geometry.capacity, len(rows))
        return Oracle(self.policy, geometry, lines, cells, self.block)

    @staticmethod
    def concat(parts: Sequence[Oracle]) -> Oracle:
        """One batch."""
        relayouts, geometry = concat_layout(
            [part.geometry for part in parts], [len(part.lines) for part in parts]
        )
        cells = []
        for part, relayout in zip(parts, relayouts, strict=True):
            if relayout is None:
                cells += part.cells
            else:
                cells += _laid_out(relayout, part.cells, geometry.capacity, len(part.lines))
        lines = [line for part in parts for line in part.lines]
        block = max(part.block for part in parts)
        return Oracle(parts[0].policy, geometry, lines, cells, block)

    # -- what must hold ------------------------------------------------------------------------

    def key(self) -> tuple:
        """Equal for states that no later operation can tell apart."""
        kept = tuple(
            tuple(
                position.get(cell, -2) if cell is not None else None
                for cell in row
                for position in [places]
            )
            for row, places in zip(self.cells, self._positions(), strict=True)
        )
        rest = tuple((line.offset, line.last, line.peak) for line in self.lines)
        return self.geometry, kept, rest, self.block

    def _positions(self) -> list[dict[int, int]]:
        return [{token: p for p, token in enumerate(line.tokens)} for line in self.lines]

    def check(self, queries: Iterable[int] | None = None) -> Oracle:
        """Everything the geometry says about this moment, against the lists."""
        geometry, batch = self.geometry, len(self.lines)
        rows = geometry.expanded(batch)
        positions = self._positions()
        held = []
        for row, line, cells, known in zip(rows, self.lines, self.cells, positions, strict=True):
            found = [known[cell] for cell in cells if cell in known]
            assert found == sorted(set(found)), "temporal order, each token once"
            assert row.offset == line.offset
            assert geometry.held(row) == sum(p >= self.policy.sinks for p in found)
            held.append(set(found))
            assert len(cells) == geometry.capacity
        self._check_capacity()
        self._check_numbers(rows, held)
        for length in self._lengths() if queries is None else queries:
            self._check_reads(length, positions, held)
        return self

    def _check_capacity(self) -> None:
        policy, capacity = self.policy, self.geometry.capacity
        assert capacity % _policy.STEP == 0
        if policy.window is None and policy.chunk is None:
            return
        span = min(n for n in (policy.window, policy.chunk) if n is not None)
        most = policy.sinks + span - 1 + max(policy.reserve, 1) + max(self.block, _policy.SLACK)
        assert capacity <= -(-most // _policy.STEP) * _policy.STEP

    def _check_numbers(self, rows, held: list[set[int]]) -> None:
        geometry, policy = self.geometry, self.policy
        live = [len(seen_from(policy, line.offset - 1)) for line in self.lines]
        assert [geometry.live(row) for row in rows] == live
        assert geometry.size == max(live)
        most = geometry.max_rollback()
        most = most * len(self.lines) if len(most) == 1 else most
        for index, (line, have, n) in enumerate(zip(self.lines, held, most, strict=True)):
            exact = [
                have.issuperset(seen_from(policy, line.offset - 1 - back))
                for back in range(max(line.offset, 0) + 1)
            ]
            assert all(exact[: n + 1])
            assert n == len(exact) - 1 or not exact[n + 1]
            assert n >= line.last
            assert n >= policy.reserve - (line.peak - line.offset) or n == max(line.offset, 0)
            others = [0] * len(self.lines)
            others[index] = n + 1
            with pytest.raises(RollbackError):
                geometry.rolled_back(others)

    def _lengths(self) -> list[int]:
        longest = max(line.offset for line in self.lines)
        wanted = {1, 2, self.block, self.block + 1, longest}
        return sorted(length for length in wanted if length > 0)

    def _check_reads(self, length: int, positions, held: list[set[int]]) -> None:
        geometry, policy, lines = self.geometry, self.policy, self.lines
        asked = [range(max(line.offset - length, 0), max(line.offset, 0)) for line in lines]
        wanted = [{p for q in qs for p in seen_from(policy, q)} for qs in asked]
        if not all(want <= have for want, have in zip(wanted, held, strict=True)):
            for read in (geometry.spans, geometry.cover, geometry.mask):
                with pytest.raises(GeometryError):
                    read(length)
            for want, have, line in zip(wanted, held, lines, strict=True):
                assert want <= have or length > max(line.last, 1), "the last block can be read"
            return
        spans, cover = geometry.spans(length), geometry.cover(length)
        self._check_spans(spans, wanted, positions)
        assert len(cover) == (geometry.capacity > 0)
        assert set(_columns(spans)) <= set(_columns(cover))
        for where in {spans, cover}:
            mask = geometry.mask(length, where)
            self._check_mask(mask, length, where, positions)
        assert geometry.mask(length) == geometry.mask(length, spans)

    def _check_spans(self, spans, wanted: list[set[int]], positions) -> None:
        """As few columns as two runs can have: the sinks, and the hull of the rest."""
        columns = _columns(spans)
        assert len(spans) <= 2
        assert all(start < stop for start, stop in spans)
        assert columns == sorted(set(columns))
        sinks = self.policy.sinks
        near = {
            column
            for cells, known, want in zip(self.cells, positions, wanted, strict=True)
            for column, cell in enumerate(cells)
            if known.get(cell, -1) in want
        }
        pinned = {c for c in near if c < sinks}
        rest = near - pinned
        hull = set(range(min(rest), max(rest) + 1)) if rest else set()
        assert set(columns) == pinned | hull

    def _check_mask(self, mask, length: int, spans, positions) -> None:
        columns = _columns(spans)
        brute = [
            table(
                self.policy, line.offset, length, tuple([known.get(cells[c], -1) for c in columns])
            )
            for line, cells, known in zip(self.lines, self.cells, positions, strict=True)
        ]
        real = all(line.offset >= length for line in self.lines)
        causal = triangle(length, len(columns))
        if mask is None:
            assert real
            assert all(seen.all() for seen in brute)
        elif mask == "causal":
            assert real
            assert all(np.array_equal(seen, causal) for seen in brute)
        else:
            array = drawn(mask)
            assert len(array) in (1, len(brute))
            assert all(
                np.array_equal(array[row % len(array)], seen) for row, seen in enumerate(brute)
            )
            if len(self.geometry.rows) == 1 and real:  # never an array where words do
                assert not np.array_equal(brute[0], causal)


def _columns(spans: Iterable[tuple[int, int]]) -> list[int]:
    return [column for start, stop in spans for column in range(start, stop)]


def _laid_out(relayout: Relayout, cells, capacity: int, batch: int):
    assert relayout.capacity == capacity
    entries = relayout.rows
    if entries[0][0] is None:
        assert len(entries) == 1
        entries = [(row, entries[0][1]) for row in range(batch)]
    assert len(entries) == batch
    new = [[None] * capacity for _ in range(batch)]
    for target, (source, pieces) in zip(new, entries, strict=True):
        done = 0
        for start, stop, column in pieces:
            assert done <= column, "pieces in order, none over another"
            assert 0 <= start < stop <= len(cells[source])
            done = column + stop - start
            assert done <= capacity
            target[column:done] = cells[source][start:stop]
    return new


def _apply(plan: Plan, cells, blocks: list[list[int]], lines: Sequence[Line], capacity: int):
    if plan.relayout is not None:
        cells = _laid_out(plan.relayout, cells, capacity, len(blocks))
    new = [list(row) for row in cells]
    assert all(len(row) == capacity for row in new)
    written = [[0] * len(block) for block in blocks]
    for row, start, stop, column in plan.writes:
        for index in range(len(blocks)) if row is None else (row,):
            assert 0 <= start < stop <= len(blocks[index])
            assert 0 <= column <= column + stop - start <= capacity
            live = set(lines[index].tokens)
            for token in range(start, stop):
                cell = column + token - start
                assert new[index][cell] not in live, "a token was overwritten"
                new[index][cell] = blocks[index][token]
                written[index][token] += 1
    for block, times in zip(blocks, written, strict=True):
        for token, n in zip(block, times, strict=True):
            assert n == 1 or (token == PADDING and n == 0)
    return new
