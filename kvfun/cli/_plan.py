"""What ``kvfun plan`` and ``kvfun probe`` show."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvfun.errors import StorageError
from kvfun.scheme import KvScheme, MemoryPlan, Model, Weights, kv_geometry, memory_plan

if TYPE_CHECKING:
    from rich.table import Table

    from kvfun.interop.mlx_lm import Probed

CONTEXTS = 40
"""Points of a curve."""


@dataclass(frozen=True)
class Source:
    """A model that need not be loaded."""

    name: str
    config: dict[str, Any]
    weights: int | None
    """The bytes of its files, if they are there."""


@dataclass(frozen=True)
class Row:
    """A scheme and what comes of it."""

    scheme: KvScheme
    plan: MemoryPlan | None
    left_out: tuple[str, ...]
    """Layers that store something else, and why."""
    per_token: int = 0
    error: str = ""


def read_source(path: Path) -> Source:
    """The config in a directory or file, and the bytes of the weights beside it.

    Raises:
        StorageError: there is none, or it is no JSON.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text())
    except OSError as error:
        raise StorageError(f"there is no config to read: {error}") from error
    except ValueError as error:
        raise StorageError(f"{file} is no JSON: {error}") from error
    folder = file.parent
    files = [*folder.glob("*.safetensors")] if path.is_dir() else []
    name = folder.resolve().name if path.is_dir() else file.stem
    return Source(name, config, sum(f.stat().st_size for f in files) or None)


def machine_memory() -> int:
    """Bytes of memory that the machine has."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def rows(
    model: Model,
    weights: Weights,
    usable: int,
    schemes: Sequence[KvScheme],
    context: int | None,
    bandwidth: float | None,
) -> list[Row]:
    """A row for each scheme; one that the model cannot take says so."""
    found = []
    for scheme in schemes:
        try:
            report = scheme.assigned(model)
            plan = memory_plan(model, weights, usable, context, scheme, bandwidth=bandwidth)
        except ValueError as error:
            found.append(Row(scheme, None, (), error=str(error)))
            continue
        left = [each for each in report if each.reason and each.spec is not None]
        why = tuple([f"layer {each.index} ({each.kind}): {each.reason}" for each in left])
        found.append(Row(scheme, plan, why, kv_geometry(model, scheme).token))
    return found


def table(found: Sequence[Row], title: str, size_text: Any) -> Table:
    """The table of a plan."""
    from rich import box
    from rich.table import Table

    shown = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    shown.add_column("\ncache", no_wrap=True)
    for heading in (
        *("bytes/\ntoken", "\nlongest", "\ncontext", "\ncaches", "\nall"),
        *("\nfits", "tokens\n/s"),
    ):
        shown.add_column(heading, justify="right", no_wrap=True)
    for row in found:
        plan = row.plan
        if plan is None:
            shown.add_row(row.scheme.cache_key, "", "-")
            continue
        longest = "none" if plan.largest < 0 else f"{plan.largest:,}"
        longest += "+" if plan.largest == plan.limit else ""
        speed = "" if plan.tokens_per_second is None else f"{plan.tokens_per_second:.1f}"
        numbers = (size_text(plan.kv), size_text(plan.total), "yes" if plan.fits else "no")
        key = row.scheme.cache_key
        shown.add_row(key, f"{row.per_token:,}", longest, f"{plan.context:,}", *numbers, speed)
    return shown


def document(source: Source, weights: Weights, usable: int, found: Sequence[Row]) -> dict[str, Any]:
    """The same for JSON."""
    import attrs

    return {
        "model": source.name,
        "weights": attrs.asdict(weights),
        "usable": usable,
        "rows": [
            {
                "scheme": row.scheme.cache_key,
                "storage": row.scheme.storage,
                "bytes_per_token": row.per_token,
                "left_out": list(row.left_out),
                "error": row.error,
                "plan": None
                if row.plan is None
                else {**attrs.asdict(row.plan), "total": row.plan.total, "fits": row.plan.fits},
            }
            for row in found
        ],
    }


def write_plot(
    path: Path, model: Model, weights: Weights, usable: int, found: Sequence[Row], title: str
) -> None:
    """Memory against context, a line for each scheme, and what there is.

    Raises:
        StorageError: the file cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plans = [row for row in found if row.plan is not None]
    reached = [max(row.plan.largest, row.plan.context) for row in plans if row.plan is not None]
    limits = [row.plan.limit for row in plans if row.plan is not None]
    longest = min(max([1024, *[reach * 5 // 4 for reach in reached]]), max([1024, *limits]))
    contexts = sorted({max(1, longest * i // CONTEXTS) for i in range(1, CONTEXTS + 1)})
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for row in plans:
        totals = [memory_plan(model, weights, usable, n, row.scheme).total / 1e9 for n in contexts]
        axes.plot(contexts, totals, label=row.scheme.cache_key)
    axes.axhline(usable / 1e9, color="black", linestyle="--", label="usable")
    axes.axhline(weights.total / 1e9, color="grey", linestyle=":", label="weights")
    axes.set(xlabel="context in tokens", ylabel="memory in GB", title=title, xlim=(0, longest))
    axes.legend()
    axes.grid(alpha=0.3)
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise StorageError(f"the plot cannot be written to {path}: {error}") from error
    finally:
        plt.close(figure)


def probe_table(found: Sequence[Probed], title: str) -> Table:
    """The table of a probe."""
    from rich import box
    from rich.table import Table

    shown = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("cache", "layers that take it", "others", "read"):
        shown.add_column(heading)
    for each in found:
        if each.error:
            shown.add_row(each.spec, "none", each.error, "")
            continue
        read = "encoded" if each.routed else "decoded by the model's own attention"
        shown.add_row(each.spec, spans(each.taken) or "none", "; ".join(_others(each)), read)
    return shown


def _others(each: Probed) -> list[str]:
    """The layers that store something else, by the reason."""
    by_reason: dict[str, list[int]] = {}
    for layer in each.layers:
        if layer.reason:
            by_reason.setdefault(layer.reason, []).append(layer.index)
    return [f"{spans(indices)}: {reason}" for reason, indices in by_reason.items()]


def spans(indices: Sequence[int]) -> str:
    """Numbers as runs.

    >>> spans([0, 1, 2, 5, 7, 8])
    '0-2, 5, 7-8'
    """
    runs: list[list[int]] = []
    for index in indices:
        if runs and runs[-1][-1] == index - 1:
            runs[-1][-1:] = [*runs[-1][-1:], index] if len(runs[-1]) == 1 else [index]
        else:
            runs.append([index])
    return ", ".join([f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs])
