"""`broker server up --infra local`: a server under a folder of its own, through its whole life."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from broker.serve.replicas import draw_free_port
from tests.cli.conftest import Shell
from tests.signals import signal_all
from tests.tiers import long

pytestmark = pytest.mark.skipif(not Path("/proc").exists(), reason="the host program reads Linux's /proc")

HOLD = "name: hold\nresources: {infra: local}\nrun: echo pid $$; until [ -e %s ]; do sleep 0.1; done; echo released\n"


class Hosted(Shell):
    """A user's terminal with a server on this machine."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.port = draw_free_port()
        self.server_home = self.home / "hosted" / "server" / "state"

    def up(self, *options: str, code: int | None = 0) -> str:
        place = ("--infra", "local", "--port", str(self.port), "--python", sys.executable, "--local-cloud")
        done = self.run("server", "up", *place, *options, code=code)
        return done.stdout if code == 0 else done.stderr

    def read_status(self) -> dict[str, object]:
        found: dict[str, object] = self.read_json("server", "status")
        return found


@pytest.fixture
def hosted(tmp_path: Path) -> Iterator[Hosted]:
    hosted = Hosted(tmp_path)
    yield hosted
    hosted.run("server", "down", "--force", code=None)
    hosted.wait_until(
        lambda: not hosted.find_processes("broker server") and not hosted.find_processes("broker daemon"),
        "the server has ended",
    )
    signal_all(hosted.find_processes())


@pytest.mark.exhaustive
def test_server_lives_its_whole_life(hosted: Hosted) -> None:
    told = hosted.up("--login")
    assert told.startswith(f"Server: http://127.0.0.1:{hosted.port}\n") and "Logged in as admin" in told
    status = hosted.read_status()
    assert status["is_running"] and status["url"] == f"http://127.0.0.1:{hosted.port}" and status["backup"] is None

    command = hosted.home / "hosted" / "server" / "broker"
    assert status["command"] == str(command)
    listed = subprocess.run([command, "server", "token", "list"], capture_output=True, text=True, check=True)
    assert "admin" in listed.stdout

    release = hosted.folder / "release"
    hosted.run("jobs", "launch", hosted.write("hold.yaml", HOLD % release), "-d")
    hosted.wait_until(lambda: "pid " in hosted.run("jobs", "logs", "1", "--no-follow", code=None).stdout, "it runs")
    (before,) = [line for line in hosted.run("jobs", "logs", "1", "--no-follow").stdout.splitlines() if "pid " in line]

    refused = hosted.run("server", "down", code=2).stderr
    assert "the server runs 1 job" in refused and "--force" in refused
    assert hosted.read_status()["is_running"]

    hosted.run("server", "upgrade")
    assert hosted.read_status()["is_running"]
    release.touch()
    assert hosted.run("jobs", "wait", "1").stdout == "Job 1 (hold) is SUCCEEDED\n"
    log = hosted.run("jobs", "logs", "1", "--no-follow").stdout
    assert before in log and log.count("pid ") == 1 and "released" in log, "the program was never restarted"
    assert len(hosted.read_json("jobs", "queue", "--all")[0]["attempts"]) == 1

    hosted.wait_until(lambda: not hosted.read_json("status")["clusters"], "its cluster is gone")
    assert "The server has been removed" in hosted.run("server", "down").stdout
    assert not (hosted.home / "hosted" / "server").exists() and not (hosted.home / "login.json").exists()
    assert "this installation has no server" in hosted.run("server", "status", code=2).stderr


@pytest.mark.exhaustive
def test_failed_server_is_restarted_and_repaired(hosted: Hosted) -> None:
    hosted.up()
    listening = json.loads((hosted.server_home / "server" / "listening.json").read_text())
    os.kill(listening["pid"], signal.SIGKILL)
    hosted.wait_until(lambda: hosted.read_status()["is_running"] is True, "its supervisor has restarted it")
    signal_all([*hosted.find_processes("host_supervisor"), *hosted.find_processes("broker server start")])
    assert not hosted.read_status()["is_running"]
    assert "cannot find out what the server runs" in hosted.run("server", "down", code=4).stderr
    hosted.up()
    assert hosted.read_status()["is_running"]


@long
def test_other_place_is_refused_while_a_server_exists(hosted: Hosted) -> None:
    hosted.up()
    other = hosted.run("server", "up", "--infra", "ssh://nowhere", code=2).stderr
    assert "already has a server on local" in other
    unknown = hosted.run("server", "up", "--infra", "moon", code=2).stderr
    assert "unknown location for a server: `moon`" in unknown


@pytest.mark.long
def test_lost_server_is_restored_and_its_successor_alone_may_write(hosted: Hosted, tmp_path: Path) -> None:
    place = (tmp_path / "place").as_uri()
    hosted.up("--backup", place, "--login")
    hosted.run("jobs", "launch", hosted.write("one.yaml", "name: one\nresources: {infra: local}\nrun: echo one\n"))
    hosted.wait_until(lambda: not hosted.read_json("status")["clusters"], "its cluster is gone")
    states = tmp_path / "place" / "states" / "000001"
    hosted.wait_until(lambda: states.exists() and hosted.read_status()["backup_age_s"] is not None, "it is backed up")
    newest = states.stat().st_mtime_ns
    hosted.wait_until(lambda: states.stat().st_mtime_ns > newest, "what has changed since is backed up")
    signal_all(hosted.find_processes("host_supervisor") | hosted.find_processes("broker server start"))
    lost = tmp_path / "lost"
    hosted.server_home.rename(lost)
    hosted.run("server", "down", "--force")

    hosted.up("--restore-from", place, "--login")
    (job,) = hosted.read_json("jobs", "queue", "--all")
    assert (job["name"], job["status"]) == ("one", "SUCCEEDED")
    assert [path.name for path in sorted((tmp_path / "place" / "epochs").iterdir())] == ["000001", "000002"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(hosted.environment, "BROKER_HOME", str(lost))
        back = hosted.run("server", "start", "--port", "0", code=4)
    assert "this server was replaced by one that was restored from" in back.stderr


@pytest.mark.exhaustive
@pytest.mark.parametrize("mark", ["server/current"])
def test_up_that_was_killed_is_completed_by_the_next(hosted: Hosted, mark: str) -> None:
    place = ("--infra", "local", "--port", str(hosted.port), "--python", sys.executable)
    killed = hosted.open("server", "up", *place)
    hosted.wait_until((hosted.home / "hosted" / mark).exists, "this step was reached")
    killed.kill()
    killed.communicate()
    hosted.up("--login")
    assert hosted.read_status()["is_running"]
    assert len(hosted.find_processes("broker server start")) == 1


@pytest.mark.long
def test_up_that_was_killed_is_undone_by_down(hosted: Hosted) -> None:
    killed = hosted.open("server", "up", "--infra", "local", "--port", str(hosted.port), "--python", sys.executable)
    hosted.wait_until((hosted.home / "hosted" / "server" / "current").is_symlink, "this step was reached")
    killed.kill()
    killed.communicate()
    hosted.run("server", "down")
    assert not (hosted.home / "hosted" / "server").exists()
    assert not hosted.find_processes("broker server start")
