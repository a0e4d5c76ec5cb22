"""The independent oracle: token lists, one rule of visibility, dense attention in float64.

Nothing here knows of buffers, columns, plans or kernels. A cache stands for a list of tokens a
row, and this module keeps that list, in NumPy.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import attrs
import mlx.core as mx
import numpy as np


def to_numpy(x: mx.array) -> np.ndarray:
    """The numbers of an array, floats as float32 (which holds bf16 and f16 exactly)."""
    return np.array(x.astype(mx.float32) if mx.issubdtype(x.dtype, mx.floating) else x)


def from_numpy(x: np.ndarray) -> mx.array:
    """An MLX array of the same numbers and dtype."""
    return mx.array(x)  # pyright: ignore[reportArgumentType] (the stubs know no ndarray)


@attrs.frozen
class Visibility:
    """Which positions a query sees: window, sinks and chunk as in :class:`kvfun.geometry.Policy`.

    >>> Visibility(window=2, sinks=1).visible(query=5)
    [0, 4, 5]
    """

    window: int | None = None
    sinks: int = 0
    chunk: int | None = None

    def sees(self, query: int, position: int) -> bool:
        """Whether the token at ``query`` attends to the one at ``position``."""
        if position > query:
            return False
        if position < self.sinks:
            return True
        near = self.window is None or query - position < self.window
        return near and (self.chunk is None or query // self.chunk == position // self.chunk)

    def visible(self, query: int) -> list[int]:
        """The positions that the token at ``query`` attends to, in order."""
        return list(_visible(self, query))


@lru_cache(maxsize=4096)
def _visible(rule: Visibility, query: int) -> tuple[int, ...]:
    return tuple(position for position in range(query + 1) if rule.sees(query, position))


@attrs.frozen(eq=False)
class Tokens:
    """The tokens of one row: decoded ``keys [heads, n, dim]`` and ``values``, padding to come."""

    keys: np.ndarray
    values: np.ndarray
    padding: int = 0

    @property
    def count(self) -> int:
        """How many tokens: the row's offset."""
        return self.keys.shape[1]

    def then(self, keys: np.ndarray, values: np.ndarray) -> Tokens:
        """With a block behind; the part of it that is padding is no token."""
        skipped = min(self.padding, keys.shape[1])
        return Tokens(
            np.concatenate([self.keys, keys[:, skipped:]], axis=1),
            np.concatenate([self.values, values[:, skipped:]], axis=1),
            self.padding - skipped,
        )

    def without(self, count: int) -> Tokens:
        """Without the last ``count``."""
        stop = self.count - count
        return attrs.evolve(self, keys=self.keys[:, :stop], values=self.values[:, :stop])


