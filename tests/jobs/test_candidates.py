"""A policy's view of a plan: the places, how they look from where the job is, and the work at risk."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from broker.jobs.availability import Availability, is_same_place, name_place
from broker.jobs.deadline import (
    HAZARD_MIN,
    Situation,
    advise_every_s,
    arrange,
    find_margin_hours,
    is_voluntary,
    read_situation,
)
from broker.jobs.kinds import ONDEMAND_MAX, SPOT_MAX
from broker.spot.durations import MET_HOURS, NOTHING_SEEN
from broker.spot.interval import find_best_interval_s
from broker.spot.policies.base import Candidate, Move
from broker.state.refusals import Refusal
from broker.types import (
    Attempt,
    Breakdown,
    CheckpointSpec,
    Estimate,
    Goal,
    Job,
    JobStatus,
    Outcome,
    OutcomeKind,
    Placement,
    Plan,
    Progress,
    Task,
)
from tests.simulation.world import make_offer

GOAL = Goal(work_hours=10.0, deadline_hours=24.0)
TASK = Task(goal=GOAL, checkpoint=CheckpointSpec(stall_s=36.0))
NOW_S = 100_000.0


def make_placement(zone: str, *, is_spot: bool = True, nodes: int = 2, usd: float = 1.0) -> Placement:
    offer = replace(make_offer("east1a"), zone=zone, spot_usd_hour=usd, ondemand_usd_hour=3 * usd)
    return Placement(offer=offer, is_spot=is_spot, node_count=nodes)


def make_estimate(zone: str, *, is_spot: bool = True, breakdown: Breakdown | None = None) -> Estimate:
    hazard = 0.2 if is_spot else 0.0
    return Estimate(placement=make_placement(zone, is_spot=is_spot), preemptions_per_hour=hazard, breakdown=breakdown)


def make_plan(*estimates: Estimate, goal: Goal | None = GOAL) -> Plan:
    return Plan(task=replace(TASK, goal=goal), estimates=estimates, rejections=(), prices_as_of="", reason="")


def attempt(placement: Placement, **fields: Any) -> Attempt:
    return Attempt(job_id=1, number=1, cluster="c", placement=placement, **{"started_s": NOW_S - 3600.0, **fields})


def read(
    plan: Plan,
    *,
    live: Attempt | None = None,
    attempts: tuple[Attempt, ...] = (),
    progress: Progress | None = None,
    refusals: tuple[Refusal, ...] = (),
    availability: dict[Any, Availability] | None = None,
    task: Task = TASK,
) -> Situation:
    job = Job(
        id=1, name="j", status=JobStatus.RUNNING, task=task, submitted_s=NOW_S - 7200.0,
        attempts=(*attempts, *((live,) if live else ())), progress=progress,
    )  # fmt: skip
    return read_situation(
        job, plan, now_s=NOW_S, refusals=refusals, durations={}, look_hours=0.25, availability=availability or {},
        spent_usd=1.5, live=live,
    )  # fmt: skip


def list_zones(situation: Situation) -> list[str | None]:
    return [each.placement.offer.zone for each in situation.candidates]


SPOTS = [make_estimate(f"s{n}") for n in range(12)]
ONDEMANDS = [make_estimate(f"d{n}", is_spot=False) for n in range(5)]


def test_the_first_places_of_each_pricing_model_and_the_present_one_are_considered() -> None:
    plan = make_plan(*SPOTS, *ONDEMANDS)
    first = [f"s{n}" for n in range(SPOT_MAX)] + [f"d{n}" for n in range(ONDEMAND_MAX)]
    assert (SPOT_MAX, ONDEMAND_MAX) == (8, 3)
    assert list_zones(read(plan)) == first
    assert list_zones(read(plan, live=attempt(SPOTS[10].placement))) == [*first, "s10"]
    assert list_zones(read(plan, live=attempt(ONDEMANDS[4].placement))) == [*first, "d4"]
    assert list_zones(read(plan, live=attempt(SPOTS[2].placement))) == first
    assert list_zones(read(make_plan(*ONDEMANDS, *SPOTS), live=attempt(ONDEMANDS[3].placement))) == [*first, "d3"]


def test_own_machines_that_refused_are_no_fallback_if_others_are() -> None:
    """They cost nothing, so a policy would wait for them beside any spot."""
    own = [Estimate(placement=make_placement(f"o{n}", is_spot=False, usd=0.0)) for n in range(4)]
    busy = tuple(
        Refusal(
            cloud="simulated", region="", zone=f"o{n}", instance_type="", is_spot=False, expires_s=9e9, reason="full"
        )
        for n in range(4)
    )
    plan = make_plan(*own, SPOTS[0], *ONDEMANDS)
    assert list_zones(read(plan)) == ["s0", "o0", "o1", "o2"]
    assert list_zones(read(plan, refusals=busy[:2])) == ["s0", "o2", "o3", "d0"]
    assert list_zones(read(plan, refusals=busy)) == ["s0", "d0", "d1", "d2"]
    assert list_zones(read(plan, refusals=busy, live=attempt(own[1].placement))) == ["s0", "o1", "d0", "d1"]
    lost = attempt(own[1].placement, lost_s=NOW_S - 60.0, outcome=Outcome(kind=OutcomeKind.NODE_LOST))
    assert list_zones(read(plan, refusals=busy, attempts=(lost,))) == ["s0", "d0", "d1", "d2"], "not even the last one"
    assert list_zones(read(make_plan(*own, SPOTS[0]), refusals=busy)) == ["s0", "o0", "o1", "o2"], (
        "nothing else is left"
    )
    paid = tuple(replace(each, zone="d0") for each in busy[:1])
    assert list_zones(read(make_plan(SPOTS[0], *ONDEMANDS), refusals=paid))[1] == "d0", "on-demand counts as open"


def test_the_last_location_is_considered_while_nothing_runs() -> None:
    plan = make_plan(*SPOTS, *ONDEMANDS)
    lost = attempt(SPOTS[11].placement, lost_s=NOW_S - 60.0, outcome=Outcome(kind=OutcomeKind.PREEMPTED))
    situation = read(plan, attempts=(lost,))
    assert (situation.view.current, situation.view.last) == (None, 11) and list_zones(situation)[11] == "s11"
    running = read(plan, attempts=(lost,), live=attempt(SPOTS[1].placement))
    assert (running.view.current, running.view.last) == (1, None)


@pytest.mark.parametrize(("left_hours", "own_hours", "speed"), [(5.0, 2.5, 2.0), (0.0, 2.5, 1.0), (5.0, 0.0, 1.0)])
def test_speed_of_a_location_follows_from_the_work_left_and_is_1_without_any(
    left_hours: float, own_hours: float, speed: float
) -> None:
    estimate = make_estimate("s0", breakdown=Breakdown(work_hours=own_hours))
    [candidate] = read(make_plan(estimate, goal=replace(GOAL, work_hours=left_hours))).candidates
    assert candidate.speed == speed and candidate.usd_work_hour > 0


def test_the_running_placement_remains_a_candidate_when_no_longer_for_sale() -> None:
    gone = make_placement("gone")
    situation = read(make_plan(SPOTS[0]), live=attempt(gone))
    assert list_zones(situation) == ["s0", "gone"] and situation.view.current == 1


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (make_placement("a", usd=9.0), True),
        (make_placement("b"), False),
        (make_placement("a", is_spot=False), False),
        (make_placement("a", nodes=3), False),
    ],
)
def test_a_location_is_the_same_at_any_price(other: Placement, expected: bool) -> None:
    assert is_same_place(make_placement("a"), other) is expected


def test_moving_costs_a_start_and_egress_and_staying_costs_neither() -> None:
    breakdown = Breakdown(work_hours=5.0, recovery_s=1800.0, egress_usd=4.0)
    estimates = [make_estimate("a", breakdown=breakdown), make_estimate("b", breakdown=breakdown), make_estimate("c")]
    here, there, bare = read(make_plan(*estimates), live=attempt(estimates[0].placement)).candidates
    assert (here.start_hours, here.move_usd, here.speed) == (0.5, 0.0, 2.0)
    assert (there.start_hours, there.move_usd, there.speed) == (0.5, 4.0, 2.0)
    assert (bare.start_hours, bare.move_usd, bare.speed) == (0.0, 0.0, 1.0)
    none_left = make_plan(make_estimate("a", breakdown=breakdown), goal=replace(GOAL, work_hours=0.0))
    assert read(none_left).candidates[0].speed == 1.0


def test_a_market_with_running_nodes_is_open_despite_refusals() -> None:
    known = Availability(is_open=True, since_s=NOW_S - 7200.0, met_s=NOW_S - 3600.0)
    places = {name_place(make_placement("b")): known}
    refusals = tuple(
        Refusal(cloud="simulated", region="", zone=zone, instance_type="", is_spot=True, expires_s=9e9, reason="full")
        for zone in ("a", "c")
    )
    plan = make_plan(make_estimate("a"), make_estimate("b"), make_estimate("c"), ONDEMANDS[0])
    here, open_, closed, ondemand = read(
        plan, live=attempt(make_placement("a")), refusals=refusals, availability=places
    ).candidates
    assert (here.is_open, here.is_watched) == (True, True)
    assert (open_.is_open, open_.is_watched, open_.age_hours) == (True, False, 2.0)
    assert (closed.is_open, closed.is_watched, closed.age_hours) == (False, False, MET_HOURS)
    assert here.age_hours == MET_HOURS + 1.0 and here.met_hours == MET_HOURS
    assert (ondemand.is_open, ondemand.is_watched, ondemand.seen) == (True, True, NOTHING_SEEN)


def test_times_refer_to_the_remaining_work() -> None:
    plan = make_plan(SPOTS[0], goal=replace(GOAL, work_hours=6.0))
    view = read(plan).view
    assert (view.work_left_hours, view.work_hours) == (6.0, 10.0)
    assert (view.time_left_hours, view.deadline_hours) == (22.0, 24.0)
    assert (view.look_hours, view.spent_usd) == (0.25 + find_margin_hours(GOAL), 1.5)
    assert find_margin_hours(GOAL) == 0.5
    assert find_margin_hours(replace(GOAL, deadline_hours=11.0)) == 0.25  # a quarter of the slack
    assert read(make_plan(SPOTS[0], goal=None)).view.work_left_hours == 10.0
    save_s = find_best_interval_s(36.0, 0.2)
    assert view.save_every_hours == pytest.approx((save_s + 36.0) / 3600)


def test_a_start_before_its_first_step_still_counts_as_starting() -> None:
    breakdown = Breakdown(work_hours=5.0, recovery_s=7200.0)
    plan = make_plan(make_estimate("a", breakdown=breakdown))
    here = make_placement("a")
    assert read(plan, live=attempt(here)).view.starting_hours == 1.0
    assert read(plan, live=attempt(here, started_s=NOW_S - 9000.0)).view.starting_hours == 0.0
    assert read(plan, live=attempt(here, resumed_s=NOW_S)).view.starting_hours == 0.0
    assert read(plan).view.starting_hours == 0.0


@pytest.mark.parametrize(
    ("progress", "hours"),
    [
        (None, 0.0),
        (Progress(step=50), 0.0),
        (Progress(step=50, total=100), 5.0),
        (Progress(step=50, total=100, checkpoint_step=40), 1.0),
        (Progress(step=50, total=100, checkpoint_step=60), 0.0),
        (Progress(step=120, total=100, checkpoint_step=90), 1.0),
    ],
)
def test_work_that_no_checkpoint_holds_is_at_risk_while_it_runs(progress: Progress | None, hours: float) -> None:
    plan, here = make_plan(SPOTS[0]), attempt(SPOTS[0].placement, resumed_s=NOW_S - 600.0)
    assert read(plan, live=here, progress=progress).view.unsaved_hours == pytest.approx(hours)
    starting = replace(here, resumed_s=None)
    assert read(plan, live=starting, progress=progress).view.unsaved_hours == 0.0, "it resumes from the checkpoint"
    lost = replace(here, lost_s=NOW_S, outcome=Outcome(kind=OutcomeKind.PREEMPTED))
    assert read(plan, attempts=(lost,), progress=progress).view.unsaved_hours == 0.0, "lost with the machines"


def test_saves_are_as_frequent_as_the_first_spot_place_asks_for() -> None:
    calm = [replace(ONDEMANDS[0], checkpoint_every_s=99.0), replace(SPOTS[0], checkpoint_every_s=7.0)]
    none = [replace(each, preemptions_per_hour=0.0) for each in calm]
    assert read(make_plan(*none)).view.save_every_hours == pytest.approx((7.0 + 36.0) / 3600)
    assert read(make_plan(ONDEMANDS[0])).view.save_every_hours == pytest.approx(36.0 / 3600)
    asked = replace(TASK, checkpoint=CheckpointSpec(stall_s=36.0, every_s=100.0))
    assert read(make_plan(*calm), task=asked).view.save_every_hours == pytest.approx(136.0 / 3600)
    assert advise_every_s(TASK, HAZARD_MIN / 2) == find_best_interval_s(36.0, HAZARD_MIN)
    assert advise_every_s(TASK, 2 * HAZARD_MIN) == find_best_interval_s(36.0, 2 * HAZARD_MIN)
    assert advise_every_s(replace(TASK, goal=None), HAZARD_MIN / 2) == find_best_interval_s(36.0, HAZARD_MIN / 2)


def test_a_plan_for_a_target_has_it_first_and_no_place_of_the_other_pricing() -> None:
    plan = make_plan(SPOTS[0], ONDEMANDS[0], SPOTS[1], SPOTS[2])
    arranged = arrange(plan, Candidate(placement=make_placement("s2", usd=9.0)))
    assert [each.placement.offer.zone for each in arranged.estimates] == ["s2", "s0", "s1"]


def test_only_leaving_spot_for_on_demand_cannot_wait_for_a_checkpoint() -> None:
    plan = make_plan(SPOTS[0], SPOTS[1], ONDEMANDS[0], ONDEMANDS[1])
    on_spot = read(plan, live=attempt(SPOTS[0].placement))
    on_demand = read(plan, live=attempt(ONDEMANDS[0].placement))
    spot, ondemand = (Move(target=on_spot.candidates[index]) for index in (1, 3))
    assert [is_voluntary(on_spot, move) for move in (spot, ondemand)] == [True, False]
    assert [is_voluntary(on_demand, move) for move in (spot, ondemand)] == [True, True]
    assert [is_voluntary(read(plan), move) for move in (spot, ondemand)] == [False, False]
