"""The laws of a cache, one function each: ``law(empty, case)`` asserts it for one drawn case."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import attrs
import mlx.core as mx
import numpy as np

from .. import caches, tree
from ._checks import (
    attends,
    attends_masked,
    columns,
    digest,
    holds,
    reachable_nbytes,
    same,
    same_columns,
)
from ._history import Append, Handle, Join, Rollback, Seal, Take, Verb, World, resolve
from ._oracle import from_numpy
from ._recipes import Recipe, Shape, bound, small_steps

Empty = Callable[[], Any]
"""Builds an empty cache: a :class:`Recipe`, or any function."""


@attrs.frozen
class Case:
    """The data of a law: what happened before, what is done, what happens afterwards.

    Args:
        shape: heads, dims and dtypes.
        batch: rows of the first append.
        before: the history of the cache that the law is about.
        blocks: tokens of the two blocks a law appends.
        later: verbs whose results must agree as well.
        others: histories of further caches of one row.
        spec: what to convert to, ``None`` for a cache that cannot be converted.
        group: query heads for each KV head.
        query_dtype: of the queries.
        sinks: whether to attend with sink logits.
        seed: of all numbers that the law itself needs.
        small: whether buffers grow and compact in small steps (:func:`small_steps`).
    """

    shape: Shape = attrs.field(factory=Shape)
    batch: int = 1
    before: tuple[Verb, ...] = ()
    blocks: tuple[int, int] = (1, 1)
    later: tuple[Verb, ...] = ()
    others: tuple[tuple[Verb, ...], ...] = ()
    spec: str | None = None
    group: int = 1
    query_dtype: mx.Dtype = mx.float32
    sinks: bool = False
    seed: int = 0
    small: bool = True


Law = Callable[[Empty, Case], None]

LAWS: dict[str, Law] = {}
"""Every law by name, in the order of the design."""


def _law(check: Callable[[World, Case], None]) -> Law:
    """Register a law; the case's buffer steps hold while it runs."""

    def law(empty: Empty, case: Case) -> None:
        recipe = Recipe.of(empty)
        with small_steps() if case.small else nullcontext():
            check(World(recipe, case.shape, len(recipe.padding) or case.batch), case)

    law.__name__ = law.__qualname__ = check.__name__
    law.__doc__ = check.__doc__
    law.__module__ = check.__module__
    LAWS[check.__name__] = law
    return law


def check_laws(empty: Empty, case: Case, laws: Mapping[str, Law] = LAWS) -> None:
    """Assert all laws for one case.

    >>> import kvfun
    >>> check_laws(lambda: kvfun.empty("plain"), Case(before=(Append(5),), blocks=(2, 3)))
    """
    for law in laws.values():
        law(empty, case)


def _block(handle: Handle, world: World, seed: int, tokens: int) -> tuple[mx.array, mx.array]:
    batch = handle.batch if handle.started or handle.batch > 1 else world.batch
    return world.shape.block(seed, batch, tokens)


def _together(world: World, left: Handle, right: Handle, verbs: Sequence[Verb], what: str) -> None:
    """Assert that two caches stay alike through further verbs."""
    same(left.cache, right.cache, what)
    for step, verb in enumerate(verbs):
        verb = world.resolve(verb, left, right)
        left, right = world.exactly(left, verb), world.exactly(right, verb)
        same(left.cache, right.cache, f"{what}, and after {verb} (number {step} afterwards)")


def _held(world: World, handle: Handle, verbs: Sequence[Verb], what: str) -> None:
    """Assert that a cache shows the tokens it stands for through further verbs."""
    for step, verb in enumerate(verbs):
        verb = world.resolve(verb, handle)
        handle = world.exactly(handle, verb)
        holds(handle, f"{what}, and after {verb} (number {step} afterwards)")


@_law
def append_is_associative(world: World, case: Case) -> None:
    """Law 1. ``append(append(c, a), b)`` = ``append(c, a ++ b)``: same bytes in what is visible."""
    start = world.run(world.begin(), case.before)
    first, second = case.blocks
    keys, values = _block(start, world, case.seed, first + second)
    whole = world.append(start, keys, values)
    parts = world.append(start, keys[:, :, :first], values[:, :, :first])
    parts = world.append(parts, keys[:, :, first:], values[:, :, first:])
    what = f"append({first}) then append({second}) against append({first + second})"
    if second:
        same(parts.cache, whole.cache, what, queries=second)
    _together(world, parts, whole, case.later, what)
    holds(whole, what, queries=max(1, first + second))


