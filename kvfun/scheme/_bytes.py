"""What a model's caches take, from integers alone: nothing is allocated to find out."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import attrs
import mlx.core as mx

from ..caches import Chain, Delayed
from ..caches._chain import trimmed
from ..codecs import Codec, calibrated, learns, learnt_arrays
from ..errors import GeometryError, ShapeError
from ..geometry import Geometry, Segments
from ._assigned import Assignment
from ._caches import made_of
from ._kinds import CHUNKED, FULL, LATENT, SLIDING
from ._model import Model, Stream
from ._scheme import BF16, TURBO, KvScheme

CHUNK = 2048
"""Tokens of a prompt that are read at once, if not said."""

FUSED_HEAD_DIMS = (64, 72, 80, 96, 128)
"""Head dims that MLX's fused attention has a kernel for."""

FEW_QUERIES = 8
"""So many queries are attended without scores being kept, whatever the head dim."""


@attrs.frozen
class KvGeometry:
    """Bytes of one row that a model's caches take, by what they grow with.

    Args:
        full: a token, of full layers.
        sliding: a token, of sliding layers, as long as there are fewer than ``window``.
        chunked: a token, of chunked layers, as long as there are fewer than ``window``.
        latent: a token, of layers that keep latents.
        state: whatever the number of tokens: recurrent states.
        window: the widest window or chunk, ``None`` without any.
    """

    full: int = 0
    sliding: int = 0
    chunked: int = 0
    latent: int = 0
    state: int = 0
    window: int | None = None

    @property
    def token(self) -> int:
        """Of one of the first tokens, in all layers together."""
        return self.full + self.sliding + self.chunked + self.latent


def element_bytes(spec: str | Codec, head_dim: int = 128) -> float:
    """Bytes a number of a key or value takes, its share of scales included.

    >>> element_bytes("kv4"), element_bytes("kv4-g32"), element_bytes("bf16")
    (0.5625, 0.625, 2.0)
    """
    return Codec.of(spec).bits_per_element(head_dim) / 8


def kv_geometry(model: Model, scheme: KvScheme | str | None = None) -> KvGeometry:
    """What a token costs, by the kind of layer, and what does not grow.

    Args:
        model: what its layers keep.
        scheme: what they store it in, bf16 by default. What it keeps raw, or leaves as it comes
            until there are enough tokens, is not in these numbers.

    >>> config = {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
    ...           "num_key_value_heads": 8}
    >>> kv_geometry(Model.from_config(config)).token  # Llama 3.1 8B: 128 KiB
    131072
    """
    found: dict[str, int] = dict.fromkeys((FULL, SLIDING, CHUNKED, LATENT), 0)
    windows = [0]
    for each in _assigned(model, scheme):
        for stream in each.layer.stored if each.spec is not None else ():
            found[each.layer.kind] += _token_bytes(model, _codec_of(each, stream), stream)
            windows.append(stream.bound or 0)
    return KvGeometry(**found, state=_state_bytes(model), window=max(windows) or None)


def kv_bytes_at(
    model: Model,
    tokens: int,
    scheme: KvScheme | str | None = None,
    *,
    batch: int = 1,
    turbo_as_bf16: bool = False,
) -> int:
    """Bytes of the keys, values and states that the next token of each row sees.

    Args:
        model: what its layers keep.
        tokens: of each row.
        scheme: what they are stored in, bf16 by default.
        batch: rows.
        turbo_as_bf16: bill TurboQuant as bf16, for a plan that is on the safe side.

    >>> config = {"num_hidden_layers": 30, "hidden_size": 576, "num_attention_heads": 9,
    ...           "num_key_value_heads": 3}
    >>> kv_bytes_at(Model.from_config(config), 1)  # SmolLM2 135M
    23040
    """
    _count("tokens", tokens)
    total = _state_bytes(model)
    for billed, each, stream in _streams(model, scheme, turbo_as_bf16):
        made = made_of(billed, each.spec or BF16, stream)
        after = _after(made, tokens, CHUNK)
        low = _policy(made).lowest(tokens - 1)
        for codec, geometry in after:
            (row,) = geometry.rows
            sinks = max(0, min(row.offset, geometry.policy.sinks))
            seen = sinks + max(0, row.offset - max(row.first, low))
            total += seen * _token_bytes(model, codec, stream)
    return total * batch


