"""Schemes under mlx-lm: every architecture is described as it is built, and billed as it runs."""

from __future__ import annotations

import attrs
import mlx.core as mx
import pytest

pytest.importorskip("mlx_lm")

import mlx_lm.models.cache as mlx_lm_cache
from mlx.utils import tree_flatten
from mlx_lm.models.cache import save_prompt_cache

import kvfun
from kvfun import scheme as s
from kvfun.errors import CodecError, SpecError, UnsupportedError
from kvfun.interop.mlx_lm import (
    KVFunCache,
    attention,
    describe,
    described,
    load,
    make_prompt_cache,
    probe,
    weights_of,
)
from kvfun.scheme import KvScheme, Model
from tests.interop import architectures as archs
from tests.interop import oracle
from tests.interop.test_architectures import NAMES

UNDESCRIBED = {"deepseek_v41"}
OLD, ONCE = oracle.OLD_PROTOCOL, ("deepseek_v32", "glm_moe_dsa")
FIXED = {"nemotron_h": {"num_hidden_layers": 6}, "afm7": {"num_hidden_layers": 4}}
"""Small configs that give two numbers of layers, of which mlx-lm reads the other one."""
OTHERWISE = {
    **(dict.fromkeys(ONCE, "mlx-lm kept the index's keys once then") if OLD else {}),
    "mistral3": "mlx-lm asks the outer model for caches, which makes full ones for all layers",
    "longcat_flash_ngram": "mlx-lm keeps the last two tokens in one cache more",
}
DESCRIBED = [name for name in NAMES if name not in UNDESCRIBED]


def config_of(name):
    return {**archs.ARCHITECTURES[name], **FIXED.get(name, {})}


def kept(cache):
    """What one of mlx-lm's caches holds, after a few tokens: streams, and numbers of a state."""
    streams, numbers = [], 0
    for leaf in cache.caches if isinstance(cache, mlx_lm_cache.CacheList) else [cache]:
        if isinstance(leaf, mlx_lm_cache.ArraysCache):
            numbers += sum(x.size for x in leaf.cache if x is not None)
            continue
        rotating = isinstance(leaf, mlx_lm_cache.RotatingKVCache)
        bound = leaf.max_size if rotating else getattr(leaf, "chunk_size", None)
        k, v = leaf.keys, leaf.values
        streams.append((k.shape[1], k.shape[3], v.shape[3], bound))
    return tuple(streams), numbers


@pytest.mark.parametrize("name", DESCRIBED)
def test_every_architecture_is_described_as_mlx_lm_runs_it(name):
    model, about = oracle.model(name), Model.from_config(config_of(name))
    assert described(model).layers == about.layers
    if name in OTHERWISE:
        return
    caches = mlx_lm_cache.make_prompt_cache(model)
    mx.eval(model(mx.array([archs.prompt(9)]), cache=caches))
    found = []
    for index in about.storing:
        layer = about.layers[index]
        streams = [(x.kv_heads, x.head_dim, x.value_dim, x.bound) for x in layer.stored]
        state = layer.state or s.State()
        found.append((tuple(streams), state.numbers + state.wide))
    assert found == [kept(cache) for cache in caches]


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_next", "deepseek_v3", "falcon_h1"])
@pytest.mark.parametrize("text", ["kv8-g32", "kv4-g32-start20", "rot-k4v4-log", "bf16"])
def test_a_model_runs_on_a_scheme_and_holds_what_was_projected(name, text):
    model, scheme = oracle.model(name), KvScheme.of(text)
    about = attrs.evolve(described(model), dtype="float32")
    tokens = archs.prompt(41)
    caches = make_prompt_cache(model, scheme)
    for start in range(0, 41, 11):
        mx.eval(model(mx.array([tokens[start : start + 11]]), cache=caches))
    caches.settle()
    held = sum(kvfun.nbytes(x.record) for x in oracle.leaves(caches) if isinstance(x, KVFunCache))
    # each layer's record counts the frequencies of the RoPE, which all of them share
    ropes = sum(_rope_bytes(x.record) for x in oracle.leaves(caches) if isinstance(x, KVFunCache))
    states = sum(
        x.nbytes
        for leaf in oracle.leaves(caches)
        if isinstance(leaf, mlx_lm_cache.ArraysCache)
        for x in leaf.cache
        if x is not None
    )
    assert s.kv_allocated_bytes_at(about, 41, scheme, chunk=11) == held - ropes + states


