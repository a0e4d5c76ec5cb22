"""What kvfun's shells are held to: caches that keep everything, and masks made from positions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache as memoize
from typing import Any

import mlx.core as mx
import mlx_lm.models.cache as mlx_lm_cache

from kvfun.codecs import Codec
from tests.interop import architectures as archs

OLD_PROTOCOL = hasattr(mlx_lm_cache._BaseCache, "meta_state")
PROMPT = archs.prompt(41)


def visible(
    queries: range, columns: int, window: int | None, sinks: int, chunk: int | None
) -> list[list[bool]]:
    """Who sees whom among positions, as lists: written out, one pair at a time."""

    def sees(q: int, p: int) -> bool:
        near = window is None or p > q - window
        same = chunk is None or p // chunk == q // chunk
        return p <= q and (p < sinks or (near and same))

    return [[sees(q, p) for p in range(columns)] for q in queries]


class Keeper:
    """Keeps every row, as the codec gives it back, and hides rows by a mask only."""

    def __init__(
        self,
        spec: str = "plain",
        window: int | None = None,
        sinks: int = 0,
        chunk: int | None = None,
    ):
        self.codec = Codec.of(spec)
        self.policy = window, sinks, chunk
        self.keys = self.values = None
        self.offset = 0

    def update_and_fetch(self, keys: mx.array, values: mx.array):
        new = [_rounded(self.codec.keys, keys), _rounded(self.codec.values, values)]
        if self.keys is not None:
            held = (self.keys, self.values)
            new = [mx.concatenate(pair, axis=2) for pair in zip(held, new, strict=True)]
        self.keys, self.values = new
        self.offset += keys.shape[2]
        return self.keys, self.values

    def keys_and_values(self):
        return self.keys, self.values

    @property
    def state(self):
        return self.keys, self.values

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None):
        queries = range(self.offset, self.offset + N)
        seen = visible(queries, self.offset + N, *self.policy)
        if window_size is not None:  # the model's own: it hides sinks too
            narrow = visible(queries, self.offset + N, window_size, 0, None)
            pairs = zip(seen, narrow, strict=True)
            seen = [[a and b for a, b in zip(x, y, strict=True)] for x, y in pairs]
        if N == 1:  # deepseek_v32 takes a mask of rank 4 there, or None
            return None if all(seen[0]) else mx.array(seen)[None, None]
        return mx.array(seen)


def _rounded(codec: Any, x: mx.array) -> mx.array:
    if x.shape[-1] == 0:
        return x
    return codec.decode(codec.encode(x))[..., : x.shape[-1]].astype(x.dtype)


def leaves(caches: Any) -> Iterator[Any]:
    """The caches, lists opened."""
    for cache in caches:
        if isinstance(cache, mlx_lm_cache.CacheList):
            yield from leaves(cache.caches)
        else:
            yield cache


def exchanged(caches: Any, make: Callable[[Any, int], Any]) -> list[Any]:
    """The caches, each with keys and values replaced by ``make(cache, its place in its list)``."""
    out = []
    for cache in caches:
        if isinstance(cache, mlx_lm_cache.CacheList):
            parts = [
                part if isinstance(part, mlx_lm_cache.ArraysCache) else make(part, place)
                for place, part in enumerate(cache.caches)
            ]
            out.append(mlx_lm_cache.CacheList(*parts))
        else:
            out.append(cache if isinstance(cache, mlx_lm_cache.ArraysCache) else make(cache, 0))
    return out


def keepers(
    model: Any,
    spec: str = "plain",
    max_size: int | None = None,
    sinks: int = 4,
    others: str | None = None,
) -> list[Any]:
    """A :class:`Keeper` for each of mlx-lm's caches, under its policy or the narrower ``max_size``.

    ``others`` is the spec of the second and later caches of one layer.
    """

    def make(cache: Any, place: int) -> Keeper:
        codec = spec if place == 0 or others is None else others
        kind = type(cache).__name__
        if kind == "ChunkedKVCache":
            return _Chunked(codec, chunk=cache.chunk_size)
        if kind == "RotatingKVCache":
            window = cache.max_size if max_size is None else min(max_size, cache.max_size)
            return Keeper(codec, window - cache.keep, cache.keep)
        assert kind == "KVCache"
        return Keeper(codec) if max_size is None else Keeper(codec, max_size - sinks, sinks)

    return exchanged(mlx_lm_cache.make_prompt_cache(model), make)


class _Chunked(Keeper):
    start_position = 0

    def maybe_trim_front(self) -> None:
        pass


# -- models and what mlx-lm says of them, made once ---------------------------------------------


@memoize
def model(name: str, seed: int = 0) -> Any:
    return archs.build(name, seed)


@memoize
def said(name: str, count: int = 24, length: int = 41, seed: int = 0) -> tuple[int, ...]:
    """The tokens of mlx-lm's own caches."""
    return tuple(archs.greedy(model(name, seed), archs.prompt(length), count))


def logits(model: Any, cache: list[Any], tokens: list[int], *steps: int) -> mx.array:
    """The logits of tokens in calls of so many; the last number is repeated."""
    parts, start, steps = [], 0, list(steps)
    while start < len(tokens):
        step = steps.pop(0) if len(steps) > 1 else steps[0]
        parts.append(model(mx.array([tokens[start : start + step]]), cache=cache)[0])
        mx.eval(parts[-1])
        start += step
    return mx.concatenate(parts, axis=0)


def spread(x: mx.array, y: mx.array) -> float:
    """The largest difference, in standard deviations of ``x``."""
    return (mx.max(mx.abs(x - y)) / mx.std(x)).item()
