"""What the benchmarks share: the shape they measure, sides that take turns, memory, the machine.

Machines are shared and noisy, so everything that is compared runs in one process, interleaved, and
only ratios of medians are worth reading.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import mlx.core as mx

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
SCALE = HEAD_DIM**-0.5
DTYPES = {"bf16": mx.bfloat16, "f16": mx.float16, "f32": mx.float32}

Build = Callable[[], Any]
"""Builds the graph of what is measured, and returns its arrays."""


class Lap(NamedTuple):
    """Seconds of one run: of Python, which builds the graph, and until everything is evaluated."""

    host: float
    total: float


def lap(build: Build) -> Lap:
    """One run; what it returns is dropped, so that the next one may write in place."""
    start = time.perf_counter()
    out = build()
    built = time.perf_counter()
    mx.eval(out)
    done = time.perf_counter()
    return Lap(built - start, done - start)


def turns(sides: Mapping[str, Build], runs: int) -> Iterator[tuple[str, Lap]]:
    """``runs`` laps of every side; they take turns, and each time another one begins."""
    names = list(sides)
    for turn in range(runs):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            yield name, lap(sides[name])


def race(sides: Mapping[str, Build], runs: int) -> dict[str, Lap]:
    """The median lap of every side."""
    laps: dict[str, list[Lap]] = {}
    for name, one in turns(sides, runs):
        laps.setdefault(name, []).append(one)
    return {name: median(of) for name, of in laps.items()}


def median(laps: Sequence[Lap]) -> Lap:
    return Lap(*[statistics.median(part) for part in zip(*laps, strict=True)])


def peak_bytes(build: Build) -> int:
    """The most memory that one run takes, above what is live before it; exact, not sampled."""
    mx.synchronize()
    mx.clear_cache()
    mx.reset_peak_memory()
    live = mx.get_active_memory()
    mx.eval(build())
    return mx.get_peak_memory() - live


def normal(*shape: int, dtype: mx.Dtype) -> mx.array:
    """Evaluated numbers to measure with."""
    numbers = mx.random.normal(shape).astype(dtype)
    mx.eval(numbers)
    return numbers


def integers(text: str) -> list[int]:
    """The type of a command line's list of integers."""
    return [int(part) for part in text.split(",")]


def names(known: Iterable[str]) -> Callable[[str], list[str]]:
    """The type of a command line's list of known names."""
    known = list(known)

    def parse(text: str) -> list[str]:
        unknown = [part for part in text.split(",") if part not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"no {', '.join(unknown)}; use {', '.join(known)}")
        return text.split(",")

    return parse


def parser(description: str | None) -> argparse.ArgumentParser:
    """A command line that can keep its rows."""
    made = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    made.add_argument("--json", help="write the rows there")
    return made


def machine() -> dict[str, Any]:
    """Where the numbers come from; others' load spoils them, so it is noted."""
    device = mx.default_device()
    return {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "load": os.getloadavg() if hasattr(os, "getloadavg") else None,
        "device": str(device),
        "device_name": mx.device_info(device).get("device_name", ""),
        "preloaded": os.environ.get("LD_PRELOAD", ""),
        **{name: _version(name) for name in ("mlx", "mlx-lm", "kvfun")},
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def write(path: str | None, rows: Sequence[Mapping[str, Any]], before: Mapping[str, Any]) -> None:
    """Keeps the rows, if somewhere, beside the machine as it was ``before``."""
    if path:
        with open(path, "w") as file:
            json.dump({"machine": before, "rows": rows}, file, indent=1)
