"""The depth-2 verify window: right where it reads, refused at the call elsewhere."""

import mlx.core as mx
import numpy as np
import pytest

from kvfun.codecs import Codec
from kvfun.errors import CodecError, KVFunError, PhaseError, ShapeError
from kvfun.kernels import GROUPED_HEADS, PHASES, UNFUSED, kernels_for

from .cases import Case, raw, wide

SHAPE = {"kv_heads": 4, "group": 6, "length": 3, "columns": 8192, "dims": (256, 256)}
window = GROUPED_HEADS["window"]


class Window(Case):
    """Too large for the float64 oracle to be quick: the unfused kernel has passed it."""

    oracle = False


@pytest.mark.parametrize(
    ("mask", "batch", "more", "dtype"),
    [("none", 1, 3, mx.float32), ("causal", 2, 0, mx.bfloat16), ("causal", 1, 1, mx.float32)],
)
def test_attention(mask, batch, more, dtype):
    shape = {**SHAPE, "columns": 8192 + more}
    case = Window("kv4", batch=batch, mask=mask, dtype=dtype, stored=dtype, scale=0.1, **shape)
    out, wanted = case.run(window), case.run(UNFUSED["window"])
    assert out.dtype == dtype
    assert out.shape == (batch, 24, 3, 256)
    near = np.abs(wide(out) - wide(wanted)).max() / np.abs(wide(wanted)).max()
    assert near < (1e-5 if dtype == mx.float32 else 2**-7)


def test_three_queries_of_three_heads_are_one_block_of_rows(monkeypatch):
    shapes = []
    product = mx.quantized_matmul
    monkeypatch.setattr(
        mx,
        "quantized_matmul",
        lambda x, *planes, **rest: (
            shapes.append((x.shape, planes[0].shape)) or product(x, *planes, **rest)
        ),
    )
    Window("kv4", **SHAPE).run(window)
    assert shapes == [
        ((1, 4, 2, 9, 256), (1, 4, 1, 8192, 32)),
        ((1, 4, 2, 9, 8192), (1, 4, 1, 8192, 32)),
    ]


def test_nothing_that_was_given_is_changed():
    case = Window("kv4", mask="causal", **SHAPE)
    given = [case.queries, *case.keys, *case.values]
    before = [raw(x) for x in given]
    mx.eval(case.run(window))
    assert before == [raw(x) for x in given]


def lazy(spec="kv4", rows=1, heads=24, kv_heads=4, length=3, columns=1 << 20, dim=256, values=256):
    """Arrays that take 128 MiB a row when they are evaluated."""
    codec = Codec.of(spec)
    one = mx.zeros((1, kv_heads, 1, dim), mx.bfloat16), mx.zeros((1, kv_heads, 1, values))
    planes = [
        tuple(
            mx.repeat(mx.broadcast_to(p, (rows, *p.shape[1:])), columns, axis=2)
            for p in side.encode(x)
        )
        for side, x in zip((codec.keys, codec.values), one, strict=True)
    ]
    return mx.zeros((rows, heads, length, dim), mx.bfloat16), *planes, codec


@pytest.mark.parametrize(
    ("error", "given", "options", "words"),
    [
        (ShapeError, {"length": 2}, {}, r"3 queries of 24 heads.*\(1, 24, 2, 256\)"),
        (ShapeError, {"length": 4}, {}, r"\(1, 24, 4, 256\)"),
        (ShapeError, {"heads": 20}, {}, r"24 heads.*\(1, 20, 3, 256\)"),
        (ShapeError, {"kv_heads": 8}, {}, "4 KV heads.*over 8 KV heads"),
        (ShapeError, {"dim": 128}, {}, r"256 numbers.*\(1, 24, 3, 128\)"),
        (ShapeError, {"values": 128}, {}, "256 numbers.*values of 128"),
        (ShapeError, {"rows": 3}, {}, r"at most 2 rows.*\(3, 24"),
        (ShapeError, {"columns": 8191}, {}, "at least 8192 columns.*8191 columns"),
        (CodecError, {"spec": "kv8"}, {}, r"kv4 \(groups of 64\), not Codec\('kv8'\)"),
        (CodecError, {"spec": "kv4-g32"}, {}, r"not Codec\('kv4-g32'\)"),
        (CodecError, {"spec": "k4v8"}, {}, r"not Codec\('k4v8'\)"),
        (CodecError, {"spec": "bf16"}, {}, r"not Codec\('bf16'\)"),
        (CodecError, {"spec": "mxfp4"}, {}, r"not Codec\('mxfp4'\)"),
        (PhaseError, {}, {"mask": mx.ones((3, 1 << 20), mx.bool_)}, "no mask or 'causal'.*array"),
        (PhaseError, {}, {"mask": lambda *block: None}, "no mask or 'causal'.*function"),
        (PhaseError, {}, {"sinks": mx.zeros(24)}, "without sinks, not sinks"),
        (ShapeError, {}, {"mask": "left"}, "'left'"),
    ],
)
def test_what_it_does_not_read_is_refused_before_anything_is_evaluated(
    error, given, options, words
):
    arrays = lazy(**given)
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    assert issubclass(error, KVFunError)
    for phase in ("window", "masked_window"):
        with pytest.raises(error, match=words):
            GROUPED_HEADS[phase](*arrays, **{"scale": 1.0, "mask": None, "sinks": None, **options})
    assert mx.get_peak_memory() <= before + 4096


def test_its_other_phases_are_those_of_the_unfused_set():
    assert set(GROUPED_HEADS) == set(PHASES)
    for phase in ("decode", "committed", "partial"):
        assert GROUPED_HEADS[phase] is UNFUSED[phase]


def test_it_is_never_chosen():
    for spec in ("kv4", "bf16"):
        for device in (None, mx.Device(mx.cpu, 0), mx.Device(mx.gpu, 0)):
            assert kernels_for(Codec.of(spec), device)["window"] is not window
