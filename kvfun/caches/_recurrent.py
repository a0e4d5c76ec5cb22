"""State that stands for all tokens so far, whatever their number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import singledispatch
from typing import Any, TypeVar

import attrs
import mlx.core as mx

from .. import planes as p
from ..errors import DTypeError, RollbackError, RoundError, ShapeError, SpecError, UnsupportedError
from ..record import record, replace, static
from ..recurrences import Inputs, Recurrence, Spans, States
from . import _verbs as verbs
from ._kv import counts_of, rows_of

Cache = TypeVar("Cache")

DTYPES = {"bf16": mx.bfloat16, "f16": mx.float16, "f32": mx.float32}
"""What states can be converted to."""


@attrs.frozen
class Ahead:
    """What of a padded block is still to come in one row.

    Args:
        left: columns of padding in front of its first token.
        length: columns up to its last token, those in front included; may be negative, when the row
            has been done with for a while.
    """

    left: int
    length: int

    def span(self, columns: int) -> tuple[int, int]:
        """Where in the next so many columns the row's tokens are."""
        stop = min(max(self.length, 0), columns)
        return min(max(self.left, 0), stop), stop

    def after(self, columns: int) -> Ahead:
        """What is still to come behind them."""
        return Ahead(self.left - columns, self.length - columns)


@record
class Recurrent:
    """The states of a recurrent layer: tails of convolutions, matrices, whatever it keeps.

    A state is the sum of all tokens, so no token can be taken out of it again: to be able to go
    back, keep an earlier value, or begin a round (:func:`kvfun.rounds.begin`), which replays the
    tokens that stay. Build one with :func:`kvfun.recurrent`.

    Args:
        states: arrays by name, ``[batch, ...]``; none before the first token.
        offsets: tokens that each row has seen. ``None`` where the model that wrote the states has
            not said.
        ahead: what is still to come of a padded block, for each row.
        given: the dtypes that converted states have when they are computed with.

    >>> import kvfun
    >>> from kvfun.recurrences import ShortConv
    >>> x = mx.ones((2, 5, 8))
    >>> y, cache = kvfun.advance(kvfun.recurrent(2), ShortConv(mx.ones((8, 4))), {"x": x})
    >>> cache
    Recurrent(states={'conv': f32[2,3,8]}, offsets=(5, 5))
    """

    states: dict[str, mx.array]
    offsets: tuple[int, ...] | None = static(default=(0,))
    ahead: tuple[Ahead, ...] | None = static(default=None, repr=False)
    stored: tuple[tuple[str, mx.Dtype | None], ...] = static(default=(), repr=False)
    """States that are kept in another dtype, and which; ``*`` stands for all others."""
    given: tuple[tuple[str, mx.Dtype], ...] = static(default=(), repr=False)
    """The dtypes that those have when they are computed with."""

    @property
    def layout(self) -> Any:
        """What is known of the states' shapes: nothing before the first token."""
        return tuple([(name, x.shape[1:], x.dtype) for name, x in sorted(self.states.items())])


def recurrent(rows: int = 1, dtypes: str | Mapping[str, str] | None = None) -> Recurrent:
    """The cache of a recurrent layer before the first token.

    Args:
        rows: of the batch; one row becomes as many as the first block has.
        dtypes: keep states in ``"bf16"``, ``"f16"`` or ``"f32"``: all of them, or some by name. By
            default each stays in the dtype that it comes in, which for a recurrent state is
            float32.

    Raises:
        ShapeError: no rows.
        SpecError: an unknown dtype.
    """
    if isinstance(rows, bool) or not isinstance(rows, int) or rows < 1:
        raise ShapeError(f"rows must be an integer >= 1, not {rows!r}")
    return _kept_in(Recurrent({}, (0,) * rows), dtypes) if dtypes else Recurrent({}, (0,) * rows)


# -- advancing ------------------------------------------------------------------------------------


