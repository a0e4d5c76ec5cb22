"""What codecs learn from the tokens of a cache, and how it travels with the rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from .. import tree
from ..errors import CodecError
from ..record import replace
from . import _statistics
from ._centred import Centred
from ._pair import Codec
from ._rope import Rope
from ._rotated import Rotated

FRONT = 16
"""First tokens that stay raw where a codec learns from them, if not said."""

SKIPPED = 4
"""The first tokens are unlike all others (attention sinks): nothing is learnt from them."""


def front_of(codec: Codec) -> int:
    """How many first tokens are to stay raw, so that the codec can learn from them."""
    return FRONT if learns(codec) else 0


def learns(codec: Codec) -> bool:
    """Whether tokens can tell the codec something that it was not given."""
    return _learns(codec.keys) or _learns(codec.values)


def _learns(codec: Any) -> bool:
    if isinstance(codec, Centred):
        return not codec.frozen
    return isinstance(codec, Rotated) and codec.log_scale and not codec.frozen


def has_learnt(codec: Codec) -> bool:
    """Whether the codec was told by tokens, or was given, what it could be told."""
    return any(not name.endswith(".rope") for name in learnt_arrays(codec)[0])


def learnt_from(front: int) -> tuple[int, int]:
    """The positions ``[start, stop)`` of so many first tokens that are learnt from.

    Not the first four; of fewer than eight, the second half.
    """
    return min(SKIPPED, front // 2), front


def calibrated(
    codec: Codec, keys: mx.array, values: mx.array, valid: mx.array, positions: mx.array
) -> Codec:
    """The codec with what it learns from tokens; what it was given stays.

    Args:
        codec: any.
        keys: ``[batch, kv_heads, tokens, head_dim]``, decoded, after RoPE.
        values: ``[batch, kv_heads, tokens, value_dim]``.
        valid: bool ``[batch or 1, 1, tokens, 1]``: which tokens of a row count.
        positions: ``[batch or 1, 1, tokens]``.
    """
    if isinstance(codec.keys, Centred):
        codec = replace(codec, keys=codec.keys.calibrated(keys, valid, positions))
    elif isinstance(codec.keys, Rotated):
        codec = replace(codec, keys=codec.keys.calibrated(keys, valid))
    if isinstance(codec.values, Rotated):
        codec = replace(codec, values=codec.values.calibrated(values, valid))
    return codec


def with_statistics(
    codec: Codec, keys: mx.array, valid: mx.array, positions: mx.array, queries: mx.array
) -> Codec:
    """The codec with what keys and queries of a prompt tell it; all that it knows is frozen.

    Args:
        codec: one that has learnt its mean, with a codec of keys that asks for ``statistics``.
        keys: ``[batch, kv_heads, tokens, head_dim]``, decoded, after RoPE.
        valid: bool ``[batch or 1, 1, tokens, 1]``: which of them count.
        positions: ``[batch or 1, 1, tokens]``.
        queries: ``[batch, heads, L, head_dim]``, after RoPE.
    """
    centred = codec.keys
    if isinstance(codec.values, Rotated):
        codec = replace(codec, values=replace(codec.values, frozen=True))
    if isinstance(centred, Centred):
        left = keys.astype(mx.float32) - centred.mean_at(positions)
        inner = _with_statistics(centred.rotated, left, valid, queries)
        return replace(codec, keys=replace(centred, codec=inner, frozen=True))
    assert isinstance(centred, Rotated)
    inner = _with_statistics(centred, keys, valid, queries)
    return replace(codec, keys=replace(inner, frozen=True))


def _with_statistics(codec: Rotated, keys: mx.array, valid: mx.array, queries: mx.array) -> Rotated:
    kv_heads = keys.shape[1]
    if codec.statistics == "ldlq":
        turned = codec.enter(queries)
        metric = _statistics.query_moment(turned, kv_heads)
        return replace(codec, feedback=(_statistics.feedback(metric), metric))
    valid = valid & mx.all(mx.isfinite(keys), axis=-1, keepdims=True)
    counted = mx.maximum(mx.sum(valid.astype(mx.float32), axis=2, keepdims=True), 1.0)
    weight = mx.sqrt(keys.shape[2] / counted)
    known = mx.where(valid, keys.astype(mx.float32), 0.0) * weight
    of_keys = _statistics.second_moment(known, KEY_SHRINKAGE)
    of_queries = _statistics.query_moment(queries, kv_heads)
    return replace(codec, basis=_statistics.balanced(of_queries, of_keys))


KEY_SHRINKAGE = 0.1
"""How far the moments of keys, of which there are fewer than of queries, are drawn together."""


def chosen(codec: Codec, old: Codec, rows: mx.array) -> Codec:
    """What ``codec`` has learnt if ``rows`` (bool ``[batch]``) is true, else what ``old`` has."""

    def pick(new: mx.array, before: mx.array) -> mx.array:
        return mx.where(rows.reshape(-1, *[1] * (new.ndim - 1)), new, before)

    return _together([codec, old], pick)


def statistics_of(codec: Codec) -> str | None:
    """Which statistics of a prompt the codec has to know: ``"ldlq"``, ``"bal"`` or none."""
    keys = codec.keys.codec if isinstance(codec.keys, Centred) else codec.keys
    return keys.statistics if isinstance(keys, Rotated) else None


def unlearnt(codec: Any) -> Any:
    """The codec of one side without what it has learnt: the shapes of its planes are the same."""
    return _changed(codec, lambda *_: None)


def with_rope(codec: Codec, rope: Rope | None) -> Codec:
    """The codec, told which RoPE keys went through, if that matters to it.

    >>> with_rope(Codec.of("rot-k4v4"), Rope.of(64)).keys.rope.dims
    64
    """
    if isinstance(codec.keys, Centred) and codec.keys.mean is None:
        return replace(codec, keys=replace(codec.keys, rope=rope))
    return codec


# -- rows ------------------------------------------------------------------------------------------


def of_rows(codec: Any, rows: Sequence[int]) -> Any:
    """The codec of the given rows of a batch: each keeps what was learnt from it."""
    index = mx.array(list(rows), dtype=mx.int32)

    def gathered(x: mx.array) -> mx.array:
        return x if x.shape[0] == 1 else mx.take(x, index, axis=0)

    return _changed(codec, lambda _, value: tree.map(gathered, value))


def joined(codecs: Sequence[Codec], batches: Sequence[int]) -> Codec:
    """The codec of batches one after another, all of one spec.

    Raises:
        CodecError: some were calibrated, others not, or for different RoPEs.
    """
    for side in ("keys", "values"):
        _alike([getattr(codec, side) for codec in codecs])
    return _together(codecs, lambda *parts: _rows_of(parts, batches))


NEUTRAL = {"mean": 0.0, "reference": 1.0}
"""What is the same as not to have learnt anything."""


def _together(codecs: Sequence[Any], combine: Callable[..., mx.array]) -> Any:
    """The first of codecs of one spec, with what they have learnt combined, array by array.

    Raises:
        CodecError: one has what another lacks, and there is nothing that is the same as to lack it.
    """
    first = codecs[0]
    changes = {
        name: _together([getattr(codec, name) for codec in codecs], combine)
        for name, inside in (("keys", Codec), ("values", Codec), ("codec", Centred))
        if isinstance(first, inside)
    }
    for name in getattr(first, "per_row", ()):
        values = [getattr(codec, name) for codec in codecs]
        known = next((value for value in values if value is not None), None)
        if known is None:
            continue
        if any(value is None for value in values):
            if name not in NEUTRAL:
                raise CodecError(f"cannot batch {first.spec} with and without a {name}")
            neutral = mx.full((1, *known.shape[1:]), NEUTRAL[name], known.dtype)
            values = [neutral if value is None else value for value in values]
        changes[name] = tree.map(combine, *values)
    return replace(first, **changes) if changes else first


def _rows_of(parts: Sequence[mx.array], batches: Sequence[int]) -> mx.array:
    shapes = {part.shape[1:] for part in parts}
    if len(shapes) > 1:
        raise CodecError(f"cannot batch codecs for vectors of other shapes: {sorted(shapes)}")
    spread = [
        mx.broadcast_to(part, (batch, *part.shape[1:]))
        for part, batch in zip(parts, batches, strict=True)
    ]
    return mx.concatenate(spread)


def _alike(codecs: Sequence[Any]) -> None:
    """Raise ``CodecError`` where codecs of one side go by what cannot be different rows'."""
    first = codecs[0]
    if not isinstance(first, Centred | Rotated):
        return
    for other in codecs[1:]:
        if first.frozen != other.frozen:
            raise CodecError(
                f"cannot batch {first.spec} with what was given and with what it learns"
            )
        # the only numbers that are looked at: other frequencies would decode to other keys
        ropes = getattr(first, "rope", None), getattr(other, "rope", None)
        if ropes[0] is not ropes[1] and not tree.equal(*ropes):
            raise CodecError(f"cannot batch {first.spec} of different RoPEs")


