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


@attrs.frozen
class Schedule:
    """When a token is encoded: at once, or when ``residual`` tokens and a block are behind it.

    Args:
        residual: the last so many tokens at least are still raw; 0 encodes at once.
        block: tokens that are encoded together.
        first: positions before it stay raw for ever.

    >>> rule = Schedule(residual=2, block=3)
    >>> [rule.encoded(0, offset) for offset in (4, 5, 7, 8)]
    [0, 3, 3, 6]
    """

    residual: int = 0
    block: int = 64
    first: int = 0

    @property
    def ages(self) -> bool:
        """Whether some tokens are raw, for a while or for ever."""
        return self.residual > 0 or self.first > 0

    def parts(self, spec: str | None) -> tuple[str | None, ...]:
        """The codecs of the parts of a row: the first tokens, the encoded ones, the newest."""
        first: tuple[str | None, ...] = ("plain",) if self.first else ()
        return (*first, spec, "plain") if self.residual else (*first, spec)

    def encoded(self, before: int, offset: int) -> int:
        """The position before which tokens are encoded, for a row that came to ``offset``."""
        if not self.residual:
            return max(offset, self.first)
        while offset - before >= self.residual + self.block:
            before += self.block
        return before

    def rolled_back(self, before: int, offset: int) -> int:
        """The same for a row that was rolled back to ``offset``: no token is made raw again."""
        return max(self.first, min(before, offset))


