"""`broker jobs queue` keeps a pipeline's name and jobs together."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from broker.app.container import Context
from broker.cli.jobs_queue import list_rows, sum_up
from broker.cli.main import main
from broker.clock import SystemClock
from broker.jobs.submission import submit_tasks
from broker.state.store import Store
from broker.task.loader import load_tasks_text
from broker.types import EventKind, JobStatus, Task, make_event
from tests.state.test_rows import make_cluster

PIPE = "name: nightly\n---\nname: prepare\nrun: x\n---\nname: train\nrun: x\n"


def test_pipeline_keeps_the_name_of_its_header_and_its_jobs_stand_together(tmp_path: Path) -> None:
    store = Store(tmp_path / "state.db", clock=SystemClock())
    submit_tasks(store, [Task(name="before")])
    first, second = submit_tasks(store, load_tasks_text(PIPE, "pipe.yaml"))
    submit_tasks(store, [Task(name="after")])
    store.jobs.set_status(first.id, JobStatus.SUCCEEDED)
    rows = list_rows(store.jobs.list_lines(), {first.id: 1.0, second.id: 2.0}, now_s=store.clock.now_s())
    assert [row[1] for row in rows] == ["after", first.pipeline, "  prepare", "  train", "before"]
    assert first.pipeline.startswith("nightly-")
    assert (rows[1][2], rows[1][3], rows[1][6]) == ("PENDING", "1/2 jobs", "3.00")
    store.close()


def test_flag_names_a_pipeline_before_its_header_does(tmp_path: Path) -> None:
    store = Store(tmp_path / "state.db", clock=SystemClock())
    first, _ = submit_tasks(store, load_tasks_text(PIPE, "pipe.yaml"), name="mine")
    assert first.pipeline.startswith("mine-")
    store.close()


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [
        (["SUCCEEDED", "RUNNING", "PENDING"], "RUNNING"),
        (["SUCCEEDED", "PENDING"], "PENDING"),
        (["SUCCEEDED", "FAILED", "CANCELLED"], "FAILED"),
        (["SUCCEEDED", "CANCELLED"], "CANCELLED"),
        (["SUCCEEDED", "SUCCEEDED"], "SUCCEEDED"),
    ],
)
def test_status_of_a_pipeline_summarizes_its_tasks(statuses: list[str], expected: str) -> None:
    for order in itertools.permutations(statuses):
        assert sum_up([JobStatus(each) for each in order]).value == expected


LOOKS = [
    ("jobs", "queue"), ("jobs", "queue", "--json"), ("jobs", "why", "1"), ("jobs", "events", "1"),
    ("jobs", "logs", "1", "--no-follow"), ("status",), ("cost",), ("gc", "--dry-run"),
]  # fmt: skip


@pytest.mark.parametrize("arguments", LOOKS, ids=" ".join)
def test_every_command_that_looks_at_live_jobs_restarts_a_dead_daemon(
    arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []
    monkeypatch.setattr(Context, "ensure_daemon", lambda context: started.append(True))
    monkeypatch.setattr(Context, "clouds", {})
    monkeypatch.setenv("BROKER_HOME", str(tmp_path))
    store = Store(tmp_path / "state.db", clock=SystemClock())
    job = store.jobs.add("train", Task())
    store.clusters.put(make_cluster("c", job_id=job.id))

    def look() -> None:
        started.clear()
        with pytest.raises(SystemExit, match=r"^0$"):
            main(arguments)

    look()
    assert started, "the job is live"
    store.jobs.set_status(job.id, JobStatus.SUCCEEDED)
    look()
    assert started, "its machines are left, which would be billed for as long as no daemon ends them"
    store.clusters.delete("c")
    look()
    assert not started, "nothing is left to do"
    store.close()


def test_queue_and_why_say_what_jobs_wait_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Context, "ensure_daemon", lambda context: None)
    monkeypatch.setattr(Context, "clouds", {})
    monkeypatch.setenv("BROKER_HOME", str(tmp_path))
    store = Store(tmp_path / "state.db", clock=SystemClock())
    running, low, refused, high = (store.jobs.add(f"j{each}", Task(priority=each)) for each in range(4))
    store.jobs.set_status(running.id, JobStatus.RUNNING)
    store.events.add(make_event(EventKind.WAITING, error="full", wait_s=1e6), job_id=refused.id)

    def run(*arguments: str) -> str:
        with pytest.raises(SystemExit, match=r"^0$"):
            main(arguments)
        return capsys.readouterr().out

    assert "waits for one of" not in run("jobs", "queue"), "without a limit"
    (tmp_path / "config.toml").write_text("max_live_jobs = 1\n")
    lines = run("jobs", "queue").splitlines()
    told = [line for line in lines if " waits " in line]
    assert told[0].startswith(f"Job {refused.id} waits for capacity; next request in ")
    assert told[1:] == [
        f"Job {high.id} waits for the only slot (`max_live_jobs`), at position 1",
        f"Job {low.id} waits for the only slot (`max_live_jobs`), at position 2",
    ]
    assert " is waiting.\nIt waits for the only slot (`max_live_jobs`), at position 2.\n" in run(
        "jobs", "why", str(low.id)
    )
    found = {each["id"]: each["wait"] for each in json.loads(run("jobs", "queue", "--json"))}
    assert found[high.id] == {"reason": "limit", "position": 1, "limit": 1, "until_s": None, "project": ""}
    assert found[running.id] is None and found[refused.id]["reason"] == "capacity"
    assert json.loads(run("jobs", "why", str(high.id), "--json"))["wait"]["position"] == 1
    (tmp_path / "config.toml").write_text("max_live_jobs = 0\n")
    with pytest.raises(SystemExit, match=r"^2$"):
        main(("jobs", "queue"))
    assert "`max_live_jobs` must be a number of at least 1" in capsys.readouterr().err
    store.close()
