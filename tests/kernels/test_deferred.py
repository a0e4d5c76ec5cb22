"""Rotated and centred codecs: every set says what dense attention over decoded numbers says."""

from functools import cache
from itertools import product

import hypothesis.strategies as st
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given

import kvfun
from kvfun.codecs import (
    Affine,
    Centred,
    Codec,
    Rope,
    Rotated,
    TurboKeys,
    TurboValues,
    calibrated,
    with_rope,
)
from kvfun.errors import CodecError, ShapeError
from kvfun.kernels import (
    COMPOSED,
    DEFERRED,
    DEFERRED_COMPOSED,
    DENSE,
    PHASES,
    TILED,
    UNCOMPOSED,
    UNFUSED,
    Partial,
    _deferred,
    _scores,
    kernels_for,
    merge,
    sink_part,
)
from kvfun.record import replace

from . import dense
from .cases import FLOATS, Case, numbers, peak, raw, tiles_of, wide
from .test_committed import one_by_one
from .test_partial import parts_of

SETS = {
    "deferred": DEFERRED,
    "deferred composed": DEFERRED_COMPOSED,
    "dense": DENSE,
    "uncomposed": UNCOMPOSED,
    "tiled": TILED,
    "composed": COMPOSED,
}
ROTATED = ["rot-k4v4", "rot-k3v3-g32", "rot-k2v2-tcq-log", "rot-k5v2-log", "rot4+rot3"]
MIXED = ["rot-k8v4", "rot4+kv4", "bf16+rot3", "kv4-f16-c", "rot3-c+f32", "rot4+turbo-v5"]
TURBO = ["turbo-k8v3", "turbo-k4v2", "turbo-k8+kv4", "bf16+turbo-v4"]
SPECS = [*ROTATED, *MIXED, *TURBO]
ROPES = {"none": None, "half": Rope.of(64), "partial": Rope.of(32, base=1e6, traditional=True)}
MASKS = ["none", "causal", "rank 4, by row", "float rank 4", "rank 5", "lazy by row and head"]
SIDES = (Centred, Rotated, TurboKeys, TurboValues)


def decoded(codec, planes) -> np.ndarray:
    """In float32, whatever the codec would hand out."""
    turbo = isinstance(codec, TurboKeys | TurboValues)
    return wide(codec.decode(planes, mx.float32)) if turbo else dense.decoded(codec, planes)


class Learnt(Case):
    """Keys with a bias before RoPE, by a codec that has learnt it; positions as a cache has them.

    Args:
        bias: of the keys, in their deviations.
        rope: a name of one of those above.
        start: the first column's position, one number a row or one for all.
        bound: whether the angles are in tables, as a cache gives them.
    """

    oracle = False

    def __init__(self, spec, *, bias=3.0, rope="half", start=5, bound=True, **options):
        super().__init__("plain", **options)
        dims, stored = options.get("dims", (64, 64)), options.get("stored", mx.float32)
        batch, kv_heads, columns = self.keys[0].shape[:3]
        rope = ROPES[rope]
        starts = [start] * batch if isinstance(start, int) else start
        known = starts[:1] if isinstance(start, int) else starts
        positions = mx.array(known)[:, None, None] + mx.arange(columns)
        keys = numbers(self.rng, batch, kv_heads, columns, dims[0])
        keys = keys + bias * numbers(self.rng, batch, kv_heads, 1, dims[0])
        if rope is not None:
            keys = rope.rotated(keys, rope.angles(positions))
        values = numbers(self.rng, batch, kv_heads, columns, dims[1]) + bias
        keys, values = keys.astype(stored), values.astype(stored)
        ones = mx.ones((1, 1, columns, 1), mx.bool_)
        codec = calibrated(with_rope(Codec.of(spec), rope), keys, values, ones, positions)
        self.keys, self.values = codec.keys.encode(keys, starts), codec.values.encode(values)
        self.positional = isinstance(codec.keys, Centred) and codec.keys.positional
        if self.positional:
            self.keys = (*self.keys, positions[..., None].astype(mx.int32))
        end = max(starts) + columns
        if bound and self.positional:
            run = (start, end) if isinstance(start, int) else None
            codec = replace(codec, keys=codec.keys.bound(end, run))
        self.codec = codec
        self.k, self.v = decoded(codec.keys, self.keys), decoded(codec.values, self.values)


learnt = cache(Learnt)
"""The same case again, where nothing changes it: to encode takes longer than to read."""


