"""The one place that chooses a kernel set."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import mlx.core as mx

from ..codecs import Codec, Plain
from ._fused import FUSED
from ._tiled import TILED
from ._unfused import UNFUSED

PHASES = ("decode", "window", "masked_window")

Kernel = Callable[..., mx.array]

QUANTIZED: Mapping[str, Kernel] = {**TILED, "decode": UNFUSED["decode"]}
"""One query: its scores are a single row, so nothing is gained by tiles. More: tiles, so that
neither the score matrix nor a decoded copy of the cache is ever whole."""


def kernels_for(codec: Codec) -> Mapping[str, Kernel]:
    """The default kernel set of a codec on the device in use.

    >>> kernels_for(Codec.of("bf16")) is FUSED
    True
    """
    if isinstance(codec.keys, Plain) and isinstance(codec.values, Plain):
        return FUSED
    return QUANTIZED if multiplies_packed() else TILED


def multiplies_packed() -> bool:
    """Whether ``mx.quantized_matmul`` runs on any shape on the device in use.

    Not yet in MLX's CUDA backend: there it refuses many shapes when it is evaluated (0.32.4: "No
    implementation for problem shape"), so tiles are decoded first.
    """
    return mx.default_device().type == mx.cpu or mx.metal.is_available()
