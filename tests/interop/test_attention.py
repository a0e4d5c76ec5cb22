"""Attention through kvfun: routed where it can be, the same numbers, and nothing left behind."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from typing import Any

import mlx.core as mx
import pytest

pytest.importorskip("mlx_lm")

import mlx_lm.models.cache as mlx_lm_cache
from mlx_lm.models import base

import kvfun.caches
from kvfun.codecs import Codec
from kvfun.errors import SpecError, UnsupportedError
from kvfun.interop.mlx_lm import KVFunCache, _handed, attention, make_prompt_cache
from kvfun.interop.mlx_lm import _attention as module
from tests.interop import architectures as archs
from tests.interop import oracle

NAMES = [name for name in archs.available() if name not in archs.PRIVATE]
OWN = {"gemma2", "plamo2", "falcon_mamba", "mamba", "mamba2", "rwkv7"}
"""Names that compute attention themselves, or have none."""

PROMPT = oracle.PROMPT
STEPS = (13, 17, 1, 1, 9)


@pytest.fixture
def calls(monkeypatch):
    """The phases of a model's routed calls, each held to its decoded numbers."""
    phases: list[str] = []
    attend, fetch = kvfun.caches.attend_columns, kvfun.caches.fetch_columns

    def counted(cache, queries, spans, mask, *, scale, phase, sinks, kernels=None):
        assert kernels is None  # the cache's own
        phases.append(phase)
        out = attend(cache, queries, spans, mask, scale=scale, phase=phase, sinks=sinks)
        decoded = [x.astype(queries.dtype) for x in fetch(cache, spans)]
        wanted = mx.fast.scaled_dot_product_attention(
            queries, *decoded, scale=scale, mask=mask, sinks=sinks
        )
        assert mx.max(mx.abs(out - wanted)).item() < 1e-4 * (1 + mx.max(mx.abs(wanted)).item())
        return out

    monkeypatch.setattr(kvfun.caches, "attend_columns", counted)
    return phases


def logits(model, spec, tokens=PROMPT, steps=STEPS):
    return oracle.logits(model, make_prompt_cache(model, spec), tokens, *steps)


def module_of(model: Any) -> Any:
    return sys.modules[type(model.layers[0]).__module__]


def is_routed(model: Any) -> bool:
    return module_of(model).scaled_dot_product_attention is not base.scaled_dot_product_attention


@pytest.mark.parametrize("spec", ["plain", "bf16", "kv8-g32", "k8v4-g32", "kv3-g64-pad"])
def test_every_layer_is_routed(spec, calls):
    model = oracle.model("llama")
    with attention(model):
        logits(model, spec)
    assert calls.count("window") == 3 * len(model.layers)
    assert calls.count("decode") == 2 * len(model.layers)
    logits(model, spec)
    assert len(calls) == 5 * len(model.layers)


@pytest.mark.parametrize("name", ["gpt_oss", "gemma4"])
def test_caches_made_within_run_without(name, calls):
    """mlx-lm's quantized attention has no sinks, and needs a cache: not to be seen from within."""
    model = oracle.model(name)
    with attention(model):
        cache = make_prompt_cache(model, "kv8-g32")
        assert not calls
    wanted = logits(model, "kv8-g32")
    assert mx.array_equal(oracle.logits(model, cache, PROMPT, *STEPS), wanted).item()


SPECS = ["plain", "k8v4-g32", "bf16+kv4-g32", "kv3-g64-pad", "kv8-g32", "kv2-g32"]
FEW = ["llama", "gemma3_text", "gpt_oss", "mimo_v2_flash", "llama4", "gemma4", "qwen3_next"]
FEW += ["mistral3", "llama+sliding", "cohere2"]


@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize("spec", SPECS)
def test_codecs_give_what_their_decoded_numbers_give(name, spec, calls):
    model, tokens = oracle.model(name), archs.prompt(60)
    wanted = logits(model, spec, tokens)
    assert not calls
    with attention(model):
        got = logits(model, spec, tokens)
        assert calls
        said = archs.greedy(model, PROMPT, 16, make_prompt_cache(model, spec))
    # A number next to an edge may be rounded to the other side.
    assert oracle.spread(wanted, got) < (1e-3 if spec == "plain" else 0.2)
    assert said == archs.greedy(model, PROMPT, 16, make_prompt_cache(model, spec))


