"""A chain that is slow and obviously right: the laws are tried on it, whole and broken.

It keeps the raw numbers of every token for ever, and beside each the *path* of codecs it went
through: none for a raw token, ``("kv4",)`` for an encoded one, ``("kv4", "kv8")`` after a
conversion. Everything else is worked out anew whenever it is asked for. Nothing is ever dropped.
"""

from __future__ import annotations

from typing import Any

import attrs
import mlx.core as mx

from kvfun import Codec, caches, record, replace, static
from kvfun.codecs import Plain
from kvfun.errors import (
    CodecError,
    DTypeError,
    GeometryError,
    PhaseError,
    RollbackError,
    ShapeError,
)
from kvfun.testing import Recipe

Path = tuple[str, ...]
Shown = tuple[Path, Path]
"""The codecs that the keys, and the values, of a token went through."""


@attrs.frozen
class Rule:
    """Who sees whom, and what is encoded when."""

    window: int | None = None
    sinks: int = 0
    chunk: int | None = None
    residual: int = 0
    block: int = 64
    raw_sinks: int = 0

    @property
    def ages(self) -> bool:
        return self.residual > 0 or self.raw_sinks > 0

    @property
    def start(self) -> int:
        return max(self.sinks, self.raw_sinks) if self.ages else 0

    def sees(self, query: int, position: int) -> bool:
        if not 0 <= position <= query:
            return False
        if position < self.sinks:
            return True
        if self.window is not None and position <= query - self.window:
            return False
        return self.chunk is None or position // self.chunk == query // self.chunk


@record
class NaiveChain:
    """Raw keys and values a row, and how each token is shown.

    Args:
        keys, values: for each row ``[1, kv_heads, n, dim]``, raw.
        shown: for each row and token its path.
        encoded: for each row the position before which everything is encoded.
        padding: for each row the left padding to come.
        rule: who sees whom.
        spec: the codec of what is encoded next.
        segments: the codecs of the sealed segments; with any, tokens are encoded at once.
    """

    rule: Rule = static()
    spec: str = static()
    keys: tuple[mx.array, ...] = ()
    values: tuple[mx.array, ...] = ()
    shown: tuple[tuple[Shown, ...], ...] = static(default=((),))
    encoded: tuple[int, ...] = static(default=(0,))
    padding: tuple[int, ...] = static(default=(0,))
    segments: tuple[str, ...] = static(default=())

    @property
    def ages(self) -> bool:
        return self.rule.ages and not self.segments

    @property
    def start(self) -> int:
        return self.rule.start if self.ages else 0

    @property
    def floor(self) -> int:
        return self.rule.sinks if self.segments else 0


def naive(spec: str, *, left_padding: tuple[int, ...] = (), **rule: Any) -> NaiveChain:
    """An empty chain; the arguments are those of :func:`kvfun.empty`."""
    numbers, pads = Rule(**rule), left_padding or (0,)
    return NaiveChain(
        numbers,
        spec,
        shown=((),) * len(pads),
        encoded=(numbers.start,) * len(pads),
        padding=tuple(pads),
    )


@attrs.frozen
class NaiveRecipe(Recipe):
    """A recipe of which the naive chain is built, or what ``wrap`` makes of it.

    Args:
        wrap: makes another record of the naive chain.
        sealing: seals that other record.
    """

    wrap: Any = None
    sealing: Any = None

    def __call__(self) -> Any:
        numbers = (self.window, self.sinks, self.chunk, self.residual, self.block, self.raw_sinks)
        names = ("window", "sinks", "chunk", "residual", "block", "raw_sinks")
        cache = naive(
            self.spec or "plain",
            left_padding=self.padding,
            **dict(zip(names, numbers, strict=True)),
        )
        return cache if self.wrap is None else self.wrap(cache)

    def seal(self, cache: Any, spec: str | None) -> Any:
        return seal(cache, spec) if self.sealing is None else self.sealing(cache, spec)

    @staticmethod
    def like(recipe: Recipe, **others: Any) -> NaiveRecipe:
        """The same numbers, another record; nothing is dropped, so any reserve is kept."""
        values = {a.name: getattr(recipe, a.name) for a in attrs.fields(Recipe)}
        return NaiveRecipe(**values, **others)


# -- numbers --------------------------------------------------------------------------------------


def through(x: mx.array, path: Path, side: str) -> mx.array:
    """Raw vectors after the codecs of a path: in the raw dtype, or in that the last stores."""
    dim, raw = x.shape[-1], x.dtype
    for spec in path:
        codec = getattr(Codec.of(spec), side)
        x = codec.decode(codec.encode(x.astype(raw)))[..., :dim]
        x = x if isinstance(codec, Plain) else x.astype(raw)
    return x


