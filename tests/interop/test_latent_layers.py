"""mlx-lm's latent layers, computed over a :class:`kvfun.Latent`."""

from __future__ import annotations

import mlx.core as mx
import pytest

pytest.importorskip("mlx_lm")

import mlx_lm.models.cache as mlx_lm_cache

import kvfun
from tests.interop import architectures as archs
from tests.interop import oracle

NAMES = [n for n in ("deepseek_v3", "deepseek_v32") if n in archs.available()]


class Layer:
    """One layer's attention, with its own projections and kvfun's cache."""

    def __init__(self, layer, spec="plain"):
        self.layer = layer
        self.indexer = getattr(layer, "indexer", None)
        self.cache = kvfun.latent(spec, index="plain" if self.indexer is not None else None)
        weights = layer.embed_q.weight, layer.unembed_out.weight
        self.up_keys, self.up_values = [w.swapaxes(-1, -2) for w in weights]

    def __call__(self, x, phase):
        layer, offset = self.layer, kvfun.offsets(self.cache)[0]
        batch, length, _ = x.shape
        low = layer.q_a_layernorm(layer.q_a_proj(x))
        q = layer.q_b_proj(low)
        q = q.reshape(batch, length, layer.num_heads, layer.q_head_dim).swapaxes(1, 2)
        queries, rotated = mx.split(q, [layer.qk_nope_head_dim], axis=-1)
        latents, keys = mx.split(layer.kv_a_proj_with_mqa(x), [layer.kv_lora_rank], axis=-1)
        latents = layer.kv_a_layernorm(latents)[:, None]
        rotated, keys = [layer.rope(y, offset) for y in (rotated, keys[:, None])]
        selection = None
        if self.indexer is None:
            self.cache = kvfun.append(self.cache, latents, keys)
        else:
            own = self.indexer
            wanting = own.wq_b(low).reshape(batch, length, own.n_heads, own.head_dim).swapaxes(1, 2)
            index = own.k_norm(own.wk(x))[:, None]
            wanting, index = [own.rope(y, offset) for y in (wanting, index)]
            self.cache = kvfun.append(self.cache, latents, keys, index)
            asked = self.cache, wanting, own.weights_proj(x)
            selection = kvfun.select(*asked, own.index_topk)
            self.unlike = distinct(kvfun.index_scores(*asked), own.index_topk)
        out = kvfun.attend_latent(
            self.cache,
            queries,
            rotated,
            self.up_keys,
            self.up_values,
            scale=layer.scale,
            phase=phase,
            selection=selection,
        )
        return layer.o_proj(out.swapaxes(1, 2).reshape(batch, length, -1))


def distinct(scores, top_k):
    """Of which tokens the choice is clear; of equal scores mlx-lm takes any, kvfun the earlier."""
    ordered = mx.sort(scores, axis=-1)[0]
    few = mx.sum(scores[0] > -mx.inf, axis=-1) <= top_k
    return few | (ordered[:, -top_k] > ordered[:, -top_k - 1])


def theirs(layer, cache, x):
    shared = cache[0] if isinstance(cache, mlx_lm_cache.CacheList) else cache
    mask = (
        shared.make_mask(x.shape[1], return_array=True, window_size=None)
        if x.shape[1] > 1
        else None
    )
    return layer(x, mask, cache)


@pytest.mark.parametrize("name", NAMES)
def test_it_computes_what_the_layer_computes(name):
    model = oracle.model(name)
    layer, cache = model.layers[0].self_attn, mlx_lm_cache.make_prompt_cache(model)[0]
    ours, compared = Layer(layer), 0
    for seed, length in enumerate((40, 1, 1, 7, 1, 20)):
        x = mx.random.normal((1, length, 128), key=mx.random.key(seed))
        wanted = theirs(layer, cache, x)
        got = ours(x, "decode" if length == 1 else "window")
        difference = mx.max(mx.abs(wanted - got), axis=-1)[0]
        if name == "deepseek_v32":
            difference = mx.where(ours.unlike, difference, 0)
            compared += mx.sum(ours.unlike).item()
        assert mx.max(difference).item() < 1e-3
    if name == "deepseek_v32":
        assert compared > layer.indexer.index_topk + 20  # most from a longer context


@pytest.mark.parametrize("name", NAMES)
def test_latents_of_8_bits_are_near(name):
    layer = oracle.model(name).layers[0].self_attn
    exact, coarse = Layer(layer), Layer(layer, "kv8-g32")
    x = mx.random.normal((1, 12, 128), key=mx.random.key(3))
    wanted, got = exact(x, "window"), coarse(x, "window")
    assert 0 < oracle.spread(wanted, got) < 0.1
    assert kvfun.nbytes(coarse.cache.inner) < kvfun.nbytes(exact.cache.inner) / 2
