"""Whether a model and its caches fit, how long a text may be, and how fast it decodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs

from ..errors import BudgetError
from ._bytes import CHUNK, kv_allocated_bytes_at, sdpa_fallback_bytes
from ._model import Model
from ._scheme import KvScheme

USABLE = 0.75
"""The share of a machine's memory that is planned with."""

ACTIVATIONS = 550_000
"""Bytes of activations for each token of a prompt that is read at once."""

EFFICIENCY = 0.82
"""The share of the memory's bandwidth that decoding reaches."""

EFFICIENCY_OF_EXPERTS = 0.76
"""The same of a mixture of experts."""

LONGEST = 1 << 20
"""The longest text that is asked about where a model does not say."""


@attrs.frozen
class Weights:
    """What a model's weights take.

    Args:
        total: bytes of all.
        skipped: bytes of those that a token does not read: experts that it is not routed to.
    """

    total: int
    skipped: int = 0

    @property
    def read(self) -> int:
        """Bytes that each token reads."""
        return self.total - self.skipped


@attrs.frozen
class MemoryPlan:
    """Where a machine's memory goes, in bytes.

    Args:
        context: tokens of each row.
        weights: of the model.
        kv: the most that caches hold on the way there.
        transient: activations and scores of a chunk of a prompt.
        reserve: what is kept free.
        usable: what there is.
        largest: the most tokens that fit; one more does not, unless it is ``limit``.
        limit: the longest text that was asked about: the model's positions.
        tokens_per_second: of decoding at that context, ``None`` where the bandwidth is not known.
    """

    context: int
    weights: int
    kv: int
    transient: int
    reserve: int
    usable: int
    largest: int
    limit: int
    tokens_per_second: float | None

    @property
    def total(self) -> int:
        """All that is needed."""
        return self.weights + self.kv + self.transient + self.reserve

    @property
    def fits(self) -> bool:
        """Whether that is there."""
        return self.total <= self.usable


def memory_plan(
    model: Model,
    weights: Weights | int,
    usable: int,
    context: int | None = None,
    scheme: KvScheme | str | None = None,
    *,
    rows: int = 1,
    chunk: int = CHUNK,
    reserve: int = 0,
    bandwidth: float | None = None,
) -> MemoryPlan:
    """What a context takes, and the longest that fits.

    Args:
        model: what its layers keep.
        weights: bytes.
        usable: bytes; of a machine :data:`USABLE` of its memory.
        context: tokens of each row; by default as many as fit, and the model was made for.
        scheme: what caches store, bf16 by default.
        rows: that are decoded together.
        chunk: tokens of a prompt that are read at once.
        reserve: bytes that are kept free.
        bandwidth: of the memory, bytes a second.

    Raises:
        BudgetError: weights, usable or reserve are no bytes.
    """
    weights = weights if isinstance(weights, Weights) else Weights(weights)
    for name, value in (("weights", weights.total), ("usable", usable), ("reserve", reserve)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise BudgetError(f"{name} must be bytes, an integer >= 0, not {value!r}")
    limit = model.max_positions or LONGEST

    def kv(tokens: int) -> int:
        return kv_allocated_bytes_at(model, tokens, scheme, batch=rows, chunk=chunk, peak=True)

    def transient(tokens: int) -> int:
        return min(chunk, tokens) * ACTIVATIONS + sdpa_fallback_bytes(model, chunk, tokens)

    def fits(tokens: int) -> bool:
        return weights.total + kv(tokens) + transient(tokens) + reserve <= usable

    largest = _largest(fits, limit)
    context = max(0, largest) if context is None else context
    return MemoryPlan(
        context=context,
        weights=weights.total,
        kv=kv(context),
        transient=transient(context),
        reserve=reserve,
        usable=usable,
        largest=largest,
        limit=limit,
        tokens_per_second=decode_speed(model, weights, context, bandwidth, scheme, rows=rows),
    )


def decode_speed(
    model: Model,
    weights: Weights,
    context: int,
    bandwidth: float | None,
    scheme: KvScheme | str | None = None,
    *,
    rows: int = 1,
) -> float | None:
    """Tokens a second of each row, if all that happens is reading weights and caches."""
    if bandwidth is None:
        return None
    held = kv_allocated_bytes_at(model, context, scheme, batch=rows)
    efficiency = EFFICIENCY_OF_EXPERTS if weights.skipped else EFFICIENCY
    return bandwidth * efficiency / max(1, weights.read + held)


def prefill_chunk(model: Model, context: int, most: int = CHUNK, scores: int = 1 << 30) -> int:
    """Tokens of a prompt to read at once.

    Halved, down to 8, while a recurrent model's largest layer would keep more bytes of scores.
    """
    chunk = most
    if any(layer.state is not None for layer in model.layers):
        while chunk > 8 and sdpa_fallback_bytes(model, chunk, context) > scores:
            chunk //= 2
    return chunk


def _largest(fits: Callable[[int], bool], limit: int) -> int:
    """The largest number up to a limit that fits, -1 if none does: what fits grows no more."""
    low, high = -1, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def bytes_of(text: str) -> int:
    """Bytes as people write them: ``"16GB"`` (10^9), ``"16GiB"`` (2^30), ``"800MB"``, ``"512"``.

    Raises:
        BudgetError: something else.

    >>> bytes_of("16GB"), bytes_of("1.5 GiB")
    (16000000000, 1610612736)
    """
    given: Any = text
    stripped = given.strip() if isinstance(given, str) else ""
    number = stripped.rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ ")
    unit = stripped[len(number) :].strip().upper()
    try:
        value = float(number) * _UNITS[unit]
    except (ValueError, KeyError):
        value = -1.0
    if not 0 <= value < 2**63:
        raise BudgetError(f"bytes are written like 16GB, 16GiB or 800MB, not {text!r}")
    return int(value)


_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{u}B": 1000 ** (i + 1) for i, u in enumerate("KMGT")}
_UNITS |= {f"{u}IB": 1024 ** (i + 1) for i, u in enumerate("KMGT")}
_UNITS |= {u: 1000 ** (i + 1) for i, u in enumerate("KMGT")}
