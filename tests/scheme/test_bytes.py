"""Every projection is what the caches come to hold."""

from __future__ import annotations

import attrs
import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvfun
from kvfun import scheme as s
from kvfun.errors import GeometryError, ShapeError
from kvfun.scheme import KvScheme, Layer, Model, State, Stream

from .models import LLAMA_8B, SMOLLM2, models

SPECS = ("bf16", "kv4-g32", "k8v4-g32", "f32", "mxfp8", "turbo-k8v3", "turbo-k4v4-start9")
SPECS += ("rot-k4v4", "rot-k3v3-log", "rot-k2v2-tcq-log", "rot-k4v4-log-start20", "kv4-g32-start9")
SPECS += ("kv4-g32-residual8-block4", "kv8-g32-raw3", "rot-k8v4-log-residual7-block3-raw20")
SPECS += ("kv4", "bf16+kv4-g32", "kv8-f16-c", "mxfp4-pad")
"""With start, residual and raw sinks, and some that not every head dim can take."""


def taken(model: Model, text: str):
    """The scheme, if the model has a layer for it."""
    try:
        KvScheme.of(text).assigned(model)
    except ValueError:
        return None
    return KvScheme.of(text)


def filled(model: Model, scheme: KvScheme, tokens: int, chunk: int, batch: int = 1):
    """The real caches after so many tokens, streams one after another."""
    made = []
    caches = s.caches(model, scheme)
    for layer, entry in zip(model.layers, caches, strict=True):
        own = [] if entry is None else entry if isinstance(entry, tuple) else [entry]
        states = [cache for cache in own if isinstance(cache, kvfun.Recurrent)]
        assert len(states) == (layer.state is not None)
        own = [cache for cache in own if not isinstance(cache, kvfun.Recurrent)]
        for stream, cache in zip(layer.stored, own, strict=True):
            made.append((stream, appended(cache, stream, model, tokens, chunk, batch)))
    return made


def appended(cache, stream, model, tokens, chunk, batch=1):
    dtype = getattr(mx, model.dtype)
    for start in range(0, tokens, chunk):
        length = min(chunk, tokens - start)
        shape = (batch, stream.kv_heads, length)
        k = mx.random.normal((*shape, stream.head_dim)).astype(dtype)
        v = mx.random.normal((*shape, stream.value_dim)).astype(dtype)
        cache = kvfun.append(cache, k, v)
    return kvfun.settle(cache)


def state_bytes(model: Model) -> int:
    size = 4 if model.dtype == "float32" else 2
    states = [layer.state for layer in model.layers if layer.state is not None]
    return sum(each.numbers * size + each.wide * 4 for each in states)


