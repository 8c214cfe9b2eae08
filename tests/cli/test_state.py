"""`broker state` end to end: the steps after losing the state file under a running job."""

from __future__ import annotations

from pathlib import Path

import pytest

from broker.cli.main import main
from broker.clock import SystemClock
from broker.state.store import Store
from tests.cli.conftest import Shell

LONG = """\
name: long
resources: {infra: local, use_spot: true}
run: |
  mkdir -p $BROKER_CHECKPOINT_DIR
  until [ -e $BROKER_CHECKPOINT_DIR/../go ]; do sleep 0.1; done
"""


def lose_store(shell: Shell) -> None:
    shell.kill_daemon()
    for path in shell.home.glob("state.db*"):
        path.unlink()


@pytest.mark.long
def test_a_job_whose_store_was_lost_continues_after_a_restore(shell: Shell) -> None:
    shell.run("jobs", "launch", shell.write("long.yaml", LONG), "--yes", "--detach-run")
    shell.wait_until(lambda: shell.get_status(1) == "RUNNING", "the program runs")
    refused = shell.run("state", "restore", "--yes", code=4).stderr
    assert "daemon of this state folder is running" in refused or "unknown copy" in refused
    copy = shell.run("state", "backup").stdout.split()[-1]
    assert "daemon of this state folder is running" in shell.run("state", "restore", "--yes", code=4).stderr
    lose_store(shell)
    lost = shell.run("status", code=4)
    assert (
        "is missing" in lost.stderr
        and "`broker state restore`" in lost.stderr
        and "`broker state reset`" in lost.stderr
    )
    assert "No managed jobs" not in shell.run("jobs", "queue", code=4).stdout
    info = shell.read_json("state", "info")
    assert not info["is_whole"] and info["copies"][0]["path"] == copy
    shell.run("plan", shell.write("plan.yaml", LONG))  # works without a store
    assert "restored from" in shell.run("state", "restore", "--yes").stdout
    (job,) = shell.read_json("jobs", "queue")
    assert (job["status"], len(job["attempts"])) == ("RUNNING", 1)
    (shell.home / "checkpoints" / "go").touch()
    shell.run("jobs", "wait", "1")
    (job,) = shell.read_json("jobs", "queue")
    assert (job["status"], len(job["attempts"])) == ("SUCCEEDED", 1)
    assert shell.read_json("state", "info")["is_whole"]


@pytest.mark.exhaustive
def test_after_a_reset_a_running_machine_is_shown_and_ended_on_request(shell: Shell) -> None:
    shell.run("launch", shell.write("hello.yaml", "resources: {infra: local}\nrun: echo hi\n"), "-c", "dev")
    assert "is now empty" in shell.run("state", "reset", "--yes").stdout
    assert shell.read_json("status")["clusters"] == []
    assert shell.read_json("gc")["adopted"] == ["dev"]
    (cluster,) = shell.read_json("status")["clusters"]
    assert (cluster["name"], len(cluster["nodes"]), cluster["job_id"]) == ("dev", 1, None)
    assert "hi" in shell.run("logs", "dev", "1").stdout
    shell.run("down", "dev", "--yes")
    assert not shell.find_processes("local_machine")


def test_owner_is_brought_back_from_the_store(shell: Shell) -> None:
    shell.run("status")
    owner = (shell.home / "owner").read_text()
    (shell.home / "owner").write_text("")
    assert "broker state restore --owner" in shell.run("status", code=4).stderr
    shell.run("state", "restore", "--owner")
    assert (shell.home / "owner").read_text() == owner
    shell.run("status")


def test_check_names_the_command_for_each_damaged_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BROKER_HOME", str(tmp_path))
    store = Store(tmp_path / "state.db", clock=SystemClock())
    store.write("INSERT INTO clusters (name, body) VALUES ('dev', '{}')")
    store.close()
    with pytest.raises(SystemExit, match=r"^4$"):
        main(["state", "check"])
    told = capsys.readouterr()
    assert "row `dev` of `clusters`" in told.out
    assert "`broker state drop clusters 'dev'`" in told.err
