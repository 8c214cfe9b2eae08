"""What runs on nodes runs on their Python: 3.10 for the trainers (Ubuntu 22.04), 3.8 for what any node must start."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from broker.agent import FILES
from trainers.node_gpus import TORCH
from trainers.node_pythons import PYTHON_OLDEST

ROOT = Path(__file__).parents[2]
SETUP = ("__init__.py", "setup.py", "node_gpus.py", "node_pythons.py", "node_uv.py", "venv.py", "bridge.py")
AGENT = [*(f"broker/agent/{name}" for name in FILES), "broker/storage/node_mount.py", "broker/storage/node_objects.py"]
# The programs that hold a node of an SSH pool, of Slurm and of Kubernetes, and those that manage a host.
MACHINE = (
    "broker/clouds/local_machine.py", "broker/clouds/slurm/node_program.py", "broker/clouds/kubernetes/node_program.py",
    "broker/clouds/ssh/host_program.py", "broker/clouds/usual_python.py",
    "broker/hosting/host_program.py", "broker/hosting/host_supervisor.py",
    "broker/runtime/node_python.py",
)  # fmt: skip
# All that a trainer imports before torch, and the rendezvous, which needs none.
BEFORE_TORCH = "trainers.config, trainers.image_config, trainers.launch, trainers.rendezvous_server, trainers.setup"

AGENT_NAMES = [name.removesuffix(".py") for name in FILES]
IMPORT_AGENT = f"import sys; sys.path.insert(0, 'broker/agent'); [*map(__import__, {AGENT_NAMES})]"


def find_needs(version: str, *paths: str) -> str:
    """Find what needs a newer Python than `version`, by syntax and by the names that are used."""
    options = [f"--target={version}-", "--no-tips", "--violations", "--processes=1"]
    argv = [sys.executable, "-c", "import vermin; vermin.main()", *options, *paths]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True)
    assert "Minimum required versions" in done.stdout, done.stderr
    return done.stdout if done.returncode else ""


def test_trainers_use_nothing_newer_than_python_3_10() -> None:
    assert PYTHON_OLDEST == (3, 10)
    assert find_needs("3.10", "trainers") == ""


def test_agent_and_setup_use_nothing_newer_than_python_3_8() -> None:
    assert find_needs("3.8", *AGENT, *(f"trainers/{name}" for name in SETUP)) == ""


def test_machines_of_pools_and_batch_systems_use_nothing_newer_than_python_3_8() -> None:
    assert find_needs("3.8", *MACHINE) == ""


def test_too_new_syntax_is_found(tmp_path: Path) -> None:
    (tmp_path / "new.py").write_text("import hashlib\nhashlib.file_digest\n")
    assert "3.11" in find_needs("3.10", str(tmp_path / "new.py"))


def find_python(name: str) -> str | None:
    """Find one on PATH, or among those that pyenv keeps, as a shim of pyenv's may lead nowhere."""
    version = name.removeprefix("python")
    kept = sorted((Path.home() / ".pyenv/versions").glob(f"{version}.*/bin/{name}"))
    found = [*filter(None, [shutil.which(name)]), *map(str, kept)]
    return next((path for path in found if not subprocess.run([path, "-c", ""], capture_output=True).returncode), None)


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("python3.10", f"import {BEFORE_TORCH}"),
        ("python3.8", IMPORT_AGENT),
        ("python3.8", "import trainers.setup, sys; sys.exit(trainers.setup.main([]) not in (0, 1))"),
    ],
)
def test_programs_start_on_old_python(name: str, code: str) -> None:
    python = find_python(name)
    if not python:
        pytest.skip(f"no {name} on this machine")
    done = subprocess.run([python, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_pinned_torch_is_the_one_that_the_tests_run_with() -> None:
    pins = (ROOT / "tests/constraints.txt").read_text()
    assert re.search(rf"^torch=={re.escape(TORCH)}$", pins, re.MULTILINE)
