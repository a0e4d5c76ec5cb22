"""Which layers of a model can take a spec: tried on a small copy with random weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import mlx.core as mx

from ...errors import KVFunError, UnsupportedError
from ...scheme import Assignment, KvScheme, Model
from ._attention import attention_where_possible, can_be_routed
from ._described import described
from ._make import make_prompt_cache
from ._weights import built

PROMPT, CHUNK, DECODED = 44, 20, 3
"""Tokens that are read, at once at most, and then one at a time."""

_SMALL = {
    "vocab_size": 256,
    "vocab_size_per_layer_input": 256,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "shared_intermediate_size": 64,
    "intermediate_size_mlp": 128,
    "ffn_hidden_size": 128,
    "expert_ffn_hidden_size": 64,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
"""What has nothing to do with caches, made small where a config has it."""


@attrs.frozen
class Probed:
    """What came of a spec.

    Args:
        spec: the spec.
        layers: what each layer of the model stores under it, and why where it is something else;
            empty where no cache could be made.
        ran: a small copy of the model has read and decoded with such caches.
        routed: its attention reads encoded caches (:func:`kvfun.interop.mlx_lm.attention`);
            otherwise they are decoded at every read.
        error: what stopped it, empty if nothing did.
    """

    spec: str
    layers: tuple[Assignment, ...] = ()
    ran: bool = False
    routed: bool = False
    error: str = ""

    @property
    def taken(self) -> tuple[int, ...]:
        """The layers that store what the spec says."""
        return tuple([each.index for each in self.layers if each.spec and not each.reason])


def probe(config: Mapping[str, Any], specs: Sequence[str | KvScheme]) -> Iterator[Probed]:
    """Try specs on a small copy of a model, with random weights: nothing is loaded.

    The copy has the model's own kinds of layers, head dims and windows; it has fewer heads, a
    narrow feed-forward part, few experts, and no more layers than it takes to have one of each.

    Args:
        config: a ``config.json``.
        specs: codec specs or schemes.

    Raises:
        ConfigError, UnsupportedError: a config that is not understood, or that mlx-lm builds no
            model of.
    """
    about = Model.from_config(config)
    model = small_copy(config, about)
    for spec in specs:
        yield _tried(model, about, KvScheme.of(spec))


def _tried(model: Any, about: Model, scheme: KvScheme) -> Probed:
    name = scheme.cache_key
    try:
        layers = scheme.assigned(about)
        routed = _runs(model, scheme)
    except Exception as error:  # whatever stops the model is the answer
        kind = "" if isinstance(error, KVFunError) else f"{type(error).__name__}: "
        return Probed(name, error=f"{kind}{error}")
    return Probed(name, layers, ran=True, routed=routed)


def _runs(model: Any, scheme: KvScheme) -> bool:
    """Read and decode; whether its attention was routed.

    Raises:
        UnsupportedError: numbers that are not finite.
    """
    caches = make_prompt_cache(model, scheme)
    tokens = mx.arange(PROMPT + DECODED)[None] % 251
    steps = [(i, min(i + CHUNK, PROMPT)) for i in range(0, PROMPT, CHUNK)]
    steps += [(i, i + 1) for i in range(PROMPT, PROMPT + DECODED)]
    with attention_where_possible(model):
        for start, stop in steps:
            logits = model(tokens[:, start:stop], cache=caches)
            finite: Any = mx.all(mx.isfinite(logits)).item()
            if not finite:
                raise UnsupportedError(f"{scheme.cache_key}: logits are not finite")
    return can_be_routed(model)


def small_copy(config: Mapping[str, Any], about: Model) -> Any:
    """A small model with random weights whose layers keep what those of the config keep.

    Raises:
        UnsupportedError: mlx-lm cannot build one.
    """
    failure: Exception | None = None
    for small in _smaller(dict(config), about):
        try:
            model = built(small)
            if _signs(described(model)) >= _signs(about):
                model.set_dtype(mx.float32)
                model.eval()
                mx.eval(model.parameters())
                return model
        except KVFunError as error:
            failure = error
    raise UnsupportedError(f"no small copy of {about.model_type!r} could be built: {failure}")


def _signs(about: Model) -> set[Any]:
    """What a codec has to fit, of each kind of layer."""
    return {
        (layer.kind, tuple([(s.head_dim, s.value_dim, s.bound) for s in layer.streams]))
        for layer in about.layers
    }


def _smaller(config: dict[str, Any], about: Model) -> Iterator[dict[str, Any]]:
    """Copies, the smallest first."""
    count = _enough_layers(about)
    for heads, layers in ((True, count), (False, count), (False, len(about.layers))):
        yield _nested(config, lambda values, h=heads, n=layers: _shrunk(values, about, h, n))


def _nested(config: dict[str, Any], change: Any) -> dict[str, Any]:
    if isinstance(config.get("text_config"), Mapping):
        inner = change(dict(config["text_config"]))
        return {**config, "text_config": inner, "vocab_size": inner.get("vocab_size", 256)}
    return change(config)


def _shrunk(values: dict[str, Any], about: Model, fewer_heads: bool, layers: int) -> dict[str, Any]:
    values = {**values, **{name: size for name, size in _SMALL.items() if values.get(name)}}
    values = _fewer_layers(values, len(about.layers), layers)
    streams = [x.streams[0] for x in about.layers if x.streams and x.kind != "latent"]
    heads = [x.heads for x in about.layers if x.streams and x.kind != "latent"]
    if not fewer_heads or not streams or "kv_lora_rank" in values:
        return values
    groups, kv_heads = max(1, heads[0] // streams[0].kv_heads), min(2, streams[0].kv_heads)
    values["num_attention_heads"] = groups * kv_heads
    if values.get("num_key_value_heads") is not None:
        values["num_key_value_heads"] = kv_heads
    values["hidden_size"] = groups * kv_heads * streams[0].head_dim
    return values


def _fewer_layers(values: dict[str, Any], old: int, new: int) -> dict[str, Any]:
    """The first layers only, in every list that has one entry a layer."""
    cut = {}
    for name, value in values.items():
        listed = isinstance(value, list) or name == "hybrid_override_pattern"
        cut[name] = value[:new] if listed and len(value) == old else value
        if name in ("num_hidden_layers", "n_layer", "n_layers", "num_layers") and value == old:
            cut[name] = new
        if name == "full_attn_idxs":
            cut[name] = [index for index in value if index < new]
    return cut


def _enough_layers(about: Model) -> int:
    """How many of the first layers have one of each kind; all where some read others' keys."""
    if any(layer.donor is not None for layer in about.layers):
        return len(about.layers)
    seen: set[Any] = set()
    last = 0
    for index, layer in enumerate(about.layers):
        sign = _signs(Model("", (layer,)))
        if not sign <= seen:
            seen |= sign
            last = index
    return max(2, last + 1)
