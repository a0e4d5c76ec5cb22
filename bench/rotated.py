"""Rotated codecs: decode beside the plain float32 read, and encoding beside a model's own prefill.

    python -m bench.rotated [--json FILE] [--columns 8192] [--specs rot-k4v4] [--no-model]

``decode``: one query a row over so many columns, 32 heads over 8; the speed is that of the plain
read over this one's, so 0.5 is half as fast. Keys are told a RoPE (``rope`` rows), or none. Every
kernel set for rotated codecs is shown. ``encode``: the keys and values of a chunk of SmolLM2 by all
of its 30 layers, as a share of the time in which the model reads that chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import mlx.core as mx

import kvfun
from bench import _timing
from bench._timing import HEAD_DIM, HEADS, KV_HEADS, SCALE
from kvfun import kernels, tree
from kvfun.codecs import Centred, Codec, Rope, with_rope

SPECS = (
    *("rot-k2v2", "rot-k3v3", "rot-k4v4", "rot-k5v4", "rot-k8v4", "rot-k4v4-g32"),
    *("turbo-k8v3", "turbo-k4v4"),
)
SETS = {
    "default": None,
    "deferred": kernels.DEFERRED,
    "dense": kernels.DENSE,
    "uncomposed": kernels.UNCOMPOSED,
}


def filled(codec: Codec, keys: mx.array, values: mx.array) -> Any:
    """A cache that holds them, evaluated."""
    cache = kvfun.append(kvfun.empty(codec), keys, values)
    mx.eval(tree.leaves(cache))
    return cache


def decode(specs: Sequence[str], columns: int, runs: int) -> list[dict[str, Any]]:
    """One query over a cache, beside the same over plain float32."""
    shape = (1, KV_HEADS, columns, HEAD_DIM)
    keys, values = [_timing.normal(*shape, dtype=mx.float32) for _ in range(2)]
    queries = _timing.normal(1, HEADS, 1, HEAD_DIM, dtype=mx.float32)
    plain = filled(Codec.of("f32"), keys, values)
    rows = []
    for spec in specs:
        codec = Codec.of(spec)
        ropes = [None, Rope.of(HEAD_DIM, 10000.0)] if isinstance(codec.keys, Centred) else [None]
        for rope in ropes:
            cache = filled(with_rope(codec, rope), keys, values)
            sides = {"plain": partial(kvfun.attend, plain, queries, scale=SCALE)}
            for name, chosen in SETS.items():
                sides[name] = partial(kvfun.attend, cache, queries, scale=SCALE, kernels=chosen)
            laps = _timing.race(sides, runs)
            for name in SETS:
                rows.append(
                    {
                        "part": "decode",
                        "spec": spec + (", rope" if rope else ""),
                        "set": name,
                        "columns": columns,
                        "ms": 1e3 * laps[name].total,
                        "plain_ms": 1e3 * laps["plain"].total,
                        "speed": laps["plain"].total / laps[name].total,
                    }
                )
    return rows


def encode(specs: Sequence[str], tokens: int, runs: int) -> list[dict[str, Any]]:
    """The keys and values of a chunk of a model, beside the time in which it reads the chunk."""
    from kvfun.cli import _machine, _matmul, _model, _rows
    from kvfun.interop.mlx_lm import attention, make_prompt_cache

    loaded = _model.load(None)
    model, shapes = loaded.model, _rows.layers(loaded.model)
    ids = mx.array([[7 + i * 7919 % 40_000 for i in range(tokens)]])

    def read() -> Any:
        cache = make_prompt_cache(model, "f32")
        with attention(model):
            hidden = model.model(ids, cache=cache)
        return hidden, [tree.leaves(each.record) for each in cache]

    slow = _machine.has_slow_blas(_machine.matmul_gflops())
    by_numpy = _matmul.by_numpy(model) if slow else None
    if by_numpy is not None:
        by_numpy.__enter__()
    try:
        prefill = _timing.race({"prefill": read}, max(1, runs // 3))["prefill"].total
    finally:
        if by_numpy is not None:
            by_numpy.__exit__(None, None, None)
    shape = shapes[0]
    keys = _timing.normal(1, shape.kv_heads, tokens, shape.key_dim, dtype=mx.float32)
    rows = []
    for spec in specs:
        codec = with_rope(Codec.of(spec), Rope.of(shape.key_dim, 100_000.0))
        known = filled(codec, keys[:, :, :64], keys[:, :, :64]).codec

        def layer(codec: Codec = known) -> Any:
            return codec.keys.encode(keys, (64,)), codec.values.encode(keys, (64,))

        seconds = len(shapes) * _timing.race({spec: layer}, runs)[spec].total
        rows.append(
            {
                "part": "encode",
                "spec": spec,
                "tokens": tokens,
                "seconds": seconds,
                "prefill_seconds": prefill,
                "share": seconds / prefill,
            }
        )
    return rows


def line(row: dict[str, Any]) -> str:
    """A row as text."""
    if row["part"] == "decode":
        return (
            f"decode {row['spec']:18} {row['set']:11} {row['columns']:6} columns "
            f"{row['ms']:8.1f} ms, plain {row['plain_ms']:6.1f} ms: {row['speed']:.2f} of its speed"
        )
    return (
        f"encode {row['spec']:18} {row['tokens']:6} tokens {row['seconds']:7.2f} s, "
        f"prefill {row['prefill_seconds']:6.2f} s: {row['share']:.1%}"
    )


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Run the bench."""
    parser = _timing.parser(__doc__)
    parser.add_argument("--specs", default=",".join(SPECS))
    parser.add_argument("--columns", type=_timing.integers, default=[8192])
    parser.add_argument("--tokens", type=int, default=2048, help="of the chunk that is encoded")
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--no-model", action="store_true", help="leave the encoding out")
    asked = parser.parse_args(arguments)
    specs, before, rows = asked.specs.split(","), _timing.machine(), []
    for columns in asked.columns:
        rows += decode(specs, columns, asked.runs)
    if not asked.no_model:
        rows += encode([s for s in specs if s.startswith("rot")], asked.tokens, asked.runs)
    for row in rows:
        print(line(row), flush=True)
    _timing.write(asked.json, rows, before)
    return rows


if __name__ == "__main__":
    main()
