"""Codecs: pure ``encode`` and ``decode`` between vectors and planes, and their spec strings."""

from ._affine import BITS, GROUP_SIZES, Affine
from ._microscaled import MODES, Microscaled
from ._pair import Codec, VectorCodec
from ._plain import DTYPES, Plain
from ._spec import format, parse

__all__ = [
    "BITS",
    "DTYPES",
    "GROUP_SIZES",
    "MODES",
    "Affine",
    "Codec",
    "Microscaled",
    "Plain",
    "VectorCodec",
    "format",
    "parse",
]
