"""How far a model is off with encoded caches, for :func:`kvfun.codecs.sensitivity`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from ...errors import ShapeError
from ._attention import attention
from ._make import make_prompt_cache


def measure(
    model: Any, tokens: mx.array, *, chunk: int = 32, skip: int = 64
) -> Callable[[Sequence[str]], float]:
    """A function from the specs of a model's caches to how far it is off on a text.

    That is the mean KL divergence of the model's predictions from those with plain caches, in nats
    a token, where every token is read as it is stored. The latter are computed once.

    Args:
        model: an mlx-lm model.
        tokens: texts ``[batch, tokens]``.
        chunk: tokens that are fed at once.
        skip: the first predictions do not count: they see too little.

    Raises:
        ShapeError: no batch of texts that are long enough.
    """
    if not isinstance(tokens, mx.array) or tokens.ndim != 2 or tokens.shape[1] <= skip:
        raise ShapeError(f"texts are [batch, more than {skip} tokens], not {tokens!r:.80}")

    def predictions(specs: Sequence[str]) -> list[mx.array]:
        caches, found = make_prompt_cache(model, list(specs)), []
        with attention(model):
            for start in range(0, tokens.shape[1], chunk):
                logits = model(tokens[:, start : start + chunk], cache=caches)
                logits = logits[:, max(0, skip - start) :].astype(mx.float32)
                if not logits.shape[1]:
                    continue
                logits = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
                mx.eval(logits)
                found.append(logits)
        return found

    known: list[mx.array] = []

    def loss(specs: Sequence[str]) -> float:
        if not known:
            known.extend(predictions(["plain"] * len(specs)))
        parts = [
            mx.sum(mx.exp(one) * (one - other))
            for one, other in zip(known, predictions(specs), strict=True)
        ]
        total: Any = mx.sum(mx.stack(parts)).item()
        return total / (tokens.shape[0] * (tokens.shape[1] - skip))

    return loss
