"""`schedule:` from the command line, on the state folder and on a server: stored, started when due, paused, removed."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

import broker
from broker.app.container import Context
from broker.cli.main import main
from broker.clock import SystemClock
from broker.errors import UsageError
from broker.state.store import Store
from broker.types import DueOutcome, DueTime
from tests.cli.conftest import Shell
from tests.cli.test_server import Served, terminal
from tests.tiers import long

__all__ = ["terminal"]
NIGHTLY = """\
name: nightly
schedule: {cron: "0 2 1 1 *", timezone: Europe/Paris}
resources: {infra: local}
secrets: {TOKEN: null}
run: echo "token has ${#TOKEN} letters"
"""


def make_due(shell: Shell) -> None:
    """Move the next due time back by 367 days, as if no controller had run since."""
    database = shell.server.database if isinstance(shell, Served) else shell.database
    with closing(sqlite3.connect(database, timeout=60)) as connection:
        connection.execute("UPDATE schedules SET next_s = next_s - 366 * 86400 - 86400")
        connection.execute("UPDATE schedules SET next_s = next_s - next_s % 60")
        connection.commit()


@pytest.mark.skipif(not Path("/proc").exists(), reason="needs Linux's /proc")
@long
def test_schedule_lives_its_whole_life(terminal: Shell) -> None:
    task = terminal.write("nightly.yaml", NIGHTLY)
    dry = terminal.run("jobs", "launch", task, "--secret", "TOKEN=swordfish", "--dryrun").stdout
    assert "Schedule nightly would be due next at " in dry and terminal.read_json("jobs", "schedules") == []
    stored = terminal.run("jobs", "launch", task, "--secret", "TOKEN=swordfish", "--yes").stdout
    assert (
        "Choice: 1 x local-1x" in stored and "Stored schedule nightly, next due " in stored and " 02:00 CET" in stored
    )
    again = terminal.run("jobs", "launch", task, "--secret", "TOKEN=swordfish", "--yes", code=2)
    assert again.stderr.startswith("error: schedule `nightly` already exists\n")
    assert terminal.read_json("jobs", "queue") == []

    make_due(terminal)
    terminal.wait_until(lambda: bool(terminal.read_json("jobs", "queue")), "the schedule starts a job")
    assert "token has 9 letters" in terminal.run("jobs", "logs", "nightly").stdout
    assert "submitted by schedule nightly" in terminal.run("jobs", "events", "1").stdout
    (view,) = terminal.read_json("jobs", "schedules")
    assert (view["last_job"]["id"], view["last_job"]["status"]) == (1, "SUCCEEDED")
    missed, due = json.loads(terminal.run("jobs", "schedules", "history", "nightly", "--json").stdout)
    assert (missed["outcome"], missed["count"], due["outcome"], due["job_id"]) == ("missed", 1, "started", 1)

    assert terminal.run("jobs", "schedules", "pause", "nightly").stdout == "Paused schedule nightly\n"
    assert "paused" in terminal.run("jobs", "schedules").stdout
    assert "Resumed schedule nightly, next due " in terminal.run("jobs", "schedules", "resume", "nightly").stdout
    assert terminal.run("jobs", "schedules", "remove", "nightly").stdout == "Removed schedule nightly\n"
    unknown = terminal.run("jobs", "schedules", "pause", "nightly", code=2)
    assert unknown.stderr.startswith("error: unknown schedule `nightly`\n")
    if isinstance(terminal, Served):
        audit = terminal.server.read_json("server", "audit")
        assert [each["verb"] for each in audit if each["outcome"] == "done"][-3:] == [
            "pause_schedule", "resume_schedule", "remove_schedule",
        ]  # fmt: skip


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(Context, "ensure_daemon", lambda context: None)
    monkeypatch.setenv("BROKER_HOME", str(tmp_path))
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == code
    out, err = capsys.readouterr()
    return out if code == 0 else err


def test_due_times_are_shown_in_the_time_zone_of_the_schedule(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (home / "task.yaml").write_text(NIGHTLY.replace("secrets: {TOKEN: null}\n", ""))
    assert run(capsys, "jobs", "schedules").startswith("No schedules; store one with")
    run(capsys, "jobs", "launch", str(home / "task.yaml"), "--yes")
    store = Store(home / "state.db", clock=SystemClock())
    (schedule,) = store.schedules.list()
    due_s = 1_798_765_200.0  # 2027-01-01 02:00 in Paris
    store.schedules.record(
        schedule, DueTime(due_s=due_s, outcome=DueOutcome.MISSED, count=3, last_s=due_s + 7200, detail="away")
    )
    store.schedules.record(schedule, DueTime(due_s=due_s + 60, outcome=DueOutcome.REFUSED, detail="over the budget"))
    lines = run(capsys, "jobs", "schedules", "history", "nightly").splitlines()
    assert lines[1].split(None, 4)[:4] == ["2027-01-01", "02:00", "CET", "missed"]
    assert "3 due times up to 2027-01-01 04:00 CET: away" in lines[1] and "over the budget" in lines[2]
    store.close()


def test_schedule_requires_a_name_and_other_commands_refuse_it(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nameless = home / "task.yaml"
    nameless.write_text('schedule: "0 2 * * *"\nresources: {infra: local}\nrun: date\n')
    assert "a schedule requires a name" in run(capsys, "jobs", "launch", str(nameless), "--yes", code=2)
    assert "`schedule` starts managed jobs only" in run(capsys, "launch", str(nameless), "--yes", code=2)


def test_python_stores_shows_and_removes_a_schedule(home: Path) -> None:
    task = {"name": "j", "schedule": "0 2 * * *", "resources": {"infra": "local"}, "run": "true"}
    made = broker.jobs.schedule(task, request_id="r")
    assert made == broker.jobs.schedule(task, request_id="r") and made.next_s is not None
    (view,) = broker.jobs.schedules()
    assert (view.schedule, view.last_due, view.last_job) == (made, None, None)
    assert broker.jobs.pause_schedule("j").is_paused and not broker.jobs.resume_schedule("j").is_paused
    assert broker.jobs.due_times("j") == ()
    with pytest.raises(UsageError, match="unknown schedule `k`"):
        broker.jobs.remove_schedule("k")
    broker.jobs.remove_schedule("j")
    assert broker.jobs.schedules() == ()
    with pytest.raises(UsageError, match="no `schedule:`"):
        broker.jobs.schedule({"name": "j", "run": "true"})
    with pytest.raises(UsageError, match="managed jobs only"):
        broker.jobs.launch(task)


def test_dry_run_shows_the_next_due_time_only(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (home / "task.yaml").write_text(NIGHTLY)
    out = run(capsys, "jobs", "launch", str(home / "task.yaml"), "--secret", "TOKEN=x", "--dryrun")
    assert "Schedule nightly would be due next at " in out
    assert broker.jobs.schedules() == ()
