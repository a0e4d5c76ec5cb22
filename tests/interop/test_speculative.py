"""Speculative decoding says what plain decoding says, token for token."""

from __future__ import annotations

from functools import cache as memoize

import mlx.core as mx
import pytest

pytest.importorskip("mlx_lm")

from mlx_lm.generate import speculative_generate_step

from kvfun.errors import UnsupportedError
from kvfun.interop.mlx_lm import make_prompt_cache, speculative_cache
from tests.interop import architectures as archs
from tests.interop import oracle

WINDOWED = ["gemma3_text", "gpt_oss", "cohere2", "olmo3", "exaone4", "ministral3", "llama+sliding"]
WINDOWED += ["gemma4_text+k_eq_v", "mimo_v2_flash", "step3p5"]
FULL = ["llama", "gemma2", "mistral3", "deepseek_v3", "qwen3"]
CHUNKED = [] if "llama4" in archs.CHUNKS_DIFFER else ["llama4"]
SHARED = ["afm7", "gemma4", "gemma4_text"]
SHARED += [] if "gemma3n" in archs.CHUNKS_DIFFER else ["gemma3n"]
COUNT = 24
PROMPT = oracle.PROMPT


@memoize
def alone(name: str, spec: str, length: int = 41, count: int = COUNT) -> list[int]:
    model = oracle.model(name)
    return archs.greedy(model, archs.prompt(length), count, make_prompt_cache(model, spec))


def speculative(name, draft, cache, drafts, prompt=PROMPT, count=COUNT):
    steps = speculative_generate_step(
        mx.array(prompt),
        oracle.model(name),
        draft,
        num_draft_tokens=drafts,
        max_tokens=count,
        prompt_cache=cache,
    )
    tokens, accepted = [], 0
    for token, _, drafted in steps:
        tokens.append(int(token))
        accepted += drafted
    return tokens, accepted


def close(name: str, seed: int):
    """A draft model that is right now and then: the target with noise on one matrix."""
    draft = archs.build(name)
    mx.random.seed(seed)
    head = getattr(draft, "lm_head", None)
    weight = (head if head is not None else _embedding(draft)).weight
    noisy = weight + 0.3 * mx.std(weight) * mx.random.normal(weight.shape)
    (head if head is not None else _embedding(draft)).weight = noisy
    return draft


def _embedding(model):
    return next(part for part in model.modules() if hasattr(part, "as_linear"))


def check(name, spec, draft, drafts, wrap=True, length=41):
    target, draft_cache = (
        make_prompt_cache(oracle.model(name), spec),
        make_prompt_cache(draft, spec),
    )
    if wrap:
        cache = speculative_cache(target, draft_cache, drafts)
    else:
        cache = target + draft_cache
        assert type(cache) is list
    tokens, accepted = speculative(name, draft, cache, drafts, archs.prompt(length))
    assert tokens == alone(name, spec, length)
    # The caller's own caches have seen the prompt and all tokens but, at most, the last.
    for leaf in oracle.leaves(target):
        assert leaf.offset in (length + COUNT - 1, length + COUNT)
    if wrap:
        assert len({leaf.offset for leaf in oracle.leaves(draft_cache)}) == 1
    return accepted


@pytest.mark.parametrize("name", WINDOWED + FULL + CHUNKED)
@pytest.mark.parametrize("spec", ["plain", "kv8-g32"])
def test_equals_plain_decoding(name, spec):
    seeds = ((1, 1), (2, 2), (3, 3), (4, 4)) if spec == "plain" else ((1, 2), (4, 3))
    for drafts, seed in seeds:
        check(name, spec, oracle.model(name, seed), drafts)
    assert check(name, spec, oracle.model(name), 3) > COUNT // 2  # its own draft: nearly all
    check(name, spec, close(name, 5), 4)


@pytest.mark.parametrize("name", WINDOWED + FULL + CHUNKED)
def test_the_bare_lists_will_do(name):
    for drafts, seed in ((1, 1), (3, 2)):
        check(name, "plain", oracle.model(name, seed), drafts, wrap=False)
    check(name, "kv8-g32", oracle.model(name, 3), 4, wrap=False)


@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize("spec", ["plain", "bf16"])
def test_models_whose_layers_share_caches(name, spec):
    """mlx-lm cuts the list at ``len(model.layers)``; these have fewer caches."""
    model = oracle.model(name)
    assert len(make_prompt_cache(model, spec)) < len(model.layers)
    for drafts, seed in ((1, 1), (2, 2), (4, 3)):
        check(name, spec, oracle.model(name, seed), drafts)
    check(name, spec, close(name, 4), 3)


@pytest.mark.parametrize("name", ["gemma3_text", "gpt_oss"])
def test_across_a_compaction(name):
    """A buffer of 512 columns runs full in the middle of the drafts."""
    for drafts, seed in ((1, 1), (4, 0)):
        for length in (500, 504):
            check(name, "plain", oracle.model(name, seed), drafts, length=length)


def test_a_draft_of_another_architecture():
    draft, spec = oracle.model("llama", 3), "kv8-g32"
    target = make_prompt_cache(oracle.model("gemma3_text"), spec)
    cache = speculative_cache(target, make_prompt_cache(draft, "bf16"), 3)
    tokens, _ = speculative("gemma3_text", draft, cache, 3)
    assert tokens == alone("gemma3_text", spec)


def test_a_second_turn_on_the_same_caches():
    model, draft = oracle.model("gemma3_text"), close("gemma3_text", 1)
    target, own = make_prompt_cache(model, "plain"), make_prompt_cache(draft, "plain")
    first, _ = speculative("gemma3_text", draft, speculative_cache(target, own, 3), 3)
    reference = make_prompt_cache(model, "plain")
    seen = PROMPT + first
    # Both models go back to one length before the turn starts.
    done = min(leaf.offset for leaf in oracle.leaves(target + own))
    for leaf in oracle.leaves(target + own):
        leaf.trim(leaf.offset - done)
    more = [5, 17, 99, 3]
    wanted = archs.greedy(model, seen + more, COUNT, reference)
    cache = speculative_cache(target, own, 3)
    tokens, _ = speculative("gemma3_text", draft, cache, 3, seen[done:] + more)
    assert tokens == wanted


@pytest.mark.parametrize("name", ["mamba2", "qwen3_next", "falcon_h1", "lfm2", "gear"])
def test_recurrent_models_are_refused(name):
    if name not in archs.available():
        pytest.skip("not in this mlx-lm")
    model, llama = oracle.model(name), oracle.model("llama")
    mine, plain = make_prompt_cache(model, "plain"), make_prompt_cache(llama, "plain")
    for pair in ((mine, plain), (plain, mine)):
        with pytest.raises(UnsupportedError, match="takes back tokens, which a KVFunStates cannot"):
            speculative_cache(*pair, 2)
