"""Finds the tables of ``kvfun.codecs._trellis``: prints, or writes, ``_trellis_tables.py``.

    python -m bench.trellis_tables [--bits 1,2,3,4] [--rounds 20000] [--starts 3] [--write]

A table has a number for each state, the last 8 bits of a stream, and should bring normally
distributed vectors of 64 numbers as near as can be to some path through it. That is a vector
quantizer, and this the generalized Lloyd algorithm for it: draw vectors, find their nearest paths,
move each state's number to the mean of those that met it.

* Which states get which numbers at first is random: quantiles of N(0, 1) in any order. Rounds of
  few vectors (128, and what a short memory holds) and some noise, which fades out over four fifths
  of the rounds, lead out of poor orders: that is worth more than many starts. The last rounds
  remember more and more, so that the means get exact.
* States that differ in their oldest bit alone have opposite numbers. That costs less than starts
  differ, and spares the encoder half the products, and a decoder half the table.
* The stream starts after zeros, as in the codec, so the first numbers are part of what is judged.
* The best of a few starts is kept, by vectors that none of them has seen, and rounded to multiples
  of 2**-13.

Seeds are fixed, so the same tables come out again; all of it takes about ten minutes of a core. The
search is NumPy's and not the codec's, so a fault of that would not hide.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import NormalDist

import numpy as np

from bench import _timing

DIM, COUNT = 64, 128
UNITS = 2**13
NOISE = 0.2
FILE = Path(__file__).parents[1] / "kvfun" / "codecs" / "_trellis_tables.py"
HEAD = '''"""The tables of the trellis code, as ``python -m bench.trellis_tables`` finds them."""

_HALVES = {
'''
TAIL = '''}
"""What the states below 128 stand for, in units of 2**-13."""

TABLES = {bits: (*half, *[-n for n in half]) for bits, half in _HALVES.items()}
"""For each number of new bits what the 256 states stand for; the upper half is the lower one's
negative."""
'''


class Search:
    """Nearest paths of ``COUNT`` vectors at a time, ``float32 [DIM, COUNT]``."""

    def __init__(self, bits: int):
        self.bits, self.shared = bits, 256 >> bits
        half = self.shared // 2
        self._kept = np.full((DIM, self.shared, COUNT), np.inf, np.float32)
        self._kept[0, 0] = 0
        self._low, self._high = np.empty((2, half, 1 << bits, COUNT), np.float32)
        self._before = self.shared * np.arange(1 << bits)[:, None]
        self._columns = np.arange(COUNT)

    def __call__(self, y: np.ndarray, half: np.ndarray) -> np.ndarray:
        """The states of the paths, ``[DIM, COUNT]``, in a table of which this is one half."""
        table, bits, low, high = np.concatenate([half, -half]), self.bits, self._low, self._high
        values, middle, twice = half.reshape(-1, 1 << bits, 1), self.shared // 2, 2 * y
        squares = values * values
        for at, kept in enumerate(self._kept):
            np.multiply(values, twice[at], out=low)
            np.add(kept[middle:, None], low, out=high)
            np.subtract(kept[:middle, None], low, out=low)
            if at + 1 < DIM:
                np.minimum(low, high, out=low)
                np.add(low, squares, out=low)
                np.min(low.reshape(-1, self.shared, COUNT), axis=0, out=self._kept[at + 1])
        ends = np.concatenate([low + squares, high + squares]).reshape(256, COUNT)
        states = np.empty((DIM, COUNT), np.int64)
        states[-1] = ends.argmin(axis=0)
        for at in range(DIM - 2, -1, -1):
            before = self._before + (states[at + 1] >> bits)
            value = table[before]
            cost = self._kept[at, before >> bits, self._columns] + value * (value - twice[at])
            states[at] = before[cost.argmin(axis=0), self._columns]
        return states


def distortion(search: Search, half: np.ndarray, seed: int, rounds: int) -> float:
    """The mean squared error of numbers from N(0, 1)."""
    rng, table, total = np.random.default_rng(seed), np.concatenate([half, -half]), 0.0
    for _ in range(rounds):
        y = rng.standard_normal((DIM, COUNT), np.float32)
        total += float(np.mean((y - table[search(y, half)]) ** 2))
    return total / rounds


def found(search: Search, seed: int, rounds: int) -> np.ndarray:
    """Half a table, ``float32 [128]``, from one start."""
    rng = np.random.default_rng(seed)
    quantiles = [NormalDist().inv_cdf((128.5 + i) / 256) for i in range(128)]
    half = (rng.permutation(quantiles) * rng.choice([-1, 1], 128)).astype(np.float32)
    counts, sums = np.zeros((2, 128))
    for at in range(rounds):
        y = rng.standard_normal((DIM, COUNT), np.float32)
        states = search(y, half).reshape(-1)
        signed = np.where(states < 128, y.reshape(-1), -y.reshape(-1))
        done = at / rounds
        memory = 0.5 if done < 0.7 else 0.98 if done < 0.85 else 0.998
        counts = memory * counts + np.bincount(states & 127, minlength=128)
        sums = memory * sums + np.bincount(states & 127, signed, minlength=128)
        noise = NOISE * max(0.0, 1 - done / 0.8) ** 2
        # a state that was hardly met stays near zero, where it soon is
        means = sums / np.maximum(counts, 1e-3) + noise * rng.standard_normal(128)
        half = means.astype(np.float32)
    return half


def rows(bits: int, half: Sequence[int]) -> str:
    """An entry of the file, as ruff formats it."""
    lines = [f"        *({', '.join(map(str, half[i : i + 8]))}),\n" for i in range(0, 128, 8)]
    return f"    {bits}: (\n{''.join(lines)}    ),\n"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--bits", type=_timing.integers, default=[1, 2, 3, 4])
    parser.add_argument("--rounds", type=int, default=20000, help="of a start")
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="the file, instead of printing it")
    args = parser.parse_args(argv)
    text = HEAD
    for bits in args.bits:
        search, tried = Search(bits), []
        for start in range(args.starts):
            began = time.process_time()
            half = np.round(found(search, start, args.rounds) * UNITS).astype(int)
            judged = distortion(search, (half / UNITS).astype(np.float32), 1000, 64)
            tried.append((judged, half.tolist()))
            spent = time.process_time() - began
            print(f"# {bits} bits, start {start}: {judged:.5f} ({spent:.0f} s)", flush=True)
        best = min(tried)[1]
        final = distortion(search, (np.array(best) / UNITS).astype(np.float32), 1001, 512)
        print(f"# {bits} bits: {final:.5f} on other vectors", flush=True)
        text += rows(bits, best)
    text += TAIL
    if args.write:
        FILE.write_text(text)
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