def look(row: mx.array, paths: list[Path], side: str, dtype: mx.Dtype) -> mx.array:
    """The tokens of a row as they are shown."""
    out = mx.zeros(row.shape, dtype)
    for path in dict.fromkeys(paths):
        here = mx.array([p == path for p in paths])[None, None, :, None]
        out = mx.where(here, through(row, path, side).astype(dtype), out)
    return out


def dtypes(cache: NaiveChain) -> list[mx.Dtype]:
    """What ``fetch`` shows keys and values in: the promoted dtype of all that may be there."""
    paths = [() for _ in range(cache.ages)]
    paths += [(spec,) for spec in (*cache.segments, cache.spec)]
    paths += [shown[0] for row in cache.shown for shown in row] if cache.segments else []
    found = []
    for side, rows in (("keys", cache.keys), ("values", cache.values)):
        zero = mx.zeros((1, 1, 1, 128), rows[0].dtype)
        total = through(zero, paths[0], side)
        for path in paths[1:]:
            total = total + through(zero, path, side)
        found.append(total.dtype)
    return found


# -- append ---------------------------------------------------------------------------------------


def check_block(cache: NaiveChain, keys: mx.array, values: mx.array) -> None:
    if any(x.ndim != 4 for x in (keys, values)) or keys.shape[:3] != values.shape[:3]:
        raise ShapeError(f"{keys.shape} and {values.shape}")
    if not all(mx.issubdtype(x.dtype, mx.floating) for x in (keys, values)):
        raise DTypeError(f"{keys.dtype} and {values.dtype}")
    rows = len(cache.shown)
    if keys.shape[0] != rows and (cache.keys or rows > 1):
        raise ShapeError(f"{keys.shape[0]} rows for a batch of {rows}")
    codec = Codec.of(cache.spec)
    codec.keys.check(keys.shape[3])
    codec.values.check(values.shape[3])
    for mine, theirs in ((cache.keys, keys), (cache.values, values)):
        if mine and (mine[0].shape[1], mine[0].shape[3]) != (theirs.shape[1], theirs.shape[3]):
            raise ShapeError(f"{theirs.shape} for {mine[0].shape}")
        if mine and mine[0].dtype != theirs.dtype:
            raise DTypeError(f"{theirs.dtype} for {mine[0].dtype}")


def spread(cache: NaiveChain, batch: int) -> NaiveChain:
    """The cache with so many rows."""
    if len(cache.shown) == batch:
        return cache
    return replace(
        cache,
        shown=cache.shown * batch,
        encoded=cache.encoded * batch,
        padding=cache.padding * batch,
    )


@caches.append.register(NaiveChain)
def append(cache: NaiveChain, keys: mx.array, values: mx.array) -> NaiveChain:
    check_block(cache, keys, values)
    cache = spread(cache, keys.shape[0])
    tokens = keys.shape[2]
    skip = [min(tokens, pad) for pad in cache.padding]

    def longer(old: tuple[mx.array, ...], new: mx.array) -> tuple[mx.array, ...]:
        rows = [new[i : i + 1, :, n:] for i, n in enumerate(skip)]
        if not old:
            return tuple(rows)
        return tuple(mx.concatenate([a, b], axis=2) for a, b in zip(old, rows, strict=True))

    shown = [row + (((), ()),) * (tokens - n) for row, n in zip(cache.shown, skip, strict=True)]
    return aged(
        replace(
            cache,
            keys=longer(cache.keys, keys),
            values=longer(cache.values, values),
            shown=tuple(shown),
            padding=tuple(pad - n for pad, n in zip(cache.padding, skip, strict=True)),
        )
    )


def grown(cache: NaiveChain, encoded: int, offset: int) -> int:
    """The position before which a row is encoded once it has come to ``offset``."""
    rule = cache.rule
    if not cache.ages or not rule.residual:
        return max(offset, cache.start)
    while offset - encoded >= rule.residual + rule.block:
        encoded += rule.block
    return encoded


def aged(cache: NaiveChain) -> NaiveChain:
    """Encode what has become old enough."""
    counts = [len(row) for row in cache.shown]
    ends = [grown(cache, e, o) for e, o in zip(cache.encoded, counts, strict=True)]
    return sealed_between(cache, [max(cache.start, e) for e in cache.encoded], ends)


def sealed_between(cache: NaiveChain, starts: list[int], stops: list[int]) -> NaiveChain:
    """Encode positions ``[start, stop)`` of each row."""
    once: Shown = ((cache.spec,), (cache.spec,))
    shown = [
        tuple(once if a <= p < b else path for p, path in enumerate(row))
        for row, a, b in zip(cache.shown, starts, stops, strict=True)
    ]
    return replace(cache, shown=tuple(shown), encoded=tuple(stops))


