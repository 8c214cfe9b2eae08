"""Jobs that cannot start until a user acts, or until a file that is being saved is complete, wait for it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from broker.errors import AuthError, DeniedError, NoOfferError
from broker.types import EventKind, Goal, JobStatus, Node, NodeRequest, Plan, Secret, Task
from tests.simulation.test_crashes import run_to_end
from tests.simulation.world import World, make_plan


def make_logged_out(folder: Path, *, until_s: float, deadline_hours: float | None = None) -> World:
    """Return a world whose login has expired from the start; a user renews it at `until_s`."""
    world = World(folder)
    create = world.cloud.create_nodes
    begin_s = world.clock.now_s()

    async def create_when_logged_in(request: NodeRequest) -> Sequence[Node]:
        if world.clock.now_s() - begin_s < until_s:
            raise AuthError("the SSO session has expired", hints=("run `aws sso login`",))
        return await create(request)

    world.cloud.create_nodes = create_when_logged_in  # type: ignore[method-assign]
    if deadline_hours is not None:
        goal = Goal(work_hours=0.1, deadline_hours=deadline_hours)
        world.job_id = world.store.jobs.add("due", replace(world.task, goal=goal)).id
    return world


def list_messages(world: World, *kinds: EventKind) -> list[str]:
    return [event.message for event in world.store.events.list(job_id=world.job_id) if event.kind in kinds]


def test_a_first_attempt_waits_for_a_new_login_and_names_the_command_once(tmp_path: Path) -> None:
    world = make_logged_out(tmp_path, until_s=1800.0)
    run_to_end(world, "plain")
    assert world.get_job().status is JobStatus.SUCCEEDED
    assert list_messages(world, EventKind.LOGIN_NEEDED) == [
        "cannot start machines until you act: the SSO session has expired; run `aws sso login`"
    ]
    waits = list_messages(world, EventKind.WAITING)
    assert len(waits) > 1 and waits[0].startswith("the SSO session has expired; run `aws sso login`; retrying in ")


def test_a_login_that_expires_again_is_named_again_and_waits_start_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("random.uniform", lambda low, high: high)
    world = World(tmp_path)
    create, asked = world.cloud.create_nodes, 0

    async def create_when_logged_in(request: NodeRequest) -> Sequence[Node]:
        nonlocal asked
        asked += 1
        if asked in (1, 2, 3, 5, 6, 7):
            raise AuthError("the SSO session has expired")
        return await create(request)

    world.cloud.create_nodes = create_when_logged_in  # type: ignore[method-assign]
    run_to_end(world, "preemption")
    assert world.get_job().status is JobStatus.SUCCEEDED
    events = world.store.events.list(job_id=world.job_id)
    waits = [event.data["wait_s"] for event in events if event.kind is EventKind.WAITING]
    assert waits == [20.0, 40.0, 80.0, 20.0, 40.0]
    assert len(list_messages(world, EventKind.LOGIN_NEEDED)) == 2


@pytest.mark.long
def test_a_login_that_is_not_renewed_by_the_deadline_ends_a_job_that_never_started(tmp_path: Path) -> None:
    world = make_logged_out(tmp_path, until_s=math.inf, deadline_hours=2.0)
    run_to_end(world, "plain")
    job = world.get_job()
    assert job.status is JobStatus.FAILED_PRECHECKS and "the SSO session has expired" in job.failure
    assert world.clock.now_s() - job.submitted_s >= 2 * 3600.0


def test_a_missing_permission_ends_a_job_that_never_started_at_once(tmp_path: Path) -> None:
    world = World(tmp_path)

    async def deny(request: NodeRequest) -> Sequence[Node]:
        raise DeniedError("no permission", scope="cloud")

    world.cloud.create_nodes = deny  # type: ignore[method-assign]
    run_to_end(world, "plain")
    assert world.get_job().status is JobStatus.FAILED_PRECHECKS
    assert not list_messages(world, EventKind.WAITING)


def test_offers_that_vanish_for_a_moment_during_a_recovery_do_not_end_the_job(tmp_path: Path) -> None:
    """The file of the user's own machines is empty while an editor saves it."""
    world = World(tmp_path)
    plans, lost = 0, 0

    def plan(task: Task, avoid: Any) -> Plan:
        nonlocal plans, lost
        plans += 1
        if world.store.jobs.list_attempts(world.job_id) and not lost:
            lost += 1
            raise NoOfferError("nothing fits")
        return make_plan(task)

    run_to_end(world, "preemption", plan)
    assert lost == 1 and world.get_job().status is JobStatus.SUCCEEDED


def test_job_whose_secrets_are_missing_ends_before_anything_is_paid(tmp_path: Path) -> None:
    """As after a restore of a copy in which the job had not ended: it would run with empty secrets."""
    world = World(tmp_path)
    task = replace(world.task, secrets={"TOKEN": Secret(value="t")})
    world.job_id = world.store.jobs.add("secret", task).id
    (file,) = tmp_path.rglob("secrets/*.json")
    file.unlink()
    run_to_end(world, "plain")
    job = world.get_job()
    assert job.status is JobStatus.FAILED_PRECHECKS and "its secrets are missing" in job.failure
    assert not job.attempts and not world.store.bills.list()


def test_job_with_its_secrets_runs(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.job_id = world.store.jobs.add("secret", replace(world.task, secrets={"TOKEN": Secret(value="t")})).id
    run_to_end(world, "plain")
    assert world.get_job().status is JobStatus.SUCCEEDED
