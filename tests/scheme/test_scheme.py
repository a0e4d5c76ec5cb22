"""What a scheme is called, written down as, and resolved from."""

from __future__ import annotations

import json

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfun import kernels
from kvfun.codecs import BITS, GROUP_SIZES, Codec
from kvfun.errors import CodecError, SpecError
from kvfun.scheme import KvScheme, Model, resolve_scheme

bits, groups = st.sampled_from(BITS), st.sampled_from(GROUP_SIZES)
starts = st.integers(0, 10_000)
SPECS = ("bf16", "f16", "plain", "kv4", "kv3-g32", "k8v4", "kv4-f16", "mxfp8", "nvfp4")
SPECS += ("turbo-k8v3", "rot-k4v4-log", "rot-k3v3-tcq-log", "bf16+kv4", "turbo-k8+kv4", "kv8-c")
SPECS += ("rot-k4v4-g32-s5-seed7", "rot4", "kv4-g128-pad")


@st.composite
def schemes(draw) -> KvScheme:
    start = draw(starts)
    waits = {"start": start} if start else {}
    if not start and draw(st.booleans()):
        waits = {"residual": draw(st.integers(1, 200)), "block": draw(st.integers(1, 100))}
        waits |= draw(st.sampled_from(({}, {"raw_sinks": 0}, {"raw_sinks": 5})))
    chosen = draw(st.sampled_from([{}, *[{"kernels": name} for name in kernels.SETS]]))
    options = {**waits, **chosen}
    kind = draw(st.integers(0, 4))
    if kind == 0:
        return KvScheme.affine(draw(bits), draw(groups), **{"start": 0, **options})
    if kind == 1:
        k, v = draw(st.sampled_from((2, 4, 5, 8))), draw(st.sampled_from((2, 3, 4, 5, 8)))
        return KvScheme.turbo(k, v, **options)
    layers = draw(st.lists(st.integers(0, 60), unique=True, max_size=8))
    if kind == 2:
        return KvScheme.affine_config([(i, draw(bits), draw(groups)) for i in layers], **options)
    if kind == 3:
        specs = draw(st.lists(st.sampled_from(SPECS), min_size=len(layers), max_size=len(layers)))
        return KvScheme.by_layer(dict(zip(layers, specs, strict=True)), **options)
    spec = draw(st.sampled_from(SPECS))
    return KvScheme.of(spec, **(chosen if spec == "bf16" else options))


@given(schemes())
def test_what_is_stored_of_a_scheme_is_the_scheme(scheme):
    written = json.loads(json.dumps(scheme.storage))
    assert KvScheme.from_storage(written) == scheme
    assert KvScheme.from_storage(scheme.storage) == scheme
    assert written["kernels"] == scheme.kernels


@given(schemes())
def test_a_key_of_one_spec_names_the_scheme_and_that_of_a_list_tells_lists_apart(scheme):
    if scheme.spec is not None:
        again = KvScheme.of(scheme.cache_key, kernels=scheme.kernels)
        assert again == scheme
        assert again.cache_key == scheme.cache_key
    else:
        assert scheme.cache_key.startswith("config")
        other = attrs.evolve(scheme, layers=(*scheme.layers, (61, "kv4")))
        assert other.cache_key != scheme.cache_key
        assert other.cache_key.partition("@")[0] == scheme.cache_key.partition("@")[0]


@given(st.lists(schemes(), min_size=2, max_size=2))
def test_equal_keys_mean_that_the_same_is_stored(pair):
    one, other = [attrs.evolve(scheme, kernels="auto") for scheme in pair]
    assert (one.cache_key == other.cache_key) == (
        (one.spec, one.layers, one.start, one.residual, one.block, one.raw_sinks)
        == (other.spec, other.layers, other.start, other.residual, other.block, other.raw_sinks)
    )


@pytest.mark.parametrize(
    ("scheme", "key", "kind", "kernels"),
    [
        (KvScheme.of("bf16"), "bf16", "bf16", "fused"),
        (KvScheme.affine(4, start=0), "kv4", "affine-uniform", "unfused"),
        (KvScheme.affine(4, 32, start=0), "kv4-g32", "affine-uniform", "unfused"),
        (KvScheme.affine(4), "kv4-start5000", "affine-uniform", "unfused"),
        (KvScheme.affine(8, 128, 7), "kv8-g128-start7", "affine-uniform", "unfused"),
        (KvScheme.turbo(8, 3), "turbo-k8v3", "turbo", "deferred"),
        (KvScheme.turbo(8, 3, 256), "turbo-k8v3-start256", "turbo", "deferred"),
        (KvScheme.of("turbo-k8v3"), "turbo-k8v3", "turbo", "deferred"),
        (KvScheme.of("rot-k4v4-log"), "rot-k4v4-log", "codec", "auto"),
        (KvScheme.of("kv4", residual=64), "kv4-residual64", "affine-uniform", "unfused"),
        (
            KvScheme.of("kv4", residual=64, block=32, raw_sinks=4),
            "kv4-residual64-block32-raw4",
            "affine-uniform",
            "unfused",
        ),
    ],
)
def test_keys_kinds_and_kernels(scheme, key, kind, kernels):
    assert (scheme.cache_key, scheme.kind, scheme.kernels) == (key, kind, kernels)