# -- dense attention ------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("name", SETS)
def test_codecs(name, spec, small_tiles):
    kernels, options = SETS[name], {"dims": (64, 128)}
    for rope, sinks in (("half", False), ("none", True)):
        one = {**options, "rope": rope, "sinks": sinks}
        some = {**one, "batch": 2, "length": 6, "columns": 20}
        for phase in ("decode", "committed", "partial"):
            learnt(spec, **one).check(kernels[phase])
        for phase in ("window", "committed", "partial"):
            learnt(spec, mask="causal", **some).check(kernels[phase])
        learnt(spec, mask="lazy by row", start=(3, 70), **some).check(kernels["masked_window"])


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("group", [1, 3, 4])
@pytest.mark.parametrize("name", SETS)
def test_masks_and_groups_of_heads(name, group, mask, small_tiles):
    for phase, spec in zip(PHASES, ("rot-k4v4", "rot-k3v3-g32", "turbo-k8v3", "rot-k8v4", "rot4-c"),
                           strict=True):  # fmt: skip
        learnt(
            spec, batch=2, kv_heads=2, group=group, length=1 if phase == "decode" else 6,
            columns=20, mask=mask, sinks=True,
        ).check(SETS[name][phase])  # fmt: skip


@given(
    name=st.sampled_from(list(SETS)),
    spec=st.sampled_from(SPECS),
    phase=st.sampled_from(PHASES),
    heads=st.sampled_from([(1, 1), (1, 3), (2, 4), (3, 1)]),
    batch=st.integers(1, 3),
    sizes=st.tuples(st.integers(1, 40), st.integers(0, 70)),
    dims=st.sampled_from([(64, 64), (128, 64), (64, 256)]),
    mask=st.sampled_from(list(dense.MASKS)),
    rope=st.sampled_from(list(ROPES)),
    start=st.sampled_from([0, 63, 1000]),
    bound=st.booleans(),
    sinks=st.booleans(),
    scale=st.sampled_from([None, 1.0, 0.1, -0.3]),
    tile=st.sampled_from([(3, 2), (8, 16), (64, 64), (256, 512)]),
    seed=st.integers(0, 99),
)
def test_any_shape(
    name, spec, phase, heads, batch, sizes, dims, mask, rope, start, bound, sinks, scale, tile, seed
):
    (kv_heads, group), (length, more) = heads, sizes
    length = {"decode": 1, "committed": min(length, 5)}.get(phase, length)
    case = Learnt(
        spec, batch=batch, kv_heads=kv_heads, group=group, length=length, columns=length + more,
        dims=dims, mask=mask, sinks=sinks, scale=scale, seed=seed, rope=rope, bound=bound,
        start=start if batch == 1 or start else [start + 7 * i for i in range(batch)],
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        tiles_of(patch, *tile)
        case.check(SETS[name][phase])


@pytest.mark.parametrize("columns", [255, 256, 257, 511, 513])
@pytest.mark.parametrize("name", ["deferred", "deferred composed"])
def test_columns_about_the_edge_of_a_tile(name, columns, monkeypatch):
    monkeypatch.setattr(_scores, "TILE_NUMBERS", 0)
    for spec in ("rot-k4v4", "turbo-k8v3"):
        for length, phase in ((1, "decode"), (3, "window"), (3, "partial")):
            Learnt(spec, kv_heads=1, length=length, columns=columns, mask="causal").check(
                SETS[name][phase]
            )


@pytest.mark.parametrize("spec", ["rot-k4v4", "rot-k8v3-g32-log", "turbo-k8v3", "rot3"])
@pytest.mark.parametrize("name", SETS)
def test_no_columns(name, spec):
    """What nothing is seen of weighs nothing, and has the shape of the values."""
    case = Learnt(spec, columns=3, dims=(64, 128))
    empty = [tuple(plane[:, :, :0] for plane in planes) for planes in (case.keys, case.values)]
    case.keys, case.values = empty
    out, lse = case.run(SETS[name]["partial"])
    assert out.shape == (1, 4, 1, 128)
    assert not np.array(out).any()
    assert (np.array(lse) < -1e30).all()
    assert case.run(SETS[name]["decode"]).shape == (1, 4, 1, 128)


# -- dtypes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("stored", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("spec", ["rot-k4v4", "rot-k8v4", "rot-k3v3-g32-log", "turbo-k8v3"])
@pytest.mark.parametrize("name", SETS)
def test_results_come_in_the_dtype_of_the_queries(name, spec, dtype, stored, small_tiles):
    """Arithmetic on the CPU is float32."""
    for length, mask in ((1, "none"), (6, "causal"), (6, "float rank 4")):
        case = learnt(
            spec, batch=2, length=length, columns=20, mask=mask, sinks=True, dtype=dtype,
            stored=stored, scale=0.3,
        )  # fmt: skip
        case.check(SETS[name]["decode" if length == 1 else "window"])
        case.check(SETS[name]["partial"])


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Products in the dtype of the queries."""
    for module in ("deferred", "tiled", "unfused", "composed"):
        monkeypatch.setattr(f"kvfun.kernels._{module}.wide", lambda x: x)
    monkeypatch.setattr(_deferred, "working_dtype", lambda dtype: dtype)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("spec", ["rot-k4v4", "rot-k3v3-g32", "rot-k2v2-tcq", "turbo-k8v3"])
@pytest.mark.parametrize("name", SETS)
def test_products_in_the_dtype_of_the_queries(name, spec, dtype, small_tiles, as_on_a_gpu):
    for length, mask in ((1, "none"), (6, "causal"), (6, "float rank 4")):
        case = learnt(
            spec, length=length, columns=20, mask=mask, sinks=True, dtype=dtype, stored=dtype,
            bias=1.0,
        )  # fmt: skip
        for phase in ("window", "committed", "partial"):
            case.check(SETS[name][phase], dtype)


@pytest.mark.parametrize("spec", ["rot-k4v4", "rot-k5v5", "rot-k2v2"])
@pytest.mark.parametrize("name", ["deferred", "deferred composed"])
def test_large_queries_and_many_columns_fit_float16(name, spec, as_on_a_gpu):
    """Products with the integers of a codebook would not, nor small weights times their step."""
    case = Learnt(spec, columns=3000, dtype=mx.float16, bias=0.0, rope="none")
    case.queries = (case.queries.astype(mx.float32) * 20).astype(mx.float16)
    case.scale = 64**-0.5 / 20
    case.check(SETS[name]["decode"], mx.float16)
    # an average of many, to what the mean of so many values is worth
    out = wide(case.run(SETS[name]["decode"]))
    wanted = dense.attention(case.queries, case.k, case.v, case.scale)
    assert np.linalg.norm(out - wanted) / np.linalg.norm(wanted) < 5e-3


def test_deferred_is_eager_within_the_noise_of_bfloat16(as_on_a_gpu):
    for spec in ("rot-k4v4", "rot-k3v3", "turbo-k8v3"):
        case = Learnt(spec, columns=2000, dims=(128, 128), dtype=mx.bfloat16, bias=0.5)
        outs = [wide(case.run(kernels["decode"])) for kernels in (DEFERRED, DENSE)]
        wanted = dense.attention(case.queries, case.k, case.v, case.scale)
        size = np.linalg.norm(wanted)
        assert np.linalg.norm(outs[0] - outs[1]) / size < 5e-3
        assert all(np.linalg.norm(out - wanted) / size < 5e-3 for out in outs)


# -- one query after another, and parts -----------------------------------------------------------


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("name", SETS)
def test_committed_tokens_have_the_bits_of_sequential_decoding(name, spec, small_tiles):
    kernels = SETS[name]
    for dtype, sinks in ((mx.float32, True), (mx.bfloat16, False)):
        case = learnt(
            spec, batch=2, length=4, columns=33, dtype=dtype, stored=dtype, sinks=sinks,
            mask="causal", bound=False,
        )  # fmt: skip
        assert raw(case.run(kernels["committed"])) == raw(one_by_one(case, kernels["decode"]))


@pytest.mark.parametrize("prefix", [126, 1021])
@pytest.mark.parametrize("name", SETS)
def test_committed_tokens_behind_long_prefixes(name, prefix):
    for spec, dtype in product(("rot-k4v4", "rot-k8v3", "turbo-k8v3"), (mx.float32, mx.bfloat16)):
        case = learnt(
            spec, kv_heads=1, length=4, columns=prefix + 4, dims=(128, 128), dtype=dtype,
            stored=dtype, mask="causal", bound=False,
        )  # fmt: skip
        kernels = SETS[name]
        assert raw(case.run(kernels["committed"])) == raw(one_by_one(case, kernels["decode"]))


@pytest.mark.parametrize("raw_sinks", [0, 16])
@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("prefix", [70, 253, 1021])
def test_a_cache_commits_what_it_would_have_decoded(name, raw_sinks, prefix):
    """The products with the mean of a run, which is another one for every query: the same bits."""
    rng = np.random.default_rng(0)
    mean = 20 * numbers(rng, 1, 2, 1, 64)
    codec = Codec(Centred(Rotated(4), ROPES["half"], mean, frozen=True), Rotated(3))
    keys, values, queries = (numbers(rng, 1, heads, prefix + 6, 64) for heads in (2, 2, 6))
    cache = kvfun.empty(codec, raw_sinks=raw_sinks)
    cache = kvfun.append(cache, keys[:, :, :prefix], values[:, :, :prefix])
    outs = []
    for t in range(prefix, prefix + 6):
        cache = kvfun.append(cache, keys[:, :, t : t + 1], values[:, :, t : t + 1])
        outs.append(kvfun.attend(cache, queries[:, :, t : t + 1], kernels=SETS[name]))
    committed = kvfun.attend(cache, queries[:, :, prefix:], phase="committed", kernels=SETS[name])
    assert raw(committed) == raw(mx.concatenate(outs, axis=2))


@given(
    name=st.sampled_from(list(SETS)),
    spec=st.sampled_from(SPECS),
    heads=st.sampled_from([(1, 1), (2, 3), (1, 4)]),
    length=st.integers(1, 9),
    columns=st.integers(9, 60),
    cuts=st.lists(st.integers(0, 60), max_size=3),
    mask=st.sampled_from(["none", "causal", "rank 4, by row", "float with -inf", "lazy causal"]),
    rope=st.sampled_from(list(ROPES)),
    sinks=st.booleans(),
    seed=st.integers(0, 99),
)
def test_parts_are_merged_to_the_whole(
    name, spec, heads, length, columns, cuts, mask, rope, sinks, seed
):
    kv_heads, group = heads
    case = Learnt(
        spec, kv_heads=kv_heads, group=group, length=length, columns=columns, mask=mask, seed=seed,
        rope=rope, bound=False, sinks=sinks,
    )  # fmt: skip
    sinks, case.sinks = case.sinks, None
    with pytest.MonkeyPatch.context() as patch:
        tiles_of(patch, 16, 4)
        parts = parts_of(case, SETS[name]["partial"], [min(cut, columns) for cut in cuts])
    if sinks is not None:
        parts.append(sink_part(sinks, parts[0]))
    merged, case.sinks = merge(parts), sinks
    assert all(isinstance(part, Partial) for part in parts)
    case.check(lambda *given, **rest: merged)


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("spec", ["rot-k4v4", "rot-k8v3", "turbo-k8v3"])
def test_nothing_that_was_given_is_changed(name, spec, small_tiles):
    for phase in PHASES:
        case = Learnt(spec, length=1 if phase == "decode" else 6, columns=9, sinks=True)
        given = [case.queries, *case.keys, *case.values, case.sinks]
        mx.eval(given)
        before = [raw(x) for x in given]
        mx.eval(case.run(SETS[name][phase]))
        assert before == [raw(x) for x in given]


@pytest.mark.parametrize("spec", ["rot-k4v4", "rot-k3v3-g32", "turbo-k8v3"])
@pytest.mark.parametrize("name", SETS)
def test_a_query_that_sees_nothing_yields_finite_numbers(name, spec, small_tiles):
    case = Learnt(spec, batch=2, length=6, columns=20)
    seen = case.rng.random((2, 1, 6, 20)) < 0.5
    seen[..., 0], seen[0, :, 2], seen[1, :, 0] = True, False, False
    case.mask = mx.array(seen)
    out = wide(case.run(SETS[name]["masked_window"]))
    assert np.isfinite(out).all()
    wanted = dense.attention(case.queries, case.k, case.v, case.scale, mx.array(seen))
    full = np.broadcast_to(seen.any(-1)[..., None], out.shape)
    limit = dense.allowed(case.queries, case.k, case.v, case.scale, mx.float32)
    assert np.abs(out - wanted)[full].max() <= limit


# -- which, and what for --------------------------------------------------------------------------


def test_rotated_codecs_are_read_deferred():
    for spec in ("rot-k4v4", "rot-k8v4", "kv4+rot4", "rot3-c+bf16", "turbo-k8v3", "bf16+turbo-v3"):
        assert kernels_for(Codec.of(spec), mx.Device(mx.cpu, 0)) is DEFERRED
    for spec in ("kv8-c+kv4", "turbo-k8+kv4"):  # nothing is stored in other coordinates
        assert kernels_for(Codec.of(spec), mx.Device(mx.cpu, 0)) is TILED
    for name in SETS:
        assert set(SETS[name]) == set(PHASES)


def test_keys_and_values_are_not_rotated_back(monkeypatch):
    """Queries and outputs are, which are few."""
    turned = []
    for of, name in ((Rotated, "leave"), (Rotated, "enter"), (TurboValues, "leave")):
        before = getattr(of, name)
        monkeypatch.setattr(
            of,
            name,
            lambda self, x, before=before: turned.append(x.shape[2]) or before(self, x),
        )
    for spec, name, length in product(
        ("rot-k4v4", "turbo-k8v3", "rot-k3v3-g32"), ("deferred", "deferred composed"), (1, 6)
    ):
        case = Learnt(spec, length=length, columns=500, rope="none", bias=0.0)
        if isinstance(case.codec.keys, Centred):
            case.codec = replace(case.codec, keys=case.codec.keys.codec)
        turned.clear()
        mx.eval(case.run(SETS[name]["decode" if length == 1 else "window"]))
        assert turned
        assert max(turned) <= 2 * length
    turned.clear()
    mx.eval(case.run(TILED["window"]))
    assert max(turned) >= 256


@pytest.mark.parametrize("name", ["deferred", "deferred composed", "dense", "uncomposed"])
@pytest.mark.parametrize("phase", PHASES)
def test_other_codecs_are_errors(name, phase):
    kernel = SETS[name][phase]
    case = Learnt("rot-k4v4", columns=20)
    for codec, named in (
        ("rot-k4v4", "'rot-k4v4'"),
        (None, "None"),
        (Rotated(4), r"Rotated\("),
        (Codec(Affine(4), None), r"Affine\(bits=4.*, None"),
    ):
        case.codec = codec
        words = rf"(deferred|dense|unfused|tiled|composed) kernel.*not by .*{named}"
        with pytest.raises(CodecError, match=words):
            case.run(kernel)


@pytest.mark.parametrize("spec", ["rot-k4v4", "turbo-k8v3"])
@pytest.mark.parametrize("name", ["deferred", "deferred composed", "dense", "uncomposed"])
def test_what_does_not_fit_is_refused(name, spec):
    for phase in PHASES:
        case = Learnt(spec, columns=20)
        case.queries = case.queries[:, :3]
        with pytest.raises(ShapeError, match="have 3 heads, no multiple of the 2 KV heads"):
            case.run(SETS[name][phase])
        case = Learnt(spec, columns=20)
        case.sinks = mx.zeros(3)
        with pytest.raises(ShapeError, match="sinks are one logit a query head"):
            case.run(SETS[name][phase])
        case = Learnt(spec, columns=20)
        case.mask = mx.ones((1, 19), mx.bool_)
        with pytest.raises(ShapeError, match="does not fit"):
            case.run(SETS[name][phase])


# -- memory ---------------------------------------------------------------------------------------


class Chunk(Case):
    oracle = False


HEADS, COLUMNS = 4, 8192
COPY = 2 * HEADS * COLUMNS * 128 * 4
"""Bytes of all keys and values decoded in float32: 32 MiB; in bfloat16, not decoded, half of it."""


@cache
def chunk(spec: str, length: int) -> Chunk:
    return Chunk(
        spec, kv_heads=HEADS, group=1, length=length, columns=COLUMNS, dims=(128, 128),
        mask="causal" if length > 1 else "none", dtype=mx.bfloat16, stored=mx.bfloat16,
    )  # fmt: skip


def stored(case: Case) -> int:
    return sum(plane.nbytes for plane in case.keys + case.values)


def test_a_window_decodes_no_copy_of_the_cache():
    """A few arrays of a tile, 2 MiB each; all scores over bfloat16 at once take 167 MiB."""
    case, plain = chunk("rot-k4v4-s1", 512), chunk("bf16", 512)
    taken = peak(case, DEFERRED["window"])
    assert taken < 0.65 * COPY
    assert stored(case) + taken < 0.2 * (stored(plain) + peak(plain, UNFUSED["window"]))


@pytest.mark.parametrize("spec", ["rot-k4v4-s1", "turbo-k8v3"])
def test_one_query_decodes_no_copy_of_the_cache(spec):
    assert peak(chunk(spec, 1), DEFERRED["decode"]) < 0.35 * COPY
    assert peak(chunk(spec, 1), DENSE["decode"]) > COPY


@pytest.mark.parametrize("phase", ["window", "partial"])
def test_the_memory_of_a_window_does_not_grow_with_the_cache(phase):
    options = {"kv_heads": 1, "length": 64, "dims": (64, 64), "mask": "causal"}
    short, long = (
        peak(Chunk("rot-k4v4-s1", columns=n, **options), DEFERRED[phase]) for n in (8192, 32768)
    )
    assert long < 1.25 * short
