"""Create a virtual environment of pinned packages: `python3 -m trainers.venv jax==0.10.2 flax==0.12.8`.

Use it in the `setup:` of a task that runs a framework other than the bundled trainers. Environments are cached by a key
of packages, range of Pythons and kind of accelerator, so the next attempt on this node, or another local node of this
machine, reuses them. Afterwards `python` and every program of the environment come first on PATH in `run:`. A second
run changes nothing.

`BROKER_VENVS` names the folder of the environments. Standard library only, Python 3.8 and later.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import platform
import pwd
import shlex
import shutil
import sys
from pathlib import Path
from typing import Iterator, Mapping, Sequence

from trainers.node_gpus import SetupError, choose_build, find_accelerator
from trainers.node_uv import INDEX_HINT, find_uv, names_index, read_settings
from trainers.setup import COMPLETE, PYTHON_HINT, drop, run_uv

PYTHON_RANGE = ">=3.11,<3.13"  # every framework of the templates has wheels for these
KEY_LENGTH = 16
ALONE_HINT = "run it in a task's `setup:`; elsewhere set BROKER_PYTHON to a folder for the links"


def main(arguments: Sequence[str]) -> int:
    """Return the exit code: 0 if the environment is ready, else 1, with the reason on stderr."""
    parser = argparse.ArgumentParser(prog="python3 -m trainers.venv", description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--python", default=PYTHON_RANGE, metavar="RANGE", help="accepted Python versions, in uv's notation"
    )
    parser.add_argument("requirements", nargs="+", metavar="PACKAGE==VERSION")
    options = parser.parse_args(arguments)
    try:
        venv = prepare(options.requirements, options.python, os.environ)
    except SetupError as error:
        print(f"error: {error}" + (f"\n\nhint: {error.hint}" if error.hint else ""), file=sys.stderr)
        return 1
    print(f"trainers: environment {venv.name} with {', '.join(options.requirements)}", flush=True)
    return 0


def prepare(requirements: Sequence[str], python_range: str, variables: Mapping[str, str]) -> Path:
    """Return the environment, created if missing, and link its programs into `bin` under BROKER_PYTHON.

    Raises SetupError if a requirement has no exact version or the installation fails; an interrupted one is
    repeated by the next call.
    """
    loose = [each for each in requirements if "==" not in each and " @ " not in each]
    if loose:
        raise SetupError(f"not an exact version: {', '.join(loose)}", "pin it, as in `jax==0.10.2`")
    place = variables.get("BROKER_PYTHON")
    if not place:
        raise SetupError("BROKER_PYTHON is not set", ALONE_HINT)
    links = Path(place) / "bin"
    bare = {**variables, "PATH": drop(links, variables.get("PATH", os.defpath))}
    settings = read_settings(bare)
    accelerator = find_accelerator(bare)
    venv = find_cache(variables) / make_key(requirements, python_range, accelerator.kind, variables)
    venv.parent.mkdir(parents=True, exist_ok=True)
    with hold(venv.with_suffix(".lock")):
        if not (venv / COMPLETE).exists():
            if not settings.get("UV_TORCH_BACKEND") and not names_index(settings):
                settings["UV_TORCH_BACKEND"] = choose_build(accelerator)
            install(venv, requirements, python_range, settings)
    link(venv, links)
    return venv


def find_cache(variables: Mapping[str, str]) -> Path:
    """Return the folder of environments: one for all local nodes of this machine, whose home folders differ."""
    if variables.get("BROKER_VENVS"):
        return Path(variables["BROKER_VENVS"])
    if "BROKER_NODE_DIR" in variables:
        return Path(pwd.getpwuid(os.getuid()).pw_dir) / ".cache/broker/venvs"
    return Path(variables["BROKER_PYTHON"]) / "venvs"


def make_key(requirements: Sequence[str], python_range: str, accelerator: str, variables: Mapping[str, str]) -> str:
    """Return the key of an environment, which is independent of the order of the requirements."""
    build = variables.get("UV_TORCH_BACKEND", accelerator)
    parts = [sorted(requirements), python_range, build, platform.machine(), list(platform.libc_ver())]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:KEY_LENGTH]


@contextlib.contextmanager
def hold(path: Path) -> Iterator[None]:
    """Lock out other processes of this machine. The lock ends with its process."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def install(venv: Path, requirements: Sequence[str], python_range: str, settings: Mapping[str, str]) -> None:
    """Create the environment at its final path, because it cannot be moved, and mark it complete."""
    folder = venv.parent
    uv = find_uv(folder, settings)
    print(f"trainers: installing {', '.join(requirements)}", flush=True)
    shutil.rmtree(venv, ignore_errors=True)
    settings = {"UV_CACHE_DIR": str(folder / "cache"), **settings}  # on the same disk: files are linked, not copied
    run_uv([uv, "venv", "--quiet", "--python", python_range, str(venv)], folder, settings, PYTHON_HINT)
    python = str(venv / "bin/python")
    run_uv([uv, "pip", "install", "--quiet", "--python", python, *requirements], folder, settings, INDEX_HINT)
    (venv / COMPLETE).touch()


def link(venv: Path, links: Path) -> None:
    """Link every program of the environment into `links`, and remove the links of another environment.

    Scripts, not symbolic links: those of a virtual environment's Python would find the base's packages.
    """
    links.mkdir(parents=True, exist_ok=True)
    programs = {each.name: each for each in (venv / "bin").iterdir() if os.access(each, os.X_OK) and each.is_file()}
    for name, program in programs.items():
        aside = links / f".{name}.{os.getpid()}"
        aside.write_text(f'#!/bin/sh\nexec {shlex.quote(str(program))} "$@"\n')
        aside.chmod(0o755)
        aside.replace(links / name)
    for each in links.iterdir():
        if each.name not in programs and not each.name.startswith("."):
            each.unlink()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
