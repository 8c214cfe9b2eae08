"""Managed jobs by ID, name and pipeline, and the costs of their attempts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from broker.app.container import Context
from broker.app.jobs import check_names, find_job, find_jobs, list_members, price_attempts, read_log_end
from broker.errors import UsageError
from broker.types import Cluster, ClusterStatus, Job, JobStatus, Task
from tests.clouds.beds import make_node
from tests.state.samples import ATTEMPT, PLACEMENT


@pytest.fixture
def context(tmp_path: Path) -> Iterator[Context]:
    found = Context(tmp_path)
    yield found
    found.close()


def test_name_is_that_of_the_newest_job_and_a_number_is_an_id(context: Context) -> None:
    first, second, third = (context.store.jobs.add(name, Task(run="true")) for name in ("train", "train", "1"))
    assert find_job(context, "train").id == second.id
    assert find_job(context, first.id).id == find_job(context, str(first.id)).id == first.id
    assert find_job(context, "1").id == first.id, "an ID comes before a name"
    with pytest.raises(UsageError, match="unknown managed job `99`"):
        find_job(context, "99")
    assert [each.id for each in find_jobs(context, ["train", third.id])] == [second.id, third.id]


def make_job(id: int, name: str, pipeline: str | None = None, header: str | None = None) -> Job:
    task = Task(run="true", pipeline=header)
    return Job(id=id, name=name, status=JobStatus.RUNNING, task=task, submitted_s=0.0, uid=f"u{id}", pipeline=pipeline)


def test_a_pipelines_name_finds_its_jobs_and_its_header_the_newest_pipeline() -> None:
    known = [
        make_job(1, "a", "flow-1", "flow"), make_job(2, "b", "flow-1", "flow"), make_job(3, "a", "flow-2", "flow"),
        make_job(4, "b", "flow-2", "flow"), make_job(5, "alone"),
    ]  # fmt: skip
    assert [each.id for each in list_members(known, "flow-1")] == [1, 2]
    assert [each.id for each in list_members(known, "flow")] == [3, 4]
    assert list_members(known, "a") == list_members(known, "5") == list_members(known, "none") == []
    assert list_members([*known, make_job(6, "flow")], "flow") == [], "the name of a job comes first"


@pytest.mark.parametrize("request_id", ["service/web/1", "schedule", "map-k7wq2/1/1", "sweep-0a/3"])
def test_ids_that_broker_gives_itself_are_refused(request_id: str) -> None:
    with pytest.raises(UsageError, match="must not be"):
        check_names(None, request_id)
    check_names("train", "nightly-2026-11-23")


def test_attempts_that_share_a_cluster_share_its_bill(context: Context) -> None:
    """Two restarts in place cost 1 and 2 USD when they ended; the third has the rest of 8 h at 1 USD/h."""
    now_s = context.clock.now_s()
    cluster = Cluster(name="c", placement=PLACEMENT, status=ClusterStatus.UP, attempt=1)
    for name, hours in (("c", 8.0), ("d", 3.0)):
        context.store.clusters.put(replace(cluster, name=name))
        node = replace(make_node(f"n-{name}"), cluster=name, usd_hour=1.0, created_s=now_s - hours * 3600)
        context.store.bills.record(node)
    attempts = [
        replace(ATTEMPT, number=1, cluster="c", usd=1.0), replace(ATTEMPT, number=2, cluster="c", usd=2.0),
        replace(ATTEMPT, number=3, cluster="c"), replace(ATTEMPT, number=4, cluster="d", usd=0.5),
    ]  # fmt: skip
    priced = price_attempts(context, attempts, now_s)
    assert [each.usd for each in priced] == [1.0, 2.0, pytest.approx(5.0), pytest.approx(3.0)]


def test_the_end_of_a_log_begins_with_a_whole_line(context: Context, tmp_path: Path) -> None:
    path = tmp_path / "logs" / "jobs" / "1.log"
    path.parent.mkdir(parents=True)
    path.write_text("first\nsecond\nthird\nhalf")
    assert read_log_end(context, 1, bytes_max=100) == (["first", "second", "third"], False)
    assert read_log_end(context, 1, bytes_max=14) == (["third"], True)
    assert read_log_end(context, 2, bytes_max=14) == ([], False)
