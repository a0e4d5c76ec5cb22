"""A scheme: what every layer of a model stores, and what that is called."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from ..caches import BLOCK
from ..codecs import Affine, Codec, TurboKeys, TurboValues
from ..errors import SpecError
from ..kernels import SETS
from ._assigned import Assignment, assigned, described
from ._model import Model

BF16, UNIFORM, CONFIG, TURBO = "bf16", "affine-uniform", "affine-config", "turbo"
CODEC, CODEC_CONFIG = "codec", "codec-config"
KINDS = (BF16, UNIFORM, CONFIG, TURBO, CODEC, CODEC_CONFIG)

WAIT = 5000
"""Tokens that a uniform affine scheme leaves in bf16 at first, unless it is told otherwise."""

AUTO = "auto"
"""Kernels that :func:`kvfun.kernels.kernels_for` chooses when it is known what is read where."""

_KERNELS = {BF16: "fused", UNIFORM: "unfused", CONFIG: "tiled-causal", TURBO: "deferred"}
_NUMBER = re.compile("0|[1-9][0-9]*")
_OPTIONS = ("start", "residual", "block", "raw")


def _count(least: int, optional: bool = False):
    def check(scheme: Any, attribute: Any, value: Any) -> None:
        if optional and value is None:
            return
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise SpecError(f"{attribute.name} must be an integer >= {least}, not {value!r}")

    return check


@attrs.frozen(kw_only=True)
class KvScheme:
    """What every layer of a model stores, whatever the model.

    Build one with :meth:`of`, :meth:`affine`, :meth:`turbo`, :meth:`by_layer`,
    :meth:`affine_config` or :func:`resolve_scheme`. It is hashable, and nothing that was passed in
    is kept.

    Args:
        kind: ``"bf16"``; ``"affine-uniform"``; ``"affine-config"`` (bits and group by layer, those
            that are not listed stay bf16); ``"turbo"`` (full attention only); ``"codec"`` and
            ``"codec-config"`` (any codec spec, for all layers or by layer).
        spec: the canonical codec spec of all layers; ``None`` where they are listed.
        layers: pairs of a layer and its spec, by layer.
        start: tokens that stay bf16 until there are so many; then all of them are converted.
        kernels: the name of a kernel set in :data:`kvfun.kernels.SETS`, or ``"auto"``.
        residual: the newest tokens stay raw, see :func:`kvfun.empty`.
        block: tokens that leave the residual at once.
        raw_sinks: the first tokens stay raw; ``None``: as many as the codec learns from.

    >>> KvScheme.of("kv4-g32").cache_key, KvScheme.affine(4).cache_key
    ('kv4-g32', 'kv4-start5000')
    """

    kind: str
    spec: str | None = None
    layers: tuple[tuple[int, str], ...] = ()
    start: int = attrs.field(default=0, validator=_count(0))
    kernels: str = attrs.field(
        default=attrs.Factory(lambda self: _KERNELS.get(self.kind, AUTO), takes_self=True)
    )
    residual: int = attrs.field(default=0, validator=_count(0))
    block: int = attrs.field(default=BLOCK, validator=_count(1))
    raw_sinks: int | None = attrs.field(default=None, validator=_count(0, optional=True))

    def __attrs_post_init__(self) -> None:
        if self.kind not in KINDS:
            raise SpecError(f"kind must be one of {KINDS}, not {self.kind!r}")
        if self.kernels != AUTO and self.kernels not in SETS:
            raise SpecError(f"kernels must be {AUTO} or one of {[*SETS]}, not {self.kernels!r}")
        listed = self.kind in (CONFIG, CODEC_CONFIG)
        if listed != (self.spec is None) or (self.layers and not listed):
            raise SpecError(f"a scheme of kind {self.kind} has {'layers' if listed else 'a spec'}")
        for spec in self.specs:
            if Codec.of(spec).spec != spec:
                raise SpecError(f"{spec!r}: the canonical form is {Codec.of(spec).spec!r}")
        if listed:
            _check_layers(self.layers)
            wrong = [s for s in self.specs if self.kind == CONFIG and not _affine(s)]
        else:
            kind = _kind_of(self.spec or "")
            wrong = [self.spec] if self.kind not in (kind, CODEC) else []
        if wrong:
            raise SpecError(f"a scheme of kind {self.kind} cannot be {wrong[0]!r}")
        if self.kind == CODEC and _kind_of(self.spec or "") != CODEC:
            raise SpecError(f"{self.spec!r} is of kind {_kind_of(self.spec or '')}")
        if self.kind == BF16 and (self.start, self.residual, self.raw_sinks) != (0, 0, None):
            raise SpecError("bf16 has nothing to wait for, and nothing else to keep raw")
        if self.kind == CODEC_CONFIG and all(_affine(spec) for spec in self.specs):
            raise SpecError(f"layers that are all affine are of kind {CONFIG}")
        if self.start and (self.residual or self.raw_sinks is not None):
            raise SpecError("tokens that wait are converted together: there is no residual or sink")
        if not self.residual and self.block != BLOCK:
            raise SpecError("a block is what leaves a residual: there is none")

    # -- building ---------------------------------------------------------------------------------

    @classmethod
    def of(cls, spec: str | Codec | KvScheme, **options: Any) -> KvScheme:
        """The scheme of a codec spec, or of a :attr:`cache_key` that tells all of one.

        Args:
            spec: such as ``"bf16"``, ``"kv4-g32"``, ``"turbo-k8v3"``, ``"rot-k4v4-log"``,
                ``"kv4-start5000"``; a scheme is returned as it is.
            options: ``start``, ``kernels``, ``residual``, ``block``, ``raw_sinks``.

        Raises:
            SpecError: an unknown spec, or options out of range.
        """
        if isinstance(spec, KvScheme):
            return attrs.evolve(spec, **options) if options else spec
        if isinstance(spec, str):
            spec, written = _split(spec)
            options = {**written, **options}
        codec = Codec.of(spec)
        kind = _kind_of(codec.spec)
        return cls(kind=kind, spec=codec.spec, **options)

    @classmethod
    def affine(cls, bits: int, group_size: int = 64, start: int = WAIT, **options: Any) -> KvScheme:
        """All keys and values in ``bits``, from ``start`` tokens on."""
        return cls(kind=UNIFORM, spec=_affine_spec(bits, group_size), start=start, **options)

    @classmethod
    def turbo(cls, key_bits: int, value_bits: int, start: int = 0, **options: Any) -> KvScheme:
        """TurboQuant in every layer of full attention."""
        codec = Codec(_built(TurboKeys, key_bits), _built(TurboValues, value_bits))
        return cls(kind=TURBO, spec=codec.spec, start=start, **options)

    @classmethod
    def affine_config(
        cls, config: Iterable[Sequence[int]], start: int = 0, **options: Any
    ) -> KvScheme:
        """Bits by layer: ``(layer, bits, group_size)``; layers that are not listed stay bf16."""
        if not isinstance(config, Iterable) or isinstance(config, str | Mapping):
            raise SpecError(f"a config is a list of (layer, bits, group_size), not {config!r:.80}")
        layers = []
        for entry in config:
            if not isinstance(entry, Sequence) or isinstance(entry, str) or len(entry) != 3:
                raise SpecError(f"an entry is (layer, bits, group_size), not {entry!r:.80}")
            layer, bits, group_size = entry
            layers.append((layer, _affine_spec(bits, group_size)))
        return cls(kind=CONFIG, layers=_in_order(layers), start=start, **options)

    @classmethod
    def by_layer(
        cls, specs: Mapping[int, str | Codec] | Iterable[tuple[int, str | Codec]], **options: Any
    ) -> KvScheme:
        """A codec by layer; layers that are not listed stay bf16."""
        pairs: Any = specs.items() if isinstance(specs, Mapping) else specs
        layers = [(layer, Codec.of(spec).spec) for layer, spec in pairs]
        kind = CONFIG if all(_affine(spec) for _, spec in layers) else CODEC_CONFIG
        return cls(kind=kind, layers=_in_order(layers), **options)

    # -- what it is called ------------------------------------------------------------------------

    @property
    def specs(self) -> tuple[str, ...]:
        """The codec specs in it."""
        return tuple([spec for _, spec in self.layers]) if self.spec is None else (self.spec,)

    @property
    def cache_key(self) -> str:
        """A name for stores: equal keys mean equal bytes for equal tokens.

        That of all-layer schemes is what :meth:`of` takes. Of a scheme by layer it is
        ``config``, options, and behind ``@`` a digest of the list.
        """
        parts = [self.spec or CONFIG.partition("-")[2]]
        parts += [f"start{self.start}"] if self.start else []
        parts += [f"residual{self.residual}"] if self.residual else []
        parts += [f"block{self.block}"] if self.block != BLOCK else []
        parts += [f"raw{self.raw_sinks}"] if self.raw_sinks is not None else []
        key = "-".join(parts)
        if self.spec is not None:
            return key
        listed = json.dumps(self.layers, separators=(",", ":")).encode()
        return f"{key}@{hashlib.blake2b(listed, digest_size=8).hexdigest()}"

    @property
    def label(self) -> str:
        """What a person calls it."""
        parts = [self._short_label()]
        parts += [f"from {self.start:,} tokens on"] if self.start else []
        parts += [f"the last {self.residual} raw"] if self.residual else []
        parts += [f"the first {self.raw_sinks} raw"] if self.raw_sinks else []
        return ", ".join(parts)

    def _short_label(self) -> str:
        if self.spec is None:
            return f"{' and '.join(sorted(set(self.specs))) or 'bf16'} by layer"
        codec = Codec.of(self.spec)
        keys: Any = codec.keys
        values: Any = codec.values
        if self.kind == UNIFORM:
            return f"{keys.bits} bits, groups of {keys.group_size}"
        if self.kind == TURBO:
            return f"TurboQuant, keys in {keys.bits} bits and values in {values.bits}"
        return self.spec

    @property
    def kernel_set(self) -> Mapping[str, Any] | None:
        """The kernels it names, for ``attend(kernels=)``; ``None`` where they are to be chosen."""
        return None if self.kernels == AUTO else SETS[self.kernels]

    @property
    def storage(self) -> dict[str, Any]:
        """What a store writes down of it, for JSON; :meth:`from_storage` is the inverse."""
        found: dict[str, Any] = {"storage": self.kind, "kernels": self.kernels}
        if self.kind == UNIFORM:
            bits, group_size = _bits_and_group(self.spec or "")
            found |= {"bits": bits, "group_size": group_size}
        elif self.kind == CONFIG:
            found["layers"] = [[layer, *_bits_and_group(spec)] for layer, spec in self.layers]
        elif self.kind == CODEC_CONFIG:
            found["layers"] = [[layer, spec] for layer, spec in self.layers]
        elif self.kind == TURBO:
            codec: Any = Codec.of(self.spec or "")
            found |= {"key_bits": codec.keys.bits, "value_bits": codec.values.bits}
        elif self.kind == CODEC:
            found["codec"] = self.spec
        for name, default in _DEFAULTS.items():
            if getattr(self, name) != default:
                found[name] = getattr(self, name)
        return found

    @classmethod
    def from_storage(cls, storage: Mapping[str, Any]) -> KvScheme:
        """The scheme that a :attr:`storage` tells of.

        Raises:
            SpecError: it tells of none; what it lacks, or has too much, is named.
        """
        if not isinstance(storage, Mapping):
            raise SpecError(f"a storage record is a dictionary, not {storage!r:.80}")
        given = dict(storage)
        kind = given.pop("storage", None)
        if kind not in KINDS:
            raise SpecError(f"storage must be one of {KINDS}, not {kind!r}")
        missing = {*_FIELDS[kind], "kernels"} - set(given)
        unknown = set(given) - {*_FIELDS[kind], "kernels", *_DEFAULTS}
        if missing or unknown:
            raise SpecError(
                f"a storage record of {kind} has {sorted({*_FIELDS[kind], 'kernels'})}, and "
                f"perhaps {sorted(_DEFAULTS)}: "
                + ", ".join([f"{x} is missing" for x in sorted(missing)])
                + ", ".join([f"{x} is unknown" for x in sorted(unknown)])
            )
        fields = [given.pop(name) for name in _FIELDS[kind]]
        scheme = _BUILDERS[kind](cls, fields, given)
        if scheme.kind != kind:
            raise SpecError(f"a storage record of {kind} that is one of {scheme.kind}")
        return scheme

    # -- a model under it -------------------------------------------------------------------------

    def assigned(self, model: Model) -> tuple[Assignment, ...]:
        """What each layer of a model comes to store, and why where it is not what was asked for.

        Raises:
            SpecError: a layer that the model has not.
            CodecError: a listed layer cannot take its codec, or no layer can.
        """
        return assigned(self, model)

    def describe(self, model: Model) -> str:
        """Layers by codec, kinds of attention, recurrent layers; and which were left out, and why.

        >>> config = {"num_hidden_layers": 2, "hidden_size": 128, "num_attention_heads": 2}
        >>> print(KvScheme.of("kv8").describe(Model.from_config(config)))
        8 bits, groups of 64 (kv8)
        layers 0-1 (full): kv8
        """
        return described(self, assigned(self, model))

    def caches(self, model: Model) -> tuple[Any, ...]:
        """An empty cache for every layer of a model, see :func:`kvfun.scheme.caches`."""
        from ._caches import caches

        return caches(model, self)


_DEFAULTS: dict[str, Any] = {"start": 0, "residual": 0, "block": BLOCK, "raw_sinks": None}
_FIELDS: dict[str, tuple[str, ...]] = {
    BF16: (),
    UNIFORM: ("bits", "group_size"),
    CONFIG: ("layers",),
    TURBO: ("key_bits", "value_bits"),
    CODEC: ("codec",),
    CODEC_CONFIG: ("layers",),
}


def _stored_layers(cls: type[KvScheme], fields: list, options: dict[str, Any]) -> KvScheme:
    (layers,) = fields
    pairs: Any = layers if isinstance(layers, list | tuple) else [layers]
    if not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs):
        raise SpecError(f"layers must be a list of [layer, spec], not {layers!r:.80}")
    return cls.by_layer([(layer, spec) for layer, spec in pairs], **options)


_BUILDERS: dict[str, Any] = {
    BF16: lambda cls, fields, options: cls.of(BF16, **options),
    UNIFORM: lambda cls, fields, options: cls.affine(*fields, **{"start": 0, **options}),
    CONFIG: lambda cls, fields, options: cls.affine_config(*fields, **options),
    TURBO: lambda cls, fields, options: cls.turbo(*fields, **options),
    CODEC: lambda cls, fields, options: cls.of(*fields, **options),
    CODEC_CONFIG: _stored_layers,
}


def _split(text: str) -> tuple[str, dict[str, int]]:
    """A spec and the options behind it: ``"kv4-start5000"``."""
    options: dict[str, int] = {}
    while "-" in text:
        head, _, last = text.rpartition("-")
        name = last.rstrip("0123456789")
        number = last[len(name) :]
        if name not in _OPTIONS or not _NUMBER.fullmatch(number):
            break
        key = "raw_sinks" if name == "raw" else name
        if key in options:
            raise SpecError(f"{text!r}: {name} is given twice")
        options[key] = int(number)
        text = head
    return text, options


def _affine(spec: str) -> bool:
    """Whether a spec is told by bits and a group size."""
    keys = Codec.of(spec).keys
    return isinstance(keys, Affine) and spec == Affine(keys.bits, keys.group_size).spec


def _kind_of(spec: str) -> str:
    """The kind of a scheme with one spec for all layers."""
    if spec == BF16:
        return BF16
    if _affine(spec):
        return UNIFORM
    codec = Codec.of(spec)
    turbo = isinstance(codec.keys, TurboKeys) and isinstance(codec.values, TurboValues)
    return TURBO if turbo else CODEC


def _bits_and_group(spec: str) -> tuple[int, int]:
    keys: Any = Codec.of(spec).keys
    return keys.bits, keys.group_size


def _affine_spec(bits: Any, group_size: Any) -> str:
    return _built(Affine, bits, group_size).spec


def _built(of: Any, *arguments: Any) -> Any:
    try:
        return of(*arguments)
    except ValueError as error:
        raise SpecError(str(error)) from error


def _in_order(layers: Iterable[tuple[int, str]]) -> tuple[tuple[int, str], ...]:
    layers = list(layers)
    _check_layers(layers)
    return tuple(sorted(layers))


def _check_layers(layers: Sequence[tuple[int, str]]) -> None:
    indices = [layer for layer, _ in layers]
    wrong = [i for i in indices if isinstance(i, bool) or not isinstance(i, int) or i < 0]
    if wrong:
        raise SpecError(f"a layer is an integer >= 0, not {wrong[0]!r}")
    if sorted(set(indices)) != sorted(indices):
        raise SpecError(f"a layer is listed twice in {indices}")
    if indices != sorted(indices) and isinstance(layers, tuple):
        raise SpecError(f"layers are listed in order, not as {indices}")


def resolve_scheme(
    override: str | int | None = None,
    turbo: tuple[int, int] | None = None,
    config: Iterable[Sequence[int]] | None = None,
    missing_config: str = "bf16",
    quantized_start: int | None = None,
    fused: bool | None = None,
) -> KvScheme:
    """The scheme that a server's options ask for.

    TurboQuant wins over all else. A config that a model ships counts only when it is asked for.

    Args:
        override: ``None`` or ``"off"`` (bf16, whatever the model ships), ``"config"``, or bits.
        turbo: bits of keys and values.
        config: what the model ships: ``(layer, bits, group_size)``, ...
        missing_config: ``"bf16"`` or ``"error"``, where ``"config"`` is asked for and there is
            none.
        quantized_start: tokens that stay bf16 at first, by default none.
        fused: whether windows are read in tiles (``"tiled-causal"``) or all scores at once
            (``"unfused"``); by default schemes by layer do and uniform ones do not.

    Raises:
        SpecError: anything else.

    >>> resolve_scheme(4).cache_key, resolve_scheme("off", config=[(0, 4, 64)]).cache_key
    ('kv4', 'bf16')
    """
    if missing_config not in (BF16, "error"):
        raise SpecError(f"missing_config must be 'bf16' or 'error', not {missing_config!r}")
    if fused is not None and not isinstance(fused, bool):
        raise SpecError(f"fused must be True, False or None, not {fused!r}")
    start = 0 if quantized_start is None else quantized_start
    _count(0)(None, attrs.fields(KvScheme).start, start)
    if turbo is not None:
        if not isinstance(turbo, Sequence) or isinstance(turbo, str) or len(turbo) != 2:
            raise SpecError(f"turbo must be (key_bits, value_bits), not {turbo!r}")
        return KvScheme.turbo(*turbo, start=start)
    kernels: dict[str, Any] = {}
    if fused is not None:
        kernels["kernels"] = "tiled-causal" if fused else "unfused"
    if override is None or override == "off":
        return KvScheme.of(BF16)
    if override == "config":
        if config is None and missing_config == "error":
            raise SpecError("the model ships no KV config: pass bits, or 'off'")
        if config is None:
            return KvScheme.of(BF16)
        return KvScheme.affine_config(config, start, **kernels)
    if isinstance(override, bool) or not isinstance(override, int):
        raise SpecError(f"override must be None, 'off', 'config' or bits, not {override!r}")
    return KvScheme.affine(override, start=start, **kernels)
