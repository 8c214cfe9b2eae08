"""Find out whether SkyPilot is installed and set up, from files alone: nothing is imported or called."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path


def find_python() -> str | None:
    """Find the interpreter that has SkyPilot: the configured one, ours, or the one that runs `sky` on the PATH."""
    named = os.getenv("BROKER_SKY_PYTHON")
    if named:
        return shutil.which(named)
    spec = importlib.util.find_spec("sky")
    if spec is not None and spec.origin:  # an unrelated folder of that name has no origin
        return sys.executable
    program = shutil.which("sky")
    return _read_interpreter(Path(program)) if program else None


def _read_interpreter(program: Path) -> str | None:
    """Read the interpreter from the first line of a script that pip or uv made."""
    try:
        with program.open("rb") as file:
            first = file.readline(512).decode(errors="replace").strip()
    except OSError:
        return None
    path = first.removeprefix("#!").strip()
    is_python = first.startswith("#!") and Path(path).name.startswith("python") and Path(path).is_file()
    return path if is_python else None
