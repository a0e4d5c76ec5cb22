"""Statistics of a prompt: a cache encoded by what its queries look for."""

from __future__ import annotations

import itertools

import mlx.core as mx
import numpy as np
import pytest

import kvfun
from kvfun import tree
from kvfun.codecs import Centred, Codec, Rope, learnt_arrays, with_rope
from kvfun.errors import CodecError, ShapeError

HEADS, KV_HEADS, DIM = 6, 2, 64
SPECS = ("rot-k4v4-ldlq", "rot-k4v4-bal", "rot-k3v3-ldlq-log", "rot-k2v2-tcq-bal-log")
ROPE = Rope.of(DIM, 100000.0)


def skewed(seed: int, heads: int, tokens: int, batch: int = 1) -> mx.array:
    """Vectors whose channels are correlated, differently by KV head."""
    random = np.random.default_rng(seed)
    group = heads // KV_HEADS
    mixing = [random.standard_normal((DIM, DIM)) * np.exp(random.standard_normal(DIM))] * group
    for _ in range(KV_HEADS - 1):
        more = random.standard_normal((DIM, DIM)) * np.exp(random.standard_normal(DIM))
        mixing = [*mixing, *([more] * group)]
    x = random.standard_normal((batch, heads, tokens, DIM))
    x = x @ np.stack(mixing)[None] / DIM**0.5
    return mx.array(x.astype(np.float32))


def prompt(batch: int = 1, tokens: int = 200, **options):
    keys = mx.concatenate([skewed(i, KV_HEADS, tokens) for i in range(batch)])
    values = mx.concatenate([skewed(9 + i, KV_HEADS, tokens) for i in range(batch)])
    queries = mx.concatenate([skewed(19 + i, HEADS, tokens) for i in range(batch)])
    cache = kvfun.append(kvfun.empty("plain", **{"raw_sinks": 4, **options}), keys, values)
    return cache, keys, values, queries


def logit_error(cache, keys, queries) -> float:
    got, _ = kvfun.fetch(cache)
    grouped = queries.reshape(queries.shape[0], KV_HEADS, -1, DIM)
    wrong = grouped @ (got - keys).swapaxes(-1, -2)
    return mx.mean(wrong**2).item()


@pytest.mark.parametrize("spec", ["rot-k4v4-ldlq", "rot-k4v4-bal", "rot-k2v2-tcq-bal-log"])
def test_scores_of_such_queries_are_nearer_than_without(spec):
    cache, keys, _, queries = prompt()
    plainly = spec.replace("-ldlq", "").replace("-bal", "")
    before = logit_error(kvfun.convert(cache, plainly), keys, queries)
    after = logit_error(kvfun.calibrate(cache, queries, spec), keys, queries)
    assert after < 0.5 * before


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("options", [{}, {"residual": 16, "block": 8}, {"raw_sinks": 0}])
def test_it_is_the_tokens_appended_to_a_cache_of_the_same_codec(spec, options):
    cache, keys, values, queries = prompt(**options)
    made = kvfun.calibrate(cache, queries, with_rope(Codec.of(spec), ROPE))
    fresh = kvfun.empty(made.codec, **{"raw_sinks": 4, **options})
    assert type(fresh) is type(made)
    for start in range(0, 200, 37):
        block = keys[:, :, start : start + 37], values[:, :, start : start + 37]
        fresh = kvfun.append(fresh, *block)
    for one, other in zip(kvfun.fetch(made), kvfun.fetch(fresh), strict=True):
        assert mx.array_equal(one, other).item()
    assert tree.equal(learnt_arrays(made.codec)[0], learnt_arrays(fresh.codec)[0])


