"""Attention over a filled cache beside mlx-lm's, in one process, interleaved: ratios of medians.

    python -m bench.attention [--parts decode,prefill,memory] [--columns 8192,32768]
                              [--bits 2,3,4,5,6,8] [--dtype bf16,f16] [--json FILE]

* ``decode``: one query over every codec, read by every kernel set that can;
* ``prefill``: a chunk of causal queries (``--queries 512,2048``) over ``--prefill-columns``;
* ``memory``: the exact peak of one chunk over the most columns, above what was live before it.

Affine codecs run against mlx-lm's ``quantized_scaled_dot_product_attention`` over as many bits,
plain numbers against its plain one (``mx.fast``). mlx-lm stores nothing in microscaled formats;
those run against as many affine bits. A ratio below 1 means that kvfun is faster.

On the CPU mlx-lm multiplies packed numbers in 16 bits so slowly that a long chunk takes it half an
hour: give ``--dtype f32``, and ``--heads 8,2``, for ``prefill`` and for ``--memory-of-mlx-lm``.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.base import (
    quantized_scaled_dot_product_attention,
    scaled_dot_product_attention,
)
from mlx_lm.models.cache import KVCache

import kvfun
from bench import _timing
from bench._timing import DTYPES, HEAD_DIM, HEADS, KV_HEADS, SCALE, Build
from kvfun import kernels
from kvfun.errors import SpecError

MICROSCALED = {"mxfp8": 8, "mxfp4": 4, "nvfp4": 4}
GROUP = 64
MLX_LM = "mlx-lm"
DEFAULT = "default"
PARTS = ("decode", "prefill", "memory")


@dataclass(frozen=True)
class Case:
    """What is read: so many queries over so many columns, stored by a codec."""

    spec: str
    dtype: str
    columns: int
    queries: int
    heads: tuple[int, int]

    @property
    def phase(self) -> str:
        return "decode" if self.queries == 1 else "window"

    @property
    def bits(self) -> int | None:
        """Bits of mlx-lm's counterpart; None for plain numbers."""
        if self.spec in DTYPES:
            return None
        return MICROSCALED.get(self.spec) or int(self.spec.removeprefix("kv"))


def kernel_sets() -> dict[str, Mapping | None]:
    """Every public kernel set by name; None is the one that kvfun chooses."""
    found = {name: getattr(kernels, name) for name in kernels.__all__}
    sets = {name: value for name, value in found.items() if isinstance(value, Mapping)}
    return {DEFAULT: None, **{name.lower().replace("_", "-"): s for name, s in sets.items()}}


def specs(bits: Sequence[int], dtype: str) -> list[str]:
    """Plain numbers, affine ones and those microscaled ones that this kvfun stores."""
    return [dtype, *(f"kv{n}" for n in bits), *filter(_is_known, MICROSCALED)]


def _is_known(spec: str) -> bool:
    try:
        kvfun.empty(spec)
    except SpecError:
        return False
    return True


def sides(case: Case, sets: Mapping[str, Mapping | None]) -> dict[str, Build]:
    """Attention by mlx-lm and by each kernel set, over the same numbers."""
    dtype, (heads, kv_heads) = DTYPES[case.dtype], case.heads
    q = _timing.normal(1, heads, case.queries, HEAD_DIM, dtype=dtype)
    k, v = (_timing.normal(1, kv_heads, case.columns, HEAD_DIM, dtype=dtype) for _ in "kv")
    cache = kvfun.append(kvfun.empty(case.spec), k, v)
    mx.eval(kvfun.fetch(cache))
    options = {"scale": SCALE, "phase": case.phase}

    def by_set(chosen: Mapping | None) -> Build:
        return lambda: kvfun.attend(cache, q, kernels=chosen, **options)

    ours = {name: by_set(chosen) for name, chosen in sets.items()}
    return {MLX_LM: _by_mlx_lm(case, q, k, v), **ours}


def _by_mlx_lm(case: Case, q: mx.array, k: mx.array, v: mx.array) -> Build:
    """Packed numbers are made here: its cache cannot store 5 or 6 bits of a head_dim of 128."""
    mask: Any = None if case.queries == 1 else "causal"
    bits = case.bits
    if bits is None:
        return lambda: scaled_dot_product_attention(q, k, v, KVCache(), SCALE, mask)
    keys, values = (mx.quantize(x, group_size=GROUP, bits=bits) for x in (k, v))
    mx.eval(keys, values)

    def build() -> mx.array:
        mine = copy.copy(q)  # it scales the queries that it is given in place
        return quantized_scaled_dot_product_attention(
            mine, keys, values, SCALE, mask, group_size=GROUP, bits=bits
        )

    return build


