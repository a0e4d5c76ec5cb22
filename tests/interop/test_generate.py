"""mlx-lm's generators, its store of prompt caches and its server's questions, on kvfun caches."""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
import pytest

pytest.importorskip("mlx_lm")

from mlx_lm.generate import generate_step
from mlx_lm.models.cache import LRUPromptCache, can_trim_prompt_cache, trim_prompt_cache

from kvfun.errors import RollbackError
from kvfun.interop.mlx_lm import describe, make_prompt_cache
from tests.interop import architectures as archs
from tests.interop import oracle

PROMPT = oracle.PROMPT
SPECS = ["plain", "kv8-g32"]


def run(model: Any, cache: Any, tokens: list[int]) -> Any:
    """The caches after tokens, in the chunks and single steps that generators make."""
    oracle.logits(model, cache, tokens[:-1], 13)
    model(mx.array([tokens[-1:]]), cache=cache)
    mx.eval([one.state for one in cache])
    return cache


def cold(model: Any, spec: str, tokens: list[int], count: int = 8) -> list[int]:
    return archs.greedy(model, tokens, count, make_prompt_cache(model, spec))


# -- generate_step ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_next", "gpt_oss"])
@pytest.mark.parametrize("spec", [*SPECS, "k8v4-g32"])
def test_generate_step_in_turns(name, spec):
    """Two turns on one list, on mlx-lm's own stream and on whatever stream is the default."""
    model, whole = oracle.model(name), make_prompt_cache(oracle.model(name), spec)
    said = archs.greedy(model, PROMPT, 10, whole)
    assert {one.offset for one in whole if hasattr(one, "offset")} == {51}
    first = said[:10]
    second = archs.greedy(model, [7, 8, 9], 10, whole)
    assert second == cold(model, spec, [*PROMPT, *first, 7, 8, 9], 10)
    logits = oracle.logits(model, make_prompt_cache(model, spec), PROMPT, 13, 1)
    assert int(mx.argmax(logits[-1])) == first[0]


def test_stopping_early_leaves_the_caches_usable():
    model = oracle.model("gemma3_text")
    cache = make_prompt_cache(model, "kv8-g32")
    steps = generate_step(mx.array(PROMPT), model, max_tokens=20, prompt_cache=cache)
    said = [int(token) for token, _ in (next(steps), next(steps), next(steps))]
    steps.close()
    assert {one.offset for one in cache} == {44}
    assert archs.greedy(model, [5], 6, cache) == cold(model, "kv8-g32", [*PROMPT, *said, 5], 6)


def test_max_tokens_zero_fills_a_cache():
    model = oracle.model("llama")
    cache = make_prompt_cache(model, "kv8-g32")
    list(generate_step(mx.array(PROMPT), model, max_tokens=0, prompt_cache=cache))
    assert {one.offset for one in cache} == {41}
    assert archs.greedy(model, [5], 6, cache) == cold(model, "kv8-g32", [*PROMPT, 5], 6)


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "mamba2", "deepseek_v3"])
def test_1_23_39_kv_bits_leaves_our_caches_alone(name):
    model, cache = oracle.model(name), make_prompt_cache(oracle.model(name), "bf16")
    before = list(cache)
    quantize = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 0}
    tokens = archs.greedy(model, PROMPT, 8, cache, **quantize)
    assert all(x is y for x, y in zip(before, cache, strict=True))
    assert tokens == cold(model, "bf16", PROMPT)


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt_oss", "llama4", "gemma3n"])
@pytest.mark.parametrize("spec", ["plain", "k8v4-g32"])
def test_21_the_server_takes_its_sequential_path(name, spec):
    """It batches where every cache has a ``merge``."""
    if oracle.OLD_PROTOCOL and name == "gemma3n":
        spec = "plain"
    cache = make_prompt_cache(oracle.model(name), spec)
    assert not any(hasattr(one, "merge") for one in cache)


def test_43_trim_prompt_cache_takes_the_same_from_all():
    model = oracle.model("gemma3_text")
    cache = run(model, make_prompt_cache(model, "plain"), PROMPT)
    assert can_trim_prompt_cache(cache)
    assert trim_prompt_cache(cache, 5) == 5
    assert {one.offset for one in cache} == {36}
    assert trim_prompt_cache(cache, 100) == 36
    assert archs.greedy(model, PROMPT, 8, cache) == cold(model, "plain", PROMPT)


def test_42_the_callers_list_is_current():
    model = oracle.model("llama")
    cache = make_prompt_cache(model, "kv8-g32")
    text, held = describe(cache), list(cache)
    archs.greedy(model, PROMPT, 8, cache)
    assert all(x is y for x, y in zip(held, cache, strict=True))
    assert describe(cache) == text


# -- the store of prompt caches -----------------------------------------------------------------

FULL = ["llama", "gemma2", "deepseek_v3"]
OTHER = [3, 4, 5, 6, 7]


def lru(*entries: tuple[list[int], Any]) -> LRUPromptCache:
    store = LRUPromptCache()
    for tokens, cache in entries:
        store.insert_cache("model", tokens, cache)
    return store


def fetched(store: LRUPromptCache, tokens: list[int]) -> tuple[Any, list[int]]:
    return store.fetch_nearest_cache("model", tokens)


