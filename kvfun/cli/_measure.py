"""What a comparison measures: fidelity, memory and speed of one cache beside another.

Fidelity follows one recipe: a passage is fed in chunks (teacher forcing), so that every query
reads keys and values as the cache stores them, its own chunk's included. KL is
``KL(reference || row)`` over the whole vocabulary.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from kvfun.cli._rows import MLX_LM, Layer, Row, layers, mlx_lm_row
from kvfun.cli._text import Passage

Advance = Callable[[str, int], None]
"""Called with a row's label and the number of tokens it has just fed."""

_LONGEST = 512  # short enough to stop in time, where a machine is slower than it seemed
_SHORTEST = 64
_STEP = 32
_MOST_PASSAGES = 16
_MOST_COPIED = 800
_SPARE = 0.6  # quantized reads over a long history are slower than the pilot run
_PILOT_BLOCK = 32
_PILOT_BLOCKS = 12


@dataclass(frozen=True)
class Plan:
    """How much text every row reads.

    Attributes:
        length: Tokens of a passage.
        passages: How many passages.
        copied: Tokens of the copy test, both copies together; 0 leaves the test out.
        decoded: Tokens decoded to measure the speed.
        chunk: Tokens fed at once.
        budget: Seconds after which no further passage is begun, or None.
    """

    length: int
    passages: int
    copied: int
    decoded: int
    chunk: int
    budget: float | None = None

    @property
    def tokens(self) -> int:
        """Tokens that a row feeds, all passages together."""
        return self.passages * self.length + self.copied + self.decoded


@dataclass(frozen=True)
class Block:
    """What feeding one chunk gave: the counted targets with their logits, and the time."""

    tokens: int
    seconds: float
    targets: np.ndarray
    logits: np.ndarray


@dataclass(frozen=True)
class Score:
    """Fidelity on one passage.

    Attributes:
        nll: Mean negative log-likelihood of the counted targets.
        kl: Mean KL divergence from the reference.
        top1: How often the most likely token is the reference's.
        counted: How many targets were counted.
    """

    nll: float
    kl: float
    top1: float
    counted: int


@dataclass
class Result:
    """All that was measured of one row."""

    row: Row
    bits_per_element: float
    bytes_per_token: float
    scores: list[Score] = field(default_factory=list)
    copy_nll: float | None = None
    cache_bytes: int = 0
    cache_tokens: int = 0
    peak_bytes: int = 0
    peak_total_bytes: int = 0
    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_rate: float = 0.0

    @property
    def nll(self) -> float:
        """Mean negative log-likelihood over the passages."""
        return statistics.fmean(score.nll for score in self.scores)

    @property
    def perplexity(self) -> float:
        """``exp`` of the mean negative log-likelihood."""
        return math.exp(self.nll)

    @property
    def kl(self) -> float:
        """Mean KL divergence over the passages."""
        return statistics.fmean(score.kl for score in self.scores)

    @property
    def kl_error(self) -> float | None:
        """The standard error of `kl` over the passages, or None for a single one."""
        if len(self.scores) < 2:
            return None
        return statistics.stdev(score.kl for score in self.scores) / math.sqrt(len(self.scores))

    @property
    def top1(self) -> float:
        """Mean top-1 agreement over the passages."""
        return statistics.fmean(score.top1 for score in self.scores)

    @property
    def prefill_rate(self) -> float:
        """Tokens a second of teacher forcing."""
        return self.prefill_tokens / self.prefill_seconds


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Log-probabilities over the last axis."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def kl_divergence(reference: np.ndarray, other: np.ndarray) -> np.ndarray:
    """``KL(reference || other)`` in nats over the last axis of two arrays of log-probabilities.

    A token that the reference excludes (log-probability ``-inf``) adds nothing.
    """
    with np.errstate(invalid="ignore"):
        terms = np.exp(reference) * (reference - other)
    return np.where(np.isneginf(reference), 0.0, terms).sum(axis=-1, dtype=np.float64)