@singledispatch
def advance(cache: Any, recurrence: Recurrence, inputs: Inputs) -> tuple[Any, Any]:
    """What a recurrence makes of a block of tokens, and the cache behind it.

    Args:
        cache: a :class:`Recurrent`, or a round of one.
        recurrence: the layer's rule, see :mod:`kvfun.recurrences`.
        inputs: arrays by name, ``[batch, tokens, ...]`` each, which must be computed token by
        token:
            a round replays them.

    Returns:
        What comes out, usually ``[batch, tokens, ...]``, and a new cache; the old one stays what it
        was.

    Raises:
        ShapeError: inputs that differ in batch or tokens, or do not fit the cache.

    >>> import kvfun
    >>> from kvfun.recurrences import ShortConv
    >>> conv = ShortConv(mx.ones((8, 4)))
    >>> _, cache = kvfun.advance(kvfun.recurrent(), conv, {"x": mx.ones((1, 5, 8))})
    >>> kvfun.offsets(cache)
    (5,)
    """
    raise verbs._unknown("advance", cache)


@advance.register(Recurrent)
def _advance(cache: Recurrent, recurrence: Recurrence, inputs: Inputs) -> tuple[Any, Recurrent]:
    cache, tokens = _fitting(cache, inputs)
    spans = None if cache.ahead is None else tuple([each.span(tokens) for each in cache.ahead])
    out, states = _run(cache, recurrence, inputs, spans)
    return out, counted(with_states(cache, states), tokens)


def _fitting(cache: Recurrent, inputs: Inputs) -> tuple[Recurrent, int]:
    """The cache with as many rows as the inputs have, and how many tokens those are.

    Raises:
        ShapeError, DTypeError: they do not fit each other, or the cache.
    """
    if not inputs:
        raise ShapeError("advance needs at least one input")
    for name, x in inputs.items():
        if not isinstance(x, mx.array):
            raise DTypeError(f"input {name} must be an mlx array, not {type(x).__name__}")
    shapes = {name: tuple(x.shape) for name, x in inputs.items()}
    if (
        any(len(shape) < 2 for shape in shapes.values())
        or len({s[:2] for s in shapes.values()}) > 1
    ):
        raise ShapeError(f"inputs must be [batch, tokens, ...], alike in both, not {shapes}")
    batch, tokens = next(iter(shapes.values()))[:2]
    cache = of_batch(cache, batch)
    if not tokens:
        raise ShapeError("advance needs at least one token")
    return cache, tokens


def of_batch(cache: Recurrent, batch: int) -> Recurrent:
    """The cache, where it has so many rows, or is a new one that can come to have them.

    Raises:
        ShapeError: it has others.
    """
    if batch == _batch_size(cache):
        return cache
    if cache.states or cache.offsets != (0,) or cache.ahead is not None:
        raise ShapeError(f"{batch} rows for a cache of {_batch_size(cache)}")
    return replace(cache, offsets=(0,) * batch)


def _run(
    cache: Recurrent, recurrence: Recurrence, inputs: Inputs, spans: Spans
) -> tuple[Any, States]:
    started = recurrence.start(inputs)
    states = {**started, **given_states(cache)}
    if states.keys() != started.keys() or any(
        states[name].shape != x.shape for name, x in started.items()
    ):
        raise ShapeError(f"the cache has {_shapes(states)}, the recurrence {_shapes(started)}")
    return recurrence.run(states, inputs, spans)


def _shapes(states: States) -> dict[str, tuple[int, ...]]:
    return {name: tuple(x.shape) for name, x in states.items()}


def given_states(cache: Recurrent) -> States:
    """The states in the dtypes that they are computed with."""
    given = dict(cache.given)
    return {n: x.astype(given[n]) if n in given else x for n, x in cache.states.items()}


def with_states(cache: Recurrent, states: States) -> Recurrent:
    """The cache with other states, stored as the cache stores them; the tokens are not counted."""
    kept = {name: x.astype(_kept_dtype(cache, name, x)) for name, x in states.items()}
    given = [(n, states[n].dtype) for n in sorted(kept) if kept[n].dtype != states[n].dtype]
    return replace(cache, states=kept, given=tuple(given))


def _kept_dtype(cache: Recurrent, name: str, x: mx.array) -> mx.Dtype:
    """What a state is stored in; what is no floating-point number stays what it is."""
    stored = dict(cache.stored)
    dtype = stored[name] if name in stored else stored.get("*")
    return x.dtype if dtype is None or not mx.issubdtype(x.dtype, mx.floating) else dtype


