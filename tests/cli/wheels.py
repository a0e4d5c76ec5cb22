"""Small wheels that pip takes for real ones."""

import hashlib
import zipfile
from dataclasses import replace


def make_wheel(folder, files, *, name="carrier", version="1.0"):
    """A wheel of a package that asks for a Python and a requirement which nobody has."""
    path = folder / f"{name}-{version}-py3-none-any.whl"
    about = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    metadata += "Requires-Python: >=99\nRequires-Dist: no-such-package\n"
    with zipfile.ZipFile(path, "w") as archive:
        for place, content in files.items():
            archive.writestr(place, content)
        archive.writestr(f"{about}/METADATA", metadata)
        archive.writestr(
            f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{about}/RECORD", "")
    return path


def sha256(content):
    return hashlib.sha256(content).hexdigest()


def pinned(member, wheel, content):
    """The member with the hashes of a wheel and of the file in it."""
    data = wheel.read_bytes()
    own = replace(member.wheel, sha256=sha256(data), size=len(data))
    return replace(member, wheel=own, sha256=sha256(content))
