"""Every architecture of mlx-lm on kvfun caches: mlx-lm's tokens, or an error before the start."""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
import pytest

pytest.importorskip("mlx_lm")

import mlx_lm.models.cache as mlx_lm_cache

from kvfun.codecs import Codec
from kvfun.errors import UnsupportedError
from kvfun.interop.mlx_lm import KVFunCache, KVFunStates, describe, make_prompt_cache
from tests.interop import architectures as archs
from tests.interop import oracle

NAMES = [name for name in archs.available() if name not in archs.PRIVATE]
PROMPT = oracle.PROMPT
WRONG = set(archs.CHUNKS_DIFFER)
"""Where mlx-lm's own caches give one answer in one call and another in chunks."""

LEARNED = {"gpt2", "gpt_bigcode"}
"""Names with an embedding for each of 512 positions."""

STATE_IS_KEYS = {"afm7", "gemma3n"} if oracle.OLD_PROTOCOL else set()
"""Names that take a cache's ``state`` for keys and values, so planes of numbers will not do."""

NO_MASK = {"minicpm3", "phixtral"} if oracle.OLD_PROTOCOL else set()
"""Names that make their masks alone."""


FEW = ["llama", "gemma3_text", "gpt_oss", "llama4", "deepseek_v3", "mimo_v2_flash", "gemma4"]
FEW += ["qwen3_next", "gemma2", "mistral3", "falcon_h1", "deepseek_v32", "olmo3", "gpt_neox"]


def right(name: str, count: int = 24, length: int = 41) -> list[int]:
    """The tokens of mlx-lm's caches, or of an oracle where those fail."""
    if name == "plamo3" or (name == "llama4" and name in WRONG):
        model = oracle.model(name)
        return archs.greedy(model, archs.prompt(length), count, oracle.keepers(model))
    return list(oracle.said(name, count, length))


def shells(cache: Any) -> list[KVFunCache]:
    return [leaf for leaf in oracle.leaves(cache) if isinstance(leaf, KVFunCache)]


def made(name: str, spec: str, max_size: int | None = None) -> Any:
    """The caches, or a skip where the model is known not to take them."""
    try:
        return make_prompt_cache(oracle.model(name), spec, max_size)
    except UnsupportedError as error:
        quantized = spec not in ("plain", "bf16")
        if (name in STATE_IS_KEYS and quantized) or (name in NO_MASK and max_size):
            pytest.skip(str(error))
        raise


def others(cache: Any, spec: str) -> str:
    """The spec of second caches: a model that reaches into them keeps them plain."""
    specs = {shell.record.codec.spec for shell in shells(cache)}
    return "plain" if "plain" in specs else spec


# -- plain --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_plain_says_what_mlx_lm_says(name):
    model = oracle.model(name)
    tokens = archs.greedy(model, PROMPT, 24, made(name, "plain"))
    assert tokens == right(name)
    assert len(set(tokens)) > 1
    if name == "gemma3n" and name in WRONG:
        return
    for step in (7, 13, 1) if name in FEW else (7,):
        assert archs.greedy(model, PROMPT, 24, made(name, "plain"), step=step) == tokens


@pytest.mark.parametrize("name", sorted({*archs.WINDOWED, *archs.CHUNKED}))
def test_far_past_a_compaction(name):
    """Windows of 12 columns live in buffers of 512: they slide a long way, then are compacted."""
    long, cache = archs.prompt(600), made(name, "plain")
    step = 2048 if name == "gemma3n" and name in WRONG else 67
    got = archs.greedy(oracle.model(name), long, 16, cache, step=step)
    assert got == right(name, 16, 600)
    bounded = [shell for shell in shells(cache) if shell.record.geometry.policy.limit]
    assert bounded
    for shell in bounded:
        policy = shell.record.geometry.policy
        assert shell.size() <= (policy.window or policy.chunk)
        assert shell.record.geometry.capacity <= policy.limit


def test_private_caches_are_refused_by_name():
    for name in archs.PRIVATE:
        with pytest.raises(UnsupportedError, match=rf"{name}.* kv8 .*layer 0.*LayerCache"):
            make_prompt_cache(oracle.model(name), "kv8")


