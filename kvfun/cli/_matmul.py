"""A model's long matrix products by NumPy, for machines where MLX's own are slow.

The CPU wheel of MLX on Linux brings the reference BLAS; NumPy's wheel brings OpenBLAS, which is
ten times faster. Only products of many tokens are computed there: they are all of a prompt's
time. Decoding one token reads every weight once in any case, and stays with MLX.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from kvfun.cli import _threads

_FEWEST_TOKENS = 8


def _product(x: mx.array, weight: mx.array) -> mx.array:
    """``x @ weight.T`` in float32, by NumPy."""
    flat = np.asarray(x.reshape(-1, x.shape[-1]))
    return mx.array(flat @ np.asarray(weight).T).reshape(*x.shape[:-1], weight.shape[0])


def _suits(x: mx.array, weight: mx.array) -> bool:
    tokens = x.size // x.shape[-1]
    return tokens >= _FEWEST_TOKENS and x.dtype == weight.dtype == mx.float32


class _NumPyLinear(nn.Linear):
    def __call__(self, x: mx.array) -> mx.array:
        if not _suits(x, self.weight):
            return super().__call__(x)
        product = _product(x, self.weight)
        return product + self.bias if "bias" in self else product


class _NumPyEmbedding(nn.Embedding):
    def as_linear(self, x: mx.array) -> mx.array:
        return _product(x, self.weight) if _suits(x, self.weight) else super().as_linear(x)


_BY_NUMPY: dict[type, type] = {nn.Linear: _NumPyLinear, nn.Embedding: _NumPyEmbedding}


@contextmanager
def by_numpy(model: Any) -> Iterator[None]:
    """Within it, NumPy computes the products of the model's dense float32 layers."""
    changed = [module for module in model.modules() if type(module) in _BY_NUMPY]
    for module in changed:
        module.__class__ = _BY_NUMPY[type(module)]
    try:
        with _threads.as_many_as_pay_off():
            yield
    finally:
        for module in changed:
            module.__class__ = type(module).__base__
