"""What kind every layer of a model is: the one place that reads the spellings of layer types."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..errors import ConfigError
from ._config import Config

FULL, SLIDING, CHUNKED = "full", "sliding", "chunked"
RECURRENT, LATENT, NONE = "recurrent", "latent", "none"
KINDS = (FULL, SLIDING, CHUNKED, RECURRENT, LATENT, NONE)

SPELLINGS = {
    FULL: "full full_attention attention attn global global_attention dense_attention",
    SLIDING: "sliding sliding_attention sliding_window local local_attention swa",
    CHUNKED: "chunked chunked_attention",
    RECURRENT: "recurrent linear linear_attention mamba mamba1 mamba2 ssm conv conv_mixer rglru "
    "kda gdn gated_delta_net lightning_attention rwkv",
    NONE: "none mlp moe ffn dense no_op identity",
}
_KIND = {name: kind for kind, names in SPELLINGS.items() for name in names.split()}
_LETTERS = {"M": RECURRENT, "*": FULL, "-": NONE, "E": NONE, "L": SLIDING, "G": FULL}

PATTERNS = {"gemma3": 6, "gemma3_text": 6, "cohere2": 4, "gemma4": 5, "gemma4_text": 5}
PATTERNS |= {"muse_glimmer": 4, "plamo3": 8}
"""Every how many layers one is full, in families whose configs may not say it."""

ALL_RECURRENT = ("mamba", "mamba2", "falcon_mamba", "rwkv7")
ALTERNATING = ("gpt_oss",)
FULL_EVERY_4 = ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")


def kinds(config: Config, count: int) -> list[str]:
    """The kind of each of ``count`` layers; what the config does not list is full attention.

    MLA is told apart from full attention elsewhere: here it is ``"full"``.

    Raises:
        ConfigError: an unknown spelling, or a list of another length.
    """
    family = config.text("model_type", "")
    if family in ALL_RECURRENT:
        return [RECURRENT] * count
    for name, read in _SOURCES:
        if name in config:
            return read(config, name, count)
    if family in FULL_EVERY_4:
        return _every(4, count, RECURRENT)
    if family in PATTERNS:
        return _every(PATTERNS[family], count, SLIDING)
    if family in ALTERNATING:
        return _every(2, count, SLIDING)
    if "attention_chunk_size" in config:
        return _every(config.number("no_rope_layer_interval", default=4), count, CHUNKED)
    return [FULL] * count


def _every(period: int, count: int, others: str) -> list[str]:
    """The last of every ``period`` layers is full."""
    return [others if (i + 1) % period else FULL for i in range(count)]


def _listed(config: Config, name: str, count: int) -> list[str]:
    return [_of_name(config, name, value) for value in config.sequence(name, count)]


def _repeated(config: Config, name: str, count: int) -> list[str]:
    names = [_of_name(config, name, value) for value in config.sequence(name)]
    if not names:
        raise config.error(name, "a list that is not empty")
    # the windows of models with such a list are those of all their attention layers
    local = "attention_window_size" in config
    names = [SLIDING if local and kind == FULL else kind for kind in names]
    return [names[i % len(names)] for i in range(count)]


def _of_name(config: Config, name: str, value: Any) -> str:
    kind = _KIND.get(value.lower()) if isinstance(value, str) else None
    if kind is None:
        known = ", ".join(sorted(_KIND))
        raise ConfigError(f"{config.inside}{name}: unknown layer type {value!r}; known are {known}")
    return kind


def _lettered(config: Config, name: str, count: int) -> list[str]:
    """``"M-M*E"`` (or a list of letters), one a layer."""
    letters = config.values[name]
    if not isinstance(letters, str):
        letters = config.sequence(name)
    return [_of_letter(config, name, letter) for letter in _exactly(config, name, letters, count)]


def _exactly(config: Config, name: str, given: Sequence, count: int) -> Sequence:
    if len(given) != count:
        raise ConfigError(
            f"{config.inside}{name} must have one letter for each of {count} layers, not "
            f"{len(given)}"
        )
    return given


def _of_letter(config: Config, name: str, letter: Any) -> str:
    if letter not in _LETTERS:
        known = " ".join(_LETTERS)
        raise ConfigError(f"{config.inside}{name}: unknown layer {letter!r}; known are {known}")
    return _LETTERS[letter]


def _pattern(config: Config, name: str, count: int) -> list[str]:
    """Every how many layers one is full; or letters that repeat, such as ``"LLLG"``."""
    value = config.values[name]
    if isinstance(value, str) and value:
        kinds = [_of_letter(config, name, letter) for letter in value]
        return [kinds[i % len(kinds)] for i in range(count)]
    return _every(config.number(name), count, SLIDING)


def _interval(config: Config, name: str, count: int) -> list[str]:
    return _every(config.number(name), count, RECURRENT)


def _grouped(config: Config, name: str, count: int) -> list[str]:
    """As :func:`_interval`, and what is left over at the end is full."""
    size = config.number(name)
    whole = count // size * size
    return [kind if i < whole else FULL for i, kind in enumerate(_every(size, count, RECURRENT))]


def _period(config: Config, name: str, count: int) -> list[str]:
    period, offset = config.number(name), config.number("attn_layer_offset", least=0)
    return [FULL if i % period == offset else RECURRENT for i in range(count)]


def _stepped(config: Config, name: str, count: int) -> list[str]:
    step = config.number(name, least=2)
    if not config.flag("mamba_enabled", True):
        return [FULL] * count
    if count <= step // 2:
        return [RECURRENT] * (count - 1) + [FULL]
    return [FULL if i % step == step // 2 else RECURRENT for i in range(count)]


def _full_ones(config: Config, name: str, count: int) -> list[str]:
    full = _indices(config, name, config.numbers(name), count)
    return [FULL if i in full else RECURRENT for i in range(count)]


def _sliding_ones(config: Config, name: str, count: int) -> list[str]:
    sliding = _indices(config, name, config.numbers(name), count)
    return [SLIDING if i in sliding else FULL for i in range(count)]


def _indices(config: Config, name: str, given: Sequence[int], count: int) -> set[int]:
    if any(index >= count for index in given):
        raise config.error(name, f"a list of layers below {count}")
    return set(given)


def _linear_attention(config: Config, name: str, count: int) -> list[str]:
    inner = config.nested(name)
    linear = {index - 1 for index in inner.numbers("kda_layers", least=1)}
    _indices(inner, "kda_layers", sorted(linear), count)
    return [RECURRENT if i in linear else FULL for i in range(count)]


def _coded(codes: dict[int, str]) -> Callable[[Config, str, int], list[str]]:
    """A list of numbers, one a layer."""

    def read(config: Config, name: str, count: int) -> list[str]:
        numbers = config.numbers(name, count)
        unknown = sorted(set(numbers) - set(codes))
        if unknown:
            raise ConfigError(
                f"{config.inside}{name}: unknown layer type {unknown[0]}; known are "
                f"{', '.join(map(str, codes))}"
            )
        return [codes[number] for number in numbers]

    return read


def _blocks(config: Config, name: str, count: int) -> list[str]:
    """Layers that a search may have left without attention (Nemotron NAS)."""
    kinds = []
    for block in config.sequence(name, count):
        attention = Config(block, f"{config.inside}{name}: ").nested("attention")
        without = attention.flag("no_op") or attention.flag("replace_with_linear")
        kinds.append(NONE if without else FULL)
    return kinds


_SOURCES: tuple[tuple[str, Callable[[Config, str, int], list[str]]], ...] = (
    ("hybrid_override_pattern", _lettered),
    ("layers_block_type", _listed),
    ("layer_types", _listed),
    ("block_types", _repeated),
    ("_block_types", _repeated),
    ("block_configs", _blocks),
    ("hybrid_layer_pattern", _coded({0: FULL, 1: SLIDING})),
    ("attn_type_list", _coded({0: RECURRENT, 1: FULL})),
    ("linear_attn_config", _linear_attention),
    ("full_attn_idxs", _full_ones),
    ("sliding_window_layers", _sliding_ones),
    ("full_attention_interval", _interval),
    ("layer_group_size", _grouped),
    ("attn_layer_period", _period),
    ("mamba_step", _stepped),
    ("sliding_window_pattern", _pattern),
)
"""Keys that say which layer is what, by precedence."""
