"""State beside a model's own caches that belongs to one exact boundary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx

from .. import tree
from ..caches import offsets, snapshot
from ..errors import CompanionError, CorruptError
from ..record import record, static
from ..storage import dump, load

Scalar = str | int | float | bool | None

_TYPES = (str, int, float, bool, type(None))


@record
class Companion:
    """A draft model's caches, or whatever else has to be there when a text goes on at a boundary.

    It can be written down as it is: a name for what it is, numbers and strings, and arrays.

    Args:
        arrays: by name.
        schema: what it is and how it is to be read, with a version (``"draft-model-v1"``).
        boundary: how many tokens of the text it belongs to.
        metadata: names and scalars.

    >>> import kvfun
    >>> k = mx.zeros((1, 2, 5, 64))
    >>> draft = kvfun.append(kvfun.empty("kv4"), k, k)
    >>> companion = capture("draft-model-v1", 6, caches=[draft], behind=1)
    >>> (again,), _, _ = restore(companion, "draft-model-v1", 6)
    >>> kvfun.offsets(again), companion.metadata["behind"]
    ((5,), 1)
    """

    arrays: dict[str, mx.array]
    schema: str = static()
    boundary: int = static()
    items: tuple[tuple[str, Scalar], ...] = static(default=(), repr=False)

    @property
    def metadata(self) -> dict[str, Scalar]:
        """Names and scalars."""
        return dict(self.items)

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return tree.nbytes(self)


def capture(
    schema: str,
    boundary: int,
    *,
    caches: Sequence[Any] = (),
    arrays: Mapping[str, mx.array] | None = None,
    **metadata: Scalar,
) -> Companion:
    """Caches and arrays as they are now, in buffers of their own.

    Args:
        schema: what it is.
        boundary: how many tokens of the text it belongs to.
        caches: any that :func:`kvfun.storage.dump` knows.
        arrays: others, by name.
        metadata: scalars.

    Raises:
        CompanionError: no schema, no boundary, or metadata that are no scalars.
        UnsupportedError: a cache that cannot be written down.
    """
    if not isinstance(schema, str) or not schema:
        raise CompanionError(f"a schema is a name, not {schema!r}")
    if isinstance(boundary, bool) or not isinstance(boundary, int) or boundary < 0:
        raise CompanionError(f"a boundary is a number of tokens, not {boundary!r}")
    for name, value in metadata.items():
        if type(value) not in _TYPES or name.startswith("cache"):
            raise CompanionError(f"metadata {name}={value!r}: scalars, and no names with cache")
    own = {name: snapshot(x) for name, x in (arrays or {}).items()}
    if any(name.startswith("cache") for name in own):
        raise CompanionError("names of arrays that begin with cache are those of caches")
    items: dict[str, Scalar] = {**metadata, "caches": len(caches)}
    for index, cache in enumerate(caches):
        header, planes = dump(snapshot(cache))
        items[f"cache.{index}"], items[f"cache.{index}.arrays"] = header, len(planes)
        own |= {f"cache.{index}.{place}": plane for place, plane in enumerate(planes)}
    return Companion(own, schema, boundary, tuple(items.items()))


def restore(
    companion: Companion | None, schema: str, boundary: int
) -> tuple[tuple[Any, ...], dict[str, mx.array], dict[str, Scalar]]:
    """The caches, arrays and metadata of a companion.

    Args:
        companion: from :func:`capture`, or as it was stored.
        schema: what it must be.
        boundary: where the text goes on.

    Raises:
        CompanionError: there is none, or one of another schema, of another boundary, or one whose
            parts do not fit each other.
    """
    if companion is None:
        raise CompanionError(f"{schema}: what belongs to {boundary} tokens is missing")
    if companion.schema != schema:
        raise CompanionError(f"{companion.schema} where {schema} is needed")
    if companion.boundary != boundary:
        raise CompanionError(f"{schema} of {companion.boundary} tokens, not of {boundary}")
    said, arrays = companion.metadata, dict(companion.arrays)
    try:
        caches = [_cache(said, arrays, index) for index in range(_count(said["caches"]))]
        del said["caches"]
    except (KeyError, TypeError, ValueError, CorruptError) as error:
        raise CompanionError(f"{schema}: what was stored does not fit together: {error}") from error
    left = [name for name in (*said, *arrays) if name.startswith("cache")]
    if left:
        raise CompanionError(f"{schema}: {left[0]} belongs to no cache")
    return tuple(caches), arrays, said


def _count(number: Scalar) -> int:
    if type(number) is not int or number < 0:
        raise ValueError(f"{number!r} is no number of caches")
    return number


def _cache(said: dict[str, Scalar], arrays: dict[str, mx.array], index: int) -> Any:
    header, count = said.pop(f"cache.{index}"), _count(said.pop(f"cache.{index}.arrays"))
    planes = [arrays.pop(f"cache.{index}.{place}") for place in range(count)]
    cache = load(str(header), planes)
    offsets(cache)
    return cache