@pytest.mark.parametrize("name", [*FULL, "gemma3_text", "mamba2", "qwen3_next"])
@pytest.mark.parametrize("spec", SPECS)
def test_45_an_exact_hit(name, spec):
    model = oracle.model(name)
    store = lru((PROMPT, run(model, make_prompt_cache(model, spec), PROMPT)))
    assert store.nbytes == sum(one.nbytes for one in fetched(store, PROMPT)[0])
    for _ in range(2):
        cache, rest = fetched(store, PROMPT)
        assert rest == []
        assert archs.greedy(model, OTHER, 8, cache) == cold(model, spec, PROMPT + OTHER)


@pytest.mark.parametrize("name", [*FULL, "gemma3_text", "mamba2", "qwen3_next"])
@pytest.mark.parametrize("spec", SPECS)
def test_55_a_shorter_entry_is_continued(name, spec):
    model = oracle.model(name)
    store = lru((PROMPT[:20], run(model, make_prompt_cache(model, spec), PROMPT[:20])))
    for tokens in (PROMPT, PROMPT[:20] + OTHER, PROMPT):
        cache, rest = fetched(store, tokens)
        assert rest == tokens[20:]
        assert archs.greedy(model, rest, 8, cache) == cold(model, spec, tokens)


@pytest.mark.parametrize("name", [*FULL, "gemma3_text"])
@pytest.mark.parametrize("spec", SPECS)
def test_43_a_longer_entry_is_trimmed_back(name, spec):
    """Windows too, as long as they have dropped nothing."""
    model = oracle.model(name)
    store = lru((PROMPT, run(model, make_prompt_cache(model, spec), PROMPT)))
    for tokens in (PROMPT[:30] + OTHER, PROMPT[:30], PROMPT[:2] + OTHER, PROMPT):
        cache, rest = fetched(store, tokens)
        assert len(rest) < len(tokens)
        if rest:
            assert archs.greedy(model, rest, 8, cache) == cold(model, spec, tokens)


@pytest.mark.parametrize("spec", SPECS)
def test_10_and_11_windows_that_have_dropped_fall_back(spec):
    model, long = oracle.model("gemma3_text"), archs.prompt(620)
    short = run(model, make_prompt_cache(model, spec), long[:100])
    whole = run(model, copy.deepcopy(short), long[100:])
    assert not can_trim_prompt_cache(whole)
    store = lru((long[:100], short), (long, whole))
    assert len(store) == 2  # the shorter one is not dropped for the longer one
    tokens = long[:400] + OTHER
    cache, rest = fetched(store, tokens)
    assert rest == tokens[100:]
    assert archs.greedy(model, rest, 8, cache) == cold(model, spec, tokens)
    assert fetched(store, long[:50] + OTHER)[1] == OTHER  # trimmed back in the shorter one
    alone = lru((long, whole))
    assert fetched(alone, tokens) == (None, tokens)
    cache, rest = fetched(alone, long + OTHER)
    assert archs.greedy(model, rest, 8, cache) == cold(model, spec, long + OTHER)


def test_13_a_reserve_takes_back_a_turn_and_refuses_more():
    model, long = oracle.model("gemma3_text"), archs.prompt(620)
    whole = run(model, make_prompt_cache(model, "plain", reserve=40), long)
    store, tokens = lru((long, whole)), long[:590] + OTHER
    cache, rest = fetched(store, tokens)
    assert rest == OTHER
    assert archs.greedy(model, rest, 8, cache) == cold(model, "plain", tokens)
    with pytest.raises(RollbackError):
        fetched(store, long[:40] + OTHER)
    cache, rest = fetched(store, long + OTHER)  # and the entry is what it was
    assert archs.greedy(model, rest, 8, cache) == cold(model, "plain", long + OTHER)


@pytest.mark.parametrize("spec", SPECS)
def test_54_entries_do_not_see_what_is_appended_later(spec):
    model = oracle.model("gemma3_text")
    live = run(model, make_prompt_cache(model, spec), PROMPT)
    store = lru((PROMPT, copy.deepcopy(live)))
    wanted = cold(model, spec, PROMPT + OTHER)
    archs.greedy(model, [9, 9, 9], 20, live)
    first, _ = fetched(store, PROMPT)
    second, _ = fetched(store, PROMPT)
    assert archs.greedy(model, OTHER, 8, first) == wanted
    archs.greedy(model, [1, 2, 3], 30, first)
    assert archs.greedy(model, OTHER, 8, second) == wanted
    assert archs.greedy(model, OTHER, 8, fetched(store, PROMPT)[0]) == wanted


def test_46_a_fetch_copies_nothing():
    model = oracle.model("llama")
    store = lru((PROMPT, run(model, make_prompt_cache(model, "plain"), PROMPT)))
    mx.synchronize()
    before = mx.get_active_memory()
    held = [fetched(store, PROMPT) for _ in range(50)]
    assert mx.get_active_memory() == before
    assert len(held) == 50


def test_47_the_byte_limit_counts_our_bytes():
    model = oracle.model("llama")
    entry = run(model, make_prompt_cache(model, "kv8-g32"), PROMPT)
    size = sum(one.nbytes for one in entry)
    store = LRUPromptCache(max_bytes=size)
    store.insert_cache("model", PROMPT, entry)
    assert (len(store), store.nbytes) == (1, size)
    store.insert_cache("model", OTHER, run(model, make_prompt_cache(model, "kv8-g32"), OTHER))
    assert len(store) == 1
