"""The table of small models does what the tests that use it take for granted."""

from __future__ import annotations

import itertools
import time

import mlx.core as mx
import pytest

pytest.importorskip("mlx_lm")

from mlx_lm.models.cache import QuantizedKVCache, create_causal_mask, make_prompt_cache

from tests.interop import architectures as archs

NAMES = archs.available()
PROMPT = archs.prompt(41)


def spread(x: mx.array, y: mx.array) -> float:
    """The largest difference, in standard deviations of `x`."""
    return (mx.max(mx.abs(x - y)) / mx.std(x)).item()


def test_the_table_is_wide():
    assert len({archs.ARCHITECTURES[name]["model_type"] for name in NAMES}) >= 60


def test_available_leaves_out_missing_modules_only():
    assert set(archs.ARCHITECTURES) - set(NAMES) >= set(archs.BROKEN)
    assert set(archs.BROKEN) <= set(archs.ARCHITECTURES)
    assert set(archs.CHUNKS_DIFFER) <= set(archs.ARCHITECTURES)


def test_lists_of_facts():
    for name in ("RECURRENT", "WINDOWED", "CHUNKED", "NESTED", "KV_SHARED", "MLA", "PLAIN"):
        assert set(getattr(archs, name)) <= set(NAMES)
    assert "llama4" in archs.CHUNKED
    assert {"gemma3n", "gemma4", "afm7"} <= set(archs.KV_SHARED)
    assert {"deepseek_v3", "kimi_linear"} <= set(archs.MLA)
    assert not {"deepseek_v2", "mimo_v2_flash", "llama"} & set(archs.MLA)
    assert {"mamba2", "qwen3_next", "lfm2"} <= set(archs.RECURRENT)
    assert {"gemma3", "gpt_oss", "llama+sliding"} <= set(archs.WINDOWED)
    assert {"llama", "deepseek_v3"} <= set(archs.PLAIN)


def test_prompts_are_prefixes():
    assert archs.prompt(60)[:41] == PROMPT
    assert archs.prompt(41, seed=1) != PROMPT
    assert all(0 <= token < archs.VOCAB for token in PROMPT)


@pytest.mark.parametrize("name", NAMES)
def test_builds_quickly_and_the_same(name):
    archs.build(name)  # imports
    start = time.process_time()
    model = archs.build(name)
    assert time.process_time() - start < 0.5
    tokens = PROMPT[:5]
    first, again = archs.logits(model, tokens), archs.logits(archs.build(name), tokens)
    assert first.dtype == mx.float32
    assert mx.array_equal(first, again).item()
    assert spread(first, archs.logits(archs.build(name, seed=1), tokens)) > 0.1


@pytest.mark.parametrize("name", NAMES)
def test_logits_depend_on_the_start_of_the_prompt(name):
    model = archs.build(name)
    logits = archs.logits(model, PROMPT)
    assert mx.all(mx.isfinite(logits)).item()
    other = [(PROMPT[0] + 7) % 120, (PROMPT[1] + 11) % 120, *PROMPT[2:]]
    assert spread(logits[-1], archs.logits(model, other)[-1]) > 0.01
    assert len(set(mx.argmax(logits, axis=-1).tolist())) > 10  # not one token for ever


@pytest.mark.parametrize("name", NAMES)
def test_chunks_give_the_tokens_of_one_call(name):
    model = archs.build(name)
    tokens = archs.greedy(model, PROMPT, 8)
    assert len(tokens) == 8
    assert len(set(tokens)) > 1
    if name not in archs.CHUNKS_DIFFER:
        assert archs.greedy(model, PROMPT, 8, step=7) == tokens
        whole, parts = archs.logits(model, PROMPT), archs.logits(model, PROMPT, step=7)
        assert spread(whole, parts) < 1e-3


@pytest.mark.parametrize("name", NAMES)
def test_single_steps_give_the_logits_of_one_call(name):
    if name in archs.CHUNKS_DIFFER:
        pytest.skip(archs.CHUNKS_DIFFER[name])
    model, tokens = archs.build(name), PROMPT[:20]
    assert spread(archs.logits(model, tokens), archs.logits(model, tokens, step=1)) < 1e-3


@pytest.mark.parametrize("name", sorted(set(archs.CHUNKS_DIFFER) & set(NAMES)))
def test_exceptions_are_still_exceptions(name):
    model = archs.build(name)
    try:
        difference = spread(archs.logits(model, PROMPT), archs.logits(model, PROMPT, step=7))
    except ValueError:
        return
    assert difference > 1e-3


class Concatenated:
    """As little of a cache as attention needs."""

    def __init__(self):
        self.rows = None
        self.offset = 0

    def update_and_fetch(self, keys, values):
        new = (keys, values)
        if self.rows is not None:
            new = tuple(mx.concatenate(pair, axis=2) for pair in zip(self.rows, new, strict=True))
        self.rows = new
        self.offset += keys.shape[2]
        return new

    def make_mask(self, n, return_array=False, window_size=None):
        if n == 1 and window_size is None:
            return None
        return create_causal_mask(n, self.offset, window_size=window_size)


def replaced(caches, make, kinds):
    """`caches`, each leaf of one of `kinds` replaced."""
    out = []
    for cache in caches:
        children = getattr(cache, "caches", None)
        if children is not None:
            cache.caches = tuple(replaced(children, make, kinds))
        out.append(make() if children is None and type(cache).__name__ in kinds else cache)
    return out


def run(model, caches):
    parts, ends = [], (0, 13, 30, 31, 32, 41)
    for start, end in itertools.pairwise(ends):
        parts.append(model(mx.array([PROMPT[start:end]]), cache=caches)[0])
        mx.eval(parts[-1])
    return mx.concatenate(parts, axis=0)


@pytest.mark.parametrize("name", NAMES)
def test_three_members_and_the_extra_ones_are_enough(name):
    """A cache of three members, all rows kept, gives the logits of one call."""
    if name == "gemma3n" and name in archs.CHUNKS_DIFFER:
        pytest.skip(archs.CHUNKS_DIFFER[name])
    model = archs.build(name)
    caches = replaced(make_prompt_cache(model), Concatenated, {"KVCache", "RotatingKVCache"})
    if name in archs.EXTRA_MEMBERS:
        with pytest.raises(AttributeError):
            run(model, caches)
    elif name == "llama4" and name in archs.CHUNKS_DIFFER:
        with pytest.raises(ValueError, match="broadcast"):
            run(model, caches)
    else:
        assert spread(archs.logits(model, PROMPT), run(model, caches)) < 1e-3


def quantized():
    return QuantizedKVCache(group_size=32, bits=8)


@pytest.mark.parametrize("name", sorted({*NAMES} - {"llama4"}))
def test_float_only(name):
    model = archs.build(name)
    caches = replaced(make_prompt_cache(model), quantized, {"KVCache"})
    if name in archs.FLOAT_ONLY:
        with pytest.raises((AttributeError, TypeError, ValueError)):
            run(model, caches)
    else:
        assert mx.all(mx.isfinite(run(model, caches))).item()
