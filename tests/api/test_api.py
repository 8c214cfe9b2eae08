"""The Python API: every name can be used, nothing is printed, and the README's example runs as it is written."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import broker
import broker.jobs
from tests.cli.conftest import Shell, shell

__all__ = ["shell"]
ROOT = Path(__file__).parent.parent.parent
SYNC = ("advise", "cancel", "down", "exec", "launch", "logs", "plan", "queue", "simulate", "status")
SYNC_JOBS = (
    "cancel",
    "due_times",
    "launch",
    "launch_pipeline",
    "logs",
    "pause_schedule",
    "queue",
    "remove_schedule",
    "resume_schedule",
    "retry",
    "retry_group",
    "schedule",
    "schedules",
    "wait",
    "why",
)
TASK = {"name": "tiny", "resources": {"infra": "local"}, "run": "echo counted $((40 + 2))"}
WORK = "resources: {accelerators: A100:8, use_spot: true}\ngoal: {work: 10h, deadline: 20h}\nrun: train"


@pytest.fixture
def home(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state folder of its own, in which nothing may be left."""
    for name in set(os.environ) - set(shell.environment):
        monkeypatch.delenv(name)
    for name, value in shell.environment.items():
        monkeypatch.setenv(name, value)
    return shell.home


def read_example(file: str) -> str:
    """Return the first Python block of a page."""
    return (ROOT / file).read_text().partition("```python\n")[2].partition("```")[0]


def test_every_public_name_exists_and_is_documented() -> None:
    for name in broker.__all__:
        assert getattr(broker, name) is not None
    for name in SYNC:
        assert inspect.getdoc(getattr(broker, name)) == inspect.getdoc(getattr(broker.aio, name))
    for name in SYNC_JOBS:
        assert inspect.getdoc(getattr(broker.jobs, name)) == inspect.getdoc(getattr(broker.aio.jobs, name))


def test_no_module_of_the_jobs_room_hides_a_name_of_the_api() -> None:
    modules = {each.name for each in pkgutil.iter_modules(broker.jobs.__path__)}
    assert not modules & set(SYNC_JOBS)
    assert set(SYNC_JOBS) == set(broker.jobs.__all__) == set(importlib.import_module("broker.api.jobs").__all__)