@pytest.mark.parametrize("spec", SPECS)
def test_it_is_frozen_and_travels_with_the_rows(spec):
    batch, keys, values, queries = prompt(batch=3)
    rows = [
        kvfun.calibrate(row, queries[i : i + 1], spec) for i, row in enumerate(kvfun.unstack(batch))
    ]
    together = kvfun.calibrate(batch, queries, spec)
    learnt, _ = learnt_arrays(together.codec)
    assert {array.shape[0] for name, array in learnt.items() if "rope" not in name} == {3}
    for cache in (together, kvfun.stack(rows)):
        later = kvfun.append(cache, keys[:, :, :9], values[:, :, :9])
        later = kvfun.rollback(later, [3, 0, 5])
        later = kvfun.append(later, keys[:, :, 9:20], values[:, :, 9:20])
        picked = kvfun.take(later, [2, 0])
        for index, row in enumerate((2, 0)):
            alone = kvfun.append(
                rows[row], keys[row : row + 1, :, :9], values[row : row + 1, :, :9]
            )
            alone = kvfun.rollback(alone, [3, 0, 5][row])
            block = keys[row : row + 1, :, 9:20], values[row : row + 1, :, 9:20]
            alone = kvfun.append(alone, *block)
            got, _ = kvfun.fetch(kvfun.unstack(picked)[index])
            expected, _ = kvfun.fetch(alone)
            # the moments of a batch may be summed in another order
            assert mx.mean((got - expected) ** 2).item() < 2e-3 * mx.mean(expected**2).item()
    exact = kvfun.stack(rows)
    for row, one in zip(kvfun.unstack(exact), rows, strict=True):
        assert tree.equal(learnt_arrays(row.codec)[0], learnt_arrays(one.codec)[0])
        assert all(
            mx.array_equal(a, b).item()
            for a, b in zip(kvfun.fetch(row), kvfun.fetch(one), strict=True)
        )


def test_tokens_that_come_one_by_one_are_encoded_as_together():
    cache, keys, values, queries = prompt()
    for spec in SPECS:
        made = kvfun.calibrate(cache, queries, spec)
        whole = kvfun.append(made, keys, values)
        one_by_one = made
        for start, stop in itertools.pairwise([0, 1, 2, 3, 20, 71, 200]):
            one_by_one = kvfun.append(one_by_one, keys[:, :, start:stop], values[:, :, start:stop])
        for one, other in zip(kvfun.fetch(whole), kvfun.fetch(one_by_one), strict=True):
            assert mx.array_equal(one, other).item(), spec


