"""The Python that holds a node: the host's `python3`, or a newer one if that is too old."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from broker.clouds.ssh.hosts import COMMAND
from broker.clouds.usual_python import find_path
from broker.sites.host_python import NO_PYTHON, make_python_argv

PROBE = "import os, sys; print(os.environ['BROKER_PYTHON'], sys.flags.isolated, *sys.argv[1:])"
SHOW_NODE = (
    "import subprocess, sys; sys.exit(subprocess.run(['python3', '-c', 'import sys; print(sys.version)']).returncode)"
)


@pytest.fixture
def old_host(tmp_path: Path) -> Path:
    """A PATH whose `python3` is too old, as that of RHEL 8, and that has `sh` and `env`."""
    for name in ("sh", "env"):
        (tmp_path / name).symlink_to(shutil.which(name) or name)
    (tmp_path / "python3").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "python3").chmod(0o755)
    return tmp_path


def run_on(path: Path | str, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    argv = make_python_argv(*arguments)
    return subprocess.run(argv, env={"PATH": str(path)}, input=stdin, capture_output=True, text=True)


def test_python3_of_the_host_is_preferred() -> None:
    done = run_on(os.pathsep.join((f"{sys.base_prefix}/bin", os.environ["PATH"])), "-c", PROBE, "a b")
    assert done.stdout == "python3 1 a b\n", done.stderr


def test_newer_python_is_found_if_python3_is_too_old(old_host: Path) -> None:
    (old_host / "python3.9").symlink_to(os.path.realpath(sys.executable))
    assert run_on(old_host, "-c", PROBE).stdout == "python3.9 1\n"
    assert run_on(old_host, "-", stdin=PROBE).stdout == "python3.9 1\n", "the search leaves the program's input alone"


def test_host_without_a_usable_python_says_so(old_host: Path) -> None:
    done = run_on(old_host, "-c", PROBE)
    assert (done.returncode, done.stderr) == (NO_PYTHON, "no Python 3.8 or newer\n")


def test_command_suits_any_login_shell() -> None:
    assert "\n" not in COMMAND and "!" not in COMMAND, "csh admits neither within quotes"
    assert shlex.split(COMMAND)[:3] == ["exec", "sh", "-c"]


def test_programs_of_a_node_find_the_newer_python_by_the_usual_name(
    old_host: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "node"
    monkeypatch.setenv("PATH", str(old_host))
    monkeypatch.setattr(sys, "executable", os.path.realpath(sys.executable))
    assert find_path(str(folder)) == str(old_host) and not folder.exists(), "`python3` suffices"
    monkeypatch.setenv("BROKER_PYTHON", "python3.9")
    for _ in range(2):  # a claim may be repeated
        path = find_path(str(folder))
    done = subprocess.run([sys.executable, "-c", SHOW_NODE], env={"PATH": path}, capture_output=True, text=True)
    assert done.stdout.strip() == sys.version, done.stderr
