"""Tokens that are encoded when there are enough of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import mlx.core as mx

from ..codecs import Codec, joined, of_rows
from ..errors import GeometryError, UnsupportedError
from ..geometry import Geometry
from ..record import record, replace, static
from . import _verbs as verbs
from ._extents import extents, own_columns, width
from ._kv import KV, Layout, rows_of
from ._ragged import Ragged, parts_of, ragged
from ._view import attend_over, layout


@record
class Delayed:
    """A cache that keeps tokens as they come until there are ``start``, and then encodes them.

    The conversion of a row is due when it has so many tokens; the append that reaches ``start`` is
    still read as it came, and the next one converts first. :func:`settle` does so at once. It
    happens once and for good: a rollback does not bring back what was rounded. Each row of a batch
    has its own time; as long as they differ, ``inner`` is a :class:`Ragged`.

    Build one with ``kvfun.empty(spec, start=5000)``.

    >>> import kvfun
    >>> k = mx.zeros((1, 2, 5, 64))
    >>> cache = kvfun.append(kvfun.empty("kv4", start=5), k, k)
    >>> cache.codec.spec, cache.due, kvfun.append(cache, k, k).codec.spec
    ('plain', True, 'kv4')
    """

    inner: KV | Ragged
    target: Codec
    start: int = static()
    floors: tuple[int, ...] = static(default=(0,))
    """The tokens that each row (or all) had at its conversion, 0 before: a shorter prefix is not
    what it would be had it come alone."""

    @property
    def floor(self) -> int:
        """The shortest prefix that may be reused of every row."""
        return max(self.floors)

    @property
    def converted(self) -> bool:
        """Whether all that is held is encoded."""
        return all(self.floors)

    @property
    def due(self) -> bool:
        """Whether the next append converts."""
        return any(_due(self))

    @property
    def codec(self) -> Codec:
        """The codec of what is held now, if it is one."""
        return _one(self).codec

    @property
    def geometry(self) -> Geometry:
        """Where every position is, if all rows are in one cache."""
        return _one(self).geometry

    @property
    def layout(self) -> Layout | None:
        """The shape of what the cache accepts, known from the first append on."""
        return parts_of(self.inner)[0].layout


def _one(cache: Delayed) -> KV:
    if isinstance(cache.inner, Ragged):
        raise UnsupportedError("some rows wait and others do not: they are in caches of their own")
    return cache.inner


def _floors(cache: Delayed) -> tuple[int, ...]:
    batch = verbs.batch_size(cache.inner)
    return cache.floors if len(cache.floors) == batch else cache.floors * batch


def _due(cache: Delayed) -> list[bool]:
    """For each row whether the next append converts it."""
    pairs = zip(verbs.offsets(cache.inner), _floors(cache), strict=True)
    return [not floor and offset >= cache.start for offset, floor in pairs]


def settle(cache: Any) -> Any:
    """The cache after the conversions that are due, if any.

    >>> import kvfun
    >>> k = mx.zeros((1, 2, 5, 64))
    >>> kvfun.settle(kvfun.append(kvfun.empty("kv4", start=5), k, k)).codec.spec
    'kv4'
    """
    due = _due(cache) if isinstance(cache, Delayed) else []
    if not any(due):
        return cache
    pieces, done = [], 0
    for part in parts_of(cache.inner):
        rows = due[done : done + verbs.batch_size(part)]
        pieces += _settled(part, rows, of_rows(cache.target, range(done, done + len(rows))))
        done += len(rows)
    triples = zip(due, verbs.offsets(cache.inner), _floors(cache), strict=True)
    floors = tuple([offset if now else floor for now, offset, floor in triples])
    floors = floors[:1] if len({*floors}) == 1 else floors
    return replace(cache, inner=ragged(pieces), floors=floors)


def _settled(part: KV, due: Sequence[bool], target: Codec) -> list[KV]:
    """The runs of a cache's rows, those that are due converted."""
    if all(due) or not any(due):
        return [verbs.convert(part, target) if due[0] else part]
    pieces = []
    for now, run in groupby(range(len(due)), key=lambda row: due[row]):
        rows = list(run)
        piece = verbs.take(part, rows)
        pieces.append(verbs.convert(piece, of_rows(target, rows)) if now else piece)
    return pieces


def next_conversion(cache: Any) -> int | None:
    """How many more tokens make the next conversion due; ``None`` where there is none to come.

    Chunks of a prompt that end there are read as they would be in one piece.

    >>> import kvfun
    >>> next_conversion(kvfun.empty("kv4", start=5000)), next_conversion(kvfun.empty("kv4"))
    (5000, None)
    """
    if not isinstance(cache, Delayed) or cache.converted:
        return None
    pairs = zip(verbs.offsets(cache.inner), _floors(cache), strict=True)
    return max(0, min([cache.start - offset for offset, floor in pairs if not floor]))


@verbs.append.register(Delayed)
def _append(cache: Delayed, keys: mx.array, values: mx.array) -> Delayed:
    cache = settle(cache)
    _fitting(cache, keys, values)
    return replace(cache, inner=verbs.append(cache.inner, keys, values))


def _fitting(cache: Delayed, keys: Any, values: Any) -> None:
    """Refuse in the first block what the target could not store later."""
    if cache.layout is None and getattr(keys, "ndim", 0) == getattr(values, "ndim", 0) == 4:
        cache.target.keys.check(keys.shape[3])
        cache.target.values.check(values.shape[3])


@verbs.rollback.register(Delayed)
def _rollback(cache: Delayed, tokens: int | Sequence[int]) -> Delayed:
    return replace(cache, inner=verbs.rollback(cache.inner, tokens))


@verbs.with_reserve.register(Delayed)
def _with_reserve(cache: Delayed, tokens: int) -> Delayed:
    return replace(cache, inner=verbs.with_reserve(cache.inner, tokens))


@verbs.convert.register(Delayed)
def _convert(cache: Delayed, spec: str | Codec) -> Any:
    return verbs.convert(cache.inner, spec)


@verbs.take.register(Delayed)
def _take(cache: Delayed, rows: Sequence[int]) -> Delayed:
    chosen = rows_of(rows, verbs.batch_size(cache.inner))
    floors = _floors(cache)
    return replace(
        cache,
        inner=verbs.take(cache.inner, chosen),
        target=of_rows(cache.target, chosen),
        floors=tuple([floors[row] for row in chosen]),
    )


@verbs.join.register(Delayed)
def _join(*caches: Delayed) -> Delayed:
    for name, found in (
        ("target", [cache.target.spec for cache in caches]),
        ("start", [cache.start for cache in caches]),
    ):
        if len({*found}) > 1:
            raise GeometryError(f"delayed caches of one batch have one {name}, not {found}")
    batches = [verbs.batch_size(cache.inner) for cache in caches]
    return Delayed(
        ragged([cache.inner for cache in caches]),
        joined([cache.target for cache in caches], batches),
        caches[0].start,
        tuple([floor for cache in caches for floor in _floors(cache)]),
    )


verbs.reads(
    Delayed,
    "inner",
    *(verbs.fetch, verbs.fetch_columns, verbs.attend, verbs.attend_columns, verbs.mask),
    *(verbs.max_rollback, verbs.batch_size, verbs.offsets, verbs.size),
    *(width, own_columns, extents, layout, attend_over),
)
