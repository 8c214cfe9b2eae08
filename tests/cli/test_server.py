"""The same stories on the state folder and on a server: commands, output and exit codes are the same."""

from __future__ import annotations

import base64
import json
import re
import signal
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import Shell
from tests.signals import signal_all
from tests.state.conftest import postgres
from tests.tiers import exhaustive, long

__all__ = ["postgres"]

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
SQUARES = """\
name: square
resources: {infra: local, use_spot: true}
workdir: program
run: exec python -m trainers.map_worker square.py
"""
SQUARE = """\
def process(items):
    return [{"square": each["id"] ** 2} for each in items]
"""
FIT = """\
name: fit
resources: {infra: local, use_spot: true}
envs: {width: 1}
run: echo "{\\"step\\":9,\\"total\\":9,\\"loss\\":$((width * width - 4 * width + 9))}" >> $BROKER_PROGRESS_FILE
"""
WEB = """\
name: web
resources: {{cpus: 1+, infra: local, use_spot: true}}
service: {{readiness_probe: /, replicas: 1}}
run: exec {python} -m http.server $BROKER_REPLICA_PORT --bind 127.0.0.1
"""


class Served(Shell):
    """A user's terminal that is logged in to a server with a state folder of its own."""

    def __init__(self, folder: Path, state: str | None = None) -> None:
        super().__init__(folder)
        self.server = Shell(folder)
        self.server.home = folder / "server-home"
        self.server.database = self.server.home / "state.db"
        self.server.environment = {**self.environment, "BROKER_HOME": str(self.server.home)}
        self.is_shared = state is not None
        if state is not None:
            self.server.home.mkdir()
            (self.server.home / "config.toml").write_text(f'state = "{state}"\n')
            self.server.environment["BROKER_SECRET_KEY"] = base64.urlsafe_b64encode(bytes(32)).decode()
        self.process = self.server.open("server", "start", "--port", "0", "--local-cloud")
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().removeprefix("Server: ").strip()
        assert self.url, self.process.communicate(timeout=300)
        self.run("login", self.url, "--token-file", str(self.server.home / "server" / "admin.token"))

    def stop(self) -> str:
        self.process.send_signal(signal.SIGTERM)
        _, notes = self.process.communicate(timeout=300)
        return notes

    def is_at_rest(self) -> bool:
        if not self.is_shared:
            return self.server.is_at_rest()
        found = self.server.read_json("status")
        return not (found["live_jobs"] or found["clusters"])


@pytest.fixture(params=[pytest.param("embedded", marks=exhaustive), "server"])
def terminal(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Shell]:
    yield from open_terminal(request, tmp_path)


@pytest.fixture(params=["postgresql", *(pytest.param(each, marks=exhaustive) for each in ("server", "embedded"))])
def any_terminal(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Shell]:
    yield from open_terminal(request, tmp_path)


@pytest.fixture(params=["server", *(pytest.param(each, marks=exhaustive) for each in ("embedded", "postgresql"))])
def usual_terminal(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Shell]:
    """As above; a whole life on PostgreSQL is in `make test`, the rest in `make test-slow`."""
    yield from open_terminal(request, tmp_path)


def open_terminal(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Shell]:
    if request.param == "postgresql":
        yield from run_terminal(Served(tmp_path, request.getfixturevalue("postgres").make_url()))
    else:
        yield from run_terminal(Served(tmp_path) if request.param == "server" else Shell(tmp_path))


def run_terminal(shell: Shell) -> Iterator[Shell]:
    yield shell
    owner = shell.server if isinstance(shell, Served) else shell
    if not shell.is_at_rest():
        owner.run("serve", "down", "--all", "--yes", code=None)
        owner.run("jobs", "cancel", "--all", code=None)
        owner.wait_for_jobs()
        owner.run("down", "--all", "--yes", code=None)
    if isinstance(shell, Served) and shell.process.poll() is None:
        shell.stop()
    signal_all(shell.find_processes("broker daemon"), signal.SIGTERM)
    shell.wait_until(lambda: not shell.find_processes(), f"nothing is left of {shell.find_processes()}")