@_law
def rollback_undoes_append(world: World, case: Case) -> None:
    """Law 2. ``rollback(append(c, x), len x)`` is ``c``, now and after anything done later.

    Tokens that were encoded because of ``x`` stay encoded: then it shows the tokens of ``c`` so.
    """
    start = world.run(world.begin(), case.before)
    tokens = sum(case.blocks)
    longer = world.append(start, *_block(start, world, case.seed, tokens))
    most = caches.max_rollback(longer.cache)
    what = f"append({tokens}), rollback({tokens})"
    assert min(most) >= tokens, f"{what}: only {most} can be rolled back, right after the append"
    back = world.rollback(longer, (tokens,))
    holds(back, what)
    if not start.started:
        holds(world.run(back, [Append(3, case.seed + 1)]), f"{what}, append(3)", queries=3)
    elif back.reference.encoded == start.reference.encoded:
        _together(world, back, start, case.later, what)
    else:
        _held(world, back, case.later, what)


@_law
def rollback_is_exact(world: World, case: Case) -> None:
    """Law 2. What ``max_rollback`` allows is exact; anything more raises and changes nothing.

    It allows what the recipe reserves, counted from the highest offset the row has had.
    """
    handle = world.run(world.begin(), (*case.before, Append(sum(case.blocks), case.seed)))
    most, before = caches.max_rollback(handle.cache), digest(handle.cache)
    assert len(most) == handle.batch, f"max_rollback names {len(most)} of {handle.batch} rows"
    if not any(isinstance(verb, Rollback) for verb in case.before):
        for n, offset in zip(most, handle.reference.offsets, strict=True):
            promised = min(offset - handle.floor, world.recipe.reserve)
            assert n >= promised, f"at offset {offset}, {promised} are reserved, {n} can be undone"
    _refuses_rollback(handle, [n + 1 for n in most])
    assert digest(handle.cache) == before, "a refused rollback changed the cache"
    back = world.exactly(handle, Rollback(most))
    holds(back, f"rollback{most}")
    back = world.run(back, (Append(1, case.seed + 1), *case.later))
    holds(back, f"rollback{most} and {case.later}")


def _refuses_rollback(handle: Handle, counts: list[int]) -> None:
    from ..errors import RollbackError

    try:
        caches.rollback(handle.cache, counts)
    except RollbackError:
        return
    raise AssertionError(f"rollback({counts}) of a cache that allows one less did not raise")


@_law
def handles_keep_their_bytes(world: World, case: Case) -> None:
    """Law 3. Every cache ever returned keeps every byte; whether it is held changes no result."""
    verbs = (*case.before, Append(case.blocks[0], case.seed), *case.later)
    kept = [world.begin()]
    digests = [digest(kept[0].cache)]
    for verb in verbs:
        kept.append(world.apply(kept[-1], verb))
        digests.append(digest(kept[-1].cache))
        for branch in (Append(case.blocks[1], case.seed + 1), Rollback((1,))):
            tree.evaluate(world.apply(kept[-1], branch).cache)
    for step, (handle, expected) in enumerate(zip(kept, digests, strict=True)):
        assert digest(handle.cache) == expected, f"the cache after {step} of {verbs} changed"
    alone = world.run(world.begin(), verbs)
    same(alone.cache, kept[-1].cache, "a history of which nobody kept the steps")
    late = [world.begin()]
    for verb in verbs:
        late.append(world.apply(late[-1], verb))
    for handle, expected in zip(reversed(late), reversed(kept), strict=True):
        same(handle.cache, expected.cache, "a history evaluated last step first")


