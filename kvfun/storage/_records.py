"""A record as a string and a list of arrays, and back."""

from __future__ import annotations

import json

import attrs
import mlx.core as mx

from .. import caches as verbs
from .. import planes as p
from ..caches import KV, Chain, Cross, Delayed, Latent, Layout, Rebased, Recurrent, rebased
from ..caches._recurrent import Ahead
from ..codecs import Codec, Rope, learnt_arrays, with_learnt
from ..errors import CorruptError, UnsupportedError
from ..geometry import Ageing, Geometry, Policy, Relayout, Row, round_up

VERSION = 1


Record = KV | Chain | Cross | Delayed | Latent | Rebased | Recurrent


def dump(cache: Record, queries: int | None = None) -> tuple[str, list[mx.array]]:
    """The description of a cache as JSON, and its columns, keys' planes first.

    Args:
        cache: any cache.
        queries: only the columns that the last so many tokens see; all that are held if ``None``.
            A chain's parts are always dumped whole.
    """
    if isinstance(cache, Chain):
        header, planes = _dump_chain(cache)
    elif isinstance(cache, Delayed):
        header, planes = _dump_delayed(cache, queries)
    elif isinstance(cache, Recurrent):
        header, planes = _dump_recurrent(cache)
    elif isinstance(cache, Latent | Cross):
        header, planes = _dump_parts(cache)
    elif isinstance(cache, Rebased):
        said, planes = _dump(cache.inner, queries)
        header = {"kvfun": VERSION, "rebased": said, "traditional": cache.rope.traditional}
        planes = [*planes, cache.rope.frequencies]
    else:
        header, planes = _dump(cache, queries)
    return json.dumps(header, separators=(",", ":")), planes


def _dump_delayed(cache: Delayed, queries: int | None) -> tuple[dict, list[mx.array]]:
    if not isinstance(cache.inner, KV):
        raise UnsupportedError("rows that were not converted together cannot be saved as one cache")
    said, planes = _dump(cache.inner, queries)
    learnt, flags = learnt_arrays(cache.target)
    header = {
        "kvfun": VERSION,
        "delayed": said,
        "target": cache.target.spec,
        "learnt": list(learnt),
        "flags": flags,
        "start": cache.start,
        "floors": list(cache.floors),
    }
    return header, [*planes, *learnt.values()]


def _dump_recurrent(cache: Recurrent) -> tuple[dict, list[mx.array]]:
    names = sorted(cache.states)
    header = {
        "kvfun": VERSION,
        "recurrent": names,
        "offsets": None if cache.offsets is None else list(cache.offsets),
        "ahead": None if cache.ahead is None else [[x.left, x.length] for x in cache.ahead],
        "stored": [[name, dtype and _name(dtype)] for name, dtype in cache.stored],
        "given": [[name, _name(dtype)] for name, dtype in cache.given],
    }
    return header, [cache.states[name] for name in names]


def _dump_parts(cache: Latent | Cross) -> tuple[dict, list[mx.array]]:
    """Of a record that consists of others, each as it is by itself."""
    parts = [cache.inner, cache.index if isinstance(cache, Latent) else cache.encoded]
    dumped = [dump(part) for part in parts if part is not None]
    header = {
        "kvfun": VERSION,
        "parts": [json.loads(said) for said, _ in dumped],
        "planes": [len(planes) for _, planes in dumped],
        "sources": None if isinstance(cache, Latent) else list(cache.sources),
    }
    return header, [plane for _, planes in dumped for plane in planes]


def _dump_chain(chain: Chain) -> tuple[dict, list[mx.array]]:
    parts = [_dump(part, None) for part in chain.parts]
    header = {
        "kvfun": VERSION,
        "chain": [said for said, _ in parts],
        "planes": [len(planes) for _, planes in parts],
        "policy": attrs.asdict(chain.policy, filter=lambda field, _: field.init),
        "front": chain.front,
        "ageing": None if chain.ageing is None else attrs.asdict(chain.ageing),
        "padding": chain.padding,
    }
    return header, [plane for _, planes in parts for plane in planes]


def _dump(cache: KV, queries: int | None) -> tuple[dict, list[mx.array]]:
    geometry, layout = cache.geometry, cache.layout
    spans, rows = _held(geometry) if queries is None else _seen(geometry, queries)
    policy = geometry.policy
    learnt, flags = learnt_arrays(cache.codec)
    header = {
        "kvfun": VERSION,
        "codec": cache.codec.spec,
        **({"learnt": list(learnt), "flags": flags} if learnt or flags else {}),
        "window": policy.window,
        "sinks": policy.sinks,
        "chunk": policy.chunk,
        "reserve": policy.reserve,
        "rows": [list(row) for row in rows],
        "layout": None if layout is None else _layout(layout),
        "keys": len(cache.keys),
    }
    return header, [*p.read(cache.keys + cache.values, spans), *learnt.values()]


Spans = tuple[tuple[int, int], ...]


