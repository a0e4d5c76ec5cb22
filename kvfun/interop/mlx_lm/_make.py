"""Every layer of a model gets the right cache, and the caller is told which."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import attrs
import mlx.core as mx
import mlx_lm.models.cache as mlx_lm_cache

from ... import tree
from ...caches import Chain, Delayed, Rebased, empty, rebased, recurrent, settle
from ...caches._recurrent import DTYPES
from ...codecs import Codec, Rope, with_rope
from ...errors import CodecError, SpecError, UnsupportedError
from ...kernels import FUSED, kernels_for, multiplies_packed
from ...record import replace
from ...scheme import KvScheme, Model
from ._described import described
from ._rope import rope_of, watched_rope
from ._shell import OLD_PROTOCOL, KVFunCache, can_be_packed
from ._states import KVFunCacheList, KVFunStates

POSITIONS_FROM_ROWS = {
    "afm7": "its layers without a cache count positions by the columns they are handed",
    "minimax_m3_vl": "it cuts its blocks of positions by the columns it is handed",
}
"""Models, by module, that go wrong when any column is ever dropped."""

QUERIES_TWICE = {"iquestloopcoder"}
"""Models, by module, that attend twice with the same queries: mlx-lm's quantized attention scales
the queries it is given in place, so such a model may only be handed decoded columns."""

BLOCK = 64
"""Tokens encoded at once when they leave a residual window, if not said."""

SINKS = 4
"""First tokens that stay when a full layer is limited, as many as mlx-lm keeps."""


@attrs.frozen
class LayerReport:
    """What one layer's cache is."""

    layer: int
    spec: str
    """The codec; of a recurrent layer what its states are kept in."""
    kind: str
    """``full``, ``window 512``, ``chunk 8192``, ``recurrent``."""
    read: str
    """How a model reads it outside :func:`attention`."""
    reason: str = ""
    """Why it is not what a scheme has for it; empty where it is."""

    def __str__(self) -> str:
        said = (self.spec, self.kind, self.read, self.reason)
        return ", ".join([part for part in said if part])


class PromptCache(list):
    """A list of layer caches that also says what they are.

    ``print(cache.report)`` or :func:`describe` tells it.
    """

    reasons: tuple[str, ...] = ()
    """For each cache, why it is not what the scheme has for it."""

    @property
    def report(self) -> tuple[LayerReport, ...]:
        """One entry a layer cache."""
        return tuple(
            attrs.evolve(report, reason=self.reasons[index] if self.reasons else "")
            for index, cache in enumerate(self)
            for report in _reports(index, cache)
        )

    def settle(self) -> None:
        """Make the conversions that are due (:func:`kvfun.settle`), one layer after another.

        Each is evaluated before the next begins: no more than one layer is held twice.
        """
        for shell in [shell for entry in self for shell in shells_of(entry)]:
            settled = settle(shell.record)
            if settled is not shell.record:
                shell.record = settled
                mx.eval(tree.leaves(shell.record))


def make_prompt_cache(
    model: Any,
    spec: str | Codec | KvScheme | Sequence[str | Codec],
    max_size: int | None = None,
    *,
    sinks: int = SINKS,
    reserve: int = 0,
    residual: int = 0,
    block: int = BLOCK,
    raw_sinks: int | None = None,
    rebase: bool = False,
    states: str | None = None,
) -> PromptCache:
    """A cache for every layer of an mlx-lm model, in the codec of ``spec``.

    Full layers get a full cache, sliding ones a window of the model's own width, chunked ones
    chunks; recurrent layers a :class:`kvfun.Recurrent`, whose states keep the model's dtypes.
    :func:`describe` says which got what.

    Args:
        model: an mlx-lm model.
        spec: a codec spec such as ``"bf16"``, ``"kv4"`` or ``"plain"`` (the model's own dtype);
            one for each of the model's caches, see :func:`kvfun.codecs.sensitivity`; or a
            :class:`kvfun.scheme.KvScheme`, which leaves layers that cannot take it in bf16 and says
            why, and has options of its own (``residual`` and the like are not taken beside it).
        max_size: at most so many tokens are visible in a full layer: the first ``sinks`` and the
            newest others. Narrower windows and chunks of the model's own stay.
        sinks: first tokens that stay visible under ``max_size``.
        reserve: tokens that a window can take back at any time, see :func:`kvfun.empty`.
        residual: the newest tokens stay as they came, at least so many, see :func:`kvfun.empty`.
        block: tokens encoded at once when they leave the residual.
        raw_sinks: the first tokens stay as they came; by default as many as the codec learns from.
        rebase: keep the sinks of ``max_size`` right before the window, whatever was dropped in
            between (:func:`kvfun.rebased`). Blocks of several tokens are then only read within
            :func:`attention`.
        states: keep the states of recurrent layers in ``"bf16"``, ``"f16"`` or ``"f32"``.

    A codec that stores keys less their mean is told which RoPE each layer's keys go through, as far
    as the model hands the cache what ``mx.fast.rope`` returned.

    Raises:
        UnsupportedError: a layer's cache cannot take the spec or the limit, or the model cannot
            run on it; found by building one step lazily, before anything is computed.
    """
    if isinstance(spec, KvScheme):
        if residual or raw_sinks is not None or block != BLOCK:
            raise SpecError("residual, block and raw_sinks are the scheme's own")
        caches = _of_scheme(model, spec, max_size, sinks, reserve, states)
        return _rebased(caches, max_size, rebase)
    codecs = [spec] if isinstance(spec, str | Codec) else list(spec)
    codec, *others = codecs = [Codec.of(each) for each in codecs]
    _check_size(max_size, sinks)
    modules = {type(part).__module__.rpartition(".")[2] for part in model.modules()}
    failure = _dropping(modules) if max_size is not None else None
    raw: dict[str, Any] = {"residual": residual, "block": block, "raw_sinks": raw_sinks}
    can = can_be_packed(empty(codec, **raw)) and not others
    packed = can and multiplies_packed() and not modules & QUERIES_TWICE
    first = _Recipe(
        codec, max_size, sinks, reserve, packed, codec, raw, layers=tuple(codecs), states=states
    )
    return _rebased(_made(model, first, failure), max_size, rebase)


