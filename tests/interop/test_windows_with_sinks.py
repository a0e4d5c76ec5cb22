"""Windows with sinks under models whose attention is full."""

from __future__ import annotations

import mlx.core as mx
import pytest

pytest.importorskip("mlx_lm")

from mlx_lm.models.cache import save_prompt_cache

import kvfun
from kvfun.errors import UnsupportedError
from kvfun.interop.mlx_lm import attention, describe, load, make_prompt_cache
from tests.interop import architectures as archs
from tests.interop import oracle

SIZE, SINKS = 14, 3


def read(model, tokens, chunk, **options):
    cache = make_prompt_cache(model, "plain", SIZE, sinks=SINKS, **options)
    with attention(model):
        found = [
            model(mx.array([tokens[i : i + chunk]]), cache=cache)
            for i in range(0, len(tokens), chunk)
        ]
    return mx.concatenate(found, axis=1), cache


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3", "phi3", "glm4"])
@pytest.mark.parametrize("rebase", [False, True])
def test_every_chunk_size_reads_the_same(name, rebase):
    model, tokens = oracle.model(name), archs.prompt(60)
    one, cache = read(model, tokens, 1, rebase=rebase)
    for chunk in (2, 7, 60):
        other, _ = read(model, tokens, chunk, rebase=rebase)
        assert mx.allclose(one, other, atol=2e-3).item()
    assert ("right before it" in describe(cache)) == rebase


def test_sinks_are_read_where_they_are_counted():
    """Up to the window's end it makes no difference where positions are counted, then it does."""
    model, tokens = oracle.model("llama"), archs.prompt(60)
    one, _ = read(model, tokens, 10)
    other, _ = read(model, tokens, 10, rebase=True)
    assert mx.allclose(one[:, :SIZE], other[:, :SIZE], atol=1e-4).item()
    assert mx.abs(one[:, SIZE + 4 :] - other[:, SIZE + 4 :]).max().item() > 1e-2


def test_without_routed_attention_one_token_is_read_exactly_and_more_are_refused():
    model, tokens = oracle.model("llama"), archs.prompt(40)
    routed, _ = read(model, tokens, 1, rebase=True)
    cache = make_prompt_cache(model, "plain", SIZE, sinks=SINKS, rebase=True)
    found = [model(mx.array([[token]]), cache=cache) for token in tokens]
    assert mx.allclose(routed, mx.concatenate(found, axis=1), atol=2e-3).item()
    with pytest.raises(UnsupportedError, match="different distances"):
        model(mx.array([tokens[:5]]), cache=cache)


def test_files_of_rebased_caches(tmp_path):
    model, tokens = oracle.model("llama"), archs.prompt(40)
    _, cache = read(model, tokens, 8, rebase=True)
    path = str(tmp_path / "cache.safetensors")
    save_prompt_cache(path, cache)
    back, _ = load(path)
    assert all(isinstance(shell.record, kvfun.Rebased) for shell in back)
    more = mx.array([[3, 4, 5]])
    with attention(model):
        assert mx.array_equal(model(more, cache=cache), model(more, cache=back)).item()


def test_what_cannot_be_rebased():
    with pytest.raises(ValueError, match="max_size"):
        make_prompt_cache(oracle.model("llama"), "plain", rebase=True)
    with pytest.raises(UnsupportedError, match="RoPE"):
        make_prompt_cache(oracle.model("gpt2"), "plain", SIZE, sinks=SINKS, rebase=True)
    with pytest.raises(UnsupportedError, match="Chain"):
        make_prompt_cache(oracle.model("llama"), "rot-k4v4", SIZE, sinks=SINKS, rebase=True)
