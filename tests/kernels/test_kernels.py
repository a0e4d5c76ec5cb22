"""Every kernel set is dense attention, under every mask, for every codec, shape and dtype."""

from itertools import product

import hypothesis.strategies as st
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given

import kvfun
from kvfun.codecs import BITS, Codec, Plain
from kvfun.errors import ShapeError
from kvfun.kernels import FUSED, PHASES, TILED, UNFUSED, _scores, _tiled, kernels_for
from kvfun.kernels._fused import fused

from . import dense

SETS = {"fused": FUSED, "unfused": UNFUSED, "tiled": TILED}
AFFINE = [f"kv{bits}" for bits in BITS]
SPECS = ["f32", "bf16", *AFFINE, "kv4-g32", "k8v4", "bf16+kv4", "kv4+bf16", "f16+kv3-g32"]
PAIRS = [(name, spec) for name, spec in product(SETS, SPECS) if name != "fused" or "kv" not in spec]
FLOATS = (mx.float32, mx.bfloat16, mx.float16)


@pytest.fixture
def small_tiles(monkeypatch):
    tiles_of(monkeypatch, 7, 5)


def tiles_of(monkeypatch, columns: int, queries: int) -> None:
    monkeypatch.setattr(_scores, "TILE", columns)
    monkeypatch.setattr(_scores, "TILE_NUMBERS", 0)
    monkeypatch.setattr(_tiled, "BLOCK", queries)