@pytest.mark.parametrize("name", NAMES)
def test_all_models_say_the_same(name):
    model = oracle.model(name)
    if name in OWN:
        says = f"{type(model).__module__} does not use mlx_lm's scaled_dot_product_attention"
        with pytest.raises(UnsupportedError, match=says), attention(model):
            raise AssertionError("not reached")
        return
    spec = "plain" if oracle.OLD_PROTOCOL and name in ("afm7", "gemma3n") else "kv8-g32"
    with attention(model):
        got = logits(model, spec)
    assert oracle.spread(logits(model, spec), got) < 0.1
    assert not module._routed


@pytest.mark.parametrize("name", sorted({"deepseek_v3", "kimi_vl", "glm4_moe_lite"}))
def test_keys_that_are_not_those_handed_out_run_as_before(name, calls):
    """MLA: unpacked in a block, and the latent as both keys and values in one token."""
    model = oracle.model(name)
    wanted = logits(model, "plain")
    with attention(model):
        got = logits(model, "plain")
    assert mx.array_equal(wanted, got).item()
    assert not calls


@pytest.mark.parametrize("name", ["gpt_oss", "mimo_v2_flash"])
def test_attention_sinks_over_quantized_caches(name, calls):
    """mlx-lm's quantized attention refuses sinks; both ways here take them."""
    model, tokens = oracle.model(name), archs.prompt(60)
    wanted = oracle.logits(model, oracle.keepers(model, "kv8-g32"), tokens, *STEPS)
    assert oracle.spread(wanted, logits(model, "kv8-g32", tokens)) < 2e-2
    with attention(model):
        assert oracle.spread(wanted, logits(model, "kv8-g32", tokens)) < 2e-2
    assert calls
    other = archs.build(name)  # and the sinks are in it
    for part in other.modules():
        for key in ("sinks", "attention_sink_bias"):
            if key in part:
                part[key] = part[key] + 3.0
    with attention(other):
        assert oracle.spread(wanted, logits(other, "kv8-g32", tokens)) > 0.05


# -- layers that share another's keys and values --------------------------------------------------

BY_STATE = {"afm7", "gemma3n"} if oracle.OLD_PROTOCOL else set()
"""Shared layers read ``cache.state`` there: what is stored, and never decoded."""

SHARED = ["gemma3n", "gemma4", "gemma4_text", "afm7"]
ENCODED = ["kv4-g32", "kv8-g32", "k8v4-g32", "mxfp8", "bf16+kv4-g32"]


def known(spec: str) -> str:
    try:
        Codec.of(spec)
    except SpecError:
        pytest.skip(f"no codec {spec} yet")
    return spec


@pytest.fixture
def poisoned(monkeypatch):
    """Decoded columns that shells hand out are no numbers: whoever computes with them shows it."""
    fetch = kvfun.caches.fetch_columns

    def nothing(cache, columns):
        return tuple(mx.full(x.shape, mx.nan, x.dtype) for x in fetch(cache, columns))

    monkeypatch.setattr(kvfun.caches, "fetch_columns", nothing)


@pytest.mark.parametrize("name", [name for name in SHARED if name not in BY_STATE])
@pytest.mark.parametrize("spec", ["plain", *ENCODED])
def test_shared_layers_are_routed_like_their_owners(name, spec, calls):
    """In chunks that cross the windows, and token by token."""
    model = oracle.model(name)
    spec = known(spec)
    cache = make_prompt_cache(model, spec)
    assert len(cache) < len(model.layers)
    wanted = oracle.logits(model, cache, PROMPT, *STEPS)
    assert not calls
    with attention(model):
        got = logits(model, spec)
    assert calls.count("window") == 3 * len(model.layers)
    assert calls.count("decode") == 2 * len(model.layers)
    assert oracle.spread(wanted, got) < (1e-3 if spec == "plain" else 0.2)


@pytest.mark.parametrize("name", [name for name in SHARED if name not in BY_STATE])
@pytest.mark.parametrize("spec", ["plain", *ENCODED])
def test_shared_layers_read_encoded(name, spec, poisoned):
    model, spec = oracle.model(name), known(spec)
    with attention(model):
        got = logits(model, spec)
    assert mx.all(mx.isfinite(got)).item()
    if not hasattr(make_prompt_cache(model, spec)[0], "bits"):
        assert mx.any(mx.isnan(logits(model, spec))).item()


