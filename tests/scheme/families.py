"""Published configs of well-known models, as far as they bear on caches, and what they come to.

The numbers are worked out by hand from the papers and model cards: bytes in bf16 (2 a number) a
token, of all layers of a kind together, and of the recurrent state of one row. Where mlx-lm runs a
model in another way than its config might suggest, a comment says so.
"""

from __future__ import annotations

from typing import Any, NamedTuple

SLIDING, FULL = "sliding_attention", "full_attention"


class Family(NamedTuple):
    """A config and what it comes to."""

    config: dict[str, Any]
    kinds: dict[str, int]
    full: int = 0
    sliding: int = 0
    chunked: int = 0
    latent: int = 0
    state: int = 0
    bound: int | None = None
    """The window, or the chunk."""
    shared: int = 0
    """Layers that read others' keys and values."""
    positions: int | None = None

    def at(self, tokens: int) -> int:
        """Bytes of one row."""
        near = min(tokens, self.bound or 0)
        # a query behind a whole number of chunks sees the last one
        chunk = (tokens - 1) % self.bound + 1 if self.bound and self.chunked else 0
        grows = (self.full + self.latent) * tokens
        return grows + self.sliding * near + self.chunked * chunk + self.state


FAMILIES: dict[str, Family] = {
    "Llama-3.1-8B": Family(
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rope_theta": 500000.0,
            "torch_dtype": "bfloat16",
            "vocab_size": 128256,
        },
        {"full": 32},
        full=32 * 8 * (128 + 128) * 2,  # layers, KV heads, key and value, bytes
        positions=131072,
    ),
    "Llama-3.2-1B": Family(
        {
            "model_type": "llama",
            "head_dim": 64,
            "hidden_size": 2048,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
        },
        {"full": 16},
        full=16 * 8 * (64 + 64) * 2,
        positions=131072,
    ),
    "SmolLM2-135M": Family(
        {
            "model_type": "llama",
            "hidden_size": 576,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "max_position_embeddings": 8192,
        },
        {"full": 30},
        full=23_040,
        positions=8192,
    ),
    "Qwen2.5-7B": Family(
        {
            "model_type": "qwen2",
            "hidden_size": 3584,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "max_window_layers": 28,
            "sliding_window": 131072,
            "use_sliding_window": False,
        },
        {"full": 28},
        full=28 * 4 * (128 + 128) * 2,
        positions=32768,
    ),
    "Qwen3-8B": Family(
        {
            "model_type": "qwen3",
            "head_dim": 128,
            "hidden_size": 4096,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 40960,
            "max_window_layers": 36,
            "sliding_window": None,
            "use_sliding_window": False,
        },
        {"full": 36},
        full=36 * 8 * 256 * 2,
        positions=40960,
    ),
    "Qwen3-30B-A3B": Family(
        {
            "model_type": "qwen3_moe",
            "head_dim": 128,
            "hidden_size": 2048,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "num_experts": 128,
            "num_experts_per_tok": 8,
        },
        {"full": 48},
        full=48 * 4 * 256 * 2,
    ),
    "Qwen3-Next-80B-A3B": Family(
        {
            "model_type": "qwen3_next",
            "full_attention_interval": 4,
            "head_dim": 256,
            "hidden_size": 2048,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_value_head_dim": 128,
            "num_hidden_layers": 48,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "max_position_embeddings": 262144,
        },
        {"full": 12, "recurrent": 36},
        full=12 * 2 * (256 + 256) * 2,
        # a matrix of 128 x 128 for each of 32 value heads in float32; the last 3 of 4 inputs of
        # a convolution over queries and keys of 16 heads and values of 32
        state=36 * (32 * 128 * 128 * 4 + 3 * (2 * 16 * 128 + 32 * 128) * 2),
        positions=262144,
    ),
    "Gemma-2-9B": Family(
        {
            "model_type": "gemma2",
            "cache_implementation": "hybrid",
            "head_dim": 256,
            "hidden_size": 3584,
            "num_hidden_layers": 42,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "sliding_window": 4096,
            "max_position_embeddings": 8192,
        },
        {"full": 42},  # every other layer slides in the paper; the config lists none, mlx-lm too
        full=42 * 8 * (256 + 256) * 2,
        positions=8192,
    ),
    "Gemma-3-4B": Family(
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "model_type": "gemma3",
            "text_config": {  # heads, KV heads, head_dim and the pattern are left to defaults
                "model_type": "gemma3_text",
                "hidden_size": 2560,
                "intermediate_size": 10240,
                "num_hidden_layers": 34,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                "sliding_window": 1024,
            },
            "torch_dtype": "bfloat16",
            "vision_config": {"hidden_size": 1152, "num_attention_heads": 16},
        },
        {"full": 5, "sliding": 29},  # every sixth of 34
        full=5 * 4 * (256 + 256) * 2,
        sliding=29 * 4 * (256 + 256) * 2,
        bound=1024,
    ),
    "Gemma-3n-E4B": Family(
        {
            "model_type": "gemma3n",
            "text_config": {
                "model_type": "gemma3n_text",
                "head_dim": 256,
                "hidden_size": 2048,
                "layer_types": [*[SLIDING] * 4, FULL] * 7,
                "num_hidden_layers": 35,
                "num_attention_heads": 8,
                "num_key_value_heads": 2,
                "num_kv_shared_layers": 15,
                "sliding_window": 512,
                "max_position_embeddings": 32768,
            },
        },
        {"full": 7, "sliding": 28},
        full=4 * 2 * (256 + 256) * 2,  # of the first 20 layers
        sliding=16 * 2 * (256 + 256) * 2,
        bound=512,
        shared=15,
        positions=32768,
    ),
    "Mistral-7B-v0.1": Family(
        {
            "model_type": "mistral",
            "hidden_size": 4096,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "sliding_window": 4096,
            "max_position_embeddings": 32768,
        },
        {"full": 32},  # the window is not given to any layer; mlx-lm runs it as a Llama
        full=32 * 8 * 256 * 2,
        positions=32768,
    ),
    "Mixtral-8x7B": Family(
        {
            "model_type": "mixtral",
            "hidden_size": 4096,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "sliding_window": None,
            "max_position_embeddings": 32768,
        },
        {"full": 32},
        full=32 * 8 * 256 * 2,
        positions=32768,
    ),
    "Phi-3-mini-4k": Family(
        {
            "model_type": "phi3",
            "hidden_size": 3072,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "sliding_window": 2047,
            "max_position_embeddings": 4096,
        },
        {"full": 32},  # as Mistral
        full=32 * 32 * (96 + 96) * 2,
        positions=4096,
    ),
    "Phi-4": Family(
        {
            "model_type": "phi3",
            "hidden_size": 5120,
            "num_hidden_layers": 40,
            "num_attention_heads": 40,
            "num_key_value_heads": 10,
            "sliding_window": None,
            "max_position_embeddings": 16384,
        },
        {"full": 40},
        full=40 * 10 * (128 + 128) * 2,
        positions=16384,
    ),
    "gpt-oss-20b": Family(
        {
            "model_type": "gpt_oss",
            "head_dim": 64,
            "hidden_size": 2880,
            "layer_types": [SLIDING, FULL] * 12,
            "num_hidden_layers": 24,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "sliding_window": 128,
            "max_position_embeddings": 131072,
        },
        {"full": 12, "sliding": 12},
        full=12 * 8 * (64 + 64) * 2,
        sliding=12 * 8 * (64 + 64) * 2,
        bound=128,
        positions=131072,
    ),
    "DeepSeek-V3": Family(
        {
            "model_type": "deepseek_v3",
            "hidden_size": 7168,
            "kv_lora_rank": 512,
            "num_hidden_layers": 61,
            "num_attention_heads": 128,
            "num_key_value_heads": 128,
            "q_lora_rank": 1536,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "max_position_embeddings": 163840,
        },
        {"latent": 61},
        latent=61 * (512 + 64) * 2,  # the latent, and the part of the key that is rotated
        positions=163840,
    ),
    "GLM-4.5": Family(
        {
            "model_type": "glm4_moe",
            "head_dim": 128,
            "hidden_size": 5120,
            "num_hidden_layers": 92,
            "num_attention_heads": 96,
            "num_key_value_heads": 8,
            "n_routed_experts": 160,
            "max_position_embeddings": 131072,
        },
        {"full": 92},
        full=92 * 8 * 256 * 2,
        positions=131072,
    ),
    "Jamba-v0.1": Family(
        {
            "model_type": "jamba",
            "attn_layer_offset": 4,
            "attn_layer_period": 8,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "mamba_d_conv": 4,
            "mamba_d_state": 16,
            "mamba_expand": 2,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 262144,
        },
        {"full": 4, "recurrent": 28},
        full=4 * 8 * 256 * 2,
        state=28 * 8192 * (3 + 16) * 2,  # mlx-lm keeps a Mamba-1 state in the model's dtype
        positions=262144,
    ),
    "mamba2-2.7b": Family(
        {
            "model_type": "mamba2",
            "conv_kernel": 4,
            "expand": 2,
            "head_dim": 64,
            "hidden_size": 2560,
            "n_groups": 1,
            "num_heads": 80,
            "num_hidden_layers": 64,
            "state_size": 128,
        },
        {"recurrent": 64},
        state=64 * (80 * 64 * 128 * 4 + 3 * (80 * 64 + 2 * 128) * 2),
    ),
    "Granite-4.0-H-Small": Family(
        {
            "model_type": "granitemoehybrid",
            "hidden_size": 4096,
            "layer_types": ["attention" if i in (5, 15, 25, 35) else "mamba" for i in range(40)],
            "mamba_d_conv": 4,
            "mamba_d_head": 64,
            "mamba_d_state": 128,
            "mamba_expand": 2,
            "mamba_n_groups": 1,
            "mamba_n_heads": 128,
            "num_hidden_layers": 40,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
        },
        {"full": 4, "recurrent": 36},
        full=4 * 8 * 256 * 2,
        state=36 * (128 * 64 * 128 * 4 + 3 * (128 * 64 + 2 * 128) * 2),
        positions=131072,
    ),
    "Llama-4-Scout-17B-16E": Family(
        {
            "architectures": ["Llama4ForConditionalGeneration"],
            "model_type": "llama4",
            "text_config": {
                "model_type": "llama4_text",
                "attention_chunk_size": 8192,
                "head_dim": 128,
                "hidden_size": 5120,
                "no_rope_layers": [1, 1, 1, 0] * 12,
                "num_hidden_layers": 48,
                "num_attention_heads": 40,
                "num_key_value_heads": 8,
                "num_local_experts": 16,
                "max_position_embeddings": 10485760,
            },
            "torch_dtype": "bfloat16",
        },
        {"full": 12, "chunked": 36},
        full=12 * 8 * 256 * 2,
        chunked=36 * 8 * 256 * 2,
        bound=8192,
        positions=10485760,
    ),
    "Falcon-H1-1.5B": Family(
        {
            "model_type": "falcon_h1",
            "head_dim": 128,
            "hidden_size": 2048,
            "mamba_d_conv": 4,
            "mamba_d_head": 64,
            "mamba_d_ssm": 3072,
            "mamba_d_state": 256,
            "mamba_expand": 2,
            "mamba_n_groups": 1,
            "mamba_n_heads": 48,
            "num_hidden_layers": 24,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "max_position_embeddings": 131072,
        },
        {"full": 24},  # and a state beside the attention of each
        full=24 * 2 * 256 * 2,
        state=24 * (48 * 64 * 256 * 4 + 3 * (3072 + 2 * 256) * 2),
        positions=131072,
    ),
    "Nemotron-H-8B": Family(
        {
            "model_type": "nemotron_h",
            "attention_head_dim": 128,
            "conv_kernel": 4,
            "hidden_size": 4096,
            "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
            "mamba_head_dim": 64,
            "mamba_num_heads": 128,
            "n_groups": 8,
            "num_hidden_layers": 52,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "ssm_state_size": 128,
            "max_position_embeddings": 8192,
        },
        {"full": 4, "recurrent": 24, "none": 24},
        full=4 * 8 * 256 * 2,
        state=24 * (128 * 64 * 128 * 4 + 3 * (128 * 64 + 2 * 8 * 128) * 2),
        positions=8192,
    ),
    "LFM2-1.2B": Family(
        {
            "model_type": "lfm2",
            "conv_L_cache": 3,
            "full_attn_idxs": [2, 5, 8, 10, 12, 14],
            "hidden_size": 2048,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 128000,
        },
        {"full": 6, "recurrent": 10},
        full=6 * 8 * (64 + 64) * 2,
        state=10 * 2 * 2048 * 2,  # the last 2 of 3 inputs of a convolution
        positions=128000,
    ),
    "Command-R7B": Family(
        {
            "model_type": "cohere2",
            "head_dim": 128,
            "hidden_size": 4096,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            "order_of_interleaved_layers": "local_attn_first",
        },
        {"full": 8, "sliding": 24},
        full=8 * 8 * 256 * 2,
        sliding=24 * 8 * 256 * 2,
        bound=4096,
    ),
    "Olmo-3-7B": Family(
        {
            "model_type": "olmo3",
            "hidden_size": 4096,
            "layer_types": [SLIDING, SLIDING, SLIDING, FULL] * 8,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "sliding_window": 4096,
            "max_position_embeddings": 65536,
        },
        {"full": 8, "sliding": 24},
        full=8 * 32 * 256 * 2,
        sliding=24 * 32 * 256 * 2,
        bound=4096,
        positions=65536,
    ),
    "Kimi-Linear-48B-A3B": Family(
        {
            "model_type": "kimi_linear",
            "head_dim": 72,
            "hidden_size": 2304,
            "kv_lora_rank": 512,
            "linear_attn_config": {
                "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
                "head_dim": 128,
                "kda_layers": [
                    *(1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15, 17, 18, 19, 21, 22, 23, 25, 26)
                ],
                "num_heads": 32,
                "short_conv_kernel_size": 4,
            },
            "num_hidden_layers": 27,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
        },
        {"latent": 7, "recurrent": 20},
        latent=7 * (512 + 64) * 2,
        # convolutions over queries, keys and values
        state=20 * (32 * 128 * 128 * 4 + 3 * 3 * 32 * 128 * 2),
    ),
    "RecurrentGemma-2B": Family(
        {
            "model_type": "recurrent_gemma",
            "attention_window_size": 2048,
            "block_types": ["recurrent", "recurrent", "attention"],
            "conv1d_width": 4,
            "head_dim": 256,
            "hidden_size": 2560,
            "lru_width": 2560,
            "num_hidden_layers": 26,
            "num_attention_heads": 10,
            "num_key_value_heads": 1,
        },
        {"sliding": 8, "recurrent": 18},
        sliding=8 * 1 * 512 * 2,
        state=18 * (3 * 2560 + 2560) * 2,
        bound=2048,
    ),
    "GPT-2": Family(
        {
            "model_type": "gpt2",
            "n_ctx": 1024,
            "n_embd": 768,
            "n_head": 12,
            "n_layer": 12,
            "n_positions": 1024,
        },
        {"full": 12},
        full=12 * 12 * (64 + 64) * 2,
        positions=1024,
    ),
}
