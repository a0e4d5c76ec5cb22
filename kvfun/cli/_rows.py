"""The rows of a comparison: who makes the cache, and who computes attention over it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from kvfun.cli import _specs
from kvfun.errors import SpecError, UnsupportedError

KVFUN = "kvfun"
MLX_LM = "mlx-lm"
BASELINES = ("mlx-lm", "mlx-lm-kv8", "mlx-lm-kv4")
_MLX_LM_SPEC = re.compile(r"mlx-lm(?:-kv(?P<bits>[234568])(?:-g(?P<group>32|64|128))?)?")
_DEFAULT_GROUP = 64


@dataclass(frozen=True)
class Layer:
    """What one attention layer stores.

    Attributes:
        kv_heads: Heads of keys and values.
        key_dim: Numbers of a key.
        value_dim: Numbers of a value.
        full: Whether it is one of the full attention layers, the only ones that mlx-lm quantizes.
    """

    kv_heads: int
    key_dim: int
    value_dim: int
    full: bool = True

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
        attention: Makes the context in which the model must run: one in which kvfun computes
            its attention, for kvfun's caches and where `is_routed`.
        token_nbytes: The exact bytes that a token takes in a layer, metadata included, for
            activations of a dtype. Of an encoded token, where some stay raw: at long context
            that is the price of all.
        raw: The most tokens that stay raw.
    """

    spec: str
    label: str
    library: str
    make_cache: Callable[[Any], list[Any]]
    attention: Callable[[Any], AbstractContextManager[Any]]
    token_nbytes: Callable[[Layer, mx.Dtype], float]
    raw: int = 0


def row(spec: str, *, window: int | None = None, sinks: int = 0) -> Row:
    """The row that a spec names: ``kv4:residual=64`` and the like, or ``mlx-lm``, ``mlx-lm-kv4``.

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
        raise SpecError(
            f"{spec!r} names no cache of mlx-lm; use {', '.join(BASELINES)} or -gGROUP, without "
            "options"
        )
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
        lambda layer, dtype: (
            layer.elements * (bits / 8 + 2 * dtype.size / group if layer.full else dtype.size)
        ),
    )


def kvfun_row(spec: str, *, window: int | None = None, sinks: int = 0) -> Row:
    """A row of kvfun's caches: any codec spec, and options of the cache after colons.

    Raises:
        SpecError: the string names no codec, or an option is none.
    """
    cache = _specs.parse(spec)

    def token_nbytes(layer: Layer, dtype: mx.Dtype) -> float:
        return cache.codec.token_nbytes(layer.kv_heads, layer.key_dim, layer.value_dim, dtype)

    def make_cache(model: Any) -> list[Any]:
        from kvfun.interop.mlx_lm import make_prompt_cache

        visible = None if window is None else window + sinks
        return make_prompt_cache(model, cache.codec, visible, sinks=sinks, **cache.options)

    return Row(
        cache.spec,
        f"kvfun {cache.label}",
        KVFUN,
        make_cache,
        _attention,
        token_nbytes,
        cache.raw,
    )


def is_routed(model: Any) -> bool:
    """Whether kvfun can compute the model's attention.

    It cannot where no part of the model calls mlx-lm's attention function; such a model reads
    what kvfun's caches hand out.
    """
    from kvfun.interop.mlx_lm import can_be_routed

    return can_be_routed(model)


def _attention(model: Any) -> AbstractContextManager[Any]:
    from kvfun.interop.mlx_lm import attention_where_possible

    return attention_where_possible(model)


def _own_attention(model: Any) -> AbstractContextManager[Any]:
    return nullcontext()


def _own_cache(model: Any) -> list[Any]:
    from mlx_lm.models.cache import make_prompt_cache

    return make_prompt_cache(model)


def _quantized_cache(model: Any, bits: int, group: int) -> list[Any]:
    """mlx-lm's caches, those of full attention layers quantized from the first token on.

    Raises:
        UnsupportedError: the model cannot run on them; found by building a step lazily.
    """
    from mlx_lm.models.cache import KVCache, QuantizedKVCache

    def fresh() -> list[Any]:
        return [
            QuantizedKVCache(group_size=group, bits=bits) if type(cache) is KVCache else cache
            for cache in _own_cache(model)
        ]

    try:
        model(mx.zeros((1, 2), mx.int32), cache=fresh())
    except Exception as error:  # whatever stops the model is the answer
        name = type(model).__module__.rpartition(".")[2]
        raise UnsupportedError(
            f"{name} cannot run on mlx-lm's own {bits}-bit caches: {error}"
        ) from error
    return fresh()


def layers(model: Any) -> list[Layer]:
    """The attention layers of a model, learnt from what one token stores in them."""
    from mlx_lm.models.cache import KVCache

    caches = _own_cache(model)
    mx.eval(model(mx.array([[0]]), cache=caches))
    full = {id(cache) for cache in caches if type(cache) is KVCache}
    return [
        Layer(part.keys.shape[1], part.keys.shape[-1], part.values.shape[-1], id(part) in full)
        for part in _parts(caches)
        if getattr(part, "keys", None) is not None
    ]


def _parts(caches: Iterable[Any]) -> Iterator[Any]:
    """The caches, those of layers that have several one by one."""
    for cache in caches:
        if hasattr(cache, "caches"):
            yield from _parts(cache.caches)
        else:
            yield cache
