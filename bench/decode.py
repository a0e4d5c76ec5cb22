"""One decode step of kvfun beside mlx-lm's, in one process, interleaved: ratios of medians.

    python -m bench.decode [--json FILE] [--sizes 1024,8192,32768] [--steps 200]

``update`` is append + fetch, evaluated (what a cache costs); ``host`` is the part of it before the
evaluation (Python and graph building); ``step`` is append + attention, evaluated. A ratio below 1
means that kvfun is faster. Machines are shared and noisy: compare ratios, not microseconds.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version

import mlx.core as mx
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache

import kvfun
from kvfun import planes
from kvfun.interop.mlx_lm import KVFunCache

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
SCALE = HEAD_DIM**-0.5


class Functional:
    """kvfun's verbs, the value held in one variable."""

    def __init__(self, cache):
        self.cache = cache

    def update(self, keys, values):
        self.cache = kvfun.append(self.cache, keys, values)
        return kvfun.fetch(self.cache)

    def step(self, queries, keys, values):
        self.cache = kvfun.append(self.cache, keys, values)
        return kvfun.attend(self.cache, queries, scale=SCALE)


class Packed(Functional):
    """The same, with packed numbers handed out as mlx-lm's quantized cache does, not decoded."""

    def update(self, keys, values):
        self.cache = kvfun.append(self.cache, keys, values)
        spans = self.cache.geometry.spans()
        return planes.read(self.cache.keys, spans), planes.read(self.cache.values, spans)


class MlxLm:
    """Any cache that speaks mlx-lm's protocol, with mlx-lm's attention."""

    def __init__(self, cache):
        self.cache = cache

    def update(self, keys, values):
        return self.cache.update_and_fetch(keys, values)

    def step(self, queries, keys, values):
        k, v = self.cache.update_and_fetch(keys, values)
        return scaled_dot_product_attention(queries, k, v, self.cache, SCALE, None)


def cases(size: int) -> dict[str, tuple[Callable, Callable]]:
    """Name to (kvfun's cache, mlx-lm's cache), both still empty."""
    window = size
    return {
        "plain": (lambda: Functional(kvfun.empty("plain")), lambda: MlxLm(KVCache())),
        "plain, in mlx-lm's shell": (
            lambda: MlxLm(KVFunCache(kvfun.empty("plain"))),
            lambda: MlxLm(KVCache()),
        ),
        "kv4": (lambda: Packed(kvfun.empty("kv4")), lambda: MlxLm(QuantizedKVCache(64, 4))),
        "kv8": (lambda: Packed(kvfun.empty("kv8")), lambda: MlxLm(QuantizedKVCache(64, 8))),
        "window": (
            lambda: Functional(kvfun.empty("plain", window=window)),
            lambda: MlxLm(RotatingKVCache(window)),
        ),
        "window and 4 sinks": (
            lambda: Functional(kvfun.empty("plain", window=window - 4, sinks=4)),
            lambda: MlxLm(RotatingKVCache(window, keep=4)),
        ),
    }


def fill(cache, size: int, dtype: mx.Dtype) -> None:
    """``size`` tokens, then enough single ones that a window has wrapped."""
    block = mx.random.normal((1, KV_HEADS, size, HEAD_DIM)).astype(dtype)
    mx.eval(cache.update(block, block))
    token = block[:, :, :1]
    for _ in range(3):
        mx.eval(cache.update(token, token))


def measure(pair, size: int, dtype: mx.Dtype, steps: int) -> dict[str, list[float]]:
    """Seconds of every step, kvfun and mlx-lm taking turns, who begins alternating."""
    q, k = (mx.random.normal((1, h, 1, HEAD_DIM)).astype(dtype) for h in (HEADS, KV_HEADS))
    mx.eval(q, k)
    sides = {"kvfun": pair[0](), "mlx-lm": pair[1]()}
    for side in sides.values():
        fill(side, size, dtype)
    times: dict[str, list[float]] = {}
    order = list(sides)
    for turn in range(steps):
        for name in order if turn % 2 else reversed(order):
            start = time.perf_counter()
            out = sides[name].update(k, k)
            built = time.perf_counter()
            mx.eval(out)
            done = time.perf_counter()
            del out
            times.setdefault(f"{name} host", []).append(built - start)
            times.setdefault(f"{name} update", []).append(done - start)
    for turn in range(max(8, steps // 4)):
        for name in order if turn % 2 else reversed(order):
            start = time.perf_counter()
            mx.eval(sides[name].step(q, k, k))
            times.setdefault(f"{name} step", []).append(time.perf_counter() - start)
    return times


def run(sizes: list[int], steps: int, dtype: mx.Dtype) -> list[dict]:
    """One row a case and size."""
    rows = []
    for size in sizes:
        for name, pair in cases(size).items():
            times = measure(pair, size, dtype, steps)
            row: dict = {"case": name, "tokens": size}
            for what in ("host", "update", "step"):
                ours, theirs = (
                    statistics.median(times[f"{who} {what}"]) for who in ("kvfun", "mlx-lm")
                )
                row[what] = {"kvfun_us": ours * 1e6, "mlx_lm_us": theirs * 1e6}
                row[what]["ratio"] = ours / theirs
            rows.append(row)
            print(line(row), flush=True)
    return rows


def line(row: dict) -> str:
    """A row as text."""
    parts = [
        f"{what} {row[what]['kvfun_us']:9.1f} / {row[what]['mlx_lm_us']:9.1f} us = "
        f"{row[what]['ratio']:5.2f}"
        for what in ("host", "update", "step")
    ]
    return f"{row['case']:26} {row['tokens']:6}  " + "   ".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="write the rows there")
    parser.add_argument("--sizes", default="1024,8192,32768")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--dtype", default="bfloat16")
    arguments = parser.parse_args()
    sizes = [int(size) for size in arguments.sizes.split(",")]
    rows = run(sizes, arguments.steps, getattr(mx, arguments.dtype))
    if arguments.json:
        machine = {
            "python": platform.python_version(),
            "machine": platform.machine(),
            "device": str(mx.default_device()),
            **{name: version(name) for name in ("mlx", "mlx-lm", "kvfun")},
        }
        with open(arguments.json, "w") as file:
            json.dump({"machine": machine, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