def test_attention_is_that_over_what_is_decoded():
    cache, _, _, queries = prompt()
    for spec in SPECS:
        made = kvfun.calibrate(cache, queries, with_rope(Codec.of(spec), ROPE))
        keys, values = [mx.repeat(x, HEADS // KV_HEADS, axis=1) for x in kvfun.fetch(made)]
        for count in (1, 40):
            asked = queries[:, :, -count:]
            scores = asked @ keys.swapaxes(-1, -2) * DIM**-0.5
            seen = mx.arange(200)[None] <= mx.arange(200 - count, 200)[:, None]
            weights = mx.softmax(mx.where(seen, scores, -1e9), axis=-1, precise=True)
            got = kvfun.attend(made, asked, phase="decode" if count == 1 else "window")
            assert mx.allclose(got, weights @ values, atol=2e-4).item(), spec


def test_odd_prompts_stay_finite():
    _, keys, values, queries = prompt()
    hole = mx.where(mx.arange(200)[:, None] == 50, mx.nan, keys)
    for odd, asked in (
        (mx.zeros_like(keys), queries),
        (keys * 1e4, queries),
        (keys * 1e-4, queries * 1e-4),
        (mx.broadcast_to(keys[:, :, 7:8], keys.shape), queries),
        (keys, mx.zeros_like(queries)),
        (keys, mx.broadcast_to(queries[:, :, 7:8], queries.shape)),
        (hole, queries),
    ):
        for spec in SPECS:
            cache = kvfun.append(kvfun.empty("plain", raw_sinks=4), odd, values)
            made = kvfun.calibrate(cache, asked, spec)
            got, _ = kvfun.fetch(made)
            wrong = mx.isfinite(got).all(axis=-1) != mx.isfinite(odd).all(axis=-1)
            assert not wrong.any().item(), spec
            if odd is not hole:
                error = mx.mean((got - odd) ** 2).item()
                assert error <= 0.25 * mx.mean(odd**2).item() + 1e-12, spec


def test_what_cannot_be_calibrated_says_why():
    cache, _, _, queries = prompt()
    for spec in ("rot-k4v4", "kv4", "plain", "turbo-k8v3", "f32+rot4"):
        with pytest.raises(CodecError, match="no use for queries"):
            kvfun.calibrate(cache, queries, spec)
    made = kvfun.calibrate(cache, queries, "rot-k4v4-ldlq")
    with pytest.raises(CodecError, match="already"):
        kvfun.calibrate(made, queries, "rot-k4v4-ldlq")
    short, *_, few = prompt(tokens=4)
    with pytest.raises(CodecError, match="too short"):
        kvfun.calibrate(short, few, "rot-k4v4-ldlq")
    for wrong in (queries[..., :32], queries[:, :5], queries[0]):
        with pytest.raises(ShapeError):
            kvfun.calibrate(cache, wrong, "rot-k4v4-ldlq")
    with pytest.raises(ShapeError, match="empty"):
        kvfun.calibrate(kvfun.empty("plain"), queries, "rot-k4v4-ldlq")
    with pytest.raises(ShapeError, match="View"):
        kvfun.calibrate(kvfun.view(cache), queries, "rot-k4v4-ldlq")


@pytest.mark.parametrize("spec", ["rot-k4v4-ldlq", "rot-k3v3-bal-log"])
def test_without_statistics_nothing_can_be_stored(spec):
    keys = mx.zeros((1, 2, 3, 64))
    for empty in (kvfun.empty(spec), kvfun.empty(spec, raw_sinks=0, residual=4)):
        with pytest.raises(CodecError, match=r"kvfun\.calibrate"):
            kvfun.append(empty, keys, keys)


def test_statistics_of_another_shape_are_refused():
    cache, _, _, queries = prompt()
    codec = kvfun.calibrate(cache, queries, "rot-k4v4-bal").codec
    narrow = mx.zeros((1, KV_HEADS, 3, 32))
    with pytest.raises(CodecError, match="head_dim of 32"):
        kvfun.append(kvfun.empty(codec, raw_sinks=0), narrow, narrow)
    assert isinstance(codec.keys, Centred)
    inner = kvfun.replace(codec.keys.codec, statistics="ldlq")
    mixed = kvfun.replace(codec, keys=kvfun.replace(codec.keys, codec=inner))
    with pytest.raises(CodecError):
        kvfun.append(kvfun.empty(mixed, raw_sinks=0), cache.tail.keys[0], cache.tail.keys[0])


def test_rows_with_and_without_statistics_are_not_batched():
    cache, _, _, queries = prompt()
    with_queries = kvfun.calibrate(cache, queries, "rot-k4v4-bal")
    other = kvfun.empty(with_queries.codec, raw_sinks=4)
    assert kvfun.offsets(kvfun.stack([with_queries, other])) == (200, 0)
    with pytest.raises(CodecError):
        kvfun.stack([with_queries, kvfun.empty("rot-k4v4-bal", raw_sinks=4)])


def test_the_basis_costs_little_and_is_counted():
    cache, _, _, queries = prompt()
    made = kvfun.calibrate(cache, queries, "rot-k4v4-bal")
    held = sum(x.nbytes for x in learnt_arrays(made.codec)[0].values())
    assert held == 4 * KV_HEADS * (2 * DIM * DIM + DIM)
    parts = [tree.nbytes((part.keys, part.values)) for part in made.parts]
    assert kvfun.nbytes(made) == held + sum(parts)
