"""The fidelity bench, on a model and texts that mean nothing."""

from __future__ import annotations

import importlib
import itertools
import json
import math
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("mlx_lm")

from mlx_lm.models import llama

from kvfun.errors import SpecError, StorageError
from kvfun.interop.mlx_lm import make_prompt_cache

ROOT = Path(__file__).parents[1]
if not (ROOT / "bench").is_dir():
    pytest.skip("the benchmarks are not installed with kvfun", allow_module_level=True)

PLAN = {"passages": 4, "copies": 2, "length": 64, "chunk": 16, "first": 32, "copied": 40}


@pytest.fixture
def fidelity(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("bench.fidelity")


@pytest.fixture(scope="module")
def model():
    mx.random.seed(3)
    args = llama.ModelArgs("llama", 128, 2, 64, 2, 1e-5, 90, num_key_value_heads=1, head_dim=64)
    made = llama.Model(args)
    mx.eval(made.parameters())
    return made


@pytest.fixture
def bench(fidelity, model):
    mx.random.seed(4)
    passages = mx.random.randint(0, 90, (4, 64))
    halves = mx.random.randint(0, 90, (2, 32))
    tokens = mx.concatenate([passages, mx.concatenate([halves, halves], axis=1)])
    made = fidelity.Bench(SimpleNamespace(model=model), tokens, fidelity.Plan(**PLAN))
    made.run("f32")
    return made


def log_softmax(logits):
    x = np.array(logits, dtype=np.float64)
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def by_hand(bench, spec):
    """The same numbers from all logits at once, in NumPy."""
    from kvfun.interop.mlx_lm import attention

    found = {}
    for name in ("f32", spec):
        cache = make_prompt_cache(bench.model, name)
        with attention(bench.model):
            parts = [
                bench.model(bench.tokens[:, i : i + 16], cache=cache) for i in range(0, 64, 16)
            ]
        found[name] = log_softmax(mx.concatenate(parts, axis=1))[:, :-1]
    targets = np.array(bench.tokens)[:, 1:]
    right, other = found["f32"], found[spec]
    nll = -np.take_along_axis(other, targets[..., None], axis=-1)[..., 0]
    kl = (np.exp(right) * (right - other)).sum(axis=-1)
    same = right.argmax(axis=-1) == other.argmax(axis=-1)
    return {
        "kl": kl[:4, 32:].mean(axis=1),
        "nll": nll[:4, 32:].mean(axis=1),
        "top1": same[:4, 32:].mean(axis=1),
        "copy": nll[4:, 40:].mean(axis=1),
    }


@pytest.mark.parametrize("spec", ["kv3", "rot-k3v2-log"])
def test_the_numbers_are_those_of_all_logits(bench, spec):
    result, expected = bench.run(spec), by_hand(bench, spec)
    for name, numbers in expected.items():
        assert np.allclose(getattr(result, name), numbers, rtol=2e-2, atol=1e-4), name
    assert min(result.kl) > 0


def test_the_reference_is_off_from_nothing(bench):
    result = bench.run("f32")
    assert np.allclose(result.kl, 0, atol=1e-6)
    assert result.top1 == [1.0] * 4
    assert np.allclose(bench.run("mlx-lm").kl, 0, atol=1e-5)


@pytest.mark.parametrize(
    ("spec", "bits", "raw"),
    [
        ("f32", 32, 0),
        ("kv4-f16", 4.5, 0),
        ("kv4", 4.5, 0),
        ("mlx-lm-kv4", 4.5, 0),
        ("rot-k4v4-log", 4.125, 16),
        ("rot-k4v4-log:raw_sinks=4", 4.125, 4),
        ("rot-k5v3", 4.25, 16),
        ("kv4-f16:residual=16:block=16:raw_sinks=4", 4.5, 4 + 28),
        ("rot-k4v4-log@32", 4.125, 16),
    ],
)
def test_bits_are_those_of_an_encoded_token_and_raw_ones_are_added(bench, spec, bits, raw):
    result = bench.run(spec)
    assert result.bits == bits
    assert result.bits_at_length == pytest.approx(bits + raw / 64 * (16 - bits))
    assert result.library == ("mlx-lm" if spec.startswith("mlx") else "kvfun")


def test_prompts_and_layers(bench):
    calibrated = bench.run("rot-k3v3-bal-log@32")
    assert len(calibrated.kl) == 4
    layered = bench.run("layers=3.0-log")
    assert len(layered.layers) == 2
    assert bench.known is not None
    assert layered.bits <= 3.0 + 8 / 64
    both = bench.run("layers=2.5-tcq-bal-log@32")
    assert all("bal" in spec for spec in both.layers)
    for spec in ("rot-k4v4-ldlq@8", "rot-k4v4-ldlq@48"):
        with pytest.raises(SpecError, match="multiple of 16"):
            bench.run(spec)


points = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), max_size=8)


