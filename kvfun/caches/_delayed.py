"""Tokens that are encoded when there are enough of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from ..codecs import Codec
from ..errors import GeometryError
from ..geometry import Geometry
from ..record import record, replace, static
from . import _verbs as verbs
from ._extents import extents, own_columns, width
from ._kv import KV, Layout
from ._view import attend_over, layout


@record
class Delayed:
    """A cache that keeps tokens as they come until there are ``start``, and then encodes them.

    The conversion is due when every row has so many tokens; the append that reaches ``start`` is
    still read as it came, and the next one converts first. :func:`settle` does so at once. It
    happens once and for good: a rollback does not bring back what was rounded. Rows of a batch are
    converted together.

    Build one with ``kvfun.empty(spec, start=5000)``.

    >>> import kvfun
    >>> k = mx.zeros((1, 2, 5, 64))
    >>> cache = kvfun.append(kvfun.empty("kv4", start=5), k, k)
    >>> cache.codec.spec, cache.due, kvfun.append(cache, k, k).codec.spec
    ('plain', True, 'kv4')
    """

    inner: KV
    target: Codec
    start: int = static()
    floor: int = static(default=0)
    """The most tokens that a row had at the conversion: a shorter prefix is not what it would be
    had it come alone. 0 as long as nothing is converted."""

    @property
    def converted(self) -> bool:
        """Whether what is held is encoded."""
        return self.floor > 0

    @property
    def due(self) -> bool:
        """Whether the next append converts."""
        return not self.converted and min(r.offset for r in self.inner.geometry.rows) >= self.start

    @property
    def codec(self) -> Codec:
        """The codec of what is held now."""
        return self.inner.codec

    @property
    def geometry(self) -> Geometry:
        """Where every position is."""
        return self.inner.geometry

    @property
    def layout(self) -> Layout | None:
        """The shape of what the cache accepts, known from the first append on."""
        return self.inner.layout


def settle(cache: Any) -> Any:
    """The cache after the conversion that is due, if any.

    >>> import kvfun
    >>> k = mx.zeros((1, 2, 5, 64))
    >>> kvfun.settle(kvfun.append(kvfun.empty("kv4", start=5), k, k)).codec.spec
    'kv4'
    """
    if not isinstance(cache, Delayed) or not cache.due:
        return cache
    inner = verbs.convert(cache.inner, cache.target)
    floor = max(row.offset for row in inner.geometry.rows)
    return replace(cache, inner=inner, target=inner.codec, floor=floor)


def next_conversion(cache: Any) -> int | None:
    """How many more tokens make the next conversion due; ``None`` where there is none to come.

    Chunks of a prompt that end there are read as they would be in one piece.

    >>> import kvfun
    >>> next_conversion(kvfun.empty("kv4", start=5000)), next_conversion(kvfun.empty("kv4"))
    (5000, None)
    """
    if not isinstance(cache, Delayed) or cache.converted:
        return None
    return max(0, cache.start - min(row.offset for row in cache.geometry.rows))


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
def _convert(cache: Delayed, spec: str | Codec) -> KV:
    return verbs.convert(cache.inner, spec)


@verbs.take.register(Delayed)
def _take(cache: Delayed, rows: Sequence[int]) -> Delayed:
    return replace(cache, inner=verbs.take(cache.inner, rows))


@verbs.join.register(Delayed)
def _join(first: Delayed, *others: Delayed) -> Delayed:
    caches = (first, *others)
    for name, numbers in (
        ("target", [cache.target.spec for cache in caches]),
        ("start", [cache.start for cache in caches]),
        ("state of conversion", [cache.converted for cache in caches]),
    ):
        if len({*numbers}) > 1:
            raise GeometryError(f"delayed caches of one batch have one {name}, not {numbers}")
    inner = verbs.join(*[cache.inner for cache in caches])
    target = inner.codec if first.converted else first.target
    return replace(first, inner=inner, target=target, floor=max(c.floor for c in caches))


def _of_inner(verb: Callable[..., Any]) -> Callable[..., Any]:
    def reading(cache: Delayed, *args: Any, **kwargs: Any) -> Any:
        return verb(cache.inner, *args, **kwargs)

    return reading


for _verb in (
    *(verbs.fetch, verbs.fetch_columns, verbs.attend, verbs.attend_columns, verbs.mask),
    *(verbs.max_rollback, verbs.batch_size, verbs.offsets, verbs.size),
    *(width, own_columns, extents, layout, attend_over),
):
    _verb.register(Delayed, _of_inner(_verb))
