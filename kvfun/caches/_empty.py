"""Caches that hold nothing yet."""

from __future__ import annotations

from collections.abc import Sequence

from ..codecs import Codec, front_of
from ..errors import GeometryError
from ..geometry import Ageing, Geometry, Policy, body_part, front_part
from ._chain import Chain
from ._delayed import Delayed
from ._kv import KV

BLOCK = 64
"""Tokens encoded at once when the past takes them from a residual window."""


def empty(
    spec: str | Codec,
    *,
    window: int | None = None,
    sinks: int = 0,
    chunk: int | None = None,
    reserve: int = 0,
    left_padding: Sequence[int] | None = None,
    residual: int = 0,
    block: int = BLOCK,
    raw_sinks: int | None = None,
    start: int = 0,
) -> KV | Chain | Delayed:
    """A cache that holds nothing yet; shapes and dtype come with the first append.

    Args:
        spec: a codec or its spec string, see :func:`kvfun.codecs.parse`.
        window: a sliding window of so many keys, the query's own included.
        sinks: the first positions that stay visible for ever.
        chunk: attention limited to the query's own chunk of positions.
        reserve: tokens that can be rolled back exactly at any time, though the window is full.
        left_padding: padding tokens in front of each row of the first blocks; never visible.
        residual: keep the newest tokens as they came, at least so many of each row: older ones are
            encoded once, in whole blocks, when there are ``residual + block`` (Liu et al., *KIVI*,
            2024).
        block: tokens encoded at once, and the most by which the residual is exceeded.
        raw_sinks: keep the first positions as they came for ever, by default as many as the codec
            learns from (none, but for codecs that store keys less their mean or scales of 8
            bits). With ``residual`` or ``raw_sinks`` attention sinks are among them.
        start: keep all tokens as they come until there are so many, then encode them at once.

    Returns:
        A :class:`KV`; a :class:`Chain` with ``residual`` or ``raw_sinks``; a :class:`Delayed` with
        a ``start``.

    Raises:
        SpecError, GeometryError: an unknown spec, or a number out of range.

    >>> import kvfun
    >>> kvfun.empty("kv4", window=128, sinks=4).codec.spec
    'kv4'
    >>> len(kvfun.empty("kv4", residual=64, raw_sinks=4).parts), len(kvfun.empty("rot-k4v4").parts)
    (3, 2)
    """
    policy = Policy(window, sinks, chunk, reserve)
    codec = Codec.of(spec)
    geometry = Geometry.empty(policy, left_padding)
    for name, number in (("residual", residual), ("raw_sinks", raw_sinks or 0), ("start", start)):
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:
            raise GeometryError(f"{name} must be an integer >= 0, not {number!r}")
    if start and (residual or raw_sinks):
        raise GeometryError("tokens that wait are encoded together: no residual, no raw sinks")
    if start:
        return Delayed(KV((), (), Codec.of("plain"), geometry), codec, start)
    raw_sinks = front_of(codec) if raw_sinks is None else raw_sinks
    if not residual and not raw_sinks:
        return KV((), (), codec, geometry)
    ageing = Ageing(residual, block) if residual else None
    padding = [max(0, -row.offset) for row in geometry.rows]
    return _chain(codec, policy, padding, max(raw_sinks, sinks), ageing)


def _chain(
    codec: Codec, policy: Policy, padding: Sequence[int], front: int, ageing: Ageing | None
) -> Chain:
    """The first positions and the newest as they come, and what is between them in the codec."""
    raw = Codec.of("plain")
    starts = [front] * len(padding) if front else [-pad for pad in padding]
    segments = [KV((), (), raw, front_part(front, padding))] if front else []
    if ageing is not None:
        segments.append(KV((), (), codec, body_part(policy, [front] * len(padding))))
        tail = KV((), (), raw, body_part(Policy(), starts))
    else:
        tail = KV((), (), codec, body_part(policy, starts))
    return Chain(tuple(segments), tail, policy, front, ageing, max(padding))
