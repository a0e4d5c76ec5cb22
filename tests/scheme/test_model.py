"""Reading configs: every spelling, and what is wrong with those that are damaged."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfun.errors import ConfigError, UnsupportedError
from kvfun.scheme import Model, State
from kvfun.scheme._kinds import SPELLINGS

from .models import config_of, names

BASE = {
    "model_type": "some",
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "sliding_window": 16,
    "attention_chunk_size": 32,
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 1,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}


def kinds(**keys):
    values = {**BASE, **keys}
    return "".join([x.kind[0] for x in Model.from_config(values).layers])


def without(*names):
    return {name: value for name, value in BASE.items() if name not in names}


@pytest.mark.parametrize("kind", SPELLINGS)
def test_every_spelling_of_a_layer_type_is_read_alike(kind):
    for name in SPELLINGS[kind].split():
        for key in ("layer_types", "layers_block_type"):
            assert kinds(**{key: [name, name.upper(), "full_attention", name]}) == (
                2 * kind[0] + "f" + kind[0]
            )


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"hybrid_override_pattern": "M-*E"}, "rnfn"),
        ({"hybrid_override_pattern": ["M", "*", "-", "M"]}, "rfnr"),
        ({"full_attention_interval": 4}, "rrrf"),
        ({"full_attention_interval": 2}, "rfrf"),
        ({"full_attn_idxs": [1, 2]}, "rffr"),
        ({"sliding_window_pattern": 2}, "sfsf"),
        ({"sliding_window_pattern": "LLG"}, "ssfs"),
        ({"sliding_window_layers": [0, 3]}, "sffs"),
        ({"hybrid_layer_pattern": [0, 1, 1, 0]}, "fssf"),
        ({"attn_type_list": [0, 0, 1, 0]}, "rrfr"),
        ({"attn_layer_period": 2, "attn_layer_offset": 1}, "rfrf"),
        ({"attn_layer_period": 4, "attn_layer_offset": 0}, "frrr"),
        ({"layer_group_size": 3}, "rrff"),
        ({"mamba_step": 2}, "rfrf"),
        ({"mamba_step": 8}, "rrrf"),
        ({"mamba_step": 2, "mamba_enabled": False}, "ffff"),
        ({"no_rope_layer_interval": 2}, "cfcf"),
        ({}, "cccf"),
        ({"attention_chunk_size": None}, "ffff"),
        ({"layer_types": None, "attention_chunk_size": None}, "ffff"),
    ],
)
def test_where_configs_say_which_layer_is_what(keys, expected):
    assert kinds(**keys) == expected


def test_a_layer_that_is_not_listed_is_full_whatever_windows_there_are():
    config = {**without("attention_chunk_size"), "sliding_window": 4096}
    assert {x.kind for x in Model.from_config(config).layers} == {"full"}


def test_the_language_model_may_be_nested_and_take_defaults_from_outside():
    inner = {k: v for k, v in BASE.items() if k != "attention_chunk_size"}
    outer = {"model_type": "sees", "text_config": inner, "torch_dtype": "float16"}
    assert Model.from_config(outer).layers == Model.from_config(inner).layers
    assert Model.from_config(outer).dtype == "float16"
    assert Model.from_config({**outer, "max_position_embeddings": 99}).max_positions == 99


def test_numbers_of_a_layer():
    config = {**without("attention_chunk_size"), "layer_types": ["sliding", "full"] * 2}
    sliding, full, *_ = Model.from_config(config).layers
    assert (sliding.heads, sliding.streams[0].kv_heads, sliding.streams[0].head_dim) == (4, 2, 64)
    assert (sliding.streams[0].window, full.streams[0].window) == (16, None)
    assert full.streams[0].numbers == 2 * 128


def test_shared_layers_read_the_last_of_their_kind_before_them():
    types = ["sliding", "full", "sliding", "full", "sliding", "full"]
    config = {**BASE, "num_hidden_layers": 6, "layer_types": types, "num_kv_shared_layers": 2}
    model = Model.from_config(config)
    assert [x.donor for x in model.layers] == [None, None, None, None, 2, 3]
    assert model.storing == (0, 1, 2, 3)
    assert model.layers[5].stored == ()


def test_recurrent_dimensions():
    config = {**BASE, "layer_types": ["linear_attention"] * 4}
    # values 2 x 16 by keys of 8; a tail of 3 of 2 x 8 and 32 channels
    assert Model.from_config(config).layers[0].state == State(3 * (2 * 8 + 32), 2 * 16 * 8)
    mamba = {"layer_types": ["mamba"] * 4, "mamba_n_heads": 4, "mamba_d_head": 8}
    mamba |= {"mamba_d_state": 16, "mamba_n_groups": 1, "mamba_d_conv": 4}
    found = Model.from_config({**without(*[n for n in BASE if n[:6] == "linear"]), **mamba})
    assert found.layers[0].state == State(3 * (32 + 2 * 16), 4 * 8 * 16)


# -- damaged --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": "4"}, "num_hidden_layers"),
        ({"num_hidden_layers": 4.0}, "num_hidden_layers"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_attention_heads": "8"}, "num_attention_heads"),
        ({"num_attention_heads": None}, "num_attention_heads"),
        ({"num_key_value_heads": 0}, "num_key_value_heads"),
        ({"num_key_value_heads": [2]}, "num_key_value_heads"),
        ({"head_dim": -64}, "head_dim"),
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": 255}, "hidden_size"),
        ({"layer_types": ["full"] * 3}, "layer_types must be a list of 4"),
        ({"layer_types": ["full", "fully", "full", "full"]}, "layer_types: unknown layer .*fully"),
        ({"layer_types": ["full", 3, "full", "full"]}, "layer_types: unknown layer type 3"),
        ({"layer_types": "full"}, "layer_types must be a list"),
        ({"layer_types": ["sliding"] * 4, "sliding_window": None}, "sliding_window"),
        ({"layer_types": ["sliding"] * 4, "sliding_window": "16"}, "sliding_window"),
        ({"layer_types": ["chunked"] * 4, "attention_chunk_size": 0}, "attention_chunk_size"),
        ({"hybrid_override_pattern": "M-*"}, "hybrid_override_pattern"),
        ({"hybrid_override_pattern": "M-*X"}, "hybrid_override_pattern: unknown layer 'X'"),
        ({"hybrid_layer_pattern": [0, 1, 2, 0]}, "hybrid_layer_pattern: unknown layer type 2"),
        ({"attn_type_list": [0, 1]}, "attn_type_list"),
        ({"full_attn_idxs": [1, 4]}, "full_attn_idxs"),
        ({"full_attn_idxs": [-1]}, "full_attn_idxs"),
        ({"full_attention_interval": 0}, "full_attention_interval"),
        ({"sliding_window_pattern": "LXG"}, "sliding_window_pattern"),
        ({"sliding_window_pattern": ""}, "sliding_window_pattern"),
        ({"mamba_step": 1}, "mamba_step"),
        ({"attn_layer_period": 4}, "attn_layer_offset"),
        ({"block_types": []}, "block_types"),
        ({"block_configs": [{}] * 4}, "attention"),
        ({"linear_attn_config": 3}, "linear_attn_config"),
        ({"linear_attn_config": {"kda_layers": [5]}}, "linear_attn_config.kda_layers"),
        ({"num_kv_shared_layers": 4}, "num_kv_shared_layers"),
        ({"num_kv_shared_layers": "1"}, "num_kv_shared_layers"),
        (
            {"layer_types": ["full", "full", "full", "sliding"], "num_kv_shared_layers": 1},
            "no layer before 3 is sliding",
        ),
        ({"kv_lora_rank": 64}, "qk_rope_head_dim"),
        ({"kv_lora_rank": "64", "qk_rope_head_dim": 8}, "kv_lora_rank"),
        ({"layer_types": ["mamba"] * 4, "linear_num_value_heads": 0}, "linear_num_value_heads"),
        ({"layer_types": ["mamba"] * 4, "linear_num_value_heads": None}, "dimensions"),
        ({"torch_dtype": "int8"}, "torch_dtype"),
        ({"dtype": 16}, "dtype"),
        ({"max_position_embeddings": "long"}, "max_position_embeddings"),
        ({"model_type": 3}, "model_type"),
        ({"text_config": 3}, "text_config"),
    ],
)
def test_what_is_wrong_is_named(changes, named):
    with pytest.raises(ConfigError, match=named):
        Model.from_config({**BASE, **changes})


def test_errors_inside_a_nested_config_say_where():
    with pytest.raises(ConfigError, match=r"text_config\.num_attention_heads"):
        Model.from_config({"text_config": {**BASE, "num_attention_heads": 0}})


@pytest.mark.parametrize("config", [None, 3, [], "config.json"])
def test_what_is_no_config(config):
    with pytest.raises(ConfigError, match="dictionary"):
        Model.from_config(config)


def test_models_that_keep_something_else_are_refused():
    with pytest.raises(UnsupportedError, match="deepseek_v41"):
        Model.from_config({**BASE, "model_type": "deepseek_v41"})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 300) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)


@given(data=st.data(), name=st.sampled_from(sorted(BASE)), value=JSON)
def test_no_value_of_any_key_is_a_crash(data, name, value):
    """Every damage of a real config is a model, or an error of ours that names a key."""
    config = copy.deepcopy(BASE)
    if data.draw(st.booleans()):
        config = config_of(data.draw(st.sampled_from(names())))
        inner = config.get("text_config", config)
        name = data.draw(st.sampled_from(sorted(inner)))
        inner[name] = value
    else:
        config[name] = value
    try:
        model = Model.from_config(config)
    except (ConfigError, UnsupportedError):
        return
    assert model.layers
