"""What a model's caches need to go back to a boundary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .. import tree
from ..caches import Cross, Delayed, Ragged, offsets, rollback, snapshot
from ..errors import CompanionError, RollbackError, ShapeError
from ..record import record, static
from ._companion import Companion


@record
class Checkpoint:
    """The part of a model's caches that cannot be had by a rollback from a later moment.

    A recurrent state and the columns of a window, in buffers of their own: it is as large at any
    length of the text. Layers that keep all their tokens leave nothing here.

    Args:
        parts: for each layer what was kept, ``None`` where a rollback does.
        companions: what else belongs to this boundary, by schema.
        offsets: tokens that each row had.
    """

    parts: tuple[Any, ...]
    companions: dict[str, Companion]
    offsets: tuple[int, ...] = static()

    @property
    def nbytes(self) -> int:
        """Bytes held, known before anything is computed."""
        return tree.nbytes(self)


def checkpoint(caches: Sequence[Any], companions: Sequence[Companion] = ()) -> Checkpoint:
    """What it takes to go back to here later.

    Args:
        caches: one a layer; ``None``, or a tuple of several, as :class:`kvfun.scheme.ModelCaches`.
        companions: what else belongs to this boundary.

    Raises:
        ShapeError: no caches, or caches at different tokens.
        CompanionError: a companion of another boundary, or two of one schema.

    >>> import kvfun, mlx.core as mx
    >>> k = mx.zeros((1, 2, 300, 64))
    >>> caches = [kvfun.append(kvfun.empty("plain", window=w), k, k) for w in (None, 8)]
    >>> here = checkpoint(caches)
    >>> here.parts[0] is None, here.nbytes == 9 * 2 * 2 * 64 * 4
    (True, True)
    >>> caches = [kvfun.append(cache, k, k) for cache in caches]
    >>> [kvfun.offsets(cache) for cache in resume(here, caches)]
    [(300,), (300,)]
    """
    found = _offsets(caches)
    for each in companions:
        if {each.boundary} != {*found}:
            raise CompanionError(f"{each.schema} of {each.boundary} tokens at {found}")
    named = {each.schema: each for each in companions}
    if len(named) < len(companions):
        raise CompanionError("several companions of one schema")
    return Checkpoint(tuple([_part(cache) for cache in caches]), named, found)


def _offsets(caches: Sequence[Any]) -> tuple[int, ...]:
    found = {offsets(leaf) for cache in caches for leaf in _leaves(cache)}
    if len(found) != 1:
        raise ShapeError(f"caches of one boundary, not of {sorted(found)}")
    return found.pop()


def _leaves(cache: Any) -> list[Any]:
    if isinstance(cache, tuple | list):
        return [leaf for each in cache for leaf in _leaves(each)]
    return [] if cache is None else [cache]


def _part(cache: Any) -> Any:
    if isinstance(cache, tuple | list):
        return tuple([_part(each) for each in cache])
    return None if cache is None or _keeps_all(cache) else snapshot(cache)


def _keeps_all(cache: Any) -> bool:
    """Whether any earlier moment can be had by a rollback, at any later one."""
    if isinstance(cache, Ragged):
        return all(_keeps_all(part) for part in cache.parts)
    if isinstance(cache, Delayed | Cross):
        return _keeps_all(cache.inner)
    policy = getattr(getattr(cache, "geometry", None), "policy", None)
    return policy is not None and policy.limit is None


def resume(kept: Checkpoint, caches: Sequence[Any]) -> Any:
    """The caches as they were at a boundary that all of them have gone through.

    What was encoded since in a :class:`kvfun.Chain` stays encoded, as after any rollback.

    Args:
        kept: from :func:`checkpoint`, of the very text that the caches hold.
        caches: the same model's, later.

    Returns:
        A list (or tuple, as given) of caches.

    Raises:
        ShapeError: other layers or rows.
        RollbackError: a layer has fewer tokens, or was converted since.
    """
    if len(caches) != len(kept.parts):
        raise ShapeError(f"{len(caches)} layers where {len(kept.parts)} were kept")
    pairs = zip(kept.parts, caches, strict=True)
    back = [_resumed(part, cache, kept.offsets) for part, cache in pairs]
    return back if isinstance(caches, list) else tuple(back)


def _resumed(part: Any, cache: Any, wanted: tuple[int, ...]) -> Any:
    if isinstance(cache, tuple | list):
        parts = (None,) * len(cache) if part is None else part
        return tuple([_resumed(p, c, wanted) for p, c in zip(parts, cache, strict=True)])
    if cache is None:
        return None
    have = offsets(cache)
    if len(have) != len(wanted):
        raise ShapeError(f"{len(have)} rows where {len(wanted)} were kept")
    if part is not None:
        return part
    more = [now - then for now, then in zip(have, wanted, strict=True)]
    if min(more) < 0:
        raise RollbackError(f"{have} tokens are there, not the {wanted} of the checkpoint")
    if isinstance(cache, Delayed) and cache.floor > min(wanted):
        raise RollbackError(f"the cache was converted at {cache.floors} tokens, behind {wanted}")
    return rollback(cache, more)
