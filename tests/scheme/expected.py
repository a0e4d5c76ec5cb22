"""What the caches of the models in ``configs`` take, worked out by hand.

Bytes in bf16 (2 a number) but for recurrent state, of which the numbers of the state proper take 4
bytes (float32) and those of a convolution's tail 2. Which kind a layer is of follows mlx-lm where
it runs a model in another way than Hugging Face's transformers do; a comment says so.

In the expressions "KV heads * (key + value)" are the numbers that a layer keeps of a token.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Expected:
    """What one config comes to."""

    layers: int
    kinds: dict[str, int]
    """Layers of each kind: full, sliding, chunked, recurrent, latent, none."""
    at_32768: int
    """Bytes of one row at 32,768 tokens."""
    shared: int = 0
    """Layers that read another's keys and values; they count in `kinds` too."""
    full_per_token: int = 0
    sliding_per_token: int = 0
    chunked_per_token: int = 0
    latent_per_token: int = 0
    window: int | None = None
    """The window, or the chunk."""
    state: int = 0
    """Bytes of the recurrent state of one row."""
    max_positions: int | None = None
    """As the file states it; None where it leaves it out."""


FAMILIES: dict[str, Expected] = {
    # ------------------------------------------------------------------ every layer attends to all
    "llama-3.1-8b": Expected(
        layers=32,
        kinds={"full": 32},
        full_per_token=32 * 8 * (128 + 128) * 2,  # layers, KV heads, 4096 / 32 heads, bytes
        at_32768=32 * 8 * (128 + 128) * 2 * 32768,
        max_positions=131072,
    ),
    "llama-3.2-1b": Expected(
        layers=16,
        kinds={"full": 16},
        full_per_token=16 * 8 * (64 + 64) * 2,  # layers, KV heads, head_dim, bytes
        at_32768=16 * 8 * (64 + 64) * 2 * 32768,
        max_positions=131072,
    ),
    "smollm2-135m-instruct": Expected(
        layers=30,
        kinds={"full": 30},
        full_per_token=30 * 3 * (64 + 64) * 2,  # layers, KV heads, 576 / 9 heads, bytes
        at_32768=30 * 3 * (64 + 64) * 2 * 32768,
        max_positions=8192,
    ),
    "qwen2.5-7b-instruct": Expected(
        layers=28,
        kinds={"full": 28},  # the window of 131,072 is switched off by use_sliding_window
        full_per_token=28 * 4 * (128 + 128) * 2,  # layers, KV heads, 3584 / 28 heads, bytes
        at_32768=28 * 4 * (128 + 128) * 2 * 32768,
        max_positions=32768,
    ),
    "qwen3-8b": Expected(
        layers=36,
        kinds={"full": 36},
        full_per_token=36 * 8 * (128 + 128) * 2,  # layers, KV heads, head_dim, bytes
        at_32768=36 * 8 * (128 + 128) * 2 * 32768,
        max_positions=40960,
    ),
    "qwen3-30b-a3b": Expected(
        layers=48,
        kinds={"full": 48},
        # layers, KV heads, head_dim (128, though 2048 / 32 heads would be 64), bytes
        full_per_token=48 * 4 * (128 + 128) * 2,
        at_32768=48 * 4 * (128 + 128) * 2 * 32768,
        max_positions=40960,
    ),
    "mixtral-8x7b-v0.1": Expected(
        layers=32,
        kinds={"full": 32},
        full_per_token=32 * 8 * (128 + 128) * 2,  # layers, KV heads, 4096 / 32 heads, bytes
        at_32768=32 * 8 * (128 + 128) * 2 * 32768,
        max_positions=32768,
    ),
    "mistral-7b-v0.1": Expected(
        layers=32,
        # mlx-lm runs it as a Llama, whose layers slide only where layer_types says so: the window
        # of 4096 goes unused. Hugging Face lets every layer slide.
        kinds={"full": 32},
        full_per_token=32 * 8 * (128 + 128) * 2,  # layers, KV heads, 4096 / 32 heads, bytes
        at_32768=32 * 8 * (128 + 128) * 2 * 32768,
        max_positions=32768,
    ),
    "mistral-7b-instruct-v0.3": Expected(
        layers=32,
        kinds={"full": 32},  # sliding_window is null
        full_per_token=32 * 8 * (128 + 128) * 2,  # layers, KV heads, 4096 / 32 heads, bytes
        at_32768=32 * 8 * (128 + 128) * 2 * 32768,
        max_positions=32768,
    ),
    "phi-3-mini-4k-instruct": Expected(
        layers=32,
        # mlx-lm's phi3 has no window; Hugging Face's slides over 2047 tokens in every layer
        kinds={"full": 32},
        full_per_token=32 * 32 * (96 + 96) * 2,  # layers, KV heads, 3072 / 32 heads, bytes
        at_32768=32 * 32 * (96 + 96) * 2 * 32768,
        max_positions=4096,
    ),
    "phi-4": Expected(
        layers=40,
        kinds={"full": 40},
        full_per_token=40 * 10 * (128 + 128) * 2,  # layers, KV heads, 5120 / 40 heads, bytes
        at_32768=40 * 10 * (128 + 128) * 2 * 32768,
        max_positions=16384,
    ),
    "glm-4-9b-0414": Expected(
        layers=40,
        kinds={"full": 40},
        full_per_token=40 * 2 * (128 + 128) * 2,  # layers, KV heads, head_dim, bytes
        at_32768=40 * 2 * (128 + 128) * 2 * 32768,
        max_positions=32768,
    ),
    "glm-4.5": Expected(
        layers=92,  # the layer of num_nextn_predict_layers comes on top and is left out by mlx-lm
        kinds={"full": 92},
        # layers, KV heads, head_dim (128, though 5120 / 96 heads would be 53), bytes
        full_per_token=92 * 8 * (128 + 128) * 2,
        at_32768=92 * 8 * (128 + 128) * 2 * 32768,
        max_positions=131072,
    ),
    "glm-4.5-air": Expected(
        layers=46,
        kinds={"full": 46},
        full_per_token=46 * 8 * (128 + 128) * 2,  # layers, KV heads, head_dim, bytes
        at_32768=46 * 8 * (128 + 128) * 2 * 32768,
        max_positions=131072,
    ),
    # ------------------------------------------------------------------------- windows and chunks
    "gemma-2-9b-it": Expected(
        layers=42,
        # In transformers every other layer slides over 4096 tokens, which the config does not say;
        # mlx-lm's gemma2 makes no cache of its own and so keeps all of every layer.
        kinds={"full": 42},
        full_per_token=42 * 8 * (256 + 256) * 2,  # layers, KV heads, head_dim, bytes
        at_32768=42 * 8 * (256 + 256) * 2 * 32768,
        max_positions=8192,
    ),
    "gemma-3-1b-pt": Expected(
        layers=26,
        kinds={"full": 4, "sliding": 22},  # the 6th, 12th, 18th and 24th are full
        full_per_token=4 * 1 * (256 + 256) * 2,  # layers, KV heads, head_dim, bytes
        sliding_per_token=22 * 1 * (256 + 256) * 2,
        window=512,
        at_32768=4 * 1 * (256 + 256) * 2 * 32768 + 22 * 1 * (256 + 256) * 2 * 512,
        max_positions=32768,
    ),
    "gemma-3-4b-it": Expected(
        layers=34,
        kinds={"full": 5, "sliding": 29},  # the 6th, 12th, 18th, 24th and 30th are full
        # The file leaves out num_attention_heads (8), num_key_value_heads (4), head_dim (256), the
        # pattern (6) and max_position_embeddings (131072): these are transformers' defaults, and
        # mlx-lm's but for the last.
        full_per_token=5 * 4 * (256 + 256) * 2,  # layers, KV heads, head_dim, bytes
        sliding_per_token=29 * 4 * (256 + 256) * 2,
        window=1024,
        at_32768=5 * 4 * (256 + 256) * 2 * 32768 + 29 * 4 * (256 + 256) * 2 * 1024,
        max_positions=None,
    ),
    "gemma-3n-e2b-it": Expected(
        layers=30,
        kinds={"full": 6, "sliding": 24},  # every fifth is full
        shared=10,  # the last 10: 2 full, 8 sliding
        full_per_token=4 * 2 * (256 + 256) * 2,  # the 4 full of the first 20; KV heads, head_dim
        sliding_per_token=16 * 2 * (256 + 256) * 2,  # the 16 sliding of the first 20
        window=512,
        at_32768=4 * 2 * (256 + 256) * 2 * 32768 + 16 * 2 * (256 + 256) * 2 * 512,
        max_positions=32768,
    ),
    "gemma-3n-e4b-it": Expected(
        layers=35,
        kinds={"full": 7, "sliding": 28},  # every fifth is full
        shared=15,  # the last 15: 3 full, 12 sliding
        full_per_token=4 * 2 * (256 + 256) * 2,  # the 4 full of the first 20; KV heads, head_dim
        sliding_per_token=16 * 2 * (256 + 256) * 2,  # the 16 sliding of the first 20
        window=512,
        at_32768=4 * 2 * (256 + 256) * 2 * 32768 + 16 * 2 * (256 + 256) * 2 * 512,
        max_positions=32768,
    ),
    "gemma-4-e2b-it": Expected(
        layers=35,
        kinds={"full": 7, "sliding": 28},  # every fifth is full
        shared=20,  # the last 20: 4 full, 16 sliding
        # the 3 full of the first 15, KV heads, global_head_dim, bytes
        full_per_token=3 * 1 * (512 + 512) * 2,
        # the 12 sliding of the first 15, KV heads, head_dim, bytes
        sliding_per_token=12 * 1 * (256 + 256) * 2,
        window=512,
        at_32768=3 * 1 * (512 + 512) * 2 * 32768 + 12 * 1 * (256 + 256) * 2 * 512,
        max_positions=131072,
    ),
    "gemma-4-26b-a4b": Expected(
        layers=30,
        kinds={"full": 5, "sliding": 25},  # every sixth is full
        # layers, num_global_key_value_heads, global_head_dim, bytes. attention_k_eq_v projects keys
        # and values alike, but norms and rotates them apart: both are kept.
        full_per_token=5 * 2 * (512 + 512) * 2,
        sliding_per_token=25 * 8 * (256 + 256) * 2,  # layers, KV heads, head_dim, bytes
        window=1024,
        at_32768=5 * 2 * (512 + 512) * 2 * 32768 + 25 * 8 * (256 + 256) * 2 * 1024,
        max_positions=262144,
    ),
    "gpt-oss-20b": Expected(
        layers=24,
        kinds={"full": 12, "sliding": 12},  # in turn, sliding first
        full_per_token=12 * 8 * (64 + 64) * 2,  # layers, KV heads, head_dim, bytes
        sliding_per_token=12 * 8 * (64 + 64) * 2,
        window=128,
        at_32768=12 * 8 * (64 + 64) * 2 * 32768 + 12 * 8 * (64 + 64) * 2 * 128,
        max_positions=131072,
    ),
    "command-r7b-12-2024": Expected(
        layers=32,
        kinds={"full": 8, "sliding": 24},  # every fourth is full
        full_per_token=8 * 8 * (128 + 128) * 2,  # layers, KV heads, head_dim, bytes
        sliding_per_token=24 * 8 * (128 + 128) * 2,
        window=4096,
        at_32768=8 * 8 * (128 + 128) * 2 * 32768 + 24 * 8 * (128 + 128) * 2 * 4096,
        max_positions=8192,
    ),
    "olmo-3-7b-instruct": Expected(
        layers=32,
        kinds={"full": 8, "sliding": 24},  # every fourth is full
        full_per_token=8 * 32 * (128 + 128) * 2,  # layers, KV heads, 4096 / 32 heads, bytes
        sliding_per_token=24 * 32 * (128 + 128) * 2,
        window=4096,
        at_32768=8 * 32 * (128 + 128) * 2 * 32768 + 24 * 32 * (128 + 128) * 2 * 4096,
        max_positions=65536,
    ),
    "mimo-v2-flash": Expected(
        layers=48,
        kinds={"full": 9, "sliding": 39},  # zeros and ones of hybrid_layer_pattern
        full_per_token=9 * 4 * (192 + 128) * 2,  # layers, KV heads, head_dim + v_head_dim, bytes
        # layers, swa_num_key_value_heads, swa_head_dim + swa_v_head_dim, bytes
        sliding_per_token=39 * 8 * (192 + 128) * 2,
        window=128,  # the attention_chunk_size of 128 in the file is not used
        at_32768=9 * 4 * (192 + 128) * 2 * 32768 + 39 * 8 * (192 + 128) * 2 * 128,
        max_positions=262144,
    ),
    "llama-4-scout-17b-16e-instruct": Expected(
        layers=48,
        kinds={"full": 12, "chunked": 36},  # every fourth is full
        full_per_token=12 * 8 * (128 + 128) * 2,  # layers, KV heads, head_dim, bytes
        chunked_per_token=36 * 8 * (128 + 128) * 2,
        window=8192,
        at_32768=12 * 8 * (128 + 128) * 2 * 32768 + 36 * 8 * (128 + 128) * 2 * 8192,
        max_positions=10485760,
    ),
    # ------------------------------------------------------------------------------------- latents
    "deepseek-v3": Expected(
        layers=61,
        kinds={"latent": 61},
        latent_per_token=61 * (512 + 64) * 2,  # layers, kv_lora_rank + qk_rope_head_dim, bytes
        at_32768=61 * (512 + 64) * 2 * 32768,
        max_positions=163840,
    ),
    "deepseek-v3.2": Expected(
        layers=61,
        kinds={"latent": 61},
        # layers, kv_lora_rank + qk_rope_head_dim + index_head_dim (one key a token), bytes; mlx-lm
        # keeps zeros beside the index's keys, see OTHERWISE
        latent_per_token=61 * (512 + 64 + 128) * 2,
        at_32768=61 * (512 + 64 + 128) * 2 * 32768,
        max_positions=163840,
    ),
    "glm-5": Expected(
        layers=78,
        kinds={"latent": 78},
        # layers, kv_lora_rank + qk_rope_head_dim + index_head_dim, bytes; runs as DeepSeek-V3.2
        latent_per_token=78 * (512 + 64 + 128) * 2,
        at_32768=78 * (512 + 64 + 128) * 2 * 32768,
        max_positions=202752,
    ),
    # ----------------------------------------------------------------------------- recurrent state
    "qwen3-next-80b-a3b": Expected(
        layers=48,
        kinds={"full": 12, "recurrent": 36},  # every fourth is full
        full_per_token=12 * 2 * (256 + 256) * 2,  # layers, KV heads, head_dim, bytes
        # layers; value heads * value_dim * key_dim, float32; conv_kernel - 1 inputs of
        # 2 * key_heads * key_dim + value_heads * value_dim, bf16
        state=36 * (32 * 128 * 128 * 4 + (4 - 1) * (2 * 16 * 128 + 32 * 128) * 2),
        at_32768=12 * 2 * (256 + 256) * 2 * 32768
        + 36 * (32 * 128 * 128 * 4 + (4 - 1) * (2 * 16 * 128 + 32 * 128) * 2),
        max_positions=262144,
    ),
    "qwen3.5-9b": Expected(
        layers=32,
        kinds={"full": 8, "recurrent": 24},  # every fourth is full
        full_per_token=8 * 4 * (256 + 256) * 2,  # layers, KV heads, head_dim, bytes
        # as Qwen3-Next: layers; 32 value heads, 16 key heads, 128 each
        state=24 * (32 * 128 * 128 * 4 + (4 - 1) * (2 * 16 * 128 + 32 * 128) * 2),
        at_32768=8 * 4 * (256 + 256) * 2 * 32768
        + 24 * (32 * 128 * 128 * 4 + (4 - 1) * (2 * 16 * 128 + 32 * 128) * 2),
        max_positions=262144,
    ),
    "qwen3.5-35b-a3b": Expected(
        layers=40,
        kinds={"full": 10, "recurrent": 30},  # every fourth is full
        full_per_token=10 * 2 * (256 + 256) * 2,  # layers, KV heads, head_dim, bytes
        # as Qwen3-Next: layers; 32 value heads, 16 key heads, 128 each
        state=30 * (32 * 128 * 128 * 4 + (4 - 1) * (2 * 16 * 128 + 32 * 128) * 2),
        at_32768=10 * 2 * (256 + 256) * 2 * 32768
        + 30 * (32 * 128 * 128 * 4 + (4 - 1) * (2 * 16 * 128 + 32 * 128) * 2),
        max_positions=262144,
    ),
    "jamba-v0.1": Expected(
        layers=32,
        kinds={"full": 4, "recurrent": 28},  # layers 4, 12, 20 and 28 attend
        full_per_token=4 * 8 * (128 + 128) * 2,  # layers, KV heads, 4096 / 32 heads, bytes
        # layers; (mamba_expand * hidden) * mamba_d_state, float32; mamba_d_conv - 1 inputs, bf16.
        # mlx-lm keeps the state in the model's dtype, see OTHERWISE.
        state=28 * (2 * 4096 * 16 * 4 + (4 - 1) * 2 * 4096 * 2),
        at_32768=4 * 8 * (128 + 128) * 2 * 32768
        + 28 * (2 * 4096 * 16 * 4 + (4 - 1) * 2 * 4096 * 2),
        max_positions=262144,
    ),
    "mamba2-130m-hf": Expected(
        layers=24,
        kinds={"recurrent": 24},
        # layers; heads * head_dim * state_size, float32; conv_kernel - 1 inputs of
        # heads * head_dim + 2 * n_groups * state_size, bf16. The file has no intermediate_size (it
        # is expand * 768 = 24 * 64), without which mlx-lm does not load it.
        state=24 * (24 * 64 * 128 * 4 + (4 - 1) * (24 * 64 + 2 * 1 * 128) * 2),
        at_32768=24 * (24 * 64 * 128 * 4 + (4 - 1) * (24 * 64 + 2 * 1 * 128) * 2),
        max_positions=None,
    ),
    "mamba-codestral-7b-v0.1": Expected(
        layers=64,
        kinds={"recurrent": 64},
        # as mamba2-130m-hf: 128 heads of 64, 8 groups
        state=64 * (128 * 64 * 128 * 4 + (4 - 1) * (8192 + 2 * 8 * 128) * 2),
        at_32768=64 * (128 * 64 * 128 * 4 + (4 - 1) * (8192 + 2 * 8 * 128) * 2),
        max_positions=None,
    ),
    "granite-4.0-h-micro": Expected(
        layers=40,
        kinds={"full": 4, "recurrent": 36},  # layers 5, 15, 25 and 35 attend
        full_per_token=4 * 8 * (64 + 64) * 2,  # layers, KV heads, 2048 / 32 heads, bytes
        # layers; mamba_n_heads * mamba_d_head * mamba_d_state, float32; mamba_d_conv - 1 inputs of
        # mamba_n_heads * mamba_d_head + 2 * mamba_n_groups * mamba_d_state, bf16
        state=36 * (64 * 64 * 128 * 4 + (4 - 1) * (64 * 64 + 2 * 1 * 128) * 2),
        at_32768=4 * 8 * (64 + 64) * 2 * 32768
        + 36 * (64 * 64 * 128 * 4 + (4 - 1) * (64 * 64 + 2 * 1 * 128) * 2),
        max_positions=131072,
    ),
    "granite-4.0-h-small": Expected(
        layers=40,
        kinds={"full": 4, "recurrent": 36},
        full_per_token=4 * 8 * (128 + 128) * 2,  # layers, KV heads, 4096 / 32 heads, bytes
        # as granite-4.0-h-micro, of 128 heads
        state=36 * (128 * 64 * 128 * 4 + (4 - 1) * (128 * 64 + 2 * 1 * 128) * 2),
        at_32768=4 * 8 * (128 + 128) * 2 * 32768
        + 36 * (128 * 64 * 128 * 4 + (4 - 1) * (128 * 64 + 2 * 1 * 128) * 2),
        max_positions=131072,
    ),
    "falcon-h1-0.5b-instruct": Expected(
        layers=36,
        kinds={"full": 36},  # and Mamba2 beside the attention of every layer
        # layers, KV heads, head_dim (64, though 1024 / 8 heads would be 128), bytes
        full_per_token=36 * 2 * (64 + 64) * 2,
        # layers; mamba_n_heads * mamba_d_head * mamba_d_state, float32; mamba_d_conv - 1 inputs of
        # mamba_d_ssm + 2 * mamba_n_groups * mamba_d_state, bf16
        state=36 * (24 * 64 * 128 * 4 + (4 - 1) * (1536 + 2 * 1 * 128) * 2),
        at_32768=36 * 2 * (64 + 64) * 2 * 32768
        + 36 * (24 * 64 * 128 * 4 + (4 - 1) * (1536 + 2 * 1 * 128) * 2),
        max_positions=16384,
    ),
    "falcon-h1-7b-instruct": Expected(
        layers=44,
        kinds={"full": 44},  # and Mamba2 beside the attention of every layer
        # layers, KV heads, head_dim (128, though 3072 / 12 heads would be 256), bytes
        full_per_token=44 * 2 * (128 + 128) * 2,
        # as falcon-h1-0.5b; mamba_d_ssm is not mamba_expand * hidden (6144)
        state=44 * (24 * 128 * 256 * 4 + (4 - 1) * (3072 + 2 * 1 * 256) * 2),
        at_32768=44 * 2 * (128 + 128) * 2 * 32768
        + 44 * (24 * 128 * 256 * 4 + (4 - 1) * (3072 + 2 * 1 * 256) * 2),
        max_positions=262144,
    ),
    "nemotron-h-8b-base-8k": Expected(
        layers=52,
        kinds={"full": 4, "recurrent": 24, "none": 24},  # "*", "M" and "-" of the pattern
        full_per_token=4 * 8 * (128 + 128) * 2,  # layers, KV heads, attention_head_dim, bytes
        # layers; mamba_num_heads * mamba_head_dim * ssm_state_size, float32; conv_kernel - 1
        # inputs of mamba_num_heads * mamba_head_dim + 2 * n_groups * ssm_state_size, bf16
        state=24 * (128 * 64 * 128 * 4 + (4 - 1) * (128 * 64 + 2 * 8 * 128) * 2),
        at_32768=4 * 8 * (128 + 128) * 2 * 32768
        + 24 * (128 * 64 * 128 * 4 + (4 - 1) * (128 * 64 + 2 * 8 * 128) * 2),
        max_positions=8192,
    ),
    "nemotron-h-56b-base-8k": Expected(
        layers=118,
        kinds={"full": 10, "recurrent": 54, "none": 54},
        full_per_token=10 * 8 * (128 + 128) * 2,  # layers, KV heads, attention_head_dim, bytes
        # as nemotron-h-8b: 256 heads of 64, state of 256
        state=54 * (256 * 64 * 256 * 4 + (4 - 1) * (256 * 64 + 2 * 8 * 256) * 2),
        at_32768=10 * 8 * (128 + 128) * 2 * 32768
        + 54 * (256 * 64 * 256 * 4 + (4 - 1) * (256 * 64 + 2 * 8 * 256) * 2),
        max_positions=8192,
    ),
    "nemotron-3-nano-30b-a3b": Expected(
        layers=52,
        kinds={"full": 6, "recurrent": 23, "none": 23},  # "*", "M" and "E" (experts only)
        # layers, KV heads, head_dim (128, though 2688 / 32 heads would be 84), bytes
        full_per_token=6 * 2 * (128 + 128) * 2,
        # as nemotron-h-8b: 64 heads of 64; n_groups is 8 (n_group, of the experts, is 1), and
        # expand * hidden (5376) is not the inner size (4096)
        state=23 * (64 * 64 * 128 * 4 + (4 - 1) * (64 * 64 + 2 * 8 * 128) * 2),
        at_32768=6 * 2 * (128 + 128) * 2 * 32768
        + 23 * (64 * 64 * 128 * 4 + (4 - 1) * (64 * 64 + 2 * 8 * 128) * 2),
        max_positions=262144,
    ),
    "lfm2-1.2b": Expected(
        layers=16,
        kinds={"full": 6, "recurrent": 10},  # full_attn_idxs; the others are short convolutions
        full_per_token=6 * 8 * (64 + 64) * 2,  # layers, KV heads, 2048 / 32 heads, bytes
        state=10 * (3 - 1) * 2048 * 2,  # layers, conv_L_cache - 1 inputs, hidden, bytes
        at_32768=6 * 8 * (64 + 64) * 2 * 32768 + 10 * (3 - 1) * 2048 * 2,
        max_positions=128000,
    ),
    "gpt2": Expected(
        layers=12,
        kinds={"full": 12},
        full_per_token=12 * 12 * (64 + 64) * 2,  # layers, heads, 768 / 12 heads, bytes
        at_32768=12 * 12 * (64 + 64) * 2 * 32768,
        max_positions=1024,
    ),
    "kimi-linear-48b-a3b": Expected(
        layers=27,
        kinds={"latent": 7, "recurrent": 20},
        latent_per_token=7 * (512 + 64) * 2,
        # layers; heads * key * value, float32; 4 - 1 inputs of queries, keys and values, bf16
        state=20 * (32 * 128 * 128 * 4 + 3 * 3 * 32 * 128 * 2),
        at_32768=7 * (512 + 64) * 2 * 32768 + 20 * (32 * 128 * 128 * 4 + 3 * 3 * 32 * 128 * 2),
    ),
    "recurrentgemma-2b": Expected(
        layers=26,
        kinds={"sliding": 8, "recurrent": 18},  # the third of every three attends
        sliding_per_token=8 * 1 * (256 + 256) * 2,
        window=2048,
        state=18 * (3 * 2560 + 2560) * 2,  # conv1d_width - 1 inputs and the unit, as the model's
        at_32768=8 * 1 * (256 + 256) * 2 * 2048 + 18 * (3 * 2560 + 2560) * 2,
    ),
}