@pytest.mark.parametrize(("start", "known"), [(0, "config"), (512, "config-start512")])
def test_the_key_of_a_config_is_known_and_tells_its_list(start, known):
    one = KvScheme.affine_config([(0, 4, 64), (3, 8, 32)], start)
    assert one.cache_key.partition("@")[0] == known
    assert one.kernels == "tiled-causal"
    assert one == KvScheme.affine_config([(3, 8, 32), (0, 4, 64)], start)
    assert one.cache_key != KvScheme.affine_config([(0, 4, 64), (3, 8, 64)], start).cache_key
    assert one.layers == ((0, "kv4"), (3, "kv8-g32"))


@pytest.mark.parametrize(
    ("scheme", "storage"),
    [
        ("bf16", {"storage": "bf16", "kernels": "fused"}),
        (
            "kv4-g32-start5000",
            {
                "storage": "affine-uniform",
                "kernels": "unfused",
                "bits": 4,
                "group_size": 32,
                "start": 5000,
            },
        ),
        (
            "turbo-k8v3",
            {"storage": "turbo", "kernels": "deferred", "key_bits": 8, "value_bits": 3},
        ),
        ("rot-k4v4", {"storage": "codec", "kernels": "auto", "codec": "rot-k4v4"}),
    ],
)
def test_storage_records(scheme, storage):
    assert KvScheme.of(scheme).storage == storage


def test_storage_records_of_lists():
    assert KvScheme.affine_config([(2, 4, 32)]).storage == {
        "storage": "affine-config",
        "kernels": "tiled-causal",
        "layers": [[2, 4, 32]],
    }
    assert KvScheme.by_layer({1: "rot-k4v4", 0: "kv8"}).storage["layers"] == [
        [0, "kv8"],
        [1, "rot-k4v4"],
    ]


def test_nothing_that_was_passed_in_or_handed_out_changes_a_scheme():
    entries = [[0, 4, 64], [1, 8, 64]]
    config = KvScheme.affine_config(entries)
    key = config.cache_key
    entries[0][1] = 8
    entries.append([2, 2, 64])
    config.storage["layers"].append([3, 2, 64])
    specs = {0: "kv4"}
    listed = KvScheme.by_layer(specs)
    specs[1] = "kv8"
    assert config.cache_key == key
    assert listed.layers == ((0, "kv4"),)
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        config.start = 3
    assert hash(config) == hash(KvScheme.affine_config([(0, 4, 64), (1, 8, 64)]))


# -- resolving ------------------------------------------------------------------------------------

LIST = [(0, 4, 64), (2, 8, 32)]


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        ({}, "bf16"),
        ({"override": "off"}, "bf16"),
        ({"config": LIST}, "bf16"),
        ({"override": "off", "config": LIST}, "bf16"),
        ({"override": "config"}, "bf16"),
        ({"override": 4}, "kv4"),
        ({"override": 8, "quantized_start": 0}, "kv8"),
        ({"override": 4, "quantized_start": 5000}, "kv4-start5000"),
        ({"override": 4, "turbo": (8, 3)}, "turbo-k8v3"),
        ({"override": "config", "config": LIST, "turbo": (8, 3)}, "turbo-k8v3"),
        ({"turbo": (4, 4), "quantized_start": 256}, "turbo-k4v4-start256"),
        ({"override": "off", "turbo": (8, 3)}, "turbo-k8v3"),
    ],
)
def test_resolving(arguments, key):
    assert resolve_scheme(**arguments).cache_key == key


def test_resolving_a_config():
    assert resolve_scheme("config", config=LIST) == KvScheme.affine_config(LIST)
    late = resolve_scheme("config", config=LIST, quantized_start=512)
    assert late.cache_key.startswith("config-start512@")
    with pytest.raises(SpecError, match="ships no KV config"):
        resolve_scheme("config", missing_config="error")