@given(points)
def test_the_front_is_what_none_beats(points):
    import sys

    sys.path.insert(0, str(ROOT))
    from bench.fidelity import pareto

    front = {points[i] for i in pareto(points)}
    for mine in points:
        beaten = any(
            other != mine and other[0] <= mine[0] and other[1] <= mine[1] for other in points
        )
        assert (mine in front) != beaten


def test_ratios_are_of_pairs(fidelity):
    mean, error = fidelity.ratio([0.2, 0.4], [0.1, 0.1])
    assert mean == pytest.approx(math.sqrt(8))
    assert error == pytest.approx(math.exp(math.log(2) / 2))
    assert math.isnan(fidelity.ratio([0.0], [0.0])[0])


@pytest.fixture
def command(fidelity, bench, model, monkeypatch):
    monkeypatch.setattr(
        fidelity._model, "load", lambda name: SimpleNamespace(model=model, tokenizer=None)
    )
    monkeypatch.setattr(fidelity, "texts", lambda tokenizer, plan: bench.tokens[:, : plan.length])
    return fidelity.main


def test_the_command_writes_what_it_measured_and_goes_on(fidelity, command, tmp_path, capsys):
    file, plot = tmp_path / "rows.json", tmp_path / "rows.png"
    options = ["--passages", "4", "--length", "64", "--chunk", "16", "--json", str(file)]
    command([*options, "--specs", "kv4-f16,mlx-lm-kv4", "--plot", str(plot)])
    said = json.loads(file.read_text())
    assert [row["spec"] for row in said["rows"]] == ["f32", "kv4-f16", "mlx-lm-kv4"]
    assert said["plan"]["length"] == 64
    assert said["machine"]["mlx"]
    assert plot.stat().st_size > 1000
    assert "| 4.500 |" in capsys.readouterr().out
    rows = command([*options, "--specs", "kv4-f16,kv2-f16", "--resume"])
    assert [row.spec for row in rows] == ["f32", "kv4-f16", "mlx-lm-kv4", "kv2-f16"]
    assert rows[1].kl == said["rows"][1]["kl"]
    other = ["--passages", "4", "--length", "48", "--json", str(file), "--resume"]
    with pytest.raises(StorageError, match="another plan"):
        command(other)
    file.write_text("{}")
    with pytest.raises(StorageError):
        command([*options, "--resume"])


def test_texts_are_cut_as_the_recipe_says(fidelity, monkeypatch):
    monkeypatch.setattr(fidelity, "debian_reference", lambda: "p" * 900_000)
    monkeypatch.setattr(
        fidelity._text, "read_text", lambda _: SimpleNamespace(content="h" * 250_000)
    )
    tokenizer = SimpleNamespace(encode=lambda text: [*itertools.islice(map(ord, text), 2000)])
    tokens = fidelity.texts(tokenizer, fidelity.Plan())
    assert tokens.shape == (15, 800)
    first = [chr(int(row[0].item())) for row in tokens]
    assert first == [*"pppppphhhhhh", *"php"]
