"""Route a model's attention through :func:`kvfun.attend`."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ... import caches as verbs
from ...errors import UnsupportedError
from ._handed import recall

NAME = "scaled_dot_product_attention"

_lock = threading.Lock()
_routed: dict[ModuleType, tuple[Any, int]] = {}
"""Modules that are routed now: the function they had, and how many contexts ask for it."""


@contextmanager
def attention(
    model: nn.Module, kernels: Mapping[str, Callable[..., Any]] | None = None
) -> Iterator[None]:
    """Within the context the model's attention reads kvfun caches encoded, in any codec.

    So do layers that are passed keys and values which a cache handed out to another layer, with its
    cache or with none: they read the same value of that cache, whatever has happened to it since.

    Outside it mlx-lm's own attention runs on what the caches hand out: packed numbers where they
    are affine, decoded ones otherwise. Attention over other caches, over keys that a model has
    changed after fetching them, and of other numbers of queries runs as before.

    Args:
        model: an mlx-lm model.
        kernels: a kernel set for all reads within the context (a scheme's ``kernel_set``); by
            default one for each cache, see :func:`kvfun.kernels.kernels_for`.

    Raises:
        UnsupportedError: no part of the model calls mlx-lm's attention function.
    """
    global _kernels
    modules = _modules(model)
    if not modules:
        raise UnsupportedError(f"{type(model).__module__} does not use mlx_lm's {NAME}")
    for module in modules:
        _route(module)
    before, _kernels = _kernels, kernels
    try:
        yield
    finally:
        _kernels = before
        for module in modules:
            _restore(module)


_kernels: Mapping[str, Callable[..., Any]] | None = None
"""What the innermost context reads with."""


def can_be_routed(model: nn.Module) -> bool:
    """Whether :func:`attention` can compute the model's attention.

    It cannot where no part of the model calls mlx-lm's attention function; such a model reads what
    kvfun's caches hand out.
    """
    return bool(_modules(model))


def attention_where_possible(model: nn.Module) -> AbstractContextManager[None]:
    """:func:`attention`; nothing for a model whose attention cannot be routed."""
    return attention(model) if can_be_routed(model) else nullcontext()


def is_routed() -> bool:
    """Whether some model's attention is routed now."""
    return bool(_routed)


_watched: list[tuple[Any, mx.array]] | None = None


@contextmanager
def watched_queries() -> Iterator[list[tuple[Any, mx.array]]]:
    """Within the context, and that of :func:`attention`: which cache values were read by what.

    Gives a list that grows: pairs of a record and the queries, after RoPE.
    """
    global _watched
    before, _watched = _watched, []
    try:
        yield _watched
    finally:
        _watched = before


def _modules(model: nn.Module) -> list[ModuleType]:
    names = {cls.__module__ for part in model.modules() for cls in type(part).__mro__}
    found = [sys.modules[name] for name in sorted(names) if name in sys.modules]
    return [module for module in found if hasattr(module, NAME)]


def _route(module: ModuleType) -> None:
    with _lock:
        original, users = _routed.get(module, (getattr(module, NAME), 0))
        _routed[module] = (original, users + 1)
        if users == 0:
            setattr(module, NAME, _router(original))


def _restore(module: ModuleType) -> None:
    with _lock:
        original, users = _routed.pop(module)
        if users > 1:
            _routed[module] = (original, users - 1)
        else:
            setattr(module, NAME, original)


def _router(original):
    def scaled_dot_product_attention(
        queries, keys, values, cache, scale, mask=None, sinks=None, **more
    ):
        handed, length = recall(keys, values), queries.shape[2]
        if handed is None or length != handed.queries or more:
            return original(
                queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks, **more
            )
        if _watched is not None:
            _watched.append((handed.record, queries))
        return verbs.attend_columns(
            handed.record,
            queries,
            handed.columns,
            mask,
            scale=scale,
            phase="decode" if length == 1 else "window",
            kernels=_kernels,
            sinks=sinks,
        )

    return scaled_dot_product_attention
