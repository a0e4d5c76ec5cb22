"""Recurrent caches: the oracle is the tokens of each row, run again from the beginning."""

from __future__ import annotations

import gc

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import kvfun
from kvfun import rounds, tree
from kvfun.errors import (
    DTypeError,
    RollbackError,
    RoundError,
    ShapeError,
    SpecError,
    UnsupportedError,
)
from kvfun.recurrences import ShortConv
from kvfun.testing import RECURRENCES, digest

CONV = ShortConv(mx.ones((8, 4)))


def conv(cache, tokens=5, batch=None):
    batch = kvfun.batch_size(cache) if batch is None else batch
    return kvfun.advance(cache, CONV, {"x": mx.random.normal((batch, tokens, 8))})[1]


class RecurrentMachine(RuleBasedStateMachine):
    """Random blocks, padded ones, rounds and rows; old values must keep their bits."""

    @initialize(
        name=st.sampled_from(sorted(RECURRENCES)),
        dtype=st.sampled_from((mx.float32, mx.bfloat16)),
        kept=st.sampled_from((None, None, "bf16")),
        batch=st.integers(1, 3),
    )
    def build(self, name, dtype, kept, batch):
        self.make, self.dtype, self.kept = RECURRENCES[name], dtype, kept
        self.recurrence, _ = self.make(mx.random.key(7), 1, 1, dtype)
        self.cache = kvfun.recurrent(batch, kept)
        self.rows = [[] for _ in range(batch)]
        self.seed = 100
        self.old = []

    def block(self, tokens):
        self.seed += 1
        return self.make(mx.random.key(self.seed), len(self.rows), tokens, self.dtype)[1]

    def own(self, inputs, row, start, stop):
        return [
            {n: x[row : row + 1, t : t + 1] for n, x in inputs.items()} for t in range(start, stop)
        ]

    @rule(tokens=st.integers(1, 5))
    def advance(self, tokens):
        inputs = self.block(tokens)
        _, self.cache = kvfun.advance(self.cache, self.recurrence, inputs)
        if self.kept and tokens > 1:  # what is stored between blocks is rounded there
            self.rows = [
                [*r, self.own_block(inputs, i, 0, tokens)] for i, r in enumerate(self.rows)
            ]
        else:
            self.rows = [[*r, *self.own(inputs, i, 0, tokens)] for i, r in enumerate(self.rows)]

    def own_block(self, inputs, row, start, stop):
        return {n: x[row : row + 1, start:stop] for n, x in inputs.items()}

    @rule(data=st.data(), tokens=st.integers(1, 6), chunk=st.integers(1, 6))
    @precondition(lambda self: self.kept is None)
    def padded(self, data, tokens, chunk):
        pairs = [
            sorted(data.draw(st.tuples(st.integers(0, tokens), st.integers(0, tokens))))
            for _ in self.rows
        ]
        inputs = self.block(tokens)
        cache = kvfun.prepare(
            self.cache, [stop for _, stop in pairs], left_padding=[start for start, _ in pairs]
        )
        for first in range(0, tokens, chunk):
            part = {n: x[:, first : first + chunk] for n, x in inputs.items()}
            _, cache = kvfun.advance(cache, self.recurrence, part)
        self.cache = kvfun.finalize(cache)
        self.rows = [[*r, *self.own(inputs, i, *pairs[i])] for i, r in enumerate(self.rows)]

    @rule(data=st.data(), drafts=st.integers(0, 4), uniform=st.booleans())
    @precondition(lambda self: self.kept is None)
    def round(self, data, drafts, uniform):
        inputs = self.block(drafts + 1)
        before = self.cache
        _, turn = kvfun.advance(rounds.begin(before, drafts), self.recurrence, inputs)
        count = st.integers(0, drafts + 1)
        keep = (
            [data.draw(count)] * len(self.rows)
            if uniform
            else [data.draw(count) for _ in self.rows]
        )
        self.cache = rounds.rollback(turn, keep[0] if uniform else keep)
        self.rows = [[*r, *self.own(inputs, i, 0, keep[i])] for i, r in enumerate(self.rows)]
        if not any(keep):
            assert self.cache is before

    @rule(data=st.data())
    def take(self, data):
        chosen = data.draw(st.lists(st.integers(0, len(self.rows) - 1), min_size=1, max_size=3))
        self.cache = kvfun.take(self.cache, chosen)
        self.rows = [self.rows[i] for i in chosen]

    @rule(cold=st.booleans())
    def join(self, cold):
        if len(self.rows) > 3:
            return
        other = kvfun.recurrent(1, self.kept) if cold else kvfun.take(self.cache, [0])
        self.cache = kvfun.concat([self.cache, other])
        self.rows = [*self.rows, [] if cold else self.rows[0]]

    @invariant()
    def rows_are_what_they_would_be_alone(self):
        if not hasattr(self, "cache"):
            return
        sizes = [sum(next(iter(b.values())).shape[1] for b in row) for row in self.rows]
        assert kvfun.offsets(self.cache) == tuple(sizes)
        for index, row in enumerate(self.rows):
            alone = kvfun.recurrent(1, self.kept)
            for block in row:
                _, alone = kvfun.advance(alone, self.recurrence, block)
            mine = kvfun.take(self.cache, [index])
            for name, x in mine.states.items():
                wanted = alone.states.get(name)
                wanted = mx.zeros_like(x) if wanted is None else wanted
                assert wanted.dtype == x.dtype
                assert mx.array_equal(x, wanted).item(), (name, index)
        self.old.append((self.cache, digest(self.cache)))

    @invariant()
    def old_values_keep_their_bits(self):
        for cache, was in getattr(self, "old", [])[-4:]:
            assert digest(cache) == was


