"""Digest the files of a task's program, so that a command that continues earlier work notices changed code."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from broker.app.sources import make_read_error
from broker.types import Task

WORD = re.compile(r"[\w./+-]+")
BYTES_MAX = 16 << 20  # a larger file is data


def digest_files(task: Task) -> Mapping[str, str]:
    """Return a digest of each file of `workdir` that `setup` or `run` names, such as `train.py`, or `-m tools.train`.

    Files that these import are not followed. Empty without a local `workdir`. Raises UsageError for one that cannot be
    read.
    """
    if not task.workdir or "://" in task.workdir:
        return {}
    root = Path(task.workdir).expanduser().resolve()
    return {
        path.relative_to(root).as_posix(): hashlib.sha256(_read(path)).hexdigest()[:16]
        for path in dict.fromkeys(_list_files(root, f"{task.setup or ''}\n{task.run or ''}"))
    }


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise make_read_error(error, field="workdir") from error


def _list_files(root: Path, text: str) -> Iterator[Path]:
    for word in WORD.findall(text):
        for name in (word, f"{word.replace('.', '/')}.py"):
            try:
                path = (root / name).resolve()
                if path.is_relative_to(root) and path.is_file() and path.stat().st_size <= BYTES_MAX:
                    yield path
            except OSError:  # too long, or not readable
                continue
