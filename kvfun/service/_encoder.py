"""Encoder outputs as threads share them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

from .. import tree
from ..caches import snapshot
from ..reuse import EncoderOutputs


class EncoderCache:
    """What an encoder made before, for many requests at once.

    The box around one :class:`kvfun.reuse.EncoderOutputs`. An output that is leased stays whole
    although the store lets it go; its bytes count as leased until then. Of several requests for
    what is not there yet one computes it, and the others wait.

    Args:
        capacity: bytes of what is stored.

    >>> outputs = EncoderCache(1 << 20)
    >>> with outputs.lease("key", lambda: mx.ones(4)) as features:
    ...     features.shape, outputs.nbytes, outputs.leased_nbytes
    ((4,), 16, 16)
    >>> outputs.leased_nbytes
    0
    """

    def __init__(self, capacity: int):
        self._store = EncoderOutputs({}, capacity)
        self._lock = threading.Lock()
        self._pending: dict[str, threading.Lock] = {}
        self._waiting: dict[str, int] = {}
        self._leases: dict[int, tuple[Any, int]] = {}
        """By identity: an output, and how many leases it has."""

    @property
    def state(self) -> EncoderOutputs:
        """The store as it is now."""
        return self._store

    @property
    def nbytes(self) -> int:
        """Bytes of what is stored."""
        return self._store.nbytes

    @property
    def leased_nbytes(self) -> int:
        """Bytes of what is leased, stored or not."""
        with self._lock:
            return sum(tree.nbytes(output) for output, _ in self._leases.values())

    def take(self, key: str) -> Any | None:
        """An output, if it is there."""
        with self._lock:
            found, self._store = self._store.take(key)
        return found

    def put(self, key: str, output: Any) -> None:
        """Store an output, computed.

        Raises:
            BudgetError, CorruptError: as :meth:`kvfun.reuse.EncoderOutputs.put`; nothing is stored.
        """
        own = snapshot(output)
        mx.eval(tree.leaves(own))  # arrays that are handed to other threads are computed
        with self._lock:
            self._store = self._store.put_own(key, own)

    @contextmanager
    def lease(self, key: str, compute: Callable[[], Any]) -> Iterator[Any]:
        """An output for as long as the context lasts, computed where it is not there.

        Args:
            key: see :func:`kvfun.reuse.content_key`.
            compute: the encoder, called once however many ask at a time. What is too large to be
                stored is handed out nevertheless. If it raises, the next to ask tries again.
        """
        output = self._found(key, compute)
        with self._lock:
            _, count = self._leases.get(id(output), (output, 0))
            self._leases[id(output)] = output, count + 1
        try:
            yield output
        finally:
            with self._lock:
                _, count = self._leases.pop(id(output))
                if count > 1:
                    self._leases[id(output)] = output, count - 1

    def _found(self, key: str, compute: Callable[[], Any]) -> Any:
        found = self.take(key)
        if found is not None:
            return found
        with self._lock:
            turn = self._pending.setdefault(key, threading.Lock())
            self._waiting[key] = self._waiting.get(key, 0) + 1
        try:
            with turn:
                found = self.take(key)
                if found is None:
                    output = compute()
                    mx.eval(tree.leaves(output))
                    if tree.nbytes(output) > self._store.capacity:
                        return output
                    self.put(key, output)
                    found = self.take(key)
                    found = output if found is None else found
            return found
        finally:
            with self._lock:
                self._waiting[key] -= 1
                if not self._waiting[key]:
                    del self._waiting[key], self._pending[key]
