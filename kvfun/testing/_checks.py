"""Assertions about one cache, or about two that must not differ."""

from __future__ import annotations

import hashlib
from typing import Any

import mlx.core as mx
import numpy as np

from .. import caches, tree
from ..codecs import Codec, Microscaled, Plain, VectorCodec
from ..geometry import mask_array
from ._history import Handle
from ._oracle import BOUNDS, Reference, attention_bound, dense_attention, to_numpy

Seen = list[list[tuple[np.ndarray, np.ndarray]]]
"""For each row, for each query that has a position: the keys and values it sees, in order."""


def columns(cache: Any, queries: int = 1) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Decoded keys, values, and the mask ``[batch, queries, columns]`` over them."""
    keys, values = caches.fetch(cache, queries=queries)
    batch, _, count, _ = keys.shape
    mask = caches.mask(cache, queries)
    if not isinstance(mask, mx.array):
        mask = mask_array(mask, queries=queries, columns=count)
    shape = (batch, queries, count)
    if mask is None:
        return to_numpy(keys), to_numpy(values), np.ones(shape, bool)
    seen = np.array(mask)
    assert seen.shape[-2:] == shape[1:], f"a mask {seen.shape} over {count} fetched columns"
    seen = seen[:, 0] if seen.ndim == 4 else seen
    return to_numpy(keys), to_numpy(values), np.broadcast_to(seen, shape)


def observe(cache: Any, queries: int = 1) -> Seen:
    """What each of the last ``queries`` tokens of each row sees: ``fetch`` under ``mask``."""
    keys, values, mask = columns(cache, queries)
    return [
        [
            (keys[row][:, mask[row, i]], values[row][:, mask[row, i]])
            for i in range(max(0, queries - offset), queries)
        ]
        for row, offset in enumerate(caches.offsets(cache))
    ]


def digest(cache: Any) -> str:
    """A hash of every byte the cache holds, visible or not."""
    state = hashlib.blake2b(digest_size=16)
    for leaf in tree.leaves(cache):
        raw = np.array(leaf.reshape(-1).view(mx.uint8)) if leaf.size else np.zeros(0)
        state.update(f"{leaf.shape}{leaf.dtype}".encode() + raw.tobytes())
    return state.hexdigest()


def fetched_digest(cache: Any) -> str:
    """A hash of what ``fetch`` and ``mask`` show, and of the offsets."""
    state = hashlib.blake2b(repr(caches.offsets(cache)).encode(), digest_size=16)
    if caches.size(cache):
        for part in columns(cache):
            state.update(repr(part.shape).encode() + part.tobytes())
    return state.hexdigest()


def same_seen(left: Seen, right: Seen, what: str) -> None:
    """Assert that two observations are equal, byte for byte."""
    assert len(left) == len(right), f"{what}: {len(left)} rows against {len(right)}"
    for row, (ours, theirs) in enumerate(zip(left, right, strict=True)):
        assert len(ours) == len(theirs), f"{what}: row {row} has {len(ours)} queries"
        for query, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            for name, x, y in (("keys", a[0], b[0]), ("values", a[1], b[1])):
                where = f"{what}: {name} that query {query} of {len(ours)} of row {row} sees"
                assert x.shape == y.shape, f"{where}: {x.shape[1]} tokens, not {y.shape[1]}"
                wrong = np.flatnonzero((_bits(x) != _bits(y)).any(axis=(0, 2)))
                assert not wrong.size, f"{where}: tokens {wrong.tolist()} of {x.shape[1]} differ"


def _bits(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).view(np.uint32)


def same(left: Any, right: Any, what: str, queries: int = 1) -> None:
    """Assert that two caches cannot be told apart: offsets, size, dtype, what each query sees."""
    verbs = {"rows": caches.batch_size, "offsets": caches.offsets, "size": caches.size}
    for name, verb in verbs.items():
        ours, theirs = verb(left), verb(right)
        assert ours == theirs, f"{what}: {name} {ours} and {theirs}"
    if caches.size(left) == 0:
        return
    for name, a, b in zip(("keys", "values"), caches.fetch(left), caches.fetch(right), strict=True):
        assert a.dtype == b.dtype, f"{what}: {name} in {a.dtype} and {b.dtype}"
    for count in sorted({1, queries}):
        same_seen(observe(left, count), observe(right, count), what)


def same_columns(left: Any, right: Any, what: str, queries: int = 1) -> None:
    """Assert that two caches of one row fetch the same columns, under the same mask."""
    (offset,) = caches.offsets(right)
    for count in sorted({1, queries}):
        ours, theirs = columns(left, count), columns(right, count)
        for name, x, y in zip(("keys", "values"), ours, theirs, strict=False):
            where = f"{what}: fetch(queries={count}) of one row: {name}"
            assert x.shape == y.shape, f"{where} {x.shape}, those of one KV {y.shape}"
            assert np.array_equal(_bits(x), _bits(y)), f"{where} differ from those of one KV"
        first = max(0, count - offset)  # queries before it are padding and may see anything
        alike = np.array_equal(ours[2][:, first:], theirs[2][:, first:])
        assert alike, f"{what}: the mask of {count} queries differs from that of one KV"


def holds(handle: Handle, what: str, queries: int = 1) -> None:
    """Assert that a cache shows the tokens it stands for, and only those."""
    cache, reference = handle.cache, handle.reference
    for name, ours, expected in (
        ("rows", caches.batch_size(cache), handle.batch),
        ("offsets", caches.offsets(cache), reference.offsets),
        ("size", caches.size(cache), reference.size),
    ):
        assert ours == expected, f"{what}: {name} {ours}, expected {expected}"
    if not handle.started or reference.size == 0:
        return
    for count in sorted({1, queries}):
        same_seen(observe(cache, count), _expected(reference, count), what)


def _expected(reference: Reference, queries: int) -> Seen:
    return [
        [reference.seen(row, query) for query in range(max(0, offset - queries), offset)]
        for row, offset in enumerate(reference.offsets)
    ]


def attends(
    handle: Handle,
    queries: mx.array,
    what: str,
    *,
    phase: str = "window",
    sinks: mx.array | None = None,
    scale: float | None = None,
) -> None:
    """Assert that attention is dense float64 attention over what each query sees.

    Queries without a position (of a row shorter than the block) are not looked at. The queries
    must be unchanged after the call.
    """
    reference, before = handle.reference, to_numpy(queries)
    out = caches.attend(handle.cache, queries, phase=phase, sinks=sinks, scale=scale)
    assert out.dtype == queries.dtype, f"{what}: {queries.dtype} queries, {out.dtype} out"
    assert out.shape[:3] == queries.shape[:3], f"{what}: {queries.shape} queries, {out.shape} out"
    result, count = to_numpy(out), queries.shape[2]
    assert np.array_equal(before, to_numpy(queries)), f"{what}: the queries were changed"
    if handle.chained:  # a NaN of a row without tokens would spoil its next layer's keys and values
        assert np.isfinite(result).all(), f"{what}: not finite in a query without a position"
    scale = float(queries.shape[3] ** -0.5) if scale is None else scale
    logits = None if sinks is None else to_numpy(sinks)
    dtype = coarsest(handle, queries)
    for row, offset in enumerate(reference.offsets):
        for index in range(max(0, count - offset), count):
            keys, values = reference.seen(row, offset - count + index)
            expected, score = dense_attention(
                before[row, :, index : index + 1], keys, values, scale=scale, sinks=logits
            )
            close(
                result[row, :, index : index + 1],
                expected,
                attention_bound(dtype, score, float(np.abs(values).max(initial=0))),
                f"{what}: {phase} query {index} of {count} of row {row} at offset {offset}",
            )


def coarsest(handle: Handle, queries: mx.array) -> mx.Dtype:
    """The dtype whose roundings attention may make.

    The queries', and for a quantized side that of its scales: ``fetch`` rounds the decoded numbers
    to it, a kernel that multiplies packed numbers does not. A chain's ``fetch`` may show them in a
    wider dtype than that, so there the scales' is asked of the tokens that came.
    """
    dtypes = [queries.dtype]
    if handle.spec is None:
        return queries.dtype
    scales = handle.dtypes if handle.chained else [x.dtype for x in caches.fetch(handle.cache)]
    for spec in handle.stored:
        codec = Codec.of(spec)
        sides = zip((codec.keys, codec.values), scales, strict=True)
        dtypes += [dtype for side, dtype in sides if _rounds(side, dtype)]
    return max(dtypes, key=BOUNDS.__getitem__)


def _rounds(codec: VectorCodec, dtype: mx.Dtype) -> bool:
    """Whether ``fetch`` shows other numbers in ``dtype`` than the planes stand for."""
    if isinstance(codec, Microscaled):
        return dtype == mx.float16
    return not isinstance(codec, Plain)


def attends_masked(
    handle: Handle, queries: mx.array, mask: mx.array, what: str, scale: float | None = None
) -> None:
    """Assert that a caller's mask replaces the cache's own over the fetched columns."""
    cache, count = handle.cache, queries.shape[2]
    keys, values = map(to_numpy, caches.fetch(cache, queries=count))
    out = to_numpy(caches.attend(cache, queries, phase="window", mask=mask, scale=scale))
    scale = float(queries.shape[3] ** -0.5) if scale is None else scale
    dtype = coarsest(handle, queries)
    shape = (*queries.shape[:3], keys.shape[2])
    hidden = np.broadcast_to(to_numpy(mask), shape)
    for row, q in enumerate(to_numpy(queries)):
        expected, score = dense_attention(q, keys[row], values[row], scale=scale, mask=hidden[row])
        limit = attention_bound(dtype, score, float(np.abs(values[row]).max(initial=0)))
        close(out[row], expected, limit, f"{what}: row {row} under a caller's mask")


def close(result: np.ndarray, expected: np.ndarray, limit: float, what: str) -> None:
    """Assert that the largest error is within a limit, and nothing is NaN."""
    error = np.abs(result - expected).max(initial=0)
    assert error <= limit, f"{what}: off by {error:.3g}, allowed are {limit:.3g}"


def reachable_nbytes(value: Any) -> int:
    """Bytes of the distinct arrays that can be reached from a value, by its own walk."""
    found: dict[int, mx.array] = {}

    def walk(x: Any) -> None:
        if isinstance(x, mx.array):
            found[id(x)] = x
        elif isinstance(x, dict):
            for item in x.values():
                walk(item)
        elif isinstance(x, tuple | list):
            for item in x:
                walk(item)
        elif hasattr(type(x), "__attrs_attrs__"):
            for field in type(x).__attrs_attrs__:
                walk(getattr(x, field.name))

    walk(value)
    return sum(x.nbytes for x in found.values())
