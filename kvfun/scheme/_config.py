"""Typed look-ups in a ``config.json``: what is missing or malformed is named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import ConfigError

TEXT = ("text_config", "llm_config", "language_config")
"""Where configs of models that also see or hear keep their language model."""


class Config:
    """The numbers of a config, checked where they are read.

    A name may be one of several spellings: the first that is present, and not null, counts.

    Args:
        values: the dictionary.
        inside: where in the file it is, for messages.
    """

    def __init__(self, values: Mapping[str, Any], inside: str = ""):
        if not isinstance(values, Mapping):
            raise ConfigError(f"{inside or 'the config'} must be a dictionary, not {values!r:.80}")
        self.values, self.inside = values, inside

    @classmethod
    def of_text(cls, config: Mapping[str, Any]) -> Config:
        """That of the language model, which may be nested; what it lacks the outer one may have."""
        outer = cls(config)
        for name in TEXT:
            if config.get(name) is not None:
                inner = cls(config[name], f"{name}.")
                return cls({**config, **inner.values}, inner.inside)
        return outer

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    def found(self, *names: str) -> str | None:
        """The first of the names that is present."""
        return next((name for name in names if name in self), None)

    def error(self, name: str, expected: str) -> ConfigError:
        """An error that names a key, what it holds and what it should."""
        if name not in self.values:
            return ConfigError(f"{self.inside}{name} is missing: expected {expected}")
        return ConfigError(f"{self.inside}{name} must be {expected}, not {self.values[name]!r:.80}")

    def number(self, *names: str, default: int | None = None, least: int = 1) -> int:
        """An integer of at least ``least``.

        Raises:
            ConfigError: it is missing and there is no default, or no such number.
        """
        value = self.optional(*names, least=least)
        if value is None:
            value = default
        if value is None:
            raise self.error(names[0], f"an integer >= {least}")
        return value

    def optional(self, *names: str, least: int = 1) -> int | None:
        """The same; ``None`` where it is missing or null."""
        name = self.found(*names)
        if name is None:
            return None
        value = self.values[name]
        if not _is_integer(value) or value < least:
            raise self.error(name, f"an integer >= {least}")
        return value

    def numbers(self, name: str, length: int | None = None, least: int = 0) -> list[int]:
        """A list of integers, of a length if it is given."""
        value = self.sequence(name, length)
        if not all(_is_integer(x) and x >= least for x in value):
            raise self.error(name, f"a list of integers >= {least}")
        return list(value)

    def sequence(self, name: str, length: int | None = None) -> Sequence[Any]:
        """A list, of a length if it is given; a string is none."""
        value = self.values.get(name)
        many = "" if length is None else f" of {length}"
        if not isinstance(value, list | tuple):
            raise self.error(name, f"a list{many}")
        if length is not None and len(value) != length:
            raise ConfigError(
                f"{self.inside}{name} must be a list{many}, one a layer, not of {len(value)}"
            )
        return value

    def text(self, name: str, default: str | None = None) -> str:
        """A string."""
        value = self.values.get(name)
        value = default if value is None else value
        if not isinstance(value, str):
            raise self.error(name, "a string")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        """A boolean."""
        value = self.values.get(name)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.error(name, "true or false")
        return value

    def nested(self, name: str) -> Config:
        """A dictionary inside."""
        if name not in self:
            raise self.error(name, "a dictionary")
        return Config(self.values[name], f"{self.inside}{name}.")


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
