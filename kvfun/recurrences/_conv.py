"""Causal convolutions of every channel by itself, and the inputs that they still need."""

from __future__ import annotations

import mlx.core as mx
from jaxtyping import Float

from ..record import record
from ._protocol import Inputs, Spans, States


def causal_conv(
    tail: Float[mx.array, "batch taps channels"],
    x: Float[mx.array, "batch tokens channels"],
    weight: Float[mx.array, "channels kernel"],
    bias: Float[mx.array, "channels"] | None = None,
    spans: Spans = None,
) -> tuple[mx.array, mx.array]:
    """A block through a causal depthwise convolution, and the inputs that the next block needs.

    Args:
        tail: the last ``kernel - 1`` inputs of each row, zeros before the first.
        x: the block.
        weight: the taps, the oldest input's first.
        bias: of each channel.
        spans: where the rows' own tokens are.

    Returns:
        ``[batch, tokens, channels]``, and the tail behind each row's last own token: a buffer of
        its own, that keeps nothing else alive.

    >>> x = mx.array([[[1.0], [2.0], [3.0]]])
    >>> y, tail = causal_conv(mx.zeros((1, 1, 1)), x, mx.array([[10.0, 1.0]]))
    >>> y.flatten().tolist(), tail.flatten().tolist()
    ([1.0, 12.0, 23.0], [3.0])
    """
    taps, tokens = tail.shape[1], x.shape[1]
    seen = mx.concatenate([tail.astype(x.dtype), x], axis=1)
    if spans is not None and any(start for start, _ in spans):
        seen = _moved(seen, taps, spans)
    # One tap after another, in order: the sum of a token is the same in any block.
    y = seen[:, :tokens] * weight[:, 0]
    for tap in range(1, taps + 1):
        y = y + seen[:, tap : tap + tokens] * weight[:, tap]
    y = y if bias is None else y + bias
    ends = [tokens] * len(x) if spans is None else [stop for _, stop in spans]
    return y, _behind(seen, taps, ends)


def _moved(seen: mx.array, taps: int, spans: Spans) -> mx.array:
    """Each row's tail right before its own first token, behind the padding."""
    columns = mx.arange(seen.shape[1])
    starts = mx.array([start for start, _ in spans or ()])[:, None]
    source = mx.where(columns < starts + taps, mx.maximum(columns - starts, 0), columns)
    return mx.take_along_axis(seen, source[..., None], axis=1)


def _behind(seen: mx.array, taps: int, ends: list[int]) -> mx.array:
    """The last inputs before a column of each row; gathered, since a slice would pin the block."""
    if all(end == ends[0] for end in ends):
        return mx.take(seen, mx.arange(ends[0], ends[0] + taps), axis=1)
    source = mx.array(ends)[:, None] + mx.arange(taps)
    return mx.take_along_axis(seen, source[..., None], axis=1)


def no_tail(x: mx.array, kernel: int) -> mx.array:
    """The tail before the first token."""
    return mx.zeros((x.shape[0], kernel - 1, x.shape[2]), x.dtype)


@record
class ShortConv:
    """A causal depthwise convolution (LFM2's short ones; the first half of Mamba).

    Inputs: ``x [batch, tokens, channels]``. State: ``conv``. What comes out looks like ``x``.

    Args:
        weight: the taps, ``[channels, kernel]``, the oldest input's first (``nn.Conv1d``'s weight
            without its last axis).
        bias: ``[channels]``.
    """

    weight: mx.array
    bias: mx.array | None = None

    def start(self, inputs: Inputs) -> States:
        """No inputs so far."""
        return {"conv": no_tail(inputs["x"], self.weight.shape[1])}

    def run(self, states: States, inputs: Inputs, spans: Spans = None) -> tuple[mx.array, States]:
        """The convolution."""
        y, tail = causal_conv(states["conv"], inputs["x"], self.weight, self.bias, spans)
        return y, {"conv": tail}
