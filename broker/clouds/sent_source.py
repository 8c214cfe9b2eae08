"""The source of modules that broker sends to machines, which run them without an installation."""

from __future__ import annotations

from functools import cache
from pathlib import Path


@cache
def read_source(path: str) -> str:
    """Return the source of a module; each file is read once per process."""
    return Path(path).read_text(encoding="utf-8")
