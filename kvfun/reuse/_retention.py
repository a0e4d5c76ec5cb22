"""Few boundaries of a long text, the nearer the end the denser."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..errors import ShapeError
from ..record import record, replace, static


@record
class Kept:
    """What was kept at boundaries of a text.

    Args:
        items: what was kept, by the number of tokens, in order.
        spacing: only boundaries that are multiples of it stay, and the newest one.

    >>> kept = Kept({}, spacing=256)
    >>> for chunk in range(1, 101):
    ...     kept = keep(kept, 256 * chunk, f"state after chunk {chunk}")
    >>> [boundary // 256 for boundary in kept.items]
    [64, 80, 88, 96, 98, 99, 100]
    >>> nearest(kept, 24_700)
    (24576, 'state after chunk 96')
    """

    items: dict[int, Any]
    spacing: int = static(default=1)


def keep(kept: Kept, boundary: int, item: Any) -> Kept:
    """Keep something at a boundary, and let go what no longer fits the spacing.

    Of multiples of every power of two times ``spacing`` the newest two stay: of ``n`` boundaries
    ``2 log2 n + 1`` at most, and from a place ``d`` tokens before the end it is at most ``3 d``
    (and ``spacing``) back to one.

    Args:
        kept: what was kept so far.
        boundary: how many tokens; behind all others, or one of them again.
        item: what to keep.

    Raises:
        ShapeError: no boundary, or one before the newest.
    """
    newest = max(kept.items, default=0)
    if isinstance(boundary, bool) or not isinstance(boundary, int) or boundary < max(1, newest):
        raise ShapeError(f"a boundary is at least {max(1, newest)} tokens, not {boundary!r}")
    stay = _spaced([*kept.items, boundary], kept.spacing)
    items = {each: x for each, x in {**kept.items, boundary: item}.items() if each in stay}
    return replace(kept, items=items)


def _spaced(boundaries: Iterable[int], spacing: int) -> set[int]:
    ordered = sorted({*boundaries}, reverse=True)
    stay, step = {ordered[0]}, spacing
    while step <= ordered[0]:
        stay |= {*[each for each in ordered if each % step == 0][:2]}
        step *= 2
    return stay


def nearest(kept: Kept, tokens: int) -> tuple[int, Any] | None:
    """The last boundary among the first so many tokens, and what was kept there."""
    found = max([each for each in kept.items if each <= tokens], default=None)
    return None if found is None else (found, kept.items[found])
