"""Rounds: what is not kept was never there."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import kvfun
from kvfun import rounds
from kvfun.errors import DTypeError, GeometryError, RollbackError, RoundError, ShapeError
from kvfun.testing import dense_attention

SPECS = ("plain", "kv4", "kv8-g32", "turbo-k8v3", "rot-k4v4", "mxfp8")
DIM = 64


def block(seed, tokens, batch=1):
    keys = mx.random.split(mx.random.key(seed))
    return [mx.random.normal((batch, 2, tokens, DIM), key=key) for key in keys]


def same(one, other):
    return all(mx.array_equal(a, b).item() for a, b in zip(one, other, strict=True))


@st.composite
def policies(draw):
    kind = draw(st.sampled_from(("full", "window", "sinks", "chunk")))
    window = draw(st.integers(1, 64))
    return {
        "full": {},
        "window": {"window": window, "reserve": draw(st.integers(0, 5))},
        "sinks": {"window": window, "sinks": draw(st.integers(1, 5))},
        "chunk": {"chunk": window},
    }[kind]


class RoundMachine(RuleBasedStateMachine):
    """Random rounds beside appends, on a batch; the oracle is a list of tokens for each row.

    Rows accept different numbers of drafts, the start of a delayed conversion lies anywhere, and
    every cache ever returned must still hold what it held.
    """

    @initialize(
        spec=st.sampled_from(SPECS),
        policy=policies(),
        batch=st.integers(1, 3),
        start=st.sampled_from((0, 0, 3, 20)),
        raw=st.sampled_from(({}, {}, {"residual": 5, "block": 3})),
    )
    def build(self, spec, policy, batch, start, raw):
        raw = {} if start or spec == "plain" else raw
        self.options = {**policy, **raw, **({"start": start} if start else {"raw_sinks": 0})}
        self.spec, self.policy, self.batch = spec, policy, batch
        self.cache = kvfun.empty(spec, **self.options)
        if batch > 1:
            self.cache = kvfun.stack([self.cache] * batch)
        self.tokens: list[list[int]] = [[] for _ in range(batch)]
        self.count = 0
        self.turn = None
        self.old: list[tuple] = []
        self.alone = [kvfun.empty(spec, **self.options) for _ in range(batch)]

    def ids(self, length):
        self.count += length
        return list(range(self.count - length, self.count))

    def data(self, ids):
        pairs = [block(1000 + i, 1, self.batch) for i in ids]
        return [mx.concatenate([pair[side] for pair in pairs], axis=2) for side in (0, 1)]

    def rows(self, ids, row):
        k, v = self.data(ids)
        return k[row : row + 1], v[row : row + 1]

    def keep(self):
        if any(kvfun.offsets(self.cache)):
            held = [mx.array(x) for x in kvfun.fetch(self.cache)]
            mx.eval(held)
            self.old.append((self.cache, held, kvfun.offsets(self.cache)))
            self.old = self.old[-4:]

    @precondition(lambda self: self.turn is None)
    @rule(length=st.integers(1, 9))
    def append(self, length):
        self.keep()
        ids = self.ids(length)
        self.cache = kvfun.append(self.cache, *self.data(ids))
        for row in range(self.batch):
            self.tokens[row] += ids
            self.alone[row] = kvfun.append(self.alone[row], *self.rows(ids, row))

    @precondition(lambda self: self.turn is None and self.count)
    @rule(drafts=st.integers(0, 6), less=st.integers(0, 2))
    def begin(self, drafts, less):
        self.keep()
        self.before = self.cache
        ids = self.ids(max(1, drafts + 1 - less))
        turn = rounds.begin(self.cache, drafts)
        self.turn = kvfun.append(turn, *self.data(ids)), ids
        q = mx.random.normal((self.batch, 4, len(ids), DIM), key=mx.random.key(self.count))
        out = kvfun.attend(self.turn[0], q, phase="window")
        for row in range(self.batch):
            cache = kvfun.append(kvfun.settle(self.alone[row]), *self.rows(ids, row))
            one = kvfun.attend(cache, q[row : row + 1], phase="window")
            assert mx.allclose(out[row : row + 1], one, atol=3e-5).item()

    @precondition(lambda self: self.turn is not None)
    @rule(data=st.data(), each=st.booleans())
    def roll_back(self, data, each):
        turn, ids = self.turn
        keeps = data.draw(
            st.lists(st.integers(0, len(ids)), min_size=self.batch, max_size=self.batch)
        )
        keeps = keeps if each else keeps[:1] * self.batch
        self.cache = rounds.rollback(turn, keeps if each else keeps[0])
        self.decided(ids, keeps)

    @precondition(lambda self: self.turn is not None)
    @rule()
    def commit(self):
        turn, ids = self.turn
        self.cache = rounds.commit(turn)
        self.decided(ids, [len(ids)] * self.batch)

    @precondition(lambda self: self.turn is not None)
    @rule()
    def abandon(self):
        """The cache before is still there."""
        self.cache, self.turn = self.before, None
        self.count += 50  # those tokens never come again

    def decided(self, ids, keeps):
        for row, kept in enumerate(keeps):
            self.tokens[row] += ids[:kept]
            self.alone[row] = kvfun.settle(self.alone[row])
            k, v = self.rows(ids, row)
            appended = kvfun.append(self.alone[row], k, v)
            self.alone[row] = kvfun.rollback(appended, len(ids) - kept)
        self.turn = None

    @invariant()
    def rows_hold_the_tokens_that_were_kept(self):
        if not getattr(self, "count", 0) or self.turn is not None:
            return
        assert kvfun.offsets(self.cache) == tuple(map(len, self.tokens))
        for row, cache in enumerate(kvfun.unstack(self.cache)):
            assert kvfun.offsets(cache) == kvfun.offsets(self.alone[row])
            if kvfun.size(cache):
                assert same(kvfun.fetch(cache), kvfun.fetch(self.alone[row]))
                self.is_visible(row, cache)

    def is_visible(self, row, cache):
        """Of plain tokens: exactly those that the list of positions says."""
        if self.spec != "plain":
            return
        ids, last = self.tokens[row], len(self.tokens[row]) - 1
        window, sinks = self.policy.get("window"), self.policy.get("sinks", 0)
        chunk = self.policy.get("chunk")
        seen = [
            p
            for p in range(last + 1)
            if p < sinks
            or (
                (window is None or p > last - window)
                and (chunk is None or p // chunk == last // chunk)
            )
        ]
        keys, values = kvfun.fetch(cache)
        expected = self.rows([ids[p] for p in seen], row)
        assert same((keys, values), expected)
        q = mx.random.normal((1, 4, 1, DIM), key=mx.random.key(row))
        arrays = [np.array(x[0]) for x in (q, *expected)]
        dense, _ = dense_attention(*arrays, scale=DIM**-0.5)
        assert np.allclose(np.array(kvfun.attend(cache, q)[0]), dense, atol=2e-5)

    @invariant()
    def old_caches_are_what_they_were(self):
        for cache, held, offsets in getattr(self, "old", ()):
            assert kvfun.offsets(cache) == offsets
            assert same(kvfun.fetch(cache), held)


TestRounds = RoundMachine.TestCase
TestRounds.settings = settings(max_examples=max(15, settings().max_examples // 2))


@given(
    spec=st.sampled_from(("plain", "kv4", "bf16")),
    policy=policies(),
    first=st.integers(1, 80),
    drafts=st.integers(0, 6),
    rounds_=st.integers(1, 4),
    data=st.data(),
)
def test_no_token_that_was_rolled_back_is_ever_seen_again(
    spec, policy, first, drafts, rounds_, data
):
    """Abandoned columns are full of huge numbers and of NaN: attention does not change."""
    clean = kvfun.append(kvfun.empty(spec, **policy), *block(0, first))
    dirty = clean
    for seed in range(rounds_):
        keep = data.draw(st.integers(0, drafts + 1))
        k, v = block(seed + 1, drafts + 1)
        poison = data.draw(st.sampled_from((float("nan"), float("inf"), 3e38)))
        kept = mx.arange(drafts + 1)[None, None, :, None] < keep
        bad = [mx.where(kept, x, poison) for x in (k, v)]
        dirty = rounds.rollback(kvfun.append(rounds.begin(dirty, drafts), *bad), keep)
        clean = rounds.rollback(kvfun.append(rounds.begin(clean, drafts), k, v), keep)
        for length, phase in ((1, "decode"), (2, "window"), (2, "committed")):
            if min(kvfun.offsets(clean)) < length:
                continue
            more = block(70 + seed, length)
            q = mx.random.normal((1, 4, length, DIM), key=mx.random.key(seed))
            one, other = [
                kvfun.attend(kvfun.append(cache, *more), q, phase=phase) for cache in (clean, dirty)
            ]
            assert mx.array_equal(one, other).item()


def test_a_models_caches_go_through_a_round_together():
    caches = tuple(kvfun.append(kvfun.empty(spec), *block(0, 5)) for spec in ("kv4", "bf16"))
    turn = rounds.begin(caches, 3)
    assert isinstance(turn, tuple)
    turn = tuple(kvfun.append(each, *block(1, 4)) for each in turn)
    assert [kvfun.offsets(c) for c in rounds.rollback(turn, 2)] == [(7,), (7,)]
    assert [kvfun.offsets(c) for c in rounds.commit(list(turn))] == [(9,), (9,)]


def test_what_is_not_decided_counts_towards_no_conversion():
    cache = kvfun.append(kvfun.empty("kv4", start=8), *block(0, 6))
    turn = kvfun.append(rounds.begin(cache, 3), *block(1, 4))
    back = rounds.rollback(turn, 1)
    assert (kvfun.offsets(back), back.due, back.converted) == ((7,), False, False)
    kept = rounds.commit(turn)
    assert (kvfun.offsets(kept), kept.due, kept.converted) == ((10,), True, False)
    assert rounds.begin(kept, 1).cache.converted  # what was decided is settled by the next round


def test_a_round_copies_nothing():
    """A round holds no earlier value of the cache: the block is written in place."""
    cache = kvfun.append(kvfun.empty("plain"), *block(0, 4000))
    mx.eval(cache.keys, cache.values)
    size = kvfun.nbytes(cache)
    k, v = block(1, 5)
    mx.eval(k, v)
    held = [cache]
    del cache
    mx.synchronize()
    for _ in range(3):
        mx.reset_peak_memory()
        base = mx.get_active_memory()
        turn = kvfun.append(rounds.begin(held.pop(), 4), k, v)
        mx.eval(turn.cache.keys, turn.cache.values)
        held.append(rounds.rollback(turn, 2))
        del turn
        assert mx.get_peak_memory() - base < size / 20


@pytest.mark.parametrize("drafts", [-1, True, 1.5, None])
def test_bad_numbers_of_drafts(drafts):
    with pytest.raises(RoundError, match="drafts"):
        rounds.begin(kvfun.empty("plain"), drafts)


def test_one_block_a_round_and_no_longer_than_it_was_begun_for():
    cache = kvfun.append(kvfun.empty("plain"), *block(0, 4))
    turn = rounds.begin(cache, 2)
    with pytest.raises(RoundError, match="block of 4 tokens in a round of 2 drafts"):
        kvfun.append(turn, *block(1, 4))
    turn = kvfun.append(turn, *block(1, 3))
    with pytest.raises(RoundError, match="one block"):
        kvfun.append(turn, *block(2, 1))
    with pytest.raises(RoundError, match="inside a round"):
        rounds.begin(turn, 2)
    for verb in (
        lambda: kvfun.rollback(turn, 1),
        lambda: kvfun.convert(turn, "kv4"),
        lambda: kvfun.take(turn, [0]),
        lambda: kvfun.concat([turn, turn]),
    ):
        with pytest.raises(RoundError, match="not decided"):
            verb()
    assert kvfun.offsets(rounds.commit(turn)) == (7,)


@pytest.mark.parametrize("keep", [-1, 4, True, 1.5, "2", [1, 2], [4], [None], None])
def test_bad_numbers_of_tokens_to_keep(keep):
    turn = rounds.begin(kvfun.append(kvfun.empty("plain"), *block(0, 4)), 2)
    with pytest.raises(RoundError, match="nothing was appended"):
        rounds.rollback(turn, 1)
    turn = kvfun.append(turn, *block(1, 3))
    with pytest.raises(RoundError, match="keep"):
        rounds.rollback(turn, keep)
    with pytest.raises(RoundError, match="no round"):
        rounds.commit(turn.cache)
    assert kvfun.offsets(turn) == (7,)


def test_blocks_that_do_not_fit_are_refused_as_by_the_cache():
    turn = rounds.begin(kvfun.append(kvfun.empty("plain"), *block(0, 4)), 2)
    k, v = block(1, 2)
    with pytest.raises(ShapeError):
        kvfun.append(turn, k[..., :32], v)
    with pytest.raises(DTypeError):
        kvfun.append(turn, k.astype(mx.float16), v)


def test_a_cache_that_could_not_take_a_block_back_says_so_before_it_is_written():
    class Forgetful:
        def __init__(self):
            self.appended = 0

    def append(cache, keys, values):
        cache.appended += 1
        return cache

    kvfun.append.register(Forgetful, append)
    kvfun.max_rollback.register(Forgetful, lambda cache: (0,))
    with pytest.raises(RoundError, match="take back 0 of the block's 2"):
        kvfun.append(rounds.begin(Forgetful(), 3), *block(0, 2))
    sealed = kvfun.seal(kvfun.append(kvfun.empty("plain", window=4, sinks=2), *block(0, 9)), "kv4")
    assert rounds.begin(sealed, 4).drafts == 4
    assert issubclass(RoundError, RuntimeError)
    assert not issubclass(RoundError, (GeometryError, RollbackError))