TestRecurrentMachine = RecurrentMachine.TestCase


# -- what is kept ---------------------------------------------------------------------------------


def test_float32_state_stays_float32_beside_16_bits():
    recurrence, inputs = RECURRENCES["gated delta"](mx.random.key(0), 2, 3, mx.bfloat16)
    out, cache = kvfun.advance(kvfun.recurrent(2), recurrence, inputs)
    dtypes = {name: x.dtype for name, x in cache.states.items()}
    assert dtypes == {"conv": mx.bfloat16, "recurrent": mx.float32}
    assert out.dtype == mx.bfloat16


def test_converted_states_are_stored_smaller_and_computed_with_as_before():
    recurrence, inputs = RECURRENCES["mamba2"](mx.random.key(0), 2, 6, mx.float32)
    _, wide = kvfun.advance(kvfun.recurrent(2), recurrence, inputs)
    half = kvfun.convert(wide, {"scan": "bf16"})
    assert {n: x.dtype for n, x in half.states.items()} == {"conv": mx.float32, "scan": mx.bfloat16}
    assert kvfun.nbytes(half) < kvfun.nbytes(wide)
    out, after = kvfun.advance(half, recurrence, inputs)
    rounded = kvfun.replace(
        wide,
        states={**wide.states, "scan": wide.states["scan"].astype(mx.bfloat16).astype(mx.float32)},
    )
    wanted, states = kvfun.advance(rounded, recurrence, inputs)
    assert mx.array_equal(out, wanted).item()
    assert after.states["scan"].dtype == mx.bfloat16
    assert mx.array_equal(after.states["scan"], states.states["scan"].astype(mx.bfloat16)).item()
    back = kvfun.convert(after, "plain")
    assert back.states["scan"].dtype == mx.float32
    assert not back.stored


def test_a_cache_may_be_made_to_keep_less_from_the_start():
    recurrence, inputs = RECURRENCES["mamba2"](mx.random.key(0), 1, 6, mx.float32)
    _, cache = kvfun.advance(kvfun.recurrent(dtypes="f16"), recurrence, inputs)
    assert {x.dtype for x in cache.states.values()} == {mx.float16}
    with pytest.raises(SpecError, match="kv4"):
        kvfun.convert(cache, "kv4")
    with pytest.raises(SpecError, match="bf61"):
        kvfun.recurrent(dtypes="bf61")


def test_a_cache_of_one_row_comes_to_have_as_many_as_the_first_block():
    cache = conv(kvfun.recurrent(), batch=3)
    assert kvfun.offsets(cache) == (5, 5, 5)
    with pytest.raises(ShapeError, match="2 rows"):
        conv(cache, batch=2)


