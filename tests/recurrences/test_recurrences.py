"""Recurrences: float64 NumPy, and blocks, padding and rounds that change no bit."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvfun
from kvfun import recurrences as r
from kvfun.testing import RECURRENCES, check_recurrence, spans

DTYPES = (mx.float32, mx.bfloat16, mx.float16)


@pytest.mark.parametrize("name", RECURRENCES)
@given(data=st.data(), seed=st.integers(0, 2**31 - 1))
def test_blocks_padding_and_rounds_change_no_bit(name, data, seed):
    batch, tokens = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 9))
    dtype = data.draw(st.sampled_from(DTYPES))
    recurrence, inputs = RECURRENCES[name](mx.random.key(seed), batch, tokens, dtype)
    check_recurrence(recurrence, inputs, data.draw(spans(batch, tokens)))


@pytest.mark.parametrize("name", RECURRENCES)
def test_padding_may_be_anything(name):
    recurrence, inputs = RECURRENCES[name](mx.random.key(3), 2, 7, mx.float32)
    dirty = {n: x * 1 for n, x in inputs.items()}
    for x in dirty.values():
        x[0, :2] = float("nan")
        x[1, 5:] = float("inf")
    cache = kvfun.prepare(kvfun.recurrent(2), [7, 5], left_padding=[2, 0])
    _, clean = kvfun.advance(cache, recurrence, inputs)
    _, cache = kvfun.advance(cache, recurrence, dirty)
    for state in clean.states:
        assert mx.array_equal(cache.states[state], clean.states[state]).item(), state


def test_a_recurrence_that_lets_padding_in_is_found():
    class Sum:
        def start(self, inputs):
            return {"sum": mx.zeros((inputs["x"].shape[0], inputs["x"].shape[2]))}

        def run(self, states, inputs, spans=None):
            total = states["sum"][:, None] + mx.cumsum(inputs["x"], axis=1)
            return total, {"sum": total[:, -1]}

    with pytest.raises(AssertionError, match="differs"):
        check_recurrence(Sum(), {"x": mx.random.normal((2, 4, 3))}, [(0, 4), (0, 2)])


def test_states_that_do_not_begin_as_zeros_are_found():
    class Ones(r.ShortConv):
        def start(self, inputs):
            return {n: x + 1 for n, x in super().start(inputs).items()}

    with pytest.raises(AssertionError, match="zeros"):
        check_recurrence(Ones(mx.ones((3, 2))), {"x": mx.ones((1, 4, 3))}, [(0, 4)])


# -- float64 --------------------------------------------------------------------------------------


def f64(x):
    return np.array(x.astype(mx.float32)).astype(np.float64)


def silu(x):
    return x / (1 + np.exp(-x))


def softplus(x):
    return np.log1p(np.exp(-np.abs(x))) + np.maximum(x, 0)


def convolved(x, weight, bias=0.0):
    padded = np.concatenate([np.zeros((len(x), weight.shape[1] - 1, x.shape[2])), x], axis=1)
    return bias + sum(padded[:, i : i + x.shape[1]] * weight[:, i] for i in range(weight.shape[1]))


def run(name, tokens=9, batch=2):
    recurrence, inputs = RECURRENCES[name](mx.random.key(11), batch, tokens, mx.float32)
    out, cache = kvfun.advance(kvfun.recurrent(batch), recurrence, inputs)
    return recurrence, {n: f64(x) for n, x in inputs.items()}, f64(out), cache


def close(ours, oracle):
    np.testing.assert_allclose(ours, oracle, rtol=2e-5, atol=2e-5)


def test_short_conv_is_a_convolution():
    recurrence, inputs, out, cache = run("short conv")
    close(out, convolved(inputs["x"], f64(recurrence.weight), f64(recurrence.bias)))
    close(f64(cache.states["conv"]), inputs["x"][:, -2:])


def test_gated_delta_in_float64():
    recurrence, inputs, out, cache = run("gated delta")
    heads, dim = recurrence.key_heads, recurrence.key_dim
    x = silu(convolved(inputs["qkv"], f64(recurrence.weight)))
    q, k, v = np.split(x, [heads * dim, 2 * heads * dim], axis=-1)
    q, k = [y.reshape(*y.shape[:2], heads, dim) for y in (q, k)]
    q, k = [y / np.sqrt((y**2).sum(-1, keepdims=True) + 1e-6) for y in (q, k)]
    v = v.reshape(*v.shape[:2], -1, recurrence.value_dim)
    values = v.shape[2]
    q, k = [np.repeat(y, values // heads, axis=2) for y in (q * dim**-0.5, k)]
    g = np.exp(-np.exp(f64(recurrence.a_log)) * softplus(inputs["a"] + f64(recurrence.dt_bias)))
    b = 1 / (1 + np.exp(-inputs["b"]))
    state = np.zeros((2, values, recurrence.value_dim, dim))
    outs = []
    for t in range(x.shape[1]):
        state = state * g[:, t, :, None, None]
        delta = v[:, t] - np.einsum("bhvk,bhk->bhv", state, k[:, t])
        state = state + np.einsum("bhv,bhk->bhvk", delta * b[:, t, :, None], k[:, t])
        outs.append(np.einsum("bhvk,bhk->bhv", state, q[:, t]))
    close(out, np.stack(outs, axis=1))
    close(f64(cache.states["recurrent"]), state)
    assert cache.states["recurrent"].dtype == mx.float32


@pytest.mark.parametrize("vector", [False, True])
def test_gated_delta_of_vector_gates_and_of_plain_ones_agree(vector):
    """A vector whose numbers are all the gate is the gate: the composed path against MLX's."""
    key = mx.random.split(mx.random.key(5), 6)
    q, k = [mx.random.normal((2, 6, 2, 32), key=key[i]) * 32**-0.5 for i in (0, 1)]
    v = mx.random.normal((2, 6, 4, 16), key=key[2])
    g, b = [mx.sigmoid(mx.random.normal((2, 6, 4), key=key[i])) for i in (3, 4)]
    state = mx.random.normal((2, 4, 16, 32), key=key[5])
    wide = mx.broadcast_to(g[..., None], (2, 6, 4, 32))
    one = r.gated_delta(state, q, k, v, wide if vector else g, b, ((1, 6), (0, 4)))
    other = r.gated_delta(state, q, k, v, g, b, ((1, 6), (0, 4)))
    close(f64(one[1]), f64(other[1]))
    close(f64(one[0])[0, 1:], f64(other[0])[0, 1:])
    close(f64(one[0])[1, :4], f64(other[0])[1, :4])