@_law
def convert_encodes_once(world: World, case: Case) -> None:
    """Law 4. ``convert(c, f)`` = the decoded tokens appended to an empty ``f`` cache.

    A side (keys, values) whose codec stays keeps its bytes; converting twice is converting once.
    """
    if case.spec is None:
        return
    before = world.run(world.begin(), case.before)
    after = world.convert(before, case.spec)
    what = f"convert({before.spec} to {case.spec})"
    holds(after, what)
    again = world.convert(after, case.spec)
    same(again.cache, after.cache, f"{what}, twice")
    if before.spec is not None and {*before.sealed} <= {before.spec}:
        stays = world.convert(before, before.spec)
        same(stays.cache, before.cache, f"convert({before.spec} to itself)")
    grown = world.append(after, *_block(after, world, case.seed, case.blocks[0]))
    holds(grown, f"{what}, append", queries=max(1, case.blocks[0]))
    holds(world.run(grown, case.later), f"{what} and {case.later}")


@_law
def rows_are_caches(world: World, case: Case) -> None:
    """Law 5. Row ``i`` of ``stack(cs)`` is ``cs[i]``, now and later; ``unstack`` is the inverse."""
    single = attrs.evolve(world, recipe=world.recipe.unpadded(), batch=1)
    histories = [case.before, *case.others]
    plain = [[v for v in h if isinstance(v, Append | Rollback)] for h in histories]
    rows = [single.run(single.begin(), history) for history in plain]
    batch = single.concat(rows, caches.stack)
    _alike(batch, rows, "stack")
    for i, (n, own) in enumerate(
        zip(caches.max_rollback(batch.cache), rows, strict=True) if batch.started else ()
    ):
        (most,) = caches.max_rollback(own.cache)
        assert n == most, f"stack: row {i} can roll back {n}, alone {most}"
    for verb in (Append(case.blocks[0], case.seed), *case.later):
        if isinstance(verb, Take):
            verb = resolve(verb, batch.cache)
            assert isinstance(verb, Take)
            batch, rows = single.exactly(batch, verb), [rows[i] for i in verb.rows]
        elif isinstance(verb, Append):
            block = _block(batch, single, verb.seed, verb.tokens)
            parts = [tuple(x[i : i + 1] for x in block) for i in range(len(rows))]
            batch = single.append(batch, *block)
            rows = [single.append(row, *part) for row, part in zip(rows, parts, strict=True)]
        elif isinstance(verb, Rollback):
            batch, rows = _rolled_back(single, batch, rows, verb)
        elif isinstance(verb, Seal) and single.resolve(verb, *rows) == verb:
            batch, rows = single.exactly(batch, verb), [single.exactly(row, verb) for row in rows]
        else:
            continue
        _alike(batch, rows, f"stack, after {verb}")
    alone = caches.unstack(batch.cache)
    assert len(alone) == len(rows), f"{len(rows)} rows unstacked into {len(alone)}"
    apart = [attrs.evolve(row, cache=cache) for row, cache in zip(rows, alone, strict=True)]
    for i, (one, own) in enumerate(zip(apart, rows, strict=True)):
        if own.started:
            _together(single, one, own, case.later, f"row {i} of an unstacked batch")


def _rolled_back(
    world: World, batch: Handle, rows: list[Handle], verb: Rollback
) -> tuple[Handle, list[Handle]]:
    together = caches.max_rollback(batch.cache)
    alone = [caches.max_rollback(row.cache)[0] for row in rows]
    amounts = [verb.amounts[i % len(verb.amounts)] for i in range(len(rows))]
    counts = [a % (min(n, m) + 1) for a, n, m in zip(amounts, together, alone, strict=True)]
    return (
        world.rollback(batch, counts),
        [world.rollback(row, (n,)) for row, n in zip(rows, counts, strict=True)],
    )


def _alike(batch: Handle, rows: Sequence[Handle], what: str) -> None:
    holds(batch, what)
    for i, row in enumerate(rows):
        holds(row, f"{what}: row {i} alone")
    offsets = tuple(n for row in rows for n in caches.offsets(row.cache))
    assert caches.offsets(batch.cache) == offsets, f"{what}: the rows alone are at {offsets}"