def _rope_bytes(record):
    target = (record.target,) if isinstance(record, kvfun.Delayed) else ()
    parts = getattr(record, "parts", (getattr(record, "inner", record),))
    codecs = {id(c): c for c in (*[part.codec for part in parts], *target)}
    ropes = [getattr(codec.keys, "rope", None) for codec in codecs.values()]
    return sum(rope.frequencies.nbytes for rope in {id(r): r for r in ropes if r}.values())


def test_a_scheme_is_what_its_spec_is_where_every_layer_takes_it():
    model, tokens = oracle.model("llama"), archs.prompt(30)
    one = archs.logits(model, tokens, make_prompt_cache(model, KvScheme.of("kv4-g32")))
    other = archs.logits(model, tokens, make_prompt_cache(model, "kv4-g32"))
    assert mx.allclose(one, other, atol=1e-4).item()


def test_the_report_says_which_layers_a_scheme_leaves_and_why():
    model = oracle.model("gemma4_text")  # full layers have a head dim of 64
    caches = make_prompt_cache(model, KvScheme.of("turbo-k8v3"))
    assert [report.spec for report in caches.report] == ["bf16"] * 3 + ["turbo-k8v3"]
    assert all(("sliding" in r.reason) == (r.spec == "bf16") for r in caches.report)
    assert "turbo is for full attention" in describe(caches)


def test_what_indexes_the_keys_stays_bf16():
    caches = make_prompt_cache(oracle.model("deepseek_v32"), KvScheme.of("kv8-g32"))
    specs = [[shell.record.codec.spec for shell in oracle.leaves([each])] for each in caches]
    assert specs == [["kv8-g32", "bf16"]] * 2


def test_by_layer_schemes_count_the_models_layers_not_its_caches():
    model = oracle.model("nemotron_h")  # M * - M E *: six layers, four of which keep something
    caches = make_prompt_cache(model, KvScheme.by_layer({5: "kv8-g32"}))
    assert [report.spec for report in caches.report] == ["plain", "bf16", "plain", "kv8-g32"]
    assert [report.reason for report in caches.report][1::2] == ["not listed", ""]
    with pytest.raises(SpecError, match="lists layer 6"):
        make_prompt_cache(model, KvScheme.by_layer({6: "kv8-g32"}))


@pytest.mark.parametrize("text", ["kv4-g32", "bf16", "rot-k4v4"])
def test_a_schemes_kernels_are_what_its_caches_are_read_by(text):
    model, tokens, scheme = oracle.model("llama"), archs.prompt(30), KvScheme.of(text)
    counted = {"reads": 0}

    def counting(kernel):
        def reading(*args, **kwargs):
            counted["reads"] += 1
            return kernel(*args, **kwargs)

        return reading

    kernels = scheme.kernel_set
    with attention(model):
        expected = archs.logits(model, tokens, make_prompt_cache(model, scheme))
    if kernels is None:
        assert text == "rot-k4v4"
        return
    mine = {phase: counting(kernel) for phase, kernel in kernels.items()}
    with attention(model, mine):
        got = archs.logits(model, tokens, make_prompt_cache(model, scheme))
        before = counted["reads"]
        with attention(model):
            archs.logits(model, tokens, make_prompt_cache(model, scheme))
    assert before == counted["reads"] == len(described(model).layers)
    assert mx.allclose(got, expected, atol=1e-3).item()


def test_a_scheme_that_no_layer_can_take():
    with pytest.raises(CodecError, match="affects no layer"):
        make_prompt_cache(oracle.model("llama"), KvScheme.of("kv4"))
    with pytest.raises(SpecError, match="scheme's own"):
        make_prompt_cache(oracle.model("llama"), KvScheme.of("kv4-g32"), residual=8)


def test_what_a_model_says_while_it_waits_is_what_bf16_says():
    model, tokens = oracle.model("llama"), archs.prompt(30)
    caches = make_prompt_cache(model, KvScheme.of("kv2-g32-start30"))
    waiting = archs.logits(model, tokens, caches)
    plain = archs.logits(model, tokens, make_prompt_cache(model, "plain"))
    assert mx.array_equal(waiting, plain).item()
    assert all(report.kind == "full, kv2-g32 from 30 tokens on" for report in caches.report)
    caches.settle()
    assert all(report.spec == "kv2-g32" for report in caches.report)
    one = model(mx.array([[5]]), cache=caches)
    converted = make_prompt_cache(model, "plain")
    archs.logits(model, tokens, converted)
    for shell in converted:
        shell.record = kvfun.convert(shell.record, "kv2-g32")
    assert mx.allclose(one, model(mx.array([[5]]), cache=converted), atol=1e-4).item()