@pytest.mark.parametrize("name", SHARED)
def test_shared_layers_say_what_mlx_lm_says(name):
    model = oracle.model(name)
    with attention(model):
        cache = make_prompt_cache(model, "plain")
        assert tuple(archs.greedy(model, PROMPT, 24, cache)) == oracle.said(name)


def two_layers(packed: bool = False, spec: str = "k8v4-g32", tokens: int = 20):
    """A shell after its first block, what it handed out, and attention under :func:`attention`."""
    cache = KVFunCache(kvfun.empty("kv8-g32" if packed else spec), packed)
    keys = mx.random.normal((1, 2, tokens, 32), key=mx.random.key(1))
    return cache, cache.update_and_fetch(keys, keys + 1)


@pytest.fixture
def attend():
    with attention(oracle.model("llama")):
        yield module_of(oracle.model("llama")).scaled_dot_product_attention


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("later", ["append", "trim", "state", "nothing"])
def test_what_was_handed_out_stands_for_the_cache_as_it_was(packed, later, calls, attend):
    cache, (keys, values) = two_layers(packed)
    queries = mx.random.normal((1, 4, 20, 32), key=mx.random.key(2))
    decoded = kvfun.fetch(cache.record, queries=20)
    wanted = mx.fast.scaled_dot_product_attention(queries, *decoded, scale=0.3, mask="causal")
    if later == "append":
        for _ in range(3):
            mx.eval(cache.update_and_fetch(*[mx.full((1, 2, 150, 32), 9.0)] * 2))
    elif later == "trim":
        cache.trim(5)
        cache.update_and_fetch(*[mx.full((1, 2, 5, 32), 9.0)] * 2)
    elif later == "state":
        cache.__init__(kvfun.empty("bf16"))
    for owner in (None, cache, KVFunCache(kvfun.empty("plain"))):
        got = attend(queries, keys, values, cache=owner, scale=0.3, mask="causal")
        assert mx.allclose(got, wanted, atol=1e-4).item()
    assert len(calls) == 3


def test_two_blocks_handed_out_are_told_apart(calls, attend):
    cache, first = two_layers(tokens=7)
    second = cache.update_and_fetch(*[mx.random.normal((1, 2, 7, 32), key=mx.random.key(5))] * 2)
    queries = mx.random.normal((1, 4, 7, 32), key=mx.random.key(2))
    for keys, values in (second, first, second):
        got = attend(queries, keys, values, cache=None, scale=0.3)
        wanted = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=0.3)
        assert mx.allclose(got, wanted, atol=1e-4).item()
    assert len(calls) == 3
    wanted = mx.fast.scaled_dot_product_attention(queries, second[0][:, :, :7], first[1], scale=0.3)
    got = attend(queries, second[0][:, :, :7], first[1], cache=None, scale=0.3)
    assert mx.allclose(got, wanted, atol=1e-5).item()
    assert len(calls) == 3


@pytest.mark.parametrize("packed", [True, False])
def test_changed_arrays_are_not_those_handed_out(packed):
    cache, (keys, values) = two_layers(packed)
    other, (keys_of_another, values_of_another) = two_layers(packed)
    assert _handed.recall(keys, values).record is cache.record
    assert _handed.recall(keys_of_another, values_of_another).record is other.record
    pairs = [(values, keys), (keys, values_of_another), (keys_of_another, values), (keys, keys)]
    pairs += [(None, None), ((), ()), (keys, None), (1, "2")]
    if packed:
        assert _handed.recall(list(keys), list(values)).record is cache.record
        pairs += [(keys[0], values[0]), (keys[:2], values), (keys, (*values[:2], values[2] + 0))]
        pairs += [((*keys[:1], keys[1] + 0, keys[2]), values), (keys[::-1], values)]
    else:
        pairs += [(keys + 0, values), (keys, values * 1), (keys[:, :, :], values)]
        pairs += [
            (keys, values[:, :, :]),
            ((keys,), (values, values)),
            (keys.swapaxes(0, 0), values),
        ]
    assert [_handed.recall(*pair) for pair in pairs] == [None] * len(pairs)


