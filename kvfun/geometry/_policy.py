"""Who may see whom, as four integers."""

from __future__ import annotations

import attrs

from ..errors import GeometryError

STEP = 256
"""Columns a buffer grows by. MLX's fused CUDA decode needs capacities that are multiples of 256."""

SLACK = 256
"""Spare columns of a bounded buffer: a compaction of ``window`` columns happens once in so many
tokens, so its cost is a constant share (``1 / SLACK``) of the reads that happen meanwhile."""


def round_up(columns: int) -> int:
    """The smallest multiple of :data:`STEP` that holds ``columns``."""
    return -(-columns // STEP) * STEP


def _at_least(minimum: int):
    def check(_, attribute, value) -> None:
        if value is None and attribute.default is None:
            return
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise GeometryError(
                f"{attribute.name} must be an integer >= {minimum}"
                f"{' or None' if attribute.default is None else ''}, not {value!r}"
            )

    return check


def _limit(policy: Policy) -> int | None:
    spans = [span for span in (policy.window, policy.chunk) if span is not None]
    if not spans:
        return None
    return round_up(policy.sinks + min(spans) - 1 + max(policy.reserve, 1) + SLACK)


@attrs.frozen(cache_hash=True)
class Policy:
    """Visibility and retention of positions, the same for every row.

    A query at position ``q`` sees position ``p <= q`` if ``p < sinks``, or if ``p`` is within the
    window (``p > q - window``: exactly ``window`` keys, the query's own included) and within the
    query's chunk (``p // chunk == q // chunk``).

    Args:
        window: sliding window in tokens, ``None`` for full attention.
        sinks: the first positions that stay visible for ever.
        chunk: attention is limited to the query's own chunk of so many positions.
        reserve: tokens that can be rolled back exactly at any time after the window has filled,
            counted from the highest offset the row has had. The last append can always be rolled
            back whole, whatever the reserve; left padding is no token and cannot be given back.

    Raises:
        GeometryError: a value out of range.
    """

    window: int | None = attrs.field(default=None, validator=_at_least(1))
    sinks: int = attrs.field(default=0, validator=_at_least(0))
    chunk: int | None = attrs.field(default=None, validator=_at_least(1))
    reserve: int = attrs.field(default=0, validator=_at_least(0))
    limit: int | None = attrs.field(
        init=False, eq=False, repr=False, default=attrs.Factory(_limit, takes_self=True)
    )
    """Columns a bounded buffer is compacted to, ``None`` where nothing is ever dropped."""

    def lowest(self, query: int) -> int:
        """The lowest position behind the sinks that a query at position ``query`` sees."""
        low = self.sinks
        if self.window is not None:
            low = max(low, query - self.window + 1)
        if self.chunk is not None:
            low = max(low, query // self.chunk * self.chunk)
        return low

    def kept(self, offset: int) -> int:
        """The lowest position that a write at position ``offset`` may not drop."""
        return self.lowest(offset - max(self.reserve, 1))

    def reachable(self, offset: int, first: int) -> int:
        """How many tokens a row at ``offset`` that holds positions from ``first`` can give back.

        After giving back ``n`` the row must still hold everything its then last token sees.
        """
        if first <= self.sinks:
            return max(offset, 0)
        lowest = []
        if self.window is not None:
            lowest.append(offset - self.window - first)
        if self.chunk is not None:
            lowest.append(offset - 1 - -(-first // self.chunk) * self.chunk)
        return max([0, *lowest])