# Where mlx-lm keeps other bytes than the papers would have it
FAMILIES |= {
    "deepseek-v3.2": Expected(
        layers=61,
        kinds={"latent": 61},
        latent_per_token=61 * (512 + 64 + 128 + 128) * 2,  # the index key, twice
        at_32768=61 * (512 + 64 + 128 + 128) * 2 * 32768,
        max_positions=163840,
    ),
    "glm-5": Expected(
        layers=78,
        kinds={"latent": 78},
        latent_per_token=78 * (512 + 64 + 128 + 128) * 2,  # the index key, twice
        at_32768=78 * (512 + 64 + 128 + 128) * 2 * 32768,
        max_positions=202752,
    ),
    "jamba-v0.1": Expected(
        layers=32,
        kinds={"full": 4, "recurrent": 28},
        full_per_token=4 * 8 * (128 + 128) * 2,
        state=28 * (2 * 4096 * 16 * 2 + (4 - 1) * 2 * 4096 * 2),  # the state in bf16 too
        at_32768=4 * 8 * (128 + 128) * 2 * 32768
        + 28 * (2 * 4096 * 16 * 2 + (4 - 1) * 2 * 4096 * 2),
        max_positions=262144,
    ),
}
"""The other reading of some, as the comments in `FAMILIES` say."""
