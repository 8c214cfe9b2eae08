"""The next attempt on the nodes of the last one: one program at a time, and new nodes where that fails."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from broker.errors import CloudError, InvalidRequestError, ThrottledError, TransientError
from broker.jobs.in_place import KEPT_S_MAX, ReuseState, has_ended
from broker.types import (
    Attempt,
    Cluster,
    Goal,
    JobRecovery,
    JobStatus,
    Node,
    NodeRequest,
    NodeState,
    ObservedCheckpoints,
    RunStatus,
    Task,
)
from tests.simulation.test_crashes import check, run_to_end
from tests.simulation.world import Report, World, make_plan


def make_world(folder: Path, *, exit_codes: tuple[int, ...] = (), hangs: int = 0) -> World:
    world = World(folder, exit_codes=exit_codes)
    world.gang.hangs = hangs
    recovery = JobRecovery(stall_timeout_s=30.0, max_restarts_on_errors=5)
    world.task = Task(name="train", run="train", num_nodes=2, recovery=recovery)
    world.job_id = world.store.jobs.add("train", world.task).id
    return world


def test_a_hung_program_is_ended_and_started_again_on_its_nodes(tmp_path: Path) -> None:
    world = make_world(tmp_path, hangs=1)
    run_to_end(world, "plain")
    check(world, JobStatus.SUCCEEDED)
    first, second = world.get_job().attempts
    assert (first.cluster, first.number, second.number) == (second.cluster, 1, 2)
    assert world.gang.starts == 2 and first.ended_s == second.started_s
    assert len([node for node in world.cloud.observe() if node.owner == "me"]) == 2
    spent_usd = world.store.bills.spend_usd(job_id=world.job_id, now_s=world.clock.now_s())
    assert first.usd > 0 and first.usd + second.usd == pytest.approx(spent_usd)


def test_a_restart_that_brings_no_headway_is_followed_by_one_on_new_nodes(tmp_path: Path) -> None:
    world = make_world(tmp_path, exit_codes=(7, 7))
    run_to_end(world, "plain")
    check(world, JobStatus.SUCCEEDED)
    clusters = [attempt.cluster for attempt in world.get_job().attempts]
    assert clusters[0] == clusters[1] != clusters[2] and len(clusters) == 3


def test_a_program_that_fails_where_a_node_has_a_notice_is_restarted_on_new_nodes(tmp_path: Path) -> None:
    world = make_world(tmp_path, exit_codes=(7,))
    poll, noticed = world.gang.poll, list[str]()

    async def warn(cluster: Cluster, run_id: int) -> Report:
        report, node = await poll(cluster, run_id), cluster.nodes[1]
        if not noticed:
            noticed.append(node.id)
        return replace(report, noticed=(1,) if node.id == noticed[0] and not report.unreachable else ())

    world.gang.poll = warn  # type: ignore[method-assign]
    run_to_end(world, "plain")
    check(world, JobStatus.SUCCEEDED)
    first, second = world.get_job().attempts
    assert first.cluster != second.cluster, "the cloud takes the noticed node before the program gets far"


def test_a_program_that_saves_but_reports_no_steps_keeps_its_nodes(tmp_path: Path) -> None:
    world = World(tmp_path, exit_codes=(1, 1, 1, 1))
    poll = world.gang.poll

    async def observe(cluster: Cluster, run_id: int) -> Report:
        report = await poll(cluster, run_id)
        saved = ObservedCheckpoints(number=100 * run_id, time_s=world.clock.now_s())
        return replace(report, progress=None, checkpoints=saved if report.status is RunStatus.FAILED else None)

    world.gang.poll = observe  # type: ignore[method-assign]
    run_to_end(world, "plain")
    assert world.get_job().status is JobStatus.SUCCEEDED
    attempts = world.get_job().attempts
    assert len(attempts) == 5 and len({attempt.cluster for attempt in attempts}) == 1


def test_the_log_holds_all_attempts_on_the_same_nodes(tmp_path: Path) -> None:
    world = make_world(tmp_path, hangs=1)
    run_to_end(world, "plain")
    job = world.get_job()
    log = (world.folder / "logs" / "jobs" / f"{world.job_id}.log").read_text().splitlines()
    first = [f"{job.name_cluster(1)} step {number}" for number in range(1, 16)]
    assert log == first + [f"{job.name_cluster(2)} step {number}" for number in range(11, 31)]


def test_runs_of_a_cluster_are_numbered_by_its_attempts(tmp_path: Path) -> None:
    world = make_world(tmp_path, hangs=1)
    seen: list[tuple[int, int]] = []
    start = world.gang.start

    async def note(cluster: object, task: Task, *, run_id: int, envs: dict[str, str], lease_s: float | None) -> None:
        seen.append((run_id, int(envs["BROKER_ATTEMPT"])))
        await start(cluster, task, run_id=run_id, envs=envs, lease_s=lease_s)  # type: ignore[arg-type]

    world.gang.start = note  # type: ignore[method-assign,assignment]
    run_to_end(world, "plain")
    assert seen == [(1, 1), (2, 2)]


@pytest.mark.parametrize(
    ("status", "statuses", "is_over"),
    [
        (RunStatus.FAILED, (RunStatus.FAILED, RunStatus.FAILED), True),
        (RunStatus.FAILED, (RunStatus.FAILED, None), True),
        (RunStatus.FAILED, (RunStatus.FAILED, RunStatus.RUNNING), False),
        (RunStatus.RUNNING, (RunStatus.RUNNING, RunStatus.RUNNING), False),
    ],
)
def test_a_program_has_ended_once_every_node_that_knows_it_reports_so(
    status: RunStatus, statuses: tuple[RunStatus | None, ...], is_over: bool
) -> None:
    report = Report(status=status, returncode=None, unreachable=(), progress=None, statuses=statuses)
    assert has_ended(report) is is_over


@pytest.mark.parametrize(
    ("error", "is_kept"), [(InvalidRequestError("no workdir"), False), (TransientError("x"), True)]
)
def test_new_nodes_are_kept_while_they_boot_and_not_where_the_files_of_the_task_are_gone(
    tmp_path: Path, error: CloudError, is_kept: bool
) -> None:
    world = make_world(tmp_path)
    controller = world.make_controller()

    async def fail(cluster: Cluster, task: Task) -> None:
        raise error

    async def act() -> bool:
        cluster = await world.make_provisioner().up("c", make_plan(world.task))
        controller._gang.prepare = fail  # type: ignore[method-assign]
        return await controller._in_place._prepare(world.get_job(), cluster, (1,))

    assert world.clock.run(act) is is_kept


def step_in_place(world: World, kept_s: float) -> ReuseState:
    """Take one step towards a restart on nodes that may be kept for `kept_s` from now."""
    controller = world.make_controller()

    async def act() -> ReuseState:
        cluster = await world.make_provisioner().up("c", make_plan(world.task), job_id=world.job_id)
        await world.gang.start(cluster, world.task, run_id=1, envs={"BROKER_JOB_ID": str(world.job_id)})
        attempt = Attempt(
            job_id=world.job_id, number=1, cluster="c", placement=cluster.placement, started_s=world.clock.now_s(),
            kept_until_s=world.clock.now_s() + kept_s,
        )  # fmt: skip
        return await controller._in_place.step(world.get_job(), attempt)

    kept = world.clock.run(act)
    assert isinstance(kept, ReuseState)
    return kept


@pytest.mark.parametrize(
    ("kept_s", "is_kept"), [(-1.0, False), (0.0, False), (60.0, True), (KEPT_S_MAX, True), (KEPT_S_MAX + 1.0, False)]
)
def test_nodes_are_kept_up_to_their_limit_and_not_for_longer_if_the_clock_was_set_back(
    tmp_path: Path, kept_s: float, is_kept: bool
) -> None:
    assert (step_in_place(make_world(tmp_path), kept_s) is not ReuseState.GIVEN_UP) is is_kept


def test_nodes_of_a_job_without_money_are_not_kept(tmp_path: Path) -> None:
    world = make_world(tmp_path)
    world.job_id = world.store.jobs.add("poor", replace(world.task, goal=Goal(budget_usd=1e-9))).id
    assert step_in_place(world, 60.0) is ReuseState.GIVEN_UP


def test_no_node_replaces_a_lost_one_once_the_budget_is_used_up_in_the_meantime(tmp_path: Path) -> None:
    """The cloud throttles the call while the other node is billed."""
    world = make_world(tmp_path)
    world.job_id = world.store.jobs.add("poor", replace(world.task, goal=Goal(budget_usd=1.0))).id
    controller, create, asked = world.make_controller(), world.cloud.create_nodes, list[str]()

    async def act() -> ReuseState:
        cluster = await world.make_provisioner().up("c", make_plan(world.task), job_id=world.job_id)

        async def throttle(request: NodeRequest) -> Sequence[Node]:
            asked.append(request.token)
            if len(asked) == 1:
                bill = replace(cluster.nodes[0], id="other", usd_hour=1e6)
                world.store.bills.record(bill)
                raise ThrottledError("slow down")
            return await create(request)

        world.cloud.create_nodes = throttle  # type: ignore[method-assign]
        lost = replace(cluster, nodes=(cluster.nodes[0], replace(cluster.nodes[1], state=NodeState.TERMINATED)))
        kept = controller._in_place._replace(world.get_job(), lost)
        while kept is ReuseState.WAITING:
            await world.clock.sleep(1.0)
            kept = controller._in_place._replace(world.get_job(), lost)
            if controller._in_place._replacing is None:
                break
        return kept

    assert world.clock.run(act) is ReuseState.GIVEN_UP
    assert len(asked) == 1
