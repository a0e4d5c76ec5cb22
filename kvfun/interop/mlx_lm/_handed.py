"""The arrays that shells hand out, so that attention knows again what they stand for.

A model may pass them on to layers that never see the cache, so it is the arrays that are known, by
identity. Entries are read and written by single operations on a dict, which need no lock; one
leaves with its first array, in whatever thread that dies.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple


class Handed(NamedTuple):
    """What arrays stand for: a cache as it was when they were handed out, and columns of it."""

    record: Any
    columns: Any
    """As the cache's geometry names them."""
    queries: int
    """How many tokens attend to them: those of the last append."""


class _First(weakref.ref):
    """A weak reference that knows where its entry is."""

    __slots__ = ("place",)
    place: int


_entries: dict[int, tuple[tuple[weakref.ref, ...], Handed]] = {}
"""By the ``id`` of the first array, which nothing else can have while that lives."""


def _forget(first: Any) -> None:
    _entries.pop(first.place, None)


def _arrays(keys: Any, values: Any) -> list[Any]:
    """The arrays of both sides, in order."""
    sides = [side if isinstance(side, (tuple, list)) else (side,) for side in (keys, values)]
    return [array for side in sides for array in side]


def remember(keys: Any, values: Any, handed: Handed) -> None:
    """Note what is handed out, for as long as the first of its arrays lives.

    Args:
        keys: an array, or a tuple of the arrays of packed numbers.
        values: the same.
        handed: what they stand for.
    """
    first, *others = _arrays(keys, values)
    reference = _First(first, _forget)
    reference.place = id(first)
    _entries[reference.place] = (reference, *map(weakref.ref, others)), handed


def recall(keys: Any, values: Any) -> Handed | None:
    """What arrays stand for, if they are the very ones that were handed out together."""
    arrays = _arrays(keys, values)
    entry = _entries.get(id(arrays[0])) if arrays else None
    if entry is None or len(entry[0]) != len(arrays):
        return None
    same = all(ref() is array for ref, array in zip(entry[0], arrays, strict=True))
    return entry[1] if same else None
