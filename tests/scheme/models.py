"""Models by hand, and random ones."""

from __future__ import annotations

import json
from pathlib import Path

import attrs
from hypothesis import strategies as st

from kvfun.scheme import Layer, Model, State, Stream

CONFIGS = Path(__file__).parent / "configs"


def names() -> list[str]:
    """The published configs."""
    return sorted(file.stem for file in CONFIGS.glob("*.json"))


def config_of(name: str) -> dict:
    """A published config."""
    return json.loads((CONFIGS / f"{name}.json").read_text())


LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}
SMOLLM2 = {
    "model_type": "llama",
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
}


@st.composite
def streams(draw, kind: str) -> Stream:
    dim = draw(st.sampled_from((32, 64, 128)))
    value = dim if draw(st.booleans()) else 64
    heads = draw(st.integers(1, 3))
    if kind == "sliding":
        window, sinks = draw(st.integers(1, 40)), draw(st.sampled_from((0, 0, 3)))
        return Stream(heads, dim, value, window=window, sinks=sinks)
    if kind == "chunked":
        return Stream(heads, dim, value, chunk=draw(st.integers(1, 40)))
    if kind == "latent":
        return Stream(1, dim, 32)
    return Stream(heads, dim, value)


@st.composite
def models(draw, kinds=("full", "full", "sliding", "chunked", "latent", "recurrent", "none")):
    """Up to three layers of any kind, some of which read another's keys and values."""
    layers = []
    for index in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(kinds))
        if kind == "recurrent":
            numbers = st.integers(0, 100)
            layers.append(Layer(kind, state=State(draw(numbers), draw(numbers))))
        elif kind == "none":
            layers.append(Layer(kind))
        else:
            stream = draw(streams(kind))
            found = (stream, Stream(1, 32, 0, index=True)) if draw(st.booleans()) else (stream,)
            donors = [i for i in range(index) if layers[i].kind == kind]
            donor = donors[0] if donors and draw(st.booleans()) else None
            own = layers[donor].streams if donor is not None else found
            layers.append(Layer(kind, stream.kv_heads * 2, own, donor=donor))
    return attrs.evolve(Model("random", tuple(layers)), dtype=draw(st.sampled_from(DTYPES)))


DTYPES = ("bfloat16", "float16", "float32")
