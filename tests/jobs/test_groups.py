"""Decisions for one task of a job group."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from broker.errors import NoOfferError
from broker.jobs.group_placement import GroupPlacement
from broker.jobs.groups import GroupStep, find_culprit, find_generation, judge, may_start
from broker.state.store import Store
from broker.types import (
    Attempt,
    Estimate,
    GroupRole,
    Job,
    JobStatus,
    OnLoss,
    Outcome,
    OutcomeKind,
    Placement,
    Plan,
    Task,
)
from tests.simulation.world import make_offer
from tests.state.samples import Hands

HERE = Placement(offer=make_offer("east1a"), is_spot=True, node_count=1)
THERE = Placement(offer=make_offer("west1a"), is_spot=True, node_count=1)
RESTART = OnLoss.RESTART_GROUP


def make_attempt(
    number: int = 1, *, generation: int = 1, ready: bool = True, released: bool = True, kind: OutcomeKind | None = None
) -> Attempt:
    return Attempt(
        job_id=1, number=number, cluster="c", placement=HERE, started_s=0.0, generation=generation,
        ready_s=1.0 if ready else None, released_s=2.0 if released else None,
        outcome=Outcome(kind=kind) if kind else None, ended_s=9.0 if kind else None,
    )  # fmt: skip


def make_job(
    job_id: int,
    *attempts: Attempt,
    status: JobStatus = JobStatus.RUNNING,
    on_loss: OnLoss = OnLoss.KEEP_GOING,
    is_primary: bool = True,
    ended_s: float | None = None,
    kind: OutcomeKind | None = None,
) -> Job:
    role = GroupRole(name="rl", is_primary=is_primary, on_loss=on_loss, termination_delay_s=30.0)
    return Job(
        id=job_id, name=f"task-{job_id}", status=status, task=Task(name=f"task-{job_id}", group=role), submitted_s=0.0,
        attempts=attempts, ended_s=ended_s, outcome_kind=kind, pipeline="rl-x",
    )  # fmt: skip


def make_plan(task: Task, *places: Placement) -> Plan:
    estimates = tuple(Estimate(placement=each) for each in places)
    return Plan(task=task, estimates=estimates, rejections=(), prices_as_of="2026-11-24", reason="")


def make_placement(folder: Path, *, east_only: tuple[str, ...]) -> GroupPlacement:
    """Make a placement for tasks that fit in the east and the west, except those that fit in the east only."""

    def plan(task: Task, budget: object) -> Plan:
        return make_plan(task, *((HERE,) if task.name in east_only else (HERE, THERE)))

    clock = Hands()
    return GroupPlacement(Store(folder / "state.db", clock=clock), plan, clock)


def test_programs_start_when_all_tasks_are_set_up_in_one_region() -> None:
    ready, booting = make_attempt(released=False), make_attempt(ready=False, released=False)
    assert not may_start([make_job(1, ready), make_job(2, booting)], 1)
    assert not may_start([make_job(1, ready), make_job(2)], 1)
    assert may_start([make_job(1, ready), make_job(2, ready)], 1)
    assert may_start([make_job(1, ready), make_job(2, status=JobStatus.SUCCEEDED)], 1)
    assert not may_start([make_job(1, ready), make_job(2, status=JobStatus.CANCELLED)], 1), "it fails instead"
    opened = replace(ready, number=1, released_s=5.0, ended_s=9.0)
    again = replace(ready, number=2, generation=2)
    assert may_start([make_job(1, opened, again), make_job(2, status=JobStatus.CANCELLED)], 2)
    assert not may_start([make_job(1, ready), make_job(2, replace(ready, placement=THERE))], 1)


def test_a_task_without_any_offer_moves_no_other(tmp_path: Path) -> None:
    """It reports that itself."""

    def refuse(task: Task, budget: object) -> Plan:
        raise NoOfferError("no offer", hints=[])

    clock = Hands()
    placement = GroupPlacement(Store(tmp_path / "state.db", clock=clock), refuse, clock)
    members = [make_job(1, make_attempt()), make_job(2)]
    assert placement.find_move(members[0], members, members[0].attempts[0]) == ""


@pytest.mark.parametrize("full", [("task-2",), ("task-3",), ()])
def test_a_task_apart_from_the_others_moves_only_where_every_task_without_machines_fits(
    tmp_path: Path, full: tuple[str, ...]
) -> None:
    """Tasks 4 and 5 have machines in the west, task 1 in the east; tasks 2 and 3 look for machines."""

    placement = make_placement(tmp_path, east_only=full)
    waiting = make_attempt(released=False)
    west = replace(waiting, placement=THERE)
    members = [make_job(1, waiting), make_job(2), make_job(3), make_job(4, west), make_job(5, west)]
    reason = placement.find_move(members[0], members, waiting)
    assert reason == ("" if full else "the other tasks run in simulated west1")


@pytest.mark.parametrize("full", [("task-2",), ("task-3",), ()])
def test_a_task_joins_the_others_only_where_every_task_without_machines_fits(
    tmp_path: Path, full: tuple[str, ...]
) -> None:
    """Task 4 has machines in the west, and the group has not started."""
    west = make_attempt(released=False, ready=False)
    members = [make_job(1), make_job(2), make_job(3), make_job(4, replace(west, placement=THERE))]
    placed = make_placement(tmp_path, east_only=full).place(members[0], members, make_plan(Task(), HERE, THERE))
    assert [each.placement for each in placed.estimates] == [HERE if full else THERE]


def test_a_task_that_recovers_in_a_group_that_has_started_waits_for_no_other() -> None:
    lost = make_attempt(kind=OutcomeKind.PREEMPTED)
    members = [make_job(1, make_attempt()), make_job(2, lost), make_job(3, lost)]
    assert may_start(members, 1)
    assert not may_start(members, 2)


@pytest.mark.parametrize(
    ("on_loss", "kind", "released", "expected"),
    [
        (RESTART, OutcomeKind.PREEMPTED, True, 2),
        (RESTART, OutcomeKind.PROGRAM_FAILED, True, 2),
        (RESTART, OutcomeKind.PREEMPTED, False, 1),
        (RESTART, OutcomeKind.SUCCEEDED, True, 1),
        (RESTART, OutcomeKind.GROUP_RESTARTED, True, 1),
        (OnLoss.KEEP_GOING, OutcomeKind.PREEMPTED, True, 1),
        (OnLoss.KEEP_GOING, OutcomeKind.GROUP_MOVED, True, 2),
        (OnLoss.KEEP_GOING, OutcomeKind.GROUP_MOVED, False, 1),
    ],
)
def test_a_loss_begins_a_generation_only_if_its_task_says_so_and_its_program_had_started(
    on_loss: OnLoss, kind: OutcomeKind, released: bool, expected: int
) -> None:
    lost = make_job(1, make_attempt(kind=kind, released=released), on_loss=on_loss)
    assert find_generation([lost, make_job(2, make_attempt())]) == expected


def test_an_attempt_of_an_earlier_generation_restarts_unless_its_program_has_not_started() -> None:
    lost = make_job(1, make_attempt(kind=OutcomeKind.PREEMPTED), on_loss=RESTART)
    other, held = make_job(2, make_attempt()), make_job(3, make_attempt(released=False))
    members = [lost, other, held]
    assert judge(other, members, 0.0).step is GroupStep.RESTART
    assert judge(held, members, 0.0).step is GroupStep.NONE
    assert judge(lost, members, 0.0).step is GroupStep.NONE
    ended = make_attempt(kind=OutcomeKind.GROUP_RESTARTED)
    again = replace(other, attempts=(ended, make_attempt(2, generation=2)))
    assert judge(again, [lost, again, held], 0.0).step is GroupStep.NONE


def test_auxiliary_tasks_end_after_their_delay_once_all_primary_ones_have_succeeded() -> None:
    done = make_job(1, status=JobStatus.SUCCEEDED, ended_s=100.0)
    late = make_job(2, make_attempt())
    other = make_job(3, make_attempt(), is_primary=False)
    assert judge(other, [done, late, other], 1000.0).step is GroupStep.NONE
    late = replace(late, status=JobStatus.SUCCEEDED, ended_s=200.0)
    assert judge(other, [done, late, other], 229.0).step is GroupStep.NONE
    assert judge(other, [done, late, other], 230.0).step is GroupStep.FINISH
    assert judge(other, [done, late, other], 150.0).step is GroupStep.FINISH, "the clock was set back"


@pytest.mark.parametrize(
    ("failed", "is_culprit"),
    [
        (make_job(1, make_attempt(), status=JobStatus.FAILED), True),
        (make_job(1, make_attempt(), status=JobStatus.FAILED, is_primary=False), False),
        (make_job(1, make_attempt(), status=JobStatus.FAILED, is_primary=False, on_loss=RESTART), True),
        (make_job(1, status=JobStatus.FAILED_SETUP, is_primary=False), True),  # before the group has started
        (make_job(1, make_attempt(), status=JobStatus.SUCCEEDED), False),
    ],
)
def test_the_group_fails_with_a_task_that_it_requires(failed: Job, is_culprit: bool) -> None:
    other = make_job(2, make_attempt(released=bool(failed.attempts)))
    judgement = judge(other, [failed, other], 0.0)
    assert (judgement.step is GroupStep.FAIL, judgement.culprit) == (is_culprit, failed if is_culprit else None)


def test_the_cause_is_named_instead_of_its_consequences() -> None:
    victim = make_job(1, make_attempt(), status=JobStatus.CANCELLED, kind=OutcomeKind.DEPENDENCY_FAILED)
    cause, other = make_job(2, make_attempt(), status=JobStatus.FAILED), make_job(3, make_attempt())
    assert find_culprit(other, [victim, cause, other]) == cause
