"""Pack the installed broker as a reproducible wheel, so that a server's machine runs the same code."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import io
import re
import zipfile
from collections.abc import Sequence
from functools import cache
from importlib import metadata
from pathlib import Path

from broker import __version__
from broker.errors import StateError
from broker.frozen import frozen
from broker.runtime.shipping import EPOCH, LEFT_OUT

PACKAGES = ("broker", "trainers", "task_templates")
DISTRIBUTION = "intercloud-broker"
EXTRAS = ("serve", "server", "storage")  # of every server; clouds add their own
REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)(?:\[[^\]]*\])?\s*([^;]*)(?:;\s*(.*))?")


@frozen
class Wheel:
    """A packed wheel. `digest` is the SHA-256 of `content`, in hexadecimal."""

    digest: str
    content: bytes


@frozen
class Requirement:
    """A package that broker needs: `text` as pip reads it, and `name` with the minimum version, `0` for any."""

    text: str
    name: str
    least: str


@cache
def pack_wheel() -> Wheel:
    """Pack the installed packages of the distribution. Raises StateError if one is missing."""
    files: dict[str, bytes] = {}
    for package in PACKAGES:
        folder = _find_folder(package)
        for path in sorted(folder.rglob("*")):
            if path.is_file() and not any(part.endswith(LEFT_OUT) for part in path.parts):
                files[path.relative_to(folder.parent).as_posix()] = path.read_bytes()
    about = f"intercloud_broker-{__version__}.dist-info"
    files[f"{about}/METADATA"] = _make_metadata().encode()
    files[f"{about}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: broker\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    rows = [f"{name},sha256={_digest(content)},{len(content)}" for name, content in files.items()]
    files[f"{about}/RECORD"] = "\n".join([*rows, f"{about}/RECORD,,", ""]).encode()
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name, content in files.items():
            entry = zipfile.ZipInfo(name, EPOCH)
            entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
            archive.writestr(entry, content)
    found = packed.getvalue()
    return Wheel(digest=hashlib.sha256(found).hexdigest(), content=found)


def list_requirements(extras: Sequence[str]) -> Sequence[Requirement]:
    """List the packages that broker needs with these extras, from its own metadata. Raises StateError."""
    found = []
    for text in _read_requires():
        match = REQUIREMENT.fullmatch(text)
        assert match is not None, text
        extra = re.search(r"extra\s*==\s*['\"]([^'\"]+)['\"]", match[3] or "")
        if match[1] == DISTRIBUTION or (extra is not None and extra[1] not in extras):
            continue
        least = re.search(r">=\s*([0-9.]+)", match[2])
        found.append(Requirement(text=text.partition(";")[0].strip(), name=match[1], least=least[1] if least else "0"))
    return found


def _read_requires() -> Sequence[str]:
    try:
        return metadata.requires(DISTRIBUTION) or ()
    except metadata.PackageNotFoundError:
        raise StateError(
            "broker is not installed as a package here, so the packages that it needs are unknown",
            hints=("install it: `pip install .` in a clone",),
        ) from None


def _make_metadata() -> str:
    lines = ["Metadata-Version: 2.1", f"Name: {DISTRIBUTION}", f"Version: {__version__}", "Requires-Python: >=3.11"]
    extras = sorted({each for text in _read_requires() for each in re.findall(r"extra\s*==\s*['\"]([^'\"]+)", text)})
    lines += [f"Provides-Extra: {each}" for each in extras]
    return "\n".join([*lines, *(f"Requires-Dist: {text}" for text in _read_requires()), "", ""])


def _find_folder(package: str) -> Path:
    spec = importlib.util.find_spec(package)  # found, not imported
    if spec is None or not spec.submodule_search_locations:
        raise StateError(f"`{package}` is not installed with broker", hints=("reinstall `intercloud-broker`",))
    return Path(next(iter(spec.submodule_search_locations)))


def _digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
