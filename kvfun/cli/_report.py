"""What a comparison shows: a table, a JSON document, a picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvfun.cli import _rows
from kvfun.errors import StorageError

if TYPE_CHECKING:
    from rich.table import Table

    from kvfun.cli._measure import Result

WIDE = 90
_LEAST_KL = 1e-6  # shown on the logarithmic axis in place of a KL of 0


def size_text(count: float) -> str:
    """A number of bytes as people write it.

    Examples:
        >>> size_text(23_040)
        '23.0 kB'
    """
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} GB"


def kl_text(kl: float) -> str:
    """A KL divergence in six characters or about.

    Examples:
        >>> kl_text(0.13241), kl_text(0.000123)
        ('0.1324', '1.2e-04')
    """
    return f"{kl:.4f}" if kl >= 1e-3 or kl == 0 else f"{kl:.1e}"


def table(results: Sequence[Result], title: str, *, wide: bool) -> Table:
    """The table of a comparison; the first row is the reference.

    Args:
        results: The rows.
        title: The line above.
        wide: Whether there are `WIDE` columns, so that standard errors can be shown.
    """
    from rich import box
    from rich.table import Table

    errors = wide and results[0].kl_error is not None
    shown = Table(
        title=title,
        caption=_legend(results),
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=0,
        pad_edge=False,
        show_edge=False,
    )
    shown.add_column("cache")  # the one that gives way where the terminal is narrow
    for heading in _headings(errors=errors):
        shown.add_column(heading, justify="right", no_wrap=True)
    for number, result in enumerate(results):
        cells = _cells(result, reference=not number, errors=errors)
        shown.add_row(*cells, end_section=_ends_section(results, number))
    return shown


def _legend(results: Sequence[Result]) -> str:
    """What the headings mean, and the letters of the labels where there are any."""
    legend = (
        "peak: memory above the weights; KL, top-1: against the first row; "
        "copy: NLL of a text's second copy"
    )
    if not any(result.row.raw for result in results):
        return legend
    return (
        f"{legend}; r, s: so many newest, first tokens stay raw (cache MB holds them; bits and "
        "bytes are an encoded token's, the price at long context)"
    )


def _headings(*, errors: bool) -> list[str]:
    memory = ["bits/\nelem.", "bytes/\ntoken", "cache\nMB", "peak\nMB"]
    fidelity = ["\nppl", "\nKL", *(["\n±"] if errors else []), "\ntop-1", "\ncopy"]
    return [*memory, *fidelity, "fill\ntok/s", "decode\ntok/s"]


def _ends_section(results: Sequence[Result], number: int) -> bool:
    following = results[number + 1 : number + 2]
    return bool(following) and following[0].row.library != results[number].row.library


def _cells(result: Result, *, reference: bool, errors: bool) -> list[str]:
    error = result.kl_error
    shown_error = [] if not errors else ["" if reference or error is None else f"{error:.1e}"]
    return [
        result.row.label,
        f"{result.bits_per_element:.2f}",
        f"{result.bytes_per_token:,.0f}",
        f"{result.cache_bytes / 1e6:.1f}",
        f"{result.peak_bytes / 1e6:.1f}",
        _digits(result.perplexity, 2),
        "" if reference else kl_text(result.kl),
        *shown_error,
        "" if reference else f"{result.top1:.1%}",
        "" if result.copy_nll is None else f"{result.copy_nll:.3f}",
        f"{result.prefill_rate:.0f}",
        _digits(result.decode_rate, 1),
    ]


def _digits(number: float, decimals: int) -> str:
    """A number with fewer decimals where it is large: the column stays narrow."""
    fewer = (number >= 100) + 2 * (number >= 1000)
    return f"{number:.{max(decimals - fewer, 0)}f}"


def document(results: Sequence[Result], about: dict[str, Any]) -> dict[str, Any]:
    """Everything that was measured, as JSON values.

    Args:
        results: The rows; the first is the reference.
        about: The parameters, the machine and the versions.
    """
    return {**about, "reference": results[0].row.spec, "rows": [_record(r) for r in results]}


def _record(result: Result) -> dict[str, Any]:
    return {
        "spec": result.row.spec,
        "label": result.row.label,
        "library": result.row.library,
        "bits_per_element": result.bits_per_element,
        "bytes_per_token": result.bytes_per_token,
        "cache_bytes": result.cache_bytes,
        "cache_tokens": result.cache_tokens,
        "peak_bytes_above_weights": result.peak_bytes,
        "peak_bytes": result.peak_total_bytes,
        "perplexity": result.perplexity,
        "nll": result.nll,
        "kl": result.kl,
        "kl_standard_error": result.kl_error,
        "top1_agreement": result.top1,
        "copy_nll": result.copy_nll,
        "prefill_tokens_per_second": result.prefill_rate,
        "decode_tokens_per_second": result.decode_rate,
        "passages": [vars(score) for score in result.scores],
    }


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes a document.

    Raises:
        StorageError: the file cannot be written.
    """
    try:
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error}") from error