@attrs.frozen(eq=False)
class Reference:
    """What a cache stands for: the tokens of every row, and who sees whom.

    ``rows`` of ``None`` are those of a cache to which nothing was appended yet.
    """

    visibility: Visibility
    rows: tuple[Tokens | None, ...] = (None,)
    padding: tuple[int, ...] = ()

    @property
    def offsets(self) -> tuple[int, ...]:
        """Tokens a row, negative while padding is still to come."""
        pads = self.padding or (0,) * len(self.rows)
        return tuple(
            -pad if row is None else row.count - row.padding
            for row, pad in zip(self.rows, pads, strict=True)
        )

    @property
    def size(self) -> int:
        """Positions the last token sees, of the row that has most."""
        seen = [self.visibility.visible(offset - 1) for offset in self.offsets]
        return max(len(positions) for positions in seen)

    def append(self, keys: np.ndarray, values: np.ndarray) -> Reference:
        """With a block ``[batch, heads, tokens, dim]`` behind every row."""
        rows = self.rows if len(self.rows) == len(keys) else self.rows * len(keys)
        pads = self.padding or (0,) * len(rows)
        after = []
        for row, pad, k, v in zip(rows, pads, keys, values, strict=True):
            row = Tokens(k[:, :0], v[:, :0], pad) if row is None else row
            after.append(row.then(k, v))
        return Reference(self.visibility, tuple(after))

    def rollback(self, counts: Sequence[int]) -> Reference:
        """Without the last ``counts[i]`` tokens of row ``i``."""
        rows = [
            row if row is None else row.without(n) for row, n in zip(self.rows, counts, strict=True)
        ]
        return attrs.evolve(self, rows=tuple(rows))

    def take(self, rows: Sequence[int]) -> Reference:
        """The given rows in that order."""
        padding = tuple(self.padding[i] for i in rows) if self.padding else ()
        return attrs.evolve(self, rows=tuple(self.rows[i] for i in rows), padding=padding)

    def concat(self, *others: Reference) -> Reference:
        """The rows of all; a row without tokens yet has the others' shape from now on."""
        parts = (self, *others)
        rows = [row for part in parts for row in part.rows]
        pads = [pad for part in parts for pad in part.padding or (0,) * len(part.rows)]
        known = next((row for row in rows if row is not None), None)
        if known is None:
            return Reference(self.visibility, tuple(rows), tuple(pads) if any(pads) else ())
        filled = [
            Tokens(known.keys[:, :0], known.values[:, :0], pad) if row is None else row
            for row, pad in zip(rows, pads, strict=True)
        ]
        return Reference(self.visibility, tuple(filled))

    def seen(self, row: int, query: int) -> tuple[np.ndarray, np.ndarray]:
        """The keys and values that the token at position ``query`` of a row attends to."""
        tokens, positions = self.rows[row], self.visibility.visible(query)
        assert tokens is not None
        return tokens.keys[:, positions], tokens.values[:, positions]


def dense_attention(
    queries: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    *,
    scale: float,
    sinks: np.ndarray | None = None,
    mask: np.ndarray | None = None,
) -> tuple[np.ndarray, float]:
    """Attention of one row, all of it in float64, by the formula.

    Args:
        queries: ``[heads, L, head_dim]``.
        keys: ``[kv_heads, N, head_dim]``; query head ``h`` reads KV head
            ``h // (heads / kv_heads)``.
        values: ``[kv_heads, N, value_dim]``.
        scale: of the scores.
        sinks: logits ``[heads]`` of a key without a value.
        mask: bool (true: attend) or additive, broadcastable to ``[heads, L, N]``.

    Returns:
        ``[heads, L, value_dim]``, and the largest sum of absolute products that makes a score, for
        :func:`attention_bound`.
    """
    group = queries.shape[0] // keys.shape[0]
    k, v = (np.repeat(x.astype(np.float64), group, axis=0) for x in (keys, values))
    scores = queries.astype(np.float64) @ k.swapaxes(1, 2) * scale
    if mask is not None and mask.dtype == bool:
        scores = np.where(mask, scores, -np.inf)
    elif mask is not None:
        scores = scores + mask.astype(np.float64)
    top = scores.max(axis=-1, keepdims=True)
    logits = None if sinks is None else sinks.astype(np.float64)[:, None, None]
    if logits is not None:
        top = np.maximum(top, logits)
    weights = np.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True)
    if logits is not None:
        total = total + np.exp(logits - top)
    return weights @ v / total, float((np.abs(queries) @ np.abs(k).swapaxes(1, 2)).max() * scale)


BOUNDS = {mx.float32: 3e-5, mx.bfloat16: 2.0**-8, mx.float16: 2.0**-11}
"""Error allowed for attention, by dtype, relative to the largest value: for float32 the error of
sums, for 16 bits two roundings to nearest (the worst of several is never met)."""


def attention_bound(dtype: mx.Dtype, score: float, value: float) -> float:
    """The absolute error allowed for attention computed in ``dtype``.

    Args:
        dtype: the coarsest dtype that a kernel may round to.
        score: the largest sum of absolute products that makes a score. Products rounded by ``e``
            relatively move a score by ``score * e`` at most, and its weight by as much relatively.
        value: the largest absolute value.
    """
    return BOUNDS[dtype] * (1 + score) * max(value, 1e-3)
