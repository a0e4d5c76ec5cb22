"""Values that share nothing with the caches they were taken from."""

from __future__ import annotations

from functools import singledispatch
from typing import Any

import mlx.core as mx

from .. import planes as p
from .. import tree
from ..record import fields, is_record, replace
from ._chain import Chain
from ._kv import KV


@singledispatch
def snapshot(cache: Any) -> Any:
    """A cache, or several, in buffers of their own, no larger than what they hold.

    It keeps no buffer of the cache alive, nor the graph that it came from once it is evaluated; the
    cache can be written in place again as soon as the snapshot is evaluated. Spare columns, and
    those that no window will show again, are left out. ``nbytes`` of it is known at once.

    Args:
        cache: any record, or a tuple or list of them. Of a record that registers nothing, every
            array is copied.

    >>> import kvfun
    >>> k = mx.zeros((1, 2, 5, 64))
    >>> cache = kvfun.append(kvfun.empty("plain"), k, k)
    >>> kvfun.nbytes(cache), kvfun.nbytes(snapshot(cache))
    (262144, 5120)
    """
    if is_record(cache):
        names, _ = fields(type(cache))
        return replace(cache, **{name: snapshot(getattr(cache, name)) for name in names})
    if isinstance(cache, tuple | list) and all(is_record(each) for each in cache):
        return _like(cache, [snapshot(each) for each in cache])
    return tree.map(_own, cache)


def _like(cache: Any, parts: list[Any]) -> Any:
    plain = type(cache) in (tuple, list)
    return type(cache)(parts) if plain else tuple(parts)


def _own(x: mx.array) -> mx.array:
    """The same bits in a buffer of their own; a copy of MLX's may be the same buffer."""
    return p.gather((x[None],), [0])[0][0] if x.ndim == 0 else p.gather((x,), range(len(x)))[0]


@snapshot.register(KV)
def _(cache: KV) -> KV:
    codec = tree.map(_own, cache.codec)
    if cache.layout is None:
        return replace(cache, codec=codec)
    relayout, geometry = cache.geometry.compacted()
    batch = range(cache.layout.batch)
    keys, values = [
        p.gather(tuple([p.lay_out(plane, relayout) for plane in planes]), batch)
        for planes in (cache.keys, cache.values)
    ]
    return KV(keys, values, codec, geometry, cache.layout)


@snapshot.register(Chain)
def _(cache: Chain) -> Chain:
    return cache.with_parts([snapshot(part) for part in cache.parts])
