"""Find a Python on a node that can run broker, or install one. Standard library only, Python 3.8 and later, Linux.

`hosting/machines.py` and `serve/gateway_bundle.py` send it to nodes ahead of the program that uses it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from typing import Sequence

PYTHONS = ("python3.14", "python3.13", "python3.12", "python3.11", "python3")
CHECK = """\
import importlib.metadata as m, json, re, sys
def number(text):
    return [int(each) for each in re.findall(r"\\d+", text)[:3]]
if sys.version_info < (3, 11):
    sys.exit(1)
for name, least in json.loads(sys.argv[1]):
    try:
        found = m.version(name)
    except m.PackageNotFoundError:
        sys.exit(1)
    if number(found) < number(least):
        sys.exit(1)
"""
INSTALL = """\
import os, subprocess, sys
from pathlib import Path
from trainers.node_uv import find_uv, read_settings
folder, *packages = sys.argv[1:]
settings = {**read_settings(os.environ), "UV_CACHE_DIR": folder + "/cache"}
uv = find_uv(Path(folder), settings)
subprocess.run([uv, "venv", "--python", ">=3.11,<3.15", folder + "/venv"], env=settings, check=True)
subprocess.run([uv, "pip", "install", "--python", folder + "/venv/bin/python", *packages], env=settings, check=True)
"""


class NoPythonError(Exception):
    """Raised if no Python on this machine can run broker, with the reason and a hint."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


def find_broker_python(
    root: str, release: str, *, needs: Sequence[Sequence[str]], packages: Sequence[str], named: str = ""
) -> str:
    """Return a Python 3.11 or later with the packages: `named` or any installed one; without `named`, else a new one.

    `needs` lists the packages with their minimum versions, `packages` the same packages as pip requirements; `release`
    is the unpacked wheel of broker, `root` the folder of a new Python. An interrupted call may be repeated. Raises
    NoPythonError.
    """
    needed = json.dumps([list(each) for each in needs])
    place = os.path.join(root, hashlib.sha256(needed.encode()).hexdigest()[:16])
    own = os.path.join(place, "venv", "bin", "python")
    for candidate in [own, *([named] if named else PYTHONS)]:
        path: str | None = candidate if os.path.isabs(candidate) else shutil.which(candidate)
        if path and os.path.exists(path) and subprocess.run([path, "-c", CHECK, needed], check=False).returncode == 0:
            return path
    if named:
        raise NoPythonError(
            "`%s` on that machine is not Python 3.11 or later with the packages that broker requires" % named,
            "omit `--python` to have one installed",
        )
    os.makedirs(place, exist_ok=True)
    shutil.rmtree(os.path.join(place, "venv"), ignore_errors=True)
    done = subprocess.run(
        [sys.executable, "-c", INSTALL, place, *packages], cwd=place, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        universal_newlines=True, env={**os.environ, "PYTHONPATH": release},
    )  # fmt: skip
    if done.returncode:
        lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
        said = next(
            (line for line in reversed(lines) if line.startswith("error:")), lines[-1] if lines else "no output"
        )
        raise NoPythonError(
            "the packages that broker requires cannot be installed on that machine: " + said,
            "give it access to a package index, or pass `--python` with a Python that has the packages",
        )
    return own