@long
def test_cluster_and_job_live_their_whole_life(any_terminal: Shell) -> None:
    terminal = any_terminal
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
    assert terminal.run("ssh", "dev", "--", "echo", "here").stdout == "here\n"
    assert "exited with code 3" in terminal.run("ssh", "dev-0", "--", "sh", "-c", "exit 3", code=100).stderr
    assert "cluster `dev` has no node 1" in terminal.run("ssh", "dev-1", code=2).stderr
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
    assert why.startswith("Job 1 (hello) succeeded.\n") and "the program was started" in why
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
            ("launch", "done"), ("exec_task", "done"), *[("run_on_node", "started"), ("run_on_node", "done")] * 2,
            ("launch_jobs", "done"), ("terminate_clusters", "done"),
        ]  # fmt: skip
        made = terminal.server.run("server", "token", "create", "ben", "--role", "viewer").stdout
        assert "(viewer)" in terminal.run("login", terminal.url, "--token", made.strip()).stdout
        denied = terminal.run("jobs", "retry", "1", code=5)
        assert "requires the role `user`, but ben has `viewer`" in denied.stderr
        terminal.server.run("server", "token", "revoke", "2")
        assert "expired or revoked" in terminal.run("jobs", "queue", code=5).stderr
        assert terminal.run("dashboard", "--no-open").stdout == f"Dashboard: {terminal.url}\n"
        refused = terminal.run("gc", code=2)
        assert "`broker gc` does not run through a server" in refused.stderr
        assert "`broker server status` shows the command" in terminal.run("server", "token", "list", code=2).stderr
        notes = terminal.stop()
        assert CANARY not in notes and "Traceback" not in notes
        away = terminal.run("status", code=5)
        assert "does not respond" in away.stderr and "`broker logout`" in away.stderr
        terminal.run("logout")
        refused = terminal.run("login", terminal.url, "--token", made.strip(), code=5)
        assert "does not respond" in refused.stderr and "logout" not in refused.stderr
        assert terminal.run("jobs", "queue").stdout.startswith("No managed jobs")
    written = [path for path in terminal.folder.rglob("*") if path.is_file() and CANARY.encode() in path.read_bytes()]
    assert not written, "no file keeps the secret"


@pytest.mark.exhaustive
def test_history_of_a_job_is_watched_exported_and_reported(usual_terminal: Shell) -> None:
    task = usual_terminal.write("brief.yaml", "name: brief\nresources: {infra: local}\nrun: echo done\n")
    usual_terminal.run("jobs", "launch", task, "-d")
    watched = usual_terminal.run("jobs", "watch", "brief").stdout.splitlines()
    assert "job 1 (brief)  SUCCEEDED" in watched[-1]
    assert json.loads(usual_terminal.run("jobs", "watch", "1", "--json").stdout)["job"]["status"] == "SUCCEEDED"
    assert usual_terminal.run("jobs", "watch").stderr.startswith("no live jobs; ")
    overview = usual_terminal.read_json("top")
    assert [(row["name"], row["status"]) for row in overview["jobs"]] == [("brief", "SUCCEEDED")]
    assert overview["live_jobs"] == 0 and overview["counts"] == {"SUCCEEDED": 1}
    shown = usual_terminal.run("top").stdout
    assert " USD today, " in shown and re.search(r"^ *1  brief +SUCCEEDED ", shown, re.MULTILINE)
    assert usual_terminal.run("jobs", "watch", "nope", code=2).stderr.startswith("error: unknown managed job `nope`\n")
    (resource,) = json.loads(usual_terminal.run("jobs", "trace", "1").stdout)["resourceSpans"]
    assert "job brief" in [each["name"] for each in resource["scopeSpans"][0]["spans"]]
    (share,) = usual_terminal.read_json("report")["jobs"]
    assert (share["name"], share["status"]) == ("brief", "SUCCEEDED")
    assert usual_terminal.run("report", "--month", "2026-13", code=2).stderr.startswith("error: `--month` must be")
    assert usual_terminal.run("forecast", "score").stdout.startswith("No job with a forecast has succeeded yet")
    assert usual_terminal.run("cost", "--forecast").stdout.startswith("No job with a forecast has succeeded yet")
    clouds = {each["cloud"]: each["can_launch"] for each in usual_terminal.read_json("check")}
    assert clouds["local"] and not clouds["aws"]
    assert usual_terminal.run("check", "local").stdout.startswith("ok     machine: `local` is this machine")
    assert usual_terminal.run("check", "nope", code=2).stderr.startswith("error: unknown cloud `nope`\n")


