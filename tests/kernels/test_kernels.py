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
from kvfun.kernels import (
    ALL_TILED,
    COMPOSED,
    FUSED,
    PHASES,
    TILED,
    TILED_CAUSAL,
    UNFUSED,
    _scores,
    _tiled,
    kernels_for,
    multiplies_packed,
)

from . import dense
from .cases import FLOATS, PAIRS, SETS, SPECS, Case, numbers, raw, tiles_of

# -- masks, codecs, shapes ------------------------------------------------------------------------


@pytest.mark.parametrize("mask", dense.MASKS)
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("name", SETS)
def test_masks(name, phase, mask, small_tiles):
    length = 1 if phase == "decode" else 6
    for spec, group in (("f32" if name == "fused" else "kv4", 3), ("bf16", 1)):
        case = Case(spec, batch=2, group=group, length=length, columns=20, mask=mask)
        case.check(SETS[name][phase])


@pytest.mark.parametrize(("name", "spec"), PAIRS)
@pytest.mark.parametrize("sinks", [False, True])
def test_codecs(name, spec, sinks, small_tiles):
    kernels = SETS[name]
    one = {"sinks": sinks, "dims": (64, 128)}
    some = {**one, "batch": 2, "length": 6, "columns": 20}
    for phase in ("decode", "committed", "partial"):
        Case(spec, **one).check(kernels[phase])
    for phase in ("window", "committed", "partial"):
        Case(spec, mask="causal", **some).check(kernels[phase])
    for mask in ("rank 4, by row", "lazy by row"):
        Case(spec, mask=mask, **some).check(kernels["masked_window"])


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("group", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("name", SETS)
def test_groups_of_heads(name, group, phase, small_tiles):
    for kv_heads, spec in ((1, "k8v4"), (3, "f32")):
        for mask in ("causal", "rank 4, by row and head", "rank 5, by KV head"):
            Case(
                spec, kv_heads=kv_heads, group=group, length=1 if phase == "decode" else 3,
                columns=11, mask=mask, sinks=True,
            ).check(SETS[name][phase])  # fmt: skip


@given(
    pair=st.sampled_from(PAIRS),
    phase=st.sampled_from(PHASES),
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
def test_any_shape(pair, phase, batch, heads, sizes, dims, mask, sinks, scale, tile, seed):
    (name, spec), (kv_heads, group), (length, more) = pair, heads, sizes
    length = {"decode": 1, "committed": min(length, 8)}.get(phase, length)
    case = Case(
        spec, batch=batch, kv_heads=kv_heads, group=group, length=length, columns=length + more,
        dims=dims, mask=mask, sinks=sinks, scale=scale, seed=seed,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        tiles_of(patch, *tile)
        case.check(SETS[name][phase])


@pytest.mark.parametrize("length", [*range(1, 12), 31, 32, 33, 63, 64, 65, 70])
@pytest.mark.parametrize(
    ("name", "spec"),
    [("fused", "f32"), ("unfused", "kv8"), ("tiled", "kv4"), ("composed", "kv4"), ("fused", "kv4")],
)
def test_every_length_under_the_causal_mask(name, spec, length, small_tiles):
    case = Case(spec, length=length, columns=length + length % 5, mask="causal")
    for phase in ("window", "partial"):
        case.check(SETS[name][phase])


@pytest.mark.parametrize("columns", [255, 256, 257, 511, 512, 513, 1100])
@pytest.mark.parametrize("mask", ["none", "causal", "rank 2"])
def test_columns_about_the_edge_of_a_tile(columns, mask, monkeypatch):
    monkeypatch.setattr(_scores, "TILE_NUMBERS", 0)
    case = Case("kv4-g32", length=3, columns=columns, dims=(32, 32), mask=mask)
    case.check(TILED["window"])
    case.check(COMPOSED["window"])
    Case("bf16", columns=columns, dims=(32, 32)).check(UNFUSED["decode"])


@pytest.mark.parametrize("length", [511, 512, 513, 1030])
@pytest.mark.parametrize("mask", ["causal", "rank 4, by row", "one row", "lazy by row"])
def test_queries_about_the_edge_of_a_block(length, mask):
    case = Case(
        "kv4-g32", kv_heads=1, group=1, length=length, columns=length + 3, dims=(32, 32), mask=mask
    )
    case.check(TILED["window"])
    case.check(COMPOSED["partial"])


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
@pytest.mark.parametrize("name", ["unfused", "tiled", "composed"])
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
        ("all tiled", "kv4"),
        ("all tiled", "plain"),
        ("composed", "kv4"),
        ("composed", "plain"),
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
        case.check(SETS[name]["partial"])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("spec", ["kv4", "plain", "plain+kv8"])
@pytest.mark.parametrize("name", ["unfused", "all tiled", "composed"])
def test_products_in_the_dtype_of_the_queries_as_on_a_gpu(
    name, spec, dtype, small_tiles, monkeypatch
):
    monkeypatch.setattr(_tiled, "wide", lambda x: x)
    monkeypatch.setattr("kvfun.kernels._unfused.wide", lambda x: x)
    monkeypatch.setattr("kvfun.kernels._composed.wide", lambda x: x)
    for length, mask in ((1, "none"), (6, "causal"), (6, "float rank 4")):
        case = Case(
            spec, length=length, columns=20, mask=mask, sinks=True, dtype=dtype, stored=dtype
        )
        for phase in ("window", "committed", "partial"):
            case.check(SETS[name][phase], dtype)
        case.sinks = None
        case.check(SETS[name]["partial"], dtype)


def test_only_the_cpu_computes_in_float32(monkeypatch):
    x = mx.zeros(1, mx.bfloat16)
    mx_device = mx.Device
    monkeypatch.setattr(mx, "default_device", lambda: mx_device(mx.gpu, 0))
    assert _scores.wide(x).dtype == mx.bfloat16
    monkeypatch.setattr(mx, "default_device", lambda: mx_device(mx.cpu, 0))
    assert _scores.wide(x).dtype == mx.float32


# -- what must not happen -------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("spec", ["plain", "bf16", "kv4", "kv3"])
@pytest.mark.parametrize("name", SETS)
def test_nothing_that_was_given_is_changed(name, spec, dtype, small_tiles):
    for phase, mask in product(PHASES, ("float rank 4", "rank 2")):
        case = Case(
            spec, length=1 if phase == "decode" else 6, columns=9, mask=mask, sinks=True,
            dtype=dtype, stored=dtype, scale=0.5,
        )  # fmt: skip
        given = [case.queries, *case.keys, *case.values, case.mask, case.sinks]
        mx.eval(given)
        before = [raw(x) for x in given]
        mx.eval(case.run(SETS[name][phase]))
        assert before == [raw(x) for x in given]


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
        ("all tiled", "kv4"),
        ("all tiled", "plain"),
        ("composed", "kv4"),
        ("composed", "plain"),
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
    for kernels in (kernels_for(cache.codec), UNFUSED, ALL_TILED, COMPOSED):
        a, b = (kvfun.attend(c, queries, phase=phase, kernels=kernels) for c in (cache, spoilt))
        assert mx.array_equal(a, b)


@pytest.mark.parametrize("name", SETS)
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
    for spec in ("kv4", "k8v4", "bf16+kv4", "kv8+f16", "mxfp8"):
        kernels = kernels_for(Codec.of(spec))
        assert kernels["decode"] is UNFUSED["decode"]
        assert kernels["window"] is kernels["masked_window"] is ALL_TILED["window"]


@pytest.mark.parametrize("dtype", [None, *FLOATS])
def test_the_choice_is_a_function_of_codec_device_and_dtype(dtype, monkeypatch):
    """MLX's CUDA backend refuses many shapes of quantized products, at evaluation only."""
    cpu, gpu = mx.Device(mx.cpu, 0), mx.Device(mx.gpu, 0)
    for metal, on_gpu in ((False, COMPOSED), (True, TILED)):
        monkeypatch.setattr(mx.metal, "is_available", lambda metal=metal: metal)
        for default in (cpu, gpu):
            monkeypatch.setattr(mx, "default_device", lambda default=default: default)
            for device, wanted in (
                (cpu, TILED),
                (gpu, on_gpu),
                (None, TILED if default is cpu else on_gpu),
            ):
                assert kernels_for(Codec.of("kv4"), device, dtype) is wanted
                assert kernels_for(Codec.of("bf16"), device, dtype) is FUSED
                assert multiplies_packed(device) is (wanted is TILED)


@pytest.mark.parametrize("name", SETS)
def test_every_set_has_a_kernel_for_every_phase(name):
    assert set(SETS[name]) == set(PHASES)


def test_arrays_are_applied_to_all_scores_where_only_causal_windows_are_tiled(monkeypatch):
    calls = []
    monkeypatch.setattr(
        _tiled, "unfused", lambda *a, **k: calls.append(1) or UNFUSED["window"](*a, **k)
    )
    for mask, length, whole in (("causal", 6, 0), ("none", 6, 0), ("lazy by row", 6, 0),
                                ("rank 2", 6, 1), ("float rank 4", 6, 1)):  # fmt: skip
        calls.clear()
        Case("kv4", length=length, columns=20, mask=mask).check(TILED_CAUSAL["window"])
        assert len(calls) == whole
    assert TILED_CAUSAL["masked_window"] is UNFUSED["masked_window"]


def test_few_queries_are_read_at_once_by_a_partial_kernel_of_tiles():
    read = []
    kernel = _tiled.by_length(
        lambda *a, **k: read.append("few"), lambda *a, **k: read.append("many")
    )
    for group, length in ((1, 1), (32, 1), (4, 2), (1, 8), (4, 3), (1, 9)):
        Case("kv4", kv_heads=2, group=group, length=length, columns=20).run(kernel)
    assert read == ["few"] * 4 + ["many"] * 2


@pytest.mark.parametrize("mask", ["none", "causal", "rank 4, by row", "lazy by row"])
def test_a_tile_that_holds_all_is_read_by_the_fused_kernel_on_decoded_numbers(mask, monkeypatch):
    """Without a product of its own for a log-sum-exp."""
    case = Case("kv4", length=6, columns=20, mask=mask, sinks=True)
    array = case.mask(0, 6, 0, 20) if callable(case.mask) else case.mask
    wanted = mx.fast.scaled_dot_product_attention(
        case.queries, case.codec.keys.decode(case.keys), case.codec.values.decode(case.values),
        scale=case.scale, mask=array, sinks=case.sinks,
    )  # fmt: skip
    sums = []
    monkeypatch.setattr(mx, "logsumexp", lambda *given, **rest: sums.append(1))
    assert mx.array_equal(case.run(COMPOSED["window"]), wanted)
    assert not sums


def test_several_tiles_are_read_by_the_fused_kernel_each(monkeypatch, small_tiles):
    read = []
    kernel = mx.fast.scaled_dot_product_attention

    def recorded(q, k, v, **rest):
        read.append((q.shape[2], k.shape[2]))
        return kernel(q, k, v, **rest)

    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", recorded)
    Case("kv4", length=6, columns=20, mask="causal").check(COMPOSED["window"])
    assert read == [(5, 7), (5, 7), (5, 5), (1, 7), (1, 7), (1, 6)]


@pytest.mark.parametrize("phase", ["window", "partial"])
def test_a_fused_kernel_that_divides_by_nothing(phase, small_tiles, monkeypatch):
    """Where a query sees nothing of a tile, MLX's kernel may yield NaN on some device."""
    kernel = mx.fast.scaled_dot_product_attention

    def divides(q, k, v, *, mask=None, **rest):
        out = kernel(q, k, v, mask=mask, **rest)
        if mask is None:
            return out
        return mx.where(mx.any(mask, axis=-1, keepdims=True), out, mx.nan)

    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", divides)
    case = Case("kv4", length=6, columns=20, mask="causal")
    case.mask = mx.arange(20)[None] < 3 * mx.arange(1, 7)[:, None]
    case.check(COMPOSED[phase])


def test_fewer_columns_than_queries_are_not_left_to_the_fused_kernel(monkeypatch):
    """What it makes of such a causal mask is nowhere said."""
    masks = []
    kernel = mx.fast.scaled_dot_product_attention

    def recorded(*given, mask, **rest):
        masks.append(mask)
        return kernel(*given, mask=mask, **rest)

    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", recorded)
    for columns in (5, 6, 7):
        case = Case("f32", length=6, columns=columns, mask="causal")
        assert np.isfinite(np.array(case.run(FUSED["window"]))).all()
    assert isinstance(masks[0], mx.array)
    assert masks[1:] == ["causal", "causal"]


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


@pytest.mark.parametrize("name", SETS)
def test_a_codec_of_ones_own(name, small_tiles):
    codec = Codec(Negated(), Negated())
    for mask in ("none", "causal"):
        case = Case(codec, length=3, columns=20, mask=mask)
        for phase in ("window", "committed", "partial"):
            case.check(SETS[name][phase])
