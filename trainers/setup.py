"""Set up a Python that can run the trainers on this node: `python3 -m trainers.setup`, in a task's `setup:`.

A Python that has a suitable torch is used unchanged, whether it is on PATH or elsewhere in the image. If there is none,
the pinned torch is installed for this node's accelerator, without root, into a folder that belongs to the agent.
Afterwards `python`, `python3`, `pip` and `torchrun` in `run:` resolve to that Python. A second run changes nothing.

Standard library only, Python 3.8 and later: this runs on any Python that the node has.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Mapping, Sequence

from trainers import node_uv
from trainers.node_gpus import TORCH, Accelerator, SetupError, choose_build, find_accelerator
from trainers.node_pythons import PYTHON_OLDEST, Python, find_python, judge, show
from trainers.node_uv import INDEX_HINT, find_uv, names_index, read_settings

PYTHON_NEWEST = "3.15"  # exclusive: torch 2.13 has no wheels for it
PACKAGES = (f"torch=={TORCH}", "numpy>=1.26", "tomli; python_version < '3.11'", "pip")
BUCKETS = "obstore>=0.6"
LINKS = {"python": "", "python3": "", "pip": "-m pip", "torchrun": "-m torch.distributed.run"}
HERE_HINT = "run `pip install 'intercloud-broker[train]'` where broker is installed: local nodes use its Python"
PYTHON_HINT = (
    f"choose an image with Python {show(PYTHON_OLDEST)} or newer, or allow the node to reach GitHub, where uv gets one "
    "(`UV_PYTHON_INSTALL_MIRROR` in the task's `envs:` names a mirror)"
)
COMPLETE = "complete"


def main(arguments: Sequence[str]) -> int:
    """Return the exit code: 0 if the trainers can run now, else 1, with the reason on stderr."""
    argparse.ArgumentParser(prog="python3 -m trainers.setup", description=__doc__.split("\n\n")[0]).parse_args(
        arguments
    )
    try:
        prepare(os.environ)
    except SetupError as error:
        print(f"error: {error}" + (f"\n\nhint: {error.hint}" if error.hint else ""), file=sys.stderr)
        return 1
    return 0


def prepare(variables: Mapping[str, str]) -> None:
    """Find or install a Python and make `python` resolve to it. BROKER_PYTHON is the folder for installations."""
    place = variables.get("BROKER_PYTHON")
    folder = Path(place) if place else None
    path = variables.get("PATH", os.defpath)
    bare = {**variables, "PATH": drop(folder / "bin", path) if folder else path}
    accelerator = find_accelerator(bare)
    python = find_python(accelerator, own_python(folder), bare) or install(accelerator, folder, bare)
    extras = None if python.has_buckets or not keeps_in_bucket(bare) else add_buckets(python, folder, bare)
    if folder:
        link(python, folder / "bin", extras, bare)
    print(f"trainers: torch {python.torch} of {python.path}, on {accelerator.name}", flush=True)


def own_python(folder: Path | None) -> Path | None:
    """Return the Python that an earlier setup installed, if it was not interrupted."""
    return folder / "venv/bin/python" if folder and (folder / "venv" / COMPLETE).exists() else None


def drop(folder: Path, path: str) -> str:
    """Return PATH without our own links, which must not be mistaken for the image's Python."""
    return os.pathsep.join(entry for entry in path.split(os.pathsep) if entry != str(folder))


def keeps_in_bucket(variables: Mapping[str, str]) -> bool:
    """Return whether checkpoints are in a bucket instead of a folder."""
    place = variables.get("BROKER_CHECKPOINT_DIR", "")
    return "://" in place and not place.startswith("file://")


