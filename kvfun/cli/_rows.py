"""The rows of a comparison: who makes the cache, and who computes attention over it."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from kvfun.errors import SpecError, UnsupportedError

KVFUN = "kvfun"
MLX_LM = "mlx-lm"
BASELINES = ("mlx-lm", "mlx-lm-kv8", "mlx-lm-kv4")
_MLX_LM_SPEC = re.compile(r"mlx-lm(?:-kv(?P<bits>[234568])(?:-g(?P<group>32|64|128))?)?")
_DEFAULT_GROUP = 64


@dataclass(frozen=True)
class Layer:
    """The shape of what one attention layer stores."""

    kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def elements(self) -> int:
        """Numbers stored for one token."""
        return self.kv_heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True)
class Row:
    """One way to store keys and values.

    Attributes:
        spec: How the row is asked for.
        label: How the row is shown.
        library: Whose cache it is.
        make_cache: Makes the fresh layer caches of a model.
        attention: Makes the context in which the model must run.
        token_nbytes: The exact bytes that a token takes in a layer, metadata included, for
            activations of a dtype.
    """

    spec: str
    label: str
    library: str
    make_cache: Callable[[Any], list[Any]]
    attention: Callable[[Any], AbstractContextManager[Any]]
    token_nbytes: Callable[[Layer, mx.Dtype], float]


def row(spec: str, *, window: int | None = None, sinks: int = 0) -> Row:
    """The row that a spec names: ``kv4`` and the like, or ``mlx-lm``, ``mlx-lm-kv4-g32``, ...

    Args:
        spec: The name.
        window: How many tokens stay visible, None for all; kvfun's caches only.
        sinks: How many of the first tokens stay visible beside the window.

    Raises:
        SpecError: there is no such row.
        UnsupportedError: a window over mlx-lm's caches.
    """
    if not spec.startswith(MLX_LM):
        return kvfun_row(spec, window=window, sinks=sinks)
    if window is not None:
        raise UnsupportedError(
            f"{spec!r} takes no window here; use a cache of kvfun, as in --kv bf16"
        )
    return mlx_lm_row(spec)


def mlx_lm_row(spec: str) -> Row:
    """A row of mlx-lm's own caches: ``mlx-lm`` or ``mlx-lm-kvBITS[-gGROUP]``.

    Raises:
        SpecError: mlx-lm has no such cache.
    """
    match = _MLX_LM_SPEC.fullmatch(spec)
    if match is None:
        raise SpecError(f"{spec!r} names no cache of mlx-lm; use {', '.join(BASELINES)} or -gGROUP")
    if match["bits"] is None:
        return Row(
            spec,
            "mlx-lm KVCache",
            MLX_LM,
            _own_cache,
            _own_attention,
            lambda layer, dtype: layer.elements * dtype.size,
        )
    bits, group = int(match["bits"]), int(match["group"] or _DEFAULT_GROUP)
    label = f"mlx-lm kv{bits}" + (f" g{group}" if match["group"] else "")
    return Row(
        spec,
        label,
        MLX_LM,
        lambda model: _quantized_cache(model, bits, group),
        _own_attention,
        lambda layer, dtype: layer.elements * (bits / 8 + 2 * dtype.size / group),
    )


def kvfun_row(spec: str, *, window: int | None = None, sinks: int = 0) -> Row:
    """A row of kvfun's caches, for any codec spec.

    Raises:
        SpecError: the string names no codec.
    """
    from kvfun.codecs import parse

    codec = parse(spec)

    def token_nbytes(layer: Layer, dtype: mx.Dtype) -> float:
        return codec.token_nbytes(layer.kv_heads, layer.key_dim, layer.value_dim, dtype)

    def make_cache(model: Any) -> list[Any]:
        from kvfun.interop.mlx_lm import make_prompt_cache

        return make_prompt_cache(model, codec.spec)

    def attention(model: Any) -> AbstractContextManager[Any]:
        from kvfun.interop.mlx_lm import attention

        return attention(model)

    return Row(codec.spec, f"kvfun {codec.spec}", KVFUN, make_cache, attention, token_nbytes)


def _own_attention(model: Any) -> AbstractContextManager[Any]:
    return nullcontext()


def _own_cache(model: Any) -> list[Any]:
    from mlx_lm.models.cache import make_prompt_cache

    return make_prompt_cache(model)


def _quantized_cache(model: Any, bits: int, group: int) -> list[Any]:
    """mlx-lm's caches, those of full attention layers quantized from the first token on."""
    from mlx_lm.models.cache import KVCache, QuantizedKVCache

    return [
        QuantizedKVCache(group_size=group, bits=bits) if type(cache) is KVCache else cache
        for cache in _own_cache(model)
    ]


def layers(model: Any) -> list[Layer]:
    """The attention layers of a model, learnt from what one token stores in them."""
    caches = _own_cache(model)
    mx.eval(model(mx.array([[0]]), cache=caches))
    stored = [(c.keys, c.values) for c in caches if getattr(c, "keys", None) is not None]
    return [Layer(k.shape[1], k.shape[-1], v.shape[-1]) for k, v in stored]
