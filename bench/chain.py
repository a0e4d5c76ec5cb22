"""A token appended and attended to, in caches whose newest or first tokens stay raw.

    python -m bench.chain [--columns 8192,32768] [--specs kv4,kv4:residual=64,bf16] [--steps 256]
                          [--json FILE]

All caches run in one process and take turns. ``step`` is a token's append + attention, evaluated;
``host`` the part of it before the evaluation (Python and graph building). In a cache with a
residual window one step in ``block`` also encodes a block: ``seal`` is such a step, ``amortized``
what a token costs on average. The ratio is that of ``amortized`` to mlx-lm's cache of as many bits;
below 1 kvfun is faster. ``held`` is all bytes held, raw tokens and spare columns included.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_lm.models.cache import KVCache, QuantizedKVCache

import kvfun
from bench import _timing
from bench._timing import DTYPES, HEAD_DIM, HEADS, KV_HEADS, Lap
from bench.decode import Functional, MlxLm, fill
from kvfun.caches import Chain
from kvfun.cli import _specs

SPECS = "kv4,kv4:residual=64,kv4:residual=64:raw_sinks=4,bf16"
BASELINES = {"mlx-lm KVCache": KVCache, "mlx-lm kv4": lambda: QuantizedKVCache(64, 4)}


class Aged(Functional):
    """kvfun's verbs over any cache, and whether the last append encoded a block."""

    def __init__(self, cache):
        super().__init__(cache)
        self._encoded = self.encoded()

    def encoded(self) -> int:
        """Tokens of the segment that takes the oldest ones of the tail."""
        cache = self.cache
        return kvfun.offsets(cache.segments[-1])[0] if _block(cache) > 1 else 0

    def sealed(self) -> bool:
        """Whether a block was encoded since this was asked last."""
        before, self._encoded = self._encoded, self.encoded()
        return self._encoded != before


@dataclass
class Laps:
    """The steps of one cache: ordinary ones, and those that also encoded a block."""

    steps: list[Lap] = field(default_factory=list)
    seals: list[Lap] = field(default_factory=list)

    def row(self, block: int) -> dict[str, float | None]:
        step = _timing.median(self.steps)
        seal = _timing.median(self.seals) if self.seals else None
        extra = (seal.total - step.total) / block if seal else 0.0
        return {
            "host_us": step.host * 1e6,
            "step_us": step.total * 1e6,
            "seal_us": seal and seal.total * 1e6,
            "amortized_us": (step.total + extra) * 1e6,
        }


def contenders(written: Sequence[str]) -> dict[str, Any]:
    """Every cache by name, still empty."""
    ours = {
        cache.spec: Aged(kvfun.empty(cache.codec, **cache.options))
        for cache in map(_specs.parse, written)
    }
    return ours | {name: MlxLm(make()) for name, make in BASELINES.items()}


def measured(sides: Mapping[str, Any], columns: int, steps: int, dtype: str) -> dict[str, Laps]:
    """The laps of all sides from ``columns`` tokens on."""
    q, k = (
        _timing.normal(1, heads, 1, HEAD_DIM, dtype=DTYPES[dtype]) for heads in (HEADS, KV_HEADS)
    )
    for side in sides.values():
        fill(side, columns, DTYPES[dtype])
    builds = {name: lambda side=side: side.step(q, k, k) for name, side in sides.items()}
    for name in sides:
        _timing.lap(builds[name])
        _sealed(sides[name])
    laps = {name: Laps() for name in sides}
    for name, lap in _timing.turns(builds, steps):
        (laps[name].seals if _sealed(sides[name]) else laps[name].steps).append(lap)
    return laps


def _sealed(side: Any) -> bool:
    return isinstance(side, Aged) and side.sealed()


def counterpart(name: str) -> str:
    """The cache of mlx-lm that a cache is compared with."""
    return "mlx-lm KVCache" if name.partition(":")[0] in ("plain", *DTYPES) else "mlx-lm kv4"


def rows(columns: int, written: Sequence[str], steps: int, dtype: str) -> Iterator[dict]:
    """One row a cache."""
    sides = contenders(written)
    laps = measured(sides, columns, steps, dtype)
    found = {}
    for name, side in sides.items():
        found[name] = {"cache": name, "columns": columns, "dtype": dtype, "held": side.nbytes}
        found[name] |= laps[name].row(_block(side.cache))
    for name, row in found.items():
        theirs = found[name if name in BASELINES else counterpart(name)]["amortized_us"]
        yield row | {"ratio": row["amortized_us"] / theirs}


def _block(cache: Any) -> int:
    """In how many steps a block is encoded once."""
    return cache.ageing.block if isinstance(cache, Chain) and cache.ageing is not None else 1


def line(row: Mapping[str, Any]) -> str:
    """A row as text."""
    seal = "" if row["seal_us"] is None else f"{row['seal_us']:.0f}"
    return (
        f"{row['cache']:28}{row['columns']:7}  host {row['host_us']:7.1f}  step "
        f"{row['step_us']:9.1f}  seal {seal:>7}  amortized {row['amortized_us']:9.1f} us  "
        f"ratio {row['ratio']:5.2f}  held {row['held'] / 1e6:7.2f} MB"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = _timing.parser(__doc__)
    parser.add_argument("--columns", type=_timing.integers, default=[8192, 32768])
    parser.add_argument("--specs", type=lambda text: text.split(","), default=SPECS.split(","))
    parser.add_argument("--steps", type=int, default=256)
    parser.add_argument("--dtype", choices=list(DTYPES), default="bf16")
    chosen = parser.parse_args(arguments)
    before, found = _timing.machine(), []
    for columns in chosen.columns:
        for row in rows(columns, chosen.specs, chosen.steps, chosen.dtype):
            found.append(row)
            print(line(row), flush=True)
    _timing.write(chosen.json, found, before)


if __name__ == "__main__":
    main()
