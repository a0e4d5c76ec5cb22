"""Rotated codecs under mlx-lm's models: what layers are told, files, prompts, layers' own specs."""

from __future__ import annotations

import copy
import json

import mlx.core as mx
import pytest

pytest.importorskip("mlx_lm")

import mlx_lm.models.cache as mlx_lm_cache

import kvfun
from kvfun import storage, tree
from kvfun.codecs import Centred, Codec, Rope, learnt_arrays, sensitivity
from kvfun.errors import CorruptError, ShapeError, UnsupportedError
from kvfun.interop.mlx_lm import (
    KVFunCache,
    _rope,
    attention,
    calibrated_prompt_cache,
    describe,
    load,
    make_prompt_cache,
    measure,
)
from tests.interop import architectures as archs
from tests.interop import oracle
from tests.interop.test_architectures import NAMES, STATE_IS_KEYS
from tests.interop.test_chains import made

SPEC = "rot-k4v4-log"
UNROUTED = {"gemma2", "plamo2"}
"""Models that do not call mlx-lm's attention function."""


def shells(cache):
    return [each for each in oracle.leaves(cache) if isinstance(each, KVFunCache)]


def codecs(cache):
    return [shell.record.codec for shell in shells(cache)]


@pytest.mark.parametrize("name", NAMES)
def test_every_architecture_runs_on_it_and_routed_reads_are_the_same(name):
    model, tokens = oracle.model(name), archs.prompt(41)
    cache = made(name, SPEC)
    plain = archs.logits(model, tokens, cache)
    assert mx.all(mx.isfinite(plain)).item()
    if shells(cache) and name not in UNROUTED:
        with attention(model):
            routed = archs.logits(model, tokens, made(name, SPEC))
        # numbers in the middle between two of a codebook may be rounded otherwise
        assert mx.mean(mx.abs(plain - routed)).item() < 0.05 * mx.std(plain).item()
    assert all(codec.spec in (SPEC, "plain") for codec in codecs(cache))


TOLD = {"llama": 10000.0, "qwen2": 10000.0, "phi3": 10000.0, "gemma2": 10000.0}


@pytest.mark.parametrize("name", [name for name in TOLD if name in NAMES])
def test_a_layer_is_told_the_rope_that_its_keys_went_through(name):
    head_dim = 32
    for codec in codecs(made(name, SPEC)):
        rope = codec.keys.rope
        assert rope is not None
        assert rope.dims <= head_dim
        x = mx.random.normal((1, 2, 5, rope.dims))
        ours = rope.rotated(x, rope.angles(mx.arange(3, 8)))
        options = {"traditional": rope.traditional, "base": TOLD[name], "scale": 1.0, "offset": 3}
        assert mx.allclose(ours, mx.fast.rope(x, rope.dims, **options), atol=1e-4).item()
    assert mx.fast.rope is not _rope._seen


def test_layers_without_rope_and_other_frequencies_are_told_so():
    found = {}
    for name in NAMES:
        try:
            cache = made(name, SPEC)
        except (UnsupportedError, pytest.skip.Exception):
            continue
        ropes = [codec.keys.rope for codec in codecs(cache) if isinstance(codec.keys, Centred)]
        found[name] = [rope is not None for rope in ropes]
    known = [name for name, told in found.items() if told and all(told)]
    assert len(known) > len(found) / 2, f"RoPE was found in {known} of {sorted(found)}"
    if "cohere2" in found:  # every fourth layer has none
        assert not all(found["cohere2"])


def test_watching_rope_ends_with_the_probe():
    before = mx.fast.rope
    make_prompt_cache(oracle.model("llama"), SPEC)
    assert mx.fast.rope is before
    assert _rope.rope_of(mx.zeros(3)) is None
    with pytest.raises(RuntimeError), _rope.watched_rope():
        raise RuntimeError
    assert mx.fast.rope is before


def test_keys_that_hold_a_constant_are_as_good_as_those_without():
    """Qwen2.5's trouble: a bias of k_proj, before RoPE."""
    model, tokens = oracle.model("llama"), archs.prompt(60)
    with attention(model):
        cache = make_prompt_cache(model, SPEC)
        archs.logits(model, tokens, cache)
    for codec in codecs(cache):
        assert codec.keys.mean is not None
        assert codec.keys.mean.shape == (1, 2, 1, 32)


