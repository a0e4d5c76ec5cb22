"""Tokens already decided, each computed as it would be alone."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from ..codecs import Centred, Codec
from ..errors import ShapeError
from ..planes import Planes
from ..record import replace
from ._masks import Mask, checked, is_causal, rows, sizes_of
from ._scores import cut


def committed(decode: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """A kernel whose result for every query is bit-equal to decoding the tokens one at a time.

    Under the causal mask, query ``i`` of ``L`` reads the first ``N - L + i + 1`` columns without a
    mask, as the cache was when it was the last one. Under another mask it reads all columns under
    its own row of the mask.

    Args:
        decode: a kernel of one query.
    """

    def kernel(
        queries: mx.array,
        keys: Planes,
        values: Planes,
        codec: Codec,
        *,
        scale: float,
        mask: Mask = None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        length, columns = queries.shape[2], keys[0].shape[2]
        causal, mask = is_causal(mask), checked(mask, sizes_of(queries, keys))
        if causal and columns < length:
            raise ShapeError(f"{length} committed queries, but only {columns} columns")
        done = []
        for i in range(length):
            query = mx.contiguous(queries[:, :, i : i + 1])  # as if it came alone
            stop = columns - length + i + 1 if causal else columns
            k, v, row = cut(keys, 0, stop), cut(values, 0, stop), rows(mask, i, i + 1)
            row, seen = None if causal else row, _of_first(codec, stop)
            done.append(decode(query, k, v, seen, scale=scale, mask=row, sinks=sinks))
        return done[0] if length == 1 else mx.concatenate(done, axis=2)

    return kernel


def _of_first(codec: Codec, columns: int) -> Codec:
    """The codec as it is where only the first columns are read."""
    keys = getattr(codec, "keys", None)  # the kernel says what it cannot read
    return replace(codec, keys=keys.of_first(columns)) if isinstance(keys, Centred) else codec