def test_it_takes_part_in_trees():
    cache = conv(kvfun.recurrent(2))
    assert tree.equal(cache, tree.unflatten(tree.structure(cache), tree.leaves(cache)))
    assert kvfun.nbytes(cache) == 2 * 3 * 8 * 4
    assert kvfun.size(cache) == 0
    assert kvfun.fork(cache, 2) == (cache, cache)


# -- going back -----------------------------------------------------------------------------------


def test_tokens_cannot_be_taken_out_of_a_state():
    cache = conv(kvfun.recurrent(2))
    assert kvfun.max_rollback(cache) == (0, 0)
    assert kvfun.rollback(cache, 0) is cache
    for tokens in (1, [0, 1]):
        with pytest.raises(RollbackError, match="begin a round"):
            kvfun.rollback(cache, tokens)


def test_a_round_that_keeps_nothing_gives_the_very_cache_back():
    cache = conv(kvfun.recurrent(2))
    turn = conv(rounds.begin(cache, 4))
    assert rounds.rollback(turn, 0) is cache
    assert rounds.rollback(turn, 5) is rounds.commit(turn)


def test_what_a_round_refuses():
    cache = conv(kvfun.recurrent(2))
    with pytest.raises(RoundError, match="5 tokens"):
        conv(rounds.begin(cache, 3))
    turn = conv(rounds.begin(cache, 4))
    with pytest.raises(RoundError, match="one block"):
        conv(turn)
    with pytest.raises(RoundError, match="from 0 to"):
        rounds.rollback(turn, 6)
    with pytest.raises(RoundError, match="nothing was appended"):
        rounds.rollback(rounds.begin(cache, 3), 1)
    with pytest.raises(RoundError, match="padded"):
        conv(rounds.begin(kvfun.prepare(cache, [5, 4]), 4))


def test_a_hybrid_goes_back_as_one():
    recurrence, inputs = RECURRENCES["gated delta"](mx.random.key(0), 2, 4, mx.float32)
    k = mx.random.normal((2, 2, 4, 64))
    caches = (kvfun.empty("kv4"), kvfun.recurrent(2))
    before = (kvfun.append(caches[0], k, k), kvfun.advance(caches[1], recurrence, inputs)[1])
    turn = rounds.begin(before, 3)
    turn = (kvfun.append(turn[0], k, k), kvfun.advance(turn[1], recurrence, inputs)[1])
    after = rounds.rollback(turn, [1, 3])
    assert [kvfun.offsets(each) for each in after] == [(5, 7), (5, 7)]


# -- padding --------------------------------------------------------------------------------------


def test_what_remains_of_padding_is_counted_down_across_blocks():
    cache = kvfun.prepare(kvfun.recurrent(3), [9, 9, 9], left_padding=[4, 0, 6])
    seen = []
    for _ in range(3):
        cache = conv(cache, tokens=3)
        seen.append(kvfun.offsets(cache))
    assert seen == [(0, 3, 0), (2, 6, 0), (5, 9, 3)]
    assert kvfun.finalize(cache).ahead is None


@pytest.mark.parametrize(
    ("lengths", "left"),
    [([1], None), ([1, 2], [0]), ([1, -1], None), ([1, True], None), ([1, 2], [2, 0])],
)
def test_padding_that_cannot_be(lengths, left):
    with pytest.raises(ShapeError):
        kvfun.prepare(kvfun.recurrent(2), lengths, left_padding=left)


def test_rows_within_a_padded_block_join_only_such():
    inside = kvfun.prepare(kvfun.recurrent(1), [3])
    with pytest.raises(RoundError, match="finalize"):
        kvfun.concat([inside, kvfun.recurrent(1)])
    both = kvfun.concat([inside, kvfun.prepare(kvfun.recurrent(1), [1])])
    assert kvfun.offsets(conv(both, tokens=3)) == (3, 1)


# -- errors ---------------------------------------------------------------------------------------


