"""Hypothesis strategies: integers and seeds are drawn, arrays are made from them afterwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import mlx.core as mx
from hypothesis import strategies as st

from ..codecs import Codec
from ..errors import CodecError
from ..geometry import Policy
from ._history import Append, Convert, Join, Rollback, Seal, Take, Verb, World
from ._laws import Case
from ._recipes import Recipe, Shape

SPECS = (
    *("plain", "bf16", "f16", "f32", "kv8", "kv4", "kv4-g32", "kv3-g32", "kv5-g32", "kv6-g32"),
    *("kv2-g32", "k8v4", "k8v4-g32", "bf16+kv4-g32", "kv8-g32+f16", "kv4-pad", "kv3-pad"),
    *("mxfp8", "mxfp4", "nvfp4", "mxfp8+mxfp4", "bf16+nvfp4", "nvfp4-pad+kv4-g32"),
    *("rot-k4v4-s1", "rot-k3v2-g16-log-s5", "rot-k5v3-s5-ls", "rot4-log+kv4-g32", "kv8-g32-f16-c"),
    *("rot-k8v4-g32-s5-norm", "rot2-tcq-log-s1", "turbo-k8v3"),
)
"""Specs of every family."""

DTYPES = (mx.float32, mx.bfloat16, mx.float16)

VERBS = ("append", "rollback", "convert", "take", "concat")
"""The verbs histories are made of."""

OPTIONAL = ("seal",)
"""Verbs that histories have only where they are asked for."""


def specs(head_dim: int, value_dim: int | None = None) -> st.SearchStrategy[str]:
    """Spec strings that can store vectors of ``head_dim`` (and values of ``value_dim``)."""
    value_dim = head_dim if value_dim is None else value_dim
    return st.sampled_from([spec for spec in SPECS if _fits(spec, head_dim, value_dim)])


def _fits(spec: str, head_dim: int, value_dim: int) -> bool:
    codec = Codec.of(spec)
    try:
        codec.keys.check(head_dim)
        codec.values.check(value_dim)
    except CodecError:
        return False
    return True


def codecs(head_dim: int = 64, value_dim: int | None = None) -> st.SearchStrategy[Codec]:
    """Codecs that can store vectors of ``head_dim``."""
    return specs(head_dim, value_dim).map(Codec.of)


@st.composite
def _visibilities(draw: st.DrawFn) -> dict[str, int | None]:
    """Windows, sinks, chunks and reserves: none, some, or all at once."""
    kind = draw(st.sampled_from(("full", "window", "window", "chunk", "both")))
    spans = st.integers(1, 12)
    return {
        "window": draw(spans) if kind in ("window", "both") else None,
        "chunk": draw(spans) if kind in ("chunk", "both") else None,
        "sinks": draw(st.sampled_from((0, 0, 1, 3, 4))),
        "reserve": draw(st.sampled_from((0, 0, 1, 2, 5))),
    }


def policies() -> st.SearchStrategy[Policy]:
    """Visibility rules with small numbers."""
    return _visibilities().map(lambda numbers: Policy(**numbers))  # pyright: ignore


PADDINGS = ((),) * 8 + ((3,), (0, 2), (5, 0, 1))


def paddings() -> st.SearchStrategy[tuple[int, ...]]:
    """Left padding of a first block: mostly none."""
    return st.sampled_from(PADDINGS)


@st.composite
def layouts(
    draw: st.DrawFn, spec: st.SearchStrategy[str] | None = None, *, padded: bool = True
) -> Recipe:
    """How an empty :class:`kvfun.KV` is built: spec, window, sinks, chunk, reserve, left padding.

    Args:
        draw: given by Hypothesis.
        spec: specs to choose from, by default those that store a head_dim of 32 and of 64.
        padded: whether some have left padding.
    """
    chosen = draw(specs(32) if spec is None else spec)
    numbers: dict[str, Any] = draw(_visibilities())
    return Recipe(chosen, **numbers, padding=draw(paddings()) if padded else ())


@st.composite
def chains(
    draw: st.DrawFn, spec: st.SearchStrategy[str] | None = None, *, padded: bool = True
) -> Recipe:
    """How an empty chain is built: as :func:`layouts`, and a residual, raw sinks, or both.

    Args:
        draw: given by Hypothesis.
        spec: specs to choose from, by default those that store a head_dim of 32 and of 64.
        padded: whether some have left padding.
    """
    kind = draw(st.sampled_from(("residual", "residual", "sinks", "both", "both")))
    return attrs.evolve(
        draw(layouts(spec, padded=padded)),
        residual=0 if kind == "sinks" else draw(st.integers(1, 9)),
        block=draw(st.integers(1, 8)),
        raw_sinks=draw(st.integers(0 if kind == "both" else 1, 5)) if kind != "residual" else 0,
    )


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    """Heads, dims and dtypes of keys and values; the two may differ."""
    dim = st.sampled_from((32, 32, 64))
    dtype, other = draw(st.sampled_from(DTYPES)), draw(st.sampled_from((None, None, *DTYPES)))
    return Shape(draw(st.integers(1, 2)), draw(dim), draw(dim), dtype, other or dtype)


def seeds() -> st.SearchStrategy[int]:
    """Seeds of blocks; ``seed % 5`` chooses the distribution."""
    return st.integers(0, 49)


def lengths(large: bool = False) -> st.SearchStrategy[int]:
    """Tokens of a block: none, one, some, now and then more than a buffer's step of 256."""
    small = (1, 0, 1, 2, 3, 5, 7, 8, 9, 13, 17, 23)
    return st.sampled_from((*small, 255, 256, 257, 300) if large else small)