def counted(cache: Recurrent, columns: int) -> Recurrent:
    """The cache after so many columns of a block: rows' own tokens are counted, padding is not."""
    if cache.ahead is None:
        moved = [columns] * _batch_size(cache)
        ahead = None
    else:
        moved = [stop - start for start, stop in (each.span(columns) for each in cache.ahead)]
        ahead = tuple([each.after(columns) for each in cache.ahead])
    pairs = zip(_known(cache), moved, strict=True)
    return replace(cache, offsets=tuple([n + more for n, more in pairs]), ahead=ahead)


# -- padding --------------------------------------------------------------------------------------


@singledispatch
def prepare(
    cache: Any, lengths: Sequence[int], *, left_padding: Sequence[int] | None = None
) -> Any:
    """The cache before a block whose rows differ in length, in one piece or in several.

    Args:
        cache: a :class:`Recurrent`.
        lengths: for each row the columns up to its last token, the padding in front of the first
        one
            included.
        left_padding: columns of padding in front of each row's first token.

    Raises:
        ShapeError: not one number a row, or more padding than columns.
    """
    raise verbs._unknown("prepare", cache)


@singledispatch
def finalize(cache: Any) -> Any:
    """The cache behind such a block: what comes next is no padding."""
    raise verbs._unknown("finalize", cache)


@prepare.register(Recurrent)
def _prepare(
    cache: Recurrent, lengths: Sequence[int], *, left_padding: Sequence[int] | None = None
) -> Recurrent:
    batch = _batch_size(cache)
    left = [0] * batch if left_padding is None else list(left_padding)
    numbers = [*lengths, *left]
    if len(lengths) != batch or len(left) != batch:
        raise ShapeError(f"lengths {list(lengths)} and padding {left} for {batch} rows")
    if any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in numbers):
        raise ShapeError(f"lengths and padding must be integers >= 0, not {numbers}")
    if any(pad > length for pad, length in zip(left, lengths, strict=True)):
        raise ShapeError(f"padding {left} beyond lengths {list(lengths)}, which include it")
    ahead = tuple([Ahead(a, b) for a, b in zip(left, lengths, strict=True)])
    return replace(cache, ahead=ahead)


@finalize.register(Recurrent)
def _finalize(cache: Recurrent) -> Recurrent:
    return replace(cache, ahead=None)


# -- rounds ---------------------------------------------------------------------------------------


def replayed(
    before: Recurrent, recurrence: Recurrence, inputs: Inputs, keep: Sequence[int]
) -> Recurrent:
    """The cache after the first tokens of a block, as many of each row as ``keep`` says.

    Args:
        before: the cache before the block.
        recurrence: what the block went through.
        inputs: the block's.
        keep: one number for all rows, or one a row.

    A row that keeps none has the very bits that it had.
    """
    longest = max(keep)
    if not longest:
        return before
    first = {name: x[:, :longest] for name, x in inputs.items()}
    if len({*keep}) == 1:
        return _advance(before, recurrence, first)[1]
    spans = tuple([(0, count) for count in keep])
    after = with_states(before, _run(before, recurrence, first, spans)[1])
    pairs = zip(_known(before), keep, strict=True)
    return replace(after, offsets=tuple([n + more for n, more in pairs]))


def chosen(rows: Sequence[bool], there: Recurrent, elsewhere: Recurrent) -> Recurrent:
    """Some rows of one cache, the others of another with states of the same shapes.

    Raises:
        ShapeError: their states differ in shape.
    """
    if all(rows) or not any(rows):
        return there if all(rows) else elsewhere
    if there.layout != elsewhere.layout:
        raise ShapeError(f"states {there.layout} and {elsewhere.layout} in one batch")
    mask = mx.array(list(rows))
    states = {
        name: mx.where(mask.reshape(-1, *[1] * (x.ndim - 1)), x, elsewhere.states[name])
        for name, x in there.states.items()
    }
    triples = zip(rows, _known(there), _known(elsewhere), strict=True)
    offsets = tuple([a if row else b for row, a, b in triples])
    return replace(there, states=states, offsets=offsets)


# -- the verbs ------------------------------------------------------------------------------------


def _known(cache: Recurrent) -> tuple[int, ...]:
    if cache.offsets is None:
        raise UnsupportedError(
            "the model that wrote these states does not say how many tokens it read: say so "
            "(kvfun.interop.mlx_lm.Reader does)"
        )
    return cache.offsets


