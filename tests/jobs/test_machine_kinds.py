"""Jobs on machines of several kinds: the places a policy sees, the speeds it believes, the ranks that can resume."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from broker.errors import NoOfferError
from broker.jobs.deadline import Situation, arrange, is_safe_at, read_situation, record_decision
from broker.jobs.kinds import (
    KINDS_MAX,
    KindSpeed,
    choose_places,
    correct_speeds,
    count_ranks,
    describe_ranks,
    find_kind,
    keep_ranks,
    name_kind,
)
from broker.optimizer.planner import make_plan
from broker.spot.policies import load_policy
from broker.spot.policies.base import Candidate, Move, Wait
from broker.state.history import StepRange
from broker.types import (
    AcceleratorFigures,
    Attempt,
    CheckpointSpec,
    Goal,
    Job,
    JobStatus,
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
from tests.jobs.test_deadline import Stage
from tests.simulation.world import make_offer

FIGURES = {
    "A100": AcceleratorFigures(name="A100", memory_gib=40, bf16_dense_tflops=312, memory_bandwidth_gbs=1555),
    "H100": AcceleratorFigures(name="H100", memory_gib=80, bf16_dense_tflops=989, memory_bandwidth_gbs=3350),
}
TASK = Task(
    name="train",
    run="x",
    resources=(Resources(accelerator="A100", accelerator_count=8), Resources(accelerator="H100", accelerator_count=8)),
    goal=Goal(work_hours=40.0, work_on="A100:8", deadline_hours=60.0),
    checkpoint=CheckpointSpec(stall_s=1.0, restart_s=360.0),
)
HOUR_S = 3600.0


def make_machine(zone: str, accelerator: str, usd_hour: float, *, count: float = 8) -> Offer:
    return replace(
        make_offer(zone, usd_hour=usd_hour), instance_type=f"{accelerator.lower()}-{count:g}x", accelerator=accelerator,
        accelerator_count=count,
    )  # fmt: skip


def plan_of(*offers: Offer, task: Task = TASK) -> Plan:
    return make_plan(task, offers, prices_as_of="2026-11-01", figures=FIGURES)


A100, H100 = make_machine("east1a", "A100", 10.0), make_machine("east1a", "H100", 28.0)
DEAR_H100 = make_machine("east1a", "H100", 70.0)
ZONES = tuple(make_machine(f"zone{number}a", "A100", 10.0) for number in range(12))


def make_job(
    *attempts: Attempt, task: Task = TASK, step: int = 0, saved: int | None = None, submitted_s: float = 0.0
) -> Job:
    progress = Progress(step=step, total=4000, checkpoint_step=saved) if step else None
    return Job(
        id=1, name="train", status=JobStatus.RUNNING, task=task, submitted_s=submitted_s, attempts=attempts,
        progress=progress,
    )  # fmt: skip


def stay(number: int, offer: Offer, from_hours: float, to_hours: float | None, *, is_spot: bool = True) -> Attempt:
    lost_s = None if to_hours is None else to_hours * HOUR_S
    return Attempt(
        job_id=1, number=number, cluster="c", placement=Placement(offer=offer, is_spot=is_spot, node_count=1),
        started_s=from_hours * HOUR_S, resumed_s=from_hours * HOUR_S, lost_s=lost_s, ended_s=lost_s,
        outcome=None if to_hours is None else Outcome(kind=OutcomeKind.PREEMPTED),
    )  # fmt: skip


def read(plan: Plan, job: Job, steps: dict[int, StepRange] | None = None, *, now_s: float = 0.0) -> Situation:
    return read_situation(
        job, plan, now_s=now_s, refusals=(), durations={}, availability={}, look_hours=0.1, spent_usd=0.0, steps=steps
    )


# -- which places a policy sees ---------------------------------------------------------------------------------------


def test_an_expensive_kind_has_places_among_many_of_a_cheap_one() -> None:
    """With one limit for all kinds, every on-demand place would be of A100s, and none in time with 25 h left."""
    plan = plan_of(*ZONES, *(replace(DEAR_H100, zone=f"zone{number}a") for number in range(5)))
    chosen = choose_places(plan, None)
    kinds = [(each.placement.offer.accelerator, each.placement.is_spot) for each in chosen]
    assert kinds.count(("A100", True)) == 8 and kinds.count(("A100", False)) == 3
    assert kinds.count(("H100", True)) == 3 and kinds.count(("H100", False)) == 1
    situation = read(plan, make_job(submitted_s=-35 * HOUR_S))
    found = load_policy("adaptive")(situation.view, [each for each in situation.candidates if not each.is_spot])
    assert isinstance(found, Move) and found.target.placement.offer.accelerator == "H100"


def test_a_single_kind_has_eight_spot_and_three_on_demand_places() -> None:
    alone = replace(TASK, resources=TASK.resources[:1])
    plan = plan_of(*ZONES, task=alone)
    assert [each.placement for each in choose_places(plan, None)] == [
        *[each.placement for each in plan.estimates if each.placement.is_spot][:8],
        *[each.placement for each in plan.estimates if not each.placement.is_spot][:3],
    ]


def test_only_a_few_kinds_are_considered() -> None:
    names = [f"CARD{number}" for number in range(KINDS_MAX + 3)]
    task = replace(
        TASK, resources=tuple(Resources(accelerator=name, accelerator_count=8) for name in names),
        goal=Goal(work_hours=40.0, deadline_hours=60.0),
    )  # fmt: skip
    offers = [
        make_machine(f"zone{number}a", name, 10.0 * (place + 1))
        for place, name in enumerate(names)
        for number in range(10)
    ]
    found = {find_kind(each.placement) for each in choose_places(plan_of(*offers, task=task), None)}
    assert len(found) == KINDS_MAX


def test_machines_that_are_no_longer_offered_are_as_fast_as_others_of_their_kind() -> None:
    here = stay(1, replace(H100, zone="gone"), 0.0, None)
    situation = read_situation(
        make_job(here), plan_of(A100, H100), now_s=HOUR_S, refusals=(), durations={}, availability={}, look_hours=0.1,
        spent_usd=0.0, live=here,
    )  # fmt: skip
    assert situation.view.current is not None
    current = situation.candidates[situation.view.current]
    [alike] = [each for each in situation.candidates if each.is_spot and each.placement.offer == H100]
    assert current.placement == here.placement and current.speed == alike.speed > 1.5


def test_failover_on_spot_stays_with_the_kind_and_on_demand_continues_to_the_fastest() -> None:
    zones = [replace(A100, zone="east1b"), A100, H100, replace(H100, zone="east1b")]
    plan = plan_of(*zones)
    spot = Candidate(placement=Placement(offer=H100, is_spot=True, node_count=1))
    found = [each.placement.offer for each in arrange(plan, spot).estimates]
    assert found == [H100, zones[3]], "only the policy changes the kind of spot: A100s may not be in time"
    ondemand = Candidate(placement=Placement(offer=A100, is_spot=False, node_count=1))
    kinds = [each.placement.offer.accelerator for each in arrange(plan, ondemand).estimates]
    assert kinds == ["A100", "A100", "H100", "H100"]
    assert arrange(plan, ondemand).estimates[0].placement.offer == A100


# -- speeds -----------------------------------------------------------------------------------------------------------


def speeds_of(situation: Situation) -> dict[str, KindSpeed]:
    return {each.name: each for each in situation.speeds}


def test_speeds_are_those_of_data_sheets_until_the_job_has_measured_its_own() -> None:
    told = speeds_of(read(plan_of(A100, H100), make_job()))
    assert told["A100:8"].speed == pytest.approx(1.0) and told["H100:8"].speed > 1.8
    assert list(told) == ["H100:8", "A100:8"], "the fastest first"


def test_measurements_of_a_kind_correct_its_speed_and_never_raise_that_of_others() -> None:
    """4,000 steps are planned as 40 h on A100s, which did 800 in 10 h: 0.8 of the planned speed."""
    plan, here = plan_of(A100, H100), stay(1, A100, 0.0, 10.0)
    steps = {1: StepRange(first_step=0, last_step=800, checkpoint_step=800)}
    told = speeds_of(read(plan, make_job()))
    seen = speeds_of(read(plan, make_job(here, step=800), steps, now_s=11 * HOUR_S))
    assert seen["A100:8"].speed == pytest.approx(0.8, rel=0.02) and seen["A100:8"].seen_hours == pytest.approx(10.0)
    assert seen["H100:8"].speed == pytest.approx(told["H100:8"].speed * 0.8, rel=0.02)
    fast = {1: StepRange(first_step=0, last_step=1500, checkpoint_step=1500)}
    seen = speeds_of(read(plan, make_job(here, step=1500), fast, now_s=11 * HOUR_S))
    assert seen["A100:8"].speed == pytest.approx(1.5, rel=0.03)
    assert seen["H100:8"].speed == pytest.approx(told["H100:8"].speed), "not faster than planned"


def test_each_kind_has_its_own_measurement() -> None:
    first, second = stay(1, A100, 0.0, 10.0), stay(2, H100, 10.0, None)
    steps = {
        1: StepRange(first_step=0, last_step=1000, checkpoint_step=1000),
        2: StepRange(first_step=1000, last_step=2500, checkpoint_step=2500),
    }
    seen = speeds_of(read(plan_of(A100, H100), make_job(first, second, step=2500), steps, now_s=20 * HOUR_S))
    assert seen["A100:8"].speed == pytest.approx(1.0)
    assert seen["H100:8"].speed == pytest.approx(1.5, rel=0.03)


@pytest.mark.parametrize(
    ("hours", "steps", "is_believed"), [(0.05, 20, False), (1.0, 5, False), (1.0, 98, False), (1.0, 50, True)]
)
def test_a_short_observation_few_steps_or_a_small_difference_change_nothing(
    hours: float, steps: int, is_believed: bool
) -> None:
    job = make_job(stay(1, A100, 0.0, hours), step=steps)
    seen = speeds_of(
        read(plan_of(A100, H100), job, {1: StepRange(first_step=0, last_step=steps, checkpoint_step=None)})
    )
    assert (seen["A100:8"].speed < 0.97) is is_believed


def test_one_kind_is_never_corrected() -> None:
    """A single kind is judged by the work left, which its steps measure."""
    candidates = [Candidate(placement=Placement(offer=A100, is_spot=spot, node_count=1)) for spot in (True, False)]
    job = make_job(stay(1, A100, 0.0, 10.0), step=400)
    steps = {1: StepRange(first_step=0, last_step=400, checkpoint_step=400)}
    assert correct_speeds(candidates, job, steps, now_s=11 * HOUR_S) == (candidates, ())


def test_a_decision_names_the_kind_and_what_its_work_costs() -> None:
    here = stay(1, A100, 0.0, 10.0)
    steps = {1: StepRange(first_step=0, last_step=800, checkpoint_step=800)}
    situation = read(plan_of(A100, H100), make_job(here, step=800, saved=800), steps, now_s=11 * HOUR_S)
    target = next(each for each in situation.candidates if each.placement.offer == H100 and each.is_spot)
    text = describe_event(record_decision(situation, Move(target=target, reason="why")))
    assert "move to h100-8x (H100:8) spot in simulated east1a" in text
    assert "H100:8 does" in text and "times the work per hour at" in text
    assert "A100:8 at 12" in text and "0.81 of the planned speed by the last 10.0 h" in text
    alone = read(plan_of(A100, task=replace(TASK, resources=TASK.resources[:1])), make_job())
    text = describe_event(record_decision(alone, Move(target=alone.candidates[0])))
    assert "A100:8" not in text


def test_a_start_on_spot_is_safe_while_any_kind_of_on_demand_is_in_time() -> None:
    """40 h of work with 41 h to go: A100s must start soon, H100s, which cost more, in a day."""
    fast = replace(H100, ondemand_usd_hour=100.0)
    job = make_job(submitted_s=-19 * HOUR_S)
    for offers, is_safe in (((A100,), False), ((A100, fast), True)):
        task = replace(TASK, checkpoint=CheckpointSpec(every_s=4000.0, restart_s=360.0))
        situation = read(plan_of(*offers, task=task), replace(job, task=task))
        assert is_safe_at(situation, Placement(offer=A100, is_spot=True, node_count=1), is_up=False) is is_safe
    data = record_decision(situation, Wait(reason="")).data
    assert 20 < data["spare_hours"] < 26, "until the fastest kind must start"  # type: ignore[operator]


# -- ranks ------------------------------------------------------------------------------------------------------------

FEWER = make_machine("east1a", "H100", 14.0, count=4)
STRICT = replace(
    TASK,
    resources=(TASK.resources[0], Resources(accelerator="H100", accelerator_count=4)),
    checkpoint=CheckpointSpec(is_for_same_ranks=True),
)
SAVED = {1: StepRange(first_step=0, last_step=100, checkpoint_step=100)}


def test_after_a_checkpoint_only_as_many_ranks_resume_a_program_that_needs_them() -> None:
    plan = plan_of(A100, FEWER, task=STRICT)
    assert {count_ranks(each.placement) for each in plan.estimates} == {8, 4}
    job = make_job(stay(1, A100, 0.0, 1.0), task=STRICT, step=100)
    assert keep_ranks(plan, make_job(task=STRICT), {}) is plan, "any kind may start it"
    assert keep_ranks(plan, job, {1: SAVED[1]._replace(checkpoint_step=None)}) is plan
    assert {count_ranks(each.placement) for each in keep_ranks(plan, job, SAVED).estimates} == {8}
    assert keep_ranks(plan, replace(job, task=TASK), SAVED) is plan, "the bundled trainers resume on any number"


def test_a_job_that_no_offer_can_resume_is_refused_with_what_it_needs() -> None:
    job = make_job(stay(1, A100, 0.0, 1.0), task=STRICT, step=100)
    with pytest.raises(NoOfferError, match=r"written by 8 ranks \(A100:8\).*requires as many, but offers have 4"):
        keep_ranks(plan_of(FEWER, task=STRICT), job, SAVED)


def test_a_launch_says_what_another_number_of_accelerators_requires() -> None:
    free = replace(STRICT, checkpoint=CheckpointSpec())
    [notice] = describe_ranks([plan_of(A100, FEWER, task=free)])
    assert "between 4 and 8 accelerators" in notice and "same_ranks: true" in notice
    assert not describe_ranks([plan_of(A100, FEWER, task=STRICT), plan_of(A100, H100)])
    bundled = replace(free, run="python -m trainers.lm --strategy fsdp")
    assert not describe_ranks([plan_of(A100, FEWER, task=bundled)])


def test_machines_without_accelerators_are_one_kind() -> None:
    placements = [
        Placement(offer=replace(make_offer("east1a"), instance_type=each), is_spot=True, node_count=2)
        for each in ("big", "small")
    ]
    assert find_kind(placements[0]) == find_kind(placements[1]) and count_ranks(placements[0]) == 2
    assert [name_kind(each) for each in placements] == ["big", "small"]


# -- a job ------------------------------------------------------------------------------------------------------------

STEPS = 400  # one a second, on any machine of the simulated cloud
SHORT = replace(TASK, goal=Goal(work_hours=STEPS / 3600, work_on="A100:8", deadline_hours=1.0), num_nodes=1)


class KindsStage(Stage):
    """A world with offers of both kinds."""

    def plan(self, task: Task, avoid: object) -> Plan:
        return plan_of(*self.offers, task=task)


def test_a_job_fails_over_to_another_kind_and_resumes_from_its_checkpoint(tmp_path: Path) -> None:
    """The A100s are preempted after two minutes, and their zone has no more."""
    stage = KindsStage(tmp_path, replace(A100, zone="east1b"), replace(H100, ondemand_usd_hour=300.0), task=SHORT)
    taken = list[str]()
    poll = stage.world.gang.poll

    async def poll_and_lose(cluster: object, run_id: int) -> object:
        kind = cluster.placement.offer.accelerator  # type: ignore[attr-defined]
        if kind == "A100" and stage.age_s > 200.0 and not taken:
            taken.append(kind)
            stage.world.cloud.full_zones["east1b"] = float("inf")
            stage.world.cloud.preempt([node.id for node in cluster.nodes])  # type: ignore[attr-defined]
        return await poll(cluster, run_id)  # type: ignore[arg-type]

    stage.world.gang.poll = poll_and_lose  # type: ignore[method-assign,assignment]
    job = stage.run()
    assert [each.placement.offer.accelerator for each in job.attempts] == ["A100", "H100"]
    first, second = (stage.world.store.jobs.list_steps(job.id)[number] for number in (1, 2))
    assert second.first_step >= (first.checkpoint_step or 0) > 0
    assert any("H100:8" in each and "times the work per hour" in each for each in stage.list_decisions())