def test_nothing_handed_out_is_remembered_once_it_is_gone():
    gc.collect()
    before = len(_handed._entries)
    for name in ("gemma4", "llama"):
        model = oracle.model(name)
        cache = make_prompt_cache(model, "k8v4-g32")
        with attention(model):
            oracle.logits(model, cache, PROMPT, *STEPS)
        gc.collect()
        assert len(_handed._entries) == before, "the caches live, what they handed out does not"
    held = [two_layers(packed) for packed in (True, False)]
    assert len(_handed._entries) == before + 2
    records = [weak(cache.record.keys[0]) for cache, _ in held]
    handed = [out for _, out in held]
    del held, cache
    gc.collect()
    assert all(ref() is not None for ref in records), "arrays that are held stand for their cache"
    del handed
    gc.collect()
    assert len(_handed._entries) == before
    assert all(ref() is None for ref in records)


def weak(array: mx.array):
    return weakref.ref(array)


def test_no_array_is_kept_alive_by_the_others():
    for kept in (0, 1):
        _, handed = two_layers()
        refs = [weak(array) for array in handed]
        handed = handed[kept]
        gc.collect()
        assert [ref() is not None for ref in refs] == [kept == 0, kept == 1]


@pytest.mark.parametrize("spec", ["f16", "kv8", "k8v4"])
def test_a_shared_layer_leaves_the_next_append_in_place(spec, attend):
    """What is remembered of a hand-out goes with it, and a step copies no buffer."""
    cache = KVFunCache(kvfun.empty(spec))
    block = mx.random.normal((1, 4, 8192 - 64, 128)).astype(mx.float16)
    one = mx.random.normal((1, 4, 1, 128)).astype(mx.float16)
    mx.eval(cache.update_and_fetch(block, block)[0][:, :, :1], cache.state, one)
    size, peaks = cache.nbytes, []
    for held in (False, False, True, False):
        keys, values = cache.update_and_fetch(one, one)
        out = attend(one, keys, values, cache=cache, scale=1.0)
        out = out + attend(one + out, keys, values, cache=None, scale=1.0)
        if not held:
            del keys, values
        mx.eval(out, cache.record.keys, cache.record.values)
        gc.collect()
        mx.synchronize()
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        cache.update_and_fetch(one, one)
        mx.eval(cache.record.keys, cache.record.values)
        mx.synchronize()
        peaks.append((mx.get_peak_memory() - before) / size)
        keys = values = None
    assert peaks.pop(2) > 0.9, "arrays that are held keep what they stand for"
    assert max(peaks) < 0.1


