"""Keys created by the granters, stored here: one file each, with mode 0600, shared by all jobs with the same paths."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from broker.access.base import Need
from broker.locks import hold_lock


class SweepMark:
    """A file that changes with each sweep: a process that holds a grant of before has to make another."""

    def __init__(self, home: Path) -> None:
        self._path = home / "access" / "swept"

    def read(self) -> str:
        """Return the mark of the newest sweep; empty before the first, or if it cannot be read."""
        try:
            return self._path.read_text(encoding="ascii")
        except OSError:
            return ""

    def renew(self) -> None:
        """Write another mark. It is created with the folder's other files, so the folder exists."""
        aside = self._path.with_name(f".swept.{uuid.uuid4().hex}")
        aside.write_text(uuid.uuid4().hex, encoding="ascii")
        aside.replace(self._path)


class KeptKeys:
    """Files below `access/` of the state folder; their names begin with the scheme of the bucket."""

    def __init__(self, home: Path, scheme: str) -> None:
        self._folder, self._scheme = home / "access", scheme

    def locked(self) -> contextlib.AbstractContextManager[None]:
        """Lock, so that of two concurrent commands with the same need, one creates the key and the other finds it."""
        return hold_lock(self._folder / f"{self._scheme}.lock")

    def read(self, name: str) -> dict[str, Any] | None:
        """Read a key; None if it is missing or damaged, so that another key is created."""
        try:
            kept = json.loads(self._find(name).read_text(encoding="utf-8"))
            return kept if isinstance(kept["issued_s"], float) and isinstance(kept["key"], dict) else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def write(self, name: str, content: dict[str, Any]) -> None:
        """Write the file atomically."""
        path = self._find(name)
        aside = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            json.dump(content, file)
        aside.replace(path)

    def list_names(self) -> Sequence[str]:
        """List the names of the accounts with stored keys, sorted."""
        prefix = f"{self._scheme}-"
        return sorted(path.stem.removeprefix(prefix) for path in self._folder.glob(f"{prefix}*.json"))

    def forget(self, name: str) -> None:
        """Delete a stored key; no effect if already deleted."""
        self._find(name).unlink(missing_ok=True)

    def _find(self, name: str) -> Path:
        return self._folder / f"{self._scheme}-{name}.json"


def name_needs(owner: str, place: str, needs: Sequence[Need]) -> str:
    """Return twenty hexadecimal digits, equal for the same installation, account and keys."""
    patterns = sorted(f"{need.bucket}/{each} {need.is_read_only}" for need in needs for each in need.list_patterns())
    return hashlib.sha256("\n".join([owner, place, *patterns]).encode()).hexdigest()[:20]
