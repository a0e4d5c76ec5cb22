"""Rows of different structure as one batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any

import mlx.core as mx

from ..codecs import Codec
from ..errors import ShapeError
from ..record import record, replace
from . import _verbs as verbs
from ._extents import extents, own_columns, width
from ._kv import KV, counts_of, rows_of
from ._view import combine, layout, view


@record
class Ragged:
    """Caches one below the other as the rows of one batch, each in its own record and codec.

    It takes every verb: what is appended goes to each cache's rows, and reads are those of
    :func:`kvfun.combine`, aligned at the right. Build one with :func:`kvfun.ragged`.

    >>> import kvfun
    >>> k = mx.zeros((2, 2, 5, 64))
    >>> batch = kvfun.append(kvfun.ragged([kvfun.empty("kv4"), kvfun.empty("bf16")]), k, k)
    >>> [part.codec.spec for part in batch.parts], kvfun.offsets(batch)
    (['kv4', 'bf16'], (5, 5))
    """

    parts: tuple[Any, ...]


def ragged(caches: Sequence[Any]) -> Any:
    """One batch of the rows of caches that need not be alike; neighbours that are become one.

    Args:
        caches: any records, of the same heads and dims.

    Returns:
        A :class:`Ragged`; of caches that are all alike what :func:`kvfun.concat` makes of them.

    Raises:
        ShapeError: no caches, or caches of different heads or dims.
    """
    parts = [part for cache in caches for part in parts_of(cache)]
    if not parts:
        raise ShapeError("ragged needs at least one cache")
    groups = [list(group) for _, group in groupby(parts, key=_kind)]
    packed = [verbs.concat(group) if len(group) > 1 else group[0] for group in groups]
    _same_dims(packed)
    return packed[0] if len(packed) == 1 else Ragged(tuple(packed))


def parts_of(cache: Any) -> tuple[Any, ...]:
    """The caches whose rows a batch consists of."""
    return cache.parts if isinstance(cache, Ragged) else (cache,)


def _kind(part: Any) -> Any:
    """What neighbours have in common that become one; other records stay by themselves."""
    return (part.codec.spec, part.geometry.policy) if isinstance(part, KV) else id(part)


def _same_dims(parts: Sequence[Any]) -> None:
    known = [part for part in parts if getattr(part, "layout", None) is not None]
    if len(known) > 1:
        combine([view(part) for part in known])


def _split(cache: Ragged) -> Iterator[tuple[Any, slice]]:
    """Each cache, and which rows of the batch are its."""
    done = 0
    for part in cache.parts:
        batch = verbs.batch_size(part)
        yield part, slice(done, done + batch)
        done += batch


def _each(cache: Ragged, change: Callable[[Any, slice], Any]) -> Ragged:
    return replace(cache, parts=tuple([change(part, rows) for part, rows in _split(cache)]))


def _seen(cache: Ragged, queries: int) -> Any:
    return combine([view(part, queries) for part in cache.parts])


@verbs.append.register(Ragged)
def _append(cache: Ragged, keys: mx.array, values: mx.array) -> Ragged:
    batch = verbs.batch_size(cache)
    for name, array in (("keys", keys), ("values", values)):
        if not isinstance(array, mx.array) or array.ndim != 4 or array.shape[0] != batch:
            shape = getattr(array, "shape", type(array).__name__)
            raise ShapeError(
                f"{name} must be [{batch}, kv_heads, tokens, dim], one a row, not {shape}"
            )
    return _each(cache, lambda part, rows: verbs.append(part, keys[rows], values[rows]))


@verbs.rollback.register(Ragged)
def _rollback(cache: Ragged, tokens: int | Sequence[int]) -> Ragged:
    batch = verbs.batch_size(cache)
    counts = counts_of(tokens, batch)
    counts = tuple(counts) * batch if len(counts) == 1 else tuple(counts)
    return _each(cache, lambda part, rows: verbs.rollback(part, list(counts[rows])))


@verbs.max_rollback.register(Ragged)
def _max_rollback(cache: Ragged) -> tuple[int, ...]:
    return tuple([most for part in cache.parts for most in verbs.max_rollback(part)])


@verbs.offsets.register(Ragged)
def _offsets(cache: Ragged) -> tuple[int, ...]:
    return tuple([offset for part in cache.parts for offset in verbs.offsets(part)])


@verbs.size.register(Ragged)
def _size(cache: Ragged) -> int:
    return max([verbs.size(part) for part in cache.parts])


@verbs.batch_size.register(Ragged)
def _batch_size(cache: Ragged) -> int:
    return sum([verbs.batch_size(part) for part in cache.parts])


@verbs.with_reserve.register(Ragged)
def _with_reserve(cache: Ragged, tokens: int) -> Ragged:
    return _each(cache, lambda part, _: verbs.with_reserve(part, tokens))


@verbs.convert.register(Ragged)
def _convert(cache: Ragged, spec: str | Codec) -> Any:
    return ragged([verbs.convert(part, spec) for part in cache.parts])


@verbs.take.register(Ragged)
def _take(cache: Ragged, rows: Sequence[int]) -> Any:
    wanted = rows_of(rows, verbs.batch_size(cache))
    places = [
        (index, row - span.start)
        for row in wanted
        for index, (_, span) in enumerate(_split(cache))
        if span.start <= row < span.stop
    ]
    runs = groupby(places, key=lambda place: place[0])
    return ragged([verbs.take(cache.parts[i], [row for _, row in run]) for i, run in runs])


@verbs.join.register(Ragged)
def _join(*caches: Ragged) -> Any:
    return ragged(caches)


@verbs.fetch.register(Ragged)
def _fetch(cache: Ragged, *, queries: int = 1) -> tuple[mx.array, mx.array]:
    return verbs.fetch(_seen(cache, queries), queries=queries)


@verbs.attend.register(Ragged)
def _attend(cache: Ragged, queries: mx.array, *, phase: str = "decode", **options: Any) -> Any:
    return verbs.attend(_seen(cache, queries.shape[2]), queries, phase=phase, **options)


@verbs.mask.register(Ragged)
def _mask(cache: Ragged, queries: int = 1) -> Any:
    return verbs.mask(_seen(cache, queries), queries)


@width.register(Ragged)
def _(cache: Ragged, queries: int = 1) -> int:
    return _seen(cache, queries).width


@own_columns.register(Ragged)
def _(cache: Ragged, queries: int = 1) -> mx.array | None:
    return _seen(cache, queries).own_columns


@extents.register(Ragged)
def _(cache: Ragged, queries: int = 1) -> Any:
    return _seen(cache, queries).extents


@layout.register(Ragged)
def _(cache: Ragged) -> Any:
    return layout(_seen(cache, 1))