def test_mamba2_in_float64():
    recurrence, inputs, out, cache = run("mamba2")
    heads = recurrence.a_log.shape[0]
    x = silu(convolved(inputs["xbc"], f64(recurrence.weight), f64(recurrence.bias)))
    side = recurrence.groups * recurrence.state
    x, b, c = np.split(x, [x.shape[2] - 2 * side, x.shape[2] - side], axis=-1)
    x = x.reshape(*x.shape[:2], heads, -1)
    b, c = [
        np.repeat(y.reshape(*y.shape[:2], recurrence.groups, -1), heads // recurrence.groups, 2)
        for y in (b, c)
    ]
    dt = np.clip(softplus(inputs["dt"] + f64(recurrence.dt_bias)), *recurrence.limits)
    a = -np.exp(f64(recurrence.a_log))
    h, outs = 0.0, []
    for t in range(x.shape[1]):
        new = np.einsum("bhp,bhn->bhpn", dt[:, t, :, None] * x[:, t], b[:, t])
        h = h * np.exp(dt[:, t] * a)[..., None, None] + new
        y = np.einsum("bhpn,bhn->bhp", h, c[:, t])
        outs.append(y + x[:, t] * f64(recurrence.skip)[:, None])
    close(out, np.stack(outs, axis=1))
    close(f64(cache.states["scan"]), h)


def test_selective_scan_in_float64():
    recurrence, inputs, out, cache = run("selective scan")
    x, dt, b, c = [inputs[name] for name in ("x", "dt", "b", "c")]
    a = -np.exp(f64(recurrence.a_log))
    h, outs = 0.0, []
    for t in range(x.shape[1]):
        h = np.exp(dt[:, t, :, None] * a) * h + (dt[:, t] * x[:, t])[..., None] * b[:, t, None]
        outs.append((h * c[:, t, None]).sum(-1) + x[:, t] * f64(recurrence.skip))
    close(out, np.stack(outs, axis=1))
    close(f64(cache.states["scan"]), h)


def test_linear_attention_is_attention_with_a_decay():
    recurrence, inputs, out, _ = run("linear attention")
    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    tokens = q.shape[1]
    age = np.arange(tokens)[:, None] - np.arange(tokens)
    decay = np.exp(f64(recurrence.decay)[:, None, None] * np.maximum(age, 0)) * (age >= 0)
    scores = np.einsum("bthd,bshd->bhts", q, k) * decay * recurrence.scale
    close(out, np.einsum("bhts,bshd->bthd", scores, v))


def test_gated_linear_unit_in_float64():
    recurrence, inputs, out, cache = run("gated linear unit")
    x, gate, i = inputs["x"], inputs["r"], inputs["i"]
    h, outs = 0.0, []
    for t in range(x.shape[1]):
        a = np.exp(-8 * gate[:, t] * softplus(f64(recurrence.weight)))
        h = a * h + (np.sqrt(1 - a**2) if t else 1.0) * i[:, t] * x[:, t]
        outs.append(h)
    close(out, np.stack(outs, axis=1))
    close(f64(cache.states["hidden"]), h)
