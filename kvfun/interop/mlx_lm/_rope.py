"""Which RoPE a model's keys went through: learnt by watching ``mx.fast.rope``."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

from ...codecs import Rope

_lock = threading.RLock()
_seen: list[tuple[mx.array, Rope]] | None = None
"""Arrays that RoPE returned while it is watched, and which one it was."""


@contextmanager
def watched_rope() -> Iterator[None]:
    """Within the context :func:`rope_of` knows what ``mx.fast.rope`` returned.

    Only meant for steps that are built and never computed: what is seen is held until the end.
    """
    global _seen
    with _lock:
        original, before = mx.fast.rope, _seen
        known: dict[tuple, tuple[Rope, mx.array | None]] = {}
        seen: list[tuple[mx.array, Rope]] = []

        def rope(x: mx.array, dims: int, *args: Any, **kwargs: Any) -> mx.array:
            turned = original(x, dims, *args, **kwargs)
            seen.append((turned, _shared(known, dims, *args, **kwargs)))
            return turned

        mx.fast.rope, _seen = rope, seen
        try:
            yield
        finally:
            mx.fast.rope, _seen = original, before


def rope_of(keys: mx.array) -> Rope | None:
    """The RoPE that returned these very keys, if it was watched."""
    return next((rope for turned, rope in reversed(_seen or []) if turned is keys), None)


def _shared(
    known: dict[tuple, tuple[Rope, mx.array | None]],
    dims: int,
    traditional: bool = False,
    base: float | None = None,
    scale: float = 1.0,
    offset: Any = 0,
    freqs: mx.array | None = None,
    **_: Any,
) -> Rope:
    """One record for all layers that rotate alike."""
    key = dims, traditional, base, scale, id(freqs)
    if key not in known:
        wavelengths = None if freqs is None else mx.abs(freqs)
        rope = Rope.of(dims, base or 10000.0, scale, traditional, wavelengths)
        known[key] = rope, freqs  # which is held, so that no other array has its id
    return known[key][0]
