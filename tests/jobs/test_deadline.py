"""The deadline strategy in production: in time, back to spot when safe, and each decision explained in numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from broker.errors import CapacityError
from broker.jobs.availability import Availability
from broker.jobs.deadline import (
    Situation,
    advise_every_s,
    arrange,
    estimate_hazard,
    estimate_start_hazard,
    find_margin_hours,
    follows_deadline,
    has_saved_on_notice,
    is_safe_at,
    is_voluntary,
    loses_little,
    measure_start_hours,
    read_situation,
    record_decision,
)
from broker.jobs.replanning import cut_to_rest
from broker.jobs.setup_starts import RestoredStart, find_system
from broker.optimizer.planner import make_plan
from broker.spot.hazard import Observation, find_hazard_per_node_hour
from broker.spot.interval import find_best_interval_s
from broker.spot.market_model import find_hazard
from broker.spot.policies.base import Candidate, JobView, Move, Wait, find_finish_hours, have_one_speed
from broker.state.history import HALF_LIFE_DAYS, SpotStay, StepRange, gather_durations, weigh_stays
from broker.state.refusals import Refusal
from broker.types import (
    Attempt,
    CheckpointSpec,
    Cluster,
    EventKind,
    Goal,
    Job,
    JobRecovery,
    JobStatus,
    NodeRequest,
    Offer,
    Outcome,
    OutcomeKind,
    Placement,
    Plan,
    Progress,
    Resources,
    Task,
)
from broker.wording import describe_event
from tests.simulation.test_crashes import check, run_to_end
from tests.simulation.world import World, make_offer
from tests.tiers import long

STEPS = 400  # one a second
GOAL = Goal(work_hours=STEPS / 3600, deadline_hours=1.0)
TASK = Task(
    name="train",
    run="x",
    num_nodes=2,
    goal=GOAL,
    checkpoint=CheckpointSpec(stall_s=1.0, restart_s=30.0),
    resources=(Resources(cloud="simulated"),),
)
DAY_S = 86400.0
DEAR = replace(make_offer("east1a"), ondemand_usd_hour=20.0)


def plan_of(task: Task, *offers: Offer) -> Plan:
    return make_plan(task, offers or [make_offer("east1a"), make_offer("west1a")], prices_as_of="2026-11-01")


def test_a_policy_knows_what_an_hour_is_worth() -> None:
    task = replace(TASK, goal=replace(GOAL, hour_value_usd=3.0))
    situation = read_situation(
        make_job(task), plan_of(task), now_s=60.0, refusals=(), durations={}, availability={}, look_hours=0.1,
        spent_usd=0.0,
    )  # fmt: skip
    assert situation.view.hour_value_usd == 3.0


@pytest.mark.parametrize(("every_s", "ondemand_hours"), [(None, 10.1), (600.0, 11.1)])
def test_on_demand_takes_as_long_as_in_the_plan_with_the_stalls_of_a_fixed_interval(
    every_s: float | None, ondemand_hours: float
) -> None:
    """Ten hours with a stall of a minute every ten, and a start of six minutes."""
    checkpoint = CheckpointSpec(every_s=every_s, stall_s=60.0, restart_s=360.0)
    task = replace(TASK, goal=Goal(work_hours=10.0, deadline_hours=20.0), checkpoint=checkpoint)
    plan = plan_of(task)
    situation = read_situation(
        make_job(task), plan, now_s=0.0, refusals=(), durations={}, availability={}, look_hours=0.0, spent_usd=0.0
    )
    ondemand = next(each for each in situation.candidates if not each.is_spot)
    told = next(each for each in plan.estimates if not each.placement.is_spot)
    assert find_finish_hours(ondemand, situation.view.work_left_hours) == pytest.approx(told.expected_hours)
    assert told.expected_hours == pytest.approx(ondemand_hours)
    assert have_one_speed(situation.candidates, ondemand), "spot stalls as often"
    end = cut_to_rest(
        make_job(task, progress=Progress(step=9999, total=10_000, checkpoint_step=9999)), now_s=0.0, spent_usd=0.0
    )
    last = read_situation(
        make_job(task), plan_of(end), now_s=0.0, refusals=(), durations={}, availability={}, look_hours=0.0,
        spent_usd=0.0,
    )  # fmt: skip
    speeds = [each.speed for each in (*situation.candidates, *last.candidates)]
    assert speeds == pytest.approx([speeds[0]] * len(speeds)), "whatever is left"


def test_a_policy_counts_restored_starts_where_the_archive_fits() -> None:
    far = replace(make_offer("west1a"), cloud="aws")
    task = replace(TASK, resources=(Resources(),))
    plan = plan_of(task, make_offer("east1a"), far)
    here = next(each.placement for each in plan.estimates if each.placement.offer.cloud == "simulated")
    first = Attempt(job_id=1, number=1, cluster="c", placement=here, started_s=0.0, resumed_s=700.0, ended_s=900.0)
    restored = RestoredStart(start_s=90.0, systems=frozenset({find_system(here)}))
    situation = read_situation(
        make_job(task, attempts=(first,)), plan, now_s=1800.0, refusals=(), durations={}, availability={},
        look_hours=0.1, spent_usd=0.0, restored=restored,
    )  # fmt: skip
    hours = {each.placement.offer.cloud: each.start_hours for each in situation.candidates}
    assert hours == {"simulated": pytest.approx(90 / 3600), "aws": pytest.approx(700 / 3600)}


def is_moved(attempt: Attempt) -> bool:
    return attempt.outcome is not None and attempt.outcome.kind is OutcomeKind.MOVED


def make_job(task: Task = TASK, *, attempts: tuple[Attempt, ...] = (), progress: Progress | None = None) -> Job:
    return Job(
        id=1,
        name="train",
        status=JobStatus.RUNNING,
        task=task,
        submitted_s=0.0,
        attempts=attempts,
        progress=progress,
    )


@pytest.mark.parametrize(
    ("task", "follows"),
    [
        (TASK, True),
        (replace(TASK, goal=replace(GOAL, deadline_hours=None)), False),
        (replace(TASK, goal=None), False),
        (replace(TASK, resources=(Resources(use_spot=False),)), False),
        (replace(TASK, recovery=JobRecovery(strategy="cheapest")), False),
        (replace(TASK, recovery=JobRecovery(strategy="deadline")), True),
    ],
)
def test_a_deadline_selects_the_policy_unless_a_strategy_is_set(task: Task, follows: bool) -> None:
    assert follows_deadline(task) is follows


def test_a_policy_sees_the_remaining_work_and_the_open_places() -> None:
    plan = plan_of(TASK)
    here = Attempt(job_id=1, number=1, cluster="c", placement=plan.choice.placement, started_s=0.0, resumed_s=60.0)
    job = make_job(attempts=(here,), progress=Progress(step=330, total=STEPS, checkpoint_step=300))
    situation = read_situation(
        job, plan, now_s=1800.0, refusals=(), durations={}, availability={}, look_hours=0.1, spent_usd=1.5, live=here
    )
    view = situation.view
    assert view.spent_usd == 1.5, "what failed starts may cost is bounded in production as in a replay"
    assert view.time_left_hours == pytest.approx(0.5) and view.deadline_hours == 1.0
    assert view.hour_value_usd is None
    assert view.unsaved_hours == pytest.approx(30 / 3600)
    assert view.current is not None and situation.candidates[view.current].placement == here.placement
    assert {each.is_spot for each in situation.candidates} == {True, False}
    running = situation.candidates[view.current]
    assert running.age_hours - running.met_hours == pytest.approx(0.5), "watched since it runs there"
    assert [each.is_watched for each in situation.candidates if each.is_spot] == [True, False]
    target = next(each for each in situation.candidates if not each.is_spot)
    text = describe_event(record_decision(situation, Move(target=target, reason="why")))
    assert "on-demand in simulated" in text and "0.5 h to the deadline" in text and "(why)" in text
    assert not is_voluntary(situation, Move(target=target)), "leaving spot for on-demand cannot wait"
    assert "wait without machines" in describe_event(record_decision(situation, Wait(reason="ahead")))
    weighed = (("spot now", 3.0), ("on-demand now", 9.5), ("waiting", 4.25))
    text = describe_event(record_decision(situation, Move(target=target, weighed=weighed)))
    assert "expected cost to finish: 3.00 USD by spot now, 9.50 USD by on-demand now and 4.25 USD by waiting" in text


def test_starts_are_expected_to_take_as_long_as_measured() -> None:
    plan = plan_of(TASK)
    where = plan.choice.placement
    first = Attempt(
        job_id=1, number=1, cluster="a", placement=where, started_s=0.0, resumed_s=900.0, lost_s=2900.0, ended_s=3000.0
    )
    early = Attempt(job_id=1, number=2, cluster="b", placement=where, started_s=2000.0, resumed_s=3100.0)
    assert measure_start_hours([]) == 0.0
    assert measure_start_hours([first]) == 0.25
    assert measure_start_hours([first, early]) == 0.25, "it could not start before 3000 s"
    situation = read_situation(
        make_job(attempts=(first,)), plan, now_s=3000.0, refusals=(), durations={}, availability={}, look_hours=0.0,
        spent_usd=0.0,
    )  # fmt: skip
    assert {each.start_hours for each in situation.candidates} == {0.25}
    assert situation.view.look_hours == pytest.approx((1.0 - STEPS / 3600) / 4), "on-demand may come late"


def test_machines_that_are_up_leave_only_the_rest_of_a_start_to_be_safe() -> None:
    """A start of 0.1 h, of which 0.04 h is boot: on-demand needs 0.1 h plus the work, and the margin is kept free."""
    task = replace(TASK, checkpoint=CheckpointSpec(every_s=1.0, stall_s=0.0, restart_s=360.0))
    plan = plan_of(task)
    spot, sure = (
        next(each.placement for each in plan.estimates if each.placement.is_spot is is_spot)
        for is_spot in (True, False)
    )
    here = Attempt(job_id=1, number=1, cluster="c", started_s=0.0, resumed_s=360.0, placement=sure)

    def look(spare_hours: float, live: Attempt | None) -> Situation:
        margin = find_margin_hours(GOAL)
        now_s = 3600 * (1.0 - STEPS / 3600 - 0.1 - margin - spare_hours)
        return read_situation(
            make_job(task, attempts=(here,)), plan, now_s=now_s, refusals=(), durations={}, availability={},
            look_hours=0.0, spent_usd=0.0, live=live, expect_overlap_hours=lambda cloud: 0.04,
        )  # fmt: skip

    found = look(0.08, here)
    assert {each.overlap_hours for each in found.candidates if each.is_spot} == {0.04}
    assert {each.overlap_hours for each in found.candidates if not each.is_spot} == {0.0}
    for live in (here, None):
        assert is_safe_at(look(0.08, live), spot, is_up=True) and not is_safe_at(look(0.05, live), spot, is_up=True)
    assert is_safe_at(look(0.08, here), spot, is_up=False), "its boot overlaps with the work of the present machines"
    assert not is_safe_at(look(0.08, None), spot, is_up=False), "nothing works meanwhile"


def test_a_program_saves_on_notice_if_its_last_two_preemptions_lost_no_step() -> None:
    placement = plan_of(TASK).choice.placement

    def judge(*saved: int | None, kind: OutcomeKind = OutcomeKind.PREEMPTED) -> bool:
        attempts = [
            Attempt(job_id=1, number=n, cluster="c", placement=placement, started_s=0.0, outcome=Outcome(kind=kind))
            for n in range(len(saved))
        ]
        steps = {n: StepRange(first_step=1, last_step=50, checkpoint_step=each) for n, each in enumerate(saved)}
        return has_saved_on_notice(attempts, steps)

    assert judge(50, 50) and judge(20, 50, 50)
    assert not judge(50) and not judge(50, 40) and not judge(50, None) and not judge(50, 50, 40)
    assert not judge(50, 50, kind=OutcomeKind.MOVED), "notified by us, with more time"


def test_a_plan_puts_the_target_first_and_keeps_its_pricing_model() -> None:
    plan = plan_of(TASK)
    target = next(each.placement for each in plan.estimates if each.placement.offer.zone == "west1a")
    arranged = arrange(plan, Candidate(placement=target))
    assert arranged.choice.placement == target
    assert all(each.placement.is_spot == target.is_spot for each in arranged.estimates)
    alone = arrange(plan, Candidate(placement=target), is_alone=True)
    assert [each.placement for each in alone.estimates] == [target] and len(arranged.estimates) > 1


def test_own_history_is_evidence_that_fades() -> None:
    place = ("simulated", "east1", "east1a", "big")
    young = SpotStay(place=place, node_count=2, begin_s=0.0, end_s=36000.0, is_preempted=True)
    fresh = weigh_stays([young], now_s=36000.0)[place]
    assert (fresh.preemptions, fresh.node_hours) == (pytest.approx(1.0), pytest.approx(20.0))
    old = weigh_stays([young], now_s=36000.0 + HALF_LIFE_DAYS * DAY_S)[place]
    assert (old.preemptions, old.node_hours) == (pytest.approx(0.5), pytest.approx(10.0))
    placement = Placement(offer=make_offer("east1a"), is_spot=True, node_count=2)
    alone = replace(placement, node_count=1)
    known = [
        estimate_hazard(placement, {place: Observation(preemptions=count, node_hours=hours)})
        for count, hours in ((0.0, 400.0), (0.0, 20.0), (1.0, 20.0), (10.0, 20.0))
    ]
    assert known == sorted(known) and known[-1] > 3 * known[0], "quiet hours lower it, preemptions raise it"
    assert known[0] < estimate_hazard(placement, {}) < known[-1]
    band = find_hazard_per_node_hour(None)  # of each node, in addition to what is known of markets
    assert estimate_hazard(placement, {}) - estimate_hazard(alone, {}) == pytest.approx(band)
    assert estimate_hazard(replace(placement, is_spot=False), {}) == 0.0
    assert sum(gather_durations([young], now_s=36000.0)[place].open_ends) == pytest.approx(1.0, abs=0.5)
    assert not gather_durations([young], now_s=36000.0 + 30 * DAY_S)


def test_a_checkpoint_is_advised_by_hazard_and_deadline() -> None:
    free = replace(TASK, goal=None)
    assert advise_every_s(free, 0.1) == pytest.approx(find_best_interval_s(1.0, 0.1))
    assert advise_every_s(free, 0.0) is None
    assert advise_every_s(replace(free, checkpoint=CheckpointSpec(every_s=77.0)), 0.0) == 77.0
    assert advise_every_s(TASK, 1e-6) == pytest.approx(find_best_interval_s(1.0, 0.1)), "a deadline adds caution"


def test_with_a_deadline_checkpoints_are_more_frequent_in_young_and_short_lived_markets() -> None:
    place = ("simulated", "east1", "east1a", "big")
    placement = Placement(offer=make_offer("east1a"), is_spot=True, node_count=2)
    now_s = 100 * DAY_S

    def advise(task: Task, stays: list[SpotStay], *, since_s: float | None = None) -> float:
        seen = {} if since_s is None else {place: Availability(is_open=True, since_s=since_s, met_s=since_s)}
        hazard = estimate_start_hazard(
            task, placement, history=weigh_stays(stays, now_s=now_s), durations=gather_durations(stays, now_s=now_s),
            availability=seen, now_s=now_s,
        )  # fmt: skip
        every_s = advise_every_s(task, hazard)
        assert every_s is not None
        return every_s

    met, young, old = advise(TASK, []), advise(TASK, [], since_s=now_s), advise(TASK, [], since_s=now_s - 2 * DAY_S)
    assert young < met <= old == pytest.approx(find_best_interval_s(1.0, estimate_hazard(placement, {})))
    stays = [
        SpotStay(place=place, node_count=2, begin_s=end_s - 600.0, end_s=end_s, is_preempted=True)
        for end_s in (now_s - 3600.0, now_s - 7200.0, now_s - 10800.0)
    ]
    assert advise(TASK, stays) < 0.7 * met
    assert advise(replace(TASK, goal=None), stays) < 0.7 * advise(replace(TASK, goal=None), [])
    assert advise(replace(TASK, checkpoint=CheckpointSpec(every_s=77.0)), stays) == 77.0


class Stage:
    """A simulated world whose planner is the real one, over offers that may change while the job runs."""

    def __init__(self, folder: Path, *offers: Offer, task: Task = TASK) -> None:
        self.offers = offers or (make_offer("east1a"), make_offer("west1a"))
        self.later: tuple[float, tuple[Offer, ...]] | None = None  # other offers from this many seconds on
        self.spot_from_s = 0.0  # before that, no zone has any; on-demand is always available
        self.world = World(folder)
        self.world.gang.steps = STEPS
        self.world.job_id = self.world.store.jobs.add("train", task).id
        self.submitted_s = self.world.clock.now_s()
        refuse = self.world.cloud._refuse_if_full

        def refuse_spot(request: NodeRequest) -> None:
            if request.placement.is_spot and self.age_s < self.spot_from_s:
                raise CapacityError("full", scope="zone")
            refuse(request)

        self.world.cloud._refuse_if_full = refuse_spot  # type: ignore[method-assign]

    @property
    def age_s(self) -> float:
        return self.world.clock.now_s() - self.submitted_s

    def plan(self, task: Task, avoid: object) -> Plan:
        offers = self.later[1] if self.later and self.age_s >= self.later[0] else self.offers
        return plan_of(task, *offers)

    def run(self) -> Job:
        """Run to the end, in time and with nothing left behind."""
        self.crashes = run_to_end(self.world, "plain", self.plan)
        check(self.world, JobStatus.SUCCEEDED)
        job = self.world.get_job()
        assert job.ended_s is not None and job.task.goal is not None and job.task.goal.deadline_hours is not None
        assert (job.ended_s - job.submitted_s) / 3600 <= job.task.goal.deadline_hours
        return job

    def list_decisions(self) -> list[str]:
        events = self.world.store.events.list(job_id=self.world.job_id)
        return [event.message for event in events if event.kind is EventKind.DECISION]


def make_moving_stage(folder: Path, task: Task = TASK) -> Stage:
    """Make a stage on which the job runs at an expensive place, and a cheap one appears after a while."""
    stage = Stage(folder, make_offer("east1a", usd_hour=10.0), task=task)
    stage.later = (100.0, (make_offer("east1a", usd_hour=10.0), make_offer("west1a", usd_hour=1.0)))
    return stage


def test_a_job_without_spot_ends_in_time_on_demand(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    stage.spot_from_s = math.inf
    job = stage.run()
    assert not job.attempts[-1].placement.is_spot
    assert "on-demand" in stage.list_decisions()[-1] and "h to the deadline" in stage.list_decisions()[-1]


def test_a_job_on_spot_stays_on_spot(tmp_path: Path) -> None:
    job = Stage(tmp_path, DEAR).run()
    assert [each.placement.is_spot for each in job.attempts] == [True]


def test_a_job_on_demand_moves_to_spot_when_available_and_safe(tmp_path: Path) -> None:
    """Its steps are faster than its goal says: only the policy calculates in hours."""
    task = replace(TASK, goal=replace(GOAL, work_hours=10.0, deadline_hours=20.0))
    stage = Stage(tmp_path, replace(DEAR, spot_usd_hour=None), task=task)
    stage.later = (100.0, (DEAR,))
    job = stage.run()
    assert [each.placement.is_spot for each in job.attempts] == [False, True]
    assert "spot is not offered" in stage.list_decisions()[0]


def test_a_job_moves_to_a_much_cheaper_location_at_a_checkpoint(tmp_path: Path) -> None:
    job = make_moving_stage(tmp_path).run()
    assert [each.placement.offer.zone for each in job.attempts] == ["east1a", "west1a"]
    assert is_moved(job.attempts[0])


def test_on_demand_is_kept_until_spot_is_granted(tmp_path: Path) -> None:
    """Before, each refusal cost the machines that ran, and a refused place rested for ten minutes or more."""
    task = replace(TASK, goal=replace(GOAL, work_hours=10.0, deadline_hours=20.0))
    stage = Stage(tmp_path, replace(DEAR, spot_usd_hour=None), task=task)
    stage.later, stage.spot_from_s = (50.0, (DEAR,)), 250.0
    asked_s = list[float]()
    refuse = stage.world.cloud._refuse_if_full

    def note(request: NodeRequest) -> None:
        if request.placement.is_spot:
            asked_s.append(stage.age_s)
        refuse(request)

    stage.world.cloud._refuse_if_full = note  # type: ignore[method-assign]
    job = stage.run()
    assert [each.placement.is_spot for each in job.attempts] == [False, True]
    assert len([each for each in asked_s if each < 250.0]) >= 3


def test_a_job_with_a_budget_releases_its_machines_first(tmp_path: Path) -> None:
    """The lease of its nodes assumes that no others are paid for."""
    stage = make_moving_stage(tmp_path, replace(TASK, goal=replace(GOAL, budget_usd=100.0)))
    live = list[int]()
    cancel = stage.world.gang.cancel

    async def note(cluster: Cluster, run_id: int) -> None:
        live.append(len(stage.world.list_live_nodes()))
        await cancel(cluster, run_id)

    stage.world.gang.cancel = note  # type: ignore[method-assign]
    assert len(stage.run().attempts) == 2
    assert live == [2]


def test_a_refused_place_counts_as_open_once_it_may_be_asked_again_at_no_cost() -> None:
    plan = plan_of(TASK)
    offer = plan.choice.placement.offer
    refusal = Refusal(
        cloud=offer.cloud, region=offer.region, zone=offer.zone or "", instance_type=offer.instance_type, is_spot=True,
        expires_s=9000.0, reason="full", reask_s=1000.0,
    )  # fmt: skip

    def is_open(now_s: float, *, may_reask: bool) -> bool:
        situation = read_situation(
            make_job(), plan, now_s=now_s, refusals=(refusal,), durations={}, availability={}, look_hours=0.0,
            spent_usd=0.0, may_reask=may_reask,
        )  # fmt: skip
        return next(each.is_open for each in situation.candidates if refusal.covers(each.placement))

    assert not is_open(999.0, may_reask=True) and is_open(1001.0, may_reask=True)
    assert not is_open(1001.0, may_reask=False)


def test_unsaved_work_of_more_than_a_start_is_not_left() -> None:
    target = Candidate(placement=plan_of(TASK).choice.placement, start_hours=0.2)
    view = JobView(work_left_hours=5.0, unsaved_hours=0.1)
    assert loses_little(view, target)
    assert not loses_little(replace(view, unsaved_hours=0.3), target)
    assert loses_little(replace(view, unsaved_hours=0.3, saves_on_notice=True), target)


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.exhaustive)])
@long
def test_a_crash_at_any_step_of_a_move_is_harmless(tmp_path: Path, every: int) -> None:
    """The pretend gang fails the test if two attempts work at once."""
    (tmp_path / "calm").mkdir()
    calm = make_moving_stage(tmp_path / "calm")
    begun = list[int]()
    put_attempt = calm.world.store.jobs.put_attempt

    def note(attempt: Attempt) -> None:
        if is_moved(attempt):
            begun.append(calm.world.points.count)
        put_attempt(attempt)

    calm.world.store.jobs.put_attempt = note  # type: ignore[method-assign]
    calm.run()
    for crash_at in range(begun[0] - 8, begun[0] + 6, every):  # from the requests for the next machines on
        folder = tmp_path / str(crash_at)
        folder.mkdir()
        stage = make_moving_stage(folder)
        stage.world.points.crash_at = crash_at
        job = stage.run()
        assert stage.crashes == 1
        assert job.attempts[-1].placement.offer.zone == "west1a"


def test_the_store_returns_the_history_of_spot_attempts(tmp_path: Path) -> None:
    world = World(tmp_path)
    now_s = world.clock.now_s()
    spot = Placement(offer=make_offer("east1a"), is_spot=True, node_count=2)

    def put(number: int, placement: Placement, kind: OutcomeKind) -> None:
        attempt = Attempt(
            job_id=world.job_id, number=number, cluster="c", placement=placement, started_s=now_s - 7200,
            lost_s=now_s - 3600, ended_s=now_s, outcome=Outcome(kind=kind),
        )  # fmt: skip
        world.store.jobs.put_attempt(attempt)

    put(1, spot, OutcomeKind.PREEMPTED)
    put(2, spot, OutcomeKind.MOVED)
    put(3, spot, OutcomeKind.TAKEN_DOWN)
    put(4, replace(spot, is_spot=False), OutcomeKind.NODE_LOST)
    assert [stay.is_preempted for stay in world.store.history.list_stays()] == [False, False, True]
    (seen,) = world.store.history.read().values()
    assert seen.preemptions == pytest.approx(1.0, rel=0.01) and seen.node_hours == pytest.approx(6.0, rel=0.01)


def test_the_program_receives_its_checkpoint_interval(tmp_path: Path) -> None:
    world = World(tmp_path)
    heard = list[float]()
    start = world.gang.start

    async def hear(cluster: Cluster, task: Task, *, envs: Mapping[str, str], **others: Any) -> None:
        heard.append(float(envs["BROKER_CHECKPOINT_EVERY_S"]))
        await start(cluster, task, envs=envs, **others)

    world.gang.start = hear  # type: ignore[method-assign,assignment]
    run_to_end(world, "plain")
    expected = find_best_interval_s(5.0, find_hazard() + 2 * find_hazard_per_node_hour(None))
    assert heard == [pytest.approx(expected, rel=0.02)]  # its own first minute is observed already