def runnable(builds: Mapping[str, Build]) -> tuple[dict[str, Build], dict[str, str]]:
    """Those that run at all, warmed up; and why the others do not."""
    good: dict[str, Build] = {}
    reasons: dict[str, str] = {}
    for name, build in builds.items():
        try:
            mx.eval(build())
        except (ValueError, RuntimeError, NotImplementedError) as error:
            reasons[name] = f"{type(error).__name__}: {error}"
        else:
            good[name] = build
    return good, reasons


def timed(part: str, case: Case, runs: int, sets: Mapping[str, Mapping | None]) -> Iterator[dict]:
    """One row a kernel set: microseconds, and the ratio to mlx-lm's."""
    good, reasons = runnable(sides(case, sets))
    laps = _timing.race(good, runs)
    theirs = laps[MLX_LM].total if MLX_LM in laps else None
    for name in sets:
        row = {"part": part, **vars(case), "set": name}
        if name in reasons:
            yield row | {"left_out": reasons[name]}
            continue
        ours = laps[name].total
        row |= {"kvfun_us": ours * 1e6, "mlx_lm_us": theirs and theirs * 1e6}
        yield row | {"ratio": theirs and ours / theirs}


def peaks(case: Case, sets: Mapping[str, Mapping | None], who: Sequence[str]) -> Iterator[dict]:
    """One row a side: the most memory above what was live."""
    for name, build in sides(case, sets).items():
        if name in who:
            peak = _timing.peak_bytes(build)
            yield {"part": "memory", **vars(case), "set": name, "peak_bytes": peak}


def rows(chosen) -> Iterator[dict]:
    """All rows of the parts that were chosen."""
    sets = kernel_sets()
    for dtype in chosen.dtype:
        if "decode" in chosen.parts:
            for columns in chosen.columns:
                for spec in specs(chosen.bits, dtype):
                    case = Case(spec, dtype, columns, 1, chosen.heads)
                    yield from timed("decode", case, chosen.runs, sets)
        if "prefill" in chosen.parts:
            for queries in chosen.queries:
                for spec in (dtype, *chosen.prefill_specs):
                    case = Case(spec, dtype, chosen.prefill_columns, queries, chosen.heads)
                    yield from timed("prefill", case, chosen.prefill_runs, sets)
        if "memory" in chosen.parts:
            yield from _memory(chosen, dtype, sets)


def _memory(chosen, dtype: str, sets: Mapping[str, Mapping | None]) -> Iterator[dict]:
    """A few bits by default, and plain numbers both by default and with all scores at once."""
    theirs = [MLX_LM] if chosen.memory_of_mlx_lm else []
    for spec, who in (("kv4", [DEFAULT]), (dtype, [DEFAULT, "unfused"])):
        case = Case(spec, dtype, max(chosen.columns), max(chosen.queries), chosen.heads)
        yield from peaks(case, sets, [*theirs, *who])


def line(row: Mapping[str, Any]) -> str:
    """A row as text."""
    head = (
        f"{row['part']:8}{row['dtype']:5}{row['spec']:6}{row['queries']:5} over "
        f"{row['columns']:6}  {row['set']:14}"
    )
    if "peak_bytes" in row:
        return f"{head} {row['peak_bytes'] / 1e6:12,.1f} MB"
    if "left_out" in row:
        return f"{head} -  {row['left_out']:.60}"
    theirs, ratio = row["mlx_lm_us"] or float("nan"), row["ratio"] or float("nan")
    return f"{head} {row['kvfun_us'] / 1e3:9.2f} / {theirs / 1e3:9.2f} ms = {ratio:6.3f}"


def _heads(text: str) -> tuple[int, int]:
    heads, kv_heads = _timing.integers(text)
    return heads, kv_heads


def main(arguments: Sequence[str] | None = None) -> None:
    parser = _timing.parser(__doc__)
    parser.add_argument("--parts", type=_timing.names(PARTS), default=list(PARTS))
    parser.add_argument("--columns", type=_timing.integers, default=[8192, 32768])
    parser.add_argument("--bits", type=_timing.integers, default=[2, 3, 4, 5, 6, 8])
    parser.add_argument("--dtype", type=_timing.names(DTYPES), default=["bf16", "f16"])
    parser.add_argument("--heads", type=_heads, default=(HEADS, KV_HEADS))
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--queries", type=_timing.integers, default=[512, 2048])
    parser.add_argument("--prefill-columns", type=int, default=8192)
    parser.add_argument("--prefill-specs", type=lambda text: text.split(","), default=["kv4"])
    parser.add_argument("--prefill-runs", type=int, default=3)
    parser.add_argument("--memory-of-mlx-lm", action="store_true", help="its peaks too")
    chosen = parser.parse_args(arguments)
    before, found = _timing.machine(), []
    for row in rows(chosen):
        found.append(row)
        print(line(row), flush=True)
    _timing.write(chosen.json, found, before)


if __name__ == "__main__":
    main()