@pytest.mark.parametrize("spec", [SPEC, "rot-k8v3-g32-log", "turbo-k8v3", "rot-k3v2-tcq"])
def test_states_and_files_hold_what_was_learnt(spec, tmp_path):
    name = "llama+wide" if "llama+wide" in NAMES else "llama"
    if spec.startswith("turbo"):
        pytest.importorskip("mlx_lm")
        try:
            cache = make_prompt_cache(oracle.model(name), spec)
        except UnsupportedError:  # a head_dim of 32
            return
    model, tokens = oracle.model(name), archs.prompt(41)
    cache = make_prompt_cache(model, spec)
    archs.greedy(model, tokens, 3, cache)
    path = str(tmp_path / "cache.safetensors")
    mlx_lm_cache.save_prompt_cache(path, cache, {"a": "b"})
    for again in (mlx_lm_cache.load_prompt_cache(path), load(path)[0], copy.deepcopy(cache)):
        for ours, theirs in zip(shells(again), shells(cache), strict=True):
            arrays, flags = learnt_arrays(theirs.record.codec)
            assert arrays
            assert tree.equal(learnt_arrays(ours.record.codec)[0], arrays)
            assert learnt_arrays(ours.record.codec)[1] == flags
        assert archs.greedy(model, [5], 8, again) == archs.greedy(
            model, [5], 8, copy.deepcopy(cache)
        )


def damaged(change):
    model = oracle.model("llama")
    cache = make_prompt_cache(model, SPEC)
    archs.greedy(model, archs.prompt(41), 2, cache)
    header, planes = storage.dump(cache[0].record)
    said = json.loads(header)
    planes = change(said, said["chain"][-1], list(planes)) or planes
    return json.dumps(said), planes


@pytest.mark.parametrize(
    "change",
    [
        lambda said, part, planes: part["learnt"].append("keys.other"),
        lambda said, part, planes: part["learnt"].reverse(),
        lambda said, part, planes: part["flags"].update({"keys.traditional": 1}),
        lambda said, part, planes: part["flags"].update({"values.traditional": True}),
        lambda said, part, planes: [*planes[:-1], planes[-1][..., :0]],
        lambda said, part, planes: [*planes[:-1], planes[-1].astype(mx.float16)],
        lambda said, part, planes: part.pop("learnt") and None,
    ],
)
def test_damaged_states_are_refused(change):
    with pytest.raises(CorruptError):
        storage.load(*damaged(change))


def test_a_whole_state_is_read_as_it_was():
    header, planes = damaged(lambda *_: None)
    assert json.loads(storage.dump(storage.load(header, planes))[0]) == json.loads(header)


# -- prompts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["rot-k4v4-ldlq", "rot-k3v3-bal-log", "rot-k4v4-log"])
@pytest.mark.parametrize("options", [{}, {"raw_sinks": 4, "residual": 8, "block": 4}])
def test_a_prompt_is_encoded_once_by_its_own_statistics(spec, options):
    model = oracle.model("llama")
    prompt, later = mx.array([archs.prompt(60)]), mx.array([archs.prompt(9, seed=1)])
    cache = calibrated_prompt_cache(model, prompt, spec, **options)
    assert [kvfun.offsets(shell.record) for shell in shells(cache)] == [(60,), (60,)]
    assert {codec.spec for codec in codecs(cache)} == {spec}
    wanted = {"ldlq": "keys.feedback.0", "bal": "keys.basis.0"}
    for codec in codecs(cache):
        arrays, flags = learnt_arrays(codec)
        assert "keys.mean" in arrays
        assert "keys.rope" in arrays
        for word, array in wanted.items():
            assert (array in arrays) == (word in spec)
            assert flags.get("keys.frozen", False) == any(word in spec for word in wanted)
    raw = make_prompt_cache(model, "plain")
    model(prompt, cache=raw)
    for ours, theirs in zip(shells(cache), shells(raw), strict=True):
        front = ours.record.front
        assert front == options.get("raw_sinks", 16)
        got, expected = kvfun.fetch(ours.record)[0], kvfun.fetch(theirs.record)[0]
        assert mx.allclose(got[:, :, :front], expected[:, :, :front], atol=1e-4).item()
        error = mx.mean((got - expected) ** 2) / mx.mean(expected**2)
        assert error.item() < (0.02 if "k4" in spec else 0.08)
    with attention(model):
        close = model(later, cache=cache)
        right = model(later, cache=raw)
    assert mx.abs(close - right).max().item() < 2.5 * mx.std(right).item()