@st.composite
def blocks(
    draw: st.DrawFn, shape: Shape | None = None, *, batch: int = 1, tokens: int | None = None
) -> tuple[mx.array, mx.array]:
    """Keys ``[batch, kv_heads, tokens, head_dim]`` and values, of any of the distributions."""
    chosen = draw(shapes()) if shape is None else shape
    return chosen.block(draw(seeds()), batch, draw(lengths()) if tokens is None else tokens)


@st.composite
def tokens(draw: st.DrawFn, shape: Shape | None = None) -> tuple[mx.array, mx.array]:
    """One token: a block of length one, as decoding appends it."""
    return draw(blocks(shape, tokens=1))


ROWS = ((0,), (1,), (1, 0), (0, 1), (0, 0), (2, 0), (1, 2, 0), (2, 1, 0), (3, 0, 2), (0, 1, 2, 3))


@st.composite
def verbs(
    draw: st.DrawFn,
    spec: st.SearchStrategy[str] | None = None,
    *,
    allowed: Sequence[str] = VERBS,
    large: bool = False,
) -> Verb:
    """One verb with arguments; those of some are made valid when it runs.

    Args:
        draw: given by Hypothesis.
        spec: specs to convert to.
        allowed: which of :data:`VERBS`, and ``"seal"`` if wanted.
        large: whether some blocks cross a buffer's step of 256 columns.
    """
    unknown = set(allowed) - {*VERBS, *OPTIONAL}
    if unknown:
        raise ValueError(f"histories are made of {VERBS + OPTIONAL}, not of {sorted(unknown)}")
    kind = draw(st.sampled_from(("append", "append", "append", *allowed)))
    if kind == "append":
        return Append(draw(lengths(large)), draw(seeds()))
    if kind == "rollback":
        amounts = st.integers(0, 9)
        return Rollback(tuple(draw(st.lists(amounts, min_size=1, max_size=3))))
    if kind == "convert":
        return Convert(draw(specs(32) if spec is None else spec))
    if kind == "seal":
        return Seal(draw(st.one_of(st.none(), specs(32) if spec is None else spec)))
    if kind == "take":
        return Take(draw(st.sampled_from(ROWS)))
    more = draw(st.sampled_from(((1,), (3,), (0,), (9,), (17,), (2, 5), (11, 1))))
    return Join(more, draw(seeds()), draw(st.booleans()))


@st.composite
def histories(
    draw: st.DrawFn,
    spec: st.SearchStrategy[str] | None = None,
    *,
    most: int = 6,
    allowed: Sequence[str] = VERBS,
    large: bool = False,
) -> tuple[Verb, ...]:
    """Sequences of verbs, see :func:`verbs`; replay one with :meth:`World.run`."""
    one = verbs(spec, allowed=allowed, large=large)
    return tuple(draw(one) for _ in range(draw(st.integers(0, most))))


@st.composite
def caches(draw: st.DrawFn, empty: Callable[[], Any] | None = None) -> Any:
    """A cache that a random history built; shapes and (without ``empty``) layout are drawn too."""
    recipe = draw(layouts()) if empty is None else Recipe.of(empty)
    world = World(recipe, draw(shapes()), len(recipe.padding) or draw(st.integers(1, 3)))
    history = draw(histories() if recipe.spec else histories(allowed=("append", "rollback")))
    return world.run(world.begin(), history).cache


@st.composite
def cases(
    draw: st.DrawFn,
    shape: st.SearchStrategy[Shape] | None = None,
    *,
    allowed: Sequence[str] = VERBS,
    convertible: bool = True,
) -> Case:
    """Data for the laws: :class:`Case`.

    Seven of eight have small blocks and buffers that grow and compact every few tokens; the rest
    have blocks about 256 and buffers of their natural size.

    Args:
        draw: given by Hypothesis.
        shape: heads, dims and dtypes.
        allowed: the verbs of the histories, of :data:`VERBS`, and ``"seal"`` if wanted.
        convertible: whether ``convert`` is tried.
    """
    small = draw(st.integers(0, 7)) < 7
    chosen = draw(shapes() if shape is None else shape)
    spec = specs(chosen.head_dim, chosen.value_dim)
    allowed = [name for name in allowed if convertible or name != "convert"]

    def history(most: int) -> tuple[Verb, ...]:
        return draw(histories(spec, most=most, allowed=allowed, large=not small))

    return Case(
        shape=chosen,
        batch=draw(st.integers(1, 3)),
        before=history(6),
        blocks=(draw(lengths(not small)), draw(lengths())),
        later=history(3),
        others=tuple(history(3) for _ in range(draw(st.integers(0, 2)))),
        spec=draw(spec) if convertible else None,
        group=draw(st.sampled_from((1, 2, 3))),
        query_dtype=draw(st.sampled_from((chosen.key_dtype, chosen.key_dtype, mx.float32))),
        sinks=draw(st.booleans()),
        seed=draw(seeds()),
        small=small,
    )