# -- reads ----------------------------------------------------------------------------------------


def positions(cache: NaiveChain, queries: int) -> list[list[int]]:
    """For each row the positions that any of its last ``queries`` tokens sees."""
    found = []
    for row in cache.shown:
        last = range(max(0, len(row) - queries), len(row))
        seen = {p for q in last for p in range(q + 1) if cache.rule.sees(q, p)}
        found.append(sorted(seen))
    return found


def check_queries(cache: NaiveChain, queries: int) -> None:
    if not cache.keys:
        raise ShapeError("empty")
    most = max(len(row) for row in cache.shown)
    if not isinstance(queries, int) or queries < 1:
        raise ShapeError(f"{queries} queries")
    if most < queries and not any(cache.padding):
        raise ShapeError(f"{queries} queries of {most}")


@caches.fetch.register(NaiveChain)
def fetch(cache: NaiveChain, *, queries: int = 1) -> tuple[mx.array, mx.array]:
    if not cache.keys:
        raise ShapeError("empty")
    chosen = positions(cache, queries)
    width = max(map(len, chosen))
    sides = []
    for side, (name, rows) in enumerate((("keys", cache.keys), ("values", cache.values))):
        parts, dtype = [], dtypes(cache)[side]
        for row, shown, here in zip(rows, cache.shown, chosen, strict=True):
            paths = [path[side] for path in shown]
            told = look(row, paths, name, dtype)[:, :, mx.array(here, mx.int32)]
            parts.append(mx.pad(told, [(0, 0), (0, 0), (width - len(here), 0), (0, 0)]))
        sides.append(mx.concatenate(parts, axis=0))
    return sides[0], sides[1]


@caches.mask.register(NaiveChain)
def mask(cache: NaiveChain, queries: int = 1) -> mx.array:
    check_queries(cache, queries)
    chosen = positions(cache, queries)
    width = max(map(len, chosen))
    rows = []
    for row, here in zip(cache.shown, chosen, strict=True):
        asked = range(len(row) - queries, len(row))
        hidden = [False] * (width - len(here))
        rows.append([[hidden + [cache.rule.sees(q, p) for p in here] for q in asked]])
    return mx.array(rows).reshape(len(rows), 1, queries, width)


@caches.attend.register(NaiveChain)
def attend(
    cache: NaiveChain,
    queries: mx.array,
    *,
    scale=None,
    phase="decode",
    kernels=None,
    sinks=None,
    mask=None,
) -> mx.array:
    batch, heads, length, dim = queries.shape
    if not cache.keys or dim != cache.keys[0].shape[3] or batch != len(cache.shown):
        raise ShapeError(f"queries {queries.shape}")
    if phase not in ("decode", "window") or (phase == "decode" and length != 1):
        raise PhaseError(f"{length} queries in {phase}")
    check_queries(cache, length)
    group = heads // cache.keys[0].shape[1]
    keys, values = (
        mx.repeat(x.astype(mx.float32), group, axis=1) for x in fetch(cache, queries=length)
    )
    seen = caches.mask(cache, length) if mask is None else mask
    scale = dim**-0.5 if scale is None else scale
    scores = queries.astype(mx.float32) @ keys.swapaxes(2, 3) * scale
    if seen.dtype == mx.bool_:
        scores = mx.where(seen, scores, mx.finfo(mx.float32).min)
    else:
        scores = scores + seen.astype(mx.float32)
    if sinks is not None:
        logits = mx.broadcast_to(
            sinks.astype(mx.float32)[None, :, None, None], (*scores.shape[:3], 1)
        )
        scores = mx.concatenate([scores, logits], axis=-1)
    weights = mx.softmax(scores, axis=-1, precise=True)[..., : keys.shape[2]]
    return (weights @ values).astype(queries.dtype)


# -- rollback, conversion, seal -------------------------------------------------------------------


@caches.max_rollback.register(NaiveChain)
def max_rollback(cache: NaiveChain) -> tuple[int, ...]:
    return tuple(max(0, len(row) - cache.floor) for row in cache.shown)


def counts_of(cache: NaiveChain, tokens: Any) -> list[int]:
    """So many tokens a row."""
    counts = [tokens] * len(cache.shown) if isinstance(tokens, int) else list(tokens)
    for count, most in zip(counts, max_rollback(cache), strict=True):
        if not 0 <= count <= most:
            raise RollbackError(f"{count} of {most}")
    return counts


