"""Empty caches for every layer of a model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..caches import empty, recurrent
from ._assigned import RAW, Assignment
from ._model import Model, Stream
from ._scheme import KvScheme


class ModelCaches(tuple[Any, ...]):
    """A tuple of caches, one entry a layer, that also says what they are.

    An entry is a cache (a :class:`kvfun.Recurrent` where a layer has a state), a tuple of them
    (what indexes the keys has one of its own, and so has a state beside keys and values), or
    ``None`` where the layer keeps nothing of its own.
    """

    report: tuple[Assignment, ...]
    """What each layer stores, and why where it is not what was asked for."""

    def __new__(cls, caches: Iterator[Any], report: tuple[Assignment, ...]) -> ModelCaches:
        """The caches of the layers that a report tells of."""
        made = super().__new__(cls, caches)
        made.report = report
        return made


def caches(model: Model, scheme: KvScheme | str, *, reserve: int = 0) -> ModelCaches:
    """An empty cache for every layer of a model.

    Args:
        model: what its layers keep; :meth:`Model.capped` limits full layers.
        scheme: what they store it in.
        reserve: tokens that windows can take back at any time, see :func:`kvfun.empty`.

    Raises:
        SpecError, CodecError: a scheme that does not fit the model, see :meth:`KvScheme.assigned`.

    >>> config = {"num_hidden_layers": 2, "hidden_size": 128, "num_attention_heads": 2}
    >>> made = caches(Model.from_config(config), "kv4")
    >>> [cache.codec.spec for cache in made], made.report[0].reason
    (['kv4', 'kv4'], '')
    """
    scheme = KvScheme.of(scheme)
    report = scheme.assigned(model)
    return ModelCaches((_entry(scheme, each, reserve) for each in report), report)


def _entry(scheme: KvScheme, each: Assignment, reserve: int) -> Any:
    made: list[Any] = []
    if each.spec is not None:
        made = [made_of(scheme, each.spec, stream, reserve) for stream in each.layer.stored]
    if each.layer.state is not None:
        made.append(recurrent())
    return (made[0] if made else None) if len(made) < 2 else tuple(made)


def made_of(scheme: KvScheme, spec: str, stream: Stream, reserve: int = 0) -> Any:
    """The empty cache of one stream of keys and values, in the codec that its layer has."""
    numbers: dict[str, Any] = {
        "window": stream.window,
        "sinks": stream.sinks,
        "chunk": stream.chunk,
        "reserve": reserve,
    }
    if spec == RAW or stream.index:
        return empty(RAW, **numbers)
    if scheme.start:
        return empty(spec, start=scheme.start, **numbers)
    raw = {"residual": scheme.residual, "block": scheme.block, "raw_sinks": scheme.raw_sinks}
    return empty(spec, **numbers, **raw)
