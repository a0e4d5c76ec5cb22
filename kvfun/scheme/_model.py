"""What the layers of a model keep of the tokens they have read, from its ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from ..errors import ConfigError, GeometryError, UnsupportedError
from ._config import Config
from ._kinds import CHUNKED, FULL, LATENT, NONE, RECURRENT, SLIDING, kinds
from ._recurrent import State, state_of


@attrs.frozen
class Stream:
    """Keys and values that get a vector each, of every KV head, with every token.

    Args:
        kv_heads: KV heads.
        head_dim: numbers of a key.
        value_dim: numbers of a value.
        window: the newest tokens that stay, if not all do.
        chunk: tokens of a chunk, whose queries see no others.
        sinks: first tokens that stay under a window.
        index: it tells which keys and values to look at, and is none itself.
    """

    kv_heads: int
    head_dim: int
    value_dim: int
    window: int | None = None
    chunk: int | None = None
    sinks: int = 0
    index: bool = False

    @property
    def numbers(self) -> int:
        """Numbers of one token.

        >>> Stream(8, 128, 128).numbers
        2048
        """
        return self.kv_heads * (self.head_dim + self.value_dim)

    @property
    def bound(self) -> int | None:
        """The most tokens that a query sees, ``None`` where that grows with the text."""
        limits = [x for x in (self.window, self.chunk) if x is not None]
        return min(limits) + self.sinks if limits else None

    def seen(self, tokens: int) -> int:
        """How many of so many tokens the next query may see."""
        return tokens if self.bound is None else min(tokens, self.bound)


@attrs.frozen
class Layer:
    """What one layer keeps.

    Args:
        kind: ``"full"``, ``"sliding"``, ``"chunked"``, ``"latent"`` (one compressed vector for all
            heads), ``"recurrent"``, or ``"none"`` (a layer without attention or state).
        heads: query heads.
        streams: what grows with every token: keys and values; behind them what indexes them.
        state: what does not grow.
        donor: the layer whose keys and values it reads instead of any of its own.
    """

    kind: str
    heads: int = 0
    streams: tuple[Stream, ...] = ()
    state: State | None = None
    donor: int | None = None

    @property
    def stored(self) -> tuple[Stream, ...]:
        """The streams it has of its own."""
        return () if self.donor is not None else self.streams

    @property
    def stream(self) -> Stream | None:
        """Its keys and values, its own or another layer's."""
        return self.streams[0] if self.streams else None


@attrs.frozen
class Model:
    """What the layers of a model keep, as mlx-lm's implementation of it does.

    Args:
        model_type: the family, as the config names it.
        layers: all of them, in order.
        max_positions: the longest text the model was made for, ``None`` where it is not said.
        dtype: of what is computed: ``"bfloat16"``, ``"float16"`` or ``"float32"``.

    >>> config = {"num_hidden_layers": 30, "hidden_size": 576, "num_attention_heads": 9,
    ...           "num_key_value_heads": 3}
    >>> model = Model.from_config(config)
    >>> len(model.layers), model.layers[0].kind, model.layers[0].streams[0].numbers
    (30, 'full', 384)
    """

    model_type: str
    layers: tuple[Layer, ...]
    max_positions: int | None = None
    dtype: str = "bfloat16"

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Model:
        """The model of a ``config.json`` of Hugging Face or mlx-lm.

        A layer that the config does not list as something else is full attention, and a window
        that it does not give to any layer counts for none (``sliding_window`` of Mistral 7B v0.1
        and of Gemma 2): so does mlx-lm.

        Args:
            config: the dictionary; a nested ``text_config`` is looked into.

        Raises:
            ConfigError: a key is missing or malformed; it is named.
            UnsupportedError: a model that keeps something else altogether.
        """
        read = Config.of_text(config)
        family = read.text("model_type", "")
        if family in UNLIKE_OTHERS:
            raise UnsupportedError(f"{family} keeps {UNLIKE_OTHERS[family]}")
        count = read.number(*_LAYERS)
        found = [_layer(read, kind, i) for i, kind in enumerate(kinds(read, count))]
        layers = _looped(read, _donated(read, found))
        return cls(family, tuple(layers), read.optional(*_POSITIONS), _dtype(read))

    @property
    def storing(self) -> tuple[int, ...]:
        """The layers that keep anything of their own: mlx-lm makes a cache for each of them."""
        return tuple([i for i, x in enumerate(self.layers) if x.stored or x.state is not None])

    def capped(self, max_size: int, sinks: int = 0) -> Model:
        """The model whose full layers keep the newest tokens only; windows and chunks stay.

        Args:
            max_size: the most tokens that are visible in a full layer.
            sinks: of those, how many are the first ones.

        Raises:
            GeometryError: no room behind the sinks.
        """
        if isinstance(max_size, bool) or not isinstance(max_size, int) or max_size <= sinks:
            raise GeometryError(
                f"max_size must be an integer above the {sinks} sinks, not {max_size!r}"
            )
        limits = {"window": max_size - sinks, "sinks": sinks}
        layers = [
            attrs.evolve(layer, streams=tuple([attrs.evolve(s, **limits) for s in layer.streams]))
            if layer.kind in (FULL, LATENT)
            else layer
            for layer in self.layers
        ]
        return attrs.evolve(self, layers=tuple(layers))

    @property
    def number_size(self) -> int:
        """Bytes of a number in the model's dtype."""
        return _SIZES[self.dtype]