def _changed(codec: Any, change: Any) -> Any:
    """The codec with what belongs to rows changed, in all codecs inside of it."""
    if isinstance(codec, Codec):
        return Codec(_changed(codec.keys, change), _changed(codec.values, change))
    changes = {
        name: change(name, getattr(codec, name))
        for name in getattr(codec, "per_row", ())
        if getattr(codec, name) is not None
    }
    if isinstance(codec, Centred):
        changes["codec"] = _changed(codec.codec, change)
    return replace(codec, **changes) if changes else codec


# -- as names and arrays, for files ---------------------------------------------------------------


def learnt_arrays(codec: Codec) -> tuple[dict[str, mx.array], dict[str, bool]]:
    """What was learnt or given, by name, and the flags that belong to it.

    >>> learnt_arrays(Codec.of("rot-k4v4"))
    ({}, {})
    """
    arrays: dict[str, mx.array] = {}
    flags: dict[str, bool] = {}
    for side in ("keys", "values"):
        each = getattr(codec, side)
        if isinstance(each, Centred):
            if each.mean is not None:
                arrays[f"{side}.mean"] = each.mean
            if each.rope is not None:
                arrays[f"{side}.rope"] = each.rope.frequencies
                flags[f"{side}.traditional"] = each.rope.traditional
            if each.frozen:
                flags[f"{side}.frozen"] = True
            each = each.codec
        elif isinstance(each, Rotated) and each.frozen:
            flags[f"{side}.frozen"] = True
        if isinstance(each, Rotated):
            if each.reference is not None:
                arrays[f"{side}.reference"] = each.reference
            for name in _PAIRS:
                for index, array in enumerate(getattr(each, name) or ()):
                    arrays[f"{side}.{name}.{index}"] = array
    return arrays, flags