def install(accelerator: Accelerator, folder: Path | None, variables: Mapping[str, str]) -> Python:
    """Create an environment with the pinned torch. Raises SetupError if that fails or torch does not work."""
    if folder is None or "BROKER_NODE_DIR" in variables:
        raise SetupError(f"no Python here has torch for {accelerator.name}", HERE_HINT)
    settings = read_settings(variables)
    build = settings.get("UV_TORCH_BACKEND") or ("" if names_index(settings) else choose_build(accelerator))
    folder.mkdir(parents=True, exist_ok=True)
    uv, venv = find_uv(folder, settings), folder / "venv"
    print(f"trainers: installing torch {TORCH}{f' ({build})' if build else ''} for {accelerator.name}", flush=True)
    shutil.rmtree(venv, ignore_errors=True)
    cache = folder / "cache"  # on the same disk: files are linked, not copied
    settings = {**settings, "UV_CACHE_DIR": str(cache), **({"UV_TORCH_BACKEND": build} if build else {})}
    run_uv(
        [uv, "venv", "--python", f">={show(PYTHON_OLDEST)},<{PYTHON_NEWEST}", str(venv)], folder, settings, PYTHON_HINT
    )
    packages = [*PACKAGES, BUCKETS] if keeps_in_bucket(variables) else list(PACKAGES)
    run_uv([uv, "pip", "install", "--python", str(venv / "bin/python"), *packages], folder, settings)
    python, reason = judge(str(venv / "bin/python"), accelerator)
    if python is None:
        raise SetupError(
            reason or "torch was installed but cannot be found",
            "name the build in the task's `envs:`, as in `UV_TORCH_BACKEND: cu126`, or choose an image with torch",
        )
    (venv / COMPLETE).touch()
    shutil.rmtree(cache, ignore_errors=True)
    return python


def add_buckets(python: Python, folder: Path | None, variables: Mapping[str, str]) -> Path:
    """Install the packages for buckets in a folder beside the image's own Python, which stays unchanged."""
    if folder is None or "BROKER_NODE_DIR" in variables:
        hint = f"`{python.path} -m pip install obstore`"
        raise SetupError(f"checkpoints in a bucket need the package obstore, which {python.path} lacks", hint)
    extras = folder / "extras"
    if not (extras / COMPLETE).exists():
        settings = read_settings(variables)
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(extras, ignore_errors=True)
        options = ["--python", python.path, "--target", str(extras), "--no-deps"]  # its dependencies come with torch
        run_uv([find_uv(folder, settings), "pip", "install", *options, BUCKETS], folder, settings)
        (extras / COMPLETE).touch()
    return extras


def run_uv(argv: Sequence[str], folder: Path, settings: Mapping[str, str], hint: str = INDEX_HINT) -> None:
    """Run uv in `folder`, so that it reads no project file of the user's working folder.

    Failures are retried a few times: an index may be briefly unreachable, and a failed setup ends the job.
    """
    code = 0
    for attempt in range(node_uv.TRIES):
        time.sleep(node_uv.RETRY_S * attempt)
        sys.stdout.flush()
        code = subprocess.run(argv, cwd=folder, env=dict(settings), stderr=subprocess.STDOUT, check=False).returncode
        if code == 0:
            return
    raise SetupError(f"`uv {' '.join(argv[1:3])}` failed with code {code}; its output is above", hint)


def link(python: Python, folder: Path, extras: Path | None, variables: Mapping[str, str]) -> None:
    """Make the usual names resolve to this Python; add no links if they already do.

    Scripts, not symbolic links: a link to a virtual environment's Python would use the packages of its base.
    """
    if python.path == shutil.which("python", path=variables["PATH"]) and extras is None:
        shutil.rmtree(folder, ignore_errors=True)
        return
    folder.mkdir(parents=True, exist_ok=True)
    export = f'export PYTHONPATH="${{PYTHONPATH:+$PYTHONPATH:}}"{shlex.quote(str(extras))}\n' if extras else ""
    for name, options in LINKS.items():
        aside = folder / f".{name}.{os.getpid()}"
        aside.write_text(f'#!/bin/sh\n{export}exec {shlex.quote(python.path)} {options} "$@"\n')
        aside.chmod(0o755)
        aside.replace(folder / name)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
