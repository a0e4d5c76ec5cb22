"""Spec strings: parse and format are inverse."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ..errors import CodecError, SpecError
from ._affine import Affine
from ._centred import Centred
from ._microscaled import MODES, Microscaled
from ._pair import Codec, VectorCodec
from ._plain import DTYPES, Plain
from ._rotated import TRELLIS_BITS, Rotated
from ._turbo import TurboKeys, TurboValues

_NUMBER = "[1-9][0-9]{0,3}"
_AFFINE = re.compile(
    rf"k(?:v(?P<kv>{_NUMBER})|(?P<k>{_NUMBER})v(?P<v>{_NUMBER}))(?:-g(?P<group>{_NUMBER}))?"
    r"(?P<pad>-pad)?(?P<half>-f16)?(?P<centred>-c)?"
)
_ROTATED = re.compile(
    rf"rot(?:(?P<one>{_NUMBER})|-k(?P<k>{_NUMBER})v(?P<v>{_NUMBER}))(?P<options>(?:-[a-z0-9]+?)*?)"
    r"(?P<centred>-c)?"
)
_OPTIONS = re.compile(
    rf"(?:-g(?P<group>{_NUMBER}))?(?P<trellis>-tcq)?(?:-(?P<statistics>ldlq|bal))?"
    rf"(?P<log>-log)?(?:-s(?P<search>{_NUMBER}))?"
    rf"(?:-(?P<fit>ls|norm|rms))?(?:-seed(?P<seed>{_NUMBER}))?"
)
_MICROSCALED = re.compile(rf"(?P<mode>{'|'.join(MODES)})(?P<pad>-pad)?")
_TURBO = re.compile(rf"turbo-(?=.)(?:k(?P<keys>{_NUMBER}))?(?:v(?P<values>{_NUMBER}))?")


def parse(spec: str) -> Codec:
    """The codec a spec string names.

    =================  ==========================================================================
    ``plain``          numbers as they come, in the dtype of the first append
    ``bf16 f16 f32``   numbers rounded to that dtype
    ``kv4``            affine, 4 bits, groups of 64 (bits 2, 3, 4, 5, 6, 8)
    ``kv4-g32``        groups of 32 (32, 64, 128)
    ``kv4-g32-pad``    head_dim filled up to a multiple of the group
    ``k8v4``           keys in 8 bits, values in 4
    ``kv8-f16``        scales and biases in float16, whatever the numbers come in
    ``rot-k4v4``       rotated, in the codebook of normal numbers (bits 2 to 5, 8 for affine);
                       keys less their mean
    ``rot-k3v3-g32``   one scale for 32 numbers (a multiple of 16) instead of one a vector
    ``rot-k3v3-tcq``   codes chosen together, on a trellis (2 and 3 bits)
    ``rot-k4v4-ldlq``  keys by a prompt's statistics (or ``-bal``), see :func:`kvfun.calibrate`
    ``rot-k4v4-log``   scales of 8 bits; further ``-s1`` ``-s5`` (scales tried), ``-ls`` ``-norm``
                       ``-rms`` (how they are fitted), ``-seed7``
    ``rot4 rot4-c``    one side of these: as it is, or less its mean (``kv8-c``, too)
    ``mxfp8 mxfp4``    microscaled, groups of 32 (``mxfp8-pad``: head_dim filled up)
    ``nvfp4``          microscaled, groups of 16 (``nvfp4-pad``)
    ``turbo-k8v3``     vllm-metal's TurboQuant: keys in 2, 4, 5 or 8 bits, values in 2 to 5 or 8
    ``bf16+kv4``       keys by the first spec, values by the second
    ``bf16+turbo-v3``  the same with TurboQuant on one side (``turbo-k8+kv4``)
    =================  ==========================================================================

    Raises:
        SpecError: the string names no codec.

    >>> parse("k8v4-g32").spec
    'k8v4-g32'
    """
    if not isinstance(spec, str):
        raise SpecError(f"a codec spec is a string such as 'bf16' or 'kv4', not {spec!r}")
    keys, plus, values = spec.partition("+")
    if plus:
        return Codec(_side(keys, "keys", spec), _side(values, "values", spec))
    return _uniform(spec, spec)


def _side(part: str, side: str, spec: str) -> VectorCodec:
    if (match := _TURBO.fullmatch(part)) and [*(turbo := _turbo(match, spec))] == [side]:
        return turbo[side]
    codec = _uniform(part, spec)
    if format(codec) != codec.keys.spec:
        raise SpecError(f"{spec!r}: {part!r} already names two codecs")
    return codec.keys


def _uniform(spec: str, whole: str) -> Codec:
    """The codec of ``spec``, a part of the ``whole`` that messages name."""
    if spec == "plain" or spec in DTYPES:
        plain = Plain(None if spec == "plain" else spec)
        return Codec(plain, plain)
    if match := _MICROSCALED.fullmatch(spec):
        microscaled = Microscaled(match["mode"], bool(match["pad"]))
        return Codec(microscaled, microscaled)
    if match := _ROTATED.fullmatch(spec):
        return _rotated(match, whole)
    if match := _TURBO.fullmatch(spec):
        turbo = _turbo(match, whole)
        if len(turbo) == 1:
            (side,) = turbo
            raise SpecError(
                f"{whole!r}: {spec!r} is for {side} only; turbo-k<bits>v<bits> names both "
                "sides, turbo-k<bits>+<values> and <keys>+turbo-v<bits> one"
            )
        return Codec(**turbo)
    match = _AFFINE.fullmatch(spec)
    if match is None:
        raise SpecError(
            f"unknown codec spec {whole!r}; known are plain, {', '.join(DTYPES)}, kv<bits>, "
            f"k<bits>v<bits>, each kv spec with -g<group size>, -pad and -f16, {', '.join(MODES)}, "
            "each with -pad, rot-k<bits>v<bits>, turbo-k<bits>v<bits>, and <keys>+<values>"
        )
    group, options = int(match["group"] or 64), (bool(match["pad"]), bool(match["half"]))
    key_bits, value_bits = (match["kv"], match["kv"]) if match["kv"] else (match["k"], match["v"])
    try:
        sides = [Affine(int(bits), group, *options) for bits in (key_bits, value_bits)]
    except ValueError as error:
        raise SpecError(f"{whole!r}: {error}") from error
    return Codec(*[Centred(side) if match["centred"] else side for side in sides])


def _turbo(match: re.Match[str], whole: str) -> dict[str, VectorCodec]:
    """The codecs of TurboQuant by the side they are for: one or both."""
    sides = {"keys": TurboKeys, "values": TurboValues}
    try:
        return {side: of(int(match[side])) for side, of in sides.items() if match[side]}
    except CodecError as error:
        raise SpecError(f"{whole!r}: {error}") from error


def _rotated(match: re.Match[str], whole: str) -> Codec:
    options = _OPTIONS.fullmatch(match["options"])
    if options is None:
        raise SpecError(
            f"{whole!r}: unknown options {match['options']!r}; known are, in this order, "
            "-g<group size>, -tcq, -ldlq or -bal, -log, -s<scales tried>, -ls or -norm or -rms, "
            "-seed<number>"
        )
    try:
        if match["one"]:
            one = _rotated_side(int(match["one"]), options)
            one = Centred(one) if match["centred"] else one
            return Codec(one, one)
        if match["centred"]:
            raise SpecError("keys of rot-k<bits>v<bits> are less their mean already")
        keys, values = _rotated_sides(int(match["k"]), int(match["v"]), options)
    except ValueError as error:
        raise SpecError(f"{whole!r}: {error}") from error
    codec = Codec(Centred(keys), values)
    if format(codec) != whole.partition("+")[0] and "+" not in whole:
        raise SpecError(f"{whole!r}: the canonical form is {format(codec)!r}")
    return codec


def _rotated_sides(k: int, v: int, options: re.Match[str]) -> tuple[VectorCodec, VectorCodec]:
    """The codecs of a pair: 8 bits are affine, and only keys have to do with queries."""
    group = int(options["group"] or 64)
    return (
        Affine(8, group, half=True) if k == 8 else _rotated_side(k, options),
        Affine(8, group, half=True) if v == 8 else _rotated_side(v, options, queried=False),
    )


def _rotated_side(bits: int, options: re.Match[str], queried: bool = True) -> VectorCodec:
    group = int(options["group"]) if options["group"] else None
    return Rotated(
        bits,
        group,
        search=int(options["search"] or 17),
        fit=options["fit"] or "unbiased",
        log_scale=bool(options["log"]),
        trellis=bool(options["trellis"]) and bits in TRELLIS_BITS,
        statistics=options["statistics"] if queried else None,
        seed=int(options["seed"] or 42),
    )


def format(codec: Codec) -> str:
    """The canonical spec string of a codec.

    >>> format(Codec(Plain("bf16"), Affine(4)))
    'bf16+kv4'
    """
    keys, values = codec.keys, codec.values
    if keys.spec == values.spec:
        return keys.spec
    if isinstance(keys, Affine) and isinstance(values, Affine) and keys.options == values.options:
        return f"k{keys.bits}v{values.bits}{keys.options}"
    if isinstance(keys, TurboKeys) and isinstance(values, TurboValues):
        return f"turbo-k{keys.bits}v{values.bits}"
    if isinstance(keys, Centred) and (short := _rotated_pair(keys, values)):
        return short
    return f"{keys.spec}+{values.spec}"


def _rotated_pair(keys: Centred, values: VectorCodec) -> str | None:
    """``rot-k<bits>v<bits>`` and options, where that names both sides."""
    sides = [keys.codec, values]
    if not all(isinstance(side, Affine | Rotated) for side in sides):
        return None
    found: dict[str, str] = {}
    for side in sides:
        if isinstance(side, Rotated):
            options = _OPTIONS.fullmatch(side.options)
            found |= {name: value for name, value in _given(options) if value}
        elif isinstance(side, Affine) and side.group_size != 64:
            found.setdefault("group", str(side.group_size))
    text = "".join([form.format(found[name]) for name, form in _FORMS.items() if name in found])
    options = _OPTIONS.fullmatch(text)
    assert options is not None
    k, v = [getattr(side, "bits", 0) for side in sides]
    try:
        expected = [side.spec for side in _rotated_sides(k, v, options)]
    except CodecError:
        return None
    return f"rot-k{k}v{v}{text}" if expected == [side.spec for side in sides] else None


def _given(options: re.Match[str] | None) -> Iterable[tuple[str, str | None]]:
    return () if options is None else options.groupdict().items()


_FORMS = {
    "group": "-g{}",
    "trellis": "-tcq",
    "statistics": "-{}",
    "log": "-log",
    "search": "-s{}",
    "fit": "-{}",
    "seed": "-seed{}",
}
"""The options of :data:`_OPTIONS` in their order, as they are written."""
