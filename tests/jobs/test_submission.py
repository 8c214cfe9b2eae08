"""Tasks become jobs: a single one, a pipeline, or a retry of an ended one."""

from __future__ import annotations

from pathlib import Path

import pytest

from broker.errors import UsageError
from broker.jobs.submission import retry_job, submit_tasks
from broker.state.store import Store
from broker.types import Attempt, Job, JobStatus, Placement, Secret, Task
from tests.simulation.world import make_offer
from tests.state.samples import Hands


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "state.db", clock=Hands())


def end(store: Store, job: Job, status: JobStatus = JobStatus.FAILED) -> Job:
    store.jobs.set_status(job.id, status)
    found = store.jobs.get(job.id)
    assert found is not None
    return found


def test_one_task_is_one_job_named_by_the_user_or_the_task(store: Store) -> None:
    (named,) = submit_tasks(store, [Task(name="train")], name="mine", hedge=3)
    (by_task,) = submit_tasks(store, [Task(name="train")])
    (nameless,) = submit_tasks(store, [Task()])
    assert [job.name for job in (named, by_task, nameless)] == ["mine", "train", "job"]
    assert (named.hedge, by_task.hedge, named.pipeline, named.needs) == (3, 2, "", ())


def test_tasks_without_needs_wait_for_the_one_before_them(store: Store) -> None:
    first, second, third = submit_tasks(store, [Task(name="a"), Task(name="b"), Task(name="c")], hedge=4)
    assert (first.needs, second.needs, third.needs) == ((), (first.id,), (second.id,))
    assert first.pipeline == second.pipeline == third.pipeline and first.pipeline.startswith("pipeline-")
    assert {job.hedge for job in (first, second, third)} == {4}
    again = submit_tasks(store, [Task(name="a"), Task(name="b")], name="mine")
    assert again[0].pipeline == again[1].pipeline and again[0].pipeline.startswith("mine-")
    assert again[0].pipeline != submit_tasks(store, [Task(), Task()], name="mine")[0].pipeline


def test_tasks_with_needs_wait_for_those_whatever_the_order_they_are_written_in(store: Store) -> None:
    tasks = [Task(name="train", needs={"prepare": 1.0}), Task(name="prepare"), Task(name="check", needs={"train": 1.0})]
    train, prepare, check = submit_tasks(store, tasks)
    assert [job.name for job in (train, prepare, check)] == ["train", "prepare", "check"]
    assert (train.needs, prepare.needs, check.needs) == ((prepare.id,), (), (train.id,))
    assert prepare.id < train.id < check.id


def test_the_same_request_submits_nothing_twice(store: Store) -> None:
    tasks = [Task(name="a"), Task(name="b")]
    first, again = (submit_tasks(store, tasks, request_id="r") for _ in range(2))
    assert [job.id for job in first] == [job.id for job in again] == [1, 2]
    assert submit_tasks(store, tasks[:1], request_id="s") == submit_tasks(store, tasks[:1], request_id="s")
    assert [job.id for job in submit_tasks(store, tasks)] == [4, 5], "without a request each is new"


def test_a_pipeline_that_cannot_be_put_in_order_leaves_nothing(store: Store) -> None:
    with pytest.raises(UsageError):
        submit_tasks(store, [Task(name="a", needs={"b": 1.0}), Task(name="b", needs={"a": 1.0})])
    assert store.jobs.count() == 0


def test_a_retry_has_all_that_the_old_job_had(store: Store) -> None:
    secret = Secret(value="hush")
    job = store.jobs.add("j", Task(run="true", secrets={"A": secret}), needs=(9,), pipeline="p", hedge=5)
    placement = Placement(offer=make_offer("east1a"), is_spot=True, node_count=1)
    store.jobs.put_attempt(Attempt(job_id=job.id, number=1, cluster="c", placement=placement, started_s=0.0))
    ended = end(store, job)
    new = retry_job(store, ended, secrets={"A": secret, "B": secret}, request_id="r")
    assert (new.name, new.needs, new.pipeline, new.hedge, new.resumes) == ("j", (9,), "p", 5, job.id)
    assert (new.next_attempt, new.task.run, new.task.secrets["A"].value) == (2, "true", "hush")
    assert set(new.task.secrets) == {"A"}
    assert retry_job(store, ended, secrets={"A": secret}, request_id="r").id == new.id


def test_a_job_that_runs_or_has_succeeded_is_not_retried(store: Store) -> None:
    live, done = store.jobs.add("a", Task()), store.jobs.add("b", Task())
    for job, hint in ((live, "broker jobs cancel 1"), (end(store, done, JobStatus.SUCCEEDED), "broker jobs launch")):
        with pytest.raises(UsageError) as caught:
            retry_job(store, job, secrets={})
        assert hint in caught.value.hints[0]
    assert store.jobs.count() == 2


def test_only_the_newest_of_a_line_of_retries_is_retried(store: Store) -> None:
    first = end(store, store.jobs.add("a", Task()))
    end(store, store.jobs.add("another", Task()))
    second = retry_job(store, first, secrets={})
    with pytest.raises(UsageError) as caught:
        retry_job(store, first, secrets={})
    assert "job 3" in caught.value.message and "broker jobs logs 3" in caught.value.hints[0]
    ended = end(store, second, JobStatus.CANCELLED)
    with pytest.raises(UsageError) as caught:
        retry_job(store, first, secrets={})
    assert "broker jobs retry 3" in caught.value.hints[0]
    third = retry_job(store, ended, secrets={})
    assert third.resumes == first.id
    with pytest.raises(UsageError):
        retry_job(store, ended, secrets={})


def test_a_retry_without_its_secrets_names_them(store: Store) -> None:
    secrets = {name: Secret(value="x") for name in "BA"}
    job = end(store, store.jobs.add("j", Task(secrets=secrets)))
    with pytest.raises(UsageError) as caught:
        retry_job(store, job, secrets={})
    assert list(caught.value.hints) == ["`broker jobs retry 1 --secret A --secret B`"]
