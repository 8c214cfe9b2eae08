"""The container file names what exists, and its command and health check work as they are."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from broker.server.serving import ensure_certificate
from tests.cli.conftest import ROOT, Shell
from tests.signals import signal_all

TEXT = (ROOT / "deploy/container/Containerfile").read_text().replace("\\\n", "")


def read_words(instruction: str) -> list[str]:
    """Return the words of an instruction in JSON form, such as `CMD ["server"]`."""
    (found,) = re.findall(rf"^{instruction} .*?(\[.*\])$", TEXT, re.MULTILINE)
    return list(json.loads(found))


def test_copied_files_exist() -> None:
    copied = [line.split()[1:-1] for line in TEXT.splitlines() if line.startswith("COPY ") and "--from" not in line]
    sources = [name for names in copied for name in names]
    assert all((ROOT / name).exists() for name in sources)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert {*packages, project["project"]["readme"], "pyproject.toml"} <= set(sources), "all that the wheel is made of"


def test_installed_extras_exist() -> None:
    (extras,) = re.findall(r"'\.\[(.*)\]'", TEXT)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(extras.split(",")) <= set(project["optional-dependencies"])


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    shell = Shell(tmp_path)
    yield shell
    signal_all(shell.find_processes())


def test_command_serves_and_health_check_sees_whether_it_does(shell: Shell) -> None:
    assert read_words("ENTRYPOINT") == ["tini", "--", "broker"]
    command = read_words("CMD")
    command[command.index("0.0.0.0")] = "127.0.0.1"
    pair = ensure_certificate(shell.folder)
    own = ["--port", "0", "--certificate", str(pair.certificate), "--key", str(pair.key)]
    server = shell.open(*command, *own)
    assert server.stdout is not None
    port = server.stdout.readline().strip().rpartition(":")[2]
    program, *arguments = read_words("HEALTHCHECK")
    assert program == "python3"
    check = [sys.executable, *(each.replace("8471", port) for each in arguments)]
    assert subprocess.run(check).returncode == 0
    server.send_signal(signal.SIGTERM)
    assert server.wait() == 0
    assert subprocess.run(check, stderr=subprocess.DEVNULL).returncode != 0
