"""What a model's weights take, before any of them is loaded."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm import utils as mlx_lm_utils

from ...errors import ConfigError, UnsupportedError
from ...scheme import Model, Weights

_PICKED = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "top_k_experts")
_PICKED = (*_PICKED, "moe_k", "num_selected_experts")


def built(config: Mapping[str, Any]) -> Any:
    """The model of a config with random weights, none of which is computed yet.

    Raises:
        UnsupportedError: mlx-lm has no such model, or cannot build it.
    """
    config = dict(config)
    try:
        model_class, args_class = mlx_lm_utils._get_classes(config)
        return model_class(args_class.from_dict(config))
    except Exception as error:  # whatever stops mlx-lm is the answer
        name = config.get("model_type")
        raise UnsupportedError(f"mlx-lm cannot build {name!r}: {error}") from error


def weights_of(config: Mapping[str, Any], total: int | None = None) -> Weights:
    """The bytes of a model's weights, and of those that a token is not routed to.

    Args:
        config: a ``config.json``; its ``quantization`` counts, as mlx-lm writes it.
        total: the bytes of all, where they are known: files of the model.

    Raises:
        ConfigError, UnsupportedError: a config that mlx-lm builds no model of.
    """
    picked = _picked(config)
    all_bytes = skipped = 0.0
    for path, array in _parameters(config):
        nbytes = array.size * _bytes_each(config, array)
        all_bytes += nbytes
        experts = array.shape[0] if array.ndim == 3 else 0
        if picked and experts > picked and ("switch" in path or "experts" in path):
            skipped += nbytes * (1 - picked / experts)
    if total is None:
        return Weights(math.ceil(all_bytes), int(skipped))
    return Weights(total, int(total * skipped / all_bytes) if all_bytes else 0)


def _parameters(config: Mapping[str, Any]) -> Iterator[tuple[str, mx.array]]:
    found: Any = tree_flatten(built(config).parameters())
    yield from found


def _picked(config: Mapping[str, Any]) -> int:
    """Experts that a token is routed to; 0 in a model without."""
    for values in (config.get("text_config") or {}, config):
        for name in _PICKED:
            if isinstance(values.get(name), int):
                return values[name]
    return 0


def _bytes_each(config: Mapping[str, Any], array: mx.array) -> float:
    """Bytes of one number of a parameter: matrices may be quantized."""
    said = config.get("quantization")
    if said is None or array.ndim < 2:
        return Model.from_config(config).number_size
    bits, group = said.get("bits"), said.get("group_size")
    if not all(isinstance(x, int) and x > 0 for x in (bits, group)):
        raise ConfigError(f"quantization must have bits and a group_size, not {said!r:.80}")
    if array.shape[-1] % group:
        return Model.from_config(config).number_size
    scales = 1 / group if said.get("mode", "affine") != "affine" else 4 / group
    return bits / 8 + scales