def test_the_docs_page_lists_every_function() -> None:
    page = (ROOT / "docs/PYTHON_API.md").read_text()
    names = [f"broker.{name}" for name in SYNC] + [f"broker.jobs.{name}" for name in SYNC_JOBS]
    assert [name for name in names if f"`{name}" not in page] == []


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's /proc")
def test_the_example_of_the_readme_runs_unchanged(shell: Shell) -> None:
    example = read_example("README.md")
    assert "broker.launch" in example and "broker.jobs.launch" in example
    done = subprocess.run(
        [sys.executable, "-c", example], capture_output=True, text=True, cwd=ROOT, env=shell.environment, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert "hello from node 0 of 2" in done.stdout and "hello from node 1 of 2" in done.stdout
    assert not done.stderr
    assert shell.read_json("jobs", "queue")[0]["status"] == "SUCCEEDED"
    shell.wait_for_termination()


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's /proc")
def test_a_cluster_s_life_prints_nothing_and_its_notes_go_to_the_caller(
    home: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    notes: list[str] = []
    launched = broker.launch(TASK, cluster="dev", on_note=notes.append)
    assert launched.cluster.name == "dev" and launched.run_id == 1
    assert list(broker.logs("dev")) == ["counted 42"]
    run_id = broker.exec("dev", {"run": "echo again; exit 3"})
    found = []
    with pytest.raises(broker.RunFailedError) as caught:
        found += broker.logs("dev", run_id)
    assert caught.value.returncode == 3
    assert [run.id for run in broker.queue("dev")] == [1, run_id]
    status = broker.status(refresh=True)
    assert [each.name for each in status.clusters] == ["dev"] and not status.failures and status.total_usd > 0
    assert broker.down("dev") == ("dev",)
    with pytest.raises(broker.UsageError, match="unknown cluster"):
        broker.down("dev")
    assert "cluster `dev` is up: 1 node" in notes
    told = capfd.readouterr()
    assert (told.out, told.err) == ("", "")


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's /proc")
def test_jobs_from_a_running_event_loop(home: Path) -> None:
    """As in a notebook: the functions without asyncio work, too, and so do those with it."""

    async def run() -> None:
        job = broker.jobs.launch(TASK, request_id="once")
        assert (await broker.aio.jobs.launch(TASK, request_id="once")).id == job.id
        assert [line async for line in broker.aio.jobs.logs(job.id)] == list(broker.jobs.logs("tiny"))
        ended = await broker.aio.jobs.wait(job.id)
        assert ended.status is broker.JobStatus.SUCCEEDED
        told = await broker.aio.jobs.why(job.id)
        assert told.paid_usd == told.summary.paid_usd and told.events
        assert [each.id for each in await broker.aio.jobs.queue()] == [job.id]
        assert await broker.aio.jobs.cancel(job.id) == ()
        again = broker.jobs.launch({**TASK, "run": "sleep 1000"})
        with pytest.raises(broker.WaitTimeoutError):
            broker.jobs.wait(again.id, timeout_s=0.1)
        assert [each.id for each in broker.jobs.cancel(again.id)] == [again.id]
        with pytest.raises(broker.JobEndedError, match="CANCELLED"):
            broker.jobs.wait(again.id)

    asyncio.run(run())


def test_a_reader_that_stops_early_ends_the_log(home: Path) -> None:
    with pytest.raises(broker.UsageError, match="unknown managed job"):
        next(broker.jobs.logs("none"))
    broker.aio.running._has_loop()
    reader = broker.aio.running.make_sync_iterator(count)()
    assert next(reader) == 0
    reader.close()  # type: ignore[attr-defined]
    assert CLOSED == ["closed"]


CLOSED: list[str] = []


async def count():  # type: ignore[no-untyped-def]
    try:
        for number in range(10):
            yield number
    finally:
        CLOSED.append("closed")


def test_a_task_without_a_program_cannot_be_a_job(home: Path) -> None:
    with pytest.raises(broker.UsageError, match="has no `run:`"):
        broker.jobs.launch({"resources": {"infra": "local"}})
    assert broker.jobs.queue() == ()


def test_a_plan_prices_the_users_default_checkpoint_location(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a launch does: the data of every checkpoint may have to leave the cloud."""
    task = "resources: {accelerators: A100:8, use_spot: true, cloud: gcp}\ngoal: {work: 40h}\n"
    size = "checkpoint: {size: 500GB, every: 30m%s}\n"
    without = broker.plan(task + size % "")
    explicit = broker.plan(task + size % ", to: s3://bucket/runs")
    monkeypatch.setenv("BROKER_CHECKPOINTS", "s3://bucket/runs")
    default = broker.plan(task + size % "")
    assert default.task.checkpoint.to == "s3://bucket/runs"
    assert default.choice.expected_usd == explicit.choice.expected_usd != without.choice.expected_usd


def test_advice_takes_numbers_or_texts_and_its_task_can_be_planned(home: Path) -> None:
    advice = broker.advise(params=7e9, tokens="20B", gpus=["H100"])
    assert advice.advice.options[0].layout.hardware.figures.name == "H100"
    assert broker.plan(advice.task).choice.expected_usd is not None
    same = broker.advise(params="7B", tokens=20e9, gpus=["H100"])
    assert same.advice.options == advice.advice.options


def test_a_simulation_compares_the_policies_it_is_given(home: Path) -> None:
    found = broker.simulate(WORK, policies=["greedy"], starts=2, optima=0)
    assert {each.policy for each in found.study.scores} == {"on-demand", "greedy"}
    with pytest.raises(broker.UsageError, match="unknown policy"):
        broker.simulate(WORK, policies=["gredy"])
