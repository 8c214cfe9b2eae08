"""The systemd unit of a server starts exactly the words that were given, in its folder."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from broker.hosting import host_supervisor

HOME = '/home/ann lee/50%c "own" $HOME'


def read(unit: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in unit.splitlines() if "=" in line)


def test_words_of_the_command_are_neither_split_nor_expanded() -> None:
    argv = ["/usr/bin/python3", "-I", f"{HOME}/supervisor.py", HOME]
    fields = read(host_supervisor.make_unit(HOME, argv))
    words = shlex.split(fields["ExecStart"])  # the same quotes and backslashes as in systemd.syntax(7)
    assert [word.replace("%%", "%").replace("$$", "$") for word in words] == argv
    assert "%c" not in fields["ExecStart"].replace("%%", "")
    assert fields["WorkingDirectory"].replace("%%", "%") == HOME


def test_output_goes_to_the_file_that_errors_name() -> None:
    fields = read(host_supervisor.make_unit("/srv/broker", ["/bin/true"]))
    assert (fields["StandardOutput"], fields["StandardError"]) == ("append:/srv/broker/server.log", "inherit")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
@pytest.mark.parametrize("name", ["plain", "with space", "50%c"])
def test_systemd_accepts_the_unit(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    folder.mkdir()
    unit = tmp_path / "broker-server.service"
    unit.write_text(host_supervisor.make_unit(str(folder), ["/bin/true", str(folder)]))
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
