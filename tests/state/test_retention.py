"""Retention: ended jobs become totals, so the file stays bounded, and the sums stay exact."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from pathlib import Path

import pytest

from broker.clock import SystemClock
from broker.errors import StateError
from broker.state.limits import Limit, LimitScope
from broker.state.people import Owned, Role
from broker.state.retention import split_by_month
from broker.state.store import Store
from broker.types import (
    Attempt,
    Cluster,
    ClusterStatus,
    EventKind,
    IntentEnd,
    JobStatus,
    Node,
    NodeRequest,
    NodeState,
    Outcome,
    OutcomeKind,
    Placement,
    Progress,
    Task,
    make_event,
)
from tests.simulation.world import make_offer

DAY_S = 86400.0
NOW_S = 1_795_000_000.0


class Hands:
    """A clock that moves only when it is set or slept on."""

    time_s = NOW_S

    def now_s(self) -> float:
        return self.time_s

    async def sleep(self, duration_s: float) -> None:
        self.time_s += duration_s


def run_job(
    store: Store, clock: Hands, *, begin_s: float, hours: float = 2.0, usd_hour: float = 1.0, **job: object
) -> int:
    """Record the whole life of a job with one attempt on one node."""
    clock.time_s = begin_s
    found = store.jobs.add("train", Task(name="train", run="x"), **job)  # type: ignore[arg-type]
    name = found.name_cluster(found.next_attempt)
    placement = Placement(offer=make_offer("east1a"), is_spot=bool(found.id % 2), node_count=1)
    attempt = {"job_id": found.id, "number": 1, "cluster": name, "placement": placement, "started_s": begin_s}
    end_s = clock.time_s = begin_s + hours * 3600
    store.jobs.put_attempt(Attempt(**attempt, ended_s=end_s, outcome=Outcome(kind=OutcomeKind.SUCCEEDED)))  # type: ignore[arg-type]
    store.jobs.set_progress(found.id, Progress(step=10))
    node = Node(
        id=f"n-{found.id}", cloud="aws" if found.id % 3 else "gcp", owner="me", cluster=name, attempt=1, rank=0,
        state=NodeState.TERMINATED, is_spot=placement.is_spot, usd_hour=usd_hour, created_s=begin_s, ended_s=end_s,
    )  # fmt: skip
    store.bills.record(node)
    store.write("UPDATE nodes SET job_id = ? WHERE id = ?", (found.id, node.id))
    store.jobs.set_status(found.id, JobStatus.SUCCEEDED)
    return found.id


def test_jobs_that_count_towards_a_monthly_budget_are_kept(sqlite_store: Store, clock: Hands) -> None:
    store = sqlite_store
    for age_days in (40.0, 33.0, 30.0, 2.0, 1.0):
        run_job(store, clock, begin_s=NOW_S - age_days * DAY_S)
    clock.time_s = NOW_S
    store.limits.put(Limit(scope=LimitScope.USER, name="ada", usd_month=9.0, gpus=None))
    assert store.retention.compact(keep_days=1.5, ended_jobs_max=1) == 2
    assert len(store.jobs.list()) == 3 and len(store.bills.list()) == 3
    store.limits.delete(LimitScope.USER, "ada")
    assert store.retention.compact(keep_days=90.0, ended_jobs_max=1) == 2


def test_equal_costs_of_pruned_and_kept_bills_of_a_cloud_both_count(store: Store, clock: Hands) -> None:
    for begin_s in (NOW_S - 200 * DAY_S, NOW_S - 2 * DAY_S):
        clock.time_s = begin_s + 2 * 3600
        run_job(store, clock, begin_s=begin_s, hours=1.0, usd_hour=4.0)
    clock.time_s = NOW_S
    before = store.bills.list_cloud_spend_usd(now_s=NOW_S)
    assert store.retention.compact() == 1
    assert store.bills.list_cloud_spend_usd(now_s=NOW_S) == pytest.approx(before)
    assert store.bills.list_cloud_spend_usd(now_s=NOW_S) == pytest.approx({"aws": 8.0})


@pytest.mark.parametrize("count", [2_000, pytest.param(10_000, marks=pytest.mark.exhaustive)])
def test_jobs_of_three_years_become_totals_to_the_cent(sqlite_store: Store, clock: Hands, count: int) -> None:
    store = sqlite_store
    draw = random.Random(13)
    begins_s = sorted(NOW_S - draw.uniform(1.0, 3 * 365.0) * DAY_S for _ in range(count))
    with store.transaction(is_durable=False):
        for begin_s in begins_s:
            run_job(store, clock, begin_s=begin_s, hours=draw.uniform(0.1, 40.0), usd_hour=draw.uniform(0.1, 30.0))
    clock.time_s = NOW_S
    before_usd = store.bills.spend_usd(now_s=NOW_S)
    by_cloud = sum_by_cloud(store)
    store.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    before_bytes = store.path.stat().st_size
    pruned = store.retention.compact()
    store.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    assert 0.85 * count < pruned < 0.97 * count and store.jobs.count() == count - pruned
    assert store.bills.spend_usd(now_s=NOW_S) == pytest.approx(before_usd, abs=0.005)
    assert sum_by_cloud(store) == pytest.approx(by_cloud, abs=0.005)
    assert store.bills.list_cloud_spend_usd(now_s=NOW_S) == pytest.approx(
        {cloud: usd for cloud, usd in by_cloud.items() if usd}, abs=0.005
    )
    sums = store.bills.sum_spend(midnight_s=NOW_S, month_s=NOW_S, now_s=NOW_S)
    assert sums.total_usd == pytest.approx(before_usd, abs=0.005), "as `broker cost` and the dashboard show it"
    assert store.path.stat().st_size < before_bytes / 4, "free pages are returned"
    assert {row[0] for row in store.rows("SELECT DISTINCT job_id FROM attempts")} == {j.id for j in store.jobs.list()}
    assert len(store.retention.list_totals()) < 40 * 2 * 2, "months, clouds and pricings, not jobs"
    assert store.retention.compact() == 0 and store.bills.spend_usd(now_s=NOW_S) == pytest.approx(before_usd, abs=0.005)


def sum_by_cloud(store: Store) -> dict[str, float]:
    found = {"aws": 0.0, "gcp": 0.0}
    for bill in store.bills.list():
        assert bill.ended_s is not None
        found[bill.cloud] += bill.usd_hour * (bill.ended_s - bill.created_s) / 3600
    for total in store.retention.list_totals():
        found[total.cloud] += total.usd
    return found


def test_old_jobs_stay_while_a_younger_one_needs_or_resumes_them(store: Store, clock: Hands) -> None:
    old_s, young_s = NOW_S - 200 * DAY_S, NOW_S - 2 * DAY_S
    gone, needed, first = (run_job(store, clock, begin_s=old_s) for _ in range(3))
    between = run_job(store, clock, begin_s=old_s + 1, needs=[needed])
    young = run_job(store, clock, begin_s=young_s, needs=[between])
    retried = run_job(store, clock, begin_s=young_s, resumes=store.jobs.get(first))
    clock.time_s = NOW_S
    assert store.retention.compact() == 1
    assert [job.id for job in store.jobs.list()] == [needed, first, between, young, retried]
    assert store.jobs.get(gone) is None and not store.jobs.list_attempts(gone) and not store.jobs.list_steps(gone)


@pytest.mark.parametrize("damaged", ["[1", "7", '["a"]', "[[1]]", ""])
def test_a_damaged_row_does_not_prevent_pruning_of_others(store: Store, clock: Hands, damaged: str) -> None:
    gone = run_job(store, clock, begin_s=NOW_S - 200 * DAY_S)
    young = run_job(store, clock, begin_s=NOW_S - 2 * DAY_S)
    store.write("UPDATE jobs SET needs = ? WHERE id = ?", (damaged, young))
    clock.time_s = NOW_S
    assert store.retention.compact() == 1 and store.jobs.get(gone) is None
    assert store.jobs.list_live_ids() == [] and store.jobs.count() == 1


def test_a_damaged_end_keeps_its_job_and_nothing_else(sqlite_store: Store, clock: Hands) -> None:
    gone, damaged = (run_job(sqlite_store, clock, begin_s=NOW_S - 200 * DAY_S) for _ in range(2))
    sqlite_store.write("DROP TRIGGER jobs_terminal", ())
    sqlite_store.write("UPDATE jobs SET ended_s = 'yesterday' WHERE id = ?", (damaged,))
    clock.time_s = NOW_S
    assert sqlite_store.retention.compact() == 1
    assert sqlite_store.jobs.get(gone) is None and sqlite_store.jobs.count() == 1


def test_jobs_that_still_have_machines_or_run_stay_however_old(store: Store, clock: Hands) -> None:
    old_s = NOW_S - 200 * DAY_S
    billed, opened = run_job(store, clock, begin_s=old_s), run_job(store, clock, begin_s=old_s)
    store.write("UPDATE nodes SET ended_s = NULL WHERE job_id = ?", (billed,))
    attempt = store.jobs.list_attempts(opened)[0]
    store.jobs.put_attempt(replace(attempt, ended_s=None))
    live = store.jobs.add("live", Task()).id
    clock.time_s = NOW_S
    assert store.retention.compact() == 0 and {job.id for job in store.jobs.list()} == {billed, opened, live}


def test_only_the_newest_ended_jobs_are_kept(store: Store, clock: Hands) -> None:
    ids = [run_job(store, clock, begin_s=NOW_S - DAY_S + n) for n in range(10)]
    usd = store.bills.spend_usd(now_s=NOW_S)
    clock.time_s = NOW_S
    assert store.retention.compact(ended_jobs_max=4) == 6
    assert [job.id for job in store.jobs.list()] == ids[-4:]
    assert store.bills.spend_usd(now_s=NOW_S) == pytest.approx(usd)


def test_ids_of_pruned_jobs_are_not_given_out_again_and_terminal_ones_still_never_change(
    store: Store, clock: Hands
) -> None:
    last = run_job(store, clock, begin_s=NOW_S - 200 * DAY_S)
    clock.time_s = NOW_S
    assert store.retention.compact(keep_days=1) == 1
    new = store.jobs.add("next", Task())
    assert new.id > last
    store.jobs.set_status(new.id, JobStatus.FAILED)
    assert not store.jobs.set_status(new.id, JobStatus.SUCCEEDED)


def test_bills_of_clusters_without_a_job_are_added_up_too(store: Store, clock: Hands) -> None:
    def make(name: str, ended_s: float | None) -> Node:
        return Node(
            id=name, cloud="aws", owner="me", cluster="dev", attempt=1, rank=0, state=NodeState.RUNNING,
            usd_hour=3.0, created_s=NOW_S - 200 * DAY_S, ended_s=ended_s,
        )  # fmt: skip

    for node in (make("old", NOW_S - 199 * DAY_S), make("running", None)):
        store.bills.record(node)
    usd = store.bills.spend_usd(now_s=NOW_S)
    store.retention.compact()
    assert [bill.node for bill in store.bills.list()] == ["running"]
    (total,) = store.retention.list_totals()
    assert (total.cloud, total.pricing, total.usd) == ("aws", "on-demand", pytest.approx(72.0))
    assert store.bills.spend_usd(now_s=NOW_S) == pytest.approx(usd)


def test_what_an_old_cluster_that_still_exists_has_cost_and_requested_is_kept(store: Store, clock: Hands) -> None:
    """A cluster that is stopped for months: its cost is shown, and its tokens tell its machines from others."""
    placement = Placement(offer=make_offer("east1a"), is_spot=False, node_count=1)
    clock.time_s = NOW_S - 200 * DAY_S
    for name in ("kept", "gone"):
        store.clusters.put(Cluster(name=name, placement=placement, status=ClusterStatus.STOPPED, attempt=1))
        store.intents.put(NodeRequest(owner="me", cluster=name, attempt=1, token=name, placement=placement))
        store.intents.close(name, IntentEnd.UP)
        node = Node(
            id=name, cloud="aws", owner="me", cluster=name, attempt=1, rank=0, state=NodeState.STOPPED,
            usd_hour=3.0, created_s=NOW_S - 200 * DAY_S, ended_s=NOW_S - 199 * DAY_S,
        )  # fmt: skip
        store.bills.record(node)
    store.clusters.delete("gone")
    clock.time_s = NOW_S
    store.retention.compact()
    assert store.bills.spend_usd(cluster="kept", now_s=NOW_S) == pytest.approx(72.0)
    assert store.intents.list_tokens("kept") == {"kept"} and store.intents.list_tokens("gone") == frozenset()
    pruned_s = store.retention.get_pruned_before_s()
    assert pruned_s == NOW_S - 199 * DAY_S
    run_job(store, clock, begin_s=NOW_S - 300 * DAY_S)
    clock.time_s = NOW_S
    assert store.retention.compact() == 1 and store.retention.get_pruned_before_s() == pruned_s


def test_a_bill_is_split_at_new_year() -> None:
    midnight_s = 1_798_761_600.0  # 2027-01-01 in UTC
    assert list(split_by_month(midnight_s - 60, midnight_s + 30)) == [("2026-12", 60.0), ("2027-01", 30.0)]


def test_events_of_pruned_jobs_leave_when_they_are_old(tmp_path: Path) -> None:
    """The trigger on events compares with the real time, so the test uses it too."""
    clock = Hands()
    store = Store(tmp_path / "real.db", clock=clock)
    begin_s = time.time() - 200 * DAY_S
    job_id = run_job(store, clock, begin_s=begin_s)
    store.events.add(make_event(EventKind.NOTE, text="SUCCEEDED"), job_id=job_id)
    clock.time_s = SystemClock().now_s()
    assert store.retention.compact() == 1 and not store.events.list(job_id=job_id)


def test_by_default_a_quarter_of_a_year_is_kept_and_no_setting_shortens_that_for_events(tmp_path: Path) -> None:
    """The trigger on events compares with the real time, so the test uses it too."""
    clock = Hands()
    store = Store(tmp_path / "real.db", clock=clock)
    now_s = time.time()
    old, recent = (run_job(store, clock, begin_s=now_s - days * DAY_S) for days in (100, 80))
    for days in (100, 80):
        clock.time_s = now_s - days * DAY_S
        store.events.add(make_event(EventKind.NOTE, text=f"{days} days ago"))
    clock.time_s = now_s
    assert store.retention.compact() == 1
    assert store.jobs.get(old) is None and store.jobs.get(recent) is not None
    assert store.retention.compact(keep_days=1) == 1 and store.jobs.get(recent) is None
    assert [event.message for event in store.events.list()] == ["80 days ago"]
    with pytest.raises(StateError, match="append-only"):
        store.write("DELETE FROM events", ())


def test_on_demand_price_of_pruned_machines_stays_in_its_total(store: Store, clock: Hands) -> None:
    for days in (400, 300, 2):
        run_job(store, clock, begin_s=NOW_S - days * DAY_S, usd_hour=0.25)
    clock.time_s = NOW_S
    before_usd = store.bills.ondemand_total_usd(now_s=NOW_S)
    assert before_usd == pytest.approx(3 * 2.0 * make_offer("east1a").ondemand_usd_hour)  # type: ignore[operator]
    for _ in range(2):  # in two parts, which are added up
        assert store.retention.compact(keep_days=350 if store.jobs.count() == 3 else 90) == 1
        assert store.bills.ondemand_total_usd(now_s=NOW_S) == pytest.approx(before_usd)
    store.meta.put("pruned_saved_usd", "damaged")
    assert store.bills.ondemand_total_usd(now_s=NOW_S) < before_usd


def test_what_a_server_recorded_for_pruned_work_is_pruned_with_it(store: Store, clock: Hands) -> None:
    """A server adds a row for each launch and each login, and its queue reads all commitments every second."""
    now_s = clock.time_s

    def commit(kind: Owned, *names: str, days: float) -> int:
        clock.time_s = now_s - days * DAY_S
        return store.commitments.add(
            user="ada", project="vision", kind=kind, names=names, usd=None, usd_hour=1.0, gpus=1.0
        )

    old, young = (run_job(store, clock, begin_s=now_s - days * DAY_S) for days in (100.0, 10.0))
    for job_id in (old, young):
        store.owners.put(Owned.JOB, str(job_id), "ada")
    store.owners.put(Owned.CLUSTER, "dev", "ada")
    placement = Placement(offer=make_offer("east1a"), is_spot=False, node_count=1)
    store.clusters.put(Cluster(name="dev", placement=placement, status=ClusterStatus.UP, attempt=1))
    gone = [commit(Owned.JOB, str(old), days=100.0), commit(Owned.CLUSTER, "ended", days=100.0)]
    kept = [
        commit(Owned.JOB, str(old), str(young), days=100.0), commit(Owned.CLUSTER, "dev", days=100.0),
        commit(Owned.SERVICE, "web", "uid", days=100.0), commit(Owned.CLUSTER, "ended", days=10.0),
    ]  # fmt: skip
    for name, expires_s in (("a", now_s - 100 * DAY_S), ("b", now_s - DAY_S), ("c", None)):
        store.tokens.add(digest=name, user="ada", role=Role.USER, expires_s=expires_s)
    clock.time_s = now_s
    assert store.retention.compact(keep_days=90.0) == 1
    assert [each.id for each in store.commitments.list()] == sorted(kept) and not set(gone) & set(kept)
    assert set(store.owners.list()) == {(Owned.JOB, str(young)), (Owned.CLUSTER, "dev")}
    assert [each.id for each in store.tokens.list()] == [2, 3]