def test_the_statistics_of_a_prompt_are_those_of_its_queries():
    model, prompt = oracle.model("llama"), mx.array([archs.prompt(60)])
    cache = calibrated_prompt_cache(model, prompt, "rot-k4v4-ldlq")
    other = calibrated_prompt_cache(model, prompt + 1, "rot-k4v4-ldlq")
    ours, theirs = [codecs(each)[0].keys.codec.feedback for each in (cache, other)]
    assert not mx.allclose(ours[0], theirs[0]).item()
    parts = calibrated_prompt_cache(model, prompt, ["rot-k4v4-ldlq", "kv8-g32"])
    assert [codec.spec for codec in codecs(parts)] == ["rot-k4v4-ldlq", "kv8-g32"]
    assert mx.allclose(codecs(parts)[0].keys.codec.feedback[0], ours[0], atol=1e-4).item()


@pytest.mark.parametrize("prompt", [[1, 2], mx.zeros(3), mx.zeros((1, 0), mx.int32)])
def test_a_prompt_is_a_batch_of_tokens(prompt):
    with pytest.raises(ShapeError):
        calibrated_prompt_cache(oracle.model("llama"), prompt, "rot-k4v4-ldlq")


def test_a_codec_that_waits_for_statistics_says_what_to_do():
    with pytest.raises(UnsupportedError, match="calibrate"):
        make_prompt_cache(oracle.model("llama"), "rot-k4v4-ldlq")


# -- a spec for every layer ------------------------------------------------------------------------


def test_every_layer_may_have_its_own_spec():
    model = oracle.model("llama")
    cache = make_prompt_cache(model, ["kv8-g32", "rot-k5v4"])
    assert [codec.spec for codec in codecs(cache)] == ["kv8-g32", "rot-k5v4"]
    assert isinstance(codecs(cache)[1].keys.rope, Rope)
    assert len(archs.greedy(model, archs.prompt(41), 4, cache)) == 4
    assert "layer 0: kv8-g32" in describe(cache)
    with pytest.raises(UnsupportedError, match="3 specs"):
        make_prompt_cache(model, ["kv8-g32"] * 3)
    one = make_prompt_cache(model, [Codec.of("kv8-g32")])
    assert [codec.spec for codec in codecs(one)] == ["kv8-g32"] * 2


def test_a_model_is_measured_once_and_bits_follow():
    model = oracle.model("llama")
    loss = measure(model, mx.array([archs.prompt(48), archs.prompt(48, seed=3)]), skip=16)
    assert loss(["plain", "plain"]) == pytest.approx(0, abs=1e-6)
    assert loss(["kv2-g32", "kv2-g32"]) > loss(["kv8-g32", "kv8-g32"]) > 0
    known = sensitivity(loss, 2)
    assert all(number > 0 for number in (*known.keys, *known.values))
    specs = known.specs(3.0)
    bits = [Codec.of(spec) for spec in specs]
    assert sum(codec.keys.bits + codec.values.bits for codec in bits) <= 12
    assert loss(specs) > 0
    for texts in (mx.zeros(80), mx.zeros((1, 16), mx.int32), [[1]]):
        with pytest.raises(ShapeError):
            measure(model, texts, skip=16)


def test_models_whose_state_is_keys_are_left_as_they_were():
    for name in STATE_IS_KEYS & {*NAMES}:
        with pytest.raises((UnsupportedError, pytest.skip.Exception)):
            made(name, SPEC)