def numbers(rng, *shape: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.array(rng.normal(size=shape).astype(np.float32)).astype(dtype)


class Case:
    """Queries and encoded planes, and what attention over them must be."""

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
        self.k = dense.decoded(self.codec.keys, self.keys)
        self.v = dense.decoded(self.codec.values, self.values)

    def run(self, kernel) -> mx.array:
        return kernel(
            self.queries, self.keys, self.values, self.codec,
            scale=self.scale, mask=self.mask, sinks=self.sinks,
        )  # fmt: skip

    def check(self, kernel, arithmetic: mx.Dtype = mx.float32) -> None:
        out = self.run(kernel)
        assert out.dtype == self.queries.dtype
        assert out.shape == (*self.queries.shape[:3], self.v.shape[3])
        wanted = dense.attention(self.queries, self.k, self.v, self.scale, self.mask, self.sinks)
        error = np.abs(np.array(out.astype(mx.float32), np.float64) - wanted).max()
        assert error <= dense.allowed(self.queries, self.k, self.v, self.scale, arithmetic)


# -- masks, codecs, shapes ------------------------------------------------------------------------


@pytest.mark.parametrize("mask", dense.MASKS)
@pytest.mark.parametrize(
    ("name", "spec"),
    [("fused", "f32"), ("fused", "bf16"), ("unfused", "kv4"), ("tiled", "kv4"), ("tiled", "bf16")],
)
@pytest.mark.parametrize("group", [1, 3])
def test_masks(name, spec, mask, group, small_tiles):
    Case(spec, batch=2, group=group, length=6, columns=20, mask=mask).check(SETS[name]["window"])


@pytest.mark.parametrize(("name", "spec"), PAIRS)
@pytest.mark.parametrize("sinks", [False, True])
def test_codecs(name, spec, sinks, small_tiles):
    Case(spec, sinks=sinks).check(SETS[name]["decode"])
    case = Case(spec, batch=2, length=6, columns=20, mask="causal", sinks=sinks, dims=(64, 128))
    case.check(SETS[name]["window"])
    case = Case(spec, batch=2, length=6, columns=20, mask="rank 4, by row", sinks=sinks)
    case.check(SETS[name]["masked_window"])


@given(
    pair=st.sampled_from(PAIRS),
    batch=st.integers(1, 3),
    heads=st.sampled_from([(1, 1), (1, 8), (2, 2), (2, 4), (3, 3), (4, 1), (5, 1), (2, 3)]),
    sizes=st.tuples(st.integers(1, 70), st.integers(0, 70)),
    dims=st.sampled_from([(64, 64), (64, 128), (128, 64), (192, 128)]),
    mask=st.sampled_from(list(dense.MASKS)),
    sinks=st.booleans(),
    scale=st.sampled_from([None, 1.0, 0.1, -0.3]),
    tile=st.sampled_from([(3, 2), (8, 16), (64, 64), (256, 512)]),
    seed=st.integers(0, 99),
)
def test_any_shape(pair, batch, heads, sizes, dims, mask, sinks, scale, tile, seed):
    (name, spec), (kv_heads, group), (length, more) = pair, heads, sizes
    case = Case(
        spec, batch=batch, kv_heads=kv_heads, group=group, length=length, columns=length + more,
        dims=dims, mask=mask, sinks=sinks, scale=scale, seed=seed,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        tiles_of(patch, *tile)
        case.check(SETS[name]["window"])


@pytest.mark.parametrize("length", [*range(1, 12), 31, 32, 33, 63, 64, 65, 70])
@pytest.mark.parametrize(("name", "spec"), [("fused", "f32"), ("unfused", "kv8"), ("tiled", "kv4")])
def test_every_length_under_the_causal_mask(name, spec, length, small_tiles):
    case = Case(spec, length=length, columns=length + length % 5, mask="causal")
    case.check(SETS[name]["window"])


@pytest.mark.parametrize("columns", [255, 256, 257, 511, 512, 513, 1100])
@pytest.mark.parametrize("mask", ["none", "causal", "rank 2"])
def test_columns_about_the_edge_of_a_tile(columns, mask, monkeypatch):
    monkeypatch.setattr(_scores, "TILE_NUMBERS", 0)
    Case("kv4-g32", length=3, columns=columns, dims=(32, 32), mask=mask).check(TILED["window"])
    Case("bf16", columns=columns, dims=(32, 32)).check(UNFUSED["decode"])


@pytest.mark.parametrize("length", [511, 512, 513, 1030])
@pytest.mark.parametrize("mask", ["causal", "rank 4, by row", "one row"])
def test_queries_about_the_edge_of_a_block(length, mask):
    case = Case(
        "kv4-g32", kv_heads=1, group=1, length=length, columns=length + 3, dims=(32, 32), mask=mask
    )
    case.check(TILED["window"])


def test_a_causal_block_reads_no_column_that_it_does_not_see(monkeypatch):
    read = []
    decode = _scores.decode
    monkeypatch.setattr(
        _tiled,
        "decode",
        lambda c, planes, dtype: read.append(planes[0].shape[2]) or decode(c, planes, dtype),
    )
    tiles_of(monkeypatch, 100, 4)
    Case("kv4", length=12, columns=12, mask="causal").check(TILED["window"])
    assert read == [4, 4, 8, 8, 12, 12]


def test_tiles_are_larger_where_heads_and_queries_are_few():
    assert _scores.tile_columns(8 * 128) == 512
    assert _scores.tile_columns(3 * 64) == 2560
    assert _scores.tile_columns(32 * 512) == _scores.TILE == 256


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("name", ["unfused", "tiled"])
def test_padded_planes(name, bits, small_tiles):
    """Queries are filled up with zeros, whatever stands behind the stored numbers."""
    case = Case(f"kv{bits}-pad", length=3, columns=20, dims=(80, 72), mask="causal")
    case.queries = mx.pad(case.queries, [(0, 0)] * 3 + [(0, 48)])
    case.check(SETS[name]["window"])


# -- dtypes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("stored", FLOATS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("fused", "plain"),
        ("unfused", "kv4"),
        ("tiled", "kv4"),
        ("tiled", "plain"),
        ("unfused", "k8v4"),
        ("unfused", "plain+kv4"),
    ],
)
def test_results_come_in_the_dtype_of_the_queries(name, spec, dtype, stored, small_tiles):
    """Arithmetic on the CPU is float32, but for the fused kernel over numbers in its own dtype."""
    for length, mask in ((1, "none"), (6, "causal"), (6, "float rank 4"), (6, "rank 4, by row")):
        case = Case(
            spec,
            batch=2,
            length=length,
            columns=20,
            mask=mask,
            sinks=True,
            dtype=dtype,
            stored=stored,
            scale=0.7,
        )
        fused = name == "fused" and dtype == stored
        phase = "decode" if length == 1 else "window"
        case.check(SETS[name][phase], dtype if fused else mx.float32)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("spec", ["kv4", "plain", "plain+kv8"])