@attrs.frozen(eq=False)
class Tokens:
    """The tokens of one row, both as the codec makes them and raw.

    Args:
        keys, values: ``[heads, n, dim]``, decoded.
        raw_keys, raw_values: the same as they came.
        padding: left padding still to come.
        encoded: tokens before this position are encoded, but for those that stay raw for ever.
        codecs: for each token the spec that ``keys`` and ``values`` were encoded by.
        tail: the position where the live tail starts, behind the sealed segments.
    """

    keys: np.ndarray
    values: np.ndarray
    raw_keys: np.ndarray
    raw_values: np.ndarray
    padding: int = 0
    encoded: int = 0
    codecs: tuple[str | None, ...] = ()
    tail: int = 0

    @classmethod
    def none(cls, keys: np.ndarray, values: np.ndarray, padding: int, encoded: int) -> Tokens:
        """No tokens yet, of the shape of these."""
        keys, values = keys[:, :0], values[:, :0]
        return cls(keys, values, keys, values, padding, encoded)

    @property
    def count(self) -> int:
        """How many tokens: the row's offset."""
        return self.keys.shape[1]

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """``keys``, ``values``, ``raw_keys`` and ``raw_values``."""
        return self.keys, self.values, self.raw_keys, self.raw_values

    def then(self, block: Sequence[np.ndarray], spec: str | None, rule: Schedule) -> Tokens:
        """With a block behind, in the order of ``arrays``; what of it is padding is no token."""
        tokens = block[0].shape[1]
        skipped = min(self.padding, tokens)
        longer = [
            np.concatenate([old, new[:, skipped:]], axis=1)
            for old, new in zip(self.arrays, block, strict=True)
        ]
        return Tokens(
            *longer,
            padding=self.padding - skipped,
            encoded=rule.encoded(self.encoded, longer[0].shape[1]),
            codecs=self.codecs + (spec,) * (tokens - skipped),
            tail=self.tail,
        )

    def without(self, count: int, rule: Schedule) -> Tokens:
        """Without the last ``count``."""
        stop = self.count - count
        return Tokens(
            *[x[:, :stop] for x in self.arrays],
            padding=self.padding,
            encoded=rule.rolled_back(self.encoded, stop),
            codecs=self.codecs[:stop],
            tail=min(self.tail, stop),
        )

    def is_encoded(self, rule: Schedule) -> np.ndarray:
        """For each token whether it is shown as the codec makes it."""
        position = np.arange(self.count)
        return (rule.first <= position) & (position < self.encoded)

    def shown(self, rule: Schedule) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values of all tokens as they are shown."""
        encoded = self.is_encoded(rule)[None, :, None]
        if encoded.all():
            return self.keys, self.values
        return (
            np.where(encoded, self.keys, self.raw_keys),
            np.where(encoded, self.values, self.raw_values),
        )

    def recoded(self, keys: np.ndarray, values: np.ndarray, kept: np.ndarray, spec: str) -> Tokens:
        """Encoded by another codec; ``kept [2, n]`` tells whose keys and values are not touched."""
        old = zip((self.keys, self.values), (keys, values), kept, strict=True)
        keys, values = [np.where(keep[None, :, None], a, b) for a, b, keep in old]
        return attrs.evolve(self, keys=keys, values=values, codecs=(spec,) * self.count)

    def frozen(self, rule: Schedule) -> Tokens:
        """All tokens in a sealed segment, shown as they are now for ever."""
        keys, values = self.shown(rule)
        codecs = [
            codec if encoded else "plain"
            for codec, encoded in zip(self.codecs, self.is_encoded(rule), strict=True)
        ]
        return Tokens(
            *(keys, values, self.raw_keys, self.raw_values),
            padding=self.padding,
            encoded=self.count,
            codecs=tuple(codecs),
            tail=self.count,
        )


@attrs.frozen(eq=False)
class Reference:
    """What a cache stands for: the tokens of every row, who sees whom, and when they are encoded.

    ``rows`` of ``None`` are those of a cache to which nothing was appended yet.
    """

    visibility: Visibility
    rows: tuple[Tokens | None, ...] = (None,)
    padding: tuple[int, ...] = ()
    schedule: Schedule = Schedule()

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

    @property
    def encoded(self) -> tuple[int, ...]:
        """For each row the position before which its tokens are encoded."""
        return tuple(self.schedule.first if row is None else row.encoded for row in self.rows)

    def _none(self, keys: np.ndarray, values: np.ndarray, padding: int) -> Tokens:
        return Tokens.none(keys, values, padding, self.schedule.first)

    def append(
        self,
        keys: np.ndarray,
        values: np.ndarray,
        raw_keys: np.ndarray | None = None,
        raw_values: np.ndarray | None = None,
        spec: str | None = None,
    ) -> Reference:
        """With a block ``[batch, heads, tokens, dim]`` behind every row.

        Args:
            keys: what the codec makes of the block.
            values: the same of the values.
            raw_keys: the block as it came, which a row that does not age never shows.
            raw_values: the same of the values.
            spec: the codec.
        """
        raw_keys = keys if raw_keys is None else raw_keys
        raw_values = values if raw_values is None else raw_values
        rows = self.rows if len(self.rows) == len(keys) else self.rows * len(keys)
        pads = self.padding or (0,) * len(rows)
        blocks = zip(keys, values, raw_keys, raw_values, strict=True)
        after = []
        for row, pad, block in zip(rows, pads, blocks, strict=True):
            row = self._none(*block[:2], pad) if row is None else row
            after.append(row.then(block, spec, self.schedule))
        return attrs.evolve(self, rows=tuple(after), padding=())

    def rollback(self, counts: Sequence[int]) -> Reference:
        """Without the last ``counts[i]`` tokens of row ``i``."""
        rows = [
            row if row is None else row.without(n, self.schedule)
            for row, n in zip(self.rows, counts, strict=True)
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
            padding = tuple(pads) if any(pads) else ()
            return attrs.evolve(self, rows=tuple(rows), padding=padding)
        filled = [
            self._none(known.keys, known.values, pad) if row is None else row
            for row, pad in zip(rows, pads, strict=True)
        ]
        return attrs.evolve(self, rows=tuple(filled), padding=())

    def seal(self) -> Reference:
        """All tokens stay for ever as they are shown now; later ones are encoded at once."""
        rows = [row if row is None else row.frozen(self.schedule) for row in self.rows]
        return attrs.evolve(self, rows=tuple(rows), schedule=Schedule())

    def shown(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """The keys and values of all tokens of a row, as they are shown."""
        tokens = self.rows[row]
        assert tokens is not None
        return tokens.shown(self.schedule)

    def seen(self, row: int, query: int) -> tuple[np.ndarray, np.ndarray]:
        """The keys and values that the token at position ``query`` of a row attends to."""
        (keys, values), positions = self.shown(row), self.visibility.visible(query)
        return keys[:, positions], values[:, positions]


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
