"""How many numbers the recurrent state of a layer has."""

from __future__ import annotations

from collections.abc import Callable

import attrs

from ..errors import ConfigError
from ._config import Config


@attrs.frozen
class State:
    """What a layer keeps of all tokens so far, whatever their number.

    Args:
        numbers: kept in the model's dtype (the tail of a convolution).
        wide: kept in float32 (the recurrent state).
    """

    numbers: int = 0
    wide: int = 0

    def nbytes(self, size: int = 2) -> int:
        """Bytes of one row, where a number of the model takes ``size``."""
        return self.numbers * size + self.wide * 4

    def __add__(self, other: State) -> State:
        return State(self.numbers + other.numbers, self.wide + other.wide)


def state_of(config: Config) -> State:
    """The state of one recurrent layer of a config.

    Raises:
        ConfigError: none of the known kinds has left its dimensions.
    """
    family = config.text("model_type", "")
    for families, read in _FAMILIES:
        if family in families:
            return read(config)
    for names, read in _SIGNS:
        if all(name in config for name in names):
            return read(config)
    known = "; ".join(" and ".join(names) for names, _ in _SIGNS)
    raise ConfigError(
        f"{config.inside or 'the config'} has recurrent layers, but not their dimensions: {known}"
    )


def _gated_delta(config: Config) -> State:
    """Gated delta nets (Yang et al., 2024): Qwen3-Next, Qwen3.5, OLMo hybrid."""
    heads, dim = config.number("linear_num_value_heads"), config.number("linear_value_head_dim")
    key_dim = config.number("linear_key_head_dim")
    channels = 2 * config.number("linear_num_key_heads") * key_dim + heads * dim
    tail = config.number("linear_conv_kernel_dim") - 1
    return State(tail * channels, heads * dim * key_dim)


def _mamba1(config: Config) -> State:
    """Mamba (Gu and Dao, 2023); its state is in the model's dtype under mlx-lm."""
    inner = config.optional("intermediate_size", "d_inner")
    if inner is None or "mamba_expand" in config:
        expand = config.number("mamba_expand", "expand", default=2)
        inner = expand * config.number("hidden_size", "d_model")
    tail = config.number("mamba_d_conv", "conv_kernel", "d_conv") - 1
    return State(inner * (tail + config.number("mamba_d_state", "state_size", "d_state")))


def _mamba2(config: Config) -> State:
    """Mamba-2 (Dao and Gu, 2024) and the hybrids with it."""
    heads = config.number("mamba_num_heads", "mamba_n_heads", "num_heads")
    dim = config.number("mamba_head_dim", "mamba_d_head", "head_dim")
    size = config.number("ssm_state_size", "mamba_d_state", "state_size")
    inner = config.number("mamba_d_ssm", default=heads * dim)
    groups = config.number("mamba_n_groups", "n_groups")
    tail = config.number("mamba_d_conv", "conv_kernel") - 1
    return State(tail * (inner + 2 * groups * size), heads * dim * size)


def _plamo2(config: Config) -> State:
    heads, dim = config.number("mamba_num_heads"), config.number("hidden_size_per_head")
    tail = config.number("mamba_d_conv") - 1
    return State(tail * heads * dim, heads * dim * config.number("mamba_d_state"))


def _kimi_delta(config: Config) -> State:
    """Kimi delta attention (Moonshot, 2025): convolutions of queries, keys and values."""
    inner = config.nested("linear_attn_config")
    heads, dim = inner.number("num_heads"), inner.number("head_dim")
    tail = inner.number("short_conv_kernel_size") - 1
    return State(3 * tail * heads * dim, heads * dim * dim)


def _lightning(config: Config) -> State:
    """Linear attention without a convolution (Qin et al., 2024)."""
    heads = config.number("num_attention_heads")
    dim = config.number("head_dim", default=config.number("hidden_size") // heads)
    if "BailingMoeV3ForCausalLM" in config.values.get("architectures", ()):
        tail = config.number("short_conv_kernel_size", "linear_conv_kernel_dim", default=4) - 1
        return State(3 * tail * heads * dim, heads * dim * dim)
    size = heads * dim * dim
    return State(size) if config.text("model_type") == "bailing_moe_linear" else State(0, size)


def _rglru(config: Config) -> State:
    """Griffin's gated linear recurrent unit (De et al., 2024)."""
    width = config.number("lru_width", "hidden_size")
    return State(width * (config.number("conv1d_width") - 1) + width)


def _short_conv(config: Config) -> State:
    """LFM2's short convolutions."""
    return State((config.number("conv_L_cache") - 1) * config.number("conv_dim", "hidden_size"))


def _kv_conv(config: Config) -> State:
    """Convolutions over keys and over values (gear)."""
    heads = config.number("num_key_value_heads")
    dim = config.number("head_dim", default=config.number("hidden_size") // heads)
    return State(2 * (config.number("conv_L_cache", default=3) - 1) * heads * dim)


def _rwkv(config: Config) -> State:
    """RWKV-7 (Peng et al., 2025): two shifted tokens and a matrix a head."""
    hidden, dim = config.number("hidden_size"), config.number("head_dim")
    return State(2 * hidden + hidden * dim)


_FAMILIES: tuple[tuple[tuple[str, ...], Callable[[Config], State]], ...] = (
    (("mamba", "falcon_mamba", "jamba"), _mamba1),
    (("plamo2",), _plamo2),
    (("bailing_hybrid", "bailing_moe_linear"), _lightning),
    (("rwkv7",), _rwkv),
    (("gear",), _kv_conv),
)
_SIGNS: tuple[tuple[tuple[str, ...], Callable[[Config], State]], ...] = (
    (("linear_attn_config",), _kimi_delta),
    (("linear_num_value_heads",), _gated_delta),
    (("conv_L_cache",), _short_conv),
    (("conv1d_width",), _rglru),
    (("mamba_n_heads",), _mamba2),
    (("mamba_num_heads",), _mamba2),
    (("state_size", "n_groups"), _mamba2),
    (("mamba_d_state",), _mamba1),
    (("state_size",), _mamba1),
)
"""The keys that tell what kind of state it is, by precedence."""
