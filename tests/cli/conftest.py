"""A state folder for each test, and the check that no process outlives it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from broker.clock import SystemClock
from broker.serve.replicas import draw_free_port
from broker.state.store import Store
from broker.types import JobStatus
from tests.signals import signal_all

ROOT = Path(__file__).parent.parent.parent
CLOUD_LOGINS = ("AWS_", "GOOGLE_", "CLOUDSDK_", "BROKER_GCP_")
COMMAND_S_MAX = 900  # far more than required: a hang fails instead of blocking the suite
COMMAND_EVERY_S = 2.0  # between the commands of a wait


class Shell:
    """The user's terminal: `broker` commands on one state folder, with task files next to it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.home = folder / "home"
        self.database = self.home / "state.db"
        kept = {name: value for name, value in os.environ.items() if not name.startswith(CLOUD_LOGINS)}
        nowhere = str(folder / "no-login")  # no real account is called, whatever the machine's login
        logins = ("CLOUDSDK_CONFIG", "AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE", "BROKER_SKY_PYTHON")
        self.environment = {
            **kept, **dict.fromkeys(logins, nowhere), "BROKER_HOME": str(self.home), "TMPDIR": str(folder),
            "PYTHONPATH": str(ROOT), "AWS_EC2_METADATA_DISABLED": "true",
        }  # fmt: skip

    def write(self, name: str, text: str) -> str:
        path = self.folder / name
        path.write_text(text)
        return str(path)

    def run(self, *arguments: str, code: int | None = 0) -> subprocess.CompletedProcess[str]:
        """Run one command to its end; `code` None accepts any exit code."""
        command = [sys.executable, "-m", "broker", *choose_port(arguments)]
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=self.folder, env=self.environment, timeout=COMMAND_S_MAX
        )
        assert code is None or done.returncode == code, f"{arguments}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done

    def read_json(self, *arguments: str) -> Any:
        return json.loads(self.run(*arguments, "--json").stdout)

    def open(self, *arguments: str, stdin: int | None = None) -> subprocess.Popen[str]:
        """Start a command that runs during the test."""
        return subprocess.Popen(
            [sys.executable, "-m", "broker", *choose_port(arguments)],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.folder,
            env=self.environment,
            # A suite started in the background inherits an ignored SIGINT; a terminal does not ignore it.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def find_checkpoints(self, job_id: int) -> Path:
        """Return a job's folder; its name ends with a random part."""
        base = self.home / "checkpoints"
        return next(base.glob(f"job-{job_id}-*"), base / f"job-{job_id}-unknown")

    @contextlib.contextmanager
    def open_store(self) -> Iterator[Store]:
        """Open the state in this process: a command per iteration of a wait takes seconds."""
        store = Store(self.database, clock=SystemClock())
        try:
            yield store
        finally:
            store.close()

    def get_status(self, job_id: int) -> JobStatus:
        with self.open_store() as store:
            job = store.jobs.get(job_id)
        assert job is not None
        return job.status

    def list_live_jobs(self) -> list[int]:
        with self.open_store() as store:
            return [job.id for job in store.jobs.list() if not job.status.is_terminal]

    def is_at_rest(self) -> bool:
        """Return whether no command left anything running."""
        if not self.database.exists():
            return True
        with self.open_store() as store:
            return not (store.jobs.list_unfinished_ids() or store.clusters.list() or store.intents.list_open())

    def wait_until(self, is_so: Callable[[], bool], what: str) -> None:
        end_s = time.monotonic() + COMMAND_S_MAX
        while not is_so():
            assert time.monotonic() < end_s, f"this never happened: {what}"
            time.sleep(0.05)

    def wait_for_termination(self) -> None:
        """Wait until no cluster is left: a job has its outcome before its machines are gone."""
        self.wait_until(lambda: not self.read_json("status")["clusters"], "all clusters are terminated")

    def wait_for_jobs(self) -> None:
        """Wait until all jobs have ended. A command, unlike a read of the store, replaces a daemon that was killed."""
        next_s = 0.0

        def have_ended() -> bool:
            nonlocal next_s
            if time.monotonic() >= next_s:
                self.run("status")
                next_s = time.monotonic() + COMMAND_EVERY_S
            return not self.list_live_jobs()

        self.wait_until(have_ended, "all jobs have ended")

    def find_processes(self, word: str = "") -> dict[int, str]:
        """List all processes of this test: its folder is in the command line or in the environment."""
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                about = command + (entry / "environ").read_bytes().decode(errors="replace")
                if str(self.folder) in about and word in command and int(entry.name) != os.getpid():
                    found[int(entry.name)] = command
        return found

    def kill_daemon(self) -> None:
        """Send kill -9, as the out-of-memory killer does."""
        daemons = self.find_processes("broker daemon")
        assert daemons, "a daemon runs"
        signal_all(daemons)
        self.wait_until(lambda: not self.find_processes("broker daemon"), "the daemon is dead")


def choose_port(arguments: Sequence[str]) -> Sequence[str]:
    """Give a service a port of its own: the first free one is the same for all tests that run at the same time."""
    return (*arguments, "--port", str(draw_free_port())) if arguments[:2] == ("serve", "up") else arguments


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    shell = Shell(tmp_path)
    yield shell
    if not shell.is_at_rest():
        shell.run("jobs", "cancel", "--all", code=None)
        shell.wait_for_jobs()
        shell.run("down", "--all", "--yes")
    signal_all(shell.find_processes("broker daemon"), signal.SIGTERM)
    shell.wait_until(lambda: not shell.find_processes(), f"nothing is left of {shell.find_processes()}")
