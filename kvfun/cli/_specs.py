"""How a row of a comparison is written: a codec, and what stays as it came.

``kv4:residual=64:raw_sinks=4`` is the codec ``kv4``, then options of :func:`kvfun.empty` after
colons. Commas stay what separates rows.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvfun.caches._empty import BLOCK
from kvfun.codecs import Codec, front_of
from kvfun.codecs import parse as parse_codec
from kvfun.errors import SpecError


class _Option(NamedTuple):
    """An option of the cache: its letter in a label, its default and its smallest value."""

    letter: str
    default: int
    least: int


OPTIONS = {
    "residual": _Option("r", 0, 0),
    "block": _Option("b", BLOCK, 1),
    "raw_sinks": _Option("s", 0, 0),
}
"""In the order of the canonical form."""

KNOWN = f"a cache takes {', '.join(OPTIONS)}, as in kv4:residual=64:raw_sinks=4"
_NUMBER = re.compile("0|[1-9][0-9]{0,8}")


@dataclass(frozen=True, eq=False)  # as codecs are; equal ones have the same spec
class CacheSpec:
    """A codec, and the options of the cache around it.

    Attributes:
        codec: How keys and values are stored.
        residual: The newest tokens that stay as they came, at least so many.
        block: Tokens encoded at once when they leave the residual.
        raw_sinks: The first tokens that stay as they came; by default what the codec learns from.
    """

    codec: Codec
    residual: int = OPTIONS["residual"].default
    block: int = OPTIONS["block"].default
    raw_sinks: int = OPTIONS["raw_sinks"].default

    @property
    def defaults(self) -> dict[str, int]:
        """The options that are not stated."""
        return _defaults(self.codec)

    @property
    def spec(self) -> str:
        """The canonical form, the inverse of :func:`parse`: defaults are left out."""
        return "".join([self.codec.spec, *(f":{name}={n}" for name, n in self._stated())])

    @property
    def label(self) -> str:
        """The same for a narrow column.

        Examples:
            >>> parse("kv4:residual=64:raw_sinks=4").label
            'kv4 r64 s4'
        """
        stated = [f"{OPTIONS[name].letter}{n}" for name, n in self._stated()]
        return " ".join([self.codec.spec, *stated])

    @property
    def options(self) -> dict[str, Any]:
        """The options as :func:`kvfun.empty` takes them."""
        return {name: getattr(self, name) for name in OPTIONS}

    @property
    def raw(self) -> int:
        """The most tokens that stay raw: a residual grows by a block before that is encoded.

        Examples:
            >>> parse("kv4:residual=64:raw_sinks=4").raw
            131
        """
        return self.raw_sinks + (self.residual and self.residual + self.block - 1)

    def _stated(self) -> list[tuple[str, int]]:
        return [(name, n) for name, n in self.options.items() if n != self.defaults[name]]


def _defaults(codec: Codec) -> dict[str, int]:
    """What :func:`kvfun.empty` does where nothing is said."""
    return {name: option.default for name, option in OPTIONS.items()} | {
        "raw_sinks": front_of(codec)
    }


def parse(text: str) -> CacheSpec:
    """The cache that a row's spec names.

    Options that change nothing are forgotten (a ``block`` without a ``residual``, any beside
    ``plain``), so that equal caches have one canonical form.

    Raises:
        SpecError: no such codec or option, a value that is no integer, or an option twice.

    Examples:
        >>> parse("kv4:raw_sinks=4:residual=64:block=64").spec
        'kv4:residual=64:raw_sinks=4'
    """
    name, *written = text.split(":")
    options = _options(text, written)
    try:
        codec = parse_codec(name)
    except SpecError as error:
        raise (SpecError(f"{text!r}: {error}") if written else error) from error
    if codec.spec == "plain":
        options = {}
    elif not options.get("residual"):
        options.pop("block", None)
    return CacheSpec(codec, **{**_defaults(codec), **options})


def _options(text: str, written: Sequence[str]) -> dict[str, int]:
    options: dict[str, int] = {}
    for part in written:
        name, _, value = part.partition("=")
        if name not in OPTIONS:
            raise SpecError(f"{text!r}: unknown option {name!r}; {KNOWN}")
        if name in options:
            raise SpecError(f"{text!r}: {name} is given twice; {KNOWN}")
        least = OPTIONS[name].least
        if not _NUMBER.fullmatch(value) or int(value) < least:
            raise SpecError(f"{text!r}: {name} is an integer >= {least}, not {value!r}; {KNOWN}")
        options[name] = int(value)
    return options
