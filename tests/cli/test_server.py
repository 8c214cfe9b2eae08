"""The same stories on the state folder and on a server: commands, output and exit codes are the same."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import Shell

pytestmark = pytest.mark.skipif(not Path("/proc").exists(), reason="needs Linux's /proc")

HELLO = """\
name: hello
resources: {infra: local}
workdir: code
secrets: {TOKEN: null}
run: |
  cat notes
  echo "token has ${#TOKEN} letters"
"""
CANARY = "swordfish"


class Served(Shell):
    """A user's terminal that is logged in to a server with a state folder of its own."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.server = Shell(folder)
        self.server.home = folder / "server-home"
        self.server.database = self.server.home / "state.db"
        self.server.environment = {**self.environment, "BROKER_HOME": str(self.server.home)}
        self.process = self.server.open("server", "start", "--port", "0", "--local-cloud")
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().removeprefix("Server: ").strip()
        assert self.url, self.process.communicate(timeout=60)
        self.run("login", self.url, "--token-file", str(self.server.home / "server" / "admin.token"))

    def stop(self) -> str:
        self.process.send_signal(signal.SIGTERM)
        _, notes = self.process.communicate(timeout=60)
        return notes


@pytest.fixture(params=["embedded", "server"])
def terminal(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Shell]:
    shell = Served(tmp_path) if request.param == "server" else Shell(tmp_path)
    yield shell
    owner = shell.server if isinstance(shell, Served) else shell
    if not owner.is_at_rest():
        owner.run("jobs", "cancel", "--all", code=None)
        owner.wait_until(lambda: not owner.read_json("status")["live_jobs"], "all jobs have ended")
        owner.run("down", "--all", "--yes", code=None)
    if isinstance(shell, Served) and shell.process.poll() is None:
        shell.stop()
    for pid in shell.find_processes("broker daemon"):
        os.kill(pid, signal.SIGTERM)
    shell.wait_until(lambda: not shell.find_processes(), f"nothing is left of {shell.find_processes()}")


def test_cluster_and_job_live_their_whole_life(terminal: Shell) -> None:
    (terminal.folder / "code").mkdir()
    (terminal.folder / "code" / "notes").write_text("sent along\n")
    task = terminal.write("hello.yaml", HELLO)

    launched = terminal.run("launch", task, "-c", "dev", "--secret", f"TOKEN={CANARY}")
    assert launched.stdout.endswith("sent along\ntoken has 9 letters\n")
    assert "Choice: 1 x local-1x on-demand in local" in launched.stdout
    assert "cluster `dev` is up: 1 node\n" in launched.stderr
    assert launched.stderr.endswith("run 1 on `dev` ended with status SUCCEEDED\n")

    failed = terminal.run("exec", "dev", "exit 7", code=100)
    assert failed.stderr.endswith("error: run 2 ended with status FAILED with exit code 7\n")
    assert [(run["id"], run["returncode"]) for run in terminal.read_json("queue", "dev")] == [(1, 0), (2, 7)]
    assert terminal.run("logs", "dev", "1", "--no-follow").stdout == "sent along\ntoken has 9 letters\n"
    unknown = terminal.run("logs", "nope", code=2)
    assert unknown.stderr == "error: unknown cluster `nope`\n\nhint: known clusters: `dev`\n"
    invalid = terminal.run("launch", terminal.write("bad.yaml", "rnu: echo\n"), code=2)
    assert "bad.yaml:1:1" in invalid.stderr and "run" in invalid.stderr

    submitted = terminal.run("jobs", "launch", task, "--secret", f"TOKEN={CANARY}")
    assert "Submitted managed job 1 (hello)\nsent along\ntoken has 9 letters\n" in submitted.stdout
    assert submitted.stderr.endswith("Job 1 ended with status SUCCEEDED\n")
    assert terminal.run("jobs", "wait", "hello").stdout == "Job 1 (hello) is SUCCEEDED\n"
    why = terminal.run("jobs", "why", "1").stdout
    assert why.startswith("Job 1 (hello) ran to its end.\n") and "the program was started" in why
    (job,) = terminal.read_json("jobs", "queue")
    assert (job["name"], job["status"], job["attempts"][0]["outcome_kind"]) == ("hello", "SUCCEEDED", "succeeded")
    assert terminal.run("jobs", "logs", "9", code=2).stderr.startswith("error: unknown managed job `9`\n")
    assert terminal.run("jobs", "wait", "1", "--for", "FAILED", code=1).stderr == (
        "error: job 1 ended with status SUCCEEDED\n"
    )

    assert terminal.run("down", "dev", "--yes").stdout == "terminated cluster `dev`\n"
    assert terminal.run("status").stdout.startswith("No clusters; start one with `broker launch TASK.yaml`\n")
    assert re.search(r"^job 1 \(hello\) +0\.00 ", terminal.run("cost").stdout, re.MULTILINE)

    if isinstance(terminal, Served):
        audit = terminal.server.read_json("server", "audit")
        assert [(each["verb"], each["outcome"]) for each in audit] == [
            ("launch", "done"), ("exec_task", "done"), ("launch_jobs", "done"), ("terminate_clusters", "done"),
        ]  # fmt: skip
        made = terminal.server.run("server", "token", "create", "ben", "--role", "viewer").stdout
        assert "(viewer)" in terminal.run("login", terminal.url, "--token", made.strip()).stdout
        denied = terminal.run("jobs", "retry", "1", code=5)
        assert "requires the role `user`, and ben has `viewer`" in denied.stderr
        terminal.server.run("server", "token", "revoke", "2")
        assert "expired or revoked" in terminal.run("jobs", "queue", code=5).stderr
        refused = terminal.run("ssh", "dev", code=2)
        assert "`broker ssh` does not run through a server" in refused.stderr
        notes = terminal.stop()
        assert CANARY not in notes and "Traceback" not in notes
        away = terminal.run("status", code=5)
        assert "does not answer" in away.stderr and "`broker logout`" in away.stderr
        terminal.run("logout")
        assert terminal.run("jobs", "queue").stdout.startswith("No managed jobs")
    written = [path for path in terminal.folder.rglob("*") if path.is_file() and CANARY.encode() in path.read_bytes()]
    assert not written, "no file keeps the secret"