@pytest.mark.long
def test_sweep_and_map_run_their_jobs(usual_terminal: Shell) -> None:
    fit = usual_terminal.write("fit.yaml", FIT)
    swept = usual_terminal.read_json("sweep", fit, "--param", "width=1,2", "--yes")
    assert swept["is_over"] and swept["best"] == {"width": "2"}
    assert [(each["parameters"]["width"], each["loss"]) for each in swept["results"]] == [("2", 5.0), ("1", 6.0)]
    again = usual_terminal.run("sweep", fit, "--param", "width=1,2", "--yes").stdout
    assert "2 of 2 runs started, 0 live" in again and again.endswith("Best: --env width=2\n")

    for name in ("program", "in"):
        (usual_terminal.folder / name).mkdir()
    (usual_terminal.folder / "program/square.py").write_text(SQUARE)
    (usual_terminal.folder / "in/all.jsonl").write_text("".join(f'{{"id": {each}}}\n' for each in range(40)))
    places = [f"file://{usual_terminal.folder}/{name}" for name in ("in", "out")]
    task = usual_terminal.write("square.yaml", SQUARES)
    mapped = usual_terminal.run("map", task, "--input", places[0], "--output", places[1], "--workers", "1", "--yes")
    assert "input: " in mapped.stderr and "40 items" in mapped.stdout and "Wrote file://" in mapped.stdout
    written = "".join(path.read_text() for path in (usual_terminal.folder / "out").glob("part-*.jsonl"))
    assert sorted(json.loads(line)["square"] for line in written.splitlines()) == [each**2 for each in range(40)]
    if isinstance(usual_terminal, Served):
        lost = usual_terminal.run("map", task, "--input", "in", "--output", places[1], "--yes", code=2)
        assert lost.stderr.startswith("error: `--input in` is a path, which the server and the workers cannot read\n")


@pytest.mark.long
def test_service_lives_its_whole_life(terminal: Shell) -> None:
    task = terminal.write("web.yaml", WEB.format(python=sys.executable))
    assert terminal.run("serve", "status").stdout.startswith("No services; ")
    up = terminal.run("serve", "up", task, "--yes", "--wait")
    assert "\nService web is recorded; its endpoint is http://127.0.0.1:2" in up.stdout
    assert up.stdout.endswith("Service web is ready\n")
    (service,) = terminal.read_json("serve", "status")
    with urllib.request.urlopen(f"http://{service['endpoint']}", timeout=300) as response:
        assert response.status == 200
    assert terminal.run("serve", "up", task, "--yes", code=2).stderr.startswith("error: service `web` already exists\n")
    assert terminal.run("serve", "why", "web").stdout.startswith("Service web is READY\n")
    assert terminal.run("serve", "logs", "web").stdout
    assert terminal.run("serve", "logs", "nope", code=2).stderr.startswith("error: unknown service `nope`\n")
    if isinstance(terminal, Served):
        token = terminal.server.run("server", "token", "create", "ben").stdout.strip()
        terminal.run("login", terminal.url, "--token", token)
        denied = terminal.run("serve", "down", "web", "--yes", code=5)
        assert denied.stderr.startswith("error: service `web` belongs to admin\n")
        terminal.run("login", terminal.url, "--token-file", str(terminal.server.home / "server" / "admin.token"))
        terminal.server.run("server", "limits", "set", "--user", "admin", "--gpus", "4", "--usd-per-month", "9000")
        assert "admin" in terminal.server.run("server", "limits", "list").stdout
    assert terminal.run("serve", "down", "web", "--yes").stdout == "Service web is terminated\n"
    assert terminal.run("serve", "status").stdout.startswith("No services; ")