def kv_allocated_bytes_at(
    model: Model,
    tokens: int,
    scheme: KvScheme | str | None = None,
    *,
    batch: int = 1,
    chunk: int = CHUNK,
    peak: bool = False,
) -> int:
    """Bytes of the buffers that the caches hold: spare columns, and what codecs learn, included.

    Args:
        model: what its layers keep.
        tokens: of each row, appended in chunks.
        scheme: what they are stored in, bf16 by default.
        batch: rows.
        chunk: tokens appended at once.
        peak: the most that is held on the way, one layer's two copies at a conversion included,
            instead of what is held in the end.
    """
    _count("tokens", tokens)
    _count("chunk", chunk, least=1)
    held = [
        _held(billed, each.spec or BF16, stream, model.dtype, tokens, chunk)
        for billed, each, stream in _streams(model, scheme, False)
    ]
    total = sum([x.peak if peak else x.last for x in held]) + _state_bytes(model)
    return (total + (max([0, *[x.copy for x in held]]) if peak else 0)) * batch


def batch_row_kv_bytes(
    model: Model, prompt: int, max_tokens: int, scheme: KvScheme | str | None = None
) -> int:
    """The most bytes that a row of a batch takes, from its prompt to its last token.

    Raises:
        GeometryError: more tokens than the model was made for.
    """
    _count("prompt", prompt)
    _count("max_tokens", max_tokens)
    tokens = prompt + max_tokens
    if model.max_positions is not None and tokens > model.max_positions:
        raise GeometryError(
            f"{prompt:,} tokens and {max_tokens:,} more are beyond the model's "
            f"{model.max_positions:,} positions; ask for at most "
            f"{max(0, model.max_positions - prompt):,} more"
        )
    return kv_allocated_bytes_at(model, tokens, scheme, peak=True)


def sdpa_fallback_bytes(model: Model, chunk: int, context: int) -> int:
    """Bytes of the scores of one chunk in the layer that has most, where they are all kept.

    That is where MLX's fused attention has no kernel for the head dim, and there are more than a
    few queries. A sliding layer scores ``window + chunk`` keys at most.
    """
    _count("chunk", chunk)
    _count("context", context)
    queries = min(chunk, context)
    if queries <= FEW_QUERIES:
        return 0
    scores = [0]
    for layer in model.layers:
        stream = layer.stream
        if stream is not None and stream.head_dim not in FUSED_HEAD_DIMS:
            bound = stream.bound
            keys = context if bound is None else min(context, bound + queries)
            scores.append(layer.heads * queries * keys * 2)
    return max(scores)


# -- parts ----------------------------------------------------------------------------------------


def _count(name: str, value: Any, least: int = 0) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ShapeError(f"{name} must be an integer >= {least}, not {value!r}")


def _assigned(model: Model, scheme: KvScheme | str | None) -> tuple[Assignment, ...]:
    return KvScheme.of(BF16 if scheme is None else scheme).assigned(model)


def _streams(
    model: Model, scheme: KvScheme | str | None, turbo_as_bf16: bool
) -> Iterator[tuple[KvScheme, Assignment, Stream]]:
    """All streams that are stored, under the scheme that is billed."""
    scheme = KvScheme.of(BF16 if scheme is None else scheme)
    if turbo_as_bf16 and scheme.kind == TURBO:
        scheme = KvScheme.of(BF16)
    for each in scheme.assigned(model):
        for stream in each.layer.stored if each.spec is not None else ():
            yield scheme, each, stream