def _rebased(caches: PromptCache, max_size: int | None, rebase: bool) -> PromptCache:
    """The caches, those with sinks counting positions within them."""
    if not rebase:
        return caches
    if max_size is None:
        raise ValueError("rebase is for windows with sinks: say max_size, too")
    for shell in [shell for entry in caches for shell in shells_of(entry)]:
        if not shell.record.geometry.policy.sinks:
            continue
        if shell.rope is None:
            raise UnsupportedError("which RoPE the keys go through is not known")
        shell.record = rebased(shell.record, shell.rope)
    return caches


def _check_size(max_size: int | None, sinks: int) -> None:
    if max_size is not None and (not isinstance(max_size, int) or max_size <= sinks):
        raise ValueError(f"max_size must be an integer above the {sinks} sinks, not {max_size!r}")


def _of_scheme(
    model: Any,
    scheme: KvScheme,
    max_size: int | None,
    sinks: int,
    reserve: int,
    states: str | None,
) -> PromptCache:
    """A cache for every layer that keeps something, in what the scheme has for it."""
    _check_size(max_size, sinks)
    about = described(model)
    report = scheme.assigned(about)
    stored = [report[index] for index in about.storing]
    codecs = tuple([Codec.of(each.spec or "bf16") for each in stored])
    names = {"residual": scheme.residual, "block": scheme.block, "raw_sinks": scheme.raw_sinks}
    raw: dict[str, Any] = {**names, "start": scheme.start}
    modules = {type(part).__module__.rpartition(".")[2] for part in model.modules()}
    failure = _dropping(modules) if max_size is not None else None
    raw_codec = Codec.of("bf16")
    first = _Recipe(codecs[0], max_size, sinks, reserve, False, raw_codec, raw)
    first = attrs.evolve(first, layers=codecs, of=about, states=states)
    caches = _made(model, first, failure)
    caches.reasons = tuple([each.reason for each in stored])
    return caches


def _made(model: Any, first: _Recipe, failure: Exception | None) -> PromptCache:
    """The caches of the first recipe that the model runs on.

    Raises:
        UnsupportedError: it runs on none.
    """
    codec, max_size = first.codec, first.max_size
    for recipe in _tries(first) if failure is None else ():
        failure, exact, ropes = _probe(model, recipe)
        if failure is None:
            return _told(_build(model, attrs.evolve(recipe, exact=exact)), ropes)
        if isinstance(failure, (CodecError, UnsupportedError)):
            break
    name = getattr(model, "model_type", None) or type(model).__module__.rpartition(".")[2]
    limit = "" if max_size is None else f" with max_size={max_size}"
    raise UnsupportedError(
        f"{name} cannot run on {codec.spec} caches{limit}: {failure}"
    ) from failure


def _dropping(modules: set[str]) -> Exception | None:
    """Why no column of the model's caches may be dropped."""
    reasons = [POSITIONS_FROM_ROWS[module] for module in modules if module in POSITIONS_FROM_ROWS]
    return UnsupportedError(reasons[0]) if reasons else None


