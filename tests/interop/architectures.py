"""Small random-weight models for (nearly) every architecture mlx-lm has.

`ARCHITECTURES` maps a name to a config of a few layers; `build` makes the model.  A name is the
config's ``model_type``, or ``<model_type>+<variant>`` where one architecture has several cache
layouts (``llama+sliding``).  The sizes are chosen so that a test of a cache has something to bite
on within fifty tokens: sliding windows of 8 to 16 rows, head widths of 32 (a quantization group
fits), grouped queries, and every kind of layer an architecture knows.

What an architecture's caches look like is read off `make_prompt_cache` (`facts`), not listed by
hand; the lists `RECURRENT`, `WINDOWED`, ... are computed on first use.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import importlib.util
import sys
import types
from collections.abc import Iterator
from functools import cache as memoize
from importlib.metadata import version
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

_VERSION = tuple(int(part) for part in version("mlx-lm").split(".")[:2])
VOCAB = 128
WINDOW = 12
_SLIDING, _FULL, _LINEAR = "sliding_attention", "full_attention", "linear_attention"

_BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
}
_MOE = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
# The latent (64) and the rotary part (32) differ in width, as in the real models.
_MLA = {
    "kv_lora_rank": 64,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "num_key_value_heads": 4,
}
_GDN = {  # gated delta nets
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
}
_GPT2 = {
    "n_embd": 128,
    "n_head": 4,
    "n_layer": 2,
    "n_positions": 512,
    "n_ctx": 512,
    "n_inner": 128,
    "layer_norm_epsilon": 1e-5,
}
_YARN4 = {  # what ministral3 and mistral4 read
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 2.0,
    "original_max_position_embeddings": 16,
    "max_position_embeddings": 4096,
    "llama_4_scaling_beta": 0.1,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
_LONGROPE = {
    "type": "longrope",
    "original_max_position_embeddings": 4096,
    "long_factor": [1.0] * 16,
    "short_factor": [1.0] * 16,
    "long_mscale": 1.0,
    "short_mscale": 1.0,
}
_ROPE_BY_TYPE = {
    kind: {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": 1.0}
    for kind, theta in ((_SLIDING, 10000.0), (_FULL, 50000.0))
}


def _cfg(model_type: str, *bases: dict[str, Any], **kw: Any) -> dict[str, Any]:
    """`_BASE`, then `bases`, then `kw`; `ModelArgs.from_dict` drops what it does not know."""
    out = dict(_BASE)
    for base in (*bases, kw):
        out.update(base)
    return {**out, "model_type": model_type}


def _text(model_type: str, text: dict[str, Any], **kw: Any) -> dict[str, Any]:
    """A config whose language model is under ``text_config``."""
    return {"model_type": model_type, "vocab_size": VOCAB, "text_config": text, **kw}


_GEMMA3N = {
    "num_hidden_layers": 8,
    "num_kv_shared_layers": 4,
    "vocab_size_per_layer_input": VOCAB,
    "sliding_window": WINDOW,
    "rope_local_base_freq": 10000.0,
    "final_logit_softcapping": 30.0,
    "layer_types": [_SLIDING, _SLIDING, _SLIDING, _FULL] * 2,
    "activation_sparsity_pattern": [0.5] * 4 + [0.0] * 4,
    "hidden_size_per_layer_input": 32,
    "altup_num_inputs": 2,
    "altup_coef_clip": 120.0,
    "altup_correct_scale": True,
    "altup_active_idx": 0,
    "laurel_rank": 16,
}
_GEMMA4 = {
    "num_hidden_layers": 8,
    "num_kv_shared_layers": 4,
    "head_dim": 32,
    "global_head_dim": 64,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 32,
    "sliding_window": WINDOW,
    "sliding_window_pattern": 4,
    "use_double_wide_mlp": False,
}
_MIMO_V2 = {
    "num_hidden_layers": 4,
    "hybrid_layer_pattern": [0, 1, 1, 0],
    "moe_layer_freq": [0, 1, 1, 1],
    "add_swa_attention_sink_bias": True,
    "add_full_attention_sink_bias": False,
    "sliding_window_size": WINDOW,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "layernorm_epsilon": 1e-5,
    "swa_rope_theta": 5000.0,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 1,
    "head_dim": 64,
    "v_head_dim": 32,
    "swa_head_dim": 64,
    "swa_v_head_dim": 32,
    "partial_rotary_factor": 0.5,
}
_KIMI = {
    "num_hidden_layers": 4,
    "linear_attn_config": {
        "num_heads": 4,
        "head_dim": 32,
        "short_conv_kernel_size": 4,
        "kda_layers": [1, 2, 4],  # counted from 1
        "full_attn_layers": [3],
    },
    "num_experts_per_token": 2,
    "model_max_length": 4096,
    "v_head_dim": 32,
}
_MINIMAX_M3 = {
    "num_hidden_layers": 3,
    "dense_intermediate_size": 128,
    "shared_intermediate_size": 64,
    "moe_layer_freq": [0, 1, 1],
    "sparse_attention_freq": [0, 1, 1],
    "index_n_heads": 2,
    "index_head_dim": 32,
    "index_block_size": 4,
    "index_topk_blocks": 4,
    "index_local_blocks": 1,
}
_LONGCAT = {
    "attention_method": "MLA",
    "zero_expert_type": "identity",
    "ffn_hidden_size": 128,
    "moe_topk": 2,
    "expert_ffn_hidden_size": 64,
    "zero_expert_num": 1,
    "num_layers": 2,
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
}
_LFM2 = {
    "num_hidden_layers": 4,
    "norm_eps": 1e-5,
    "conv_bias": False,
    "conv_L_cache": 3,
    "block_dim": 128,
    "block_ff_dim": 128,
    "block_multiple_of": 32,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": False,
    "full_attn_idxs": [1, 3],
    "num_dense_layers": 1,
    "use_expert_bias": True,
}
_MAMBA = {
    "state_size": 16,
    "conv_kernel": 4,
    "use_bias": False,
    "use_conv_bias": True,
    "time_step_rank": 8,
}
_GEAR = {
    "num_hidden_layers": 3,
    "layer_types": [_SLIDING, _FULL, "conv_mixer"],
    "sliding_window": WINDOW,
}
_QWEN35 = _cfg("", _GDN, num_hidden_layers=4, full_attention_interval=2, num_experts=0)
_QWEN35_MOE = _cfg("", _MOE, _GDN, num_hidden_layers=4, full_attention_interval=2)
_DSA = {"index_head_dim": 32, "index_n_heads": 2, "index_topk": 16}  # fewer rows than the prompt
_SWA4 = {"num_hidden_layers": 4, "sliding_window": WINDOW, "sliding_window_pattern": 2}
_TYPES4 = {
    "num_hidden_layers": 4,
    "sliding_window": WINDOW,
    "layer_types": [_SLIDING, _FULL, _SLIDING, _FULL],
}

_CONFIGS: list[dict[str, Any]] = [
    _cfg("Klear", _MOE),
    _cfg(
        "afm7",
        hidden_dim=128,
        num_layers=4,
        num_kv_reuse_layers=2,
        num_heads=4,
        num_kv_heads=2,
        hidden_dim_scale_factor=1.0,
    ),
    _cfg("afmoe", _MOE, _TYPES4, num_dense_layers=1),
    _cfg("apertus", post_norm=False, qk_norm=True),
    _cfg(
        "baichuan_m1",
        num_hidden_layers=4,
        sliding_window=WINDOW,
        sliding_window_layers=[0, 2],
        conv_window=2,
    ),
    _cfg("bailing_hybrid", _MOE, _MLA, num_hidden_layers=4, layer_group_size=2, group_norm_size=2),
    {
        **_cfg(
            "bailing_hybrid",
            _MOE,
            _MLA,
            architectures=["BailingMoeV3ForCausalLM"],
            num_hidden_layers=4,
            layer_group_size=2,
            moe_shared_expert_intermediate_size=64,
        ),
        "name": "bailing_hybrid+v3",
    },
    _cfg("bailing_moe", _MOE, num_hidden_layers=3),
    _cfg("bailing_moe_linear", _MOE, num_hidden_layers=4, layer_group_size=2, group_norm_size=2),
    _cfg("bitnet"),
    _cfg("cohere", layer_norm_eps=1e-5, logit_scale=1.0),
    _cfg("cohere2", _SWA4, layer_norm_eps=1e-5, logit_scale=1.0),
    _cfg(
        "dbrx",
        d_model=128,
        n_layers=2,
        n_heads=4,
        attn_config={"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0},
        ffn_config={"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    ),
    _cfg("deepseek", _MOE),
    _cfg("deepseek_v2", _MOE, _MLA, topk_method="greedy", rope_scaling=_YARN4),
    _cfg("deepseek_v3", _MOE, _MLA),
    _cfg("deepseek_v32", _MOE, _MLA, _DSA),
    _cfg(
        "deepseek_v41",
        _MOE,
        num_hidden_layers=4,
        head_dim=32,
        q_lora_rank=32,
        qk_rope_head_dim=16,
        o_groups=2,
        o_lora_rank=32,
        sliding_window=WINDOW,
        compress_ratios=[0, 4, 4, 4],
        kv_source_layer_ids=[1],
        index_source_layer_ids=[1, 2],
        candidate_source_layer_id=1,
        candidate_topk_blocks=3,
        candidate_block_size=2,
        index_n_heads=2,
        index_head_dim=32,
        index_topk=4,
        hc_mult=2,
        hc_sinkhorn_iters=4,
        rms_norm_eps=1e-6,
    ),
    _cfg("dots1", _MOE),
    _cfg("ernie4_5", use_bias=False),
    _cfg("ernie4_5_moe", use_bias=False, moe_num_experts=4, moe_k=2, moe_intermediate_size=64),
    _cfg("exaone", num_layers=2, layer_norm_epsilon=1e-5),
    _cfg(
        "exaone4",
        num_hidden_layers=4,
        sliding_window=WINDOW,
        sliding_window_pattern="LG",
        rope_scaling=None,
    ),
    _cfg("exaone_moe", _MOE, _TYPES4, is_moe_layer=[False, True, True, True]),
    _cfg(
        "falcon_h1",
        mamba_d_conv=4,
        mamba_d_head=16,
        mamba_d_ssm=64,
        mamba_d_state=16,
        mamba_n_heads=4,
        mamba_n_groups=1,
        lm_head_multiplier=1.0,
        key_multiplier=1.0,
    ),
    _cfg("falcon_mamba", _MAMBA),
    _cfg("gear", _GEAR),
    {**_cfg("gear", _GEAR, attn_logit_softcapping=20.0), "name": "gear+softcap"},
    _cfg("gemma"),
    _cfg("gemma2", query_pre_attn_scalar=32.0),
    _text("gemma3", _cfg("gemma3_text", _SWA4, query_pre_attn_scalar=32)),
    _cfg("gemma3_text", _SWA4, query_pre_attn_scalar=32),
    _text("gemma3n", _cfg("gemma3n_text", _GEMMA3N)),
    _text("gemma4", _cfg("gemma4_text", _GEMMA4)),
    _cfg("gemma4_text", _GEMMA4),
    {
        **_cfg(
            "gemma4_text",
            _GEMMA4,
            num_kv_shared_layers=0,
            attention_k_eq_v=True,
            num_global_key_value_heads=1,
        ),
        "name": "gemma4_text+k_eq_v",
    },
    _cfg("glm"),
    _cfg("glm4", partial_rotary_factor=0.5),
    _cfg("glm4_moe", _MOE, rope_scaling=None, use_qk_norm=True, partial_rotary_factor=0.5),
    _cfg("glm4_moe_lite", _MOE, _MLA),
    _cfg(
        "glm_moe_dsa",
        _MOE,
        _MLA,
        _DSA,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        moe_layer_freq=1,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
    _cfg("gpt2", _GPT2),
    _cfg("gpt_bigcode", _GPT2),
    _cfg("gpt_neox", layer_norm_eps=1e-5, rotary_emb_base=10000, rotary_pct=0.25),
    _cfg("gpt_oss", _MOE, _TYPES4, rope_scaling=None),
    _cfg("gptj", _GPT2, rotary_dim=32),
    _cfg(
        "granite",
        logits_scaling=1.0,
        attention_multiplier=0.2,
        embedding_multiplier=1.0,
        residual_multiplier=1.0,
    ),
    _cfg(
        "granitemoe",
        _MOE,
        logits_scaling=1.0,
        attention_multiplier=0.2,
        embedding_multiplier=1.0,
        residual_multiplier=1.0,
    ),
    _cfg(
        "granitemoehybrid",
        _MOE,
        num_hidden_layers=4,
        logits_scaling=1.0,
        attention_multiplier=0.2,
        embedding_multiplier=1.0,
        residual_multiplier=1.0,
        layer_types=["mamba", "attention", "mamba", "attention"],
        shared_intermediate_size=64,
        mamba_n_heads=8,
        mamba_d_head=16,
        mamba_proj_bias=False,
        mamba_d_state=16,
        mamba_d_conv=4,
        mamba_n_groups=1,
        mamba_conv_bias=True,
    ),
    _cfg("helium"),
    _cfg(
        "hunyuan",
        _MOE,
        num_hidden_layers=4,
        moe_topk=2,
        num_shared_expert=1,
        use_mixed_mlp_moe=True,
        use_qk_norm=True,
        use_cla=True,
        cla_share_factor=2,
        rope_scaling={"alpha": 1.0, "factor": 1.0, "type": "dynamic"},
    ),
    _cfg("hunyuan_v1_dense", rope_scaling={"alpha": 1.0, "factor": 1.0, "type": "dynamic"}),
    _cfg("internlm2", bias=False),
    _cfg("internlm3"),
    _cfg("iquestloopcoder", loop_num=2, loop_window_size=WINDOW),
    _cfg(
        "jamba",
        _MOE,
        num_hidden_layers=4,
        attn_layer_offset=1,
        attn_layer_period=2,
        expert_layer_offset=1,
        expert_layer_period=2,
        mamba_d_conv=4,
        mamba_d_state=16,
        mamba_expand=1,
    ),
    _text("kimi_k25", _cfg("kimi_k2", _MOE, _MLA)),
    _text(
        "kimi_k3",
        _cfg("kimi_linear", _MOE, _MLA, _KIMI, q_lora_rank=None, attn_res_block_size=2),
    ),
    _cfg("kimi_linear", _MOE, _MLA, _KIMI),
    _text("kimi_vl", _cfg("deepseek_v3", _MOE, _MLA)),
    _cfg(
        "laguna",
        _MOE,
        _TYPES4,
        rope_parameters=_ROPE_BY_TYPE,
        num_attention_heads_per_layer=[8, 4, 8, 4],
    ),
    _text("lfm2-vl", _cfg("lfm2", _LFM2)),
    _cfg("lfm2", _LFM2),
    _cfg("lfm2_moe", _MOE, _LFM2),
    _cfg("lille-130m", _GPT2, n_kv_heads=2, block_size=512, layer_norm_eps=1e-5),
    _cfg("llama"),
    {**_cfg("llama", _TYPES4), "name": "llama+sliding"},
    _text(
        "llama4",
        _cfg(
            "llama4_text",
            _MOE,
            num_hidden_layers=4,
            attention_chunk_size=WINDOW,
            interleave_moe_layer_step=2,
            num_experts_per_tok=1,
            intermediate_size_mlp=128,
            rope_scaling=None,
            use_qk_norm=True,
        ),
    ),
    _cfg("llama4_text", intermediate_size_mlp=128, no_rope_layers=[1, 0], use_qk_norm=True),
    _cfg("longcat_flash", _MOE, _MLA, _LONGCAT),
    _cfg(
        "longcat_flash_ngram",
        _MOE,
        _MLA,
        _LONGCAT,
        ngram_vocab_size_ratio=2,
        emb_neighbor_num=3,
        emb_split_num=2,
    ),
    _cfg("mamba", _MAMBA),
    _cfg(
        "mamba2",
        num_heads=4,
        head_dim=32,
        state_size=16,
        layer_norm_epsilon=1e-5,
        conv_kernel=4,
        n_groups=1,
        use_bias=False,
        use_conv_bias=True,
        time_step_limit=(0.001, 100.0),
        time_step_rank="auto",
    ),
    _cfg("mellum", _MOE, _TYPES4, rope_parameters=_ROPE_BY_TYPE),
    _cfg("mimo", num_nextn_predict_layers=0),
    _cfg("mimo_v2_flash", _MOE, _MIMO_V2),
    _cfg("minicpm", dim_model_base=128, scale_depth=1.4, scale_emb=1.0),
    _cfg(
        "minicpm3",
        _MLA,
        dim_model_base=128,
        scale_depth=1.4,
        scale_emb=1.0,
        rope_scaling=_LONGROPE,
    ),
    _cfg("minimax", _MOE, rotary_dim=16, shared_intermediate_size=64),
    _text("minimax_m3_vl", _cfg("minimax_m3", _MOE, _MINIMAX_M3)),
    _cfg("ministral3", _TYPES4, rope_parameters=_YARN4),
    _cfg("mistral"),
    _text("mistral3", _cfg("ministral3", _TYPES4, rope_parameters=_YARN4)),
    _cfg("mistral4", _MOE, _MLA, rope_parameters=_YARN4),
    _cfg("mixtral", _MOE),
    _cfg("muse_glimmer", num_hidden_layers=4, sliding_window=WINDOW, output_multiplier=1.0),
    _text(
        "muse_spark",
        _cfg(
            "muse_spark_text",
            _MOE,
            _TYPES4,
            post_norm_eps=1e-6,
            rope_parameters={"rope_theta": 10000.0},
            layer_rope_theta=[10000.0, 0.0] * 2,
            final_logit_softcapping=30.0,
            output_multiplier=1.0,
            moe_hidden_size=64,
            num_shared_experts=0,
        ),
    ),
    _cfg("nanbeige", num_loops=2),
    _cfg("nanochat", num_key_value_heads=2),
    _cfg("nemotron", hidden_act="relu2", norm_eps=1e-5),
    _cfg(
        "nemotron-nas",
        num_hidden_layers=3,
        block_configs=[
            {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.0}},
            {"attention": {"no_op": True}, "ffn": {"ffn_mult": 1.0}},
            {"attention": {"n_heads_in_group": 4}, "ffn": {"no_op": True}},
        ],
    ),
    _cfg(
        "nemotron_h",
        _MOE,
        hybrid_override_pattern=["M", "*", "-", "M", "E", "*"],
        mamba_num_heads=8,
        mamba_head_dim=16,
        mamba_proj_bias=False,
        ssm_state_size=16,
        conv_kernel=4,
        n_groups=2,
        layer_norm_epsilon=1e-5,
        use_bias=False,
        use_conv_bias=True,
        moe_shared_expert_intermediate_size=64,
    ),
    _cfg(
        "olmo",
        d_model=128,
        n_layers=2,
        n_heads=4,
        mlp_hidden_size=256,
        embedding_size=VOCAB,
    ),
    _cfg("olmo2"),
    _cfg("olmo3", _TYPES4),
    _cfg(
        "olmo_hybrid",
        _GDN,
        num_hidden_layers=4,
        layer_types=[_LINEAR, _FULL, _LINEAR, _FULL],
        linear_num_key_heads=4,
        linear_allow_neg_eigval=True,
    ),
    _cfg("olmoe", _MOE),
    _cfg(
        "openelm",
        num_transformer_layers=2,
        model_dim=128,
        ffn_dim_divisor=32,
        num_query_heads=[4, 8],
        num_kv_heads=[1, 2],
        ffn_multipliers=[1.0, 1.0],
    ),
    _cfg("phi", layer_norm_eps=1e-5, num_key_value_heads=4),
    _cfg("phi3"),
    _cfg(
        "phi3small",
        vocab_size=100352,  # it writes to token ids up to here whatever the config says
        hidden_size=64,
        num_attention_heads=2,
        num_key_value_heads=1,
        dense_attention_every_n_layers=2,
        ff_intermediate_size=128,
        gegelu_limit=20.0,
        layer_norm_epsilon=1e-5,
        blocksparse_block_size=32,
        blocksparse_num_local_blocks=1,
        blocksparse_vert_stride=2,
    ),
    _cfg(
        "phimoe",
        _MOE,
        rope_scaling=_LONGROPE,
    ),
    _cfg(
        "phixtral", _MOE, num_vocab=VOCAB, model_dim=128, num_heads=4, num_layers=2, rotary_dim=16
    ),
    _text("pixtral", _cfg("mistral")),
    _cfg("plamo", num_attention_heads=4, n_shared_head=2),
    _cfg(
        "plamo2",
        num_hidden_layers=4,
        hidden_size_per_head=32,
        mamba_d_state=16,
        mamba_d_conv=4,
        mamba_num_heads=4,
        mamba_step=2,
    ),
    _cfg("plamo3", _SWA4, window_size=WINDOW),
    _cfg("qwen", kv_channels=32, layer_norm_epsilon=1e-5),
    _cfg("qwen2"),
    _cfg("qwen2_moe", _MOE),
    _text("qwen2_vl", _cfg("qwen2")),
    _cfg("qwen3"),
    _text("qwen3_5", _QWEN35),
    _text("qwen3_5_moe", _QWEN35_MOE),
    _cfg("qwen3_moe", _MOE),
    _cfg(
        "qwen3_next",
        _MOE,
        _GDN,
        num_hidden_layers=4,
        full_attention_interval=2,
        partial_rotary_factor=0.5,
    ),
    _text("qwen3_vl", _cfg("qwen3")),
    _text("qwen3_vl_moe", _cfg("qwen3_moe", _MOE)),
    _cfg(
        "recurrent_gemma",
        num_hidden_layers=3,
        num_key_value_heads=1,
        conv1d_width=4,
        logits_soft_cap=30.0,
        attention_window_size=WINDOW,
        block_types=["recurrent", "attention"],
    ),
    _cfg(
        "rwkv7",
        norm_eps=1e-5,
        a_low_rank_dim=16,
        v_low_rank_dim=16,
        gate_low_rank_dim=16,
        decay_low_rank_dim=16,
    ),
    _cfg("seed_oss"),
    _cfg("smollm3", num_hidden_layers=4),
    _cfg("solar_open", _MOE, partial_rotary_factor=1.0),
    _cfg("spark2_5", _TYPES4, rope_parameters=_ROPE_BY_TYPE),
    _cfg("stablelm", use_qkv_bias=True, partial_rotary_factor=0.5, layer_norm_eps=1e-5),
    _cfg("starcoder2", norm_epsilon=1e-5),
    _cfg(
        "step3p5",
        _TYPES4,
        num_attention_groups=2,
        moe_num_experts=4,
        moe_top_k=2,
        moe_intermediate_size=64,
        share_expert_dim=64,
        moe_layers_enum="1,3",
        attention_other_setting={"num_attention_heads": 8, "num_attention_groups": 2},
    ),
    _cfg("talkie"),
    _cfg("telechat3"),
    _cfg("youtu_llm", _MLA),
]

ARCHITECTURES: dict[str, dict[str, Any]] = {
    config.get("name", config["model_type"]): {k: v for k, v in config.items() if k != "name"}
    for config in _CONFIGS
}
"""Name -> config (with ``model_type``)."""

METAL_ONLY = ("bitnet", "muse_spark")
"""Names whose layers are Metal kernels: they build anywhere and run on a Mac."""

BROKEN = {
    "olmo": "adds the mask to its scores, and gets the string 'causal' (olmo.py:93)",
    "phi3small": "adds a boolean mask to its scores, so it is not causal (phi3small.py:146)",
}
"""Names that build and that mlx-lm itself (0.31.3 to 0.32.2) runs wrongly or not at all."""

_PLAMO3 = "its mask lets a row see sliding_window + 1 rows, its cache keeps sliding_window"
_OFFSET = "shared layers read the offset after its owner has moved it"
CHUNKS_DIFFER = {
    "plamo3": _PLAMO3,
    **({} if _VERSION >= (0, 32) else {"gemma3n": _OFFSET, "llama4": "ChunkedKVCache fails"}),
}
"""Names for which mlx-lm's own caches do not give the logits of one call when the prompt comes
in chunks, with the reason: nothing to hold another cache to."""

NEEDS = {"olmo": "hf_olmo"}
"""A package an mlx-lm module probes for at import and never uses; `build` stands in for it."""


# -- how attention uses its cache --------------------------------------------------------------

# What attention does with its cache, beyond `offset` before and `update_and_fetch` (mlx-lm 0.32.2;
# found by running every model here on recording caches, then read).
#
#   all                  q and k are rotated at `offset`, then `update_and_fetch`, then
#                        `scaled_dot_product_attention` (imported by name) with `cache=` the cache
#                        it fetched from.  Differences:
#   afm7                 `cache[-1].keys_and_values()` (:361); reuse layers rotate at S - L, S the
#                        rows fetched (:251), and attend with cache=None (:257)
#   baichuan_m1          list (conv, kv): conv[0], conv[1] hold one row of k and v (:117)
#   bailing_hybrid/_moe_linear  one offset per call, from the first attention layer (:498)
#   deepseek_v32, glm_moe_dsa   list (kv, index): index.update_and_fetch(k, k), then reads
#                        index.keys, assigns index.values (:104) and kv.keys (:244); attends with
#                        cache= the list (:261); at L == 1 gathers rows, and takes a 4-d mask or
#                        None only (:230)
#   deepseek_v41         a class of its own, no mask at all, mx.fast with sinks (:392)
#   falcon_h1            list (arrays, kv)
#   gemma2, gear+softcap own product of scores, any mask array (gemma2: array only)
#   gemma3n              shared layers: `keys_and_values()` of another layer's cache (:133);
#                        one offset per call, from cache[0] (:495)
#   gemma4               shared layers get the rows an earlier layer fetched, cache=None (:246);
#                        `cache + [None] * n`: the caches must be a list (:549)
#   gpt2, gpt_bigcode    positions from cache[0].offset only, learned embeddings
#   gpt_oss, mimo_v2_flash      sinks= ; mimo: k and v differ in width
#   iquestloopcoder      2n caches; the second pass attends to the first pass's rows, held since,
#                        with cache= the second, windowed, one (:198)
#   kimi_linear, kimi_k3 unpack the arrays cache: it must iterate (:325, :407)
#   llama4               `maybe_trim_front()`, `start_position` and `offset` of cache[0], int; own
#                        mask (1 row too) for 3 of 4 layers (:228-244); cache[3] must exist
#   longcat_flash        list of two caches per layer; _ngram: caches[0] holds token ids
#   minimax_m3_vl        list (kv[, index]): index values have width 0 (:264), reads keys, values,
#                        assigns kv.keys (:347); blocks are counted in rows (:280)
#   mistral3             windowed layers on plain KVCaches: only the mask windows them
#   MLA                  K is the latent (B, 1, T, rank), V the rotary part; `k_pe.swapaxes`, then
#                        attends to the latent (L == 1) or to what it unpacks to (L > 1) with a
#                        float mask (B, H, L, T).  mistral4: "causal" and concatenation if L > 1
#   deepseek_v2, minicpm3, youtu_llm   unpack first: ordinary rows, K wider than V
#   nanbeige             n caches per loop
#   nemotron-nas         no cache for a layer without attention
#   phi, phixtral, stablelm, plamo     cast or tile the fetched rows
#   plamo2               mx.fast directly (:280)
#   plamo3               asks for window_size + 1 (:233) from caches of window_size
#   mamba, rwkv7, ...    cache[i], cache[i] = array, `if cache:`, lengths, advance(n)
#
# One mask per kind of layer, made by the first cache of the kind before any update, serves all
# layers of the kind: their caches must agree on what they keep.

EXTRA_MEMBERS = {
    "afm7": ("keys_and_values",),
    "deepseek_v32": ("keys", "values"),
    "gemma3n": ("keys_and_values",),
    "glm_moe_dsa": ("keys", "values"),
    "minimax_m3_vl": ("keys", "values"),
}
"""What a cache in place of a `KVCache` or `RotatingKVCache` needs beyond `offset`,
`update_and_fetch` and `make_mask`: nothing, for every other name (0.32.2; before, ``state``
stands for ``keys_and_values``)."""

ROW_POSITIONS = {
    "afm7": "a query's position is the number of rows fetched (afm7.py:251)",
    "llama4": "its mask spans start_position to offset (llama4.py:232)",
    "minimax_m3_vl": "blocks of keys are cut over rows (minimax_m3_vl.py:280)",
}
"""Names for which dropping rows is not the same as masking them."""

_LATENT_FLOAT = "swapaxes of the rotary part"
FLOAT_ONLY = {
    "afm7": "keys.shape (afm7.py:251)",
    "bailing_hybrid": _LATENT_FLOAT,
    "bailing_hybrid+v3": _LATENT_FLOAT,
    "deepseek_v3": _LATENT_FLOAT,
    "deepseek_v32": "zeros_like(cache.keys) (deepseek_v32.py:104)",
    "gear+softcap": "own scores (gear.py:100)",
    "gemma2": "own scores (gemma2.py:89)",
    "gemma4": "shared rows with cache=None (gemma4_text.py:273)",
    "gemma4_text": "shared rows with cache=None (gemma4_text.py:273)",
    "glm4_moe_lite": _LATENT_FLOAT,
    "glm_moe_dsa": "zeros_like(cache.keys) (deepseek_v32.py:104)",
    "gpt_oss": "attention sinks",
    "iquestloopcoder": "one cache's rows with another's cache= (iquestloopcoder.py:198)",
    "kimi_k25": _LATENT_FLOAT,
    "kimi_k3": _LATENT_FLOAT,
    "kimi_linear": _LATENT_FLOAT,
    "kimi_vl": _LATENT_FLOAT,
    "longcat_flash": _LATENT_FLOAT,
    "longcat_flash_ngram": _LATENT_FLOAT,
    "mimo_v2_flash": "attention sinks; K and V differ in width (base.py:105)",
    "minimax_m3_vl": "index keys (minimax_m3_vl.py:268)",
    "mistral4": _LATENT_FLOAT,
    "phi": "values.dtype (phi.py:102)",
    "phixtral": "values.dtype (phixtral.py:80)",
    "plamo": "tile(keys) (plamo.py:93)",
    "plamo2": "mx.fast (plamo2.py:280)",
    "stablelm": "keys.astype (stablelm.py:120)",
}
"""Names whose attention wants arrays from `update_and_fetch`: with a cache that has ``bits`` and
returns ``(packed, scales, biases)`` in place of each `KVCache` they fail, with the reason."""


# -- building ---------------------------------------------------------------------------------


def _module_of(name: str) -> str:
    from mlx_lm import utils

    config = ARCHITECTURES[name]
    model_type = utils.MODEL_REMAPPING.get(config["model_type"], config["model_type"])
    by_class = getattr(utils, "MODEL_ARCHITECTURE_REMAPPING", {})  # from 0.32.2
    for class_name in config.get("architectures", ()):
        model_type = by_class.get((config["model_type"], class_name), model_type)
    return f"mlx_lm.models.{model_type}"


def available() -> list[str]:
    """The names that the installed mlx-lm has a module for and can run on this machine."""
    skip = set(BROKEN) if mx.metal.is_available() else {*BROKEN, *METAL_ONLY}
    return [n for n in ARCHITECTURES if n not in skip and importlib.util.find_spec(_module_of(n))]


@contextlib.contextmanager
def _stand_in(package: str | None) -> Iterator[None]:
    """An empty module under a name, for as long as the block runs."""
    if package is None or package in sys.modules or importlib.util.find_spec(package):
        yield
        return
    sys.modules[package] = types.ModuleType(package)
    try:
        yield
    finally:
        del sys.modules[package]


_RATES = ("dt_bias", "dt_proj.bias", "recurrent_param", "w_lora.lora.2.bias")
"""Vectors that set how fast a recurrent layer forgets; lowered, or it forgets the prompt."""


def _randomized(path: str, p: mx.array, gain: float, embeddings: set[str]) -> mx.array:
    """What `p` starts from, made louder, and never a constant.

    Some layers start from zeros (routers, sinks, token shifts): with those, experts tie, and two
    ways to run the same model could pick differently.
    """
    if not mx.issubdtype(p.dtype, mx.floating) or p.ndim == 0:
        return mx.array(0.05) if path.endswith(("quant_key_scale", "quant_value_scale")) else p
    noise = mx.random.normal(p.shape)
    if sum(d > 1 for d in p.shape) < 2:  # norms, biases, sinks, gates per channel
        quiet = path.endswith(".bias") and not path.endswith(_RATES)
        return 0.1 * p if quiet else p + 0.1 * noise - (4.0 if path.endswith(_RATES) else 0.0)
    if path in embeddings:  # quiet, or the residual stream repeats the last token for ever
        return 0.05 * p
    if mx.all(p == p.reshape(-1)[0]).item():
        return p + gain * noise * p.shape[-1] ** -0.5
    return gain * p


_LOUD = {"gear": 4.0, "gear+softcap": 4.0, "gemma3n": 6.0, "gpt_neox": 6.0, "gptj": 6.0}
"""Names that at the usual gain say the same token for ever."""


def build(name: str, seed: int = 0, gain: float | None = None) -> nn.Module:
    """The model of `name`, in float32, the same for the same `seed`.

    Matrices are `gain` times mlx-lm's own initial ones: far from ties, and with an attention
    that looks at few rows, so that a wrong row shows in the tokens.
    """
    from mlx_lm.utils import _get_classes

    gain = _LOUD.get(name, 3.0) if gain is None else gain
    config = copy.deepcopy(ARCHITECTURES[name])
    mx.random.seed(seed)
    with _stand_in(NEEDS.get(name)):
        model_class, args_class = _get_classes(config)
    model = model_class(args_class.from_dict(config))
    model.eval()
    mx.eval(model.parameters())
    embeddings = {f"{k}.weight" for k, m in model.named_modules() if isinstance(m, nn.Embedding)}
    flat = tree_flatten(model.parameters())
    model.update(
        tree_unflatten([(path, _randomized(path, p, gain, embeddings)) for path, p in flat])
    )
    model.set_dtype(mx.float32)
    mx.eval(model.parameters())
    return model


# -- running ----------------------------------------------------------------------------------


def prompt(length: int = 41, seed: int = 0) -> list[int]:
    """A fixed prompt of any length; a shorter one is the start of a longer one."""
    state, out = 12345 + seed, []
    for _ in range(length):
        state = (state * 1103515245 + 12345) % 2**31
        out.append((state >> 8) % (VOCAB - 4) + 2)
    return out


def greedy(
    model: nn.Module,
    prompt: list[int],
    n: int,
    cache: list[Any] | None = None,
    step: int | None = None,
    **kw: Any,
) -> list[int]:
    """`n` tokens by mlx-lm's `generate_step`, the prompt in chunks of `step`."""
    from mlx_lm.generate import generate_step

    if step is not None:
        kw["prefill_step_size"] = step
    out = generate_step(
        mx.array(prompt), model, max_tokens=n, prompt_cache=cache, sampler=_argmax, **kw
    )
    return [int(token) for token, _ in out]