def _held(geometry: Geometry) -> tuple[Spans, tuple[Row, ...]]:
    return ((0, geometry.used),) if geometry.used else (), geometry.rows


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


def load(header: str, planes: list[mx.array]) -> Record:
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
    if "delayed" in said:
        return _load_delayed(said, planes)
    if "rebased" in said:
        return _load_rebased(said, planes)
    if "recurrent" in said:
        return _load_recurrent(said, planes)
    if "parts" in said:
        return _load_parts(said, planes)
    return _load_chain(said, planes) if "chain" in said else _load(said, planes)


def _load_parts(said: dict, planes: list[mx.array]) -> Latent | Cross:
    try:
        counts, sources, parts, done = said["planes"], said["sources"], [], 0
        for part, count in zip(said["parts"], counts, strict=True):
            parts.append(load(json.dumps(part), planes[done : done + count]))
            done += count
        inner, *others = parts
        if done != len(planes) or any(not isinstance(other, KV) for other in others):
            raise ValueError(f"{len(planes)} planes where {counts} were saved")
        if sources is None:
            if len(others) > 1 or not isinstance(inner, KV):
                raise ValueError(f"latents of {[type(part).__name__ for part in parts]}")
            if any(other.geometry.rows != inner.geometry.rows for other in others):
                raise ValueError("latents and index keys of different tokens")
            return Latent(*parts)  # pyright: ignore
        (encoded,) = others
        if any(type(n) is not int or not 0 <= n < verbs.batch_size(encoded) for n in sources):
            raise ValueError(f"sources {sources} of {verbs.batch_size(encoded)}")
        if not sources or verbs.batch_size(inner) not in (1, len(sources)):
            raise ValueError(f"{len(sources)} sources of {verbs.batch_size(inner)} rows")
        return Cross(inner, encoded, tuple(sources))
    except CorruptError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptError(f"the state of a kvfun cache is damaged: {error}") from error