@caches.rollback.register(NaiveChain)
def rollback(cache: NaiveChain, tokens: Any) -> NaiveChain:
    stops = [len(r) - n for r, n in zip(cache.shown, counts_of(cache, tokens), strict=True)]
    return replace(
        cache,
        keys=tuple(x[:, :, :n] for x, n in zip(cache.keys, stops, strict=False)),
        values=tuple(x[:, :, :n] for x, n in zip(cache.values, stops, strict=False)),
        shown=tuple(row[:n] for row, n in zip(cache.shown, stops, strict=True)),
        encoded=tuple(
            max(cache.start, min(e, n)) for e, n in zip(cache.encoded, stops, strict=True)
        ),
    )


def converted(path: Path, spec: str, side: str) -> Path:
    """A path with a codec behind; none where the codec stays."""
    new = getattr(Codec.of(spec), side).spec
    return path if path and getattr(Codec.of(path[-1]), side).spec == new else (*path, spec)


def is_encoded(cache: NaiveChain, row: int, position: int) -> bool:
    """Whether a token is encoded, or in a sealed segment."""
    return cache.start <= position < cache.encoded[row]


@caches.convert.register(NaiveChain)
def convert(cache: NaiveChain, spec: str) -> NaiveChain:
    codec = Codec.of(spec)
    if cache.keys:
        codec.keys.check(cache.keys[0].shape[3])
        codec.values.check(cache.values[0].shape[3])
    shown = [
        tuple(
            (converted(k, spec, "keys"), converted(v, spec, "values"))
            if is_encoded(cache, i, p)
            else (k, v)
            for p, (k, v) in enumerate(row)
        )
        for i, row in enumerate(cache.shown)
    ]
    return replace(cache, shown=tuple(shown), spec=spec, segments=(spec,) * len(cache.segments))


def parts(cache: NaiveChain) -> tuple[str, ...]:
    """The codecs of what is not sealed yet: the first tokens, the encoded ones, the newest."""
    first = ("plain",) * (cache.start > 0)
    return (*first, cache.spec, *("plain",) * (cache.ages and cache.rule.residual > 0))


def seal(cache: NaiveChain, spec: str | None = None) -> NaiveChain:
    low = min(len(row) - pad for row, pad in zip(cache.shown, cache.padding, strict=True))
    if low < cache.rule.sinks:
        raise GeometryError(f"offset {low}, sinks {cache.rule.sinks}")
    return replace(
        cache,
        encoded=tuple(len(row) for row in cache.shown),
        segments=(*cache.segments, *parts(cache)),
        spec=spec or cache.spec,
    )


# -- rows -----------------------------------------------------------------------------------------


@caches.batch_size.register(NaiveChain)
def batch_size(cache: NaiveChain) -> int:
    return len(cache.shown)


@caches.offsets.register(NaiveChain)
def offsets(cache: NaiveChain) -> tuple[int, ...]:
    return tuple(len(row) - pad for row, pad in zip(cache.shown, cache.padding, strict=True))


@caches.size.register(NaiveChain)
def size(cache: NaiveChain) -> int:
    return max(map(len, positions(cache, 1)))


@caches.take.register(NaiveChain)
def take(cache: NaiveChain, rows: list[int]) -> NaiveChain:
    batch = len(cache.shown)
    if not rows or any(not -batch <= row < batch for row in rows):
        raise ShapeError(f"rows {rows} of {batch}")

    def pick(x: tuple) -> tuple:
        return tuple(x[row] for row in rows) if x else x

    return replace(
        cache,
        keys=pick(cache.keys),
        values=pick(cache.values),
        shown=pick(cache.shown),
        encoded=pick(cache.encoded),
        padding=pick(cache.padding),
    )


@caches.join.register(NaiveChain)
def join(*parts: NaiveChain) -> NaiveChain:
    first = parts[0]
    for part in parts[1:]:
        if (part.spec, part.segments) != (first.spec, first.segments):
            raise CodecError(f"{part.spec} and {first.spec}")
        if part.rule != first.rule:
            raise GeometryError(f"{part.rule} and {first.rule}")
    known = next((part for part in parts if part.keys), None)

    def arrays(name: str) -> tuple[mx.array, ...]:
        if known is None:
            return ()
        nothing = getattr(known, name)[0][:, :, :0]
        return sum((getattr(p, name) or (nothing,) * len(p.shown) for p in parts), ())

    return replace(
        first,
        keys=arrays("keys"),
        values=arrays("values"),
        shown=sum((part.shown for part in parts), ()),
        encoded=sum((part.encoded for part in parts), ()),
        padding=sum((part.padding for part in parts), ()),
    )
