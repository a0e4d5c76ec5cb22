"""Caches for mlx-lm's speculative decoding."""

from __future__ import annotations

from typing import Any

import mlx_lm.models.cache as mlx_lm_cache

from ...errors import UnsupportedError
from ._shell import KVFunCache


class _TwoCaches(list):
    """The target's caches, then the draft's: cut where they meet, not where mlx-lm guesses.

    mlx-lm cuts the list at ``len(model.layers)``, which is wrong for models whose layers share
    caches.
    """

    def __init__(self, target: list, draft: list):
        super().__init__([*target, *draft])
        self._parts = (target, draft)

    def __getitem__(self, index):
        if isinstance(index, slice):
            if index.start is None and index.stop is not None and index.step is None:
                return self._parts[0]
            if index.start is not None and index.stop is None and index.step is None:
                return self._parts[1]
        return super().__getitem__(index)


def speculative_cache(model_cache: list, draft_cache: list, num_draft_tokens: int) -> list[Any]:
    """The ``prompt_cache`` of ``speculative_generate_step``: both models' caches, ready to go back.

    Windows keep ``num_draft_tokens`` more, so that rejected drafts are taken back exactly at any
    length. The same caches are used, so they are current after the run.

    Args:
        model_cache: the target's, from :func:`make_prompt_cache`.
        draft_cache: the draft model's.
        num_draft_tokens: drafts a round.

    Raises:
        UnsupportedError: a layer that cannot go back (recurrent state).
    """
    for cache in [*model_cache, *draft_cache]:
        _arm(cache, num_draft_tokens)
    return _TwoCaches(model_cache, draft_cache)


def _arm(cache: Any, tokens: int) -> None:
    if isinstance(cache, mlx_lm_cache.CacheList):
        for part in cache.caches:
            _arm(part, tokens)
    elif isinstance(cache, KVFunCache):
        cache.keep_in_reserve(tokens)
    elif not cache.is_trimmable():
        raise UnsupportedError(
            f"speculative decoding takes back tokens, which a {type(cache).__name__} cannot"
        )
