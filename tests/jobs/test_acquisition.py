"""Machines of a job: what its limits, its deadline and its logins mean for a search that has not ended well."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from broker.errors import AccountError, AuthError, CapacityError, CloudError, NoOfferError
from broker.jobs.acquisition import NO_OFFER_S
from broker.types import EventKind, Goal, JobStatus, Node, NodeRequest, Plan, Task
from tests.clouds.simulated import CloudTimings
from tests.simulation.test_crashes import run_to_end
from tests.simulation.world import World, make_plan

HOUR_S = 3600.0


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def add_job(world: World, task: Task) -> None:
    world.job_id = world.store.jobs.add("limited", task).id


@pytest.mark.parametrize(
    ("limits", "reason"), [({"max_duration_s": 30.0}, "max_duration"), ({"goal": Goal(budget_usd=0.001)}, "budget")]
)
def test_a_program_is_not_started_on_machines_that_came_up_after_the_limit(
    world: World, limits: dict[str, object], reason: str
) -> None:
    world.cloud.timings = CloudTimings(boot_s=60.0, boot_s_max=60.0)
    add_job(world, replace(world.task, **limits))  # type: ignore[arg-type]
    run_to_end(world, "plain")
    job = world.get_job()
    assert job.status is JobStatus.FAILED and reason in job.failure
    assert world.gang.starts == 0
    assert not world.list_live_nodes()


@pytest.mark.parametrize(
    ("error", "deadline_hours", "fails"),
    [
        (AuthError("the login has expired"), 2.0, True),
        (AuthError("the login has expired"), None, False),
        (AccountError("logged in to another account"), 2.0, False),
    ],
)
def test_a_job_without_machines_waits_for_a_login_until_its_deadline(
    world: World, error: CloudError, deadline_hours: float | None, fails: bool
) -> None:
    async def refuse(request: NodeRequest) -> Sequence[Node]:
        raise error

    world.cloud.create_nodes = refuse  # type: ignore[method-assign]
    add_job(world, replace(world.task, goal=Goal(deadline_hours=deadline_hours)))
    controller = world.make_controller()

    def observe(until_s: float) -> JobStatus:
        while world.clock.now_s() < until_s and not world.get_job().status.is_terminal:
            wait_s = min(world.clock.run(controller.step), HOUR_S)
            world.clock.run(lambda wait_s=wait_s: world.clock.sleep(wait_s))
        return world.get_job().status

    submitted_s = world.get_job().submitted_s
    assert observe(submitted_s + 1.9 * HOUR_S) is JobStatus.PENDING
    assert observe(submitted_s + 4.0 * HOUR_S) is (JobStatus.FAILED_PRECHECKS if fails else JobStatus.PENDING)
    assert world.get_job().failure == (error.message if fails else "")


def test_each_time_that_no_offer_fits_a_recovery_the_files_of_offers_are_read_again(world: World) -> None:
    create, planned_s = world.cloud.create_nodes, list[float]()

    async def create_later(request: NodeRequest) -> Sequence[Node]:
        if world.store.jobs.list_attempts(world.job_id) and len(planned_s) < 6:
            raise CapacityError("no capacity")
        return await create(request)

    def plan(task: Task, avoid: object) -> Plan:
        planned_s.append(world.clock.now_s())
        if len(planned_s) in (3, 5):
            raise NoOfferError("half a file of prices")
        return make_plan(task)

    world.cloud.create_nodes = create_later  # type: ignore[method-assign]
    run_to_end(world, "preemption", planner=plan)
    assert world.get_job().status is JobStatus.SUCCEEDED
    assert planned_s[4] - planned_s[2] > NO_OFFER_S, "long since the first time"
    told = [event.kind for event in world.store.events.list(job_id=world.job_id)]
    assert EventKind.WAITING in told, "offers did fit in between"


def test_the_rest_of_a_job_is_planned_with_what_is_left_of_its_budget(world: World) -> None:
    add_job(world, replace(world.task, goal=Goal(budget_usd=100.0)))
    budgets, spent = list[float | None](), list[float]()

    def plan(task: Task, avoid: object) -> Plan:
        assert task.goal is not None
        budgets.append(task.goal.budget_usd)
        spent.append(world.store.bills.spend_usd(job_id=world.job_id, now_s=world.clock.now_s()))
        return make_plan(task)

    run_to_end(world, "preemption", planner=plan)
    assert world.get_job().status is JobStatus.SUCCEEDED
    assert spent[0] == 0.0 < spent[-1] and budgets == pytest.approx([100.0 - usd for usd in spent])