_PAIRS = ("basis", "feedback")


def with_learnt(codec: Codec, arrays: dict[str, mx.array], flags: dict[str, bool]) -> Codec:
    """The codec of a spec with what :func:`learnt_arrays` said.

    Raises:
        CodecError: names that the codec has no place for.
    """
    sides = [_with_learnt(getattr(codec, side), side, arrays, flags) for side in ("keys", "values")]
    result = Codec(*sides)
    found, known = learnt_arrays(result)
    if found.keys() != arrays.keys() or known != flags:
        raise CodecError(f"{codec.spec} learns no {sorted({*arrays, *flags} - {*found, *known})}")
    return result


def _with_learnt(codec: Any, side: str, arrays: dict[str, Any], flags: dict[str, bool]) -> Any:
    if isinstance(codec, Centred):
        rope = arrays.get(f"{side}.rope")
        rope = None if rope is None else Rope(rope, flags.get(f"{side}.traditional", False))
        return replace(
            codec,
            rope=rope,
            mean=arrays.get(f"{side}.mean"),
            frozen=flags.get(f"{side}.frozen", False),
            codec=_with_learnt(codec.codec, side, arrays, {}),
        )
    if isinstance(codec, Rotated):
        pairs = {
            name: (arrays[f"{side}.{name}.0"], arrays[f"{side}.{name}.1"])
            for name in _PAIRS
            if f"{side}.{name}.0" in arrays and f"{side}.{name}.1" in arrays
        }
        frozen = flags.get(f"{side}.frozen", False)
        return replace(codec, reference=arrays.get(f"{side}.reference"), frozen=frozen, **pairs)
    return codec
