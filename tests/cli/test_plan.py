"""``kvfun plan`` and ``kvfun probe``: nothing is loaded."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from kvfun.cli import _app, _plan
from kvfun.errors import BudgetError, ConfigError, SpecError, StorageError, UnsupportedError
from kvfun.scheme import Model, memory_plan

CONFIG = {
    "model_type": "llama",
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "vocab_size": 49152,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
WEIGHTS = 134_515_008 * 2  # SmolLM2 135M has so many parameters


@pytest.fixture
def config(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIG))
    return file


def run(command, *arguments):
    result = CliRunner().invoke(_app.app, [command, *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    assert "…" not in result.output, "the table must fit 80 columns"
    return result.output


def test_a_plan_is_the_table_of_memory_plans(config, tmp_path):
    out = tmp_path / "plan.json"
    plot = tmp_path / "plan.png"
    shown = run(
        *("plan", "--model", config, "--memory", "1.5GB", "--context", 6000, "--json", out),
        *("--kv", "bf16,kv4,kv4-start5000,rot-k4v4-log", "--plot", plot, "--bandwidth", "50GB"),
    )
    written = json.loads(out.read_text())
    assert written["weights"] == {"total": WEIGHTS, "skipped": 0}
    assert written["usable"] == 1_500_000_000
    model = Model.from_config(CONFIG)
    assert [row["scheme"] for row in written["rows"]] == [
        *("bf16", "kv4", "kv4-start5000", "rot-k4v4-log")
    ]
    for row in written["rows"]:
        expected = memory_plan(model, WEIGHTS, 1_500_000_000, 6000, row["scheme"], bandwidth=50e9)
        assert row["plan"]["largest"] == expected.largest
        assert row["plan"]["kv"] == expected.kv
        assert row["plan"]["total"] == expected.total
        assert row["plan"]["tokens_per_second"] == pytest.approx(expected.tokens_per_second)
        assert row["scheme"] in shown
    bf16, kv4, *_ = written["rows"]
    assert (bf16["bytes_per_token"], kv4["bytes_per_token"]) == (23_040, 6_480)
    assert bf16["plan"]["largest"] < kv4["plan"]["largest"] <= 8192
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_without_a_context_it_is_the_longest_that_fits(config, tmp_path):
    out = tmp_path / "plan.json"
    shown = run("plan", "--model", config.parent, "--memory", "8GB", "--kv", "bf16", "--json", out)
    (row,) = json.loads(out.read_text())["rows"]
    assert (row["plan"]["context"], row["plan"]["largest"]) == (8192, 8192)
    assert "8,192+" in shown  # the model's own end


def test_without_memory_it_is_three_quarters_of_the_machines(config, tmp_path):
    out = tmp_path / "plan.json"
    run("plan", "--model", config, "--kv", "bf16", "--json", out)
    assert json.loads(out.read_text())["usable"] == int(0.75 * _plan.machine_memory())


def test_weights_are_those_of_the_files_or_as_one_says(config, tmp_path):
    out = tmp_path / "plan.json"
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    run("plan", "--model", tmp_path, "--memory", "8GB", "--kv", "bf16", "--json", out)
    assert json.loads(out.read_text())["weights"]["total"] == 1000
    run(
        *("plan", "--model", tmp_path, "--memory", "8GB", "--kv", "bf16", "--json", out),
        *("--weights", "2MB"),
    )
    assert json.loads(out.read_text())["weights"]["total"] == 2_000_000


def test_a_model_that_mlx_lm_has_not_needs_its_weights_said(config, tmp_path):
    config.write_text(json.dumps({**CONFIG, "model_type": "unheard_of"}))
    with pytest.raises(UnsupportedError, match="--weights"):
        run("plan", "--model", config, "--memory", "8GB")
    run("plan", "--model", config, "--memory", "8GB", "--weights", "1GB")


def test_layers_that_a_scheme_leaves_out_are_told(tmp_path):
    types = ["sliding_attention", "full_attention"] * 15
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**CONFIG, "layer_types": types, "sliding_window": 128}))
    out = tmp_path / "plan.json"
    arguments = ("--model", file, "--memory", "8GB", "--kv", "turbo-k8v3", "--json", out)
    shown = run("plan", *arguments)
    (row,) = json.loads(out.read_text())["rows"]
    assert len(row["left_out"]) == 15
    assert "turbo is for full attention" in row["left_out"][0]
    assert "turbo is for full attention" in shown or "layers" in shown


def test_a_scheme_that_no_layer_can_take_says_so(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**CONFIG, "head_dim": 40}))
    out = tmp_path / "plan.json"
    run("plan", "--model", file, "--memory", "8GB", "--kv", "bf16,kv4", "--json", out)
    rows = json.loads(out.read_text())["rows"]
    assert rows[0]["error"] == ""
    assert "affects no layer" in rows[1]["error"]


def test_probing_tries_a_small_copy(config):
    shown = run("probe", "--model", config, "--kv", "bf16,kv4,kv4-g32-start30,turbo-k8v3")
    assert shown.count("0-29") == 4
    assert shown.count("encoded") == 4


@pytest.mark.parametrize(
    ("arguments", "error", "named"),
    [
        (("--memory", "much"), BudgetError, "16GB"),
        (("--weights", "heavy"), BudgetError, "16GB"),
        (("--kv", "kv7"), SpecError, "kv7"),
    ],
)
def test_bad_options(config, arguments, error, named):
    with pytest.raises(error, match=named):
        run("plan", "--model", config, *arguments)


def test_bad_files(tmp_path, config):
    with pytest.raises(StorageError, match="no config"):
        run("plan", "--model", tmp_path / "nowhere")
    config.write_text("{")
    with pytest.raises(StorageError, match="JSON"):
        run("plan", "--model", config)
    config.write_text("[]")
    with pytest.raises(ConfigError, match="dictionary"):
        run("plan", "--model", config)
    config.write_text(json.dumps({**CONFIG, "num_attention_heads": "9"}))
    with pytest.raises(ConfigError, match="num_attention_heads"):
        run("probe", "--model", config)
