"""Batches under any operations, against the oracle: a state machine, and the real step."""

from __future__ import annotations

import contextlib

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvfun.geometry import Policy

from .oracle import Oracle, steps

MOST_ROWS = 4

fractions = st.lists(st.floats(0, 1), min_size=MOST_ROWS, max_size=MOST_ROWS)
row_numbers = st.lists(st.integers(0, MOST_ROWS - 1), min_size=1, max_size=MOST_ROWS)


def policies(most: int) -> st.SearchStrategy[Policy]:
    """Any policy of spans up to ``most``; built under the steps in force."""
    span = st.none() | st.integers(1, most)
    return st.builds(Policy, span, st.integers(0, most // 2), span, st.integers(0, most))


def rolled_back(oracle: Oracle, parts: list[float]) -> Oracle:
    """Every row gives back its own share of what it can."""
    most = oracle.geometry.max_rollback()
    most = most * len(oracle.lines) if len(most) == 1 else most
    return oracle.rollback(*(round(n * part) for n, part in zip(most, parts, strict=False)))


def taken(oracle: Oracle, rows: list[int]) -> Oracle:
    return oracle.take(*(row % len(oracle.lines) for row in rows))


class Batches(RuleBasedStateMachine):
    """One batch, and others that it may be joined with."""

    @initialize(
        data=st.data(),
        step=st.sampled_from([1, 3, 4, 8]),
        slack=st.integers(1, 8),
        paddings=st.lists(st.integers(0, 9), min_size=1, max_size=MOST_ROWS),
    )
    def start(self, data, step, slack, paddings):
        self.stack = contextlib.ExitStack()
        self.stack.enter_context(steps(step, slack))
        policy = data.draw(policies(6))
        self.batch = Oracle.empty(policy, paddings)
        self.others = [Oracle.empty(policy), Oracle.empty(policy, (5,))]

    def teardown(self):
        if hasattr(self, "stack"):
            self.stack.close()

    @rule(length=st.integers(0, 12))
    def append(self, length):
        self.batch = self.batch.append(length)

    @rule(lengths=st.lists(st.integers(1, 2), min_size=1, max_size=8))
    def decode(self, lengths):
        for length in lengths:
            self.batch = self.batch.append(length)

    @rule(parts=fractions)
    def rollback(self, parts):
        self.batch = rolled_back(self.batch, parts)

    @rule(length=st.integers(1, 6), parts=fractions)
    def speculate(self, length, parts):
        batch = self.batch.append(length).check()
        counts = [round(line.last * part) for line, part in zip(batch.lines, parts, strict=False)]
        self.batch = batch.rollback(*counts)

    @rule(rows=row_numbers)
    def take(self, rows):
        self.batch = taken(self.batch, rows)

    @rule(rows=row_numbers)
    def keep_for_later(self, rows):
        self.others.append(taken(self.batch, rows))

    @rule(data=st.data(), first=st.booleans())
    def concat(self, data, first):
        other = data.draw(st.sampled_from(self.others))
        if len(other.lines) + len(self.batch.lines) <= MOST_ROWS:
            self.batch = Oracle.concat([other, self.batch][:: 1 if first else -1])

    @rule(length=st.integers(1, 9))
    def join_a_new_row(self, length):
        if len(self.batch.lines) < MOST_ROWS:
            new = Oracle.empty(self.batch.policy).append(length)
            self.batch = Oracle.concat([self.batch, new])

    @invariant()
    def holds(self):
        if hasattr(self, "batch"):
            self.batch.check()


TestBatches = Batches.TestCase


# -- the real step --------------------------------------------------------------------------------

REAL = [
    Policy(),
    Policy(sinks=4),
    Policy(window=128, reserve=8),
    Policy(window=250, sinks=4),
    Policy(chunk=100, sinks=1, reserve=3),
    Policy(window=130, sinks=2, chunk=256, reserve=16),
]

operations = st.one_of(
    st.tuples(st.just("append"), st.sampled_from([1, 100, 255, 256, 257, 400])),
    st.tuples(st.just("rollback"), fractions),
    st.tuples(st.just("take"), row_numbers),
    st.tuples(st.just("join"), st.sampled_from([0, 1, 120])),
)


@given(
    policy=st.sampled_from(REAL),
    paddings=st.lists(st.sampled_from([0, 0, 1, 70]), min_size=1, max_size=3),
    actions=st.lists(operations, min_size=3, max_size=9),
)
def test_real_steps(policy, paddings, actions):
    oracle = Oracle.empty(policy, paddings)
    for name, argument in actions:
        if name == "append" and max(line.offset for line in oracle.lines) < 1200:
            oracle = oracle.append(argument)
        elif name == "rollback":
            oracle = rolled_back(oracle, argument)
        elif name == "take":
            oracle = taken(oracle, argument)
        elif name == "join" and len(oracle.lines) < 3:
            oracle = Oracle.concat([Oracle.empty(policy, (1,)).append(argument), oracle])
        oracle.check((1, 2))
    oracle.check()