# -- quantized ----------------------------------------------------------------------------------


def quantized(cache: Any, place: int) -> Any:
    return mlx_lm_cache.QuantizedKVCache(group_size=32, bits=8)


@pytest.mark.parametrize("name", NAMES)
def test_kv8_runs_says_so_and_is_smaller(name):
    model, cache = oracle.model(name), made(name, "kv8-g32")
    tokens = archs.greedy(model, PROMPT, 8, cache)
    assert len(tokens) == 8

    if name in archs.PLAIN and name not in archs.FLOAT_ONLY:  # mlx-lm's can run it too
        theirs = oracle.exchanged(mlx_lm_cache.make_prompt_cache(model), quantized)
        assert archs.greedy(model, PROMPT, 8, theirs) == tokens
        assert {r.read for r in cache.report} == {"read as packed numbers"}

    plain = made(name, "plain")
    archs.greedy(model, PROMPT, 8, plain)
    flat = list(oracle.leaves(cache))
    assert len(cache.report) == len(flat)
    assert describe(cache)
    for report, ours, float_one in zip(cache.report, flat, oracle.leaves(plain), strict=True):
        if isinstance(ours, KVFunStates):
            assert (report.spec, report.kind) == ("plain", "recurrent")
            continue
        assert report.spec == ours.record.codec.spec
        if report.spec == "kv8-g32":
            layout, columns = ours.record.layout, ours.record.geometry.capacity
            token = ours.record.codec.token_nbytes(
                layout.kv_heads, layout.head_dim, layout.value_dim, layout.key_dtype
            )
            assert ours.nbytes == columns * token
            assert ours.nbytes * 3 < float_one.nbytes
        else:
            assert report.spec == "plain"
            assert len(oracle.keepers(model)) < len(flat)  # only a second cache of one layer
    if any(isinstance(leaf, KVFunCache) for leaf in flat):
        assert "kv8-g32" in {report.spec for report in cache.report}


STEPS = (13, 17, 1, 1, 9)


@pytest.mark.parametrize("name", NAMES)
def test_kv8_is_the_decoded_numbers_under_a_mask(name):
    model, cache, tokens = oracle.model(name), made(name, "kv8-g32"), archs.prompt(60)
    reference = oracle.keepers(model, "kv8-g32", others=others(cache, "kv8-g32"))
    wanted = oracle.logits(model, reference, tokens, *STEPS)
    assert oracle.spread(wanted, oracle.logits(model, cache, tokens, *STEPS)) < 2e-2


SPECS = ["bf16", "k8v4-g32", "kv4-g32", "kv3-g64-pad", "bf16+kv4-g32", "kv6-g32", "kv2-g32+f16"]


@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize("spec", SPECS)
def test_other_codecs_are_the_decoded_numbers_under_a_mask(name, spec):
    spec = Codec.of(spec).spec
    model, cache, tokens = oracle.model(name), made(name, spec), archs.prompt(60)
    reference = oracle.keepers(model, spec, others=others(cache, spec))
    wanted = oracle.logits(model, reference, tokens, *STEPS)
    assert oracle.spread(wanted, oracle.logits(model, cache, tokens, *STEPS)) < 2e-2


# -- nothing fails later ------------------------------------------------------------------------


@pytest.mark.parametrize("name", archs.available())
def test_a_model_refuses_at_once_or_runs(name):
    model = oracle.model(name)
    names = {archs.ARCHITECTURES[name]["model_type"], getattr(model, "model_type", name)}
    for spec in ("plain", "f16", "kv8-g32", "kv4", "k8v4-g32", "f16+kv3-g32", "kv5-g64-pad"):
        for max_size in (None, 16):
            try:
                cache = make_prompt_cache(model, spec, max_size)
            except UnsupportedError as error:
                said = str(error)
                assert any(known in said for known in names)
                assert f" {Codec.of(spec).spec} " in said
                assert max_size is None or f"max_size={max_size}" in said
                continue
            tokens = PROMPT[:20]
            logits = oracle.logits(model, cache, tokens, 12, 5, 1)
            assert mx.all(mx.isfinite(logits)).item()


