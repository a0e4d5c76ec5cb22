"""Statistics of a prompt: a cache encoded by what its queries look for."""

from __future__ import annotations

from typing import Any

from ..codecs import Codec, statistics_of, with_statistics
from ..errors import CodecError, ShapeError
from . import _kv
from . import _verbs as verbs
from ._chain import Chain
from ._kv import KV


def calibrate(cache: KV | Chain, queries: verbs.Queries, spec: str | Codec) -> KV | Chain:
    """The cache converted to a codec that is fitted to it and to a prompt's queries.

    The keys' mean, their second moments and those of the queries are taken from the tokens that
    are to be encoded, each row by itself, and are frozen: they stay what they are whatever is
    appended, and travel with the rows. ``ldlq`` rounds the numbers of a key one after another, such
    that later ones make up for what earlier ones cost those queries: only the encoder knows of it.
    ``bal`` replaces the rotation by a matrix that makes the moments of keys and queries equal.

    The raw first tokens of a chain stay as they are, and so do the newest of a residual window. A
    prompt is read into a cache that keeps it as it came (``kvfun.empty("bf16", raw_sinks=4)``).

    Args:
        cache: what holds the prompt, in another codec; a few hundred tokens are enough.
        queries: those of the prompt, ``[batch, heads, L, head_dim]``, after RoPE; any number.
        spec: a codec such as ``"rot-k4v4-ldlq"`` or ``"rot-k3v3-bal"``; to tell it the model's
            RoPE, one of :func:`kvfun.codecs.with_rope`.

    Raises:
        SpecError, CodecError: an unknown codec, or one that has no use for queries; tokens that are
            encoded in it already.
        ShapeError: an empty cache, or queries that do not fit it.

    References:
        Frantar et al., *GPTQ*, 2023; Chee et al., *QuIP*, 2023 (``ldlq``).

    >>> import kvfun, mlx.core as mx
    >>> k, q = mx.random.normal((1, 2, 90, 64)), mx.random.normal((1, 6, 90, 64))
    >>> prompt = kvfun.append(kvfun.empty("plain", raw_sinks=4), k, k)
    >>> calibrate(prompt, q, "rot-k3v3-ldlq").codec.spec
    'rot-k3v3-ldlq'
    """
    codec, part = Codec.of(spec), _encoded(cache)
    if statistics_of(codec) is None:
        raise CodecError(f"{codec.spec} has no use for queries; rot-k4v4-ldlq and -bal have")
    layout = _kv.filled(part, "calibrate")
    _kv.fitting(layout, queries, "window")
    if part.codec.keys.spec == codec.keys.spec:
        raise CodecError(f"the cache is in {codec.spec} already, and nothing is encoded twice")
    if not any(part.geometry.held(row) for row in part.geometry.rows):
        raise CodecError(f"the prompt is too short for {codec.spec}: all of it stays raw")
    k, v = verbs.fetch_columns(part, ((0, part.geometry.used),))
    codec = _kv.learnt(codec, part, k, v)
    valid, positions = _kv.learnt_from_columns(part.geometry, k.shape[2])
    codec = with_statistics(codec, k, valid, positions, queries)
    _kv.for_codec(layout, codec)
    return verbs.convert(cache, codec)


def _encoded(cache: Any) -> KV:
    """The part whose tokens are, or would be, encoded."""
    if isinstance(cache, KV):
        return cache
    if not isinstance(cache, Chain):
        raise ShapeError(f"only a KV or a Chain can be calibrated, not a {type(cache).__name__}")
    return cache.tail if cache.ageing is None else cache.segments[-1]