@_law
def forks_are_independent(world: World, case: Case) -> None:
    """Law 6. Branches do not see each other; a branch is a cache built alone from its tokens."""
    trunk = world.run(world.begin(), case.before)
    before = digest(trunk.cache)
    branches = [attrs.evolve(trunk, cache=c) for c in caches.fork(trunk.cache, 3)]
    assert len(branches) == 3, f"3 branches were asked for, {len(branches)} came"
    ways = [
        (Append(case.blocks[0], case.seed), *case.later),
        (Append(case.blocks[1], case.seed + 1), *reversed(case.later)),
        (Rollback((case.seed,)), Append(1, case.seed + 2)),
    ]
    for step in range(max(map(len, ways))):
        for i, way in enumerate(ways):
            if step < len(way):
                branches[i] = world.apply(branches[i], way[step])
    for branch, way in zip(branches, ways, strict=True):
        holds(branch, f"the branch of {way}")
        alone = world.run(world.run(world.begin(), case.before), way)
        same(branch.cache, alone.cache, f"the branch of {way} against a cache built alone")
    assert digest(trunk.cache) == before, "the trunk changed when its branches grew"


@_law
def chains_are_one_cache(world: World, case: Case) -> None:
    """Law 6. A chain = the one ``KV`` it stands for, of its tokens as they are shown.

    What is seen, offsets, size and dtype; for one row the very columns and mask. It can be rolled
    back as far, where nothing is ever dropped, and by its last append anyway. Attention of one
    query and of blocks, with sink logits, is that over the one KV. All that also beside a row that
    is empty.
    """
    seals = any(isinstance(verb, Seal) for verb in (*case.before, *case.later))
    if not world.recipe.ages and not seals:
        return
    handle = world.run(world.begin(), case.before)
    beside = (Join((0,), case.seed), Append(1, case.seed))
    for verb in (Append(max(1, case.blocks[0]), case.seed), *case.later, *beside):
        handle = world.apply(handle, verb)
        if handle.chained and max(handle.reference.offsets) > 0:
            _is_one_cache(world, handle, case, f"a chain after {verb}")


def _is_one_cache(world: World, handle: Handle, case: Case, what: str) -> None:
    one, offsets = world.one(handle), handle.reference.offsets
    queries = min(max(1, handle.block), max(offsets))
    same(handle.cache, one, f"{what}, and one KV", queries)
    if handle.batch == 1:
        same_columns(handle.cache, one, what, queries)
    if handle.reference.schedule.ages:
        _promoted(handle, what)
    bounded = world.recipe.window is not None or world.recipe.chunk is not None
    for n, offset in zip(caches.max_rollback(handle.cache), offsets, strict=True):
        most = max(0, offset - handle.floor)
        least = min(most, handle.block) if bounded else most
        assert least <= n <= most, f"{what}: {n} can be rolled back, not {least} to {most}"
    heads = case.shape.kv_heads * case.group
    asked = case.shape.queries(case.seed, handle.batch, heads, queries, case.query_dtype)
    numbers = np.random.default_rng(case.seed).standard_normal(heads).astype(np.float32)
    sinks = from_numpy(numbers).astype(case.query_dtype) if case.sinks else None
    attends(handle, asked, what, sinks=sinks)
    attends(handle, asked[:, :, -1:], what, phase="decode", sinks=sinks)


def _promoted(handle: Handle, what: str) -> None:
    """Assert that ``fetch`` has the promoted dtype of the raw and the decoded numbers."""
    assert handle.spec is not None
    raw = [mx.zeros((1, 1, 1, 128), dtype) for dtype in handle.dtypes]
    decoded = caches.fetch(caches.append(caches.empty(handle.spec, raw_sinks=0), *raw))
    for x, y, shown in zip(raw, decoded, caches.fetch(handle.cache), strict=True):
        expected = (x + y).dtype
        assert shown.dtype == expected, f"{what}: fetched in {shown.dtype}, not {expected}"


