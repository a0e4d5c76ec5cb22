"""The one place that chooses a kernel set."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx

from ..codecs import Codec, Plain
from ..errors import DTypeError
from ._composed import COMPOSED
from ._deferred import DEFERRED, DEFERRED_COMPOSED, rotates
from ._fused import FUSED
from ._tiled import TILED

PHASES = ("decode", "window", "masked_window", "committed", "partial")

Kernel = Callable[..., Any]


def kernels_for(
    codec: Codec, device: mx.Device | None = None, dtype: mx.Dtype | None = None
) -> Mapping[str, Kernel]:
    """The default kernel set: a pure function of what is read, where and for which queries.

    ============================  ==================================================
    plain keys and values         :data:`FUSED`
    rotated keys or values        :data:`DEFERRED`
    others                        :data:`TILED`
    rotated, on CUDA              :data:`DEFERRED_COMPOSED`
    others, on CUDA               :data:`COMPOSED`, see :func:`multiplies_packed`
    ============================  ==================================================

    On an H200 ``COMPOSED`` decodes 4-bit numbers in 0.26 ms at 8k and 0.65 ms at 32k where
    ``ALL_TILED`` takes 0.39 and 0.72 (2.8 against 2.4 to 2.6 at 131k), and reads a window of 2,048
    queries at 32k in 22 ms where it takes 39, with the same tiles.

    Args:
        codec: what is read.
        device: where; the default device if not given.
        dtype: of the queries. No choice depends on it yet: the kernels themselves compute in the
            dtype that suits the device.

    Raises:
        DTypeError: a dtype that queries cannot have.

    >>> kernels_for(Codec.of("bf16")) is FUSED
    True
    """
    if dtype is not None and not mx.issubdtype(dtype, mx.floating):
        raise DTypeError(f"queries are floating point, not {dtype}")
    if isinstance(codec.keys, Plain) and isinstance(codec.values, Plain):
        return FUSED
    if rotates(codec.keys) or rotates(codec.values):
        return DEFERRED if multiplies_packed(device) else DEFERRED_COMPOSED
    return TILED if multiplies_packed(device) else COMPOSED


def multiplies_packed(device: mx.Device | None = None) -> bool:
    """Whether ``mx.quantized_matmul`` runs on any shape on a device, by default the one in use.

    Not yet in MLX's CUDA backend: there it refuses many shapes when it is evaluated (0.32.4: "No
    implementation for problem shape"), so tiles are decoded first.
    """
    device = mx.default_device() if device is None else device
    return device == mx.cpu or mx.metal.is_available()
