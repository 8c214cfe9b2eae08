"""What of a folder goes to the nodes: all but what `.skyignore` names and what nobody wants there."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

NEVER_COPIED = (".git", ".venv", "__pycache__")


def read_patterns(source: Path) -> list[str]:
    path = source / ".skyignore"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]


def walk(source: Path, patterns: Sequence[str]) -> Iterator[tuple[Path, list[str]]]:
    for folder_name, folders, files in os.walk(source):
        folder = Path(folder_name)
        links = [name for name in folders if (folder / name).is_symlink()]
        relative = folder.relative_to(source)
        folders[:] = [
            name
            for name in folders
            if name not in links
            and name not in NEVER_COPIED
            and not is_ignored(relative / name, patterns, is_folder=True)
        ]
        yield folder, [name for name in files + links if not is_ignored(relative / name, patterns, is_folder=False)]


def is_ignored(path: Path, patterns: Sequence[str], *, is_folder: bool) -> bool:
    """As .gitignore in the simple cases: a pattern with a slash is anchored, one without matches any name."""
    for pattern in patterns:
        if pattern.endswith("/") and not is_folder:
            continue
        bare = pattern.rstrip("/")
        subject = str(path) if "/" in bare else path.name
        if fnmatch.fnmatchcase(subject, bare.lstrip("/")):
            return True
    return False
