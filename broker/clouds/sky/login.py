"""Where SkyPilot is installed and whether it was set up, by a glance; nothing of it is imported, nothing asked."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path


def find_python() -> str | None:
    """The interpreter that has SkyPilot: the one that is named, ours, or the one that runs `sky` on the PATH."""
    named = os.getenv("BROKER_SKY_PYTHON")
    if named:
        return shutil.which(named)
    found = importlib.util.find_spec("sky")
    if found is not None and found.origin:  # a folder that happens to be called so has none
        return sys.executable
    program = shutil.which("sky")
    return _read_interpreter(Path(program)) if program else None


def _read_interpreter(program: Path) -> str | None:
    """Of a script that pip or uv made: its first line names it."""
    try:
        with program.open("rb") as file:
            first = file.readline(512).decode(errors="replace").strip()
    except OSError:
        return None
    path = first.removeprefix("#!").strip()
    is_python = first.startswith("#!") and Path(path).name.startswith("python") and Path(path).is_file()
    return path if is_python else None
