"""A prompt cache whose codec is fitted to the prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ... import caches as verbs
from ... import tree
from ...codecs import Centred, Codec, Rotated, statistics_of
from ...errors import ShapeError, UnsupportedError
from ...record import replace
from ._attention import attention, watched_queries
from ._make import PromptCache, make_prompt_cache, shells_of, with_codecs

STEP = 512
"""Tokens of a prompt that are read at once."""


def calibrated_prompt_cache(
    model: Any, prompt: mx.array, spec: str | Codec | Sequence[str | Codec], **options: Any
) -> PromptCache:
    """A cache for every layer that holds a prompt, in a codec fitted to it.

    The prompt is read into caches that keep it as it came; then every layer's keys and queries tell
    its codec what :func:`kvfun.calibrate` says, and all of it is encoded, once. What comes next
    (the last tokens of the prompt among it, as its logits are not returned) is encoded as it comes.

    Args:
        model: an mlx-lm model.
        prompt: tokens ``[batch, tokens]``, a few hundred of the first ones are enough.
        spec: such as ``"rot-k3v3-bal"``, or one for each of the model's caches. Those that have no
            use for queries are only converted to.
        options: those of :func:`make_prompt_cache`.

    Raises:
        UnsupportedError: as there, or a model whose queries cannot be seen.
        ShapeError: a prompt that is no batch of tokens.
    """
    if not isinstance(prompt, mx.array) or prompt.ndim != 2 or not prompt.size:
        raise ShapeError(f"a prompt is an array [batch, tokens], not {prompt!r:.80}")
    codecs = [spec] if isinstance(spec, str | Codec) else list(spec)
    codecs = [Codec.of(each) for each in codecs]
    quiet = [_asking(codec, None) for codec in codecs]
    caches = make_prompt_cache(model, quiet if len(quiet) > 1 else quiet[0], **options)
    shells = [list(shells_of(entry)) for entry in caches]
    if len(codecs) == 1:
        codecs = codecs * len(caches)
    told = []
    for codec, entry in zip(codecs, shells, strict=True):
        for shell in entry:
            told.append((shell, _asking(shell.record.codec, statistics_of(codec))))
            shell.record = with_codecs(shell.record, lambda _: Codec.of("plain"))
    asked = _read(model, prompt, caches, [shell for shell, _ in told])
    for (shell, codec), queries in zip(told, asked, strict=True):
        if statistics_of(codec) is None:
            shell.record = verbs.convert(shell.record, codec)
        elif queries is None:
            raise UnsupportedError(f"{type(model).__module__}: the queries of a layer are not seen")
        else:
            shell.record = verbs.calibrate(shell.record, queries, codec)
        mx.eval(tree.leaves(shell.record))  # one layer's two copies at a time
    return caches


def _asking(codec: Codec, statistics: str | None) -> Codec:
    """The codec with other statistics to know, if any."""
    if isinstance(codec.keys, Centred) and isinstance(codec.keys.codec, Rotated):
        inner = replace(codec.keys.codec, statistics=statistics)
        return replace(codec, keys=replace(codec.keys, codec=inner))
    if isinstance(codec.keys, Rotated):
        return replace(codec, keys=replace(codec.keys, statistics=statistics))
    return codec


def _read(
    model: Any, prompt: mx.array, caches: PromptCache, shells: Sequence[Any]
) -> list[mx.array | None]:
    """Let the model read a prompt; the queries that each cache was read by."""
    found: list[list[mx.array]] = [[] for _ in shells]
    with attention(model), watched_queries() as seen:
        for start in range(0, prompt.shape[1], STEP):
            model(prompt[:, start : start + STEP], cache=caches)
            for index, shell in enumerate(shells):
                mine = [queries for record, queries in seen if record is shell.record]
                found[index] += mine[:1]
            mx.eval([tree.leaves(shell.record) for shell in shells], found)
            seen.clear()
    return [mx.concatenate(parts, axis=2) if parts else None for parts in found]
