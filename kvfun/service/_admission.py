"""The pool of admitted requests as threads and coroutines share it."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Any

from ..errors import AdmissionError
from ..scheme import KvScheme, Model, batch_row_kv_bytes
from ..scheme import admission as rules


class Lease:
    """Bytes that a request may use until it gives them back; a context manager."""

    def __init__(self, nbytes: int, give_back: Callable[[], None]):
        self.nbytes = nbytes
        self._give_back = give_back

    def release(self) -> None:
        """Give the bytes back; once or more often."""
        self._give_back()

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: Any) -> None:
        self.release()


class AdmissionPool:
    """Requests wait here, in order, until what they will take fits a budget.

    The box around one :class:`kvfun.scheme.admission.Pool`, which says who is next. ``submit``
    returns at once; wait for the future's result, or ``await asyncio.wrap_future(future)``.
    Cancelling the future leaves the queue; so does a lease that nobody is left to take.

    Args:
        budget: bytes for all requests that run, ``None`` for no limit.
        queue: the most requests that wait.

    >>> pool = AdmissionPool(1000)
    >>> with pool.submit(600).result() as lease:
    ...     waits = pool.submit(600)
    ...     waits.done()
    False
    >>> waits.result().nbytes
    600
    """

    def __init__(self, budget: int | None, queue: int = rules.QUEUE):
        self._pool = rules.Pool(budget, queue)
        self._lock = threading.RLock()
        self._names = itertools.count()
        self._futures: dict[Hashable, tuple[Future, Lease]] = {}

    @property
    def state(self) -> rules.Pool:
        """Who runs and who waits now."""
        return self._pool

    def submit(self, nbytes: int) -> Future[Lease]:
        """Ask for bytes: a future of the lease.

        Raises:
            BudgetError: more than can ever fit.
            AdmissionError: the queue is full, or the pool closed.
        """
        future: Future[Lease] = Future()
        with self._lock:
            name = next(self._names)
            lease = Lease(nbytes, lambda: self._step(rules.release, name))
            pool, admitted = rules.request(self._pool, name, nbytes)
            self._pool = pool
            self._futures[name] = future, lease
        future.add_done_callback(lambda done: self._cancelled(done, name))
        self._grant(admitted)
        return future

    def submit_row(
        self,
        model: Model,
        prompt: int,
        max_tokens: int,
        scheme: KvScheme | str | None = None,
    ) -> Future[Lease]:
        """Ask for what a row of a batch takes from its prompt to its last token.

        Raises:
            GeometryError: more tokens than the model was made for.
            BudgetError, AdmissionError: as :meth:`submit`.
        """
        return self.submit(batch_row_kv_bytes(model, prompt, max_tokens, scheme))

    def close(self) -> None:
        """Turn away those that wait; those that run keep their leases. Once or more often."""
        with self._lock:
            self._pool, turned_away = rules.close(self._pool)
            waiting = [self._futures.pop(name)[0] for name in turned_away]
        for future in waiting:
            if future.set_running_or_notify_cancel():
                future.set_exception(AdmissionError("the pool was closed"))

    def _step(self, change: Callable[..., rules.Step], name: Hashable) -> None:
        with self._lock:
            self._pool, admitted = change(self._pool, name)
        self._grant(admitted)

    def _grant(self, names: tuple[Hashable, ...]) -> None:
        """Hand out leases; a future that was cancelled meanwhile makes room for the next."""
        for name in names:
            with self._lock:
                future, lease = self._futures.pop(name)
            if future.set_running_or_notify_cancel():
                future.set_result(lease)
            else:
                lease.release()

    def _cancelled(self, future: Future, name: Hashable) -> None:
        if not future.cancelled():
            return
        with self._lock:
            waits = self._futures.pop(name, None) is not None
        if waits:
            self._step(rules.cancel, name)
