"""Trees of drafts: a block whose tokens branch, of which one path is kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx

from .. import caches as verbs
from ..caches import (
    KV,
    Chain,
    Delayed,
    Layout,
    attend_over,
    own_columns,
    settle,
    width,
)
from ..caches._kv import attend_planes, decoded, fitting, positions_of
from ..codecs import Codec
from ..errors import RoundError, ShapeError
from ..geometry import Geometry, Segments
from ..kernels import Partial, merge, sink_part
from ..record import record, replace, static

ROOT = -1
"""The parent of a token that follows what the cache holds."""


@record
class TreeRound:
    """A cache, and a tree of tokens behind it that nothing is decided about yet.

    A token sees what the cache's next token would see at its depth, its ancestors and itself. The
    tree is beside the cache, which stays as it is; its tokens are read as they would be stored.

    Args:
        cache: a :class:`kvfun.KV` or :class:`kvfun.Chain`.
        parents: for each token the one before it in the block that it follows, or -1.
        block: the tree's keys and values, once they were appended.
    """

    cache: Any
    parents: tuple[int, ...] = static()
    block: tuple[mx.array, mx.array] | None = None

    @property
    def depths(self) -> tuple[int, ...]:
        """How many tokens of the tree each follows."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent == ROOT else depths[parent] + 1)
        return tuple(depths)

    @property
    def positions(self) -> mx.array:
        """Where each token would be, ``int32 [batch, tokens]``: for RoPE."""
        offsets = mx.array(verbs.offsets(self.cache), dtype=mx.int32)
        return offsets[:, None] + mx.array(self.depths, dtype=mx.int32)[None]


def begin_tree(cache: Any, parents: Sequence[int]) -> Any:
    """A round of a tree of drafts, of a cache or of each cache in a tuple or list.

    Args:
        cache: a :class:`kvfun.KV`, a :class:`kvfun.Chain` or a settled :class:`kvfun.Delayed`.
        parents: for each token of the block the index of the one that it follows, an earlier one,
            or -1 for those that follow what the cache holds (the pending token). The same for
            every row.

    Raises:
        RoundError: no tree, or a cache that holds too little for one.

    References:
        Miao et al., *SpecInfer*, 2024; Cai et al., *Medusa*, 2024 (tree attention).
    """
    if isinstance(cache, tuple | list):
        return type(cache)([begin_tree(each, parents) for each in cache])
    cache = settle(cache)
    cache = cache.inner if isinstance(cache, Delayed) and cache.converted else cache
    if not isinstance(cache, KV | Chain):
        raise RoundError(f"a tree follows a KV or a Chain, not a {type(cache).__name__}")
    turn = TreeRound(cache, _parents(parents))
    _codec_of(turn)
    return turn


def select(turn: Any, path: Sequence[int] | Sequence[Sequence[int]]) -> Any:
    """The cache, or each of several, with the tokens of one path behind it.

    Args:
        turn: a tree round, or several.
        path: from a root on, each token's parent the one before it; empty to keep none. One path,
            or one a row.

    Raises:
        RoundError: no such path, or nothing was appended.
    """
    if isinstance(turn, tuple | list):
        return type(turn)([select(each, path) for each in turn])
    if not isinstance(turn, TreeRound) or turn.block is None:
        raise RoundError("select takes a tree round that a block was appended to")
    paths = _paths(turn.parents, path, turn.block[0].shape[0])
    longest = max([len(each) for each in paths])
    if not longest:
        return turn.cache
    rows = [[*each, *[0] * (longest - len(each))] for each in paths]
    index = mx.array(rows)[:, None, :, None]
    keys, values = [mx.take_along_axis(x, index, axis=2) for x in turn.block]
    cache = verbs.append(turn.cache, keys, values)
    shorter = [longest - len(each) for each in paths]
    return verbs.rollback(cache, shorter) if any(shorter) else cache


def _parents(parents: Any) -> tuple[int, ...]:
    if not isinstance(parents, Sequence) or isinstance(parents, str) or not parents:
        raise RoundError(f"parents is a list of integers, one a token, not {parents!r}")
    for index, parent in enumerate(parents):
        if isinstance(parent, bool) or not isinstance(parent, int) or not ROOT <= parent < index:
            raise RoundError(
                f"token {index} follows an earlier one or -1, not {parent!r}: {list(parents)}"
            )
    return tuple(parents)


