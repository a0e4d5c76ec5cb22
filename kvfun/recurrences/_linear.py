"""Linear attention whose heads forget at a fixed rate (lightning attention, Qin et al., 2024)."""

from __future__ import annotations

import mlx.core as mx

from ..record import record, static
from ._protocol import Inputs, Spans, States
from ._scan import scanned


@record
class LinearAttention:
    """``S = g S + k v'``, read as ``y = scale S' q``.

    Inputs: ``q``, ``k [batch, tokens, heads, key_dim]`` and ``v [batch, tokens, heads,
    value_dim]``. State: ``memory [batch, heads, key_dim, value_dim]`` in float32.

    Args:
        decay: logarithms of what stays from token to token, ``[heads]``.
        scale: of what is read.
    """

    decay: mx.array
    scale: float = static(default=1.0)

    def start(self, inputs: Inputs) -> States:
        """Nothing remembered."""
        batch, _, heads, dim = inputs["k"].shape
        return {"memory": mx.zeros((batch, heads, dim, inputs["v"].shape[-1]))}

    def run(self, states: States, inputs: Inputs, spans: Spans = None) -> tuple[mx.array, States]:
        """The attention."""
        stays = mx.exp(self.decay.astype(mx.float32))[:, None, None]
        q, k, v = [inputs[name].astype(mx.float32) for name in ("q", "k", "v")]

        def step(s, q, k, v):
            s = s * stays + k[..., None] * v[:, :, None]
            return mx.sum(s * q[..., None], axis=-2), s

        y, after = scanned(step, states["memory"], [q, k, v], spans)
        return (y * self.scale).astype(inputs["v"].dtype), {"memory": after}
