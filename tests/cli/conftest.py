"""A tiny random llama, saved as a real mlx-lm model directory."""

import importlib
import json
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "vocab_size": 288,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
}
TEMPLATE = (
    "{% for m in messages %}<|user|>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: minutes of work")


def byte_tokenizer():
    """One token for every byte, and a few special ones."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<|unk|>", "<|end|>", "<|user|>", "<|assistant|>"]
    vocabulary = {token: i for i, token in enumerate([*special, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    return tokenizer


def save_model(directory: Path, kind: str = "llama", **more) -> None:
    module = importlib.import_module(f"mlx_lm.models.{kind}")
    config = CONFIG | {"model_type": kind} | more

    mx.random.seed(0)
    model = module.Model(module.ModelArgs.from_dict(config))
    # Embeddings of a size that gives logits some contrast, and attention its say in them.
    model.model.embed_tokens.weight = 0.05 * mx.random.normal((CONFIG["vocab_size"], 128))
    weights = {k: v.astype(mx.float16) for k, v in dict(tree_flatten(model.parameters())).items()}
    directory.mkdir()
    mx.save_safetensors(str(directory / "model.safetensors"), weights, {"format": "mlx"})
    (directory / "config.json").write_text(json.dumps(config))
    byte_tokenizer().save(str(directory / "tokenizer.json"))
    tokenizer = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|end|>",
        "unk_token": "<|unk|>",
        "chat_template": TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer))


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The cache folder of the test, not made yet."""
    monkeypatch.setenv("KVFUN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder that is all that pip can see."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models") / "tiny"
    save_model(directory)
    return directory


@pytest.fixture(scope="session")
def own_attention_directory(tmp_path_factory):
    """A tiny gemma2: it computes attention itself, which reads arrays only."""
    directory = tmp_path_factory.mktemp("models") / "tiny-gemma2"
    save_model(directory, "gemma2", query_pre_attn_scalar=64, head_dim=64)
    return directory


@pytest.fixture(scope="session")
def text_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("texts") / "lines.txt"
    path.write_text("".join(f"Line {i}: the quick brown fox, {i * i}.\n" for i in range(200)))
    return path


@pytest.fixture(scope="session")
def tiny(model_directory):
    from kvfun.cli import _model

    return _model.load(str(model_directory))
