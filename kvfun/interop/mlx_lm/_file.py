"""Prompt-cache files of either of mlx-lm's layouts."""

from __future__ import annotations

from os import PathLike, fspath
from typing import Any

import mlx.core as mx
import mlx_lm.models.cache as mlx_lm_cache
from mlx.utils import tree_flatten, tree_unflatten

from ...errors import CorruptError, UnsupportedError
from ._make import PromptCache
from ._shell import OLD_PROTOCOL, KVFunCache, restored
from ._states import KVFunCacheList, KVFunStates, restored_states


def load(path: str | PathLike[str]) -> tuple[PromptCache, dict[str, str]]:
    """The caches and the metadata of a file that mlx-lm's ``save_prompt_cache`` wrote.

    mlx-lm itself reads files of its own generation only (up to 0.32.0, or from 0.32.1 on); this
    reads both, whichever is installed.

    Raises:
        CorruptError: not a prompt-cache file, or the caches in it are damaged.
        UnsupportedError: mlx-lm's own caches, other than recurrent state, from the other
            generation.
    """
    read: Any = mx.load(fspath(path), return_metadata=True)
    arrays, said = read
    newer = said.get("2.0") == ""  # what the list of scalars starts with; before, a class name
    try:
        if newer != OLD_PROTOCOL:
            return _own(fspath(path))
        cache, metadata = (_newer if newer else _older)(arrays, said)
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise CorruptError(f"{fspath(path)} is no prompt cache: {error}") from error
    return PromptCache(cache), dict(metadata or {})


def _own(path: str) -> tuple[PromptCache, dict[str, str]]:
    cache, metadata = mlx_lm_cache.load_prompt_cache(path, return_metadata=True)
    return PromptCache(cache), dict(metadata or {})


def _older(arrays: dict[str, mx.array], said: dict[str, str]) -> tuple[list[Any], Any]:
    """``[descriptions, metadata, classes]``, the caches' states beside them."""
    descriptions, metadata, classes = tree_unflatten(list(said.items()))
    states: list[Any] = list(tree_unflatten(list(arrays.items())))
    states += [{}] * (len(classes) - len(states))
    parts = zip(classes, states, descriptions, strict=True)
    return [_from_older(*part) for part in parts], metadata


def _from_older(kind: str, state: Any, description: Any) -> Any:
    if kind in _OWN:
        planes: Any = [plane for _, plane in tree_flatten(state)]
        return _OWN[kind](description, planes)
    if kind in _LISTS:
        parts = zip(description[0], state, description[1], strict=True)
        return _LISTS[kind](*[_from_older(*part) for part in parts])
    return _recurrent(kind, state)


def _newer(arrays: dict[str, mx.array], said: dict[str, str]) -> tuple[list[Any], Any]:
    """``[metadata, classes, scalars]``; a scalar is an array that is marked as one."""
    metadata, classes, scalars = tree_unflatten(list(said.items()))
    read = {
        "string": lambda array: "".join(map(chr, array.tolist())),
        "scalar": lambda array: array.item(),
        "none": lambda array: None,
    }
    values = {**arrays, **{place: read[kind](arrays[place]) for place, kind in scalars[1:]}}
    states = tree_unflatten(list(values.items()))
    return [_from_newer(*part) for part in zip(classes, states, strict=True)], metadata


def _from_newer(kind: str, state: Any) -> Any:
    if kind in _OWN:
        return _OWN[kind](state[:2], state[2:])
    if kind in _LISTS:
        return _LISTS[kind](*[_from_newer(name, part) for part, name in state])
    return _recurrent(kind, state[0])


def _shell(strings: Any, planes: list[mx.array]) -> KVFunCache:
    return KVFunCache(*restored(strings, planes))


def _states(strings: Any, arrays: list[mx.array]) -> KVFunStates:
    return KVFunStates(*restored_states(strings, [x for x in arrays if x.size]))


_OWN = {KVFunCache.__name__: _shell, KVFunStates.__name__: _states}
_LISTS: dict[str, Any] = {
    "CacheList": mlx_lm_cache.CacheList,
    KVFunCacheList.__name__: KVFunCacheList,
}


def _recurrent(kind: str, arrays: Any) -> Any:
    if kind != "ArraysCache":
        raise UnsupportedError(f"a {kind} that another generation of mlx-lm saved")
    cache = mlx_lm_cache.ArraysCache(len(arrays))
    cache.cache = list(arrays)
    return cache