def test_arrays_are_told_apart_in_threads():
    failures: list[str] = []

    def hand_out_and_ask(number: int) -> None:
        kept = []
        for step in range(400):
            keys, values = mx.array([number]), mx.array([step])
            if _handed.recall(keys, values) is not None:
                failures.append("something new was known")
            _handed.remember(keys, values, _handed.Handed((number, step), (), 1))
            kept = [*kept[-7:], (keys, values, (number, step))]
            for one, other, wanted in kept:
                if _handed.recall(one, other).record != wanted:
                    failures.append("something else was known")

    gc.collect()
    before = len(_handed._entries)
    threads = [threading.Thread(target=hand_out_and_ask, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    assert not failures
    assert len(_handed._entries) == before


def test_other_caches_run_as_before(calls):
    model = oracle.model("llama")
    wanted = oracle.logits(model, mlx_lm_cache.make_prompt_cache(model), PROMPT, *STEPS)
    with attention(model):
        got = oracle.logits(model, mlx_lm_cache.make_prompt_cache(model), PROMPT, *STEPS)
        model(mx.array([PROMPT]))
    assert mx.array_equal(wanted, got).item()
    assert not calls


# -- nothing is left behind ---------------------------------------------------------------------


def test_undone_on_exit_and_on_errors():
    model = oracle.model("llama")
    assert not is_routed(model)
    with attention(model):
        assert is_routed(model)
    assert not is_routed(model)
    with pytest.raises(ZeroDivisionError), attention(model):
        raise ZeroDivisionError
    assert not is_routed(model)
    assert not module._routed


def test_nested_and_interleaved():
    model, same_module, other = (
        oracle.model("llama"),
        archs.build("llama", 1),
        oracle.model("qwen3"),
    )
    with attention(model), attention(model), attention(same_module):
        assert is_routed(model)
    assert not is_routed(model)
    first, second, third = attention(model), attention(same_module), attention(other)
    first.__enter__()
    second.__enter__()
    third.__enter__()
    first.__exit__(None, None, None)
    assert is_routed(same_module)
    assert is_routed(other)
    third.__exit__(None, None, None)
    assert not is_routed(other)
    assert is_routed(model)  # a module is one for all its models
    second.__exit__(None, None, None)
    assert not is_routed(model)
    assert not module._routed


def test_two_models_at_once(calls):
    one, two = oracle.model("llama"), oracle.model("gemma3_text")
    wanted = logits(one, "k8v4-g32"), logits(two, "k8v4-g32")
    caches = make_prompt_cache(one, "k8v4-g32"), make_prompt_cache(two, "k8v4-g32")
    parts: tuple[list[mx.array], list[mx.array]] = ([], [])
    with attention(one), attention(two):
        for start, stop in ((0, 13), (13, 30), (30, 31), (31, 32), (32, 41)):
            for model, cache, part in zip((one, two), caches, parts, strict=True):
                part.append(model(mx.array([PROMPT[start:stop]]), cache=cache)[0])
    assert len(calls) == 5 * (len(one.layers) + len(two.layers))
    for said, part in zip(wanted, parts, strict=True):
        assert oracle.spread(said, mx.concatenate(part)) < 2e-2


def test_contexts_in_threads():
    model = oracle.model("llama")
    failures = []

    def enter_and_leave():
        for _ in range(200):
            with attention(model):
                if not is_routed(model):
                    failures.append("not routed")

    threads = [threading.Thread(target=enter_and_leave) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert not is_routed(model)


# -- arguments ----------------------------------------------------------------------------------


def cache_and_block(packed: bool = True):
    (cache, *_) = make_prompt_cache(oracle.model("llama"), "kv8-g32" if packed else "k8v4-g32")
    keys = mx.random.normal((1, 2, 20, 32), key=mx.random.key(1))
    return cache, cache.update_and_fetch(keys, keys + 1)


@pytest.mark.parametrize("packed", [True, False])
def test_41_the_callers_queries_do_not_change(packed):
    cache, (keys, values) = cache_and_block(packed)
    queries = mx.ones((1, 4, 20, 32))
    with attention(oracle.model("llama")):
        attend = module_of(oracle.model("llama")).scaled_dot_product_attention
        attend(queries, keys, values, cache=cache, scale=0.5, mask="causal")
        assert mx.array_equal(queries, mx.ones_like(queries)).item()


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("rank", [2, 4])
def test_29_masks_of_every_kind(packed, rank, calls):
    cache, (keys, values) = cache_and_block(packed)
    queries = mx.random.normal((1, 4, 20, 32), key=mx.random.key(2))
    causal = mx.tril(mx.ones((20, 20), mx.bool_))
    added = mx.where(causal, 0.0, -1e9)
    decoded = kvfun.fetch(cache.record, queries=20)
    with attention(oracle.model("llama")):
        attend = module_of(oracle.model("llama")).scaled_dot_product_attention
        for mask in (None, "causal", causal, added):
            if isinstance(mask, mx.array) and rank == 4:
                mask = mx.broadcast_to(mask, (1, 4, 20, 20))
            got = attend(queries, keys, values, cache, 0.3, mask)
            wanted = mx.fast.scaled_dot_product_attention(queries, *decoded, scale=0.3, mask=mask)
            assert mx.allclose(got, wanted, atol=1e-4).item()
    assert len(calls) == 4


def test_queries_of_another_length_run_as_before(calls):
    cache, (keys, values) = cache_and_block(False)
    queries = mx.random.normal((1, 4, 3, 32))
    with attention(oracle.model("llama")):
        attend = module_of(oracle.model("llama")).scaled_dot_product_attention
        got = attend(queries, keys, values, cache=cache, scale=0.3, mask=None)
    wanted = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=0.3)
    assert mx.array_equal(got, wanted).item()
    assert not calls