def target_nll(log_probs: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """The negative log-likelihood of each row's target."""
    return -np.take_along_axis(log_probs, targets[:, None], axis=-1)[:, 0].astype(np.float64)


def chunks(passage: Passage, chunk: int) -> Iterator[tuple[int, int]]:
    """Where the chunks of a passage begin and end.

    A chunk ends before the first counted target, so that no chunk holds both kinds: the logits
    of a chunk without counted targets are never computed.
    """
    end, boundary = len(passage.tokens) - 1, passage.first - 1
    start = 0
    while start < end:
        limit = boundary if start < boundary else end
        stop = min(start + chunk, limit)
        yield start, stop
        start = stop


def feed(model: Any, cache: list[Any], passage: Passage, chunk: int) -> Iterator[Block]:
    """Feeds a passage to a model, one `Block` a chunk; uncounted chunks have no targets."""
    nothing = np.zeros((0, 0), dtype=np.float32)
    for start, stop in chunks(passage, chunk):
        begin = time.perf_counter()
        inputs = mx.array(passage.tokens[None, start:stop])
        logits = model(inputs, cache=cache)
        if stop < passage.first:
            mx.eval([layer.state for layer in cache])
            counted, targets = nothing, passage.tokens[:0]
        else:
            logits = logits[0].astype(mx.float32)
            mx.eval(logits, [layer.state for layer in cache])
            counted, targets = np.array(logits), passage.tokens[start + 1 : stop + 1]
        yield Block(stop - start, time.perf_counter() - begin, targets, counted)


class Scorer:
    """Scores the blocks of one passage, one after another, against the reference's."""

    def __init__(self, reference: Sequence[np.ndarray] | None = None) -> None:
        self._reference = iter(reference) if reference is not None else None
        self._nll: list[np.ndarray] = []
        self._kl: list[np.ndarray] = []
        self._same: list[np.ndarray] = []

    def add(self, log_probs: np.ndarray, targets: np.ndarray) -> None:
        """Adds the log-probabilities of a block's targets."""
        reference = log_probs if self._reference is None else next(self._reference)
        self._nll.append(target_nll(log_probs, targets))
        self._kl.append(kl_divergence(reference, log_probs))
        self._same.append(reference.argmax(axis=-1) == log_probs.argmax(axis=-1))

    def score(self) -> Score:
        """The means over all blocks."""
        nll = np.concatenate(self._nll)
        same = np.concatenate(self._same)
        kl = np.concatenate(self._kl)
        return Score(float(nll.mean()), float(kl.mean()), float(same.mean()), len(nll))


def decode_rate(model: Any, cache: list[Any], token: int, count: int) -> float:
    """Tokens a second of greedy decoding after what the cache holds.

    The median over the tokens, the first left out: it pays for compilation.
    """
    seconds = []
    inputs = mx.array([[token]])
    for _ in range(count):
        begin = time.perf_counter()
        inputs = mx.argmax(model(inputs, cache=cache)[:, -1], axis=-1, keepdims=True)
        mx.eval(inputs, [layer.state for layer in cache])
        seconds.append(time.perf_counter() - begin)
    return 1 / statistics.median(seconds[1:] or seconds)


def stored_bits(row: Row, shapes: Sequence[Layer], dtype: mx.Dtype) -> float:
    """The exact bits that one element takes in a row's cache, over all layers; 0 without any."""
    elements = sum(layer.elements for layer in shapes)
    return 8 * stored_bytes(row, shapes, dtype) / elements if elements else 0.0


def stored_bytes(row: Row, shapes: Sequence[Layer], dtype: mx.Dtype) -> float:
    """The exact bytes that a token takes in a row's cache, over all layers."""
    return sum(row.token_nbytes(layer, dtype) for layer in shapes)


def prefill_rate(model: Any, seconds: float) -> float:
    """Tokens a second at which a model reads a text, found by trying for some seconds at most.

    The first block is left out where there are more: it pays for compilation.
    """
    cache = mlx_lm_row(MLX_LM).make_cache(model)
    tokens = mx.zeros((1, _PILOT_BLOCK), dtype=mx.int32)
    took: list[float] = []
    while sum(took) < seconds and len(took) < _PILOT_BLOCKS:
        begin = time.perf_counter()
        mx.eval(model(tokens, cache=cache))
        took.append(time.perf_counter() - begin)
    return _PILOT_BLOCK / statistics.fmean(took[1:] or took)


def plan(rate: float, rows: int, budget: float, decoded: int, chunk: int) -> Plan:
    """The longest passages that a budget of seconds allows, and as many as fit.

    Args:
        rate: Tokens a second of prefill.
        rows: How many rows read them.
        budget: Seconds for all rows.
        decoded: Tokens decoded by each row (each about as dear as a prefill token, or less).
        chunk: Tokens fed at once.
    """
    tokens = rate * budget * _SPARE / rows - decoded
    length = int(min(_LONGEST, max(_SHORTEST, tokens / 1.75)))
    length -= length % _STEP
    copied = copied_tokens(length)
    passages = int(min(_MOST_PASSAGES, max(1, (tokens - copied) // length)))
    return Plan(length, passages, copied, decoded, chunk, budget)


def copied_tokens(length: int) -> int:
    """The tokens of the copy test that goes with passages of a length: even, both copies."""
    return min(_MOST_COPIED, length * 3 // 4 // 2 * 2)


def measure(
    model: Any,
    dtype: mx.Dtype,
    rows: Sequence[Row],
    passages: Sequence[Passage],
    copy: Passage | None,
    plan: Plan,
    advance: Advance = lambda label, tokens: None,
) -> list[Result]:
    """Measures rows on the same passages; the first row is the reference.

    All rows read a passage before any reads the next, so that stopping at the budget leaves
    rows that can be compared.
    """
    shapes = layers(model)
    results = [
        Result(row, stored_bits(row, shapes, dtype), stored_bytes(row, shapes, dtype))
        for row in rows
    ]
    clock = _Clock(plan.budget)
    for number, passage in enumerate(passages):
        if not clock.allows(len(passage.tokens)):
            break
        _measure_passage(model, results, passage, plan, advance, first=not number)
        clock.read(len(passage.tokens))
        if not number and copy is not None and clock.allows(len(copy.tokens)):
            for result in results:
                _measure_copy(model, result, copy, plan, advance)
            clock.read(len(copy.tokens))
    return results


class _Clock:
    """Foretells from the tokens read so far whether some more can be read within the budget."""

    def __init__(self, budget: float | None) -> None:
        self._budget = budget
        self._begin = time.perf_counter()
        self._tokens = 0

    def read(self, tokens: int) -> None:
        """Notes that every row has read some tokens."""
        self._tokens += tokens

    def allows(self, tokens: int) -> bool:
        """Whether the budget allows some more tokens for every row; always the first ones."""
        if self._budget is None or not self._tokens:
            return True
        elapsed = time.perf_counter() - self._begin
        return elapsed * (self._tokens + tokens) / self._tokens <= self._budget


def _measure_passage(
    model: Any,
    results: Sequence[Result],
    passage: Passage,
    plan: Plan,
    advance: Advance,
    *,
    first: bool,
) -> None:
    """Has every row read one passage; on the first one also memory and decoding are measured."""
    reference: list[np.ndarray] = []
    for number, result in enumerate(results):
        row = result.row
        scorer = Scorer(reference if number else None)
        with _memory_meter() as memory, row.attention(model):
            cache = row.make_cache(model)
            for block in feed(model, cache, passage, plan.chunk):
                result.prefill_tokens += block.tokens
                result.prefill_seconds += block.seconds
                if len(block.targets):
                    log_probs = log_softmax(block.logits)
                    scorer.add(log_probs, block.targets)
                    if not number:
                        reference.append(log_probs)
                advance(row.label, block.tokens)
            if first:
                result.cache_bytes = sum(layer.nbytes for layer in cache)
                result.cache_tokens = len(passage.tokens) - 1
                last = int(passage.tokens[-1])
                result.decode_rate = decode_rate(model, cache, last, plan.decoded)
                result.peak_bytes, result.peak_total_bytes = memory()
                advance(row.label, plan.decoded)
            del cache
        result.scores.append(scorer.score())


def _measure_copy(model: Any, result: Result, copy: Passage, plan: Plan, advance: Advance) -> None:
    """Has a row read the copy test."""
    scorer = Scorer()
    row = result.row
    with row.attention(model):
        for block in feed(model, row.make_cache(model), copy, plan.chunk):
            if len(block.targets):
                scorer.add(log_softmax(block.logits), block.targets)
            advance(row.label, block.tokens)
    result.copy_nll = scorer.score().nll


@contextmanager
def _memory_meter() -> Iterator[Callable[[], tuple[int, int]]]:
    """Gives a function that tells the peak since the start: above what was live then, and all."""
    mx.clear_cache()
    mx.reset_peak_memory()
    live = mx.get_active_memory()

    def peak() -> tuple[int, int]:
        total = mx.get_peak_memory()
        return total - live, total

    yield peak
