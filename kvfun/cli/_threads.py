"""In how many threads NumPy multiplies.

The threads of the OpenBLAS in NumPy's wheel wait for one another by spinning. Where other work
keeps a core busy, two of them have been ten times slower than one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from threadpoolctl import threadpool_limits

_SHAPES = ((32, 576), (576, 1536))  # a chunk of tokens by one of the default model's matrices
_TRIAL = 0.3  # seconds for a number of threads: longer than others' time slices


def products_a_second(seconds: float = _TRIAL) -> float:
    """How often NumPy multiplies a chunk by a matrix just now; the mean, stalls and all."""
    a, b = (np.ones(shape, dtype=np.float32) for shape in _SHAPES)
    begin, count = time.perf_counter(), 0
    while time.perf_counter() - begin < seconds:
        np.matmul(a, b)
        count += 1
    return count / (time.perf_counter() - begin)


@contextmanager
def as_many_as_pay_off() -> Iterator[None]:
    """Within it, NumPy multiplies in one thread if all of them are slower just now."""
    together = products_a_second()
    with threadpool_limits(limits=1, user_api="blas"):
        alone = products_a_second()
    with threadpool_limits(limits=1 if alone > together else None, user_api="blas"):
        yield
