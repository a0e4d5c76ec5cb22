"""Text from a model, through any cache."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvfun.cli._model import Loaded
from kvfun.cli._report import size_text
from kvfun.cli._rows import Row


@dataclass(frozen=True)
class Summary:
    """What a generation took."""

    prompt_tokens: int
    tokens: int
    rate: float
    cache_bytes: int
    stored: str

    def line(self) -> str:
        """The summary as one line."""
        return (
            f"{self.tokens} tokens at {self.rate:.1f} tok/s after a prompt of "
            f"{self.prompt_tokens}; cache {size_text(self.cache_bytes)}: {self.stored}"
        )


def generate(
    loaded: Loaded,
    row: Row,
    prompt: str,
    write: Callable[[str], None],
    *,
    max_tokens: int,
    temperature: float,
    chat: bool | None,
) -> Summary:
    """Generates text and writes it as it comes.

    Args:
        loaded: The model.
        row: Whose cache is used.
        prompt: What the text answers or goes on from.
        write: Called with every piece of text.
        max_tokens: The most tokens to generate.
        temperature: 0 for greedy decoding.
        chat: Whether to put the prompt into the chat template; None: where there is one.
    """
    import mlx_lm
    from mlx_lm.sample_utils import make_sampler

    cache = row.make_cache(loaded.model)
    with row.attention(loaded.model):
        last: Any = None
        for last in mlx_lm.stream_generate(
            loaded.model,
            loaded.tokenizer,
            prompt_tokens(loaded.tokenizer, prompt, chat=chat),
            max_tokens=max_tokens,
            sampler=make_sampler(temp=temperature),
            prompt_cache=cache,
        ):
            write(last.text)
    return Summary(
        last.prompt_tokens,
        last.generation_tokens,
        last.generation_tps,
        sum(layer.nbytes for layer in cache),
        stored(cache),
    )


def prompt_tokens(tokenizer: Any, prompt: str, *, chat: bool | None) -> list[int]:
    """The tokens of a prompt, in the tokenizer's chat template if wanted (or, for None, had)."""
    has_template = getattr(tokenizer, "has_chat_template", False)
    if not (has_template if chat is None else chat):
        return list(tokenizer.encode(prompt))
    messages = [{"role": "user", "content": prompt}]
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True))


def stored(cache: Sequence[Any]) -> str:
    """What the layers store, equal neighbours together.

    Examples:
        >>> stored([])
        'no layers'
    """
    groups = [(name, len(list(same))) for name, same in itertools.groupby(_layer_names(cache))]
    return ", ".join(f"{count} layers {name}" for name, count in groups) or "no layers"


def _layer_names(cache: Any) -> list[str]:
    """What each layer stores: kvfun's caches report it, mlx-lm's are a class and its bits."""
    if hasattr(cache, "report"):
        return [" ".join(filter(None, (r.spec, r.kind))) for r in cache.report]
    return [_mlx_lm_name(layer) for layer in cache]


def _mlx_lm_name(layer: Any) -> str:
    name, bits = type(layer).__name__, getattr(layer, "bits", None)
    return name if bits is None else f"{name} {bits} bits in groups of {layer.group_size}"
