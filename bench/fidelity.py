"""What every codec does to a real model: KL to the float32 cache, and the copy test.

    python -m bench.fidelity --json fidelity.json --plot fidelity.png [--specs kv4-f16,rot-k4v4-log]

The recipe: SmolLM2-135M-Instruct in float32, teacher-forced in chunks of 32 tokens, every query
reading keys and values as they are stored, its own chunk's too. Twelve passages of 800 tokens (six
of the Debian reference, six of Hamlet), of which the last 512 predictions count, and three texts of
400 tokens read twice, of which the second copy's counts: all as one batch.

A row is a spec of ``kvfun compare`` (``kv4``, ``rot-k4v4-log:residual=64:block=32``,
``mlx-lm-kv4``), of which three things may follow:

* ``rot-k4v4-ldlq-log@256``: the first 256 tokens of each text are read raw, then encoded by their
  own statistics (:func:`kvfun.interop.mlx_lm.calibrated_prompt_cache`);
* ``layers=3.0-tcq-log``: bits chosen by layer, 3.0 on average, by :func:`kvfun.codecs.sensitivity`
  on two of the twelve passages (measured once, and kept in the JSON file);
* both: ``layers=3.0-tcq-bal-log@256``.

``bits`` is what a number costs at long context, metadata included, the scales of affine codecs in
16 bits; ``bits@T`` adds what stays raw, at 16 bits, for texts of the tested length.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from kvfun.caches import Chain
from kvfun.cli import _machine, _matmul, _model, _rows, _specs, _text
from kvfun.cli._packages import cache_folder
from kvfun.codecs import Codec, Sensitivity, sensitivity
from kvfun.errors import SpecError, StorageError
from kvfun.interop.mlx_lm import KVFunCache, calibrated_prompt_cache, make_prompt_cache, measure

REFERENCE = "f32"
DEFAULT_SPECS = (
    *("bf16", "mlx-lm", "mlx-lm-kv8", "mlx-lm-kv6", "mlx-lm-kv4", "mlx-lm-kv3", "mlx-lm-kv2"),
    *("kv8-f16", "kv4-f16", "kv4-f16:residual=64:block=32:raw_sinks=4"),
    *("mxfp8", "nvfp4", "mxfp4", "turbo-k8v4", "turbo-k8v3", "turbo-k4v4"),
    *("rot-k8v8", "rot-k8v4-log", "rot-k5v4-log", "rot-k4v4-log", "rot-k3v3-log"),
    *("rot-k3v3-tcq-log", "rot-k2v2-tcq-log", "rot-k4v4-log:residual=64:block=32"),
    *("rot-k3v3-tcq-log:residual=64:block=32", "rot-k2v2-tcq-log:residual=64:block=32"),
    *("rot-k4v4-ldlq-log@256", "rot-k4v4-bal-log@256", "rot-k3v3-tcq-bal-log@256"),
    *("rot-k2v2-tcq-bal-log@256", "layers=3.0-tcq-log", "layers=2.5-tcq-bal-log@256"),
)
ROW = re.compile(r"(?P<spec>[^@]+?)(?:@(?P<prompt>[1-9][0-9]*))?")
LAYERED = re.compile(r"layers=(?P<budget>[0-9.]+)(?P<options>(?:-[a-z0-9]+)*)")
PRICE = mx.float16
"""What scales, and raw numbers, are stored in where a model computes in 16 bits."""


@dataclass(frozen=True)
class Plan:
    """What is read, and what of it counts."""

    passages: int = 12
    copies: int = 3
    length: int = 800
    chunk: int = 32
    first: int = 288
    """The first prediction of a passage that counts."""
    copied: int = 450
    """The first prediction of a copied text that counts."""


@dataclass
class Result:
    """A row: one number for each passage or copied text."""

    spec: str
    bits: float
    bits_at_length: float
    kl: list[float]
    nll: list[float]
    top1: list[float]
    copy: list[float]
    seconds: float
    layers: list[str] = field(default_factory=list)

    @property
    def library(self) -> str:
        """Whose cache it is."""
        return _rows.MLX_LM if self.spec.startswith(_rows.MLX_LM) else _rows.KVFUN


def mean_and_error(numbers: Sequence[float]) -> tuple[float, float]:
    """The mean and its standard error, 0 of a single number.

    Examples:
        >>> mean_and_error([1.0, 3.0])
        (2.0, 1.0)
    """
    spread = float(np.std(numbers, ddof=1)) if len(numbers) > 1 else 0.0
    return float(np.mean(numbers)), spread / math.sqrt(len(numbers))


def ratio(one: Sequence[float], other: Sequence[float]) -> tuple[float, float]:
    """The geometric mean of the ratios, passage by passage, and its standard error as a factor."""
    logs = [math.log(a / b) for a, b in zip(one, other, strict=True) if a > 0 and b > 0]
    if not logs:
        return math.nan, math.nan
    mean, error = mean_and_error(logs)
    return math.exp(mean), math.exp(error)


def pareto(points: Sequence[tuple[float, float]]) -> list[int]:
    """The points that no other is at least as good as in both numbers, by the first number.

    Examples:
        >>> pareto([(4, 0.1), (2, 0.5), (3, 0.6), (8, 0.01)])
        [1, 0, 3]
    """
    order = sorted(range(len(points)), key=lambda i: points[i])
    front, best = [], math.inf
    for index in order:
        if points[index][1] < best:
            front.append(index)
            best = points[index][1]
    return front


# -- texts ----------------------------------------------------------------------------------------

DEBIAN = "debian-reference-en"
MEMBER = "usr/share/debian-reference/debian-reference.en.txt.gz"


def debian_reference() -> str:
    """The Debian reference, installed or from Debian's archive, kept in kvfun's cache folder.

    Raises:
        StorageError: it is not there, and this is no Debian.
    """
    kept = cache_folder() / "debian-reference.en.txt.gz"
    for place in (Path("/") / MEMBER, kept):
        if place.exists():
            return gzip.decompress(place.read_bytes()).decode()
    with tempfile.TemporaryDirectory() as folder:
        try:
            for command in (["apt-get", "download", DEBIAN], ["sh", "-c", "dpkg-deb -x *.deb ."]):
                subprocess.run(command, cwd=folder, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise StorageError(
                f"the Debian package {DEBIAN} cannot be had ({error}): install it, or put its "
                f"debian-reference.en.txt.gz into {kept.parent}"
            ) from error
        kept.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(Path(folder) / MEMBER, kept)
    return gzip.decompress(kept.read_bytes()).decode()


def texts(tokenizer: Any, plan: Plan) -> mx.array:
    """The passages, prose first, then the copied texts: ``[passages + copies, length]``."""
    prose, play = debian_reference(), _text.read_text(None).content
    half = plan.length // 2
    sources = [(prose, 20_000 + 130_000 * i) for i in range((plan.passages + 1) // 2)]
    sources += [(play, 20_000 + 27_000 * i) for i in range(plan.passages // 2)]
    copied = [(prose, 60_000), (play, 60_000), (prose, 400_000)][: plan.copies]
    rows = [tokenizer.encode(text[at : at + 9000])[: plan.length] for text, at in sources]
    rows += [tokenizer.encode(text[at : at + 6000])[:half] * 2 for text, at in copied]
    return mx.array(rows)


# -- rows -----------------------------------------------------------------------------------------


class Bench:
    """A model and the texts it reads; the reference's predictions are kept.

    Args:
        loaded: the model.
        tokens: ``[passages + copies, length]``.
        plan: what counts.
        known: what was measured of its layers before.
    """

    def __init__(
        self, loaded: _model.Loaded, tokens: mx.array, plan: Plan, known: Sensitivity | None = None
    ):
        self.model, self.tokens, self.plan, self.known = loaded.model, tokens, plan, known
        self.shapes = _rows.layers(loaded.model)
        self._reference: dict[int, mx.array] = {}

    def run(self, spec: str) -> Result:
        """Measure a row; the first must be the reference."""
        began = time.perf_counter()
        caches, attention, layers, read = self._prepared(spec)
        plan, targets = self.plan, self.tokens[:, 1:]
        sums: dict[str, list[mx.array]] = {"kl": [], "nll": [], "top1": [], "copy": []}
        with attention:
            for start in range(read, plan.length, plan.chunk):
                stop = min(start + plan.chunk, plan.length)
                hidden = self.model.model(self.tokens[:, start:stop], cache=caches)
                mx.eval(hidden)
                self._count(hidden, start, min(stop, plan.length - 1), targets, sums)
        counted = plan.length - 1 - plan.first
        means = {name: mx.sum(mx.stack(parts), axis=0) for name, parts in sums.items() if parts}
        numbers: dict[str, Any] = {n: (total / counted).tolist() for n, total in means.items()}
        if "copy" in means:
            numbers["copy"] = (means["copy"] / (plan.length - 1 - plan.copied)).tolist()
        bits = self.bits(spec, layers)
        return Result(
            spec,
            bits,
            self._bits_at_length(caches, bits),
            *[numbers.get(name, []) for name in ("kl", "nll", "top1", "copy")],
            seconds=time.perf_counter() - began,
            layers=layers,
        )

    def _prepared(self, spec: str) -> tuple[list[Any], Any, list[str], int]:
        """The caches, the context to read in, the layers' specs, and the tokens read already."""
        match = ROW.fullmatch(spec)
        assert match is not None
        name, prompt = match["spec"], int(match["prompt"] or 0)
        if prompt % self.plan.chunk or prompt > self.plan.first:
            raise SpecError(
                f"{spec!r}: a prompt is a multiple of {self.plan.chunk} tokens, and at most "
                f"{self.plan.first}"
            )
        layers = self._layers(name)
        if not layers and not prompt:
            row = _rows.row(name)
            return row.make_cache(self.model), row.attention(self.model), layers, 0
        options = {} if layers else _specs.parse(name).options
        specs = layers or _specs.parse(name).codec
        attention = _rows.row(REFERENCE).attention(self.model)
        if prompt:
            caches = calibrated_prompt_cache(self.model, self.tokens[:, :prompt], specs, **options)
            return caches, attention, layers, prompt
        return make_prompt_cache(self.model, specs, **options), attention, layers, 0

    def _layers(self, name: str) -> list[str]:
        match = LAYERED.fullmatch(name)
        if match is None:
            return []
        if self.known is None:
            few = self.tokens[:: max(1, self.plan.passages // 2)][:2]
            loss = measure(self.model, few, chunk=self.plan.chunk, skip=self.plan.first)
            self.known = sensitivity(loss, len(self.shapes))
        return self.known.specs(float(match["budget"]), match["options"])

    def _count(
        self,
        hidden: mx.array,
        start: int,
        stop: int,
        targets: mx.array,
        sums: dict[str, list[mx.array]],
    ) -> None:
        """Add up what the predictions ``[start, stop)`` come to, those that count."""
        plan = self.plan
        first = max(start, plan.first)
        if first >= stop:
            return
        logits = self._head(hidden[:, first - start : stop - start])
        own = targets[:, first:stop, None]
        nll = -mx.take_along_axis(logits, own, axis=-1).squeeze(-1)
        passages = logits[: plan.passages]
        if first not in self._reference:
            self._reference[first] = passages
        known = self._reference[first]
        sums["kl"].append(mx.sum(mx.exp(known) * (known - passages), axis=(1, 2)))
        sums["nll"].append(mx.sum(nll[: plan.passages], axis=1))
        same = mx.argmax(known, axis=-1) == mx.argmax(passages, axis=-1)
        sums["top1"].append(mx.sum(same, axis=1))
        late = mx.arange(first, stop) >= plan.copied
        sums["copy"].append(mx.sum(nll[plan.passages :] * late, axis=1))
        mx.eval([parts[-1] for parts in sums.values()], known)

    def _head(self, hidden: mx.array) -> mx.array:
        model = self.model
        tied = model.args.tie_word_embeddings
        logits = model.model.embed_tokens.as_linear(hidden) if tied else model.lm_head(hidden)
        logits = logits.astype(mx.float32)
        return logits - mx.logsumexp(logits, axis=-1, keepdims=True)

    def bits(self, spec: str, layers: Sequence[str]) -> float:
        """Bits that a number costs, scales included, on average over the layers."""
        spec = spec.partition("@")[0]
        if layers:
            codecs = [Codec.of(each) for each in layers]
            each = [
                codec.token_nbytes(shape.kv_heads, shape.key_dim, shape.value_dim, PRICE)
                for codec, shape in zip(codecs, self.shapes, strict=True)
            ]
        else:
            row = _rows.row(spec)
            dtype = mx.float32 if spec in (REFERENCE, "mlx-lm", "plain") else PRICE
            each = [row.token_nbytes(shape, dtype) for shape in self.shapes]
        return 8 * sum(each) / sum(shape.elements for shape in self.shapes)

    def _bits_at_length(self, caches: list[Any], bits: float) -> float:
        """The same with what is raw at the end, at 16 bits."""
        raw, total = 0, 0
        for cache in caches:
            record = cache.record if isinstance(cache, KVFunCache) else None
            total += self.plan.length
            for part in record.parts if isinstance(record, Chain) else ():
                if part.codec.spec == "plain":
                    (row,) = part.geometry.rows
                    raw += min(row.offset, part.geometry.policy.sinks) + part.geometry.held(row)
        return bits + (raw / total if total else 0) * (16 - bits)


# -- what is shown ---------------------------------------------------------------------------------


def table(results: Sequence[Result], baseline: str) -> str:
    """The rows as Markdown, by bits and then KL."""
    base = next((result.kl for result in results if result.spec == baseline), None)
    lines = [
        f"| bits | bits@T | cache | KL | ± | KL / {baseline} | top-1 | ppl | copy | prose / play |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for result in sorted(results, key=lambda each: (each.bits, np.mean(each.kl))):
        kl, error = mean_and_error(result.kl)
        half = (len(result.kl) + 1) // 2
        against = "" if base is None else "{:.2f} (x/÷ {:.2f})".format(*ratio(result.kl, base))
        prose, play = [np.mean(x) if x else math.nan for x in (result.kl[:half], result.kl[half:])]
        lines.append(
            f"| {result.bits:.3f} | {result.bits_at_length:.2f} | {result.spec} | {kl:.4f} | "
            f"{error:.4f} | {against} | {np.mean(result.top1):.1%} | "
            f"{math.exp(np.mean(result.nll)):.2f} | "
            f"{np.mean(result.copy) if result.copy else math.nan:.3f} | {prose:.4f} / {play:.4f} |"
        )
    return "\n".join(lines)


def write_plot(path: Path, results: Sequence[Result]) -> None:
    """KL and copy NLL against bits; the line joins the rows that none is better than in both."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    shown = [r for r in results if r.spec != REFERENCE and r.bits < 16 and r.copy]
    figure, panels = pyplot.subplots(1, 2, figsize=(14, 6.5))
    for axes, name in zip(panels, ("kl", "copy"), strict=True):
        points = [(r.bits, max(float(np.mean(getattr(r, name))), 1e-5)) for r in shown]
        for library, mark, colour in (("kvfun", "o", "#0b6e99"), ("mlx-lm", "s", "#d9730d")):
            mine = [p for p, r in zip(points, shown, strict=True) if r.library == library]
            if mine:
                axes.plot(*zip(*mine, strict=True), mark, color=colour, label=library, alpha=0.85)
        front = pareto(points)
        axes.plot(*zip(*[points[i] for i in front], strict=True), "-", color="#888888", lw=1)
        for index, (result, point) in enumerate(zip(shown, points, strict=True)):
            axes.annotate(
                result.spec.removeprefix("mlx-lm-"),
                point,
                xytext=(4, 3 if index in front else -7),
                textcoords="offset points",
                fontsize=6.5,
            )
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.xaxis.set_major_locator(ticker.FixedLocator((2, 2.5, 3, 3.5, 4, 5, 6, 8)))
        axes.xaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
        axes.set_xlabel("bits a number at long context, scales included")
        axes.grid(visible=True, alpha=0.3)
        axes.legend(frameon=False)
    panels[0].set_ylabel("KL(float32 cache || cache), nats a token")
    panels[1].set_ylabel("NLL of the second copy of a text")
    figure.suptitle("SmolLM2-135M-Instruct, 12 passages of 800 tokens: lower left is better")
    figure.tight_layout()
    figure.savefig(path, dpi=140)
    pyplot.close(figure)


def document(results: Sequence[Result], plan: Plan, known: Sensitivity | None) -> dict[str, Any]:
    """All numbers as JSON values."""
    return {
        "model": "SmolLM2-135M-Instruct",
        "plan": asdict(plan),
        "machine": _machine.describe(),
        "sensitivity": None if known is None else json.loads(known.to_json()),
        "rows": [asdict(result) for result in results],
    }


def read_document(path: Path, plan: Plan) -> tuple[list[Result], Sensitivity | None]:
    """What a run of the same plan has written.

    Raises:
        StorageError: a file of another plan, or of something else.
    """
    try:
        said = json.loads(path.read_text())
        if said["plan"] != asdict(plan):
            raise StorageError(f"{path} is of another plan: {said['plan']}")
        known = said["sensitivity"]
        known = None if known is None else Sensitivity.from_json(json.dumps(known))
        return [Result(**row) for row in said["rows"]], known
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise StorageError(f"{path} holds no results of this bench: {error}") from error


@contextmanager
def fast_products(model: Any) -> Iterator[str]:
    """NumPy's matrix products, where MLX's are slow; says whose they are."""
    if not _machine.has_slow_blas(_machine.matmul_gflops()):
        yield "mlx"
        return
    with _matmul.by_numpy(model):
        yield "numpy (preload OpenBLAS for MLX's own)"


def main(arguments: Sequence[str] | None = None) -> list[Result]:
    """Run the bench."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--specs", default=",".join(DEFAULT_SPECS), help="rows, by commas")
    parser.add_argument("--passages", type=int, default=Plan.passages)
    parser.add_argument("--length", type=int, default=Plan.length, help="tokens of each text")
    parser.add_argument("--chunk", type=int, default=Plan.chunk)
    parser.add_argument("--baseline", default="mlx-lm-kv4", help="the row of the ratios")
    parser.add_argument("--json", type=Path, help="written after every row")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--resume", action="store_true", help="keep the rows of the JSON file")
    asked = parser.parse_args(arguments)
    plan = Plan(
        passages=asked.passages,
        length=asked.length,
        chunk=asked.chunk,
        first=Plan.first * asked.length // Plan.length,
        copied=Plan.copied * asked.length // Plan.length,
    )
    done, known = [], None
    if asked.resume and asked.json and asked.json.exists():
        done, known = read_document(asked.json, plan)
    loaded = _model.load(None)
    bench = Bench(loaded, texts(loaded.tokenizer, plan), plan, known)
    wanted = [REFERENCE, *[spec for spec in asked.specs.split(",") if spec != REFERENCE]]
    results = {result.spec: result for result in done}
    with fast_products(loaded.model) as products:
        print(f"{len(wanted)} rows; matrix products by {products}", flush=True)
        for spec in wanted:
            if spec in results and spec != REFERENCE:
                continue
            results[spec] = result = bench.run(spec)
            kl, copied = np.mean(result.kl), np.mean(result.copy or [math.nan])
            print(f"{spec}: KL {kl:.4f}, copy {copied:.3f}, {result.seconds:.0f} s", flush=True)
            if asked.json:
                text = json.dumps(document(list(results.values()), plan, bench.known), indent=1)
                asked.json.write_text(text + "\n")
    rows = list(results.values())
    print(table(rows, asked.baseline))
    if asked.plot:
        write_plot(asked.plot, rows)
    return rows


if __name__ == "__main__":
    main()
