"""What a recurrence is."""

from __future__ import annotations

from typing import Any, Protocol

import mlx.core as mx

States = dict[str, mx.array]
"""The arrays that stand for all tokens so far, by name; ``[batch, ...]`` each."""

Inputs = dict[str, mx.array]
"""What a block of tokens gives, by name; ``[batch, tokens, ...]`` each."""

Spans = tuple[tuple[int, int], ...] | None
"""For each row the columns ``[start, stop)`` of a block that are its own tokens; ``None``: all."""


class Recurrence(Protocol):
    """A layer's rule for taking tokens in; see :mod:`kvfun.recurrences`."""

    def start(self, inputs: Inputs) -> States:
        """The states before the first token, for the batch and dtypes of ``inputs``."""
        ...

    def run(self, states: States, inputs: Inputs, spans: Spans = None) -> tuple[Any, States]:
        """What comes out of a block of tokens, and the states behind it."""
        ...
