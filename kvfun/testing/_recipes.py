"""What the laws are run on: how an empty cache is built, and the shape of the data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import singledispatch
from typing import Any

import attrs
import mlx.core as mx
import numpy as np

from .. import caches
from ..codecs import Codec
from ..geometry import Policy, _geometry, _policy, _segments
from ._oracle import Schedule, Visibility, from_numpy


@attrs.frozen
class Recipe:
    """How an empty cache is built: call it, and it builds one.

    The author of another record gives ``make`` (or a subclass that overrides ``__call__``, where
    it depends on the other fields) and says who sees whom; the other fields are those of
    :func:`kvfun.empty`. A record that lets a codec learn from its tokens (what
    :func:`kvfun.codecs.learns` tells) shows it, as a :class:`kvfun.Codec`, in an attribute
    ``codec``.

    Args:
        spec: what the codec is, as far as the cache has one; ``None`` where it is not known.
        window, sinks, chunk: the rule of visibility.
        reserve: what ``max_rollback`` promises after the window has filled.
        padding: left padding of the first block, one number a row.
        make: builds the empty cache; by default a :class:`kvfun.KV`, or a chain if it ages.
        residual: the last so many tokens at least are raw, older ones encoded.
        block: how many tokens are encoded together.
        raw_sinks: the first so many tokens are raw for ever.

    >>> Recipe("kv4", window=8)().geometry.policy.window
    8
    """

    spec: str | None = "plain"
    window: int | None = None
    sinks: int = 0
    chunk: int | None = None
    reserve: int = 0
    padding: tuple[int, ...] = ()
    make: Callable[[], Any] | None = None
    residual: int = 0
    block: int = 64
    raw_sinks: int = 0

    def __call__(self) -> Any:
        """A new empty cache."""
        if self.make is not None:
            return self.make()
        assert self.spec is not None
        return caches.empty(
            self.spec,
            window=self.window,
            sinks=self.sinks,
            chunk=self.chunk,
            reserve=self.reserve,
            left_padding=self.padding or None,
            **self._aged(),
        )

    def _aged(self) -> dict[str, Any]:
        """The arguments of a chain, as far as they are set; without any, one would be chosen."""
        raw = {"raw_sinks": self.raw_sinks}
        return {**raw, "residual": self.residual, "block": self.block} if self.residual else raw

    @property
    def ages(self) -> bool:
        """Whether tokens are raw at first, or the first tokens for ever."""
        return self.residual > 0 or self.raw_sinks > 0

    @property
    def schedule(self) -> Schedule:
        """When the oracle encodes: at once, if the recipe does not age."""
        if not self.ages:
            return Schedule()
        return Schedule(self.residual, self.block, max(self.raw_sinks, self.sinks))

    @property
    def visibility(self) -> Visibility:
        """The rule the oracle follows."""
        return Visibility(self.window, self.sinks, self.chunk)

    def seal(self, cache: Any, spec: str | None) -> Any:
        """What :func:`kvfun.seal` makes of a cache; a record with one of its own overrides it."""
        return caches.seal(cache, spec)

    def plain(self, padding: tuple[int, ...] = ()) -> Recipe:
        """A plain :class:`kvfun.KV` of the same visibility and reserve."""
        return Recipe("plain", self.window, self.sinks, self.chunk, self.reserve, padding)

    def unpadded(self) -> Recipe:
        """The same without left padding."""
        return attrs.evolve(self, padding=())

    @staticmethod
    def of(empty: Callable[[], Any]) -> Recipe:
        """A recipe as it is; any other factory as a recipe for full attention."""
        return empty if isinstance(empty, Recipe) else Recipe(None, make=empty)


KINDS = ("normal", "heavy tails", "constant", "one loud channel", "zero")


@attrs.frozen
class Shape:
    """The shape and dtype of keys and values, and blocks of them by seed.

    >>> keys, values = Shape(kv_heads=2, head_dim=64, value_dim=32).block(7, batch=1, tokens=5)
    >>> keys.shape, values.shape
    ((1, 2, 5, 64), (1, 2, 5, 32))
    """

    kv_heads: int = 1
    head_dim: int = 32
    value_dim: int = 32
    key_dtype: mx.Dtype = mx.float32
    value_dtype: mx.Dtype = mx.float32

    def block(self, seed: int, batch: int, tokens: int) -> tuple[mx.array, mx.array]:
        """Keys and values of a block; the seed also chooses the distribution.

        Normal, heavy-tailed, constant along the vector (a quantization group without a scale),
        with one loud channel, or all zero.
        """
        random, kind = np.random.default_rng(seed), KINDS[seed % len(KINDS)]
        shape = (batch, self.kv_heads, tokens)
        keys = _numbers(random, kind, (*shape, self.head_dim))
        values = _numbers(random, kind, (*shape, self.value_dim))
        return from_numpy(keys).astype(self.key_dtype), from_numpy(values).astype(self.value_dtype)

    def queries(self, seed: int, batch: int, heads: int, count: int, dtype: mx.Dtype) -> mx.array:
        """Queries ``[batch, heads, count, head_dim]``."""
        numbers = np.random.default_rng(seed).standard_normal((batch, heads, count, self.head_dim))
        return from_numpy(numbers.astype(np.float32)).astype(dtype)


def _numbers(random: np.random.Generator, kind: str, shape: tuple[int, ...]) -> np.ndarray:
    if kind == "zero":
        return np.zeros(shape, np.float32)
    if kind == "constant":
        flat = random.standard_normal((*shape[:-1], 1))
        return np.broadcast_to(flat, shape).astype(np.float32)
    if kind == "heavy tails":
        return np.clip(random.standard_t(2, shape), -40, 40).astype(np.float32)
    numbers = random.standard_normal(shape)
    if kind == "one loud channel":
        numbers[..., int(random.integers(shape[-1]))] *= 20
    return numbers.astype(np.float32)


@contextmanager
def small_steps(step: int = 8, slack: int = 8) -> Iterator[None]:
    """Buffers that grow by few columns and compact often, so that short histories cross both.

    Changes the step and the slack of :mod:`kvfun.geometry` for caches built inside; such a cache
    must not be used outside. Not for threads.

    >>> import kvfun
    >>> with small_steps(step=4):
    ...     kvfun.append(kvfun.empty("plain"), *Shape().block(0, 1, 5)).geometry.capacity
    8
    """
    before = _policy.STEP, _policy.SLACK
    _set_steps(step, slack)
    try:
        yield
    finally:
        _set_steps(*before)


def _set_steps(step: int, slack: int) -> None:
    _policy.STEP, _policy.SLACK = step, slack
    # Remembered plans were made with the old steps.
    for plan in [*vars(_geometry).values(), *vars(_segments).values()]:
        if hasattr(plan, "cache_clear"):
            plan.cache_clear()


@singledispatch
def bound(cache: Any, *, block: int, appended: int) -> int | None:
    """The most bytes a cache may hold by its own statement, ``None`` where it states none.

    Register a record's own: ``bound.register(MyCache)``.

    Args:
        cache: the cache.
        block: the tokens of the last append, which may be more than a window.
        appended: how many tokens were ever appended to its rows.
    """
    return None


@bound.register
def _(cache: caches.KV, *, block: int, appended: int) -> int | None:
    """``window - 1`` tokens of history, the reserve, the sinks and the slack or a whole block.

    Without a window, all that was appended. Both rounded up to whole steps.
    """
    layout = cache.layout
    if layout is None:
        return 0
    columns = _columns(cache.geometry.policy, block, appended)
    return _row_nbytes(layout, cache.codec) * columns + _calibration(cache.codec)


def ageing_nbytes(
    layout: caches.Layout,
    codec: Codec,
    policy: Policy,
    schedule: Schedule,
    *,
    block: int,
    appended: int,
) -> int:
    """The most bytes of a chain that ages: what is encoded, the raw tail, the raw first tokens.

    The encoded part is bound as a :class:`kvfun.KV` to which at once goes what one append may
    encode. The tail is raw before it is encoded, and a new block with it.
    """
    waiting = schedule.residual + schedule.block - 1 if schedule.residual else 0
    tail = _policy.round_up(waiting + block) if schedule.residual else 0
    raw = tail + _policy.round_up(schedule.first)
    encoded = _columns(policy, waiting + block, appended)
    held = _row_nbytes(layout, Codec.of("plain")) * raw + _row_nbytes(layout, codec) * encoded
    return held + _calibration(codec)


def sealed_nbytes(
    layout: caches.Layout, codecs: Sequence[Codec], policy: Policy, *, appended: int
) -> int:
    """The most bytes of sealed segments and a tail: of all that was appended, and a step each.

    A segment keeps what it held when it was sealed.
    """
    columns = _policy.round_up(policy.sinks + appended) + len(codecs) * _policy.STEP
    widest = max(_row_nbytes(layout, codec) for codec in codecs)
    return columns * widest + sum(map(_calibration, codecs))


@bound.register
def _(cache: caches.Chain, *, block: int, appended: int) -> int | None:
    """Of an ageing chain :func:`ageing_nbytes`, of another :func:`sealed_nbytes`."""
    layout, rule = cache.layout, cache.ageing
    if layout is None:
        return 0
    if len(cache.segments) > bool(cache.front) + bool(rule):
        codecs = [part.codec for part in cache.parts]
        return sealed_nbytes(layout, codecs, cache.policy, appended=appended)
    own = Schedule(rule.residual, rule.block, cache.front) if rule else Schedule(first=cache.front)
    return ageing_nbytes(layout, cache.codec, cache.policy, own, block=block, appended=appended)


def _row_nbytes(layout: caches.Layout, codec: Codec) -> int:
    """Bytes of a column of all rows and heads."""
    vectors = codec.keys.vector_nbytes(layout.head_dim, layout.key_dtype)
    vectors += codec.values.vector_nbytes(layout.value_dim, layout.value_dtype)
    return layout.batch * layout.kv_heads * vectors


def _columns(policy: Policy, block: int, appended: int) -> int:
    spans = [span for span in (policy.window, policy.chunk) if span is not None]
    if not spans:
        return _policy.round_up(max(1, policy.sinks + appended))
    history = policy.sinks + min(spans) - 1 + max(policy.reserve, 1)
    return _policy.round_up(history + max(_policy.SLACK, block))


def _calibration(codec: Codec) -> int:
    from .. import tree

    return tree.nbytes(codec)