@_law
def attention_is_dense(world: World, case: Case) -> None:
    """Law 7. Attention = dense float64 attention over the visible decoded tokens, within the bound.

    One query and blocks, grouped heads, sink logits, and a caller's own mask.
    """
    handle = world.run(world.begin(), case.before)
    count = max(1, case.blocks[0])
    handle = world.append(handle, *_block(handle, world, case.seed, count))
    heads = case.shape.kv_heads * case.group
    queries = world.shape.queries(case.seed, handle.batch, heads, count, case.query_dtype)
    numbers = np.random.default_rng(case.seed)
    logits = from_numpy(numbers.standard_normal(heads).astype(np.float32)).astype(case.query_dtype)
    sinks = logits if case.sinks else None
    attends(handle, queries, "attend", sinks=sinks)
    last = queries[:, :, -1:]
    attends(handle, last, "attend", sinks=sinks, scale=0.3)
    attends(handle, last, "attend", phase="decode", sinks=sinks)
    _own_mask(handle, queries, numbers, case)
    later = world.run(handle, (*case.later, Append(1, case.seed + 1)))
    one = world.shape.queries(case.seed + 1, later.batch, heads, 1, case.query_dtype)
    attends(later, one, f"attend after {case.later}", phase="decode", sinks=sinks)


def _own_mask(handle: Handle, queries: mx.array, numbers: np.random.Generator, case: Case) -> None:
    batch, heads, count, _ = queries.shape
    total = columns(handle.cache, count)[0].shape[2]
    shapes = ((count, total), (batch, 1, count, total), (1, heads, count, total))
    shape = shapes[case.seed % 3]
    if case.seed % 2:
        mask = from_numpy(numbers.standard_normal(shape).astype(np.float32)).astype(queries.dtype)
    else:
        seen = numbers.random(shape) < 0.5
        seen[..., -1] = True
        mask = from_numpy(seen)
    attends_masked(handle, queries, mask, "attend")


@_law
def trees_round_trip(world: World, case: Case) -> None:
    """Law 9. ``unflatten . flatten`` = identity: the same bytes, structure and behaviour."""
    handle = world.run(world.begin(), case.before)
    leaves, structure = tree.flatten(handle.cache)
    again = tree.unflatten(structure, leaves)
    assert type(again) is type(handle.cache), f"{type(handle.cache)} came back as {type(again)}"
    assert tree.equal(again, handle.cache), "a cache taken apart and rebuilt differs"
    assert tree.structure(again) == structure, "a rebuilt cache has another structure"
    hash(structure)
    rebuilt = attrs.evolve(handle, cache=again)
    if handle.started:
        _together(world, rebuilt, handle, case.later, "a cache taken apart and rebuilt")


@_law
def compiled_is_eager(world: World, case: Case) -> None:
    """Law 9. ``compile(f)(c)`` = ``f(c)``, for ``f`` = append, then fetch; twice with one trace."""
    handle = world.run(world.begin(), (*case.before, Append(1, case.seed)))
    keys, values = _block(handle, world, case.seed + 1, max(1, case.blocks[0]))

    def step(cache: Any, keys: mx.array, values: mx.array) -> Any:
        cache = caches.append(cache, keys, values)
        return cache, caches.fetch(cache, queries=keys.shape[2])

    compiled = tree.compile(step)
    for _ in range(2):
        expected, shown = step(handle.cache, keys, values)
        cache, fetched = compiled(handle.cache, keys, values)
        same(cache, expected, "compiled append", queries=keys.shape[2])
        assert tree.equal(fetched, shown), "compiled append and fetch"
        keys, values = values.astype(keys.dtype), keys.astype(values.dtype)
        if keys.shape != values.shape:
            break
    assert compiled.traces == 1, f"one structure and shape was traced {compiled.traces} times"


@_law
def bytes_are_accounted(world: World, case: Case) -> None:
    """Law 10. ``nbytes`` = bytes of reachable arrays, and never more than the stated bound."""
    handle = world.begin()
    verbs = (*case.before, *[Append(n, case.seed) for n in case.blocks], *case.later)
    for verb in (*verbs, *[Append(3, case.seed)] * 6):
        handle = world.apply(handle, verb)
        held, reached = caches.nbytes(handle.cache), reachable_nbytes(handle.cache)
        assert held == reached, f"after {verb}: nbytes {held}, {reached} are reachable"
        most = bound(handle.cache, block=handle.largest, appended=handle.appended)
        assert most is None or held <= most, f"after {verb}: {held} bytes held, bound {most}"
