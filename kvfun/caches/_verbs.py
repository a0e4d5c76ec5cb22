"""The verbs: generic functions from records to records, open to other records.

Each dispatches on the type of the cache; ``append.register(MyCache)`` (and so on) adds a record.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import singledispatch
from typing import Any, TypeVar

import mlx.core as mx
from jaxtyping import Float

from .. import tree
from ..codecs import Codec
from ..errors import ShapeError
from ..geometry import Mask

Cache = TypeVar("Cache")

Keys = Float[mx.array, "batch kv_heads tokens head_dim"]
Values = Float[mx.array, "batch kv_heads tokens value_dim"]
Queries = Float[mx.array, "batch heads queries head_dim"]


def _unknown(verb: str, cache: object) -> TypeError:
    return TypeError(f"{verb} knows no {type(cache).__name__}; register one: {verb}.register(...)")


@singledispatch
def append(cache: Any, keys: Keys, values: Values, *more: Any) -> Any:
    """A new cache that also holds a block of tokens; the old one stays what it was.

    Args:
        cache: any cache record.
        keys: ``[batch, kv_heads, tokens, head_dim]``, after RoPE.
        values: ``[batch, kv_heads, tokens, value_dim]``.
        more: what a record takes besides: a :class:`kvfun.Latent` with an index its index keys.

    Raises:
        ShapeError, DTypeError, CodecError: a block that does not fit, or cannot be encoded.

    >>> import kvfun
    >>> k = mx.zeros((1, 2, 3, 64))
    >>> kvfun.size(kvfun.append(kvfun.empty("kv4"), k, k))
    3
    """
    raise _unknown("append", cache)


@singledispatch
def fetch(cache: Any, *, queries: int = 1) -> tuple[mx.array, mx.array]:
    """The decoded live columns in temporal order, ``[batch, kv_heads, columns, dim]``.

    Args:
        cache: any cache record.
        queries: columns that any of the last so many tokens sees; with a window ``W`` that is
            ``W - 1 + queries`` at most. A row shorter than the batch's longest has columns that
            :func:`mask` hides.

    Raises:
        ShapeError: nothing was ever appended.
        GeometryError: such columns have been dropped.
    """
    raise _unknown("fetch", cache)


@singledispatch
def attend(
    cache: Any,
    queries: Queries,
    *,
    scale: float | None = None,
    phase: str = "decode",
    kernels: Mapping[str, Callable[..., mx.array]] | None = None,
    sinks: Float[mx.array, "heads"] | None = None,
    mask: mx.array | str | None = None,
) -> Any:
    """Attention of the cache's last tokens over what they see, themselves included.

    Args:
        cache: a cache that already holds the queries' own tokens.
        queries: ``[batch, heads, L, head_dim]``; ``heads`` is a multiple of the KV heads.
        scale: of the scores, by default ``head_dim ** -0.5``.
        phase: what kind of read it is: ``"decode"`` (one query a row), ``"window"`` (``L`` causal
            queries), ``"committed"`` (``L`` causal queries, each with the arithmetic of one: the
            same bits as decoding them one at a time) or ``"partial"`` (``L`` causal queries; a
            result to be merged with others, see :func:`kvfun.kernels.merge`).
        kernels: a kernel set, by default the one :func:`kvfun.kernels.kernels_for` chooses.
        sinks: attention sink logits, ``[heads]``.
        mask: replaces the cache's own mask over the columns of ``fetch(cache, queries=L)``: an
            array, ``"causal"``, or ``"full"`` (all queries see all columns of their own row).

    Returns:
        ``[batch, heads, L, value_dim]`` in the queries' dtype; of a partial read, that in float32
        and the log-sum-exp of the scores, ``[batch, heads, L]``.

    Raises:
        ShapeError, PhaseError, GeometryError: queries that do not fit the cache or the phase.
    """
    raise _unknown("attend", cache)


@singledispatch
def fetch_columns(cache: Any, columns: Any) -> tuple[mx.array, mx.array]:
    """Decoded columns, ``[batch, kv_heads, columns, dim]``: what :func:`fetch` does with them.

    Args:
        cache: any cache record.
        columns: as the record's geometry names them (``cache.geometry.spans(queries)``).
    """
    raise _unknown("fetch_columns", cache)


@singledispatch
def attend_columns(
    cache: Any,
    queries: Queries,
    columns: Any,
    mask: Any = None,
    *,
    scale: float | None = None,
    phase: str = "decode",
    kernels: Mapping[str, Callable[..., Any]] | None = None,
    sinks: Float[mx.array, "heads"] | None = None,
) -> Any:
    """Attention over given columns under a mask over them: :func:`attend`'s arithmetic.

    The shapes of ``queries`` and ``mask`` are the caller's business; the rest is as in
    :func:`attend`.

    Args:
        cache: any cache record.
        queries: ``[batch, heads, L, head_dim]``.
        columns: as the record's geometry names them.
        mask: over these columns, as kernels take it (:mod:`kvfun.kernels`).
        scale: as in :func:`attend`, like the rest.
        phase: see there.
        kernels: see there.
        sinks: see there.
    """
    raise _unknown("attend_columns", cache)


@singledispatch
def rollback(cache: Any, tokens: int | Sequence[int]) -> Any:
    """The cache without its last tokens, exactly: as if they had never been appended.

    Args:
        cache: any cache record.
        tokens: how many, one number or one a row.

    Raises:
        RollbackError: more than :func:`max_rollback` says; nothing has happened then.
    """
    raise _unknown("rollback", cache)


@singledispatch
def max_rollback(cache: Any) -> tuple[int, ...]:
    """How many tokens each row can give back exactly."""
    raise _unknown("max_rollback", cache)


@singledispatch
def convert(cache: Any, spec: str | Codec) -> Any:
    """The cache in another codec: what was stored, decoded and encoded once.

    The same as appending the decoded tokens to an empty cache of that codec, byte for byte; a side
    (keys, values) whose codec stays is not touched.

    Raises:
        CodecError: an unknown spec, or one that cannot store the head_dim.
    """
    raise _unknown("convert", cache)


@singledispatch
def with_reserve(cache: Any, tokens: int) -> Any:
    """The cache that keeps, from the next append on, what a rollback of so many tokens needs."""
    raise _unknown("with_reserve", cache)


@singledispatch
def fork(cache: Cache, branches: int = 2) -> tuple[Cache, ...]:
    """Independent branches of a cache.

    A cache is a value, so the branches are the value itself: they share all storage until the
    first append to each.

    Raises:
        ShapeError: fewer than one branch.
    """
    if branches < 1:
        raise ShapeError(f"branches must be at least 1, not {branches}")
    return (cache,) * branches


@singledispatch
def batch_size(cache: Any) -> int:
    """How many rows the cache holds."""
    raise _unknown("batch_size", cache)


@singledispatch
def take(cache: Any, rows: Sequence[int]) -> Any:
    """A batch of the given rows, in that order: keep, drop, permute, repeat.

    The result shares no storage with the batch.

    Raises:
        ShapeError: no rows, or one that is not there.
    """
    raise _unknown("take", cache)


@singledispatch
def join(first: Any, *others: Any) -> Any:
    """The record's part of :func:`concat`: the batch of ``first`` and ``others``, of one type."""
    raise _unknown("join", first)


