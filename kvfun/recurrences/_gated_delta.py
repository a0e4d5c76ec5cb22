"""Gated delta nets (Yang et al., 2024): a matrix a head that corrects what it remembers."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from ..record import record, static
from ._conv import causal_conv, no_tail
from ._protocol import Inputs, Spans, States
from ._scan import scanned, valid_columns


def gated_delta(
    state: mx.array,
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    gates: mx.array,
    betas: mx.array,
    spans: Spans = None,
) -> tuple[mx.array, mx.array]:
    """A block through ``S = g S + b (v - (g S) k) k'``, read as ``y = S q``.

    Through ``mx.fast.gated_delta_update``; composed where a head's gates are a vector (Kimi delta
    attention), which that does not take.

    Args:
        state: ``[batch, value_heads, value_dim, key_dim]``, float32.
        queries: ``[batch, tokens, key_heads, key_dim]``.
        keys: the same.
        values: ``[batch, tokens, value_heads, value_dim]``; head ``h`` has key head
            ``h // (value_heads // key_heads)``.
        gates: in (0, 1], ``[batch, tokens, value_heads]``, or with ``key_dim`` behind it.
        betas: ``[batch, tokens, value_heads]``.
        spans: where the rows' own tokens are.

    Returns:
        ``[batch, tokens, value_heads, value_dim]`` in the values' dtype, and the state in float32.
    """
    heads, key_heads = values.shape[2], keys.shape[2]
    if gates.ndim == 3:
        mask = valid_columns(spans, keys.shape[1])
        out, after = mx.fast.gated_delta_update(
            queries, keys, values, gates.astype(mx.float32), betas, state, mask
        )
        return out, after
    if heads != key_heads:
        queries, keys = [mx.repeat(x, heads // key_heads, axis=2) for x in (queries, keys)]
    wide = [x.astype(mx.float32) for x in (queries, keys, values, gates, betas)]
    out, after = scanned(_step, state, wide, spans)
    return out.astype(values.dtype), after


def _step(s: mx.array, q: mx.array, k: mx.array, v: mx.array, g: mx.array, b: mx.array):
    s = s * g[:, :, None]
    told = mx.sum(s * k[:, :, None], axis=-1)
    s = s + ((v - told) * b[..., None])[..., None] * k[:, :, None]
    return mx.sum(s * q[:, :, None], axis=-1), s


@record
class GatedDelta:
    """A gated delta layer between its projections (Qwen3-Next, Qwen3.5): convolution and matrices.

    Inputs: ``qkv [batch, tokens, channels]`` before the convolution, queries first; ``a`` and ``b``
    ``[batch, tokens, value_heads]``. States: ``conv`` in the inputs' dtype, ``recurrent [batch,
    value_heads, value_dim, key_dim]`` in float32. What comes out is ``[batch, tokens, value_heads,
    value_dim]``.

    Args:
        weight: the convolution's taps, ``[channels, kernel]``.
        a_log: logarithms of the decay rates, ``[value_heads]``.
        dt_bias: added to ``a``, ``[value_heads]``.
        key_heads: heads of queries and keys.
        key_dim: numbers of a key.
        value_dim: numbers of a value.
    """

    weight: mx.array
    a_log: mx.array
    dt_bias: mx.array
    key_heads: int = static()
    key_dim: int = static()
    value_dim: int = static()

    def start(self, inputs: Inputs) -> States:
        """Nothing remembered."""
        x, heads = inputs["qkv"], self.a_log.shape[0]
        shape = (x.shape[0], heads, self.value_dim, self.key_dim)
        return {"conv": no_tail(x, self.weight.shape[1]), "recurrent": mx.zeros(shape)}

    def run(self, states: States, inputs: Inputs, spans: Spans = None) -> tuple[mx.array, States]:
        """The layer."""
        x, tail = causal_conv(states["conv"], inputs["qkv"], self.weight, spans=spans)
        width = self.key_heads * self.key_dim
        q, k, v = mx.split(nn.silu(x), [width, 2 * width], axis=-1)
        q, k = [_unit(y.reshape(*y.shape[:2], self.key_heads, self.key_dim)) for y in (q, k)]
        v = v.reshape(*v.shape[:2], -1, self.value_dim)
        rate = mx.exp(self.a_log.astype(mx.float32))
        gates = mx.exp(-rate * nn.softplus((inputs["a"] + self.dt_bias).astype(mx.float32)))
        out, after = gated_delta(
            states["recurrent"],
            q * self.key_dim**-0.5,
            k,
            v,
            gates,
            mx.sigmoid(inputs["b"]),
            spans,
        )
        return out, {"conv": tail, "recurrent": after}


def _unit(x: mx.array) -> mx.array:
    """Vectors of length 1."""
    dim = x.shape[-1]
    return mx.fast.rms_norm(x, None, 1e-6 / dim) * dim**-0.5
