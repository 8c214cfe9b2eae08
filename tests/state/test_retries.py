"""Concurrent retries of one job, on every backend: one of them submits a job, the others are refused."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from threading import Barrier

import pytest

from broker.errors import UsageError
from broker.jobs.submission import retry_job
from broker.state.store import Store
from broker.types import Job, JobStatus, Task
from tests.state.conftest import OpenStore
from tests.state.samples import Hands


def end_job(store: Store) -> Job:
    job = store.jobs.add("train", Task(run="true"))
    store.jobs.set_status(job.id, JobStatus.FAILED)
    ended = store.jobs.get(job.id)
    assert ended is not None
    return ended


def test_a_job_retried_during_the_check_of_another_retry_is_not_doubled(open_store: OpenStore) -> None:
    store, other = open_store(), open_store()
    ended = end_job(store)

    def retry_elsewhere(task: Task) -> Task:
        retry_job(other, ended, secrets={})
        return task

    with pytest.raises(UsageError) as caught:
        retry_job(store, ended, secrets={}, check=retry_elsewhere)
    assert "job 2 already continues" in caught.value.message
    assert [job.resumes for job in store.jobs.list()] == [None, ended.id]


def test_a_request_repeated_during_its_own_check_returns_the_one_job(open_store: OpenStore) -> None:
    store, other = open_store(), open_store()
    ended = end_job(store)

    def repeat(task: Task) -> Task:
        retry_job(other, ended, secrets={}, request_id="r")
        return task

    again = retry_job(store, ended, secrets={}, request_id="r", check=repeat)
    assert (again.id, store.jobs.count()) == (2, 2)


def test_of_two_commands_that_both_passed_the_check_one_submits_a_job(tmp_path: Path) -> None:
    def open_it() -> Store:
        return Store(tmp_path / "state.db", clock=Hands())  # in the thread that uses it, as SQLite requires

    with closing(open_it()) as store:
        ended = end_job(store)
    both_have_checked = Barrier(2, timeout=300)

    def wait(task: Task) -> Task:
        both_have_checked.wait()
        return task

    def retry() -> int | str:
        with closing(open_it()) as store:
            try:
                return retry_job(store, ended, secrets={}, check=wait).id
            except UsageError as error:
                return error.message

    with ThreadPoolExecutor(2) as pool:
        results = [future.result() for future in [pool.submit(retry) for _ in range(2)]]
    assert sorted(results, key=str) == [2, "job 2 already continues from the checkpoints of job 1"]
    with closing(open_it()) as store:
        assert store.jobs.count() == 2
