"""Tasks become jobs: a single one, a pipeline, or a retry of an ended job or group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from broker.errors import UsageError
from broker.jobs.submission import retry_group, retry_job, submit_tasks
from broker.state.store import Store
from broker.types import Attempt, GroupRole, Job, JobStatus, Placement, Secret, Task
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


def test_failed_pipeline_is_retried_task_by_task(store: Store) -> None:
    """A retry needed the job that had failed, not its retry that succeeded, and was cancelled at once."""
    first, second, third = submit_tasks(store, [Task(name="a"), Task(name="b"), Task(name="c")])
    ended = [end(store, first), *(end(store, each, JobStatus.CANCELLED) for each in (second, third))]
    again = retry_job(store, ended[0], secrets={})
    newest = retry_job(store, end(store, again), secrets={})
    end(store, newest, JobStatus.SUCCEEDED)
    retried = retry_job(store, ended[1], secrets={})
    assert (newest.needs, retried.needs) == ((), (newest.id,))
    assert retry_job(store, ended[2], secrets={}).needs == (retried.id,), "it waits for the one that is live"


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


def test_only_the_newest_of_a_chain_of_retries_is_retried(store: Store) -> None:
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


def submit_group(store: Store, *ends: JobStatus | None, secrets: Sequence[str] = ()) -> Sequence[Job]:
    """Submit a primary task and an auxiliary one; `ends` are their terminal statuses, None for a live one."""
    tasks = [
        Task(
            name=name,
            pipeline="rl",
            group=GroupRole(name="rl", is_primary=name == "learner"),
            secrets={each: Secret(value="x") for each in secrets},
        )
        for name in ("learner", "rollout")
    ]
    jobs = submit_tasks(store, tasks, hedge=3)
    placement = Placement(offer=make_offer("east1a"), is_spot=True, node_count=1)
    store.jobs.put_attempt(Attempt(job_id=jobs[0].id, number=1, cluster="c", placement=placement, started_s=0.0))
    for job, status in zip(jobs, ends, strict=True):
        if status is not None:
            end(store, job, status)
    return store.jobs.list_pipeline(jobs[0].pipeline)


FAILED_GROUP = (JobStatus.FAILED, JobStatus.CANCELLED)


def test_a_retried_group_is_a_new_group_whose_tasks_continue_from_the_old_checkpoints(store: Store) -> None:
    old = submit_group(store, *FAILED_GROUP)
    new = retry_group(store, old, secrets={}, request_id="r")
    assert [job.name for job in new] == ["learner", "rollout"]
    assert {job.pipeline for job in new} != {old[0].pipeline} and len({job.pipeline for job in new}) == 1
    assert all(job.pipeline.startswith("rl-") and job.task.pipeline == "rl" and job.hedge == 3 for job in new)
    assert [job.folder for job in new] == [job.folder for job in old]
    assert [job.next_attempt for job in new] == [2, 1], "numbers fence the checkpoints"
    assert [job.id for job in retry_group(store, old, secrets={}, request_id="r")] == [job.id for job in new]
    assert store.jobs.count() == 4


def test_a_task_that_had_succeeded_starts_again_with_its_group(store: Store) -> None:
    """The others need its addresses."""
    old = submit_group(store, JobStatus.FAILED, JobStatus.SUCCEEDED)
    assert [job.status for job in retry_group(store, old, secrets={})] == [JobStatus.PENDING] * 2


@pytest.mark.parametrize(
    ("ends", "message", "hint"),
    [
        (
            (JobStatus.FAILED, None),
            "(rollout) of group {old} is PENDING, not ended",
            "`broker jobs cancel {old}` first",
        ),
        ((JobStatus.SUCCEEDED, JobStatus.SUCCEEDED), "{old} has already succeeded", "`broker jobs launch`"),
        ((JobStatus.SUCCEEDED, JobStatus.FAILED), "{old} has already succeeded", "`broker jobs launch`"),
    ],
)
def test_a_group_that_runs_or_whose_primary_tasks_have_succeeded_is_not_retried(
    store: Store, ends: Sequence[JobStatus | None], message: str, hint: str
) -> None:
    old = submit_group(store, *ends)
    with pytest.raises(UsageError) as caught:
        retry_group(store, old, secrets={})
    name = old[0].pipeline
    assert message.format(old=name) in caught.value.message and hint.format(old=name) in caught.value.hints[0]
    assert store.jobs.count() == 2


@pytest.mark.parametrize(
    ("ends", "hints"),
    [
        (FAILED_GROUP, ["`broker jobs retry {old}`"]),
        ((JobStatus.FAILED, None), ["`broker jobs cancel {old}`", "`broker jobs retry {old}`"]),
        ((JobStatus.SUCCEEDED, JobStatus.FAILED), ["`broker jobs launch`"]),
    ],
)
def test_the_retry_of_one_task_names_the_command_for_its_group(
    store: Store, ends: Sequence[JobStatus | None], hints: Sequence[str]
) -> None:
    old = submit_group(store, *ends)
    with pytest.raises(UsageError) as caught:
        retry_job(store, old[0], secrets={})
    assert f"job 1 belongs to group {old[0].pipeline}" in caught.value.message
    assert all(hint.format(old=old[0].pipeline) in caught.value.hints[0] for hint in hints)
    assert store.jobs.count() == 2


def test_only_the_newest_of_a_chain_of_groups_is_retried(store: Store) -> None:
    first = submit_group(store, *FAILED_GROUP)
    second = retry_group(store, first, secrets={})
    with pytest.raises(UsageError) as caught:
        retry_group(store, first, secrets={})
    assert f"group {second[0].pipeline} already" in caught.value.message
    assert list(caught.value.hints) == [f"`broker jobs logs {second[0].pipeline}`"]
    ended = [end(store, job, JobStatus.CANCELLED) for job in second]
    with pytest.raises(UsageError) as caught:
        retry_group(store, first, secrets={})
    assert list(caught.value.hints) == [f"`broker jobs retry {second[0].pipeline}`"]
    third = retry_group(store, ended, secrets={})
    assert [job.resumes for job in third] == [job.id for job in first]


def test_two_commands_at_once_retry_a_group_once(store: Store) -> None:
    """The second one submits while the first checks the access to buckets."""
    old = submit_group(store, *FAILED_GROUP)

    def come_first(tasks: Sequence[Task]) -> Sequence[Task]:
        retry_group(store, old, secrets={})
        return tasks

    with pytest.raises(UsageError, match="already continues"):
        retry_group(store, old, secrets={}, check=come_first)
    assert store.jobs.count() == 4
    again = submit_group(store, *FAILED_GROUP)
    inner: list[Sequence[Job]] = []

    def repeat(tasks: Sequence[Task]) -> Sequence[Task]:
        inner.append(retry_group(store, again, secrets={}, request_id="r"))
        return tasks

    outer = retry_group(store, again, secrets={}, request_id="r", check=repeat)
    assert [job.id for job in outer] == [job.id for job in inner[0]] and store.jobs.count() == 8


def test_a_retried_group_needs_the_secrets_of_all_its_tasks(store: Store) -> None:
    old = submit_group(store, *FAILED_GROUP, secrets="BA")
    with pytest.raises(UsageError) as caught:
        retry_group(store, old, secrets={"A": Secret(value="x")})
    assert list(caught.value.hints) == [f"`broker jobs retry {old[0].pipeline} --secret B`"]
    given = {name: Secret(value=name) for name in "AB"}
    new = retry_group(store, old, secrets=given)
    assert [job.task.secrets["B"].value for job in new] == ["B", "B"]


def test_a_retry_submits_the_task_that_its_check_returned(store: Store) -> None:
    """The administrator's policy may change a task, and may have changed since the job was first submitted."""
    job = end(store, store.jobs.add("train", Task(name="train", run="true")))
    again = retry_job(store, job, secrets={}, check=lambda task: replace(task, num_nodes=2))
    assert (again.task.num_nodes, again.resumes) == (2, job.id)
    old = submit_group(store, *FAILED_GROUP)
    new = retry_group(store, old, secrets={}, check=lambda tasks: [replace(task, num_nodes=3) for task in tasks])
    assert [each.task.num_nodes for each in new] == [3, 3]


def test_two_retries_at_once_make_one_job(store: Store) -> None:
    """The check of a retry plans and asks clouds for access, so that another command may come first."""
    job = end(store, store.jobs.add("train", Task(name="train")))

    def come_first(task: Task) -> Task:
        retry_job(store, job, secrets={})
        return task

    with pytest.raises(UsageError, match="already continues from the checkpoints"):
        retry_job(store, job, secrets={}, check=come_first)
    assert [each.id for each in store.jobs.list()] == [1, 2]


def test_a_retry_that_cannot_be_recorded_as_its_owners_adds_no_job(store: Store) -> None:
    job = end(store, store.jobs.add("train", Task(name="train")))

    def fail(jobs: Sequence[Job]) -> None:
        raise UsageError("no owner")

    with pytest.raises(UsageError, match="no owner"):
        retry_job(store, job, secrets={}, on_added=fail)
    assert [each.id for each in store.jobs.list()] == [1]
