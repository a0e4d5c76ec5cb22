"""Every policy of a small alphabet under every short sequence of operations, against the oracle.

Buffers grow by four columns here and compact after four, so that three operations see growth,
compaction and a block that is longer than the buffer. States that no later operation can tell
apart are visited once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import product

import pytest

from kvfun.geometry import Policy

from .oracle import Oracle, steps

CHUNKS = (None, 1, 2, 3, 4)
WINDOWS = (None, 1, 2, 3, 4, 5)


def explore(starts: Iterable[Oracle], moves: Callable[[Oracle], Iterable[Oracle]], depth: int):
    """Check every state that at most ``depth`` operations reach."""
    seen, front = set(), list(starts)
    for level in range(depth + 1):
        fresh = []
        for oracle in front:
            key = oracle.key()
            if key not in seen:
                seen.add(key)
                fresh.append(oracle.check())
        if level < depth:
            front = [after for oracle in fresh for after in moves(oracle)]
    return len(seen)


def single_moves(oracle: Oracle) -> Iterator[Oracle]:
    for length in (1, 2, 3, 7):
        yield oracle.append(length)
    (most,) = oracle.geometry.max_rollback()
    for count in {1, most - 1, most}:
        if 0 < count <= most:
            yield oracle.rollback(count)


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("window", WINDOWS)
def test_one_row(window, chunk):
    bounded = window is not None or chunk is not None
    with steps(4, 4):
        for sinks, reserve in product(range(4), range(4) if bounded else (0,)):
            start = Oracle.empty(Policy(window, sinks, chunk, reserve))
            explore([start], single_moves, depth=3)


@pytest.mark.parametrize("padding", [1, 2, 5, 9])
@pytest.mark.parametrize(("window", "chunk"), [(None, None), (3, None), (None, 3), (2, 4)])
def test_one_padded_row(window, chunk, padding):
    with steps(4, 4):
        for sinks, reserve in product((0, 1, 3), (0, 2)):
            start = Oracle.empty(Policy(window, sinks, chunk, reserve), (padding,))
            explore([start], single_moves, depth=3)


@pytest.mark.parametrize(
    ("window", "sinks", "chunk", "reserve"),
    [(3, 0, None, 0), (2, 2, None, 1), (5, 1, None, 2), (None, 2, 3, 1), (4, 1, 3, 2)],
)
def test_one_row_for_longer(window, sinks, chunk, reserve):
    with steps(4, 4):
        explore([Oracle.empty(Policy(window, sinks, chunk, reserve))], single_moves, depth=5)


@pytest.mark.parametrize("block", [1, 2, 3, 5, 8, 13])
@pytest.mark.parametrize("window", [None, 1, 3, 8])
def test_ten_windows_stay_within_the_bound(window, block):
    with steps(4, 4):
        for sinks, chunk, reserve in product((0, 1, 3), (None, 5), (0, 3)):
            oracle = Oracle.empty(Policy(window, sinks, chunk, reserve))
            for _ in range(10 * max(window or 5, block) // block):
                oracle = oracle.append(block).check((1, block))


# -- batches --------------------------------------------------------------------------------------


def batch_moves(oracle: Oracle) -> Iterator[Oracle]:
    batch, most = len(oracle.lines), oracle.geometry.max_rollback()
    most = most * batch if len(most) == 1 else most
    yield oracle.append(1)
    yield oracle.append(3)
    yield oracle.append(6)
    for counts in {
        tuple(min(1, n) for n in most),
        most,
        (most[0], *[0] * (batch - 1)),
        (*[0] * (batch - 1), min(2, most[-1])),
    }:
        if any(counts):
            yield oracle.rollback(*counts)
    yield oracle.take(batch - 1)
    yield oracle.take(*reversed(range(batch)))
    if batch < 3:
        yield oracle.take(*range(batch), 0)
        yield Oracle.concat([oracle, Oracle.empty(oracle.policy, (2,))])
        yield Oracle.concat([Oracle.empty(oracle.policy), oracle])
        yield Oracle.concat([oracle, Oracle.empty(oracle.policy).append(2)])


BATCHES = [
    Policy(),
    Policy(sinks=2),
    Policy(window=1),
    Policy(window=3, reserve=1),
    Policy(window=3, sinks=2, reserve=2),
    Policy(window=2, sinks=3),
    Policy(chunk=3, sinks=1),
    Policy(window=4, sinks=1, chunk=3, reserve=2),
]


@pytest.mark.parametrize("policy", BATCHES, ids=repr)
@pytest.mark.parametrize("paddings", [(0, 0), (0, 2), (3, 1), (0, 8), (0, 0, 1)], ids=str)
def test_batches(policy, paddings):
    with steps(4, 4):
        policy = Policy(policy.window, policy.sinks, policy.chunk, policy.reserve)
        explore([Oracle.empty(policy, paddings)], batch_moves, depth=3)
