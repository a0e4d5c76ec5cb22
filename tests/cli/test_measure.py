import mlx.core as mx
import numpy as np
import pytest

from kvfun.cli import _measure, _rows
from kvfun.cli._measure import Plan
from kvfun.cli._text import Passage


@pytest.fixture
def random():
    return np.random.default_rng(0)


def softmax64(logits):
    exponentials = np.exp(logits.astype(np.float64) - logits.max(-1, keepdims=True))
    return exponentials / exponentials.sum(-1, keepdims=True)


def test_log_softmax_is_the_formula(random):
    logits = random.normal(0, 10, (5, 33)).astype(np.float32)
    expected = np.log(softmax64(logits))
    np.testing.assert_allclose(_measure.log_softmax(logits), expected, atol=1e-5)


def test_kl_is_the_formula(random):
    a, b = random.normal(0, 2, (2, 7, 50)).astype(np.float32)
    p, q = softmax64(a), softmax64(b)
    expected = (p * np.log(p / q)).sum(-1)
    found = _measure.kl_divergence(_measure.log_softmax(a), _measure.log_softmax(b))
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    assert (found > 0).all()


def test_kl_of_a_distribution_to_itself_is_zero(random):
    a = _measure.log_softmax(random.normal(0, 2, (7, 50)).astype(np.float32))
    assert (_measure.kl_divergence(a, a) == 0).all()


def test_kl_ignores_tokens_the_reference_excludes():
    half = np.log(np.float32(0.5))
    excluded = np.array([[half, half, -np.inf]], dtype=np.float32)
    assert _measure.kl_divergence(excluded, excluded) == 0
    third = np.full((1, 3), np.log(np.float32(1 / 3)))
    np.testing.assert_allclose(_measure.kl_divergence(excluded, third), np.log(1.5), rtol=1e-6)


def test_scorer_means_over_blocks_of_any_size(random):
    reference = _measure.log_softmax(random.normal(0, 2, (9, 20)).astype(np.float32))
    other = _measure.log_softmax(random.normal(0, 2, (9, 20)).astype(np.float32))
    targets = random.integers(0, 20, 9)
    scorer = _measure.Scorer([reference[:2], reference[2:]])
    scorer.add(other[:2], targets[:2])
    scorer.add(other[2:], targets[2:])
    score = scorer.score()
    assert score.counted == 9
    assert score.nll == pytest.approx(-other[np.arange(9), targets].mean(), rel=1e-5)
    assert score.kl == pytest.approx(_measure.kl_divergence(reference, other).mean())
    assert score.top1 == (reference.argmax(-1) == other.argmax(-1)).mean()


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
@pytest.mark.parametrize("first", [1, 2, 8, 19])
def test_chunks_cover_the_passage_and_never_mix(chunk, first):
    found = list(_measure.chunks(Passage(np.arange(20), first), chunk))
    assert [i for start, stop in found for i in range(start, stop)] == list(range(19))
    for start, stop in found:
        assert stop - start <= chunk
        counted = {position + 1 >= first for position in range(start, stop)}
        assert len(counted) == 1


@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_feeding_in_chunks_scores_like_one_forward_pass(tiny, chunk):
    tokens = np.arange(4, 44, dtype=np.int32)
    passage = Passage(tokens, 15)
    cache = _rows.mlx_lm_row("mlx-lm").make_cache(tiny.model)
    blocks = [b for b in _measure.feed(tiny.model, cache, passage, chunk) if len(b.targets)]
    assert np.concatenate([b.targets for b in blocks]).tolist() == tokens[15:].tolist()
    whole = np.array(tiny.model(mx.array(tokens[None, :-1])))[0, 14:]
    np.testing.assert_allclose(np.concatenate([b.logits for b in blocks]), whole, atol=1e-3)


def test_measure_ranks_bits(tiny):
    rows = [_rows.row(spec) for spec in ("mlx-lm", "mlx-lm-kv8", "mlx-lm-kv4", "mlx-lm-kv2")]
    tokens = (np.arange(96, dtype=np.int32) * 37) % 256 + 4
    passages = [Passage(tokens, 40), Passage(tokens[::-1].copy(), 40)]
    steps = []
    results = _measure.measure(
        tiny.model,
        tiny.dtype,
        rows,
        passages,
        Passage(tokens, 60),
        Plan(96, 2, 96, 3, 16),
        lambda label, count: steps.append((label, count)),
    )
    kl = [result.kl for result in results]
    assert kl[0] == 0
    assert 0 < kl[1] < kl[2] < kl[3]
    assert results[0].top1 == 1
    assert all(result.copy_nll is not None and result.decode_rate > 0 for result in results)
    assert results[1].cache_bytes < results[0].cache_bytes
    assert all(len(result.scores) == 2 and result.kl_error is not None for result in results)
    fed = 2 * 95 + 95 + 3
    for row in rows:
        assert sum(count for label, count in steps if label == row.label) == fed