@pytest.mark.parametrize(
    ("fused", "uniform", "config"),
    [
        (None, "unfused", "tiled-causal"),
        (True, "tiled-causal", "tiled-causal"),
        (False, "unfused", "unfused"),
    ],
)
def test_kernels_follow_the_kind_unless_they_are_chosen(fused, uniform, config):
    assert resolve_scheme(4, fused=fused).kernels == uniform
    assert resolve_scheme("config", config=LIST, fused=fused).kernels == config
    assert resolve_scheme(turbo=(8, 3), fused=fused).kernels == "deferred"


@pytest.mark.parametrize(
    "arguments",
    [
        {"override": "on"},
        {"override": 7},
        {"override": True},
        {"override": 4.0},
        {"override": "4"},
        {"override": 4, "quantized_start": -1},
        {"override": 4, "quantized_start": 1.5},
        {"override": 4, "quantized_start": True},
        {"override": "config", "config": LIST, "quantized_start": "8"},
        {"turbo": (3, 3)},
        {"turbo": (8,)},
        {"turbo": "k8"},
        {"turbo": 8},
        {"override": "config", "config": [(0, 4)]},
        {"override": "config", "config": [(0, 7, 64)]},
        {"override": "config", "config": [(0, 4, 48)]},
        {"override": "config", "config": [(-1, 4, 64)]},
        {"override": "config", "config": [(0, 4, 64), (0, 8, 64)]},
        {"override": "config", "config": ["abc"]},
        {"missing_config": "ignore"},
        {"fused": "yes"},
    ],
)
def test_what_cannot_be_resolved(arguments):
    with pytest.raises(SpecError):
        resolve_scheme(**arguments)


# -- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda: KvScheme.of("kv7"),
        lambda: KvScheme.of("kv4-start"),
        lambda: KvScheme.of("kv4-start05"),
        lambda: KvScheme.of("kv4-start5-start6"),
        lambda: KvScheme.of("config@0011223344556677"),
        lambda: KvScheme.of("kv4", start=-1),
        lambda: KvScheme.of("kv4", start=8, residual=8),
        lambda: KvScheme.of("kv4", start=8, raw_sinks=0),
        lambda: KvScheme.of("kv4", block=8),
        lambda: KvScheme.of("kv4", residual=8, block=0),
        lambda: KvScheme.of("kv4", raw_sinks=-1),
        lambda: KvScheme.of("kv4", kernels="quick"),
        lambda: KvScheme.of("bf16", start=5),
        lambda: KvScheme.of("bf16", residual=5),
        lambda: KvScheme.affine("4"),
        lambda: KvScheme.by_layer({"0": "kv4"}),
        lambda: KvScheme.by_layer({0: "kv9"}),
        lambda: KvScheme(kind="affine"),
        lambda: KvScheme(kind="affine-uniform", spec="turbo-k8v3"),
        lambda: KvScheme(kind="turbo", spec="kv4"),
        lambda: KvScheme(kind="codec", spec="kv4"),
        lambda: KvScheme(kind="codec-config", layers=((0, "kv4"),)),
        lambda: KvScheme(kind="affine-config", layers=((0, "rot-k4v4"),)),
        lambda: KvScheme(kind="affine-config", layers=((1, "kv4"), (0, "kv4"))),
        lambda: KvScheme(kind="affine-config", spec="kv4"),
        lambda: KvScheme(kind="affine-uniform", layers=((0, "kv4"),)),
        lambda: KvScheme(kind="affine-uniform", spec="kv4-g64"),
    ],
)
def test_schemes_that_cannot_be(make):
    with pytest.raises(SpecError):
        make()


@pytest.mark.parametrize(
    ("storage", "named"),
    [
        ([], "dictionary"),
        ({}, "storage"),
        ({"storage": "paged", "kernels": "fused"}, "paged"),
        ({"storage": "bf16"}, "kernels is missing"),
        ({"storage": "affine-uniform", "bits": 4, "kernels": "unfused"}, "group_size is missing"),
        ({"storage": "bf16", "kernels": "fused", "bits": 4}, "bits is unknown"),
        ({"storage": "bf16", "kernels": "rapid"}, "rapid"),
        ({"storage": "affine-config", "layers": 3, "kernels": "tiled"}, "3"),
        ({"storage": "codec-config", "layers": [[0]], "kernels": "tiled"}, "layers"),
        ({"storage": "codec-config", "layers": [[0, "kv4"]], "kernels": "tiled"}, "affine-config"),
        ({"storage": "codec", "codec": "kv4", "kernels": "tiled"}, "affine-uniform"),
        ({"storage": "codec", "codec": 4, "kernels": "tiled"}, "4"),
        ({"storage": "turbo", "key_bits": 3, "value_bits": 3, "kernels": "deferred"}, "3"),
    ],
)
def test_damaged_storage_records_are_named(storage, named):
    with pytest.raises(SpecError, match=named):
        KvScheme.from_storage(storage)


