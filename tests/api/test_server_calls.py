"""The Python API against a server: what each function asks of it, and what it makes of the answers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import broker
from broker.app.clusters import LogChunk
from broker.app.verbs.jobs import Cancellation, Cancelled, PricedJob
from broker.client.login import ServerLogin, save_login
from broker.client.wire import encode, encode_error
from broker.config import LOGIN
from broker.errors import JobEndedError, RunFailedError, UsageError
from broker.types import Job, JobStatus, Secret, Task
from tests.client.test_session import Answer, ScriptedServer, frames, server

__all__ = ["server"]
JOB = Job(id=7, name="train", status=JobStatus.RUNNING, task=Task(run="true"), submitted_s=5.0, uid="k7wq2")
FAILED = replace(JOB, status=JobStatus.FAILED, failure="it broke")
DONE = replace(JOB, status=JobStatus.SUCCEEDED)


@pytest.fixture
def home(server: ScriptedServer, tmp_path: Path) -> Path:
    save_login(tmp_path / LOGIN, ServerLogin(url=f"http://127.0.0.1:{server.server_port}", token=Secret(value="t")))
    return tmp_path


def show(job: Job) -> Answer:
    return frames({"result": encode(PricedJob(job=job, spent_usd=0.0))})


def lines(*texts: str) -> Answer:
    return frames({"call": "on_chunk", "value": encode(LogChunk(lines=texts, offset=9))}, {"result": None})


def list_asked(server: ScriptedServer) -> list[tuple[str, Any]]:
    return [(path.removeprefix("/v1/"), json.loads(body)) for _, path, _, body in server.requests]


def test_wait_is_for_the_job_of_the_first_answer_and_raises_if_it_ends_otherwise(
    server: ScriptedServer, home: Path
) -> None:
    server.script = [show(JOB), show(DONE)]
    assert broker.jobs.wait("train", home=home).status is JobStatus.SUCCEEDED
    assert [body["job"] for _, body in list_asked(server)] == ["train", "7"], "a newer job may get the name meanwhile"
    server.script = [show(JOB), show(FAILED)]
    with pytest.raises(JobEndedError, match="job 7 ended with status FAILED: it broke"):
        broker.jobs.wait(7, home=home)
    server.script = [show(JOB), show(FAILED)]
    assert broker.jobs.wait(7, status=JobStatus.FAILED, home=home).id == 7


@pytest.mark.parametrize("timeout_s", [0.0, -1.0])
def test_wait_of_no_time_is_refused_because_zero_means_for_good_on_the_wire(
    server: ScriptedServer, home: Path, timeout_s: float
) -> None:
    with pytest.raises(UsageError, match="must be positive"):
        broker.jobs.wait(7, timeout_s=timeout_s, home=home)
    assert server.requests == []


def test_log_that_is_followed_ends_with_an_error_for_a_failed_job_and_a_look_at_it_does_not(
    server: ScriptedServer, home: Path
) -> None:
    server.script = [show(JOB), lines("a", "b"), show(FAILED)]
    read: list[str] = []
    with pytest.raises(RunFailedError, match="job 7 ended with status FAILED"):
        read.extend(broker.jobs.logs("train", home=home))
    assert [verb for verb, _ in list_asked(server)] == ["show_job", "follow_log", "show_job"]
    server.script = [show(JOB), lines("a"), show(FAILED)]
    assert list(broker.jobs.logs("train", follow=False, home=home)) == ["a"]
    server.script = [show(JOB), lines("a"), show(DONE)]
    assert list(broker.jobs.logs("train", home=home)) == ["a"]


def test_cancel_returns_the_jobs_that_were_live_and_names_the_first_unknown_one(
    server: ScriptedServer, home: Path
) -> None:
    ended = replace(DONE, id=8)
    jobs = [
        Cancellation(job_id=each.id, name=each.name, status=each.status, is_live=each is JOB) for each in (JOB, ended)
    ]
    known = [encode(PricedJob(job=each, spent_usd=0.0)) for each in (JOB, ended)]
    server.script = [frames({"result": encode(Cancelled(jobs=tuple(jobs), missing=()))}), frames({"result": known})]
    assert [each.id for each in broker.jobs.cancel(7, "8", home=home)] == [7]
    assert list_asked(server)[0][1]["names"] == ["7", "8"]
    missing = Cancelled(jobs=(), missing=(UsageError("unknown managed job `x`"),))
    server.script = [frames({"result": encode(missing)})]
    with pytest.raises(UsageError, match="unknown managed job `x`"):
        broker.jobs.cancel("x", home=home)


def test_retry_sends_the_secrets_and_the_request_id(server: ScriptedServer, home: Path) -> None:
    server.script = [frames({"result": encode(replace(JOB, id=9))})]
    assert broker.jobs.retry(7, secrets={"KEY": "hidden"}, request_id="r-1", home=home).id == 9
    ((verb, body),) = list_asked(server)
    assert (verb, body) == ("retry_job", {"job": "7", "secrets": {"KEY": {"value": "hidden"}}, "request_id": "r-1"})


def test_cancel_of_no_run_is_not_one_of_all_runs(server: ScriptedServer, home: Path) -> None:
    for run_ids, sent in ((None, None), ([], []), ([2, 3], [2, 3])):
        server.requests.clear()
        server.script = [frames({"result": [3, 2]})]
        assert broker.cancel("dev", run_ids, home=home) == (3, 2)
        assert list_asked(server)[0][1].get("run_ids") == sent


def test_launch_refuses_nothing_on_the_way_and_states_whether_the_idle_cluster_is_deleted(
    server: ScriptedServer, home: Path
) -> None:
    server.script = [
        frames({"ask": "confirm", "id": "a1", "value": []}, {"error": encode_error(UsageError("the end"))})
    ]
    cases: list[tuple[dict[str, Any], Any]] = [
        ({}, None),
        ({"idle_minutes_to_autostop": 5}, {"idle_minutes": 5}),
        ({"down": True}, {"idle_minutes": 0, "is_down": True}),
    ]
    for options, autostop in cases:
        server.requests.clear()
        with pytest.raises(UsageError, match="the end"):
            broker.launch({"run": "true"}, cluster="dev", home=home, **options)
        (verb, body), (answered, answer) = list_asked(server)
        assert (verb, body["cluster"], body.get("autostop")) == ("launch", "dev", autostop)
        assert (answered, answer) == ("answers/a1", {"is_accepted": True}), "the API never asks"