# -- saving, copying ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("spec", ["plain", "kv8-g32"])
def test_saved_and_copied_caches_continue(name, spec, tmp_path):
    model, cache = oracle.model(name), made(name, spec)
    wanted = archs.greedy(model, PROMPT, 16, made(name, spec))
    assert archs.greedy(model, PROMPT, 6, cache) == wanted[:6]  # all six have been run
    path = str(tmp_path / "cache.safetensors")
    mlx_lm_cache.save_prompt_cache(path, cache, {"model": name})
    loaded, metadata = mlx_lm_cache.load_prompt_cache(path, return_metadata=True)
    assert metadata == {"model": name}
    copied = copy.deepcopy(cache)
    assert describe(cache) == describe(loaded) == describe(copied)
    for each in (cache, loaded, copied):
        assert archs.greedy(model, wanted[6:7], 9, each) == wanted[7:]


# -- a limit on what is visible -----------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in NAMES if name not in archs.ROW_POSITIONS])
def test_max_size_shows_the_first_and_the_newest(name):
    model, max_size = oracle.model(name), 24
    tokens = archs.prompt(500 if name in LEARNED else 560)
    steps = (13, 17, 1, 1, 61)
    cache = made(name, "plain", max_size)
    got = oracle.logits(model, cache, tokens, *steps)
    for shell in shells(cache):
        policy = shell.record.geometry.policy
        assert shell.size() <= max_size
        assert shell.record.geometry.capacity <= policy.limit <= 512
    wanted = oracle.logits(model, oracle.keepers(model, max_size=max_size), tokens, *steps)
    assert oracle.spread(wanted, got) < 1e-3


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "mistral3"])
@pytest.mark.parametrize("sinks", [0, 1, 7])
def test_max_size_with_other_sinks(name, sinks):
    model, tokens = oracle.model(name), archs.prompt(70)
    cache = make_prompt_cache(model, "kv8-g32", 20, sinks=sinks)
    wanted = oracle.keepers(model, "kv8-g32", 20, sinks)
    assert oracle.spread(
        oracle.logits(model, wanted, tokens, 9, 1), oracle.logits(model, cache, tokens, 9, 1)
    ) < (2e-2)
    assert all(shell.size() <= 20 for shell in shells(cache))


@pytest.mark.parametrize("name", ["gemma3_text", "gpt_oss", "llama+sliding", "mimo_v2_flash"])
def test_max_size_below_the_windows_of_the_model(name):
    model, tokens = oracle.model(name), archs.prompt(60)
    cache = make_prompt_cache(model, "plain", 9)
    got = oracle.logits(model, cache, tokens, 13, 1)
    assert all(shell.size() <= 9 for shell in shells(cache))
    wanted = oracle.logits(model, oracle.keepers(model, max_size=9), tokens, 13, 1)
    assert oracle.spread(wanted, got) < 1e-3


@pytest.mark.parametrize("name", sorted({"afm7", "minimax_m3_vl"} & {*NAMES}))
def test_max_size_is_refused_where_positions_are_counted_in_columns(name):
    for spec in ("plain", "kv8-g32"):
        with pytest.raises(UnsupportedError, match=rf"{name} .*{spec} .*max_size=64.*columns"):
            make_prompt_cache(oracle.model(name), spec, 64)


def test_max_size_of_a_chunked_model():
    model = oracle.model("llama4")
    with pytest.raises(UnsupportedError, match=r"llama4.*max_size=8.*chunk of 12"):
        make_prompt_cache(model, "plain", 8)
    tokens, cache = archs.prompt(60), make_prompt_cache(model, "plain", 16)
    wanted = oracle.logits(model, oracle.keepers(model, max_size=16), tokens, 13, 1)
    assert oracle.spread(wanted, oracle.logits(model, cache, tokens, 13, 1)) < 1e-3
    assert all(shell.size() <= 16 for shell in shells(cache))


@pytest.mark.parametrize("wrong", [4, 0, -1, 2.5])
def test_max_size_must_leave_room(wrong):
    with pytest.raises(ValueError, match="max_size must be an integer above the 4 sinks"):
        make_prompt_cache(oracle.model("llama"), "plain", wrong)
