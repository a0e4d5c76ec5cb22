"""What a speculative round costs beside the append that it makes.

    python -m bench.rounds [--columns 8192] [--specs bf16,kv4] [--drafts 4] [--runs 200]
                           [--json FILE]

Ways to put a block of ``drafts + 1`` tokens into a cache, evaluated; all run in one process and
take turns. ``append``: appended, and kept. ``append, rollback``: appended, and two tokens taken
back. ``round``: begun, appended, and two tokens taken back. ``tree``: the same block as a tree, of
which a path is kept. The ratio is that to ``append``, of medians. ``host`` is Python and graph
building.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

import kvfun
from bench import _timing
from bench._timing import DTYPES, HEAD_DIM, KV_HEADS
from kvfun import rounds, tree

POLICIES: dict[str, dict[str, Any]] = {"": {}, ":window": {"window": 4096, "reserve": 8}}


class Side:
    """One way, on a cache of its own, which is as long after every lap as before."""

    def __init__(self, cache: Any, step: Callable[[Any, mx.array], Any], block: mx.array):
        self.cache, self.step, self.block = cache, step, block

    def __call__(self) -> list[mx.array]:
        cache, self.cache = self.cache, None  # so that the block is written in place
        self.cache = self.step(cache, self.block)
        return tree.leaves(self.cache)

    def shorten(self, offset: int) -> None:
        """Not measured: take back what a lap kept."""
        extra = kvfun.offsets(self.cache)[0] - offset
        self.cache = kvfun.rollback(self.cache, extra)


def appended(cache: Any, block: mx.array) -> Any:
    return kvfun.append(cache, block, block)


def taken_back(cache: Any, block: mx.array) -> Any:
    return kvfun.rollback(kvfun.append(cache, block, block), 2)


def a_round(cache: Any, block: mx.array) -> Any:
    tokens = block.shape[2]
    turn = rounds.begin(cache, tokens - 1)
    return rounds.rollback(kvfun.append(turn, block, block), tokens - 2)


def a_tree(cache: Any, block: mx.array) -> Any:
    tokens = block.shape[2]
    turn = rounds.begin_tree(cache, range(-1, tokens - 1))
    return rounds.select(kvfun.append(turn, block, block), range(tokens - 2))


WAYS = {"append": appended, "append, rollback": taken_back, "round": a_round, "tree": a_tree}


def rows(specs: Sequence[str], columns: int, drafts: int, runs: int) -> list[dict[str, Any]]:
    """One row a cache and way."""
    found = []
    block = mx.random.normal((1, KV_HEADS, drafts + 1, HEAD_DIM)).astype(DTYPES["bf16"])
    past = mx.random.normal((1, KV_HEADS, columns, HEAD_DIM)).astype(DTYPES["bf16"])
    mx.eval(block, past)
    for spec in specs:
        for label, policy in POLICIES.items():
            sides = {}
            for name, step in WAYS.items():
                cache = kvfun.append(kvfun.empty(spec, raw_sinks=0, **policy), past, past)
                mx.eval(tree.leaves(cache))
                sides[name] = Side(cache, step, block)
            laps: dict[str, list[_timing.Lap]] = {name: [] for name in sides}
            for name, one in _timing.turns(sides, runs):
                laps[name].append(one)
                sides[name].shorten(columns)
            medians = {name: _timing.median(of) for name, of in laps.items()}
            for name, lap in medians.items():
                found.append(
                    {
                        "cache": f"{spec}{label}",
                        "way": name,
                        "host_us": lap.host * 1e6,
                        "total_us": lap.total * 1e6,
                        "ratio": lap.total / medians["append"].total,
                    }
                )
    return found


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Run the bench."""
    parser = _timing.parser(__doc__)
    parser.add_argument("--columns", type=int, default=8192)
    parser.add_argument("--specs", default="bf16,kv4")
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--runs", type=int, default=200)
    asked = parser.parse_args(arguments)
    before = _timing.machine()
    found = rows(asked.specs.split(","), asked.columns, asked.drafts, asked.runs)
    for row in found:
        print(
            f"{row['cache']:14} {row['way']:17} host {row['host_us']:7.1f} us   "
            f"all {row['total_us']:7.1f} us   {row['ratio']:.2f}"
        )
    _timing.write(asked.json, found, before)
    return found


if __name__ == "__main__":
    main()
