"""Codecs: pure ``encode`` and ``decode`` between vectors and planes, and their spec strings."""

from ._affine import BITS, GROUP_SIZES, Affine
from ._centred import Centred
from ._concatenated import Concatenated
from ._learning import (
    calibrated,
    chosen,
    front_of,
    has_learnt,
    joined,
    learns,
    learnt_arrays,
    learnt_from,
    of_rows,
    statistics_of,
    unlearnt,
    with_learnt,
    with_rope,
    with_statistics,
)
from ._microscaled import MODES, Microscaled
from ._pair import Codec, VectorCodec
from ._plain import DTYPES, Plain
from ._rope import Rope
from ._rotated import Rotated
from ._sensitivity import Sensitivity, sensitivity
from ._spec import format, parse
from ._turbo import TurboKeys, TurboValues

__all__ = [
    "BITS",
    "DTYPES",
    "GROUP_SIZES",
    "MODES",
    "Affine",
    "Centred",
    "Codec",
    "Concatenated",
    "Microscaled",
    "Plain",
    "Rope",
    "Rotated",
    "Sensitivity",
    "TurboKeys",
    "TurboValues",
    "VectorCodec",
    "calibrated",
    "chosen",
    "format",
    "front_of",
    "has_learnt",
    "joined",
    "learns",
    "learnt_arrays",
    "learnt_from",
    "of_rows",
    "parse",
    "sensitivity",
    "statistics_of",
    "unlearnt",
    "with_learnt",
    "with_rope",
    "with_statistics",
]
