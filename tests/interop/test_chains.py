"""Chains under mlx-lm's models: residual windows and raw sinks."""

from __future__ import annotations

import copy
import json

import mlx.core as mx
import pytest

pytest.importorskip("mlx_lm")

import mlx_lm.models.cache as mlx_lm_cache

import kvfun
from kvfun import storage
from kvfun.errors import CorruptError, UnsupportedError
from kvfun.interop.mlx_lm import KVFunCache, attention, describe, load, make_prompt_cache
from tests.interop import architectures as archs
from tests.interop import oracle
from tests.interop.test_architectures import NAMES, STATE_IS_KEYS, right

RAW = {"residual": 8, "block": 4, "raw_sinks": 3}


def made(name: str, spec: str, **options):
    try:
        return make_prompt_cache(oracle.model(name), spec, **options)
    except UnsupportedError as error:
        if name in STATE_IS_KEYS or (spec != "f32" and name in archs.FLOAT_ONLY):
            pytest.skip(str(error))
        raise


@pytest.mark.parametrize("name", NAMES)
def test_parts_that_round_nothing_give_the_tokens_of_one_cache(name):
    cache = made(name, "f32", **RAW)
    assert archs.greedy(oracle.model(name), archs.prompt(41), 24, cache) == right(name)


@pytest.mark.parametrize("name", NAMES)
def test_a_quantized_past_under_attention(name):
    model, cache = oracle.model(name), made(name, "kv8-g32", **RAW)
    routed = archs.greedy(model, archs.prompt(41), 8, cache)
    assert len(routed) == 8
    chains = [c.record for c in oracle.leaves(cache) if isinstance(c, KVFunCache)]
    chains = [record for record in chains if isinstance(record, kvfun.Chain)]
    assert chains or not any(isinstance(c, KVFunCache) for c in oracle.leaves(cache))
    assert all(chain.segments[-1].codec.spec == "kv8-g32" for chain in chains)
    for chain in chains:
        (offset,) = kvfun.offsets(chain)
        assert chain.front == 3
        held = chain.tail.geometry.held(chain.tail.geometry.rows[0])
        assert offset < 15 or RAW["residual"] <= held < RAW["residual"] + RAW["block"]
    text = describe(cache)
    assert not chains or "residual 8, 3 raw sinks" in text


FEW = ["llama", "gemma3_text", "gpt_oss", "deepseek_v3", "gemma4", "qwen3_next"]


@pytest.mark.parametrize("name", FEW)
def test_routed_attention_reads_every_part_as_it_is_stored(name):
    model, tokens = oracle.model(name), archs.prompt(41)
    plain = archs.logits(model, tokens, made(name, "kv8-g32", **RAW))
    with attention(model):
        routed = archs.logits(model, tokens, made(name, "kv8-g32", **RAW))
    spread = mx.std(plain).item()
    assert mx.abs(plain - routed).max().item() < 0.05 * spread


@pytest.mark.parametrize("name", FEW)
def test_states_and_files(name, tmp_path):
    model, tokens = oracle.model(name), archs.prompt(41)
    cache = made(name, "kv8-g32", **RAW)
    archs.greedy(model, tokens, 3, cache)
    path = str(tmp_path / "cache.safetensors")
    mlx_lm_cache.save_prompt_cache(path, cache, {"a": "b"})
    for again in (mlx_lm_cache.load_prompt_cache(path), load(path)[0], copy.deepcopy(cache)):
        for ours, theirs in zip(oracle.leaves(again), oracle.leaves(cache), strict=True):
            if isinstance(theirs, KVFunCache):
                assert kvfun.offsets(ours.record) == kvfun.offsets(theirs.record)
                for x, y in zip(kvfun.fetch(ours.record), kvfun.fetch(theirs.record), strict=True):
                    assert mx.array_equal(x, y)
        follow = archs.greedy(model, [tokens[-1]], 9, again)
        assert follow == archs.greedy(model, [tokens[-1]], 9, copy.deepcopy(cache))


def saved_chain():
    k = mx.random.normal((2, 2, 40, 64)).astype(mx.bfloat16)
    chain = kvfun.append(kvfun.empty("kv4", window=24, sinks=2, **RAW), k, k)
    return kvfun.rollback(chain, [3, 0])


def test_a_chain_comes_back_with_its_parts_and_rules():
    chain = saved_chain()
    again = storage.load(*storage.dump(chain))
    assert isinstance(again, kvfun.Chain)
    assert (again.policy, again.front, again.ageing) == (chain.policy, chain.front, chain.ageing)
    k = mx.random.normal((2, 2, 9, 64)).astype(mx.bfloat16)
    for ours, theirs in ((again, chain), (kvfun.append(again, k, k), kvfun.append(chain, k, k))):
        assert kvfun.offsets(ours) == kvfun.offsets(theirs)
        assert kvfun.max_rollback(ours) == kvfun.max_rollback(theirs)
        for x, y in zip(kvfun.fetch(ours), kvfun.fetch(theirs), strict=True):
            assert mx.array_equal(x, y)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("planes", [2, 6]),
        ("planes", [2, 6, 1]),
        ("planes", "many"),
        ("front", -1),
        ("front", "2"),
        ("padding", None),
        ("ageing", {"residual": 0, "block": 4}),
        ("ageing", {"residual": 8, "blocks": 4}),
        ("policy", {"window": "wide"}),
        ("policy", None),
        ("chain", []),
    ],
)
def test_damaged_descriptions_of_a_chain(name, value):
    header, planes = storage.dump(saved_chain())
    said = {**json.loads(header), name: value}
    with pytest.raises(CorruptError, match=r"damaged|saved|part"):
        storage.load(json.dumps(said), planes)


def test_a_chain_without_one_of_its_planes():
    header, planes = storage.dump(saved_chain())
    with pytest.raises(CorruptError):
        storage.load(header, planes[:-1])