def _load_recurrent(said: dict, arrays: list[mx.array]) -> Recurrent:
    try:
        names, offsets, ahead = said["recurrent"], said["offsets"], said["ahead"]
        rows = {len(x) for x in (offsets, ahead, *arrays) if x is not None}
        numbers = [*(offsets or ()), *(n for pair in ahead or () for n in pair)]
        if len(names) != len(arrays) or len(rows) > 1 or (offsets is None and not arrays):
            raise ValueError(f"states {names} of {rows} rows, {len(arrays)} arrays")
        if any(type(n) is not int for n in numbers) or any(n < 0 for n in offsets or ()):
            raise ValueError(f"offsets {offsets}, padding {ahead}")
        states = dict(zip(names, arrays, strict=True))
        stored = [(name, dtype and _dtype(dtype)) for name, dtype in said["stored"]]
        given = [(name, _dtype(dtype)) for name, dtype in said["given"]]
        if not {name for name, _ in given} <= states.keys():
            raise ValueError(f"dtypes {given} of states {names}")
        return Recurrent(
            states,
            None if offsets is None else tuple(offsets),
            None if ahead is None else tuple([Ahead(*pair) for pair in ahead]),
            tuple(stored),
            tuple(given),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptError(f"the state of a recurrent kvfun cache is damaged: {error}") from error


def _dtype(name: str) -> mx.Dtype:
    dtype = getattr(mx, name)
    if not isinstance(dtype, mx.Dtype):
        raise ValueError(f"{name} is no dtype")
    return dtype


def _load_rebased(said: dict, planes: list[mx.array]) -> Rebased:
    try:
        *planes, frequencies = planes
        rope = Rope(frequencies, said["traditional"])
        if type(rope.traditional) is not bool or frequencies.ndim != 1 or not frequencies.size:
            raise ValueError(f"a RoPE of {frequencies.shape}")
        inner = _load(said["rebased"], planes)
        if inner.layout is not None and rope.dims > inner.layout.head_dim:
            raise ValueError(f"a RoPE of {rope.dims} for {inner.layout}")
        return rebased(inner, rope)
    except CorruptError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptError(f"the state of a rebased kvfun cache is damaged: {error}") from error


def _load_delayed(said: dict, planes: list[mx.array]) -> Delayed:
    try:
        target, planes = _with_learnt(Codec.of(said["target"]), said, planes)
        start, floors = said["start"], tuple(said["floors"])
        if any(type(n) is not int or n < 0 for n in (start, *floors)) or not start or not floors:
            raise ValueError(f"a start of {start!r} and floors {floors!r}")
        inner = _load(said["delayed"], planes)
        if inner.codec.spec != (target.spec if all(floors) else "plain"):
            raise ValueError(f"{inner.codec.spec} that is to be {target.spec} from {start} on")
    except CorruptError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptError(f"the state of a delayed kvfun cache is damaged: {error}") from error
    if inner.layout is not None:
        _check_learnt(target, inner.layout)
    return Delayed(inner, target, start, floors)


def _load_chain(said: dict, planes: list[mx.array]) -> Chain:
    try:
        counts, ageing = said["planes"], said["ageing"]
        policy = Policy(**said["policy"])
        ageing = None if ageing is None else Ageing(**ageing)
        if sum(counts) != len(planes) or len(counts) != len(said["chain"]):
            raise ValueError(f"{len(planes)} planes where {counts} were saved")
        if len(counts) < 1 + bool(said["front"]) + (ageing is not None):
            raise ValueError(f"only {len(counts)} parts")
        for number in (said["front"], said["padding"]):
            if type(number) is not int or number < 0:
                raise TypeError(f"{number!r} is no number of tokens")
        parts, done = [], 0
        for part, count in zip(said["chain"], counts, strict=True):
            parts.append(_load(part, planes[done : done + count]))
            done += count
    except CorruptError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptError(f"the state of a kvfun chain is damaged: {error}") from error
    *segments, tail = parts
    return Chain(tuple(segments), tail, policy, said["front"], ageing, said["padding"])


def _load(said: dict, planes: list[mx.array]) -> KV:
    try:
        geometry, codec, layout, split = _described(said)
        used = geometry.used
        codec, planes = _with_learnt(codec, said, planes)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptError(f"the state of a kvfun cache is damaged: {error}") from error
    if layout is None:
        return KV((), (), codec, geometry)
    _check_learnt(codec, layout)
    _check(planes, layout, codec, used, split)
    capacity = round_up(max(used, 1))
    relayout = Relayout.keeping(used, capacity)
    laid = tuple(p.lay_out(plane, relayout) for plane in planes)
    return KV(laid[:split], laid[split:], codec, attrs.evolve(geometry, capacity=capacity), layout)


def _with_learnt(codec: Codec, said: dict, planes: list[mx.array]) -> tuple[Codec, list[mx.array]]:
    """The codec with what it had learnt, whose arrays are the last ones; and the others."""
    names, flags = said.get("learnt", []), said.get("flags", {})
    split = len(planes) - len(names)
    if split < 0 or any(type(flag) is not bool for flag in flags.values()):
        raise ValueError(f"{names} and {flags} of {len(planes)} arrays")
    learnt = dict(zip(names, planes[split:], strict=True))
    return with_learnt(codec, learnt, flags), planes[:split]


def _check_learnt(codec: Codec, layout: Layout) -> None:
    """Raise ``CorruptError`` where what was learnt is not for such keys and values."""
    heads, dims = layout.kv_heads, {"keys": layout.head_dim, "values": layout.value_dim}
    for name, array in learnt_arrays(codec)[0].items():
        side, _, kind = name.partition(".")
        dim = dims[side]
        wanted = {"mean": (heads, 1, dim), "reference": (heads, 1, 1)}.get(kind, (heads, dim, dim))
        fits = array.shape[0] in (1, layout.batch) and array.shape[1:] == wanted
        if kind == "rope":
            fits = array.ndim == 1 and 0 < 2 * array.shape[0] <= dim
        if not fits or array.dtype != mx.float32:
            raise CorruptError(f"{name} {array.dtype} {array.shape} does not fit {layout}")


def _described(said: dict) -> tuple[Geometry, Codec, Layout | None, int]:
    policy = Policy(said["window"], said["sinks"], said["chunk"], said["reserve"])
    rows = tuple(Row(*row) for row in said["rows"])
    codec, layout = Codec.of(said["codec"]), said["layout"]
    if layout is not None:
        dtypes = {name: getattr(mx, layout[name]) for name in ("key_dtype", "value_dtype")}
        layout = Layout(**{**layout, **dtypes})
    numbers = [number for row in rows for number in row]
    if layout is not None:
        numbers += [layout.batch, layout.kv_heads, layout.head_dim, layout.value_dim]
    if any(type(number) is not int for number in numbers):
        raise TypeError(f"{numbers} should be integers")
    if len(rows) not in (1, 1 if layout is None else layout.batch):
        raise ValueError(f"{len(rows)} rows")
    if any(min(row.first, row.first + row.shift) < policy.sinks for row in rows):
        raise ValueError(f"rows {rows} hold what is not there")
    return Geometry(policy, 0, rows), codec, layout, said["keys"]


def _check(planes: list[mx.array], layout: Layout, codec: Codec, used: int, split: int) -> None:
    """Raise ``CorruptError`` where the arrays are not such as the codec makes."""
    one = (layout.batch, layout.kv_heads, 1)
    try:
        keys = codec.keys.encode(mx.zeros((*one, layout.head_dim), layout.key_dtype))
        values = codec.values.encode(mx.zeros((*one, layout.value_dim), layout.value_dtype))
    except ValueError as error:
        raise CorruptError(f"{codec.spec} planes of {layout} cannot be: {error}") from error
    wanted = [((*x.shape[:2], used, *x.shape[3:]), x.dtype) for x in keys + values]
    got = [(tuple(plane.shape), plane.dtype) for plane in planes]
    if got != wanted or split != len(keys):
        raise CorruptError(f"planes {got} where {wanted} were saved")