@pytest.mark.parametrize("name", ["unfused", "tiled"])
def test_products_in_the_dtype_of_the_queries_as_on_a_gpu(
    name, spec, dtype, small_tiles, monkeypatch
):
    monkeypatch.setattr(_tiled, "wide", lambda x: x)
    monkeypatch.setattr("kvfun.kernels._unfused.wide", lambda x: x)
    for length, mask in ((1, "none"), (6, "causal"), (6, "float rank 4")):
        case = Case(
            spec, length=length, columns=20, mask=mask, sinks=True, dtype=dtype, stored=dtype
        )
        case.check(SETS[name]["window"], dtype)


def test_only_the_cpu_computes_in_float32(monkeypatch):
    x = mx.zeros(1, mx.bfloat16)
    mx_device = mx.Device
    monkeypatch.setattr(mx, "default_device", lambda: mx_device(mx.gpu, 0))
    assert _scores.wide(x).dtype == mx.bfloat16
    monkeypatch.setattr(mx, "default_device", lambda: mx_device(mx.cpu, 0))
    assert _scores.wide(x).dtype == mx.float32


# -- what must not happen -------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("name", "spec"), [("fused", "plain"), ("fused", "bf16"), ("unfused", "kv4"), ("tiled", "kv4")]
)
def test_nothing_that_was_given_is_changed(name, spec, dtype):
    case = Case(spec, length=3, columns=9, mask="float rank 4", sinks=True, dtype=dtype, scale=0.5)
    given = [case.queries, *case.keys, *case.values, case.mask, case.sinks]
    mx.eval(given)
    before = [bytes(memoryview(mx.array(x).view(mx.uint8))) for x in given]
    mx.eval(case.run(SETS[name]["window"]))
    assert before == [bytes(memoryview(mx.array(x).view(mx.uint8))) for x in given]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("hidden", ["bool", "-inf", "lowest"])
@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("fused", "plain"),
        ("fused", "bf16"),
        ("unfused", "kv4"),
        ("unfused", "plain"),
        ("tiled", "kv4"),
        ("tiled", "plain"),
    ],
)
def test_a_query_that_sees_nothing_yields_finite_numbers(
    name, spec, hidden, sinks, dtype, small_tiles
):
    case = Case(spec, batch=2, length=6, columns=20, sinks=sinks, dtype=dtype, stored=dtype)
    seen = case.rng.random((2, 1, 6, 20)) < 0.5
    seen[..., 0] = True
    seen[0, :, 2] = seen[1, :, 0] = False
    if hidden == "bool":
        case.mask = mx.array(seen)
    else:
        low = -np.inf if hidden == "-inf" else mx.finfo(dtype).min
        case.mask = mx.array(np.where(seen, 0, low).astype(np.float32)).astype(dtype)
    out = np.array(case.run(SETS[name]["masked_window"]).astype(mx.float32))
    assert np.isfinite(out).all()
    wanted = dense.attention(case.queries, case.k, case.v, case.scale, mx.array(seen), case.sinks)
    full = np.broadcast_to(seen.any(-1)[..., None], out.shape)
    fused = name == "fused"
    limit = dense.allowed(case.queries, case.k, case.v, case.scale, dtype if fused else mx.float32)
    assert np.abs(out - wanted)[full].max() <= limit


@pytest.mark.parametrize("spec", ["f32", "bf16", "kv4", "kv3", "bf16+kv4"])
@pytest.mark.parametrize("policy", [{}, {"window": 5}, {"window": 5, "sinks": 2}, {"reserve": 3}])
@pytest.mark.parametrize("length", [1, 3])
def test_garbage_outside_the_columns_that_are_read_does_not_matter(spec, policy, length):
    rng = np.random.default_rng(0)
    cache = kvfun.empty(spec, **policy)
    for _ in range(7):
        block = numbers(rng, 1, 2, 3, 64)
        cache = kvfun.append(cache, block, -block)
    queries = numbers(rng, 1, 4, length, 64)
    phase = "decode" if length == 1 else "window"
    spans = cache.geometry.cover(length)

    def poisoned(planes):
        result = []
        for plane in planes:
            bad = mx.full(
                plane.shape, 2**32 - 1 if plane.dtype == mx.uint32 else mx.nan, plane.dtype
            )
            for start, stop in spans:
                bad[:, :, start:stop] = plane[:, :, start:stop]
            result.append(bad)
        return tuple(result)

    spoilt = kvfun.replace(cache, keys=poisoned(cache.keys), values=poisoned(cache.values))
    assert any(mx.isnan(p.astype(mx.float32)).any() for p in spoilt.keys)
    for kernels in (kernels_for(cache.codec), UNFUSED, TILED):
        a, b = (kvfun.attend(c, queries, phase=phase, kernels=kernels) for c in (cache, spoilt))
        assert mx.array_equal(a, b)