def _paths(parents: tuple[int, ...], path: Any, batch: int) -> list[list[int]]:
    """One path a row."""
    if not isinstance(path, Sequence) or isinstance(path, str):
        raise RoundError(f"a path is a list of tokens, not {path!r}")
    many = len(path) > 0 and all(isinstance(each, Sequence) for each in path)
    given: list[Any] = list(path) if many else [path] * batch
    if len(given) != batch:
        raise RoundError(f"{len(given)} paths for {batch} rows")
    for each in given:
        before = ROOT
        for token in each:
            known = isinstance(token, int) and not isinstance(token, bool)
            if not known or not 0 <= token < len(parents) or parents[token] != before:
                raise RoundError(
                    f"{list(each)} is no path: token {token!r} does not follow "
                    f"{'the cache' if before == ROOT else before} in {list(parents)}"
                )
            before = token
    return [list(each) for each in given]


def _codec_of(turn: TreeRound) -> Codec:
    """The codec that the tree's tokens would be read in.

    Raises:
        RoundError: some of them would be among a chain's raw first tokens and some not.
    """
    cache = turn.cache
    if not isinstance(cache, Chain) or not cache.front:
        return cache.tail.codec if isinstance(cache, Chain) else cache.codec
    offsets = verbs.offsets(cache)
    if min(offsets) >= cache.front:
        return cache.tail.codec
    if max(offsets) + max(turn.depths) < cache.front:
        return cache.segments[0].codec
    raise RoundError(
        f"rows at {offsets}: a tree does not reach across the {cache.front} raw first tokens; "
        "append those first"
    )


@verbs.append.register(TreeRound)
def _append(turn: TreeRound, keys: mx.array, values: mx.array) -> TreeRound:
    if turn.block is not None:
        raise RoundError("a round has one block: select a path before the next")
    verbs.append(turn.cache, keys, values)  # refuses what does not fit; never computed
    tokens = keys.shape[2]
    if tokens != len(turn.parents):
        raise RoundError(f"a block of {tokens} tokens for a tree of {len(turn.parents)}")
    return replace(turn, block=(keys, values))


# -- who sees whom --------------------------------------------------------------------------------


def _filled(turn: TreeRound, verb: str) -> tuple[mx.array, mx.array]:
    if turn.block is None:
        raise ShapeError(f"{verb}: nothing was appended to the round")
    return turn.block


def _positions(geometry: Geometry | Segments) -> mx.array:
    """Those of the columns that the last token sees, ``int32 [batch or 1, 1, columns]``."""
    if isinstance(geometry, Geometry):
        return positions_of(geometry, geometry.spans())
    parts = [
        positions_of(part, runs)
        for part, runs in zip(geometry.parts, geometry.spans(), strict=True)
        if runs
    ]
    rows = max([part.shape[0] for part in parts])
    return mx.concatenate([mx.broadcast_to(x, (rows, *x.shape[1:])) for x in parts], axis=-1)