@verbs.offsets.register(Recurrent)
def _offsets(cache: Recurrent) -> tuple[int, ...]:
    return _known(cache)


@verbs.batch_size.register(Recurrent)
def _batch_size(cache: Recurrent) -> int:
    if cache.offsets is not None:
        return len(cache.offsets)
    return next(iter(cache.states.values())).shape[0]


@verbs.size.register(Recurrent)
def _size(cache: Recurrent) -> int:
    return 0  # no token of its own is held


@verbs.max_rollback.register(Recurrent)
def _max_rollback(cache: Recurrent) -> tuple[int, ...]:
    return (0,) * _batch_size(cache)


@verbs.rollback.register(Recurrent)
def _rollback(cache: Recurrent, tokens: int | Sequence[int]) -> Recurrent:
    if any(counts_of(tokens, _batch_size(cache))):
        raise RollbackError(
            f"a recurrent state cannot give back {tokens} tokens: begin a round before them, or "
            "keep an earlier value"
        )
    return cache


@verbs.with_reserve.register(Recurrent)
def _with_reserve(cache: Recurrent, tokens: int) -> Recurrent:
    return cache


@verbs.convert.register(Recurrent)
def _convert(cache: Recurrent, spec: Any) -> Recurrent:
    kept = _kept_in(cache, spec)
    return with_states(kept, given_states(cache))


def _kept_in(cache: Recurrent, spec: Any) -> Recurrent:
    """The empty cache that stores states in other dtypes."""
    named = {"*": spec} if isinstance(spec, str) else dict(spec)
    unknown = [dtype for dtype in named.values() if dtype not in DTYPES and dtype != "plain"]
    if unknown:
        raise SpecError(f"states are kept in {', '.join(DTYPES)} or plain, not {unknown[0]!r}")
    stored = {**dict(cache.stored), **{n: DTYPES.get(dtype) for n, dtype in named.items()}}
    if "*" in named:
        stored = {"*": stored["*"]}
    if stored.get("*") is None:
        stored = {n: dtype for n, dtype in stored.items() if dtype is not None}
    return replace(cache, stored=tuple(sorted(stored.items(), key=lambda item: item[0])))


@verbs.take.register(Recurrent)
def _take(cache: Recurrent, rows: Sequence[int]) -> Recurrent:
    chosen = rows_of(rows, _batch_size(cache))
    names = list(cache.states)
    states = p.gather(tuple([cache.states[name] for name in names]), chosen)
    return replace(
        cache,
        states=dict(zip(names, states, strict=True)),
        offsets=None if cache.offsets is None else tuple([cache.offsets[row] for row in chosen]),
        ahead=None if cache.ahead is None else tuple([cache.ahead[row] for row in chosen]),
    )


@verbs.join.register(Recurrent)
def _join(*caches: Recurrent) -> Recurrent:
    first = next((cache for cache in caches if cache.states), caches[0])
    for cache in caches:
        if cache.stored != first.stored:
            raise DTypeError(f"cannot batch states kept in {cache.stored} with {first.stored}")
        if cache.states and (cache.layout, cache.given) != (first.layout, first.given):
            raise ShapeError(f"cannot batch states {cache.layout} with {first.layout}")
    states = {
        name: mx.concatenate([_rows_of_state(cache, name, x) for cache in caches], axis=0)
        for name, x in first.states.items()
    }
    known = [cache.offsets for cache in caches]
    offsets = None if None in known else tuple([n for each in known for n in each or ()])
    return replace(first, states=states, offsets=offsets, ahead=_joined_ahead(caches))


def _rows_of_state(cache: Recurrent, name: str, like: mx.array) -> mx.array:
    """A state of some rows of a batch: zeros where there has been no token."""
    zeros = (_batch_size(cache), *like.shape[1:])
    return cache.states[name] if cache.states else mx.zeros(zeros, like.dtype)


def _joined_ahead(caches: Sequence[Recurrent]) -> tuple[Ahead, ...] | None:
    if all(cache.ahead is None for cache in caches):
        return None
    if any(cache.ahead is None for cache in caches):
        raise RoundError("rows within a padded block and rows outside one: finalize first")
    return tuple([each for cache in caches for each in cache.ahead or ()])
