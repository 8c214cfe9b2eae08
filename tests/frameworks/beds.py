"""A state folder and the nodes in it, watched by their processes and progress files."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from tests.cli.conftest import ROOT, Shell

WAIT_S_MAX = 420.0  # far more than required: a hang ends the run of this framework
POLL_S = 0.1


class StuckError(Exception):
    """An expected event did not happen."""


def prepare(template: Path, venvs: Path, python: Path) -> float | None:
    """Run the template's `setup`; return its seconds, or None if the environment was there."""
    setup = yaml.safe_load(template.read_text())["setup"]
    variables = {"BROKER_VENVS": str(venvs), "BROKER_PYTHON": str(python), "SKYPILOT_NUM_GPUS_PER_NODE": "0"}
    environment = {**os.environ, **variables}
    begin_s = time.monotonic()
    done = subprocess.run(["bash", "-ec", setup], env=environment, cwd=ROOT, check=True, capture_output=True, text=True)
    return time.monotonic() - begin_s if "trainers: installing" in done.stdout else None


class Bed:
    """One job in a state folder of its own."""

    def __init__(self, folder: Path, template: Path, envs: dict[str, str]) -> None:
        folder.mkdir(parents=True)
        self.shell = Shell(folder)
        self.lines: list[dict[str, Any]] = []
        self._read: dict[Path, int] = {}
        settings = [word for name, value in envs.items() for word in ("--env", f"{name}={value}")]
        self.shell.run("jobs", "launch", str(template), "--infra", "local", *settings, "--yes", "--detach-run")

    def close(self) -> None:
        """End the job and the daemon; nothing outlives the bed."""
        if not self.shell.is_at_rest():
            self.shell.run("jobs", "cancel", "--all", code=None)
            self.shell.wait_until(self.shell.is_at_rest, "everything ended")
        for pid in self.shell.find_processes("broker daemon"):
            os.kill(pid, 15)
        self.shell.wait_until(lambda: not self.shell.find_processes(), "no process is left")

    def is_over(self) -> bool:
        return self.shell.get_status(1).is_terminal

    def read(self) -> None:
        """Take what was appended to the progress files since."""
        for path in sorted(self.shell.home.glob("local/*/home/.broker/runs/*/progress.jsonl")):
            try:
                content = path.read_bytes()
            except OSError:
                continue  # the node has just been terminated
            start = self._read.get(path, 0)
            end = content.rfind(b"\n") + 1
            self.lines += [json.loads(line) for line in content[start:end].splitlines() if b'"step"' in line]
            self._read[path] = max(start, end)

    def wait(self, is_so: Callable[[], bool], what: str) -> None:
        """Read until `is_so`. Raises StuckError if the job ends first, or after the limit."""
        end_s = time.monotonic() + WAIT_S_MAX
        while True:
            self.read()
            if is_so():
                return
            if self.is_over() or time.monotonic() > end_s:
                self.read()
                if is_so():
                    return
                raise StuckError(f"{what}: did not happen; the job is {self.shell.get_status(1).name}\n{self.log()}")
            time.sleep(POLL_S)

    def log(self) -> str:
        return "\n".join(self.shell.run("jobs", "logs", "1", "--no-follow", code=None).stdout.splitlines()[-40:])

    def find_victims(self, pattern: str, rank: int) -> list[int]:
        """List processes of the node with this rank whose command line matches."""
        found = []
        for pid, command in self.shell.find_processes().items():
            try:
                variables = (Path("/proc") / str(pid) / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if f"SKYPILOT_NODE_RANK={rank}".encode() in variables and re.search(pattern, command):
                found.append(pid)
        return found

    def read_result(self) -> dict[str, Any]:
        result: dict[str, Any] = json.loads((self.shell.find_checkpoints(1) / "result.json").read_text())
        return result

    def read_losses(self) -> dict[int, float]:
        """Return the loss of each step; a step that ran again counts as it was the last time."""
        return {line["step"]: line["loss"] for line in self.lines if line.get("loss") is not None}
