"""Queries over encoded planes, and what attention over them must be; the sets and codecs to try."""

from itertools import product

import mlx.core as mx
import numpy as np

from kvfun.codecs import BITS, DTYPES, MODES, Codec
from kvfun.kernels import (
    ALL_TILED,
    COMPOSED,
    FUSED,
    TILED,
    TILED_CAUSAL,
    UNFUSED,
    _scores,
    _tiled,
)

from . import dense

SETS = {
    "fused": FUSED,
    "unfused": UNFUSED,
    "tiled": TILED,
    "tiled causal": TILED_CAUSAL,
    "all tiled": ALL_TILED,
    "composed": COMPOSED,
}
AFFINE = [f"kv{bits}" for bits in BITS]
SPECS = ["f32", "bf16", *AFFINE, "kv4-g32", "k8v4", "bf16+kv4", "kv4+bf16", "f16+kv3-g32"]
SPECS += [*MODES, "mxfp8+mxfp4", "bf16+nvfp4", "kv4+mxfp8", "kv5+kv3-g32"]
PAIRS = [(name, spec) for name, spec in product(SETS, SPECS) if name != "fused" or spec in DTYPES]
FLOATS = (mx.float32, mx.bfloat16, mx.float16)


def tiles_of(monkeypatch, columns: int, queries: int) -> None:
    monkeypatch.setattr(_scores, "TILE", columns)
    monkeypatch.setattr(_scores, "TILE_NUMBERS", 0)
    monkeypatch.setattr(_tiled, "BLOCK", queries)
    monkeypatch.setattr(_tiled, "FEW", 0)


def numbers(rng, *shape: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.array(rng.normal(size=shape).astype(np.float32)).astype(dtype)


def wide(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32), np.float64)


def raw(x: mx.array) -> bytes:
    return bytes(memoryview(mx.contiguous(x).view(mx.uint8)))


class Case:
    """Queries and encoded planes, and what attention over them must be."""

    oracle = True

    def __init__(
        self, spec, *, batch=1, kv_heads=2, group=2, length=1, columns=9, dims=(64, 64), seed=0,
        dtype=mx.float32, stored=mx.float32, scale=None, sinks=False, mask="none",
    ):  # fmt: skip
        self.rng = rng = np.random.default_rng(seed)
        self.codec = Codec.of(spec)
        self.keys = self.codec.keys.encode(
            numbers(rng, batch, kv_heads, columns, dims[0]).astype(stored)
        )
        self.values = self.codec.values.encode(
            numbers(rng, batch, kv_heads, columns, dims[1]).astype(stored)
        )
        self.queries = numbers(rng, batch, kv_heads * group, length, dims[0], dtype=dtype)
        self.scale = dims[0] ** -0.5 if scale is None else scale
        self.mask = dense.MASKS[mask](rng, batch, kv_heads, group, length, columns)
        self.sinks = numbers(rng, kv_heads * group) if sinks else None
        if self.oracle:
            self.k = dense.decoded(self.codec.keys, self.keys)
            self.v = dense.decoded(self.codec.values, self.values)

    def run(self, kernel):
        return kernel(
            self.queries, self.keys, self.values, self.codec,
            scale=self.scale, mask=self.mask, sinks=self.sinks,
        )  # fmt: skip

    def check(self, kernel, arithmetic: mx.Dtype = mx.float32) -> None:
        """The kernel's result is that of float64, within what rounding allows."""
        out, lse = result if isinstance(result := self.run(kernel), tuple) else (result, None)
        assert out.shape == (*self.queries.shape[:3], self.v.shape[3])
        assert out.dtype == (self.queries.dtype if lse is None else mx.float32)
        what = self.queries, self.k, self.v, self.scale
        wanted, sums = dense.partial(*what, self.mask, self.sinks)
        allowed = dense.allowed(*what, arithmetic, out.dtype)
        assert np.abs(wide(out) - wanted).max() <= allowed
        if lse is not None:
            assert lse.dtype == mx.float32
            assert lse.shape == self.queries.shape[:3]
            limit = dense.allowed_lse(self.queries, self.k, self.scale, arithmetic, sums)
            assert (np.abs(wide(lse) - sums) <= limit).all()


def peak(case: Case, kernel) -> int:
    """The most bytes that a read takes at once, beyond what is there."""
    mx.eval(case.queries, case.keys, case.values)
    mx.synchronize()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(case.run(kernel))
    mx.synchronize()
    return mx.get_peak_memory() - before