_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_transformer_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_head_kv")
_KV_HEADS = (*_KV_HEADS, "num_attention_groups")
_HEAD_DIM = ("head_dim", "attention_head_dim", "kv_channels", "hidden_size_per_head")
_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
_WIDTH = ("hidden_size", "n_embd", "d_model", "hidden_dim", "model_dim", "dim")
_WINDOW = ("sliding_window", "sliding_window_size", "window_size", "attention_window_size")
_SIZES = {"bfloat16": 2, "float16": 2, "float32": 4}

UNLIKE_OTHERS = {"deepseek_v41": "compressed blocks of several sizes"}
EVERY_HEAD_ITS_OWN = ("gpt2", "gpt_neox", "gptj", "phixtral", "qwen", "talkie")
"""Families without groups of query heads."""
EXPANDED = ("deepseek_v2", "minicpm3", "youtu_llm")
"""Models with MLA of which mlx-lm keeps what the latents expand to."""
INDEXED = ("deepseek_v32", "glm_moe_dsa")
"""Models with an index of the latents (DSA), which mlx-lm keeps as keys and as values alike."""
GEMMA3 = ("gemma3", "gemma3_text")


def _layer(config: Config, kind: str, index: int) -> Layer:
    family = config.text("model_type", "")
    if kind == NONE:
        return Layer(NONE)
    if kind == RECURRENT:
        return Layer(RECURRENT, state=state_of(config))
    heads, streams = _streams(config, kind, index)
    if family == "falcon_h1":  # attention and a state side by side in every layer
        return Layer(kind, heads, streams, state_of(config))
    if family == "baichuan_m1":
        tail = config.number("conv_window") - 1
        numbers = streams[0].numbers
        return Layer(kind, heads, streams, State(tail * numbers))
    if kind == FULL and _is_latent(config):
        kind = LATENT
    return Layer(kind, heads, streams)


def _is_latent(config: Config) -> bool:
    return "kv_lora_rank" in config and config.text("model_type", "") not in EXPANDED


def _streams(config: Config, kind: str, index: int) -> tuple[int, tuple[Stream, ...]]:
    """Query heads, and what a layer of attention stores."""
    family = config.text("model_type", "")
    if "kv_lora_rank" in config:
        return _of_mla(config, family)
    heads, kv_heads = _heads(config, family, kind, index)
    head_dim, value_dim = _dims(config, family, kind)
    window = config.number(*_WINDOW) if kind == SLIDING else None
    chunk = config.number("attention_chunk_size") if kind == CHUNKED else None
    stream = Stream(kv_heads, head_dim, value_dim, window, chunk)
    if "sparse_attention_freq" in config and config.numbers("sparse_attention_freq")[index]:
        return heads, (stream, Stream(1, config.number("index_head_dim"), 0, index=True))
    return heads, (stream,)


