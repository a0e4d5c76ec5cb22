"""The commands, as typer sees them."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from kvfun.cli import _generate, _machine, _measure, _model, _report, _rows, _text
from kvfun.errors import KVFunError

DEFAULT_SPECS = "bf16,kv8,kv4"

app = typer.Typer(
    name="kvfun",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
_notes = Console(stderr=True)

ModelOption = Annotated[
    str | None,
    typer.Option(
        help="An mlx-lm model directory or hub id.  [default: SmolLM2-135M-Instruct]",
        show_default=False,
    ),
]


def run() -> None:
    """Runs the command line; an error of kvfun is one line, not a traceback."""
    try:
        app()
    except KVFunError as error:
        _notes.print(f"error: {error}", style="red", markup=False, highlight=False)
        sys.exit(1)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvfun {_machine.version('kvfun')}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Compare and try key/value caches on a real model."""


@app.command()
def version() -> None:
    """Print the versions of kvfun and of what it runs on."""
    for name, value in _machine.describe().items():
        typer.echo(f"{name}: {value}")


@app.command()
def compare(
    specs: Annotated[
        str, typer.Option(help="Caches to compare: codec specs, mlx-lm, mlx-lm-kv4-g32, ...")
    ] = DEFAULT_SPECS,
    reference: Annotated[
        str, typer.Option(help="The cache that the others are compared with.")
    ] = "bf16",
    model: ModelOption = None,
    text: Annotated[
        Path | None, typer.Option(help="A text to read.  [default: Hamlet]", show_default=False)
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            min=16,
            help="Tokens per passage.  [default: what the budget allows]",
            show_default=False,
        ),
    ] = None,
    passages: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Passages.  [default: 1, without --tokens what the budget allows]",
            show_default=False,
        ),
    ] = None,
    copied: Annotated[
        int | None,
        typer.Option(
            "--copy",
            min=0,
            help="Tokens of the copy test, 0 for none.  [default: 3/4 of a passage]",
            show_default=False,
        ),
    ] = None,
    decode: Annotated[int, typer.Option(min=1, help="Tokens decoded to measure the speed.")] = 16,
    chunk: Annotated[int, typer.Option(min=1, help="Tokens fed at once.")] = 128,
    budget: Annotated[
        float, typer.Option(min=1, help="Seconds to spend, where --tokens is not given.")
    ] = 240.0,
    mlx_lm: Annotated[bool, typer.Option(help="Show mlx-lm's own caches beside.")] = True,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write all numbers to a JSON file.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the comparison to a PNG file.")] = None,
) -> None:
    """Compare caches: fidelity, memory and speed on the same text."""
    began = time.perf_counter()
    rows = chosen_rows(specs, reference, baselines=mlx_lm)
    source = _text.read_text(text)
    loaded = _loaded(model)
    gflops = _warn_of_slow_blas()
    if tokens is None:
        plan = _plan_for_budget(loaded, rows, budget, decode, chunk)
    else:
        plan = _measure.Plan(tokens, 1, _measure.copied_tokens(tokens), decode, chunk)
    wanted = {"passages": passages, "copied": copied}
    plan = dataclasses.replace(plan, **{k: v for k, v in wanted.items() if v is not None})
    _notes.print(plan_text(plan, len(rows)), highlight=False)
    results = _measured(loaded, rows, source, plan)
    title = f"{loaded.name}, {source.name}: {_counted_text(results)}"
    Console().print(_report.table(results, title))
    about = {
        "model": loaded.name,
        "text": source.name,
        "activations": str(loaded.dtype).removeprefix("mlx.core."),
        "parameters": dataclasses.asdict(plan),
        "machine": {**_machine.describe(), "matmul_gflops": gflops},
        "seconds": time.perf_counter() - began,
    }
    if json_file is not None:
        _report.write_json(json_file, _report.document(results, about))
    if plot is not None:
        _report.write_plot(plot, results, title)
    _notes.print(f"done in {time.perf_counter() - began:.0f} s", highlight=False)


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="What the text answers or goes on from.")],
    kv: Annotated[
        str, typer.Option(help="The cache: a codec spec, or mlx-lm, mlx-lm-kv4, ...")
    ] = "bf16",
    model: ModelOption = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="The most tokens to generate.")] = 100,
    temp: Annotated[float, typer.Option(min=0, help="Temperature; 0 is greedy.")] = 0.0,
    window: Annotated[
        int | None, typer.Option(min=1, help="Keep only the last tokens visible.")
    ] = None,
    sinks: Annotated[
        int, typer.Option(min=0, help="With --window: first tokens that stay visible.")
    ] = 0,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--no-chat",
            help="Use the model's chat template.  [default: where it has one]",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Generate text through a cache, and say what it took."""
    if sinks and window is None:
        raise typer.BadParameter("--sinks needs --window: without one every token stays visible")
    row = _rows.row(kv, window=window, sinks=sinks)
    loaded = _loaded(model)
    _warn_of_slow_blas()
    summary = _generate.generate(
        loaded,
        row,
        prompt,
        lambda piece: typer.echo(piece, nl=False),
        max_tokens=max_tokens,
        temperature=temp,
        chat=chat,
    )
    typer.echo()
    _notes.print(summary.line(), style="dim", highlight=False, soft_wrap=True)


def chosen_rows(specs: str, reference: str, *, baselines: bool) -> list[_rows.Row]:
    """The rows of a comparison, the reference first, each once.

    Raises:
        SpecError: a spec names no row.
    """
    wanted = [reference, *(part.strip() for part in specs.split(",") if part.strip())]
    if baselines:
        wanted += _rows.BASELINES
    rows = {row.spec: row for row in map(_rows.row, wanted)}
    return list(rows.values())


def plan_text(plan: _measure.Plan, rows: int) -> str:
    """What a plan does, in words."""
    limit = "" if plan.budget is None else f" within {plan.budget:.0f} s (--budget)"
    upto = "" if plan.budget is None or plan.passages == 1 else "up to "
    return (
        f"{rows} caches, {upto}{plan.passages} x {plan.length} tokens each, a copy test of "
        f"{plan.copied}, {plan.decoded} decoded{limit}"
    )


def _counted_text(results: Sequence[_measure.Result]) -> str:
    scores = results[0].scores
    return f"{sum(score.counted for score in scores)} targets in {len(scores)} passage(s)"


def _plan_for_budget(
    loaded: _model.Loaded, rows: Sequence[_rows.Row], budget: float, decode: int, chunk: int
) -> _measure.Plan:
    rate = _measure.prefill_rate(loaded.model, _rows.mlx_lm_row(_rows.MLX_LM))
    _notes.print(f"the model reads about {rate:.0f} tokens a second here", highlight=False)
    return _measure.plan(rate, len(rows), budget, decode, chunk)


def _measured(
    loaded: _model.Loaded, rows: Sequence[_rows.Row], source: _text.Text, plan: _measure.Plan
) -> list[_measure.Result]:
    passages = _text.passages(loaded.tokenizer, source, plan.passages, plan.length)
    copy = _text.copy_passage(loaded.tokenizer, source, plan.copied) if plan.copied else None
    with _bar() as bar:
        task = bar.add_task("", total=plan.tokens * len(rows))

        def advance(label: str, tokens: int) -> None:
            bar.update(task, advance=tokens, description=label)

        return _measure.measure(loaded.model, loaded.dtype, rows, passages, copy, plan, advance)


def _loaded(name: str | None) -> _model.Loaded:
    """Loads the model, showing each step."""
    with _bar() as bar:
        tasks: dict[str, Any] = {}

        def report(step: str, fraction: float | None) -> None:
            if step not in tasks:
                for done in tasks.values():
                    bar.update(done, total=1.0, completed=1.0)
                tasks[step] = bar.add_task(step, total=1.0 if fraction is not None else None)
            if fraction is not None:
                bar.update(tasks[step], completed=fraction)

        return _model.load(name, report)


def _warn_of_slow_blas() -> float:
    gflops = _machine.matmul_gflops()
    if hint := _machine.blas_hint(gflops):
        _notes.print(hint, style="yellow", markup=False, highlight=False, soft_wrap=True)
    return gflops


@contextmanager
def _bar() -> Iterator[Progress]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=_notes, transient=True) as bar:
        yield bar
