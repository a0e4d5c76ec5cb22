"""A state machine that holds many caches at once and checks all of them after every step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import attrs
import mlx.core as mx
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from .. import caches
from ..errors import GeometryError, RollbackError
from ._checks import attends, fetched_digest, holds
from ._history import (
    MAX_BATCH,
    Append,
    Convert,
    Handle,
    Rollback,
    Seal,
    Take,
    World,
    refused,
    resolve,
)
from ._recipes import Recipe, Shape, small_steps
from ._strategies import VERBS, layouts, seeds, shapes, specs

MAX_HANDLES = 16
MAX_TOKENS = 1200

_rows = st.lists(st.integers(0, 3), min_size=1, max_size=3)


@attrs.frozen(eq=False)
class _Held:
    """A handle, and the digest of what it showed when it was made."""

    handle: Handle
    digest: str


class CacheMachine(RuleBasedStateMachine):
    """Many caches alive at once, each beside the list of tokens it stands for.

    The rules append, roll back, convert, fork, stack, unstack, take, concatenate, attend, drop
    handles, seal (if that is allowed) and make calls that must be refused. After every step, every
    live cache must still show what it showed when it was made.

    Subclass it for another record, and give pytest its ``TestCase``::

        class MyMachine(CacheMachine):
            recipes = st.just(Recipe(None, make=MyCache, window=8))
            allowed = ("append", "rollback")

        TestMyMachine = MyMachine.TestCase
    """

    recipes: ClassVar[st.SearchStrategy[Recipe]] = layouts()
    """How the empty cache is built."""

    shapes: ClassVar[st.SearchStrategy[Shape]] = shapes()
    """Heads, dims and dtypes, one for all caches of a run."""

    allowed: ClassVar[Sequence[str]] = VERBS
    """Which of ``append``, ``rollback``, ``convert``, ``take``, ``concat``, ``seal`` it has."""

    small: ClassVar[bool] = True
    """Whether buffers grow and compact in small steps."""

    handles = Bundle("handles")

    def __init__(self) -> None:
        super().__init__()
        self._live: list[_Held] = []
        self._steps = small_steps() if self.small else None
        if self._steps is not None:
            self._steps.__enter__()

    def teardown(self) -> None:
        """Give the buffers their own steps back."""
        if self._steps is not None:
            self._steps.__exit__(None, None, None)

    def hold(self, handle: Handle, what: str) -> _Held:
        """Check a new cache and keep it."""
        holds(handle, what)
        held = _Held(handle, fetched_digest(handle.cache))
        self._live.append(held)
        return held

    # Hypothesis has a bundle of what the rules return; a rule that makes nothing returns this.
    nothing = staticmethod(multiple)

    @initialize(target=handles, data=st.data(), batch=st.integers(1, 3))
    def begin(self, data: st.DataObject, batch: int) -> Any:
        """An empty cache."""
        recipe = data.draw(self.recipes, label="recipe")
        shape = data.draw(self.shapes, label="shape")
        self.world = World(recipe, shape, len(recipe.padding) or batch)
        return self.hold(self.world.begin(), "the empty cache")

    def _room(self) -> bool:
        return len(self._live) < MAX_HANDLES

    def _has(self, verb: str) -> bool:
        return verb in self.allowed and self._room()

    @precondition(lambda self: self._room())
    @rule(
        target=handles,
        held=handles,
        tokens=st.one_of(
            st.integers(0, 3),
            st.sampled_from(("window", "step", 9, 17)),
            st.sampled_from((255, 256, 257)),
        ),
        seed=seeds(),
    )
    def append(self, held: _Held, tokens: int | str, seed: int) -> Any:
        """Append nothing, one, some, more than the window, a whole step of the buffer."""
        if tokens == "window":
            count = (self.world.recipe.window or self.world.recipe.chunk or 3) + 1
        else:
            count = 8 if tokens == "step" else int(tokens)
        if held.handle.appended + count > MAX_TOKENS:
            return self.nothing()
        after = self.world.apply(held.handle, Append(count, seed))
        holds(after, f"append({count})", queries=max(1, count))
        return self.hold(after, f"append({count})")

    @precondition(lambda self: self._has("rollback"))
    @rule(target=handles, held=handles, amounts=_rows)
    def rollback(self, held: _Held, amounts: list[int]) -> Any:
        """Roll back, all rows alike or each on its own."""
        verb = Rollback(tuple(amounts))
        return self.hold(self.world.apply(held.handle, verb), f"{verb}")

    @precondition(lambda self: self._has("rollback"))
    @rule(target=handles, held=handles)
    def rollback_most(self, held: _Held) -> Any:
        """Roll back as much as can be."""
        verb = Rollback(caches.max_rollback(held.handle.cache))
        return self.hold(self.world.exactly(held.handle, verb), f"{verb}")

    @precondition(lambda self: self._has("convert"))
    @rule(target=handles, held=handles, data=st.data())
    def convert(self, held: _Held, data: st.DataObject) -> Any:
        """Convert to another codec, or to the same."""
        shape = self.world.shape
        spec = data.draw(specs(shape.head_dim, shape.value_dim), label="spec")
        return self.hold(self.world.apply(held.handle, Convert(spec)), f"convert({spec})")

    @precondition(lambda self: self._has("seal"))
    @rule(target=handles, held=handles, data=st.data())
    def seal(self, held: _Held, data: st.DataObject) -> Any:
        """Freeze what there is; without its sinks, or in its padding, a cache refuses."""
        handle, shape = held.handle, self.world.shape
        own = st.one_of(st.none(), specs(shape.head_dim, shape.value_dim))
        verb = Seal(data.draw(own, label="spec"))
        if not handle.sealable:
            error = refused(self.world.exactly, handle, verb)
            assert isinstance(error, GeometryError), f"{error!r} is no GeometryError"
            return self.nothing()
        return self.hold(self.world.apply(handle, verb), f"{verb}")

    @precondition(lambda self: self._room())
    @rule(target=handles, held=handles)
    def fork(self, held: _Held) -> Any:
        """Two branches."""
        branches = caches.fork(held.handle.cache, 2)
        return multiple(
            *[self.hold(attrs.evolve(held.handle, cache=branch), "fork") for branch in branches]
        )

    @precondition(lambda self: self._has("take"))
    @rule(target=handles, held=handles, rows=_rows)
    def take(self, held: _Held, rows: list[int]) -> Any:
        """Rows in any order, some twice."""
        verb = resolve(Take(tuple(rows)), held.handle.cache)
        return self.hold(self.world.exactly(held.handle, verb), f"{verb}")

    @precondition(lambda self: self._has("take"))
    @rule(target=handles, held=handles)
    def unstack(self, held: _Held) -> Any:
        """Every row as a cache of its own."""
        handle = held.handle
        rows = caches.unstack(handle.cache)
        return multiple(
            *[
                self.hold(
                    attrs.evolve(handle, cache=row, reference=handle.reference.take([i])),
                    f"row {i} of unstack",
                )
                for i, row in enumerate(rows)
            ]
        )

    @precondition(lambda self: self._has("concat"))
    @rule(target=handles, parts=st.lists(handles, min_size=1, max_size=3))
    def concat(self, parts: list[_Held]) -> Any:
        """Rows of several caches; those of another codec, or other segments, are refused."""
        return self._batched([held.handle for held in parts], caches.concat)

    @precondition(lambda self: self._has("concat"))
    @rule(target=handles, parts=st.lists(handles, min_size=1, max_size=3))
    def stack(self, parts: list[_Held]) -> Any:
        """Caches of one row; batches are refused."""
        handles = [held.handle for held in parts]
        if any(caches.batch_size(handle.cache) != 1 for handle in handles):
            refused(caches.stack, [handle.cache for handle in handles])
            return self.nothing()
        return self._batched(handles, caches.stack)

    def _batched(self, handles: list[Handle], join: Callable[[list[Any]], Any]) -> Any:
        if sum(handle.batch for handle in handles) > MAX_BATCH:
            return self.nothing()
        if len({handle.codecs for handle in handles}) > 1:
            refused(join, [handle.cache for handle in handles])
            return self.nothing()
        return self.hold(self.world.concat(handles, join), f"{join.__name__} of {len(handles)}")

    @rule(held=consumes(handles))
    def drop(self, held: _Held) -> None:
        """Forget a cache, so that its buffers may be written in place."""
        self._live = [other for other in self._live if other is not held]

    @rule(
        held=handles,
        group=st.integers(1, 3),
        most=st.integers(1, 9),
        with_sinks=st.booleans(),
        seed=seeds(),
    )
    def attend(self, held: _Held, group: int, most: int, with_sinks: bool, seed: int) -> None:
        """Attention of the last tokens is that of the oracle; the cache is not changed by it."""
        handle, shape = held.handle, self.world.shape
        fewest = (
            max if handle.chained else min
        )  # a row of a chain may be empty: finite all the same
        if not handle.started or fewest(handle.reference.offsets) < 1:
            return
        count = min(most, max(1, handle.block), max(handle.reference.offsets))
        heads = shape.kv_heads * group
        queries = shape.queries(seed, handle.batch, heads, count, shape.key_dtype)
        sinks = mx.zeros((heads,), shape.key_dtype) if with_sinks else None
        attends(handle, queries, "attend", sinks=sinks, phase="decode" if count == 1 else "window")

    @rule(held=handles, seed=seeds())
    def refuse(self, held: _Held, seed: int) -> None:
        """What cannot be done raises an error of kvfun; the invariant sees that nothing changed."""
        cache, shape = held.handle.cache, self.world.shape
        keys, values = shape.block(seed, held.handle.batch, 2)
        refused(caches.append, cache, keys[0], values[0])
        refused(caches.append, cache, keys, values[:, :, :1])
        refused(caches.append, cache, keys.astype(mx.int32), values)
        if "rollback" in self.allowed:
            most = caches.max_rollback(cache)
            error = refused(caches.rollback, cache, [n + 1 for n in most])
            assert isinstance(error, RollbackError), f"{error!r} is no RollbackError"
            refused(caches.rollback, cache, -1)
        if "take" in self.allowed:
            refused(caches.take, cache, [caches.batch_size(cache)])
            refused(caches.take, cache, [])
        if not held.handle.started:
            return
        extra = mx.concatenate([keys, keys], axis=1), mx.concatenate([values, values], axis=1)
        refused(caches.append, cache, *extra)
        queries = shape.queries(seed, held.handle.batch, shape.kv_heads, 2, shape.key_dtype)
        refused(caches.attend, cache, queries, phase="decode")
        refused(caches.attend, cache, queries[..., 1:], phase="window")

    @invariant()
    def every_handle_shows_what_it_showed(self) -> None:
        """No cache that is still held has changed, whatever was done to the others."""
        for held in self._live:
            now = fetched_digest(held.handle.cache)
            assert now == held.digest, f"a cache changed after it was made: {held.handle.cache}"