def _tries(recipe: _Recipe) -> Iterator[_Recipe]:
    """Ways to give a model the codec, best first."""
    yield recipe
    if recipe.packed:  # its attention cannot read packed numbers: decode them
        recipe = attrs.evolve(recipe, packed=False)
        yield recipe
    if (
        recipe.codec.spec != "plain" and recipe.of is None
    ):  # it reaches into its index caches: leave those as they are
        yield attrs.evolve(recipe, index=Codec.of("plain"))


@attrs.frozen
class _Recipe:
    """How every layer's cache is made."""

    codec: Codec
    max_size: int | None
    sinks: int
    reserve: int
    packed: bool
    index: Codec
    """Of the second and later caches of one layer, which index the first."""
    raw: dict[str, Any]
    """What stays as it came: ``residual``, ``block``, ``raw_sinks``; and ``start``."""
    exact: bool = True
    shell: type[KVFunCache] = KVFunCache
    layers: tuple[Codec, ...] = ()
    """The codecs of the model's caches, if there is more than one."""
    of: Model | None = None
    """What the model's layers keep, where a scheme says what in."""
    states: str | None = None
    """What recurrent states are kept in, if not in their own dtypes."""

    def of_layer(self, index: int) -> _Recipe:
        """That of one of the model's caches."""
        if len(self.layers) < 2 and self.of is None:
            return self
        codec = self.layers[index]
        index_codec = codec if self.index is self.codec else self.index
        if self.of is not None:
            _, *others = self.of.layers[self.of.storing[index]].stored or (None,)
            index_codec = Codec.of("bf16") if any(x.index for x in others if x) else codec
        return attrs.evolve(self, codec=codec, index=index_codec)


def _build(model: Any, recipe: _Recipe) -> PromptCache:
    theirs = mlx_lm_cache.make_prompt_cache(model)
    asked = len(recipe.layers) > 1 or recipe.of is not None
    if asked and len(recipe.layers) != len(theirs):
        raise UnsupportedError(f"{len(recipe.layers)} specs for a model of {len(theirs)} caches")
    return PromptCache(
        [
            _shell(cache, recipe.of_layer(index), f"layer {index}")
            for index, cache in enumerate(theirs)
        ]
    )


def _told(caches: PromptCache, ropes: Sequence[Rope | None]) -> PromptCache:
    """The caches, told which RoPE their keys go through."""
    shells = [shell for entry in caches for shell in shells_of(entry)]
    for shell, rope in zip(shells, ropes, strict=True):
        shell.record = with_codecs(shell.record, partial(with_rope, rope=rope))
        shell.rope = rope
    return caches


def with_codecs(record: Any, change: Callable[[Codec], Codec]) -> Any:
    """The empty cache with other codecs, in a chain those of all its parts."""
    if isinstance(record, Delayed):
        inner = with_codecs(record.inner, change)
        return replace(record, inner=inner, target=change(record.target))
    if isinstance(record, Chain):
        return record.with_parts([replace(x, codec=change(x.codec)) for x in record.parts])
    return replace(record, codec=change(record.codec))


def _shell(cache: Any, recipe: _Recipe, where: str) -> Any:
    """The kvfun cache in place of one of mlx-lm's."""
    kind = type(cache)
    if isinstance(cache, mlx_lm_cache.CacheList):
        index = attrs.evolve(
            recipe, codec=recipe.index, packed=recipe.packed and recipe.index is recipe.codec
        )
        main = next((x for x in cache.caches if not isinstance(x, mlx_lm_cache.ArraysCache)), None)
        return KVFunCacheList(
            *[_shell(part, recipe if part is main else index, where) for part in cache.caches]
        )
    if isinstance(cache, mlx_lm_cache.ArraysCache):
        return KVFunStates(len(cache.cache), recurrent(dtypes=recipe.states))
    if kind is mlx_lm_cache.KVCache:
        limit = recipe.max_size
        policy = (None, 0, None) if limit is None else (limit - recipe.sinks, recipe.sinks, None)
    elif kind is mlx_lm_cache.RotatingKVCache:
        limit = cache.max_size if recipe.max_size is None else min(cache.max_size, recipe.max_size)
        policy = (limit - cache.keep, cache.keep, None)
    elif kind is mlx_lm_cache.ChunkedKVCache:
        if recipe.max_size is not None and recipe.max_size < cache.chunk_size:
            raise UnsupportedError(
                f"{where}: its mask shows a chunk of {cache.chunk_size}, which cannot be limited"
            )
        policy = (None, 0, cache.chunk_size)
    else:
        raise UnsupportedError(
            f"{where}: kvfun has no cache for a {kind.__module__}.{kind.__name__}"
        )
    window, sinks, chunk = policy
    as_they_came = ("plain",) if recipe.of is None else ("plain", "bf16")
    raw = {} if recipe.codec.spec in as_they_came else recipe.raw
    numbers: dict[str, Any] = {
        "window": window,
        "sinks": sinks,
        "chunk": chunk,
        "reserve": recipe.reserve,
    }
    record = empty(recipe.codec, **numbers, **raw)
    return recipe.shell(record, recipe.packed, recipe.exact)


