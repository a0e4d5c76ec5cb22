"""A KV record as a string and a list of arrays, and back: what mlx-lm saves of a cache."""

from __future__ import annotations

import json

import attrs
import mlx.core as mx

from ... import planes as p
from ...caches import KV, Layout
from ...codecs import Codec
from ...errors import CorruptError
from ...geometry import Geometry, Policy, Relayout, Row, round_up

VERSION = 1


def dump(cache: KV, queries: int | None = None) -> tuple[str, list[mx.array]]:
    """The description of a cache as JSON, and its columns, keys' planes first.

    Args:
        cache: any cache.
        queries: only the columns that the last so many tokens see; all that are held if ``None``.
    """
    geometry, layout = cache.geometry, cache.layout
    spans, rows = _held(geometry) if queries is None else _seen(geometry, queries)
    policy = geometry.policy
    header = {
        "kvfun": VERSION,
        "codec": cache.codec.spec,
        "window": policy.window,
        "sinks": policy.sinks,
        "chunk": policy.chunk,
        "reserve": policy.reserve,
        "rows": [list(row) for row in rows],
        "layout": None if layout is None else _layout(layout),
        "keys": len(cache.keys),
    }
    planes = list(p.read(cache.keys + cache.values, spans))
    return json.dumps(header, separators=(",", ":")), planes


Spans = tuple[tuple[int, int], ...]


def _held(geometry: Geometry) -> tuple[Spans, tuple[Row, ...]]:
    used = max(0, *(geometry.end(row) for row in geometry.rows))
    return ((0, used),) if used else (), geometry.rows


def _seen(geometry: Geometry, queries: int) -> tuple[Spans, tuple[Row, ...]]:
    """The visible columns side by side, and the rows as they are in them."""
    spans = geometry.spans(queries)
    starts = [start for start, _ in spans] or [0]
    gap = starts[-1] - (spans[0][1] if len(spans) > 1 else 0)
    rows = tuple(
        row._replace(shift=row.shift - gap, first=geometry.lowest(row, queries))
        for row in geometry.rows
    )
    return spans, rows


def _layout(layout: Layout) -> dict:
    fields = attrs.asdict(layout)
    return {
        **fields,
        "key_dtype": _name(layout.key_dtype),
        "value_dtype": _name(layout.value_dtype),
    }


def _name(dtype: mx.Dtype) -> str:
    return str(dtype).rpartition(".")[2]


def load(header: str, planes: list[mx.array]) -> KV:
    """The cache that :func:`dump` described.

    Raises:
        CorruptError: not such a description, or arrays that do not fit it.
    """
    try:
        said = json.loads(header)
        version = said["kvfun"]
    except (ValueError, TypeError, KeyError) as error:
        raise CorruptError(f"not the state of a kvfun cache: {header!r:.80}") from error
    if version != VERSION:
        raise CorruptError(f"the state has version {version!r}; this kvfun reads {VERSION}")
    try:
        policy = Policy(said["window"], said["sinks"], said["chunk"], said["reserve"])
        rows = tuple(Row(*row) for row in said["rows"])
        codec, layout = Codec.of(said["codec"]), said["layout"]
        if layout is not None:
            dtypes = {name: getattr(mx, layout[name]) for name in ("key_dtype", "value_dtype")}
            layout = Layout(**{**layout, **dtypes})
        split = said["keys"]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptError(f"the state of a kvfun cache is damaged: {error}") from error
    geometry = Geometry(policy, 0, rows)
    if layout is None:
        return KV((), (), codec, geometry)
    used = max(0, *(geometry.end(row) for row in rows))
    for plane in planes:
        if plane.ndim != 4 or plane.shape[:3] != (layout.batch, layout.kv_heads, used):
            raise CorruptError(
                f"a plane of {tuple(plane.shape)} where [{layout.batch}, {layout.kv_heads}, "
                f"{used}, ...] was saved"
            )
    capacity = round_up(max(used, 1))
    relayout = Relayout(capacity, ((None, ((0, used, 0),) if used else ()),))
    laid = tuple(p.lay_out(plane, relayout) for plane in planes)
    return KV(laid[:split], laid[split:], codec, attrs.evolve(geometry, capacity=capacity), layout)
