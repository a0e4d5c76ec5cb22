"""The default model on real text; runs with KVFUN_REAL_MODEL=1."""

import os

import pytest

from kvfun.cli import _generate, _matmul, _measure, _model, _rows, _text

WANTED = os.environ.get("KVFUN_REAL_MODEL") == "1"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not WANTED, reason="minutes of work on a CPU: set KVFUN_REAL_MODEL=1"),
]


@pytest.fixture(scope="module")
def smollm2():
    return _model.load(None)


def test_more_bits_are_closer(smollm2):
    rows = [_rows.row(spec) for spec in ("bf16", "f32", "kv8", "kv4", "kv2")]
    text = _text.read_text(None)
    passages = _text.passages(smollm2.tokenizer, text, 1, 256)
    copy = _text.copy_passage(smollm2.tokenizer, text, 192)
    plan = _measure.Plan(256, 1, 192, 2, 64)
    with _matmul.by_numpy(smollm2.model):
        results = _measure.measure(smollm2.model, smollm2.dtype, rows, passages, copy, plan)
    bf16, f32, kv8, kv4, kv2 = results
    assert f32.perplexity == pytest.approx(bf16.perplexity, rel=0.01)
    assert kv8.perplexity == pytest.approx(bf16.perplexity, rel=0.02)
    assert kv8.perplexity < kv4.perplexity < kv2.perplexity
    assert kv8.kl < kv4.kl < kv2.kl
    assert kv8.top1 > kv4.top1 > kv2.top1
    assert bf16.copy_nll < kv4.copy_nll < kv2.copy_nll


def test_raw_tokens_are_worth_much(smollm2):
    """Measured: a tenth of the divergence, on passages of 512 and 800 tokens."""
    rows = [_rows.row(spec) for spec in ("bf16", "kv4", "kv4:residual=64:raw_sinks=4")]
    passages = _text.passages(smollm2.tokenizer, _text.read_text(None), 1, 384)
    plan = _measure.Plan(384, 1, 0, 2, 32)
    with _matmul.by_numpy(smollm2.model):
        results = _measure.measure(smollm2.model, smollm2.dtype, rows, passages, None, plan)
    _, kv4, raw = results
    assert raw.kl < kv4.kl / 4
    assert raw.top1 > kv4.top1


def test_the_capital_of_france(smollm2):
    pieces = []
    summary = _generate.generate(
        smollm2,
        _rows.row("bf16"),
        "The capital of France is",
        pieces.append,
        max_tokens=4,
        temperature=0.0,
        chat=False,
    )
    assert "".join(pieces).lstrip().startswith("Paris.")  # mlx-lm may drop the first space
    assert summary.stored == "30 layers bf16 full"