def _state_bytes(model: Model) -> int:
    states = [layer.state for layer in model.layers if layer.state is not None]
    return sum([state.nbytes(model.number_size) for state in states])


def _codec_of(each: Assignment, stream: Stream) -> Codec:
    return Codec.of(BF16 if stream.index else each.spec or BF16)


def _token_bytes(model: Model, codec: Codec, stream: Stream) -> int:
    return _token(model.dtype, codec, stream)


def _token(dtype: str, codec: Codec, stream: Stream) -> int:
    sides = (codec.keys, stream.head_dim), (codec.values, stream.value_dim)
    number = getattr(mx, dtype)
    return stream.kv_heads * sum([side.vector_nbytes(dim, number) for side, dim in sides if dim])


def _policy(made: Any) -> Any:
    return made.geometry.policy


Parts = list[tuple[Codec, Geometry]]


def _parts(made: Any, geometry: Geometry | Segments) -> Parts:
    """The buffers of a cache: how each is encoded, and what is in it."""
    if isinstance(geometry, Segments):
        return [(part.codec, g) for part, g in zip(made.parts, geometry.parts, strict=True)]
    (row,) = geometry.rows
    late = isinstance(made, Delayed) and row.offset >= made.start
    return [(made.target if late else made.codec, geometry)]


def _advanced(geometry: Any, tokens: int) -> Geometry | Segments:
    _, after = geometry.advance(tokens)
    if not isinstance(after, Segments) or not after.front:
        return after
    front, *others = after.parts
    return attrs.evolve(after, parts=(trimmed(front, after.front), *others))


def _steps(made: Any, tokens: int, chunk: int) -> Iterator[Geometry | Segments]:
    geometry = made.geometry
    for start in range(0, tokens, chunk):
        geometry = _advanced(geometry, min(chunk, tokens - start))
        yield geometry


def _after(made: Any, tokens: int, chunk: int) -> Parts:
    *_, last = [made.geometry, *_steps(made, tokens, chunk)]
    return _parts(made, last)


class _Held(NamedTuple):
    """Bytes of the buffers of one stream."""

    last: int
    """In the end."""
    peak: int
    """The most on the way."""
    copy: int
    """What is held beside that while tokens that have waited are converted."""


@lru_cache(maxsize=1024)
def _held(
    scheme: KvScheme, spec: str, stream: Stream, dtype: str, tokens: int, chunk: int
) -> _Held:
    made = made_of(scheme, spec, stream)
    found = _Held(0, 0, 0)
    for geometry in _steps(made, tokens, chunk):
        parts = _parts(made, geometry)
        buffers = [g.capacity * _token(dtype, codec, stream) for codec, g in parts]
        last = sum(buffers) + _learnt_bytes(made, geometry, stream)
        peak, copy = max(found.peak, last), found.copy
        if parts[0][0] is not made.codec and isinstance(made, Delayed) and not copy:
            peak = max(peak, parts[0][1].capacity * _token(dtype, made.codec, stream))
            copy = last
        found = _Held(last, peak, copy)
    return found


def _learnt_bytes(made: Any, geometry: Geometry | Segments, stream: Stream) -> int:
    """Of what the codec of the encoded part has learnt by now, if it learns."""
    codec = made.target if isinstance(made, Delayed) else made.codec
    if not learns(codec):
        return 0
    (row,) = geometry.rows
    if isinstance(made, Chain) and row.offset < made.front:
        return 0
    if isinstance(made, Delayed) and row.offset < made.start:
        return 0
    one = (1, stream.kv_heads, 1)
    keys, values = mx.zeros((*one, stream.head_dim)), mx.zeros((*one, stream.value_dim))
    known = calibrated(codec, keys, values, mx.ones((1, 1, 1, 1), mx.bool_), mx.zeros((1, 1, 1)))
    return sum([x.nbytes for x in learnt_arrays(known)[0].values()])
