"""Attention in float64 NumPy, and masks of every rank."""

import mlx.core as mx
import numpy as np

from kvfun.codecs import Affine

EPS = {mx.float32: 2.0**-23, mx.bfloat16: 2.0**-7, mx.float16: 2.0**-10}


def decoded(codec, planes) -> np.ndarray:
    """The numbers the planes stand for, not rounded to the dtype of the scales."""
    if isinstance(codec, Affine):
        packed, scales, biases = planes
        planes = packed, scales.astype(mx.float32), biases.astype(mx.float32)
    return np.array(codec.decode(planes).astype(mx.float32), np.float64)


def bias(mask, batch: int, kv_heads: int, heads: int, length: int, columns: int) -> np.ndarray:
    """A mask as numbers to add, ``[batch, heads, L, N]``."""
    shape = (batch, heads, length, columns)
    if callable(mask):
        mask = mask(0, length, 0, columns)
    if mask is None:
        return np.zeros(shape)
    if isinstance(mask, str):
        mask = np.arange(columns) <= np.arange(columns - length, columns)[:, None]
    else:
        mask = np.array(mask.astype(mx.float32) if mask.dtype != mx.bool_ else mask)
    if mask.ndim == 5:
        by_head = np.broadcast_to(
            mask, (mask.shape[0], kv_heads, heads // kv_heads, *mask.shape[3:])
        )
        mask = by_head.reshape(mask.shape[0], heads, *mask.shape[3:])
    added = np.where(mask, 0.0, -np.inf) if mask.dtype == bool else mask.astype(np.float64)
    return np.broadcast_to(added, shape)


def attention(queries, keys, values, scale, mask=None, sinks=None) -> np.ndarray:
    return partial(queries, keys, values, scale, mask, sinks)[0]


def partial(queries, keys, values, scale, mask=None, sinks=None) -> tuple[np.ndarray, np.ndarray]:
    """Attention and the log-sum-exp of the scores, -inf for a query that sees nothing."""
    q = np.array(queries.astype(mx.float32), np.float64)
    batch, heads, length, _ = q.shape
    group = heads // keys.shape[1]
    keys, values = np.repeat(keys, group, 1), np.repeat(values, group, 1)
    scores = q @ keys.swapaxes(-1, -2) * scale
    scores = scores + bias(mask, batch, keys.shape[1] // group, heads, length, keys.shape[2])
    top = np.maximum(scores.max(-1, keepdims=True, initial=-np.inf), -1e300)
    if sinks is not None:
        logits = np.array(sinks.astype(mx.float32), np.float64).reshape(1, heads, 1, 1)
        top = np.maximum(top, logits)
    weights = np.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(logits - top)
    with np.errstate(invalid="ignore", divide="ignore"):
        return weights / total @ values, (top + np.log(total))[..., 0]


def largest(queries, keys, scale) -> float:
    """The most that a score can be."""
    q = np.abs(np.array(queries.astype(mx.float32), np.float64))
    group = q.shape[1] // keys.shape[1]
    return (q @ np.abs(np.repeat(keys, group, 1)).swapaxes(-1, -2)).max() * abs(scale)


def allowed(queries, keys, values, scale, arithmetic: mx.Dtype, dtype=None) -> float:
    """How far a result may be: its own rounding, and what an error in each score does."""
    off = EPS[arithmetic] * (4 + 2 * largest(queries, keys, scale))
    return np.abs(values).max() * (EPS[dtype or queries.dtype] / 2 + off + 1e-30)


def allowed_lse(queries, keys, scale, arithmetic: mx.Dtype, wanted: np.ndarray) -> np.ndarray:
    """How far a log-sum-exp may be: its own rounding, and an error in each score and in the sum."""
    off = EPS[arithmetic] * (4 + 2 * largest(queries, keys, scale))
    return off + EPS[mx.float32] * (np.abs(wanted) + 4)


def _bools(rng, *shape):
    seen = rng.random(shape) < 0.6
    seen[..., 0] = True
    return mx.array(seen)


def _floats(rng, *shape):
    return mx.array(rng.normal(size=shape).astype(np.float32) * 2)


def _holes(rng, *shape):
    added = rng.normal(size=shape).astype(np.float32)
    hidden = rng.random(shape) < 0.4
    hidden[..., 0] = False
    return mx.array(np.where(hidden, -np.inf, added))


def _lazy(mask):
    """The same mask, in the blocks that are asked for."""

    def block(first, last, start, stop):
        rows = mask if mask.shape[-2] == 1 else mask[..., first:last, :]
        return rows if mask.shape[-1] == 1 else rows[..., start:stop]

    return block


def _lazy_causal(length, columns):
    """None for blocks of which everything is seen, as caches' masks do it."""

    def block(first, last, start, stop):
        if stop <= columns - length + first + 1:
            return None
        last_seen = mx.arange(columns - length + first, columns - length + last)
        return mx.arange(start, stop)[None] <= last_seen[:, None]

    return block


MASKS = {
    "none": lambda rng, b, k, g, n, m: None,
    "causal": lambda rng, b, k, g, n, m: "causal",
    "rank 1": lambda rng, b, k, g, n, m: _bools(rng, m),
    "rank 2": lambda rng, b, k, g, n, m: _bools(rng, n, m),
    "one row": lambda rng, b, k, g, n, m: _bools(rng, 1, m),
    "rank 3, one head": lambda rng, b, k, g, n, m: _bools(rng, 1, n, m),
    "rank 3, by head": lambda rng, b, k, g, n, m: _bools(rng, k * g, n, m),
    "rank 4, by row": lambda rng, b, k, g, n, m: _bools(rng, b, 1, n, m),
    "rank 4, by row and head": lambda rng, b, k, g, n, m: _bools(rng, b, k * g, n, m),
    "rank 4, by head": lambda rng, b, k, g, n, m: _bools(rng, 1, k * g, n, m),
    "rank 5": lambda rng, b, k, g, n, m: _bools(rng, b, k, g, n, m),
    "rank 5, by KV head": lambda rng, b, k, g, n, m: _bools(rng, b, k, 1, n, m),
    "rank 5, by row": lambda rng, b, k, g, n, m: _bools(rng, b, 1, 1, n, m),
    "float rank 2": lambda rng, b, k, g, n, m: _floats(rng, n, m),
    "float rank 4": lambda rng, b, k, g, n, m: _floats(rng, b, 1, n, m),
    "float rank 5": lambda rng, b, k, g, n, m: _floats(rng, b, k, g, n, m),
    "float, one column": lambda rng, b, k, g, n, m: _floats(rng, b, 1, n, 1),
    "float with -inf": lambda rng, b, k, g, n, m: _holes(rng, b, 1, n, m),
    "lazy causal": lambda rng, b, k, g, n, m: _lazy_causal(n, m),
    "lazy rank 2": lambda rng, b, k, g, n, m: _lazy(_bools(rng, n, m)),
    "lazy by row": lambda rng, b, k, g, n, m: _lazy(_bools(rng, b, 1, n, m)),
    "lazy by row and head": lambda rng, b, k, g, n, m: _lazy(_bools(rng, b, k * g, n, m)),
    "lazy, one row": lambda rng, b, k, g, n, m: _lazy(_bools(rng, b, 1, 1, m)),
}
