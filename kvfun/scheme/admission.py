"""Who may start within a budget: a value, and functions that return the next one."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

import attrs

from ..errors import AdmissionError, BudgetError

QUEUE = 64
"""The most requests that wait, if not said."""


class Request(NamedTuple):
    """Who asks, and for how many bytes."""

    name: Hashable
    nbytes: int


@attrs.frozen
class Pool:
    """Requests that run and that wait, within a budget.

    The first that waits is admitted as soon as it fits, and nobody before it: a large request is
    not overtaken for ever. The functions of this module return the pool that follows, and the
    names that were admitted by it.

    Args:
        budget: bytes for all that run, ``None`` for no limit.
        queue: the most that wait.
        running: those that were admitted.
        waiting: the others, in order.
        closed: nobody is admitted any more.

    >>> pool, now = request(Pool(10), "a", 6)
    >>> pool, later = request(pool, "b", 6)
    >>> now, later, release(pool, "a")[1]
    (('a',), (), ('b',))
    """

    budget: int | None
    queue: int = QUEUE
    running: tuple[Request, ...] = ()
    waiting: tuple[Request, ...] = ()
    closed: bool = False

    def __attrs_post_init__(self) -> None:
        if self.budget is not None:
            _check("budget", self.budget, 1)
        _check("queue", self.queue, 0)

    @property
    def used(self) -> int:
        """Bytes of all that run."""
        return sum([each.nbytes for each in self.running])

    def _fits(self, nbytes: int) -> bool:
        return self.budget is None or self.used + nbytes <= self.budget


Step = tuple[Pool, tuple[Hashable, ...]]


def request(pool: Pool, name: Hashable, nbytes: int) -> Step:
    """Ask for bytes: admitted at once if nobody waits and they fit, else at the end of the queue.

    Raises:
        BudgetError: more than the whole budget, which can never fit.
        AdmissionError: the queue is full, the pool closed, or the name in use.
    """
    _check("nbytes", nbytes, 0)
    if pool.closed:
        raise AdmissionError("the pool is closed")
    if any(each.name == name for each in (*pool.running, *pool.waiting)):
        raise AdmissionError(f"{name!r} has asked already")
    if pool.budget is not None and nbytes > pool.budget:
        raise BudgetError(
            f"{nbytes:,} bytes can never fit a budget of {pool.budget:,}: ask for fewer tokens, "
            "store keys and values in fewer bits, or raise the budget"
        )
    fits = not pool.waiting and pool._fits(nbytes)
    if not fits and len(pool.waiting) >= pool.queue:
        raise AdmissionError(f"{pool.queue} requests wait already: try again later")
    return _next(attrs.evolve(pool, waiting=(*pool.waiting, Request(name, nbytes))))


def release(pool: Pool, name: Hashable) -> Step:
    """Give back the bytes of one that runs; nothing happens for one that does not."""
    running = tuple([each for each in pool.running if each.name != name])
    return _next(attrs.evolve(pool, running=running))


def cancel(pool: Pool, name: Hashable) -> Step:
    """Take back a request, whether it waits or runs; nothing happens for an unknown one."""
    waiting = tuple([each for each in pool.waiting if each.name != name])
    return release(attrs.evolve(pool, waiting=waiting), name)


def close(pool: Pool) -> Step:
    """Admit nobody any more; the names are those that waited, and are turned away."""
    names = tuple([each.name for each in pool.waiting])
    return attrs.evolve(pool, waiting=(), closed=True), names


def _next(pool: Pool) -> Step:
    """Admit from the head of the queue what fits."""
    admitted = []
    while pool.waiting and pool._fits(pool.waiting[0].nbytes):
        first, *others = pool.waiting
        pool = attrs.evolve(pool, running=(*pool.running, first), waiting=tuple(others))
        admitted.append(first.name)
    return pool, tuple(admitted)


def _check(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise BudgetError(f"{name} must be bytes, an integer >= {least}, not {value!r}")
