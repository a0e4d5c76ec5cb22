"""The laws of recurrences, and recurrences to try caches on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import hypothesis.strategies as st
import mlx.core as mx
import numpy as np

from .. import caches, rounds
from ..recurrences import (
    GatedDelta,
    GatedLinearUnit,
    Inputs,
    LinearAttention,
    Mamba2,
    Recurrence,
    SelectiveScan,
    ShortConv,
)

Make = Callable[[Any, int, int, mx.Dtype], "tuple[Recurrence, Inputs]"]


def check_recurrence(recurrence: Recurrence, inputs: Inputs, spans: Sequence[tuple[int, int]]):
    """Assert what a recurrence promises, on inputs of several rows.

    Args:
        recurrence: the one to check.
        inputs: of a block, ``[batch, tokens, ...]`` each.
        spans: for each row the columns ``[start, stop)`` that are its own tokens.

    Raises:
        AssertionError: blocks, padding or a round change a bit; or states begin as anything but
            zeros.
    """
    for name, x in recurrence.start(inputs).items():
        assert not mx.any(x != 0).item(), f"{name} must be zeros before the first token"
    tokens = next(iter(inputs.values())).shape[1]
    alone = [_alone(recurrence, inputs, row, *span) for row, span in enumerate(spans)]
    for size in sorted({1, 2, max(1, tokens // 2), tokens}):
        cache = caches.prepare(
            caches.recurrent(len(spans)),
            [stop for _, stop in spans],
            left_padding=[start for start, _ in spans],
        )
        outs, cache = _in_blocks(recurrence, cache, inputs, size)
        for row, (start, stop) in enumerate(spans):
            where = f"row {row} in blocks of {size}"
            out, after = alone[row]
            _same(outs[row : row + 1, start:stop], out, f"what comes out of {where}")
            _same_states(caches.take(cache, [row]), after, where)
        assert caches.offsets(cache) == tuple(stop - start for start, stop in spans)
    _check_rounds(recurrence, inputs, [stop for _, stop in spans])


def _check_rounds(recurrence: Recurrence, inputs: Inputs, keep: Sequence[int]) -> None:
    """What a round keeps is what would have been there without it."""
    tokens = next(iter(inputs.values())).shape[1]
    _, before = caches.advance(caches.recurrent(len(keep)), recurrence, inputs)
    _, turn = caches.advance(rounds.begin(before, tokens), recurrence, inputs)
    for counts in (list(keep), *[[n] * len(keep) for n in {*keep}]):
        after = rounds.rollback(turn, counts)
        for row, count in enumerate(counts):
            wanted = caches.take(before, [row])
            if count:
                own = {name: x[row : row + 1, :count] for name, x in inputs.items()}
                _, wanted = caches.advance(wanted, recurrence, own)
            _same_states(caches.take(after, [row]), wanted, f"row {row} that keeps {count}")


def _alone(recurrence: Recurrence, inputs: Inputs, row: int, start: int, stop: int):
    own = {name: x[row : row + 1, start:stop] for name, x in inputs.items()}
    if start == stop:
        return mx.zeros((1, 0)), caches.recurrent()
    return caches.advance(caches.recurrent(), recurrence, own)


def _in_blocks(recurrence: Recurrence, cache: Any, inputs: Inputs, size: int):
    tokens = next(iter(inputs.values())).shape[1]
    outs = []
    for first in range(0, tokens, size):
        block = {name: x[:, first : first + size] for name, x in inputs.items()}
        out, cache = caches.advance(cache, recurrence, block)
        outs.append(out)
    return mx.concatenate(outs, axis=1), cache


def _same_states(ours: Any, theirs: Any, where: str) -> None:
    for name, x in ours.states.items():
        other = theirs.states.get(name)
        _same(x, mx.zeros_like(x) if other is None else other, f"{name} of {where}")


def _same(ours: mx.array, theirs: mx.array, what: str) -> None:
    if not theirs.size:
        return
    assert ours.shape == theirs.shape, f"{what}: {ours.shape}, not {theirs.shape}"
    assert ours.dtype == theirs.dtype, f"{what}: {ours.dtype}, not {theirs.dtype}"
    raw = [np.array(x.astype(mx.float32)).view(np.uint32) for x in (ours, theirs)]
    assert (raw[0] == raw[1]).all(), f"{what} differs"


# -- recurrences to try ---------------------------------------------------------------------------


def _normal(key: Any, *shape: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.random.normal(shape, key=key).astype(dtype)


def _short_conv(key: Any, batch: int, tokens: int, dtype: mx.Dtype):
    a, b, c = mx.random.split(key, 3)
    inputs = {"x": _normal(a, batch, tokens, 6, dtype=dtype)}
    return ShortConv(_normal(b, 6, 3, dtype=dtype), _normal(c, 6, dtype=dtype)), inputs


def _gated_delta(key: Any, batch: int, tokens: int, dtype: mx.Dtype):
    keys = mx.random.split(key, 6)
    heads, key_heads, dim, value_dim = 4, 2, 8, 12
    channels = 2 * key_heads * dim + heads * value_dim
    weights = [
        _normal(keys[i], *shape) for i, shape in enumerate(((channels, 4), (heads,), (heads,)))
    ]
    recurrence = GatedDelta(
        weights[0].astype(dtype),
        *weights[1:],
        key_heads=key_heads,
        key_dim=dim,
        value_dim=value_dim,
    )
    inputs = {
        "qkv": _normal(keys[3], batch, tokens, channels, dtype=dtype),
        "a": _normal(keys[4], batch, tokens, heads, dtype=dtype),
        "b": _normal(keys[5], batch, tokens, heads, dtype=dtype),
    }
    return recurrence, inputs


def _mamba2(key: Any, batch: int, tokens: int, dtype: mx.Dtype):
    keys = mx.random.split(key, 7)
    heads, dim, groups, state = 4, 5, 2, 6
    channels = heads * dim + 2 * groups * state
    recurrence = Mamba2(
        _normal(keys[0], channels, 4, dtype=dtype),
        _normal(keys[1], channels, dtype=dtype),
        *[_normal(keys[i], heads) for i in (2, 3, 4)],
        groups=groups,
        state=state,
        limits=(0.001, 100.0),
    )
    inputs = {
        "xbc": _normal(keys[5], batch, tokens, channels, dtype=dtype),
        "dt": _normal(keys[6], batch, tokens, heads, dtype=dtype),
    }
    return recurrence, inputs


def _selective_scan(key: Any, batch: int, tokens: int, dtype: mx.Dtype):
    keys = mx.random.split(key, 6)
    shapes = {"x": 7, "dt": 7, "b": 5, "c": 5}
    inputs = {
        name: _normal(k, batch, tokens, n, dtype=dtype)
        for k, (name, n) in zip(keys, shapes.items(), strict=False)
    }
    inputs["dt"] = mx.abs(inputs["dt"])
    return SelectiveScan(_normal(keys[4], 7, 5), _normal(keys[5], 7)), inputs


def _linear_attention(key: Any, batch: int, tokens: int, dtype: mx.Dtype):
    keys = mx.random.split(key, 4)
    inputs = {
        name: _normal(k, batch, tokens, 3, dim, dtype=dtype)
        for k, name, dim in zip(keys, "qkv", (6, 6, 4), strict=False)
    }
    return LinearAttention(-mx.abs(_normal(keys[3], 3)), scale=6**-0.5), inputs


def _linear_unit(key: Any, batch: int, tokens: int, dtype: mx.Dtype):
    keys = mx.random.split(key, 4)
    x, r, i = [_normal(k, batch, tokens, 6, dtype=dtype) for k in keys[:3]]
    gates = {"r": mx.sigmoid(r), "i": mx.sigmoid(i)}
    return GatedLinearUnit(_normal(keys[3], 6)), {"x": x, **gates}


RECURRENCES: dict[str, Make] = {
    "short conv": _short_conv,
    "gated delta": _gated_delta,
    "mamba2": _mamba2,
    "selective scan": _selective_scan,
    "linear attention": _linear_attention,
    "gated linear unit": _linear_unit,
}
"""How to make each of the recurrences here, with inputs: ``make(key, batch, tokens, dtype)``."""


@st.composite
def spans(draw: Any, batch: int, tokens: int) -> list[tuple[int, int]]:
    """Where in a block each row's own tokens are."""
    ends = st.tuples(st.integers(0, tokens), st.integers(0, tokens))
    return [(min(pair), max(pair)) for pair in draw(st.lists(ends, min_size=batch, max_size=batch))]
