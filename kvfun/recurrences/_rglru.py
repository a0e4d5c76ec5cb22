"""Griffin's real-gated linear recurrent unit (De et al., 2024)."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from ..record import record
from ._protocol import Inputs, Spans, States
from ._scan import scanned

SHARPNESS = 8.0
"""How fast a gate that is wide open forgets: the paper's constant c."""


@record
class GatedLinearUnit:
    """``h = a h + sqrt(1 - a^2) (i x)`` with ``a = exp(-8 r softplus(w))``, channel by channel.

    Inputs: ``x`` and its gates ``r`` and ``i`` in (0, 1), ``[batch, tokens, channels]`` each.
    State: ``hidden [batch, channels]`` in float32, and ``seen [batch, 1]``, whether a row has any
    token (the first one is not damped). What comes out looks like ``x``.

    Args:
        weight: ``w``, ``[channels]``.
    """

    weight: mx.array

    def start(self, inputs: Inputs) -> States:
        """Nothing remembered."""
        batch, _, channels = inputs["x"].shape
        return {"hidden": mx.zeros((batch, channels)), "seen": mx.zeros((batch, 1))}

    def run(self, states: States, inputs: Inputs, spans: Spans = None) -> tuple[mx.array, States]:
        """The recurrence."""
        x, r, i = [inputs[name].astype(mx.float32) for name in ("x", "r", "i")]
        rate = -SHARPNESS * nn.softplus(self.weight.astype(mx.float32))

        def step(s, x, r, i):
            h, seen = s[:, :-1], s[:, -1:]
            log_a = rate * r
            damping = mx.where(seen == 0, 1.0, mx.sqrt(1 - mx.exp(2 * log_a)))
            h = mx.exp(log_a) * h + damping * i * x
            return h, mx.concatenate([h, mx.ones_like(seen)], axis=-1)

        state = mx.concatenate([states["hidden"], states["seen"]], axis=-1)
        y, after = scanned(step, state, [x, r, i], spans)
        return y.astype(inputs["x"].dtype), {"hidden": after[:, :-1], "seen": after[:, -1:]}
