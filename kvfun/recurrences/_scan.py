"""Tokens one after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx

from ._protocol import Spans

Step = Callable[..., tuple[mx.array, mx.array]]
"""``step(state, *columns) -> out, state``: one token of every row."""


def valid_columns(spans: Spans, tokens: int) -> mx.array | None:
    """Which columns of a block are tokens, bool ``[batch, tokens]``; ``None`` where all are.

    >>> valid_columns(((1, 3), (0, 2)), 3).tolist()
    [[False, True, True], [True, True, False]]
    """
    if spans is None or all(span == (0, tokens) for span in spans):
        return None
    column = mx.arange(tokens)
    starts, stops = mx.array([a for a, _ in spans]), mx.array([b for _, b in spans])
    return (column >= starts[:, None]) & (column < stops[:, None])


def scanned(
    step: Step, state: mx.array, inputs: Sequence[mx.array], spans: Spans = None
) -> tuple[mx.array, mx.array]:
    """The outputs of a block, ``[batch, tokens, ...]``, and the state behind it, token by token.

    The arithmetic of a token is the same in any block, so that splits change no bit.

    Args:
        step: one token of every row.
        state: ``[batch, ...]``.
        inputs: ``[batch, tokens, ...]`` each; a step gets one column of each.
        spans: where the rows' own tokens are; elsewhere the state stays.
    """
    tokens = inputs[0].shape[1]
    valid = valid_columns(spans, tokens)
    outs = []
    for column in range(tokens):
        out, after = step(state, *[x[:, column] for x in inputs])
        outs.append(out)
        state = after if valid is None else _chosen(valid[:, column], after, state)
    return mx.stack(outs, axis=1), state


def _chosen(rows: mx.array, there: mx.array, elsewhere: mx.array) -> mx.array:
    return mx.where(rows.reshape(-1, *[1] * (there.ndim - 1)), there, elsewhere)
