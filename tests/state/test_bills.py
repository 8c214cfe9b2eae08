"""Sums over bills and jobs that the overview shows, on every backend."""

from __future__ import annotations

from dataclasses import replace

import pytest

from broker.types import Attempt, EventKind, Goal, Placement, Task
from broker.types.outcomes import make_event
from tests.clouds.beds import make_node
from tests.simulation.world import make_offer
from tests.state.conftest import OpenStore
from tests.state.samples import START_S

HOUR_S = 3600.0


def test_ondemand_cost_takes_the_price_of_the_attempt_within_the_period(open_store: OpenStore) -> None:
    store = open_store()
    job = store.jobs.add("train", Task(run="true"))
    offer = replace(make_offer("east1a"), ondemand_usd_hour=3.0)
    attempt = Attempt(
        job_id=job.id, number=1, cluster="job-1-1", placement=Placement(offer=offer, is_spot=True, node_count=1),
        started_s=START_S,
    )  # fmt: skip
    store.jobs.put_attempt(attempt)
    store.jobs.put_attempt(replace(attempt, number=2, cluster="job-1-2", placement=replace(
        attempt.placement, offer=replace(offer, ondemand_usd_hour=None)
    )))  # fmt: skip
    for cluster in ("job-1-1", "job-1-2", "dev"):
        store.bills.record(replace(make_node(cluster), cluster=cluster, usd_hour=1.0, created_s=START_S))
        store.write("UPDATE nodes SET job_id = ? WHERE cluster = ? AND cluster <> 'dev'", (job.id, cluster))
    store.jobs.put_attempt(replace(attempt, number=3))  # it restarted in place
    now_s = START_S + 2 * HOUR_S
    assert store.bills.ondemand_since_usd(0.0, now_s=now_s, job_id=job.id) == pytest.approx(2 * (3.0 + 1.0))
    assert store.bills.ondemand_since_usd(0.0, now_s=now_s, job_id=job.id + 1) == 0.0
    assert store.bills.ondemand_since_usd(START_S + HOUR_S, now_s=now_s) == pytest.approx(3.0 + 1.0 + 1.0)
    sums = store.bills.sum_spend(midnight_s=now_s, month_s=START_S + HOUR_S, now_s=now_s)
    assert sums.month_usd == pytest.approx(3.0)
    assert store.bills.ondemand_since_usd(now_s, now_s=now_s) == 0.0
    assert store.bills.ondemand_total_usd(now_s=now_s) == pytest.approx(2 * (3.0 + 1.0 + 1.0))


def test_budgets_and_events_of_one_kind_are_read(open_store: OpenStore) -> None:
    store = open_store()
    bounded = store.jobs.add("bounded", Task(run="true", goal=Goal(budget_usd=12.5))).id
    free = store.jobs.add("free", Task(run="true")).id
    assert store.jobs.list_goals([bounded, free]) == {bounded: 12.5}
    assert store.jobs.list_goals([]) == {}
    store.events.add(make_event(EventKind.NOTE, text="a"), job_id=free)
    store.events.add(make_event(EventKind.WAITING, minutes=1), job_id=free)
    now_s = store.clock.now_s()
    assert [each.data for each in store.events.list_kind(kind=EventKind.NOTE, since_s=now_s)] == [{"text": "a"}]
    assert store.events.list_kind(kind=EventKind.NOTE, since_s=now_s + 1) == []


def test_sums_of_today_and_of_the_month_come_from_one_read(open_store: OpenStore) -> None:
    store = open_store()
    month_s, midnight_s, now_s = START_S, START_S + 10 * HOUR_S, START_S + 12 * HOUR_S
    for name, begin_s, end_s in (
        ("over before the month", month_s - HOUR_S, month_s - 1),
        ("across the month's begin", month_s - HOUR_S, month_s + HOUR_S),
        ("across midnight", midnight_s - HOUR_S, midnight_s + HOUR_S),
        ("open", now_s - HOUR_S, None),
        ("ended before it began", now_s - HOUR_S, month_s),
    ):
        store.bills.record(replace(make_node(name), usd_hour=2.0, created_s=begin_s, ended_s=end_s))
    sums = store.bills.sum_spend(midnight_s=midnight_s, month_s=month_s, now_s=now_s)
    assert (sums.today_usd, sums.month_usd, sums.usd_hour) == pytest.approx((4.0, 8.0, 2.0))
    assert sums.total_usd == store.bills.spend_usd(now_s=now_s) > sums.month_usd
