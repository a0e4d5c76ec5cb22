"""What the measurements run on, and whether its matrix products are slow."""

from __future__ import annotations

import glob
import importlib.metadata
import os
import platform
import re
import time
from pathlib import Path
from typing import Any

import mlx.core as mx

from kvfun.cli._model import on_cpu

SLOW_GFLOPS = 20.0
MAPS = Path("/proc/self/maps")
_PACKAGE = "libopenblas0-pthread"
_USUAL_PATH = "/usr/lib/x86_64-linux-gnu/openblas-pthread/libopenblas.so.0"
_PATTERN = "/usr/lib/*/openblas-pthread/libopenblas.so.0"
_FAST_BLAS = re.compile(r"^lib(openblas|mkl|blis|nvpl)")
_DISTRIBUTIONS = ("kvfun", "mlx", "mlx-lm", "numpy")


def describe() -> dict[str, Any]:
    """The machine and the versions of what runs on it."""
    device = mx.default_device()
    return {
        "platform": platform.platform(),
        "processor": platform.machine(),
        "cores": available_cores(),
        "device": str(device),
        "device_name": mx.device_info(device).get("device_name", str(device)),
        "python": platform.python_version(),
        **{name: version(name) for name in _DISTRIBUTIONS},
    }


def version(distribution: str) -> str:
    """The version of an installed distribution, or a note that it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def available_cores() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def matmul_gflops(size: int = 512, repeats: int = 3) -> float:
    """The speed of a float32 matrix product, in 10^9 operations a second (the best of several)."""
    a = mx.random.normal((size, size))
    mx.eval(a)
    best = float("inf")
    for _ in range(repeats):
        begin = time.perf_counter()
        mx.eval(a @ a)
        best = min(best, time.perf_counter() - begin)
    return 2 * size**3 / best / 1e9


def has_fast_blas(maps: str) -> bool:
    """Whether a process with these memory maps has loaded a fast BLAS that MLX can use.

    The copy inside NumPy's wheel does not count: its symbols have other names.
    """
    names = {line.rsplit("/", 1)[-1] for line in maps.splitlines() if "/" in line}
    return any(_FAST_BLAS.match(name) for name in names)


def has_slow_blas(gflops: float) -> bool:
    """Whether MLX's matrix products, of a speed, are slow because of its reference BLAS.

    The CPU wheel of MLX on Linux brings that one; it is ten times slower than OpenBLAS.
    """
    if not on_cpu() or platform.system() != "Linux" or gflops >= SLOW_GFLOPS:
        return False
    return not (MAPS.exists() and has_fast_blas(MAPS.read_text(errors="replace")))


def blas_hint(gflops: float) -> str:
    """What to do about slow matrix products."""
    found = sorted(glob.glob(_PATTERN))
    install = "" if found else f"install Debian/Ubuntu's {_PACKAGE} and "
    return (
        f"MLX multiplies matrices at {gflops:.1f} GFLOP/s here, because its wheel brings the "
        f"reference BLAS. For about ten times the speed, {install}run\n"
        f"  LD_PRELOAD={found[0] if found else _USUAL_PATH} kvfun compare"
    )