def _argmax(logprobs: mx.array) -> mx.array:
    return mx.argmax(logprobs, axis=-1)


def logits(
    model: nn.Module, tokens: list[int], cache: list[Any] | None = None, step: int | None = None
) -> mx.array:
    """The logits (length, vocab) of `tokens`, in calls of `step` tokens on one cache."""
    from mlx_lm.models.cache import make_prompt_cache

    cache = make_prompt_cache(model) if cache is None else cache
    step = step or len(tokens)
    parts = []
    for start in range(0, len(tokens), step):
        parts.append(model(mx.array([tokens[start : start + step]]), cache=cache)[0])
        mx.eval(parts[-1], [c.state for c in cache])
    return mx.concatenate(parts, axis=0)


# -- facts ------------------------------------------------------------------------------------


class Facts(NamedTuple):
    """What `make_prompt_cache` and one short call say about an architecture.

    Attributes:
        kinds: the class name of each cache, a `CacheList` as a tuple of class names.
        layers: the number of transformer layers, without those that have no attention at all.
        widths: the row shapes ((heads, K width), (heads, V width)) of each cache that got keys,
            in order; () for a cache without keys.
    """

    kinds: tuple[Any, ...]
    layers: int
    widths: tuple[Any, ...]

    @property
    def flat(self) -> tuple[str, ...]:
        """`kinds` with the lists opened."""
        return tuple(
            k for kind in self.kinds for k in (kind if isinstance(kind, tuple) else (kind,))
        )