@settings(max_examples=max(20, settings().max_examples // 2))
@given(
    model=models(),
    text=st.sampled_from(SPECS),
    tokens=st.one_of(st.integers(0, 60), st.integers(250, 540)),
    chunk=st.integers(1, 300),
    batch=st.integers(1, 2),
)
def test_allocated_bytes_are_those_of_the_real_caches(model, text, tokens, chunk, batch):
    scheme = taken(model, text)
    if scheme is None:
        return
    chunk = max(chunk, tokens // 8)
    real = filled(model, scheme, tokens, chunk, batch)
    held = sum(kvfun.nbytes(cache) for _, cache in real)
    claimed = s.kv_allocated_bytes_at(model, tokens, scheme, batch=batch, chunk=chunk)
    assert claimed == held + batch * state_bytes(model)
    assert (
        s.kv_allocated_bytes_at(model, tokens, scheme, batch=batch, chunk=chunk, peak=True)
        >= claimed
    )


@settings(max_examples=max(20, settings().max_examples // 2))
@given(
    model=models(), text=st.sampled_from(SPECS), tokens=st.integers(0, 60), more=st.integers(1, 9)
)
def test_bytes_are_those_of_the_tokens_that_the_next_one_sees(model, text, tokens, more):
    """What is fetched, encoded again token by token, has so many bytes."""
    scheme = taken(model, text)
    if scheme is None:
        return
    total = state_bytes(model)
    for _, cache in filled(model, scheme, tokens, max(1, tokens)):
        for part in getattr(cache, "parts", (getattr(cache, "inner", cache),)):
            if part.layout is None:
                continue
            low = cache.geometry.policy.lowest(tokens - 1)
            sinks = min(tokens, part.geometry.policy.sinks)
            first = max(low, part.geometry.rows[0].first)
            seen = sinks + max(0, part.geometry.rows[0].offset - first)
            planes = [x for x in (*part.keys, *part.values) if x.size]
            total += sum(x[:, :, :1].nbytes for x in planes) * seen
    assert s.kv_bytes_at(model, tokens, scheme) == total
    assert s.kv_bytes_at(model, tokens, scheme, batch=3) == 3 * total
    if not scheme.start and not scheme.residual:
        # nothing shrinks, but that a chunk ends
        chunked = any(x.chunk for layer in model.layers for x in layer.streams)
        assert chunked or s.kv_bytes_at(model, tokens + more, scheme) >= total


@pytest.mark.parametrize(
    ("spec", "bytes_each"),
    [("bf16", 2.0), ("kv4", 0.5625), ("kv4-g32", 0.625), ("kv8", 1.0625), ("kv2-g128", 0.28125)],
)
def test_bytes_of_an_element(spec, bytes_each):
    """Affine: bits / 8 + 4 / group."""
    assert s.element_bytes(spec) == bytes_each


def test_known_models():
    llama, smol = Model.from_config(LLAMA_8B), Model.from_config(SMOLLM2)
    assert s.kv_geometry(llama).token == 128 * 1024
    assert s.kv_geometry(llama, "kv4").token == 128 * 1024 * 0.5625 / 2
    assert s.kv_bytes_at(smol, 1) == 23_040 == 30 * 3 * 64 * 2 * 2
    assert s.kv_bytes_at(smol, 1000, "kv4") == 30 * 3 * (64 + 64) * 1000 * 0.5625
    assert s.kv_allocated_bytes_at(smol, 1000) == 23_040 * 1024


def test_turbo_is_billed_by_its_packed_bytes_or_as_bf16():
    smol = Model.from_config(SMOLLM2)
    # keys: 8 bits and float16 scale and zero of 64; values: 3 bits and the same
    packed = s.kv_bytes_at(smol, 100, "turbo-k8v3")
    one = kvfun.Codec.of("turbo-k8v3").token_nbytes(3, 64, 64)
    assert packed == 100 * 30 * one
    assert packed < s.kv_bytes_at(smol, 100)
    assert s.kv_bytes_at(smol, 100, "turbo-k8v3", turbo_as_bf16=True) == s.kv_bytes_at(smol, 100)
    assert s.kv_bytes_at(smol, 100, "kv4", turbo_as_bf16=True) == s.kv_bytes_at(smol, 100, "kv4")


MIXED = Model(
    "mixed",
    (
        Layer("full", 8, (Stream(2, 64, 64),)),
        Layer("sliding", 8, (Stream(4, 64, 64, window=10),)),
        Layer("chunked", 8, (Stream(1, 64, 32, chunk=6),)),
        Layer("latent", 8, (Stream(1, 128, 64), Stream(1, 32, 32, index=True))),
        Layer("recurrent", state=State(30, 100)),
        Layer("full", 8, (Stream(2, 64, 64),), donor=0),
        Layer("none"),
    ),
)


def test_the_geometry_of_a_model_by_the_kind_of_layer():
    assert s.kv_geometry(MIXED) == s.KvGeometry(
        full=2 * 128 * 2,
        sliding=4 * 128 * 2,
        chunked=96 * 2,
        latent=(192 + 64) * 2,
        state=30 * 2 + 100 * 4,
        window=10,
    )
    four = s.kv_geometry(MIXED, "kv4-g32")
    assert four.full == 2 * 128 * 0.625
    assert four.latent == 192 * 0.625 + 64 * 2  # what indexes the latents stays bf16
    assert s.kv_geometry(MIXED, "turbo-k8v3").sliding == 4 * 128 * 2


@pytest.mark.parametrize(
    ("tokens", "sliding", "chunked"), [(0, 0, 0), (5, 5, 5), (7, 7, 1), (12, 10, 6), (13, 10, 1)]
)
def test_windows_and_chunks_bound_what_is_seen(tokens, sliding, chunked):
    full = (2 * 128 + 256) * 2 * tokens
    expected = full + 4 * 128 * 2 * sliding + 96 * 2 * chunked + 460
    assert s.kv_bytes_at(MIXED, tokens) == expected


def test_tokens_that_wait_are_billed_as_they_are():
    smol = Model.from_config(SMOLLM2)
    assert s.kv_bytes_at(smol, 4999, KvScheme.affine(4)) == s.kv_bytes_at(smol, 4999)
    assert s.kv_bytes_at(smol, 5000, KvScheme.affine(4)) == s.kv_bytes_at(smol, 5000, "kv4")
    late = KvScheme.affine(4)
    peak = s.kv_allocated_bytes_at(smol, 8000, late, chunk=512, peak=True)
    # all as they came up to the chunk that reaches 5,000, and one layer encoded beside it
    assert peak == 23_040 * 5120 + 5120 * 3 * 128 * 0.5625


def test_a_row_of_a_batch_is_billed_to_its_last_token():
    smol = Model.from_config(SMOLLM2)
    assert s.batch_row_kv_bytes(smol, 100, 1000, "bf16") == 23_040 * 1280
    assert s.batch_row_kv_bytes(smol, 0, 0) == 0
    with pytest.raises(GeometryError, match="at most 192 more"):
        s.batch_row_kv_bytes(smol, 8000, 193)
    assert s.batch_row_kv_bytes(smol, 8000, 192) == 23_040 * 8192


# -- scores ---------------------------------------------------------------------------------------


def with_head_dim(dim, window=None, heads=8, chunk=None):
    return Layer("full", heads, (Stream(2, dim, dim, window=window, chunk=chunk),))


@pytest.mark.parametrize(
    ("layers", "chunk", "context", "expected"),
    [
        ([with_head_dim(128)], 2048, 8192, 0),
        ([with_head_dim(64), with_head_dim(72), with_head_dim(80), with_head_dim(96)], 64, 64, 0),
        ([with_head_dim(256)], 2048, 8192, 8 * 2048 * 8192 * 2),
        ([with_head_dim(256)], 2048, 100, 8 * 100 * 100 * 2),
        ([with_head_dim(256)], 8, 8192, 0),
        ([with_head_dim(256)], 9, 8192, 8 * 9 * 8192 * 2),
        ([with_head_dim(256)], 2048, 8, 0),
        ([with_head_dim(256, window=512)], 2048, 8192, 8 * 2048 * (512 + 2048) * 2),
        ([with_head_dim(256, window=512)], 2048, 2100, 8 * 2048 * 2100 * 2),
        ([with_head_dim(256, heads=2), with_head_dim(512, heads=16)], 16, 32, 16 * 16 * 32 * 2),
        ([Layer("recurrent", state=State(1, 1))], 2048, 8192, 0),
    ],
)
def test_scores_of_head_dims_without_a_fused_kernel(layers, chunk, context, expected):
    assert s.sdpa_fallback_bytes(Model("m", tuple(layers)), chunk, context) == expected


def test_what_a_stream_shows():
    stream = Stream(1, 64, 64, window=4, sinks=2)
    assert (stream.bound, stream.seen(3), stream.seen(50)) == (6, 3, 6)
    both = attrs.evolve(stream, chunk=3)
    assert (both.bound, Stream(1, 64, 64).bound, Stream(1, 64, 64).seen(9)) == (5, None, 9)


def test_windows_of_a_models_caches_keep_what_was_asked_for():
    made = s.caches(MIXED, "bf16", reserve=7)
    assert [each.geometry.policy.reserve for each in made[:3]] == [7, 7, 7]


@pytest.mark.parametrize("value", [-1, 1.5, True, "3", None])
def test_bad_numbers_of_tokens(value):
    smol = Model.from_config(SMOLLM2)
    with pytest.raises(ShapeError):
        s.kv_bytes_at(smol, value)
    with pytest.raises(ShapeError):
        s.kv_allocated_bytes_at(smol, value)
    with pytest.raises(ShapeError):
        s.sdpa_fallback_bytes(smol, 4, value)
    with pytest.raises(ShapeError):
        s.batch_row_kv_bytes(smol, 4, value)


def test_projecting_allocates_nothing():
    llama = Model.from_config(LLAMA_8B)
    mx.synchronize()
    before = mx.get_active_memory()
    s.kv_allocated_bytes_at(llama, 100_000, "rot-k4v4-log", peak=True)
    assert mx.get_active_memory() - before < 4096


def test_a_capped_model_costs_no_more_than_its_cap():
    llama = Model.from_config(LLAMA_8B)
    capped = llama.capped(1024, sinks=4)
    assert s.kv_bytes_at(capped, 100_000) == s.kv_bytes_at(llama, 1024)
    assert s.kv_bytes_at(capped, 1000) == s.kv_bytes_at(llama, 1000)
    for size in (4, -1, True, 1.5):
        with pytest.raises(GeometryError, match="max_size"):
            llama.capped(size, sinks=4)
    assert attrs.evolve(MIXED.capped(8), model_type="").layers[1] == MIXED.layers[1]
