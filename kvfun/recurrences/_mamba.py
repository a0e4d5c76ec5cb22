"""State space models: Mamba (Gu and Dao, 2023) and Mamba-2 (Dao and Gu, 2024)."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from ..record import record, static
from ._conv import causal_conv, no_tail
from ._protocol import Inputs, Spans, States
from ._scan import scanned


@record
class SelectiveScan:
    """Mamba's scan, behind its convolution (a :class:`ShortConv` with a cache of its own).

    ``h = exp(dt A) h + dt x B'``, read as ``y = h C + D x``.

    Inputs: ``x [batch, tokens, channels]``; ``dt`` the same, positive; ``b`` and ``c [batch,
    tokens, state]``. State: ``scan [batch, channels, state]`` in float32.

    Args:
        a_log: logarithms of the decay rates, ``[channels, state]``.
        skip: what of ``x`` goes straight through, ``[channels]``.
    """

    a_log: mx.array
    skip: mx.array

    def start(self, inputs: Inputs) -> States:
        """Nothing remembered."""
        return {"scan": mx.zeros((inputs["x"].shape[0], *self.a_log.shape))}

    def run(self, states: States, inputs: Inputs, spans: Spans = None) -> tuple[mx.array, States]:
        """The scan."""
        rates = -mx.exp(self.a_log.astype(mx.float32))
        x, dt, b, c = [inputs[name].astype(mx.float32) for name in ("x", "dt", "b", "c")]

        def step(h, x, dt, b, c):
            h = mx.exp(dt[..., None] * rates) * h + (dt * x)[..., None] * b[:, None]
            return mx.sum(h * c[:, None], axis=-1), h

        y, after = scanned(step, states["scan"], [x, dt, b, c], spans)
        return (y + x * self.skip).astype(inputs["x"].dtype), {"scan": after}


@record
class Mamba2:
    """A Mamba-2 layer between its projections: convolution and state space.

    ``h = exp(dt A) h + dt x B'`` for every head, read as ``y = h C + D x``.

    Inputs: ``xbc [batch, tokens, heads * head_dim + 2 * groups * state]`` before the convolution
    and ``dt [batch, tokens, heads]`` before its bias. States: ``conv`` in the inputs' dtype, ``scan
    [batch, heads, head_dim, state]`` in float32. What comes out is ``[batch, tokens, heads,
    head_dim]``.

    Args:
        weight: the convolution's taps, ``[channels, kernel]``.
        bias: the convolution's, ``[channels]``.
        a_log: logarithms of the decay rates, ``[heads]``.
        skip: what of ``x`` goes straight through, ``[heads]``.
        dt_bias: added to ``dt``, ``[heads]``.
        groups: groups of heads that share ``b`` and ``c``.
        state: numbers of ``b`` and of ``c``.
        limits: of the time step.
    """

    weight: mx.array
    bias: mx.array | None
    a_log: mx.array
    skip: mx.array
    dt_bias: mx.array
    groups: int = static()
    state: int = static()
    limits: tuple[float, float] = static(default=(0.0, float("inf")))

    def _head_dim(self, channels: int) -> int:
        return (channels - 2 * self.groups * self.state) // self.a_log.shape[0]

    def start(self, inputs: Inputs) -> States:
        """Nothing remembered."""
        x, heads = inputs["xbc"], self.a_log.shape[0]
        shape = (x.shape[0], heads, self._head_dim(x.shape[2]), self.state)
        return {"conv": no_tail(x, self.weight.shape[1]), "scan": mx.zeros(shape)}

    def run(self, states: States, inputs: Inputs, spans: Spans = None) -> tuple[mx.array, States]:
        """The layer."""
        mixed, tail = causal_conv(states["conv"], inputs["xbc"], self.weight, self.bias, spans)
        heads, side = self.a_log.shape[0], self.groups * self.state
        inner = mixed.shape[2] - 2 * side
        x, b, c = mx.split(nn.silu(mixed).astype(mx.float32), [inner, inner + side], axis=-1)
        x = x.reshape(*x.shape[:2], heads, -1)
        b, c = [
            mx.repeat(y.reshape(*y.shape[:2], self.groups, -1), heads // self.groups, axis=2)
            for y in (b, c)
        ]
        dt = nn.softplus(inputs["dt"].astype(mx.float32) + self.dt_bias.astype(mx.float32))
        dt = mx.clip(dt, *self.limits)
        decay = mx.exp(-mx.exp(self.a_log.astype(mx.float32)) * dt)

        def step(h, x, dt, decay, b, c):
            h = h * decay[..., None, None] + (dt[..., None] * x)[..., None] * b[:, :, None]
            return mx.sum(h * c[:, :, None], axis=-1), h

        y, after = scanned(step, states["scan"], [x, dt, decay, b, c], spans)
        y = y + x * self.skip.astype(mx.float32)[:, None]
        return y.astype(mixed.dtype), {"conv": tail, "scan": after}