def _kind(cache: Any) -> Any:
    children = getattr(cache, "caches", None)
    return tuple(map(_kind, children)) if children is not None else type(cache).__name__


def _leaves(caches: Any) -> Iterator[Any]:
    for cache in caches:
        children = getattr(cache, "caches", None)
        yield from (cache,) if children is None else _leaves(children)


@memoize
def facts(name: str) -> Facts:
    """The cache layout of an architecture."""
    from mlx_lm.models.cache import make_prompt_cache

    model = build(name)
    caches = make_prompt_cache(model)
    model(mx.array([[1, 2, 3]]), cache=caches)
    widths = []
    for leaf in _leaves(caches):
        keys, values = getattr(leaf, "keys", None), getattr(leaf, "values", None)
        widths.append(
            () if keys is None else tuple((x.shape[1], x.shape[3]) for x in (keys, values))
        )
    layers = sum(getattr(layer, "self_attn", layer) is not None for layer in model.layers)
    return Facts(tuple(map(_kind, caches)), layers, tuple(widths))


def _having(kind: str) -> list[str]:
    return [name for name in available() if kind in facts(name).flat]


_LISTS = {
    "RECURRENT": lambda: _having("ArraysCache"),
    "WINDOWED": lambda: _having("RotatingKVCache"),
    "CHUNKED": lambda: _having("ChunkedKVCache"),
    "NESTED": lambda: [n for n in available() if any(type(k) is tuple for k in facts(n).kinds)],
    "PRIVATE": lambda: _having("LayerCache"),
    "KV_SHARED": lambda: [
        n
        for n in available()
        if len(facts(n).kinds) < facts(n).layers and "ArraysCache" not in facts(n).flat
    ],
    "LOOPED": lambda: [
        n
        for n in available()
        if len(facts(n).kinds) > facts(n).layers and "ArraysCache" not in facts(n).flat
    ],
    "MLA": lambda: [n for n in available() if _latent(n)],
    "PLAIN": lambda: [n for n in available() if set(facts(n).flat) == {"KVCache"}],
}


def _latent(name: str) -> bool:
    """Whether a cache holds the latent in K and the rotary part of the keys in V."""
    config = ARCHITECTURES[name].get("text_config", ARCHITECTURES[name])
    row = tuple((1, config.get(key)) for key in ("kv_lora_rank", "qk_rope_head_dim"))
    return row in facts(name).widths


def __getattr__(name: str) -> list[str]:
    if name not in _LISTS:
        raise AttributeError(name)
    globals()[name] = value = _LISTS[name]()
    return value