def write_plot(path: Path, results: Sequence[Result], title: str) -> None:
    """Draws KL against bits per element, and the memory of each row beside it.

    Raises:
        StorageError: the file cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (fidelity, memory) = pyplot.subplots(1, 2, figsize=(12, 5), width_ratios=(3, 2))
    try:
        _draw_fidelity(fidelity, results)
        _draw_memory(memory, results)
        figure.suptitle(title, fontsize=11)
        figure.tight_layout()
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error}") from error
    finally:
        pyplot.close(figure)


_TICKS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32)
_COLOURS = {_rows.KVFUN: "#0b6e99", _rows.MLX_LM: "#d9730d"}
_MARKERS: dict[str, dict[str, Any]] = {  # the hollow one shows what lies under it
    _rows.KVFUN: {"marker": "o", "markersize": 6},
    _rows.MLX_LM: {"marker": "s", "markersize": 12, "markerfacecolor": "none"},
}


def _draw_fidelity(axes: Any, results: Sequence[Result]) -> None:
    """One labelled point a row that stores anything; the reference, whose KL is 0, is left out."""
    from matplotlib import ticker

    for library in (_rows.KVFUN, _rows.MLX_LM):
        found = [r for r in results[1:] if r.row.library == library and r.bits_per_element]
        if not found:
            continue
        found.sort(key=lambda r: r.bits_per_element)
        bits = [r.bits_per_element for r in found]
        kl = [max(r.kl, _LEAST_KL) for r in found]
        errors = [r.kl_error or 0.0 for r in found]
        axes.errorbar(
            bits,
            kl,
            yerr=errors,
            linestyle="none",
            color=_COLOURS[library],
            label=library,
            **_MARKERS[library],
            capsize=3,
            alpha=0.85,
        )
        side = 1 if library == _rows.KVFUN else -1
        for result, x, y in zip(found, bits, kl, strict=True):
            axes.annotate(
                result.row.label.removeprefix(f"{library} "),
                (x, y),
                xytext=(9 * side, 5 * side),
                textcoords="offset points",
                ha="left" if side > 0 else "right",
                va="bottom" if side > 0 else "top",
                color=_COLOURS[library],
                fontsize=9,
            )
    axes.set_yscale("log")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(ticker.FixedLocator(_TICKS))
    axes.xaxis.set_major_formatter(ticker.FormatStrFormatter("%d"))
    axes.margins(x=0.15, y=0.15)
    axes.set_xlabel("stored bits per element, metadata included")
    axes.set_ylabel(f"KL({results[0].row.label} || cache), nats per token")
    axes.set_title("Fidelity: lower left is better", fontsize=10)
    axes.grid(visible=True, which="major", alpha=0.3)
    if axes.has_data():
        axes.legend(frameon=False)


def _draw_memory(axes: Any, results: Sequence[Result]) -> None:
    """Two bars a row: the cache, and the peak above the weights."""
    places = list(range(len(results)))[::-1]
    colours = [_COLOURS[r.row.library] for r in results]
    peak = [r.peak_bytes / 1e6 for r in results]
    cache = [r.cache_bytes / 1e6 for r in results]
    axes.barh(places, peak, color=colours, alpha=0.3, height=0.7)
    axes.barh(places, cache, color=colours, height=0.7)
    for place, result, end in zip(places, results, peak, strict=True):
        text = f" {size_text(result.cache_bytes)} / {size_text(result.peak_bytes)}"
        axes.text(end, place, text, va="center", fontsize=8)
    axes.set_yticks(places, [r.row.label for r in results], fontsize=9)
    axes.set_xlim(0, max(peak) * 1.4 if max(peak) > 0 else 1)
    axes.set_xlabel("MB: the cache (dark), peak above the weights (light)")
    axes.set_title(f"Memory after {results[0].cache_tokens} tokens", fontsize=10)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