def test_inputs_that_do_not_fit():
    cache = conv(kvfun.recurrent(2))
    x = mx.ones((2, 3, 8))
    for inputs, error, said in (
        ({}, ShapeError, "at least one input"),
        ({"x": [1]}, DTypeError, "list"),
        ({"x": mx.ones(3)}, ShapeError, "tokens"),
        ({"x": x, "y": mx.ones((2, 4))}, ShapeError, "alike"),
        ({"x": x[:, :0]}, ShapeError, "at least one token"),
    ):
        with pytest.raises(error, match=said):
            kvfun.advance(cache, CONV, inputs)
    with pytest.raises(ShapeError, match="recurrence"):
        kvfun.advance(cache, ShortConv(mx.ones((8, 3))), {"x": x})
    recurrence, inputs = RECURRENCES["mamba2"](mx.random.key(0), 2, 3, mx.float32)
    with pytest.raises(ShapeError, match="recurrence"):
        kvfun.advance(cache, recurrence, inputs)
    with pytest.raises(TypeError, match="advance knows no KV"):
        kvfun.advance(kvfun.empty("plain"), CONV, {"x": x})
    with pytest.raises(ShapeError, match="rows"):
        kvfun.recurrent(0)


def test_caches_that_cannot_be_one_batch():
    one = conv(kvfun.recurrent(1))
    _, other = kvfun.advance(
        kvfun.recurrent(1), ShortConv(mx.ones((4, 4))), {"x": mx.ones((1, 2, 4))}
    )
    with pytest.raises(ShapeError, match="batch states"):
        kvfun.concat([one, other])
    with pytest.raises(DTypeError, match="kept in"):
        kvfun.concat([one, kvfun.convert(one, "bf16")])


def test_tokens_that_nobody_counted_are_not_made_up():
    cache = kvfun.replace(conv(kvfun.recurrent(2)), offsets=None)
    assert kvfun.batch_size(kvfun.take(cache, [1])) == 1
    with pytest.raises(UnsupportedError, match="does not say"):
        kvfun.offsets(cache)


# -- memory ---------------------------------------------------------------------------------------


def _settled():
    gc.collect()
    mx.synchronize()
    mx.clear_cache()
    return mx.get_active_memory()


@pytest.mark.parametrize("name", ["gated delta", "mamba2"])
def test_ten_thousand_steps_leave_no_graph_and_no_memory(name):
    recurrence, inputs = RECURRENCES[name](mx.random.key(0), 1, 1, mx.float32)
    mx.eval(tree.leaves(recurrence), inputs)
    cache = kvfun.recurrent()
    sizes = []
    for step in range(10_000):
        out, cache = kvfun.advance(cache, recurrence, inputs)
        mx.eval(out)
        if step in (100, 9_999):
            sizes.append(_settled())
            graph = _Dot()
            mx.export_to_dot(graph, *tree.leaves(cache))
            sizes.append(graph.edges())
    assert kvfun.offsets(cache) == (10_000,)
    assert sizes[2] <= sizes[0] + 4096  # a leak of a number a step would be 40,000
    assert sizes[3] == sizes[1]


class _Dot:
    def __init__(self):
        self.text = ""

    def write(self, text):
        self.text += text

    def edges(self):
        return self.text.count("->")


@given(batch=st.integers(2, 8), tokens=st.integers(1, 300))
def test_a_row_taken_out_holds_one_rows_bytes(batch, tokens):
    recurrence, inputs = RECURRENCES["gated delta"](mx.random.key(1), batch, 1, mx.float32)
    block = {n: mx.repeat(x, tokens, axis=1) for n, x in inputs.items()}
    cache = kvfun.advance(kvfun.recurrent(batch), recurrence, block)[1]
    mx.eval(tree.leaves(cache))
    before = _settled()
    row = kvfun.take(cache, [batch - 1])
    mx.eval(tree.leaves(row))
    assert kvfun.nbytes(row) == kvfun.nbytes(cache) // batch
    del block
    held = kvfun.nbytes(cache)
    del cache
    assert _settled() - (before - held) <= kvfun.nbytes(row) + 4096


def test_a_state_keeps_nothing_of_the_block_alive():
    x = mx.random.normal((1, 4096, 8))
    mx.eval(x)
    cache = kvfun.advance(kvfun.recurrent(), CONV, {"x": x})[1]
    mx.eval(tree.leaves(cache))
    before = _settled()
    del x
    assert before - _settled() >= 4096 * 8 * 4