def concat(caches: Sequence[Cache]) -> Cache:
    """One batch of the rows of several caches; row by row it behaves as they did.

    Raises:
        ShapeError, DTypeError, CodecError, GeometryError: nothing to join, or caches of different
            heads, dims, dtype, codec or window.
    """
    caches = list(caches)
    if not caches:
        raise ShapeError("concat and stack need at least one cache")
    for cache in caches:
        if type(cache) is not type(caches[0]):
            raise ShapeError(
                f"cannot batch a {type(cache).__name__} with a {type(caches[0]).__name__}"
            )
    return caches[0] if len(caches) == 1 else join(*caches)


def stack(caches: Sequence[Cache]) -> Cache:
    """One batch whose row ``i`` is ``caches[i]``; :func:`unstack` is its inverse.

    Raises:
        ShapeError: a cache of more than one row (use :func:`concat`), and as :func:`concat`.
    """
    caches = list(caches)
    for index, cache in enumerate(caches):
        if batch_size(cache) != 1:
            raise ShapeError(
                f"stack takes caches of one row; number {index} has {batch_size(cache)}: use concat"
            )
    return concat(caches)


def unstack(cache: Cache) -> list[Cache]:
    """The rows as caches of their own, sharing no storage with the batch."""
    return [take(cache, [row]) for row in range(batch_size(cache))]


@singledispatch
def offsets(cache: Any) -> tuple[int, ...]:
    """The absolute number of tokens each row has seen: RoPE position of the next one."""
    raise _unknown("offsets", cache)


@singledispatch
def size(cache: Any) -> int:
    """Live columns: the positions that the last token sees, of the row that has most."""
    raise _unknown("size", cache)


@singledispatch
def mask(cache: Any, queries: int = 1) -> Mask:
    """Who of the last ``queries`` tokens sees which column of ``fetch(cache, queries=queries)``.

    Returns:
        ``None``, ``"causal"`` or a description, which :func:`kvfun.geometry.mask_array` makes an
        array.
    """
    raise _unknown("mask", cache)


def reads(kind: type, field: str, *verbs: Any) -> None:
    """Let verbs read a record by reading the cache in one of its fields."""

    def reading(verb: Callable[..., Any]) -> Callable[..., Any]:
        return lambda cache, *args, **options: verb(getattr(cache, field), *args, **options)

    for verb in verbs:
        verb.register(kind, reading(verb))


def nbytes(cache: Any) -> int:
    """Bytes of the arrays that the cache holds, spare columns included."""
    return tree.nbytes(cache)