# -- on a model -----------------------------------------------------------------------------------

HYBRID = Model.from_config(
    {
        "model_type": "some",
        "num_hidden_layers": 4,
        "hidden_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "sliding_window": 32,
        "layer_types": [
            "sliding_attention",
            "full_attention",
            "linear_attention",
            "full_attention",
        ],
        "linear_num_value_heads": 2,
        "linear_num_key_heads": 1,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
    }
)


def said(scheme, model=HYBRID):
    return [(each.spec, each.reason) for each in KvScheme.of(scheme).assigned(model)]


def test_every_layer_that_can_takes_a_uniform_scheme():
    kept = "its state is kept as it is"
    assert said("kv4") == [("kv4", ""), ("kv4", ""), (None, kept), ("kv4", "")]


def test_turbo_is_for_full_attention():
    turbo = said("turbo-k8v3")
    assert [spec for spec, _ in turbo] == ["bf16", "turbo-k8v3", None, "turbo-k8v3"]
    assert turbo[0][1] == "turbo is for full attention, not sliding"
    full = HYBRID.layers[1]
    for kind in ("chunked", "latent"):
        model = attrs.evolve(HYBRID, layers=(full, attrs.evolve(full, kind=kind)))
        assert said("turbo-k8v3", model)[1] == ("bf16", f"turbo is for full attention, not {kind}")


def test_layers_that_are_not_listed_stay_bf16():
    found = said(KvScheme.affine_config([(1, 4, 32)]))
    assert [spec for spec, _ in found] == ["bf16", "kv4-g32", None, "bf16"]
    assert found[0][1] == "not listed"


def test_a_layer_that_cannot_take_a_uniform_scheme_stays_bf16_and_says_why():
    other = attrs.evolve(HYBRID.layers[1].streams[0], head_dim=40, value_dim=40)
    odd = attrs.evolve(HYBRID.layers[1], streams=(other,))
    model = attrs.evolve(HYBRID, layers=(HYBRID.layers[0], odd))
    (_, first), (spec, reason) = said("kv4", model)
    assert (first, spec) == ("", "bf16")
    assert "40" in reason
    with pytest.raises(CodecError, match="layer 1"):
        KvScheme.by_layer({1: "kv4"}).assigned(model)
    with pytest.raises(CodecError, match="affects no layer"):
        KvScheme.of("kv4").assigned(attrs.evolve(model, layers=(odd,)))


def test_a_listed_layer_that_the_model_has_not():
    with pytest.raises(SpecError, match="lists layer 4, the model has 4"):
        KvScheme.by_layer({4: "kv4"}).assigned(HYBRID)


def test_codecs_that_need_a_prompt_cannot_be_had_without_one():
    with pytest.raises(CodecError, match="calibrate"):
        KvScheme.of("rot-k4v4-ldlq").assigned(HYBRID)


def test_the_description_says_kinds_codecs_and_reasons():
    assert KvScheme.turbo(8, 3, 256).describe(HYBRID).splitlines() == [
        "TurboQuant, keys in 8 bits and values in 3, from 256 tokens on (turbo-k8v3-start256)",
        "layer 0 (sliding, window 32): bf16, turbo is for full attention, not sliding",
        "layer 1 (full): turbo-k8v3",
        "layer 2 (recurrent): nothing of its own, its state is kept as it is",
        "layer 3 (full): turbo-k8v3",
    ]
    assert KvScheme.of("bf16").describe(HYBRID).startswith("bf16\nlayer 0")


def test_caches_of_a_model():
    made = KvScheme.of("kv4-start16").caches(HYBRID.capped(20, sinks=4))
    assert [type(each).__name__ for each in made] == ["Delayed", "Delayed", "Recurrent", "Delayed"]
    policies = [each.geometry.policy for each in made if hasattr(each, "geometry")]
    assert [(p.window, p.sinks) for p in policies] == [(32, 0), (16, 4), (16, 4)]
    assert [each.spec for each in made.report] == ["kv4", "kv4", None, "kv4"]
    assert made.report[1].kind == "full, the newest 16 and 4 sinks"
    assert all(Codec.of(each.spec).spec == each.spec for each in made.report if each.spec)
