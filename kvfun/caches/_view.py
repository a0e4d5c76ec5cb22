"""Attention views: a cache as it is now, for other layers to attend without appending.

Models whose layers share keys and values, and draft models that attend to their target's, read a
cache that they never write. A cache is a value, so a view of it is the value itself, and how many
columns of it are looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce, singledispatch
from typing import Any, NoReturn

import attrs
import mlx.core as mx

from ..codecs import Codec, Plain
from ..errors import ShapeError, UnsupportedError
from ..geometry import mask_array
from ..kernels import kernels_for
from ..record import record, static
from . import _verbs as verbs
from ._chain import Chain
from ._extents import Extents, as_mask, extents, of_geometry, own_columns, width
from ._kv import KV, Layout, at_least_one, check_sinks, fitting, kernel_of, own_mask

Kernels = Mapping[str, Callable[..., Any]]


# -- what a record may say of itself --------------------------------------------------------------


@width.register(KV)
@width.register(Chain)
def _(cache: KV | Chain, queries: int = 1) -> int:
    geometry: Any = cache.geometry
    return geometry.width(geometry.spans(queries))


@own_columns.register(KV)
def _(cache: KV, queries: int = 1) -> mx.array | None:
    return as_mask(of_geometry(cache.geometry, queries))


@extents.register(KV)
def _(cache: KV, queries: int = 1) -> Extents:
    found, batch = of_geometry(cache.geometry, queries), verbs.batch_size(cache)
    if len(found.starts) == batch:
        return found
    return Extents(found.width, found.starts * batch, found.ends * batch, found.pinned * batch)


@own_columns.register(Chain)
def _(cache: Chain, queries: int = 1) -> mx.array | None:
    """Of rows that are alike all that is fetched is own; others are asked for their mask."""
    if cache.geometry.batch == 1:
        return None
    return own_columns.dispatch(object)(cache, queries)


@extents.register(Chain)
def _(cache: Chain, queries: int = 1) -> Extents:
    geometry, batch = cache.geometry, verbs.batch_size(cache)
    if geometry.batch > 1:
        return extents.dispatch(object)(cache, queries)
    columns = width(cache, queries)
    sinks = max(0, min(geometry.rows[0].offset, geometry.policy.sinks))
    rows = ((sinks,) * batch, (columns,) * batch, ((0, sinks),) * batch)
    return Extents(columns, *rows)


@singledispatch
def layout(cache: Any) -> Layout:
    """Heads and dims of what a cache holds; nothing is computed for it.

    Raises:
        ShapeError: nothing was ever appended.
    """
    keys, values = verbs.fetch(cache)
    batch, kv_heads, _, head_dim = keys.shape
    return Layout(batch, kv_heads, head_dim, values.shape[3], keys.dtype, values.dtype)


@layout.register(KV)
@layout.register(Chain)
def _(cache: KV | Chain) -> Layout:
    if cache.layout is None:
        raise ShapeError("the cache is empty, so its shapes and dtype are not known yet")
    return cache.layout


@singledispatch
def attend_over(
    cache: Any,
    queries: mx.array,
    columns: int,
    mask: mx.array | str | None,
    *,
    scale: float | None = None,
    phase: str = "window",
    kernels: Kernels | None = None,
    sinks: mx.array | None = None,
) -> Any:
    """Attention of any number of queries over the columns of ``fetch(cache, queries=columns)``.

    A record that registers nothing attends ``columns`` queries itself; other numbers of queries
    read its decoded columns.

    Args:
        cache: any cache record.
        queries: ``[batch, heads, L, head_dim]``, checked by the caller.
        columns: the number of queries that ``fetch`` is told.
        mask: over those columns: an array, ``"causal"``, or ``None`` where all see all.
        scale: as in :func:`kvfun.attend`, like the rest.
        phase: see there.
        kernels: see there.
        sinks: see there.
    """
    if queries.shape[2] == columns:
        mask = "full" if mask is None else mask
        return verbs.attend(
            cache, queries, scale=scale, phase=phase, kernels=kernels, sinks=sinks, mask=mask
        )
    if sinks is not None:
        check_sinks(sinks, queries.shape[1])
    keys, values = verbs.fetch(cache, queries=columns)
    codec = Codec.of("plain")
    kernels = kernels_for(codec) if kernels is None else kernels
    masked = phase == "window" and isinstance(mask, mx.array)
    return kernel_of(kernels, "masked_window" if masked else phase)(
        queries,
        (keys,),
        (values,),
        codec,
        scale=queries.shape[3] ** -0.5 if scale is None else scale,
        mask=mask,
        sinks=sinks,
    )


@attend_over.register(KV)
@attend_over.register(Chain)
def _(
    cache: KV | Chain, queries: mx.array, columns: int, mask: mx.array | str | None, **options: Any
) -> Any:
    return verbs.attend_columns(cache, queries, cache.geometry.spans(columns), mask, **options)


# -- what views have in common --------------------------------------------------------------------


def _starts(seen: View | Combined) -> tuple[int, ...]:
    """For each row, the first of its own columns behind its sinks."""
    return seen.extents.starts


def _ends(seen: View | Combined) -> tuple[int, ...]:
    """For each row, the column behind its last token; its own are ``[start, end)``."""
    return seen.extents.ends


def _pinned(seen: View | Combined) -> tuple[tuple[int, int], ...]:
    """For each row, the columns ``[first, stop)`` of its attention sinks, in front."""
    return seen.extents.pinned


# -- one view -------------------------------------------------------------------------------------


@record
class View:
    """A cache as it was when it was looked at; :func:`kvfun.view` makes one.

    The verbs that read (``attend``, ``fetch``, ``mask``, ``offsets``, ``size``, ``batch_size``)
    read a view as they read its cache; those that would change it raise ``UnsupportedError``.

    Args:
        cache: the cache, any record.
        queries: the view is of the columns that any of its last so many tokens sees.
    """

    cache: Any
    queries: int = static(default=1)

    @property
    def extents(self) -> Extents:
        """``width``, ``starts``, ``ends`` and ``pinned`` together."""
        return extents(self.cache, self.queries)

    @property
    def width(self) -> int:
        """How many columns: those of ``fetch(cache, queries=queries)``."""
        return width(self.cache, self.queries)

    starts = property(_starts)
    ends = property(_ends)
    pinned = property(_pinned)

    @property
    def own_columns(self) -> mx.array | None:
        """A mask that shows each row all that is its own; ``None`` where that is everything."""
        return own_columns(self.cache, self.queries)

    @property
    def offsets(self) -> tuple[int, ...]:
        """For each row, the tokens it had seen."""
        return verbs.offsets(self.cache)

    @property
    def dtype(self) -> mx.Dtype:
        """Of the decoded keys."""
        cache = self.cache
        if isinstance(cache, KV) and isinstance(cache.codec.keys, Plain) and cache.keys:
            return cache.keys[0].dtype
        return verbs.fetch(cache)[0].dtype

    def attend(
        self,
        queries: verbs.Queries,
        scale: float | None = None,
        phase: str = "window",
        kernels: Kernels | None = None,
        sinks: mx.array | None = None,
        mask: mx.array | str | None = None,
    ) -> Any:
        """Attention over the view, as often as one likes, with any queries.

        Args:
            queries: ``[batch, heads, L, head_dim]``, after RoPE at their own positions.
            scale: of the scores, by default ``head_dim ** -0.5``.
            phase: as in :func:`kvfun.attend`.
            kernels: a kernel set, by default that of the cache's codec.
            sinks: attention sink logits, ``[heads]``.
            mask: who sees what:

                * ``None``: the queries are at the positions of the last ``L`` tokens (a layer that
                  shares keys and values), and see what those see: ``attend(cache, queries)``;
                * ``"full"``: the queries are at later positions (a draft model's), and each sees
                  all columns that are its row's own (its sinks and ``[start, end)``), and only
                  those;
                * ``"causal"``, aligned at the lower right, or an array: over all ``width`` columns,
                  instead of any rule of the cache's own.

        Returns:
            ``[batch, heads, L, value_dim]`` in the queries' dtype; what :func:`kvfun.attend` gives
            for other phases. Of a row or a query that sees nothing, any finite numbers.

        Raises:
            ShapeError, DTypeError, PhaseError, GeometryError: queries, a mask or a phase that do
                not fit.
        """
        options: Any = {"scale": scale, "phase": phase, "kernels": kernels, "sinks": sinks}
        if mask is None:
            return verbs.attend(self.cache, queries, **options)
        length = fitting(layout(self.cache), queries, phase)
        at_least_one(length)
        over = own_mask(self.cache, mask, length, self.queries)
        return attend_over(self.cache, queries, self.queries, over, **options)


def view(cache: Any, queries: int = 1) -> View | Combined:
    """A read-only snapshot of a cache, which other layers attend without appending.

    Nothing is copied, and whatever happens to the cache afterwards, the view stays what it is. As
    long as it is held it keeps that value of the cache alive, so that the next append copies.

    Args:
        cache: any cache record, or a view.
        queries: how far back its columns reach: as far as any of the last so many tokens sees.
            Only windows and chunks make a difference.

    Raises:
        ShapeError: ``queries`` is no integer above 0.

    >>> import kvfun
    >>> k = mx.random.normal((1, 2, 9, 64))
    >>> cache = kvfun.append(kvfun.empty("kv4", window=4), k, k)
    >>> seen = kvfun.view(cache)
    >>> cache = kvfun.append(cache, k, k)
    >>> seen.offsets, seen.width, seen.starts, seen.ends
    ((9,), 4, (0,), (4,))
    >>> seen.attend(mx.random.normal((1, 8, 3, 64)), mask="full").shape
    (1, 8, 3, 64)
    """
    at_least_one(queries)
    if isinstance(cache, Combined):
        return Combined(tuple([View(part.cache, queries) for part in cache.views]))
    return View(cache.cache if isinstance(cache, View) else cache, queries)


# -- views of several caches as one batch ---------------------------------------------------------


@record
class Combined:
    """Views as one batch, each row in its own record, codec and arithmetic.

    :func:`kvfun.combine` makes one. It reads as a :class:`View` does. The views are aligned at
    the right: a narrower one has columns in front that are nobody's, whatever a mask shows.

    Args:
        views: the rows of the batch are theirs, one view after another.
    """

    views: tuple[View, ...]

    @property
    def extents(self) -> Extents:
        """``width``, ``starts``, ``ends`` and ``pinned`` together."""
        return _aligned([part.extents for part in self.views])

    @property
    def width(self) -> int:
        """How many columns: those of the widest view."""
        return max([part.width for part in self.views])

    starts = property(_starts)
    ends = property(_ends)
    pinned = property(_pinned)

    @property
    def own_columns(self) -> mx.array | None:
        """A mask that shows each row all that is its own; ``None`` where that is everything."""
        most, masks = self.width, [part.own_columns for part in self.views]
        if all(mask is None for mask in masks) and all(v.width == most for v in self.views):
            return None
        pairs = zip(self.views, masks, strict=True)
        return mx.concatenate([_rows_of(part, mask, 1, part.width, most) for part, mask in pairs])

    @property
    def offsets(self) -> tuple[int, ...]:
        """For each row, the tokens it had seen."""
        return tuple([offset for part in self.views for offset in part.offsets])

    @property
    def dtype(self) -> mx.Dtype:
        """The dtype that all views' decoded keys are promoted to."""
        return reduce(_promoted, [part.dtype for part in self.views])

    def attend(
        self,
        queries: verbs.Queries,
        scale: float | None = None,
        phase: str = "window",
        kernels: Kernels | None = None,
        sinks: mx.array | None = None,
        mask: mx.array | str | None = None,
    ) -> Any:
        """Attention of each row over its own view, as :meth:`View.attend`.

        Args:
            queries: ``[batch, heads, L, head_dim]``, ``batch`` of all views together.
            scale: as there.
            phase: as there.
            kernels: as there, for all views.
            sinks: as there, for all views.
            mask: as there, over the combined columns, of which a view's are the last. An array of
                rank 4 or 5 whose first axis is the batch is cut by rows; any other is shared.

        Returns:
            As there.

        Raises:
            ShapeError, DTypeError, PhaseError, GeometryError: queries, a mask or a phase that do
                not fit.
        """
        fitting(layout(self), queries, phase)
        columns, parts = self.width, []
        if isinstance(mask, mx.array):
            _fitting_mask(mask, queries.shape[0], columns)
        for part, rows in _with_rows(self.views):
            own = _cut(mask, rows, columns - part.width)
            parts.append(part.attend(queries[rows], scale, phase, kernels, sinks, own))
        return _joined(parts)


def combine(views: Sequence[View | Combined]) -> View | Combined:
    """One view of the rows of several, whatever their records and codecs.

    The rows of each follow those of the one before. Combining is associative, and one view
    combined is that view.

    Raises:
        ShapeError: no views, or views of different KV heads, head_dim or value_dim.
        TypeError: something that is no view.

    >>> import kvfun
    >>> k = mx.random.normal((1, 2, 9, 64))
    >>> caches = [kvfun.append(kvfun.empty(spec), k, k) for spec in ("kv4", "bf16")]
    >>> both = combine([view(cache) for cache in caches])
    >>> both.offsets, both.attend(mx.random.normal((2, 8, 1, 64))).shape
    ((9, 9), (2, 8, 1, 64))
    """
    views = list(views)
    if not views:
        raise ShapeError("combine needs at least one view")
    for each in views:
        if not isinstance(each, View | Combined):
            raise TypeError(f"combine takes views, not a {type(each).__name__}: use kvfun.view")
    alike = [_dims(layout(each)) for each in views]
    for other in alike[1:]:
        if other != alike[0]:
            raise ShapeError(
                f"cannot combine views of (kv_heads, head_dim, value_dim) {alike[0]} and {other}"
            )
    if len(views) == 1:
        return views[0]
    parts = [each.views if isinstance(each, Combined) else (each,) for each in views]
    return Combined(tuple([part for group in parts for part in group]))


def _dims(like: Layout) -> tuple[int, int, int]:
    return like.kv_heads, like.head_dim, like.value_dim


def _aligned(parts: Sequence[Extents]) -> Extents:
    """The extents of batches one above the other, aligned at the right."""
    columns = max([part.width for part in parts])
    starts, ends, pinned = [], [], []
    for part in parts:
        moved = columns - part.width
        starts += [start + moved for start in part.starts]
        ends += [end + moved for end in part.ends]
        pinned += [(first + moved, stop + moved) for first, stop in part.pinned]
    return Extents(columns, tuple(starts), tuple(ends), tuple(pinned))


def _rows_of(part: View, mask: mx.array | None, queries: int, columns: int, most: int) -> mx.array:
    """A view's rows of a bool mask over ``most`` columns: ``[batch, 1, queries, most]``."""
    mask = mx.ones(columns, mx.bool_) if mask is None else mask
    mask = mx.broadcast_to(mask, (verbs.batch_size(part), 1, queries, columns))
    return _at_right(mask, 3, most)


def _at_right(x: mx.array, axis: int, size: int) -> mx.array:
    """``x`` with zeros in front along an axis."""
    front = [(0, 0)] * x.ndim
    front[axis] = (size - x.shape[axis], 0)
    return mx.pad(x, front)


def _with_rows(views: Sequence[View]) -> Iterator[tuple[View, slice]]:
    """Each view, and which rows of the batch are its."""
    done = 0
    for part in views:
        batch = verbs.batch_size(part)
        yield part, slice(done, done + batch)
        done += batch


def _fitting_mask(mask: mx.array, batch: int, columns: int) -> None:
    """Raise ``ShapeError`` where a mask cannot be cut into that of each view."""
    shape = tuple(mask.shape)
    if mask.ndim < 2 or shape[-1] not in (1, columns):
        raise ShapeError(f"the mask {shape} does not fit the {columns} columns of the views")
    if mask.ndim > 3 and shape[0] not in (1, batch):
        raise ShapeError(f"the mask {shape} does not fit a batch of {batch} rows")


def _cut(mask: Any, rows: slice, front: int) -> Any:
    """A view's rows and columns of a mask over all of them."""
    if not isinstance(mask, mx.array):
        return mask
    if mask.ndim > 3 and mask.shape[0] > 1:
        mask = mask[rows]
    return mask if mask.shape[-1] == 1 else mask[..., front:]


def _joined(parts: Sequence[Any]) -> Any:
    """Outputs one after another; those of ``"partial"`` are pairs."""
    if isinstance(parts[0], tuple):
        return tuple([mx.concatenate(list(each)) for each in zip(*parts, strict=True)])
    return mx.concatenate(list(parts))


def _promoted(one: mx.Dtype, other: mx.Dtype) -> mx.Dtype:
    return one if one == other else mx.result_type(mx.zeros(0, one), mx.zeros(0, other))


# -- the verbs ------------------------------------------------------------------------------------


@verbs.attend.register(View)
def _(cache: View, queries: mx.array, **options: Any) -> Any:
    return verbs.attend(cache.cache, queries, **options)


@verbs.attend.register(Combined)
def _(cache: Combined, queries: mx.array, *, phase: str = "decode", **options: Any) -> Any:
    length = fitting(layout(cache), queries, phase)
    return view(cache, length).attend(queries, phase=phase, **options)


@verbs.fetch.register(View)
def _(cache: View, *, queries: int = 1) -> tuple[mx.array, mx.array]:
    return verbs.fetch(cache.cache, queries=queries)


@verbs.fetch.register(Combined)
def _(cache: Combined, *, queries: int = 1) -> tuple[mx.array, mx.array]:
    """Decoded, aligned at the right, zeros in front, in the promoted dtype."""
    sides = list(zip(*[verbs.fetch(part, queries=queries) for part in cache.views], strict=True))
    columns = max([keys.shape[2] for keys in sides[0]])
    keys, values = [mx.concatenate([_at_right(x, 2, columns) for x in side]) for side in sides]
    return keys, values


@verbs.mask.register(View)
def _(cache: View, queries: int = 1) -> Any:
    return verbs.mask(cache.cache, queries)


@verbs.mask.register(Combined)
def _(cache: Combined, queries: int = 1) -> Any:
    """A bool array ``[batch, 1, queries, columns]``."""
    most, rows = width(cache, queries), []
    for part in cache.views:
        columns, mask = width(part, queries), verbs.mask(part, queries)
        if not isinstance(mask, mx.array):
            mask = mask_array(mask, queries=queries, columns=columns)
        rows.append(_rows_of(part, mask, queries, columns, most))
    return mx.concatenate(rows)


@verbs.offsets.register(View)
@verbs.offsets.register(Combined)
def _(cache: View | Combined) -> tuple[int, ...]:
    return cache.offsets


@verbs.size.register(View)
def _(cache: View) -> int:
    return verbs.size(cache.cache)


@verbs.size.register(Combined)
def _(cache: Combined) -> int:
    return max([verbs.size(part) for part in cache.views])


@verbs.batch_size.register(View)
def _(cache: View) -> int:
    return verbs.batch_size(cache.cache)


@verbs.batch_size.register(Combined)
def _(cache: Combined) -> int:
    return sum([verbs.batch_size(part) for part in cache.views])


@width.register(View)
@width.register(Combined)
def _(cache: View | Combined, queries: int = 1) -> int:
    return view(cache, queries).width


@own_columns.register(View)
@own_columns.register(Combined)
def _(cache: View | Combined, queries: int = 1) -> mx.array | None:
    return view(cache, queries).own_columns


@extents.register(View)
@extents.register(Combined)
def _(cache: View | Combined, queries: int = 1) -> Extents:
    return view(cache, queries).extents


@layout.register(View)
def _(cache: View) -> Layout:
    return layout(cache.cache)


@layout.register(Combined)
def _(cache: Combined) -> Layout:
    return attrs.evolve(layout(cache.views[0]), batch=verbs.batch_size(cache))


def _read_only(cache: Any, *_: Any, **__: Any) -> NoReturn:
    raise UnsupportedError("a view is read-only; change the cache it was made of")


for _verb in (verbs.append, verbs.rollback, verbs.max_rollback, verbs.convert):
    for _kind in (View, Combined):
        _verb.register(_kind, _read_only)