def _of_mla(config: Config, family: str) -> tuple[int, tuple[Stream, ...]]:
    """Multi-head latent attention (DeepSeek-AI, 2024)."""
    heads, rope = config.number(*_HEADS), config.number("qk_rope_head_dim")
    if family in EXPANDED:
        key = config.number("qk_nope_head_dim") + rope
        value = config.number("v_head_dim", default=config.number(*_WIDTH) // heads)
        return heads, (Stream(heads, key, value),)
    streams = [Stream(1, config.number("kv_lora_rank"), rope)]
    if family in INDEXED:
        index = config.number("index_head_dim")
        streams.append(Stream(1, index, index, index=True))
    return heads, tuple(streams * (2 if family.startswith("longcat_flash") else 1))


def _heads(config: Config, family: str, kind: str, index: int) -> tuple[int, int]:
    """Query heads and KV heads of a layer."""
    if "num_query_heads" in config:  # OpenELM: every layer has its own
        queries, others = [config.numbers(f"num_{x}_heads", least=1) for x in ("query", "kv")]
        return queries[index], others[index]
    default = 8 if family in GEMMA3 else None
    heads = config.number(*_HEADS, default=default)
    if "num_attention_heads_per_layer" in config:
        heads = config.numbers("num_attention_heads_per_layer", least=1)[index]
    if "block_configs" in config:
        block = Config(config.values["block_configs"][index], f"block_configs[{index}].")
        return heads, heads // block.nested("attention").number("n_heads_in_group")
    if family in EVERY_HEAD_ITS_OWN:
        return heads, heads
    kv_heads = _kv_heads(config, family, heads)
    if kind == SLIDING:
        if "attention_other_setting" in config:
            other = config.nested("attention_other_setting")
            return other.number(*_HEADS), other.number("num_attention_groups")
        heads = config.number("swa_num_attention_heads", default=heads)
        kv_heads = config.number("swa_num_key_value_heads", default=kv_heads)
    elif config.flag("attention_k_eq_v"):
        kv_heads = config.number("num_global_key_value_heads", default=kv_heads)
    return heads, kv_heads


def _kv_heads(config: Config, family: str, heads: int) -> int:
    if config.flag("multi_query", family == "gpt_bigcode"):
        return 1
    if "attn_config" in config:
        return config.nested("attn_config").number("kv_n_heads", default=heads)
    if "n_shared_head" in config:
        return max(1, heads // config.number("n_shared_head"))
    return config.number(*_KV_HEADS, default=4 if family in GEMMA3 else heads)


def _dims(config: Config, family: str, kind: str) -> tuple[int, int]:
    """Numbers of a key and of a value."""
    head_dim = config.optional(*_HEAD_DIM)
    if head_dim is None and family in GEMMA3:
        head_dim = 256
    if head_dim is None:
        name = config.found(*_WIDTH) or _WIDTH[0]
        width, heads = config.number(*_WIDTH), config.number(*_HEADS)
        if width % heads:
            raise config.error(name, f"a multiple of {heads} heads, where there is no head_dim")
        head_dim = width // heads
    if kind == FULL and family.startswith("gemma4"):
        head_dim = config.number("global_head_dim", default=512)
    value_dim = head_dim
    if family.startswith("mimo_v2"):
        value_dim = config.number("v_head_dim", default=head_dim)
    if kind == SLIDING:
        head_dim = config.number("swa_head_dim", default=head_dim)
        value_dim = config.number("swa_v_head_dim", default=value_dim)
    return head_dim, value_dim


def _donated(config: Config, layers: list[Layer]) -> list[Layer]:
    """The last layers of some models read the keys and values of an earlier one of their kind."""
    shared = config.number("num_kv_shared_layers", "num_kv_reuse_layers", default=0, least=0)
    own = len(layers) - shared
    if own < 1:
        name = config.found("num_kv_shared_layers", "num_kv_reuse_layers") or ""
        raise config.error(name, f"an integer below the number of layers, {len(layers)}")
    result = layers[:own]
    for layer in layers[own:]:
        donors = [i for i in range(own) if layers[i].kind == layer.kind]
        if not donors:
            raise ConfigError(f"{config.inside}layer_types: no layer before {own} is {layer.kind}")
        result.append(attrs.evolve(layer, donor=donors[-1]))
    return result


def _looped(config: Config, layers: list[Layer]) -> list[Layer]:
    """Models that run their layers several times keep something of every time."""
    loops = config.number("num_loops", "loop_num", default=1)
    if "loop_window_size" not in config:
        return layers * loops
    window = config.number("loop_window_size")
    near = [
        attrs.evolve(
            x, kind=SLIDING, streams=tuple([attrs.evolve(s, window=window) for s in x.streams])
        )
        for x in layers
    ]
    return layers + near * (loops - 1)


def _dtype(config: Config) -> str:
    name = config.text("dtype", config.text("torch_dtype", "bfloat16"))
    if name not in _SIZES:
        raise config.error(config.found("dtype", "torch_dtype") or "dtype", f"one of {[*_SIZES]}")
    return name
