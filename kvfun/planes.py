"""Token-axis operations on planes: arrays ``[batch, heads, columns, ...]`` that share axis 2.

A codec may store a key in one array or in several; whatever is done along the token axis is done
to each of them alike. Nothing here knows what the numbers mean or which position is where.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from .geometry import Plan, Relayout

Planes = tuple[mx.array, ...]
"""The arrays of one codec's storage, ``[batch, heads, columns, width]`` each."""


_ALL = slice(None)
_handle = mx.array.__copy__
"""A fresh handle of the same array: assigning to it leaves the first handle what it was."""


def write_at(planes: Planes, column: int, block: Planes) -> Planes:
    """The planes with a block of tokens written to the columns from ``column`` on.

    A write is a static slice assignment to a fresh handle: pure for the caller, and done in place
    at evaluation when nobody holds the old planes.

    Args:
        planes: the stored arrays.
        column: where the block begins.
        block: the encoded tokens, ``[batch, heads, tokens, width]`` each.
    """
    columns = (_ALL, _ALL, slice(column, column + block[0].shape[2]))
    result = [*map(_handle, planes)]
    for plane, new in zip(result, block):  # noqa: B905 (strict costs a tenth of a token)
        plane[columns] = new
    return tuple(result)


def write(planes: Planes, plan: Plan, block: Planes) -> Planes:
    """The planes after a plan: laid out anew where it says so, then written as by :func:`write_at`.

    Args:
        planes: the stored arrays; empty before the first write.
        plan: what to do, from :meth:`kvfun.geometry.Geometry.advance`.
        block: the encoded tokens, ``[batch, heads, tokens, width]`` each.
    """
    relayout, writes = plan
    first = not planes
    if relayout is not None:
        planes = _laid_out(planes, relayout, block)
    for row, start, stop, column in writes:
        part = block
        if start or stop != block[0].shape[2]:
            part = tuple([new[:, :, start:stop] for new in block])
        planes = (
            write_at(planes, column, part) if row is None else _write_row(planes, row, column, part)
        )
    # A block that fills the first buffer becomes it, and may be a view of something larger.
    return detach(planes) if first else planes


def _write_row(planes: Planes, row: int, column: int, block: Planes) -> Planes:
    """One row of a block, written to that row."""
    index = (slice(row, row + 1), _ALL, slice(column, column + block[0].shape[2]))
    result = [*map(_handle, planes)]
    for plane, new in zip(result, block, strict=True):
        plane[index] = new[row : row + 1]
    return tuple(result)


def _laid_out(planes: Planes, relayout: Relayout, block: Planes) -> Planes:
    """The planes laid out anew, or the first ones: zeros that look like the block."""
    if planes:
        return tuple([lay_out(plane, relayout) for plane in planes])
    return zeros(block, block[0].shape[0], relayout.capacity)


def lay_out(plane: mx.array, relayout: Relayout) -> mx.array:
    """A new array of ``relayout.capacity`` columns made of pieces of ``plane``, zero elsewhere."""
    capacity, rows = relayout
    parts = []
    for row, spans in rows:
        source = plane if row is None else plane[row : row + 1]
        parts.append(_row(source, spans, capacity))
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=0)


def _row(source: mx.array, spans: Sequence[tuple[int, int, int]], capacity: int) -> mx.array:
    pieces, done = [], 0
    for start, stop, column in spans:
        if column > done:
            pieces.append(_zeros(source, source.shape[0], column - done))
        pieces.append(source[:, :, start:stop])
        done = column + stop - start
    if done < capacity:
        pieces.append(_zeros(source, source.shape[0], capacity - done))
    return pieces[0] if len(pieces) == 1 else mx.concatenate(pieces, axis=2)


def zeros(like: Planes, batch: int, columns: int) -> Planes:
    """Planes like others, with so many rows and columns of zeros."""
    return tuple([_zeros(plane, batch, columns) for plane in like])


def _zeros(like: mx.array, batch: int, columns: int) -> mx.array:
    return mx.zeros((batch, like.shape[1], columns, *like.shape[3:]), like.dtype)


def read(planes: Planes, spans: Sequence[tuple[int, int]]) -> Planes:
    """The columns of ``spans``, one after another; one span is a view."""
    if len(spans) == 1:
        ((start, stop),) = spans
        if len(planes) == 1:  # the plain codecs' case, a tenth faster without the loop
            return (columns(planes[0], start, stop) if start else planes[0][:, :, :stop],)
        return tuple([plane[:, :, start:stop] for plane in planes])
    if not spans:
        return tuple([plane[:, :, :0] for plane in planes])
    return tuple([mx.concatenate([plane[:, :, a:b] for a, b in spans], axis=2) for plane in planes])


def columns(plane: mx.array, start: int, stop: int) -> mx.array:
    """Columns ``[start, stop)`` of a plane of numbers, fit for MLX's fused attention.

    In MLX's CUDA backend (0.32.4) the fused kernel for one query of 16 bits reads past the end of a
    buffer in which its keys do not start at the first column (NaN, or an illegal access): there
    they get a buffer of their own.
    """
    part = plane[:, :, start:stop]
    if start and plane.dtype in _SHORT and _on_cuda():
        return part * 1  # mx.contiguous leaves a slice of a single head where it is
    return part


_SHORT = (mx.bfloat16, mx.float16)


def _on_cuda() -> bool:
    return mx.default_device().type == mx.gpu and not mx.metal.is_available()


def gather(planes: Planes, rows: Sequence[int]) -> Planes:
    """Rows of the batch, in the order given, as arrays of their own."""
    index = mx.array(list(rows), dtype=mx.int32)
    return tuple([mx.take(plane, index, axis=0) for plane in planes])


def join(parts: Sequence[Planes]) -> Planes:
    """The batches one after another."""
    return tuple([mx.concatenate(list(arrays), axis=0) for arrays in zip(*parts, strict=True)])


def detach(planes: Planes) -> Planes:
    """The same numbers in buffers of their own: a slice would keep its whole parent alive."""
    return tuple([mx.contiguous(plane) for plane in planes])
