"""Exchange small files with the broker: those that it pushes, and those that a program of this node writes for it.

They are in one private folder, `~/.broker/exchange`, which outlives the runs of the node. Standard library only.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from broker.agent import agent_files as files
else:
    import agent_files as files

FOLDER = files.STATE / "exchange"


def exchange(request: dict[str, Any]) -> dict[str, Any]:
    """Replace each of `files` atomically, in this order; return the content of those in `read` that exist.

    `digests` has the SHA-256 of each file in the folder, by which the broker knows what it has to push again.
    """
    files.make_private(FOLDER)
    for name, text in request["files"].items():
        files.write_text(find(name), str(text), is_durable=False)
    texts = {name: read(find(name)) for name in request["read"]}
    digests = {path.name: digest(path) for path in FOLDER.iterdir() if is_plain(path)}
    return {
        "files": {name: text for name, text in texts.items() if text is not None},
        "digests": {name: found for name, found in digests.items() if found is not None},
    }


def find(name: object) -> Path:
    """Return the path of a file in the folder. Raises ValueError for a name that leads out of it."""
    path = FOLDER / str(name)
    if path.parent != FOLDER or str(name).startswith("."):
        raise ValueError(f"not a plain name: {name}")
    return path


def is_plain(path: Path) -> bool:
    """Return whether this is a complete file: others begin with a dot until they are."""
    return path.is_file() and not path.name.startswith(".")


def read(path: Path) -> str | None:
    """Return the text of a file; None if it is missing, or not text."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None


def digest(path: Path) -> str | None:
    """Return the SHA-256 of a file; None if it has just been removed."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None
