"""Loading the model that a command runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from kvfun.cli import _smollm2
from kvfun.cli._packages import Report, silent
from kvfun.errors import StorageError


@dataclass(frozen=True)
class Loaded:
    """A model with its tokenizer."""

    name: str
    model: Any
    tokenizer: Any
    dtype: mx.Dtype


def on_cpu() -> bool:
    """Whether MLX computes on the CPU."""
    return mx.default_device() == mx.Device(mx.cpu)


def load(name: str | None, report: Report = silent) -> Loaded:
    """The model of a directory or hub id, or SmolLM2-135M-Instruct.

    On the CPU the weights become float32: MLX multiplies 16-bit matrices there about ten times
    more slowly.

    Raises:
        StorageError: there is no such model, or it cannot be read.
        CorruptError: the default model's files are damaged.
    """
    path = str(_smollm2.ensure_model(report)) if name is None else name
    report("Loading the model", None)
    import mlx_lm

    try:
        loaded: Any = mlx_lm.load(path)
    except (OSError, ValueError, RuntimeError) as error:
        raise StorageError(f"mlx-lm cannot load the model {path!r}: {error}") from error
    model, tokenizer = loaded[0], loaded[1]
    if on_cpu():
        model.set_dtype(mx.float32)
    mx.eval(model.parameters())
    return Loaded(name or _smollm2.MODEL_NAME, model, tokenizer, activation_dtype(model))


def activation_dtype(model: Any) -> mx.Dtype:
    """The dtype in which the model computes: that of its logits."""
    return model(mx.array([[0]])).dtype