@pytest.mark.parametrize("text", ["kv4-g32-start8", "kv4-g32-start80", "rot-k4v4-log-start8"])
@pytest.mark.parametrize("settled", [False, True])
def test_files_of_caches_that_wait(tmp_path, text, settled):
    model, tokens = oracle.model("llama"), archs.prompt(20)
    caches = make_prompt_cache(model, KvScheme.of(text))
    archs.logits(model, tokens, caches)
    if settled:
        caches.settle()
    path = str(tmp_path / "cache.safetensors")
    save_prompt_cache(path, caches)
    back, _ = load(path)
    for one, other in zip(caches, back, strict=True):
        assert isinstance(other.record, kvfun.Delayed)
        assert (one.record.start, one.record.floor) == (other.record.start, other.record.floor)
        for a, b in zip(kvfun.fetch(one.record), kvfun.fetch(other.record), strict=True):
            assert mx.array_equal(a, b).item()
    more = mx.array([archs.prompt(25)[20:]])
    with attention(model):
        one, other = model(more, cache=caches), model(more, cache=back)
    assert mx.array_equal(one, other).item()


# -- before any weight is loaded ------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gemma3", "mixtral", "qwen3_next"])
def test_weights_are_counted_without_loading_any(name):
    config = {**archs.ARCHITECTURES[name], "torch_dtype": "float32"}
    real = tree_flatten(oracle.model(name).parameters())
    assert weights_of(config).total == sum(x.nbytes for _, x in real)
    assert weights_of(config, 12345).total == 12345


def test_experts_that_a_token_is_not_routed_to_are_not_read():
    config = {**archs.ARCHITECTURES["mixtral"], "torch_dtype": "float32"}
    found = weights_of(config)
    experts = [
        x.nbytes for path, x in tree_flatten(oracle.model("mixtral").parameters()) if x.ndim == 3
    ]
    assert found.skipped == sum(experts) // 2  # two of four
    one = weights_of({**config, "num_experts_per_tok": 1})
    assert one.skipped == sum(experts) * 3 // 4
    assert weights_of(config, 2 * found.total).skipped == pytest.approx(2 * found.skipped, abs=2)
    assert weights_of(archs.ARCHITECTURES["llama"]).skipped == 0


def test_quantized_weights_are_counted_as_mlx_quantizes_them():
    import mlx.nn as nn

    config = archs.ARCHITECTURES["llama"]
    model = archs.build("llama")
    model.set_dtype(mx.bfloat16)
    nn.quantize(model, group_size=32, bits=4)
    real = sum(x.nbytes for _, x in tree_flatten(model.parameters()))
    said = {**config, "quantization": {"bits": 4, "group_size": 32}}
    assert weights_of(said).total == real


def test_a_model_that_mlx_lm_has_not():
    with pytest.raises(UnsupportedError, match="no_such_model"):
        weights_of({**archs.ARCHITECTURES["llama"], "model_type": "no_such_model"})


@pytest.mark.parametrize("name", ["llama", "gemma3", "deepseek_v3", "qwen3_next", "gemma3n"])
def test_probing_tells_which_layers_take_what(name):
    if name not in NAMES:
        pytest.skip("not in this mlx-lm")
    if OLD and name == "gemma3n":  # its shared layers take a cache's state for keys and values
        (found,) = probe(archs.ARCHITECTURES[name], ["kv8-g32"])
        assert "gemma3n cannot run" in found.error
        return
    config = archs.ARCHITECTURES[name]
    about = Model.from_config(config)
    found = {each.spec: each for each in probe(config, ["bf16", "kv8-g32", "turbo-k8v3", "kv8"])}
    assert found["bf16"].ran
    assert found["kv8-g32"].ran
    with_kv = [i for i, layer in enumerate(about.layers) if layer.stored]
    assert list(found["kv8-g32"].taken) == with_kv
    assert "affects no layer" in found["turbo-k8v3"].error  # head dims of 32
    assert found["kv8-g32"].routed


def test_probing_a_large_model_is_small():
    config = {
        "model_type": "llama",
        "hidden_size": 8192,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "intermediate_size": 28672,
        "vocab_size": 128256,
        "rms_norm_eps": 1e-5,
    }
    mx.synchronize()
    mx.reset_peak_memory()
    base = mx.get_active_memory()
    (found,) = probe(config, ["kv4"])
    assert found.taken == tuple(range(80))
    assert found.ran
    assert mx.get_peak_memory() - base < 400e6
