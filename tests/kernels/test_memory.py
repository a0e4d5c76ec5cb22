"""What a read allocates, exactly: mx.get_peak_memory counts every buffer."""

from functools import cache

import mlx.core as mx
import pytest

from kvfun.codecs import Codec
from kvfun.kernels import COMPOSED, FUSED, TILED, UNFUSED, _scores, kernels_for
from kvfun.kernels._fused import fused

from .cases import SETS, Case, peak

DIMS = {"kv_heads": 1, "group": 1, "dims": (32, 32), "mask": "causal"}


class Chunk(Case):
    oracle = False


@cache
def total(spec: str, name: str, length: int, columns: int, phase: str = "window") -> int:
    """Bytes of a cache of one head of 32 numbers, and of reading a chunk at its end."""
    bf16 = {"dtype": mx.bfloat16, "stored": mx.bfloat16}
    case = Chunk(spec, length=length, columns=columns, **DIMS, **bf16)
    sets = {"unfused": UNFUSED, "composed": COMPOSED, "default": kernels_for(Codec.of(spec))}
    stored = sum(plane.nbytes for plane in case.keys + case.values)
    return stored + peak(case, sets[name][phase])


def test_2048_tokens_over_32768_columns_of_4_bits():
    """At most 0.35 of bf16 with all scores at once, and less than bf16 by tiles.

    MLX's stock path takes 1.5 to 1.8 times as much as bf16.
    """
    chunk = 2048, 32768
    taken, whole = total("kv4-g32", "default", *chunk), total("bf16", "unfused", *chunk)
    assert whole > 2048 * 32768 * 4
    assert taken <= 0.35 * whole
    assert taken < total("bf16", "default", *chunk)


@pytest.mark.parametrize("phase", ["window", "partial"])
@pytest.mark.parametrize("name", ["default", "composed"])
@pytest.mark.parametrize("spec", ["kv4-g32", "kv3-g32", "k8v4-g32", "mxfp4", "mxfp8"])
def test_shorter_chunks_of_other_codecs(spec, name, phase):
    chunk = 600, 8192
    taken = total(spec, name, *chunk, phase)
    assert taken <= 0.35 * total("bf16", "unfused", *chunk)
    assert taken < total("bf16", name, *chunk, phase)


def windowed(spec: str, columns: int, dtype: mx.Dtype = mx.bfloat16, length: int = 512) -> Case:
    return Chunk(
        spec, kv_heads=2, group=4, length=length, columns=columns, dims=(32, 32), mask="causal",
        dtype=dtype, stored=dtype,
    )  # fmt: skip


@pytest.mark.parametrize("spec", ["kv4-g32", "kv3-g32", "k8v4-g32"])
def test_a_prefill_over_a_quantized_cache_takes_less_memory_than_over_bf16(spec):
    """Scores of 8 heads, 512 queries and 8192 columns are 128 MiB in float32, 64 in bfloat16."""
    kernel = kernels_for(Codec.of(spec))["window"]
    whole = 8 * 512 * 8192 * 2
    plain = windowed("bf16", 8192)
    quantized = windowed(spec, 8192)
    assert peak(quantized, kernel) < whole // 2 < whole < peak(plain, fused)
    stored, raw = (sum(p.nbytes for p in case.keys + case.values) for case in (quantized, plain))
    assert stored < raw / 1.7
    assert stored + peak(quantized, kernel) < raw + peak(plain, FUSED["window"])


def test_the_memory_of_a_window_does_not_grow_with_the_cache_or_the_block():
    short, long = (peak(windowed("kv4-g32", n, length=64), TILED["window"]) for n in (8192, 32768))
    assert long < 1.25 * short
    block = peak(windowed("kv4-g32", 2048, length=512), TILED["window"])
    blocks = peak(windowed("kv4-g32", 2048, length=2048), TILED["window"])
    results = 8 * 2048 * 32 * 4  # of all blocks, before they are joined
    assert blocks < 1.25 * block + 4 * results


@pytest.mark.parametrize("name", SETS)
def test_numbers_of_another_dtype_are_never_promoted_all_at_once(name, monkeypatch):
    """Eight heads of 16384 columns are 32 MiB in float32, for keys and again for values."""
    monkeypatch.setattr(_scores, "TILE_NUMBERS", 0)
    case = Case("bf16", kv_heads=8, group=1, columns=16384)
    assert peak(case, SETS[name]["decode"]) < 8 * 16384 * 64 * 4 // 2


def test_a_decode_over_a_quantized_cache_decodes_no_copy_of_it():
    case = Case("kv4-g32", kv_heads=2, columns=65536, dims=(32, 32), dtype=mx.bfloat16)
    decoded = 2 * 65536 * 32 * 4
    assert peak(case, kernels_for(case.codec)["decode"]) < decoded
