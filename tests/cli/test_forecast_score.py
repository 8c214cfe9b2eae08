"""Forecasts of live jobs, and of ended ones beside what happened, on a price book of ten offers."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from broker.app.container import INTERVAL_FACTOR, Context
from broker.app.forecasts import submit
from broker.optimizer.forecast import record_forecast
from broker.state.store import Store
from broker.task.loader import load_tasks_text
from broker.types import Attempt, Job, JobStatus, Placement, Progress
from tests.cli.screens import NOW_S, OFFERS, Screen, make_book, open_screen

TASK = (
    "name: train\nresources: {accelerators: 'H100:8', use_spot: true}\n"
    "goal: {work: 40h, deadline: 60h, confidence: 0.3}\nrun: x\n"
)
HOUR = 3600.0


@pytest.fixture
def screen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Screen]:
    make_book(tmp_path / "cache" / "broker")
    with pytest.MonkeyPatch.context() as patch:
        yield open_screen(tmp_path, tmp_path / "cache", capsys, patch)
    time.tzset()  # back to the environment's zone


def submit_job(context: Context) -> Job:
    (task,) = load_tasks_text(TASK, "train.yaml")
    task = context.resolve(task)
    (job,) = submit(context, [task], [context.plan(task)], name=None, request_id=None, hedge=2)
    return job


def end_job(store: Store, job: Job, *, hours: float, usd: float) -> None:
    node = f"i-{job.id}"
    store.write(
        "INSERT INTO nodes (cloud, id, cluster, job_id, usd_hour, created_s, ended_s) "
        "VALUES ('aws', ?, 'c', ?, ?, ?, ?)",
        (node, job.id, usd / hours, NOW_S - hours * HOUR, NOW_S),
    )
    store.write("UPDATE jobs SET submitted_s = ? WHERE id = ?", (NOW_S - hours * HOUR, job.id))
    store.jobs.set_status(job.id, JobStatus.SUCCEEDED)


def read_json(screen: Screen, *arguments: str) -> Any:
    told = screen.show(*arguments, "--json")
    assert "exit code: 0" in told
    return json.loads(told.partition("----- stdout -----\n")[2].partition("----- stderr -----")[0])


def test_ended_jobs_are_compared_with_the_forecast_of_their_launch(screen: Screen) -> None:
    store, context = screen.open_store(), Context()
    job = submit_job(context)
    end_job(store, job, hours=50.0, usd=1200.0)
    (found,) = read_json(screen, "cost", "--forecast")
    assert (found["usd"], found["hours"], found["is_in_time"]) == (pytest.approx(1200.0), pytest.approx(50.0), True)
    plan = context.plan(job.task)
    kept = record_forecast(plan)
    assert kept is not None and found["forecast"]["usd"] == pytest.approx(list(kept.usd))
    table = screen.show("cost", "--forecast")
    assert f"{job.id} train" in table and "1,200.00" in table and max(map(len, table.splitlines())) <= 80
    store.close()


def test_time_of_a_pipelines_later_task_counts_from_the_end_of_those_before_it(screen: Screen) -> None:
    store, context = screen.open_store(), Context()
    tasks = [context.resolve(each) for each in load_tasks_text(f"{TASK}---\n{TASK.replace('train', 'tune')}", "t.yaml")]
    plans = [context.plan(each) for each in tasks]
    first, second = submit(context, tasks, plans, name=None, request_id=None, hedge=2)
    assert second.needs == (first.id,)
    store.write(
        "UPDATE jobs SET status = 'SUCCEEDED', submitted_s = ?, ended_s = ? WHERE id = ?",
        (NOW_S - 92 * HOUR, NOW_S - 42 * HOUR, first.id),
    )
    end_job(store, second, hours=92.0, usd=1200.0)
    _, found = read_json(screen, "cost", "--forecast")
    assert (found["hours"], found["waited_hours"]) == (pytest.approx(42.0), pytest.approx(50.0))
    assert found["is_in_time"] is False
    assert read_json(screen, "forecast", "score")["jobs"] == 1
    store.close()


def test_ten_jobs_that_contradict_their_forecasts_widen_the_next_plan(screen: Screen) -> None:
    store = screen.open_store()
    before = read_forecast(screen)
    for number in range(10):
        end_job(store, submit_job(Context()), hours=59.0, usd=3 * before["usd"]["p90"] if number else 1.0)
    score = read_json(screen, "forecast", "score")
    assert score["jobs"] == 10 and score["usd_coverage"] == [0.0, 0.0, 0.0] and score["deadline_jobs"] == 10
    factor = score["interval_factor"]
    assert factor > 1.5 and float(store.meta.get(INTERVAL_FACTOR) or 0) == factor
    after = read_forecast(screen)
    assert after["usd"]["p50"] == before["usd"]["p50"] and after["usd_mean"] == before["usd_mean"]
    above = [each["usd"]["p90"] - each["usd"]["p50"] for each in (before, after)]
    assert above[1] == pytest.approx(factor * above[0])
    assert f"plans widen intervals {factor:.2f} times" in screen.show("forecast", "score")
    # What is kept with a job is never widened: otherwise the next score would judge its own correction.
    again = submit_job(Context())
    assert store.forecasts.list()[again.id] == store.forecasts.list()[1]
    store.close()


def read_forecast(screen: Screen) -> Mapping[str, Any]:
    (plan,) = read_json(screen, "plan", screen.write("train.yaml", TASK))
    found: Mapping[str, Any] = plan["forecast"]
    return found


def run_job(store: Store, job: Job, *, step: int | None, hours: float) -> None:
    """Let the job have run on spot for some hours, with `step` of 100 steps saved."""
    offer = OFFERS["aws"][0]
    placement = Placement(offer=offer, is_spot=True, node_count=1)
    started_s = NOW_S - hours * HOUR
    store.jobs.put_attempt(
        Attempt(job_id=job.id, number=1, cluster="c", placement=placement, started_s=started_s, running_s=started_s)
    )
    store.write("UPDATE jobs SET submitted_s = ? WHERE id = ?", (started_s, job.id))
    store.jobs.set_status(job.id, JobStatus.RUNNING)
    if step is not None:
        store.jobs.set_progress(job.id, Progress(step=step, total=100, checkpoint_step=step, time_s=NOW_S))


def test_the_forecast_of_a_live_job_shrinks_with_the_work_that_is_left(screen: Screen) -> None:
    store, context = screen.open_store(), Context()
    early, late, silent = (submit_job(context) for _ in range(3))
    run_job(store, early, step=10, hours=6.0)
    run_job(store, late, step=90, hours=40.0)
    run_job(store, silent, step=None, hours=1.0)
    found = {each["id"]: each["forecast"] for each in read_json(screen, "jobs", "queue")}
    assert found[late.id]["hours_left"]["p90"] < found[early.id]["hours_left"]["p10"]
    assert found[late.id]["deadline_chance"] > found[early.id]["deadline_chance"] > 0
    assert found[early.id]["usd"]["p10"] < found[early.id]["usd"]["p90"]
    assert found[silent.id] is None  # how much work is left is not known
    table = screen.show("jobs", "queue")
    assert f"Job {late.id}: " in table and "to meet the deadline" in table and f"Job {silent.id}: " not in table
    why = read_json(screen, "jobs", "why", str(late.id))
    assert why["forecast"] == found[late.id]
    assert "Forecast: " in screen.show("jobs", "why", str(late.id))
    assert "Forecast: " not in screen.show("jobs", "why", str(silent.id))
    store.close()


def test_a_job_that_can_no_longer_be_in_time_has_little_chance(screen: Screen) -> None:
    store = screen.open_store()
    job = submit_job(Context())
    run_job(store, job, step=10, hours=55.0)
    (found,) = read_json(screen, "jobs", "queue")
    assert found["forecast"]["deadline_chance"] < 0.02
    store.close()