def _near(turn: TreeRound, at: mx.array, queries: mx.array) -> mx.array | None:
    """Which positions a query's window and chunk, and the sinks, show; ``None``: all."""
    policy = turn.cache.geometry.policy
    if policy.window is None and policy.chunk is None:
        return None
    near = mx.ones((1, 1, 1), mx.bool_)
    if policy.window is not None:
        near = near & (at > queries - policy.window)
    if policy.chunk is not None:
        near = near & (at // policy.chunk == queries // policy.chunk)
    return near | (at < policy.sinks)


def _prefix_mask(turn: TreeRound) -> mx.array | str:
    """Who sees what of the cache: ``[batch or 1, 1, tokens, columns]``, or ``"full"``."""
    own = own_columns(turn.cache, 1)
    queries = turn.positions[:, None, :, None]
    limited = turn.cache.geometry.policy.limit is not None
    near = _near(turn, _positions(turn.cache.geometry)[:, :, None], queries) if limited else None
    if near is None and own is None:
        return "full"
    own = mx.ones((1, 1, 1, 1), mx.bool_) if own is None else own.reshape(-1, 1, 1, own.shape[-1])
    return own if near is None else near & own


def _tree_mask(turn: TreeRound) -> mx.array:
    """Who sees whom in the tree: ``[batch or 1, 1, tokens, tokens]``."""
    count = len(turn.parents)
    sees = [[False] * count for _ in range(count)]
    for index, parent in enumerate(turn.parents):
        sees[index] = list(sees[parent]) if parent != ROOT else sees[index]
        sees[index][index] = True
    mask = mx.array(sees)[None, None]
    at = turn.positions
    near = _near(turn, at[:, None, None, :], at[:, None, :, None])
    return mask if near is None else mask & near


# -- reads ----------------------------------------------------------------------------------------


def _encoded(turn: TreeRound) -> tuple[Codec, Any, Any]:
    """The tree's tokens as they would be stored, and the codec that reads them."""
    (keys, values), codec, at = _filled(turn, "attend"), _codec_of(turn), turn.positions
    k, v = codec.keys.encode(keys, at), codec.values.encode(values, at)
    if getattr(codec.keys, "positional", False):
        end = max(verbs.offsets(turn.cache)) + max(turn.depths) + 1
        codec = replace(codec, keys=codec.keys.bound(end))  # pyright: ignore
        k = (*k, at[:, None, :, None])
    return codec, k, v


def _holds(turn: TreeRound) -> bool:
    """Whether there is anything to see before the tree."""
    return turn.cache.layout is not None and width(turn.cache) > 0


@verbs.attend.register(TreeRound)
def _attend(
    turn: TreeRound,
    queries: mx.array,
    *,
    scale: float | None = None,
    phase: str = "window",
    kernels: Mapping[str, Callable[..., Any]] | None = None,
    sinks: mx.array | None = None,
    mask: Any = None,
) -> Any:
    keys, values = _filled(turn, "attend")
    if mask is not None:
        raise RoundError("who sees whom in a tree follows from its parents")
    if phase not in ("window", "partial"):
        raise RoundError(f"a tree is read in the phase 'window' or 'partial', not {phase!r}")
    like = _layout(turn, keys, values)
    if fitting(like, queries, phase) != len(turn.parents):
        raise ShapeError(f"{queries.shape[2]} queries for a tree of {len(turn.parents)} tokens")
    options: Any = {"scale": scale, "phase": "partial", "kernels": kernels}
    codec, k, v = _encoded(turn)
    parts: list[Any] = [attend_planes(queries, k, v, codec, like, _tree_mask(turn), **options)]
    if _holds(turn):
        shown = _prefix_mask(turn)
        shown = None if isinstance(shown, str) else shown
        parts.insert(0, attend_over(turn.cache, queries, 1, shown, **options))
    if sinks is not None:
        parts.append(sink_part(sinks, parts[0]))
    out, lse = merge(parts)
    return Partial(out, lse) if phase == "partial" else out.astype(queries.dtype)


def _layout(turn: TreeRound, keys: mx.array, values: mx.array) -> Layout:
    known = turn.cache.layout
    if known is not None:
        return known
    batch, heads, _, head_dim = keys.shape
    return Layout(batch, heads, head_dim, values.shape[3], keys.dtype, values.dtype)


@verbs.fetch.register(TreeRound)
def _fetch(turn: TreeRound, *, queries: int = 1) -> tuple[mx.array, mx.array]:
    """The columns that the cache's last token sees, and behind them the tree's, decoded."""
    keys, values = _filled(turn, "fetch")
    codec, k, v = _encoded(turn)
    like = KV((), (), codec, Geometry(), _layout(turn, keys, values))
    own = decoded(like, k, v)
    own = own[0][..., : keys.shape[3]], own[1][..., : values.shape[3]]
    if not _holds(turn):
        return own
    before = verbs.fetch(turn.cache)
    one, other = [mx.concatenate(list(pair), axis=2) for pair in zip(before, own, strict=True)]
    return one, other


@verbs.mask.register(TreeRound)
def _mask(turn: TreeRound, queries: int | None = None) -> Any:
    """A bool array over the columns of ``fetch``, ``[batch or 1, 1, tokens, columns]``."""
    tree, count = _tree_mask(turn), len(turn.parents)
    if not _holds(turn):
        return tree
    before = _prefix_mask(turn)
    if isinstance(before, str):
        before = mx.ones((1, 1, count, width(turn.cache)), mx.bool_)
    rows = max(tree.shape[0], before.shape[0])
    parts = [mx.broadcast_to(x, (rows, 1, count, x.shape[-1])) for x in (before, tree)]
    return mx.concatenate(parts, axis=-1)


@verbs.offsets.register(TreeRound)
def _offsets(turn: TreeRound) -> tuple[int, ...]:
    """Those before the tree: its tokens are not decided."""
    return verbs.offsets(turn.cache)


@verbs.batch_size.register(TreeRound)
def _batch_size(turn: TreeRound) -> int:
    return verbs.batch_size(turn.cache)


def _undecided(turn: TreeRound, *_: Any, **__: Any) -> Any:
    raise RoundError("a tree is not decided yet: select a path first")


for _verb in (verbs.rollback, verbs.convert, verbs.take, verbs.join, verbs.with_reserve):
    _verb.register(TreeRound, _undecided)
