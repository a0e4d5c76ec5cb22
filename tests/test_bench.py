"""Every benchmark runs, on sizes that measure nothing."""

import importlib
import json
from pathlib import Path

import mlx.core as mx
import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def bench(monkeypatch, tmp_path, capsys):
    """Runs a benchmark's command line; gives its rows and what it printed."""
    if not (ROOT / "bench").is_dir():
        pytest.skip("the benchmarks are not installed with kvfun")
    monkeypatch.syspath_prepend(str(ROOT))

    def run(name, *arguments):
        out = tmp_path / "out.json"
        importlib.import_module(f"bench.{name}").main([*arguments, "--json", str(out)])
        written = json.loads(out.read_text())
        assert written["machine"]["mlx"]
        printed = capsys.readouterr().out.splitlines()
        assert len(printed) == len(written["rows"])
        return written["rows"], printed

    return run


def module(monkeypatch, name):
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module(f"bench.{name}")


def test_decode(bench):
    rows, _ = bench("decode", "--sizes", "64", "--steps", "2")
    assert {row["case"] for row in rows} >= {"plain", "kv4", "window"}
    assert all(row[what]["ratio"] > 0 for row in rows for what in ("host", "update", "step"))


SMALL = ["--heads", "4,2", "--dtype", "f32", "--runs", "1", "--prefill-runs", "1"]


def test_attention(bench):
    sizes = ["--columns", "96", "--queries", "8,40", "--prefill-columns", "64"]
    rows, printed = bench("attention", *SMALL, *sizes, "--bits", "4,5", "--memory-of-mlx-lm")
    by_part = {part: [r for r in rows if r["part"] == part] for part in ("decode", "prefill")}
    assert {row["spec"] for row in by_part["decode"]} >= {"f32", "kv4", "kv5"}
    assert {row["queries"] for row in by_part["prefill"]} == {8, 40}
    for part in by_part.values():
        assert {row["set"] for row in part} >= {"default", "unfused", "tiled", "fused"}
        assert all(row["ratio"] > 0 for row in part if row["set"] == "default")
    peaks = [row for row in rows if row["part"] == "memory"]
    assert [(row["spec"], row["set"]) for row in peaks] == [
        *[("kv4", "mlx-lm"), ("kv4", "default")],
        *[("f32", "mlx-lm"), ("f32", "default"), ("f32", "unfused")],
    ]
    assert all(row["peak_bytes"] > 0 for row in peaks)
    assert all(line.endswith(" MB") for line in printed[-5:])


def test_attention_of_one_part(bench):
    rows, _ = bench("attention", *SMALL, "--parts", "decode", "--columns", "32", "--bits", "8")
    assert {row["part"] for row in rows} == {"decode"}
    rows, _ = bench("attention", *SMALL, "--parts", "memory", "--columns", "32", "--queries", "8")
    assert [row["set"] for row in rows] == ["default", "default", "unfused"]


def test_a_kernel_set_that_cannot_is_left_out(bench, monkeypatch):
    attention = module(monkeypatch, "attention")
    monkeypatch.setattr(attention, "kernel_sets", lambda: {"default": None, "empty": {}})
    rows, printed = bench(
        "attention", *SMALL, "--parts", "decode", "--columns", "32", "--bits", "8"
    )
    assert "no 'decode'" in rows[1]["left_out"]
    assert " -  PhaseError" in printed[1]


def test_all_sides_compute_the_same(monkeypatch):
    attention = module(monkeypatch, "attention")
    for queries in (1, 5):
        case = attention.Case("kv4", "f32", 40, queries, (4, 2))
        built = attention.sides(case, {"default": None, "unfused": attention.kernels.UNFUSED})
        first, second = [[build() for build in built.values()] for _ in range(2)]
        for out in [*first, *second]:
            assert mx.allclose(out, first[0], atol=1e-4), "mlx-lm's scales its queries in place"


@pytest.mark.parametrize("wrong", [["--parts", "decoding"], ["--dtype", "int8"]])
def test_a_wrong_name_is_refused(bench, wrong, capsys):
    with pytest.raises(SystemExit):
        bench("attention", *wrong)
    assert "use " in capsys.readouterr().err


def test_chain(bench):
    specs = "kv4,kv4:residual=4:block=4,kv4:residual=4:block=4:raw_sinks=2,f32"
    sizes = ["--columns", "32", "--steps", "9", "--dtype", "f32", "--specs", specs]
    rows, _ = bench("chain", *sizes)
    by_name = {row["cache"]: row for row in rows}
    assert list(by_name) == [*specs.split(","), "mlx-lm KVCache", "mlx-lm kv4"]
    assert all(row["ratio"] > 0 and row["held"] > 0 for row in rows)
    sealing = [row["cache"] for row in rows if row["seal_us"] is not None]
    assert sealing == [name for name in by_name if "residual" in name]
    assert by_name["mlx-lm kv4"]["ratio"] == 1


def test_a_peak_is_above_what_is_live(monkeypatch):
    timing = module(monkeypatch, "_timing")
    live = timing.normal(1000, dtype=mx.float32)
    peak = timing.peak_bytes(lambda: mx.repeat(live, 1000))
    assert 4e6 <= peak < 5e6


def test_sides_take_turns(monkeypatch):
    timing = module(monkeypatch, "_timing")
    ran = []
    sides = {name: lambda name=name: ran.append(name) or mx.zeros(1) for name in "abc"}
    laps = timing.race(sides, 3)
    assert "".join(ran) == "abcbcacab"
    assert all(0 <= lap.host <= lap.total for lap in laps.values())


def test_rounds(bench):
    rows, _ = bench("rounds", "--columns", "300", "--runs", "3", "--specs", "kv4")
    assert [row["way"] for row in rows] == ["append", "append, rollback", "round", "tree"] * 2
    assert all(row["total_us"] > row["host_us"] > 0 for row in rows)


def test_rotated(bench):
    options = ["--columns", "96", "--runs", "1", "--no-model"]
    rows, _ = bench("rotated", *options, "--specs", "rot-k4v4,turbo-k8v3")
    assert {row["spec"] for row in rows} == {"rot-k4v4", "rot-k4v4, rope", "turbo-k8v3"}
    assert {row["set"] for row in rows} == {"default", "deferred", "dense", "uncomposed"}
    assert all(row["speed"] > 0 for row in rows)
