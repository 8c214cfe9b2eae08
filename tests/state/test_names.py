"""Names for shell completion, read directly from the file that the store wrote."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from broker.state.names import list_cluster_names, list_group_names, list_job_names
from broker.state.store import Store
from broker.types import Cluster, ClusterStatus, GroupRole, JobStatus, Task
from tests.state.samples import PLACEMENT, Hands


def test_live_and_ended_jobs_are_separated_and_unsafe_names_left_out(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    store = Store(path, clock=Hands())
    done, _, _ = (store.jobs.add(name, Task()) for name in ("done", "live", "$(reboot)"))
    store.jobs.set_status(done.id, JobStatus.SUCCEEDED)
    assert list_job_names(path) == ["live", "done", "3", "2", "1"]
    assert list_job_names(path, is_live=True) == ["live", "3", "2"]
    assert list_job_names(path, is_live=False) == ["done", str(done.id)]
    cluster = Cluster(name="b", status=ClusterStatus.UP, placement=PLACEMENT, attempt=1)
    for name in ("b", "a", "a b"):
        store.clusters.put(replace(cluster, name=name))
    assert list_cluster_names(path) == ["a", "b"]


def test_groups_are_named_by_the_state_of_all_their_jobs(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    store = Store(path, clock=Hands())
    role = Task(group=GroupRole(name="rl", is_primary=True))
    for pipeline, task, ends in (
        ("rl-live", role, (True, False)), ("rl-done", role, (True, True)), ("steps-live", Task(), (True, False)),
        ("steps-done", Task(), (True, True)), ("$(reboot)", role, (True, False)),
    ):  # fmt: skip
        for number, is_ended in enumerate(ends):
            job = store.jobs.add(f"task-{number}", task, pipeline=pipeline)
            if is_ended:
                store.jobs.set_status(job.id, JobStatus.FAILED)
    store.jobs.add("alone", Task())
    assert list_group_names(path) == ["steps-done", "steps-live", "rl-done", "rl-live"]
    assert list_group_names(path, is_live=True) == ["steps-live", "rl-live"]
    assert list_group_names(path, is_live=False) == ["rl-done"], "the jobs of a pipeline are retried one by one"


def test_of_many_jobs_the_newest_are_named(tmp_path: Path) -> None:
    store = Store(tmp_path / "state.db", clock=Hands())
    with store.transaction():
        for number in range(101):
            store.jobs.add(f"job-{number}", Task())
    names = list_job_names(tmp_path / "state.db")
    assert names[0] == "job-100" and "job-0" not in names and len(names) == 200
