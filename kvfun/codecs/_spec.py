"""Spec strings: parse and format are inverse."""

from __future__ import annotations

import re

from ..errors import SpecError
from ._affine import Affine
from ._microscaled import MODES, Microscaled
from ._pair import Codec, VectorCodec
from ._plain import DTYPES, Plain

_NUMBER = "[1-9][0-9]{0,3}"
_AFFINE = re.compile(
    rf"k(?:v(?P<kv>{_NUMBER})|(?P<k>{_NUMBER})v(?P<v>{_NUMBER}))(?:-g(?P<group>{_NUMBER}))?"
    r"(?P<pad>-pad)?"
)
_MICROSCALED = re.compile(rf"(?P<mode>{'|'.join(MODES)})(?P<pad>-pad)?")


def parse(spec: str) -> Codec:
    """The codec a spec string names.

    =================  ==========================================================================
    ``plain``          numbers as they come, in the dtype of the first append
    ``bf16 f16 f32``   numbers rounded to that dtype
    ``kv4``            affine, 4 bits, groups of 64 (bits 2, 3, 4, 5, 6, 8)
    ``kv4-g32``        groups of 32 (32, 64, 128)
    ``kv4-g32-pad``    head_dim filled up to a multiple of the group
    ``k8v4``           keys in 8 bits, values in 4
    ``mxfp8 mxfp4``    microscaled, groups of 32 (``mxfp8-pad``: head_dim filled up)
    ``nvfp4``          microscaled, groups of 16 (``nvfp4-pad``)
    ``bf16+kv4``       keys by the first spec, values by the second
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
        return Codec(_side(keys, spec), _side(values, spec))
    return _uniform(spec, spec)


def _side(part: str, spec: str) -> VectorCodec:
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
    match = _AFFINE.fullmatch(spec)
    if match is None:
        raise SpecError(
            f"unknown codec spec {whole!r}; known are plain, {', '.join(DTYPES)}, kv<bits>, "
            f"k<bits>v<bits>, each kv spec with -g<group size> and -pad, {', '.join(MODES)}, each "
            "with -pad, and <keys>+<values>"
        )
    group, pad = int(match["group"] or 64), bool(match["pad"])
    key_bits, value_bits = (match["kv"], match["kv"]) if match["kv"] else (match["k"], match["v"])
    try:
        return Codec(Affine(int(key_bits), group, pad), Affine(int(value_bits), group, pad))
    except ValueError as error:
        raise SpecError(f"{whole!r}: {error}") from error


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
    return f"{keys.spec}+{values.spec}"
