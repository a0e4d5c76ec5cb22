"""What fits, how long a text may be, and how fast it decodes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfun import scheme as s
from kvfun.errors import BudgetError
from kvfun.scheme import KvScheme, Layer, Model, State, Stream, Weights

from .models import LLAMA_8B, SMOLLM2, models

SMOL = Model.from_config(SMOLLM2)
MB, GB = 10**6, 10**9


def total(model, weights, tokens, scheme, chunk=2048, reserve=0):
    kv = s.kv_allocated_bytes_at(model, tokens, scheme, chunk=chunk, peak=True)
    scores = s.sdpa_fallback_bytes(model, chunk, tokens)
    return weights + kv + min(chunk, tokens) * 550_000 + scores + reserve


@given(
    usable=st.integers(0, 4 * GB),
    weights=st.integers(0, 300 * MB),
    text=st.sampled_from(("bf16", "kv4", "kv4-start5000", "rot-k4v4-log", "turbo-k8v3")),
    chunk=st.sampled_from((64, 2048)),
    reserve=st.integers(0, 100 * MB),
)
def test_the_largest_context_fits_and_one_token_more_does_not(
    usable, weights, text, chunk, reserve
):
    plan = s.memory_plan(SMOL, weights, usable, None, text, chunk=chunk, reserve=reserve)
    if plan.largest >= 0:
        assert total(SMOL, weights, plan.largest, text, chunk, reserve) <= usable
        assert plan.fits
        assert plan.total == total(SMOL, weights, plan.largest, text, chunk, reserve)
    else:
        assert not plan.fits
    if plan.largest < plan.limit:
        assert total(SMOL, weights, plan.largest + 1, text, chunk, reserve) > usable


@given(model=models(), usable=st.integers(0, 10**8), text=st.sampled_from(("bf16", "kv8-g32")))
def test_no_longer_context_fits_in_any_model(model, usable, text):
    try:
        KvScheme.of(text).assigned(model)
    except ValueError:
        return
    plan = s.memory_plan(model, 0, usable, None, text, chunk=16)
    for more in (1, 2, 17, 300, 5000):
        if plan.largest + more <= plan.limit:
            assert total(model, 0, plan.largest + more, text, 16) > usable


def test_a_context_that_was_asked_for():
    plan = s.memory_plan(SMOL, 100 * MB, GB, 8000, "bf16")
    assert (plan.context, plan.limit) == (8000, 8192)
    assert plan.kv == 23_040 * 8192
    assert plan.transient == 2048 * 550_000
    assert plan.total == 100 * MB + plan.kv + plan.transient
    assert not plan.fits
    assert s.memory_plan(SMOL, 100 * MB, 2 * GB, 8000, "bf16").fits


def test_rows_that_are_decoded_together():
    one, four = [s.memory_plan(SMOL, 0, GB, 4000, "bf16", rows=n) for n in (1, 4)]
    assert four.kv == 4 * one.kv


def test_a_model_that_says_no_positions_is_asked_about_a_million():
    assert s.memory_plan(Model("m", (Layer("none"),)), 0, 4 * GB).largest == 1 << 20


def test_the_speed_is_what_the_bandwidth_allows():
    llama, weights = Model.from_config(LLAMA_8B), 16 * GB
    plan = s.memory_plan(llama, weights, 64 * GB, 8192, "bf16", bandwidth=400 * GB)
    assert plan.tokens_per_second == pytest.approx(400 * GB * 0.82 / (16 * GB + 2**30))
    experts = Weights(16 * GB, skipped=12 * GB)
    fast = s.decode_speed(llama, experts, 8192, 400 * GB, "bf16")
    assert fast == pytest.approx(400 * GB * 0.76 / (4 * GB + 2**30))
    assert s.decode_speed(llama, experts, 8192, None) is None


def test_the_chunk_of_a_recurrent_model_is_halved_while_its_scores_are_too_many():
    full = Layer("full", 16, (Stream(2, 256, 256),))
    hybrid = Model("m", (full, Layer("recurrent", state=State(1, 1))))
    # 16 heads x chunk x 131072 keys x 2 bytes: 4 MiB a query
    assert s.prefill_chunk(hybrid, 131072) == 256
    assert s.prefill_chunk(hybrid, 131072, scores=1) == 8
    assert s.prefill_chunk(hybrid, 100) == 2048
    assert s.prefill_chunk(Model("m", (full,)), 131072) == 2048


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("16GB", 16 * GB),
        ("16 gb", 16 * GB),
        ("16GiB", 16 * 2**30),
        ("1.5MB", 1_500_000),
        ("512", 512),
        ("7b", 7),
        ("2T", 2 * 10**12),
    ],
)
def test_bytes_as_people_write_them(text, count):
    assert s.bytes_of(text) == count


@pytest.mark.parametrize("text", ["", "GB", "16XB", "-1GB", "1e30", "nan", "inf", 16, None])
def test_what_is_no_number_of_bytes(text):
    with pytest.raises(BudgetError, match="16GB"):
        s.bytes_of(text)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("weights", (-1, GB)),
        ("weights", (1.5, GB)),
        ("usable", (0, True)),
        ("usable", (0, "1GB")),
    ],
)
def test_bad_budgets(name, arguments):
    with pytest.raises(BudgetError, match=name):
        s.memory_plan(SMOL, *arguments)
