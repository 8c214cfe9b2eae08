"""The terms on which nodes keep a setup, counted by hand; its results are reported once; archives expire."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from broker.config import Config
from broker.errors import NoOfferError
from broker.jobs.setup_archives import (
    KEPT_DAYS,
    ROW,
    choose_expired,
    forget_archives,
    list_archives,
    list_places,
    record_place,
)
from broker.jobs.setup_cache import SetupCache, expect_starts, price_gib
from broker.optimizer.forecast import ForecastEstimates
from broker.optimizer.planner import make_plan as rank
from broker.state.store import Store
from broker.types import (
    Attempt,
    CheckpointSpec,
    Cluster,
    ClusterStatus,
    EventKind,
    Goal,
    Job,
    JobRecovery,
    Node,
    NodeState,
    Outcome,
    OutcomeKind,
    Placement,
    Plan,
    RunStatus,
    SetupResult,
    Task,
)
from tests.simulation.virtual import VirtualClock
from tests.simulation.world import Report, make_offer, make_plan

OFFER = replace(make_offer("east1a"), cloud="aws", region="us-east-1", ondemand_usd_hour=9.0, spot_usd_hour=3.0)
PLACEMENT = Placement(offer=OFFER, is_spot=True, node_count=2)
TASK = Task(
    name="t", setup="pip install .", run="true", num_nodes=2, recovery=JobRecovery(caches_setup=True),
    checkpoint=CheckpointSpec(to="s3://bucket/runs"), file_mounts={"~/data": "/somewhere"},
)  # fmt: skip


class Bed:
    def __init__(self, folder: Path) -> None:
        self.clock = VirtualClock()
        self.store = Store(folder / "state.db", clock=self.clock)
        self.config = Config(home=folder, owner="me")
        self.planned: list[Task] = []
        self.preemptions: float | None = 3.5
        self.cache = self.restart()

    def restart(self) -> SetupCache:
        return SetupCache(self.store, self.plan, self.clock, self.config)

    def plan(self, task: Task, avoid: object = None) -> Plan:
        self.planned.append(task)
        if self.preemptions is None:
            raise NoOfferError("none")
        estimates = ForecastEstimates(make_plan(task).estimates)
        estimates.forecast = Forecast(self.preemptions)  # type: ignore[assignment]
        worth_usd = task.goal.hour_value_usd if task.goal else None
        return replace(make_plan(task), estimates=estimates, hour_value_usd=worth_usd)

    def add_job(self, task: Task = TASK) -> tuple[Job, Attempt]:
        job = self.store.jobs.add("t", task)
        return job, Attempt(job_id=job.id, number=1, cluster="c", placement=PLACEMENT, started_s=0.0)

    def order(self, job: Job, attempt: Attempt, handle: str = "ssh://user@host:22") -> dict[str, Any] | None:
        node = Node(
            id="i", cloud="aws", owner="me", cluster="c", attempt=1, rank=0, token="t", state=NodeState.RUNNING,
            handle=handle,
        )  # fmt: skip
        cluster = Cluster(name="c", status=ClusterStatus.UP, placement=PLACEMENT, attempt=1, nodes=(node,))
        envs = self.cache.make_envs(job, attempt, cluster)
        return json.loads(envs["BROKER_SETUP_CACHE"]) if envs else None


class Forecast:
    def __init__(self, preemptions: float) -> None:
        self.preemptions = preemptions


@pytest.fixture
def bed(tmp_path: Path) -> Bed:
    return Bed(tmp_path)


def test_nodes_get_the_expected_starts_and_the_prices(bed: Bed) -> None:
    job, attempt = bed.add_job(replace(TASK, goal=Goal(work_hours=10.0, hour_value_usd=4.0)))
    order = bed.order(job, attempt)
    assert order is not None
    assert order["place"] == "s3://bucket/runs/me-setups" and order["setup_chars"] == len("pip install .")
    assert order["starts"] == 3.5 and order["usd_hour"] == 2 * 3.0 + 4.0
    assert order["usd_gib_read"] == 0.0, "aws reads s3"
    assert order["usd_gib_kept"] == pytest.approx(2**30 / 1e9 * 0.023 * 14 / (730 / 24))
    assert order["mounts"] == ["~/data"] and order["checks_system"] and not order["is_fresh"]
    assert bed.planned[0].goal == Goal(work_hours=10.0, hour_value_usd=4.0), "the rest of the work is forecast"
    assert list_places(bed.store) == ["s3://bucket/runs/me-setups"], "known before a node may write there"


@pytest.mark.parametrize(("given_usd", "worth_usd"), [(None, 0.02 * 2 * 9.0), (0.0, 0.0), (4.0, 4.0)])
def test_an_hour_is_worth_as_much_as_in_the_plan(bed: Bed, given_usd: float | None, worth_usd: float) -> None:
    """Two nodes cost 18 USD/h on-demand, and 6 on spot."""
    job, attempt = bed.add_job(replace(TASK, goal=Goal(work_hours=10.0, hour_value_usd=given_usd)))
    bed.cache = SetupCache(
        bed.store, lambda task, avoid: rank(task, [OFFER], prices_as_of="2026-11-01"), bed.clock, bed.config
    )
    order = bed.order(job, attempt)
    assert order is not None and order["usd_hour"] == pytest.approx(6.0 + worth_usd)


@pytest.mark.parametrize(
    "task",
    [
        replace(TASK, recovery=JobRecovery()),
        replace(TASK, setup=None),
        replace(TASK, checkpoint=CheckpointSpec()),
    ],
)
def test_nothing_is_cached_without_request_setup_or_place(bed: Bed, task: Task) -> None:
    assert bed.order(*bed.add_job(task)) is None and list_places(bed.store) == []


def test_processes_of_this_machine_use_a_folder_of_the_state(bed: Bed, tmp_path: Path) -> None:
    job, attempt = bed.add_job(replace(TASK, checkpoint=CheckpointSpec()))
    order = bed.order(job, attempt, handle="/node")
    assert order is not None and order["place"] == str(tmp_path / "checkpoints" / "setups")
    assert (order["usd_gib_kept"], order["usd_gib_read"], order["checks_system"]) == (0.0, 0.0, False)


@pytest.mark.parametrize(
    ("number", "is_spot", "preemptions", "starts"),
    [(1, True, 0.2, 0.2), (9, True, 0.2, 0.2), (1, True, None, 1.0), (4, True, None, 3.0), (4, False, None, 0.0)],
)
def test_starts_are_those_of_the_forecast_or_as_many_as_before(
    bed: Bed, number: int, is_spot: bool, preemptions: float | None, starts: float
) -> None:
    job, attempt = bed.add_job()
    attempt = replace(attempt, number=number, placement=replace(PLACEMENT, is_spot=is_spot))
    assert expect_starts(job, attempt, preemptions) == starts


def test_job_without_any_remaining_offer_has_no_forecast(bed: Bed) -> None:
    bed.preemptions = None
    order = bed.order(*bed.add_job(replace(TASK, goal=Goal(work_hours=10.0))))
    assert order is not None and order["starts"] == 1.0


def test_bucket_of_another_cloud_costs_egress_for_each_node_that_reads() -> None:
    price = price_gib(PLACEMENT, "gs://bucket/setups")
    assert price.read == pytest.approx(2 * 2**30 / 1e9 * 0.12)
    assert price.kept > price_gib(PLACEMENT, "s3://bucket/setups").kept, "the upload leaves the cloud too"


@pytest.mark.parametrize(
    ("kind", "is_fresh"), [(OutcomeKind.PROGRAM_FAILED, True), (OutcomeKind.PREEMPTED, False), (None, False)]
)
def test_setup_runs_again_after_a_program_failed(bed: Bed, kind: OutcomeKind | None, is_fresh: bool) -> None:
    job, attempt = bed.add_job()
    earlier = replace(attempt, outcome=kind and Outcome(kind=kind))
    order = bed.order(replace(job, attempts=(earlier,)), replace(attempt, number=2))
    assert order is not None and order["is_fresh"] is is_fresh


def make_report(*setups: SetupResult) -> Report:
    return Report(status=RunStatus.RUNNING, returncode=None, unreachable=(), progress=None, setups=setups)


def test_each_result_is_reported_once_even_by_a_new_controller(bed: Bed) -> None:
    job, attempt = bed.add_job()
    kept = SetupResult(rank=0, result="kept", setup_s=60.0, size_bytes=2**30)
    used = [SetupResult(rank=rank, result="used", setup_s=60.0, took_s=10.0 * (1 + rank)) for rank in (0, 1)]
    for report in (make_report(), make_report(kept), make_report(kept)):
        bed.cache.report(job, attempt, report)
    bed.cache = bed.restart()
    bed.cache.report(job, attempt, make_report(kept))
    bed.cache.report(job, replace(attempt, number=2), make_report(*used))
    told = bed.store.events.list(job_id=job.id)
    assert [each.kind for each in told] == [EventKind.SETUP_KEPT, EventKind.SETUP_RESTORED]
    assert told[0].message == "kept the files of `setup`, which took 60.0 s, for later starts: 1.00 GiB"
    # The slowest node took 20 s instead of 60: 40 s of the gang at 6 USD/h.
    assert told[1].data["saved_usd"] == pytest.approx(40 / 3600 * 6.0)
    assert told[1].message.startswith("`setup` was skipped on 2 nodes")


def fill(folder: Path, name: str, *, age_days: float, now_s: float, used_days: float | None = None) -> None:
    for key, days in (("manifest", age_days), ("ab.part", age_days), ("used.json", used_days)):
        if days is not None:
            path = folder / name / key
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"12345")
            os.utime(path, (now_s - days * 86400, now_s - days * 86400))


@pytest.mark.parametrize("make_place", [str, lambda path: f"file://{path}"])
def test_archives_expire_after_their_last_use_and_so_do_incomplete_ones(
    tmp_path: Path, make_place: Callable[[Path], str]
) -> None:
    now_s, place = 1e9, make_place(tmp_path)
    fill(tmp_path, "new", age_days=1, now_s=now_s)
    fill(tmp_path, "old", age_days=KEPT_DAYS + 1, now_s=now_s)
    fill(tmp_path, "old-but-used", age_days=100, used_days=KEPT_DAYS - 1, now_s=now_s)
    fill(tmp_path, "interrupted", age_days=KEPT_DAYS + 1, now_s=now_s)
    (tmp_path / "interrupted" / "manifest").unlink()
    archives = list_archives(place)
    assert {each.name: each.size_bytes for each in archives} == {
        "new": 10, "old": 10, "old-but-used": 15, "interrupted": 5,
    }  # fmt: skip
    assert {each.name for each in choose_expired(archives, now_s=now_s)} == {"old", "interrupted"}
    assert all(each.keys[0].endswith("manifest") for each in archives if each.name != "interrupted")
    assert forget_archives([place, "nowhere://x"], now_s=now_s).keys() == {"nowhere://x"}
    assert {each.name for each in list_archives(place)} == {"new", "old-but-used"}


def test_places_are_remembered_once_and_a_damaged_row_is_rewritten(bed: Bed) -> None:
    for place in ("s3://a", "s3://b", "s3://a"):
        record_place(bed.store, place)
    assert list_places(bed.store) == ["s3://a", "s3://b"]
    bed.store.meta.put(ROW, "{")
    record_place(bed.store, "s3://a")
    assert list_places(bed.store) == ["s3://a"]