@pytest.mark.parametrize("seconds", [1e-9, 10.0])
def test_the_pilot_measures_a_rate(tiny, seconds):
    assert _measure.prefill_rate(tiny.model, seconds) > 0


def test_a_spent_budget_leaves_the_copy_test_out(tiny):
    passage = Passage(np.arange(4, 36, dtype=np.int32), 12)
    plan = Plan(32, 1, 32, 2, 16, budget=1e-9)
    results = _measure.measure(
        tiny.model, tiny.dtype, [_rows.row("mlx-lm")], [passage], passage, plan
    )
    assert results[0].copy_nll is None
    assert results[0].decode_rate > 0


def test_a_spent_budget_stops_after_whole_passages(tiny):
    rows = [_rows.row("mlx-lm"), _rows.row("mlx-lm-kv4")]
    passage = Passage(np.arange(4, 36, dtype=np.int32), 12)
    plan = Plan(32, 3, 0, 2, 16, budget=1e-9)
    results = _measure.measure(tiny.model, tiny.dtype, rows, [passage] * 3, None, plan)
    assert [len(result.scores) for result in results] == [1, 1]
    assert results[0].kl_error is None


def test_stored_bits_equal_the_arrays_of_a_full_cache(tiny):
    shapes = _rows.layers(tiny.model)
    assert shapes == [_rows.Layer(1, 64, 64)] * 2
    for spec in ("mlx-lm", "mlx-lm-kv8", "mlx-lm-kv4-g32"):
        row = _rows.row(spec)
        cache = row.make_cache(tiny.model)
        mx.eval(tiny.model(mx.zeros((1, 256), dtype=mx.int32), cache=cache))
        nbytes = sum(layer.nbytes for layer in cache)  # capacity is a multiple of 256
        assert _measure.stored_bytes(row, shapes, tiny.dtype) * 256 == nbytes
        assert _measure.stored_bits(row, shapes, tiny.dtype) == nbytes * 8 / 256 / 256


def test_kvfun_rows_take_their_bits_from_the_codec():
    row = _rows.row("k8v4")
    layer = _rows.Layer(3, 64, 64)
    assert _measure.stored_bits(row, [layer], mx.bfloat16) == 6.5
    assert _measure.stored_bits(row, [layer], mx.float32) == 7.0


def test_raw_tokens_do_not_change_the_price_at_long_context():
    layer = _rows.Layer(3, 64, 64)
    row = _rows.row("kv4:residual=64:raw_sinks=4")
    assert _measure.stored_bits(row, [layer], mx.bfloat16) == 4.5


def test_mlx_lm_quantizes_full_layers_only():
    shapes = [_rows.Layer(1, 64, 64), _rows.Layer(1, 64, 64, full=False)]
    assert _measure.stored_bits(_rows.row("mlx-lm-kv4"), shapes, mx.float16) == (4.5 + 16) / 2
    assert _measure.stored_bits(_rows.row("kv4"), shapes, mx.float16) == 4.5


def test_a_model_without_attention_layers_stores_no_bits():
    assert _measure.stored_bits(_rows.row("kv4"), [], mx.float16) == 0


@pytest.mark.parametrize("rate", [1.0, 14.0, 170.0, 1e5])
def test_plans_keep_to_the_budget(rate):
    plan = _measure.plan(rate, rows=7, budget=240, decoded=16, chunk=128)
    assert plan.length % 32 == 0
    assert plan.copied % 2 == 0
    assert 64 <= plan.length <= 512
    if plan.length > 64:
        assert 7 * plan.tokens / rate <= 240


def test_more_speed_means_more_text():
    plans = [_measure.plan(rate, 7, 240, 16, 128) for rate in (14, 60, 170, 600)]
    tokens = [plan.tokens for plan in plans]
    assert tokens == sorted(tokens)
    assert tokens[0] < tokens[-1]
