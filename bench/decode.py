"""One decode step of kvfun beside mlx-lm's, in one process, interleaved: ratios of medians.

    python -m bench.decode [--json FILE] [--sizes 1024,8192,32768] [--steps 200]

``update`` is append + fetch, evaluated (what a cache costs); ``host`` is the part of it before the
evaluation (Python and graph building); ``step`` is append + attention, evaluated. A ratio below 1
means that kvfun is faster. Machines are shared and noisy: compare ratios, not microseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache

import kvfun
from bench import _timing
from bench._timing import HEAD_DIM, HEADS, KV_HEADS, SCALE, Lap
from kvfun import planes
from kvfun.interop.mlx_lm import KVFunCache


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

    @property
    def nbytes(self) -> int:
        return kvfun.nbytes(self.cache)


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
        # A handle of its own: the quantized attention scales the one it is given in place.
        queries = queries[...]
        return scaled_dot_product_attention(queries, k, v, self.cache, SCALE, None)

    @property
    def nbytes(self) -> int:
        return self.cache.nbytes


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
    block = _timing.normal(1, KV_HEADS, size, HEAD_DIM, dtype=dtype)
    mx.eval(cache.update(block, block))
    token = block[:, :, :1]
    for _ in range(3):
        mx.eval(cache.update(token, token))


def measure(pair, size: int, dtype: mx.Dtype, steps: int) -> tuple[dict[str, Lap], dict[str, Lap]]:
    """The median laps of updates and of steps, kvfun's and mlx-lm's."""
    q, k = (_timing.normal(1, heads, 1, HEAD_DIM, dtype=dtype) for heads in (HEADS, KV_HEADS))
    sides = {"kvfun": pair[0](), "mlx-lm": pair[1]()}
    for side in sides.values():
        fill(side, size, dtype)
    updates = {name: lambda side=side: side.update(k, k) for name, side in sides.items()}
    attending = {name: lambda side=side: side.step(q, k, k) for name, side in sides.items()}
    return _timing.race(updates, steps), _timing.race(attending, max(8, steps // 4))


def run(sizes: Sequence[int], steps: int, dtype: mx.Dtype) -> list[dict]:
    """One row a case and size."""
    rows = []
    for size in sizes:
        for name, pair in cases(size).items():
            updates, attending = measure(pair, size, dtype, steps)
            row: dict = {"case": name, "tokens": size}
            row["host"] = _compared(*[updates[who].host for who in ("kvfun", "mlx-lm")])
            row["update"] = _compared(*[updates[who].total for who in ("kvfun", "mlx-lm")])
            row["step"] = _compared(*[attending[who].total for who in ("kvfun", "mlx-lm")])
            rows.append(row)
            print(line(row), flush=True)
    return rows


def _compared(ours: float, theirs: float) -> dict[str, float]:
    return {"kvfun_us": ours * 1e6, "mlx_lm_us": theirs * 1e6, "ratio": ours / theirs}


def line(row: dict) -> str:
    """A row as text."""
    parts = [
        f"{what} {row[what]['kvfun_us']:9.1f} / {row[what]['mlx_lm_us']:9.1f} us = "
        f"{row[what]['ratio']:5.2f}"
        for what in ("host", "update", "step")
    ]
    return f"{row['case']:26} {row['tokens']:6}  " + "   ".join(parts)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = _timing.parser(__doc__)
    parser.add_argument("--sizes", type=_timing.integers, default=[1024, 8192, 32768])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--dtype", default="bfloat16")
    chosen = parser.parse_args(arguments)
    before = _timing.machine()
    rows = run(chosen.sizes, chosen.steps, getattr(mx, chosen.dtype))
    _timing.write(chosen.json, rows, before)


if __name__ == "__main__":
    main()