class _Asked(KVFunCache):
    """A cache that notes for how many tokens the model asks for a mask."""

    routed = False  # since the caches may be used outside :func:`attention` too

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.asked: set[int] = set()

    def update_and_fetch(self, keys: mx.array, values: mx.array):
        self.rope = rope_of(keys)
        return super().update_and_fetch(keys, values)

    def make_mask(self, N: int, *args: Any, **kwargs: Any):
        self.asked.add(N)
        return super().make_mask(N, *args, **kwargs)


def _probe(model: Any, recipe: _Recipe) -> tuple[Exception | None, bool, list[Rope | None]]:
    """Two steps of the model, built but never computed.

    Returns:
        Why it cannot run on such caches, if so; whether it must only be handed what it sees; and
        the RoPE of each cache's keys.
    """
    try:
        cache = _build(model, attrs.evolve(recipe, shell=_Asked))
        with watched_rope():
            model(mx.zeros((1, 2), mx.int32), cache=cache)
            model(mx.zeros((1, 1), mx.int32), cache=cache)
    except Exception as error:  # whatever stops the model is the answer
        return error, True, []
    shells = [shell for entry in cache for shell in shells_of(entry)]
    windowed = [shell for shell in shells if shell.record.geometry.policy.window is not None]
    asked = {length for shell in windowed for length in shell.asked}
    if windowed and not asked:
        return ValueError("it never asks its caches for a mask, so no window could hold"), True, []
    return None, OLD_PROTOCOL or 1 not in asked, [shell.rope for shell in shells]


def shells_of(cache: Any) -> Iterator[Any]:
    if isinstance(cache, mlx_lm_cache.CacheList):
        for part in cache.caches:
            yield from shells_of(part)
    elif isinstance(cache, KVFunCache):
        yield cache


def _reports(index: int, cache: Any) -> Iterator[LayerReport]:
    if isinstance(cache, mlx_lm_cache.CacheList):
        for part in cache.caches:
            yield from _reports(index, part)
    elif isinstance(cache, KVFunCache):
        yield LayerReport(index, cache.record.codec.spec, _kind(cache.record), _read(cache))
    elif isinstance(cache, KVFunStates):
        yield LayerReport(index, _stored(cache), "recurrent", "")


def _stored(cache: KVFunStates) -> str:
    """What all states are kept in."""
    dtypes = {dtype: name for name, dtype in DTYPES.items()}
    return next((dtypes[dtype] for _, dtype in cache.record.stored if dtype), "plain")


def _kind(record: Any) -> str:
    policy = record.geometry.policy
    parts = [f"window {policy.window}"] if policy.window is not None else []
    parts += [f"chunk {policy.chunk}"] if policy.chunk is not None else []
    near = " right before it" if isinstance(record, Rebased) else ""
    parts += [f"{policy.sinks} sinks{near}"] if policy.sinks else []
    return ", ".join([*(parts or ["full"]), *_raw(record)])


def _raw(record: Any) -> list[str]:
    """What stays as it came."""
    if isinstance(record, Delayed):
        return [] if record.converted else [f"{record.target.spec} from {record.start} tokens on"]
    if not isinstance(record, Chain):
        return []
    residual = record.ageing.residual if record.ageing is not None else 0
    return [
        *([f"residual {residual}"] if residual else []),
        *([f"{record.front} raw sinks"] if record.front else []),
    ]


def _read(cache: KVFunCache) -> str:
    if hasattr(cache, "bits"):
        return "read as packed numbers"
    return "" if kernels_for(cache.record.codec) is FUSED else "decoded at every read"


def describe(cache: list) -> str:
    """What the layers of a prompt cache are, equal neighbours on one line."""
    lines: list[tuple[list[int], str]] = []
    by_layer: dict[int, list[str]] = {}
    known = cache if isinstance(cache, PromptCache) else PromptCache(cache)
    for report in known.report:
        by_layer.setdefault(report.layer, []).append(str(report))
    for layer, texts in by_layer.items():
        text = " + ".join(texts)
        if lines and lines[-1][1] == text:
            lines[-1][0].append(layer)
        else:
            lines.append(([layer], text))
    return "\n".join(
        (f"layer {ls[0]}: " if len(ls) == 1 else f"layers {ls[0]}-{ls[-1]}: ") + text
        for ls, text in lines
    )
