"""The next place of a job after a loss, and the rest of its goal by then."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from broker.jobs.replanning import cut_to_rest, drop_limits, measure_begun_start, order_plan
from broker.types import (
    Attempt,
    CheckpointSpec,
    Estimate,
    Goal,
    Job,
    JobRecovery,
    JobStatus,
    Offer,
    Outcome,
    OutcomeKind,
    Placement,
    Plan,
    Progress,
    Task,
)
from tests.simulation.world import make_offer


def make_placement(region: str, zone: str, *, kind: str = "big", is_spot: bool = True, nodes: int = 2) -> Placement:
    base = make_offer("east1a")
    offer: Offer = replace(base, region=region, zone=f"{region}{zone}", instance_type=kind, ondemand_usd_hour=9.0)
    return Placement(offer=offer, is_spot=is_spot, node_count=nodes)


HERE = make_placement("east1", "a")
NEXT_ZONE = make_placement("east1", "b")
FAR = make_placement("west1", "a")
OTHER_KIND = make_placement("east1", "a", kind="small")
ON_DEMAND = make_placement("east1", "a", is_spot=False)
FEWER = make_placement("east1", "a", nodes=1)


def order(strategy: str | None, *placements: Placement) -> list[Placement]:
    task = Task(recovery=JobRecovery(strategy=strategy, stall_timeout_s=9.0))
    plan = Plan(
        task=task,
        estimates=tuple(Estimate(placement=each) for each in placements),
        rejections=(),
        prices_as_of="",
        reason="",
    )
    lost = Attempt(job_id=1, number=1, cluster="c", placement=FAR, started_s=0.0)
    last = Attempt(job_id=1, number=2, cluster="c", placement=HERE, started_s=0.0)
    assert order_plan(plan, ()) is plan
    return [each.placement for each in order_plan(plan, (lost, last)).estimates]


def test_the_default_tries_the_same_place_then_its_zones_then_the_plans_order() -> None:
    others = (FAR, OTHER_KIND, ON_DEMAND, FEWER)
    assert order(None, *others, NEXT_ZONE, HERE) == [HERE, NEXT_ZONE, *others]


def test_eager_leaves_the_region_that_took_the_nodes_and_cheapest_keeps_the_plan() -> None:
    placements = (HERE, NEXT_ZONE, ON_DEMAND, FAR)
    assert order("eager_next_region", *placements) == [FAR, HERE, NEXT_ZONE, ON_DEMAND]
    assert order("cheapest", *placements) == list(placements)


def test_the_same_region_name_of_another_cloud_is_another_region() -> None:
    elsewhere = replace(HERE, offer=replace(HERE.offer, cloud="another"))
    assert order("eager_next_region", HERE, elsewhere) == [elsewhere, HERE]
    assert order(None, elsewhere, NEXT_ZONE) == [NEXT_ZONE, elsewhere]


GOAL = Goal(work_hours=10.0, deadline_hours=24.0, budget_usd=100.0)


def make_job(goal: Goal | None = GOAL, *, attempts: int = 1, progress: Progress | None = None) -> Job:
    attempt = Attempt(job_id=1, number=1, cluster="c", placement=HERE, started_s=0.0)
    task = Task(goal=goal, checkpoint=CheckpointSpec(restart_s=360.0))
    return Job(
        id=1, name="j", status=JobStatus.RUNNING, task=task, submitted_s=1000.0,
        attempts=(attempt,) * attempts, progress=progress,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("progress", "work_hours"),
    [
        (None, 10.0),
        (Progress(step=90, total=100), 10.0),
        (Progress(step=90, total=100, checkpoint_step=0), 10.0),
        (Progress(step=90, total=100, checkpoint_step=60), 4.0),
        (Progress(step=90, checkpoint_step=60), 10.0),
        (Progress(step=100, total=100, checkpoint_step=100), 0.0),
        (Progress(step=150, total=100, checkpoint_step=150), 0.0),
        (Progress(step=90, total=-1, checkpoint_step=60), 10.0),
        (Progress(step=90, total=100, checkpoint_step=-1), 10.0),
    ],
)
def test_work_is_cut_by_the_share_of_steps_that_are_saved(progress: Progress | None, work_hours: float) -> None:
    rest = cut_to_rest(make_job(progress=progress), now_s=1000.0, spent_usd=0.0).goal
    assert rest is not None and rest.work_hours == pytest.approx(work_hours)


def test_used_time_and_money_are_deducted_but_never_below_zero() -> None:
    rest = cut_to_rest(make_job(), now_s=1000.0 + 4 * 3600.0, spent_usd=30.0).goal
    assert rest is not None
    assert (rest.deadline_hours, rest.budget_usd) == (pytest.approx(20.0), pytest.approx(70.0)), "plans count the start"
    assert cut_to_rest(make_job(attempts=0), now_s=1000.0 + 4 * 3600.0, spent_usd=30.0).goal == rest
    late = cut_to_rest(make_job(), now_s=1000.0 + 99 * 3600.0, spent_usd=130.0).goal
    assert late is not None and (late.deadline_hours, late.budget_usd) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("fields", "hours"),
    [
        ({}, 0.1),  # six minutes of the start are over
        ({"resumed_s": 4000.0}, 0.1),  # the first step comes later
        ({"resumed_s": 1200.0}, 0.25),
        ({"resumed_s": 1200.0, "lost_s": 1300.0}, 0.0),
        ({"resumed_s": 1200.0, "lost_s": 4000.0, "outcome": Outcome(kind=OutcomeKind.PREEMPTED)}, 0.25),
        ({"ended_s": 1300.0}, 0.0),
        ({"outcome": Outcome(kind=OutcomeKind.LAUNCH_FAILED)}, 0.0),
        ({"started_s": 1400.0}, 0.0),
        ({"started_s": 0.0}, 0.25),  # the start takes longer than planned
    ],
)
def test_the_start_that_running_machines_have_behind_them(fields: dict[str, Any], hours: float) -> None:
    attempt = replace(Attempt(job_id=1, number=2, cluster="c", placement=HERE, started_s=1000.0), **fields)
    job = replace(
        make_job(), attempts=(Attempt(job_id=1, number=1, cluster="c", placement=FAR, started_s=0.0), attempt)
    )
    job = job if attempt.started_s <= 1360.0 else replace(job, attempts=(attempt,))
    found = measure_begun_start(job, start_hours=0.25, now_s=1360.0)
    assert found.hours == pytest.approx(hours)
    assert measure_begun_start(make_job(attempts=0), start_hours=0.25, now_s=1360.0).hours == 0.0
    elsewhere = replace(job, attempts=(replace(attempt, placement=ON_DEMAND),))
    assert not measure_begun_start(elsewhere, start_hours=0.25, now_s=1360.0).is_spot or not hours


def test_unset_goal_fields_stay_unset() -> None:
    job = make_job(Goal(confidence=0.5), progress=Progress(step=9, total=10, checkpoint_step=9))
    assert cut_to_rest(job, now_s=99_999.0, spent_usd=9.0).goal == Goal(confidence=0.5)
    assert cut_to_rest(make_job(None), now_s=99_999.0, spent_usd=9.0).goal is None


def test_a_late_job_loses_its_deadline_and_keeps_its_budget() -> None:
    assert drop_limits(Task(goal=GOAL)).goal == replace(GOAL, deadline_hours=None)
    assert drop_limits(Task()).goal is None