@pytest.mark.parametrize("name", ["unfused", "tiled"])
@pytest.mark.parametrize("shape", [(1, 3, 1, 9), (1, 2, 1, 9), (1, 1, 1, 1, 1, 9)])
def test_a_mask_of_other_heads_is_refused(name, shape):
    case = Case("kv4")
    case.mask = mx.ones(shape, mx.bool_)
    with pytest.raises(ShapeError, match=r"the mask \(1, [23]|at most 5 axes"):
        case.run(SETS[name]["masked_window"])


# -- the default set ------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", SPECS)
def test_every_codec_has_a_kernel_for_every_phase(spec):
    kernels = kernels_for(Codec.of(spec))
    assert set(PHASES) <= set(kernels)
    for phase in PHASES:
        Case(spec).check(kernels[phase])


def test_plain_numbers_are_read_by_the_fused_kernel():
    for spec in ("plain", "bf16", "f16", "f32", "bf16+f32"):
        assert kernels_for(Codec.of(spec)) is FUSED
    for spec in ("kv4", "k8v4", "bf16+kv4", "kv8+f16"):
        kernels = kernels_for(Codec.of(spec))
        assert kernels["decode"] is UNFUSED["decode"]
        assert kernels["window"] is kernels["masked_window"] is TILED["window"]


def test_tiles_are_decoded_where_packed_products_are_patchy(monkeypatch):
    """MLX's CUDA backend refuses many shapes of quantized products, at evaluation only."""
    gpu = mx.Device(mx.gpu, 0)
    monkeypatch.setattr(mx, "default_device", lambda: gpu)
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    assert kernels_for(Codec.of("kv4")) is TILED
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    assert kernels_for(Codec.of("kv4"))["decode"] is UNFUSED["decode"]


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_fused_set_is_bit_equal_to_mlx_where_the_device_computes_in_its_dtype(
    dtype, monkeypatch
):
    if dtype != mx.float32:  # as on a GPU; the CPU computes these in float32
        monkeypatch.setattr("kvfun.kernels._fused.working_dtype", lambda dtype: dtype)
    for length, mask in ((1, "none"), (6, "causal"), (6, "rank 4, by row")):
        case = Case(
            "plain", batch=2, length=length, columns=20, mask=mask, dtype=dtype, stored=dtype
        )
        wanted = mx.fast.scaled_dot_product_attention(
            case.queries, *case.keys, *case.values, scale=case.scale, mask=case.mask
        )
        assert mx.array_equal(case.run(FUSED["window"]), wanted)


# -- an own codec ---------------------------------------------------------------------------------


class Negated(Plain):
    """A codec that no kernel knows."""

    def encode(self, x, positions=None):
        return (-x, x[..., :1])

    def decode(self, planes):
        return -planes[0]


@pytest.mark.parametrize("name", ["unfused", "tiled"])
def test_a_codec_of_ones_own(name, small_tiles):
    codec = Codec(Negated(), Negated())
    for mask in ("none", "causal"):
        Case(codec, length=3, columns=20, mask=mask).check(SETS[name]["window"])


# -- memory ---------------------------------------------------------------------------------------


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


def windowed(spec: str, columns: int, dtype: mx.Dtype = mx.bfloat16, length: int = 512) -> Case:
    return Case(
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


@pytest.mark.parametrize("name", ["fused", "unfused", "tiled"])
def test_numbers_of_another_dtype_are_never_promoted_all_at_once(name, monkeypatch):
    """Eight heads of 16384 columns are 32 MiB in float32, for keys and again for values."""
    monkeypatch.setattr(_scores, "TILE_NUMBERS", 0)
    case = Case("bf16", kv_heads=8, group=1, columns=16384)
    assert peak(case, SETS[name]["decode"]) < 8 * 16384 * 64 * 4 // 2


def test_a_decode_over_a_quantized_cache_decodes_no_copy_of_it():
    case = Case("kv4-g32", kv_heads=2, columns=65536, dims=(32, 32), dtype=mx.bfloat16)
    decoded = 2 * 65536 * 32 * 4
    assert peak(case, kernels_for(case.codec)["decode"]) < decoded
