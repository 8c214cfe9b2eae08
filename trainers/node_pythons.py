"""Find a Python on this node that has torch for its accelerator. Standard library only, Python 3.8 and later."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Iterator, Mapping

from trainers.node_gpus import Accelerator

PYTHON_OLDEST = (3, 10)  # required by torch 2.13; Ubuntu 22.04 has it
TORCH_OLDEST = (2, 6)
# Where images keep torch outside PATH: AWS's Deep Learning AMIs, PyTorch's own images, SkyPilot's.
WELL_KNOWN = ("/opt/pytorch/bin/python3", "/opt/conda/bin/python3", "~/miniconda3/bin/python3")
PROBE_S, CHECK_S = 60.0, 600.0  # the second on a cold network disk
# Reports what is installed, without `import torch`, which takes seconds.
PROBE = """\
import json, os, sys
from importlib.util import find_spec
def find(name):
    try:
        return find_spec(name)
    except (ImportError, ValueError):
        return None
build = {}
torch = find("torch")
if torch is not None and torch.origin:
    with open(os.path.join(os.path.dirname(torch.origin), "version.py")) as file:
        exec(file.read(), build)
print(json.dumps({
    "python": list(sys.version_info[:2]), "torch": str(build.get("__version__", "")),
    "cuda": build.get("cuda"), "rocm": build.get("hip"),
    "has_buckets": find("obstore") is not None,
}))
"""
# A build for another driver or GPU can be imported, but fails at its first kernel.
CHECK = """\
import sys, torch
device = "cpu" if sys.argv[1] == "cpu" else "cuda"
assert float(torch.ones(8, device=device).sum()) == 8.0
"""


@dataclass(frozen=True)
class Python:
    """An interpreter that can run the trainers here."""

    path: str
    torch: str
    has_buckets: bool


def find_python(accelerator: Accelerator, own: Path | None, variables: Mapping[str, str]) -> Python | None:
    """Return the first suitable interpreter; report those with an unsuitable torch, with the reason.

    `own` is the interpreter that an earlier setup installed on this node, if any.
    """
    for path in list_candidates(own, variables):
        python, reason = judge(path, accelerator)
        if python:
            return python
        if reason:
            print(f"{path}: {reason}", flush=True)
    return None


def list_candidates(own: Path | None, variables: Mapping[str, str]) -> Iterator[str]:
    """Yield interpreters, first the one that `python` resolves to."""
    names = ("python", "python3")
    places = [shutil.which(name, path=variables.get("PATH", os.defpath)) for name in names]
    seen = set()
    for place in [*places, sys.executable, str(own or ""), *map(os.path.expanduser, WELL_KNOWN)]:
        if place and place not in seen and Path(place).exists():
            seen.add(place)
            yield place


def judge(path: str, accelerator: Accelerator) -> tuple[Python | None, str]:
    """Return the interpreter if it is suitable; otherwise the reason, empty if it has no torch."""
    try:
        done = subprocess.run([path, "-c", PROBE], capture_output=True, text=True, timeout=PROBE_S, check=False)
        said = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None, ""  # a shim without a target, or not a Python
    torch = str(said["torch"])
    if not torch:
        return None, ""
    if tuple(said["python"]) < PYTHON_OLDEST:
        return None, f"the trainers need Python {show(PYTHON_OLDEST)}, this is {show(said['python'])}"
    numbers = re.match(r"(\d+)\.(\d+)", torch)
    if not numbers or (int(numbers[1]), int(numbers[2])) < TORCH_OLDEST:
        return None, f"the trainers need torch {show(TORCH_OLDEST)}, this is {torch}"
    if accelerator.kind != "cpu":
        if not said[accelerator.kind]:
            return None, f"its torch {torch} is not built for {accelerator.name}"
        if reason := check(path, accelerator):
            return None, f"its torch {torch} does not work on {accelerator.name}: {reason}"
    return Python(path, torch, bool(said["has_buckets"])), ""


def check(path: str, accelerator: Accelerator) -> str:
    """Run one kernel; return the last line of the error, or an empty text on success."""
    try:
        done = subprocess.run(
            [path, "-c", CHECK, accelerator.kind], capture_output=True, text=True, timeout=CHECK_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return (done.stderr.strip().rpartition("\n")[2] or f"exit code {done.returncode}") if done.returncode else ""


def show(version: tuple[int, ...]) -> str:
    """Format a version: `(3, 11)` as `3.11`."""
    return ".".join(str(number) for number in version)
