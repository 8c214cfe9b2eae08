"""Jobs end as their program ended; only the user's own failures count as failures."""

from __future__ import annotations

import asyncio
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from broker.clock import SystemClock
from broker.config import Config
from broker.errors import (
    AuthError,
    CapacityError,
    CloudError,
    FencedError,
    InvalidRequestError,
    NoOfferError,
    StateError,
    TransientError,
)
from broker.jobs.controller import JobController
from broker.jobs.daemon import STALE_S, run_daemon
from broker.jobs.daemon_process import ensure_daemon, hold_lock
from broker.jobs.health import HealthSignals, Verdict, classify
from broker.jobs.log_files import DAEMON_LOG_BYTES_MAX, forget_logs, get_log_path, rotate_log
from broker.jobs.monitor import AttemptMonitor
from broker.jobs.replanning import cut_to_rest, order_plan
from broker.jobs.summary import summarize
from broker.state.store import Store
from broker.types import (  # fmt: skip
    Attempt,
    Cluster,
    EventKind,
    Goal,
    Job,
    JobRecovery,
    JobStatus,
    Node,
    NodeRequest,
    NodeState,
    Plan,
    Progress,
    RunStatus,
    StorageMount,
    Task,
    make_event,
)
from broker.wording import describe_outcome
from tests.clouds.simulated import FaultRates
from tests.simulation.test_crashes import check, run_to_end
from tests.simulation.world import OWNER, Report, World, make_plan


def node(rank: int, state: NodeState = NodeState.RUNNING) -> Node:
    return Node(id=f"n{rank}", cloud="x", owner="me", cluster="c", attempt=1, rank=rank, state=state)


WELL = HealthSignals(status=RunStatus.RUNNING, returncode=None, unreachable=(), nodes=(node(0), node(1)), is_spot=True)
GONE = (node(0), node(1, NodeState.TERMINATED))


@pytest.mark.parametrize(
    ("signals", "verdict"),
    [
        (WELL, Verdict.RUNNING),
        (replace(WELL, unreachable=(1,), misses=2, unreachable_s=500.0), Verdict.UNCLEAR),
        (replace(WELL, unreachable=(1,), misses=50, unreachable_s=20.0), Verdict.UNCLEAR),
        (replace(WELL, unreachable=(1,), misses=50, unreachable_s=121.0), Verdict.LOST),
        (replace(WELL, nodes=GONE), Verdict.LOST),
        (replace(WELL, status=RunStatus.SUCCEEDED, nodes=GONE), Verdict.SUCCEEDED),
        (replace(WELL, status=RunStatus.FAILED, returncode=1, nodes=GONE), Verdict.LOST),
        (replace(WELL, status=RunStatus.FAILED, returncode=1), Verdict.UNCLEAR),
        (replace(WELL, status=RunStatus.FAILED, returncode=1, failed_s=5.0), Verdict.FAILED),
        (replace(WELL, status=RunStatus.FAILED, returncode=1, is_spot=False), Verdict.FAILED),
        (replace(WELL, status=RunStatus.FAILED, returncode=143, failed_s=100.0), Verdict.UNCLEAR),
        (replace(WELL, status=RunStatus.FAILED, is_noticed=True), Verdict.LOST),
        (replace(WELL, status=RunStatus.FAILED, nodes=(node(0),), is_noticed=True), Verdict.LOST),
        (replace(WELL, is_noticed=True), Verdict.RUNNING),
        (replace(WELL, status=RunStatus.SUCCEEDED, is_noticed=True), Verdict.SUCCEEDED),
        (replace(WELL, status=RunStatus.FAILED, returncode=143, failed_s=150.0), Verdict.FAILED),
        (replace(WELL, status=RunStatus.FAILED_SETUP, returncode=2, failed_s=9.0), Verdict.FAILED_SETUP),
        (replace(WELL, status=RunStatus.FAILED, failed_s=1.0), Verdict.UNCLEAR),
        (replace(WELL, status=RunStatus.FAILED, failed_s=9.0), Verdict.APART),
        (replace(WELL, status=RunStatus.FAILED, failed_s=9.0, nodes=GONE), Verdict.LOST),
        (replace(WELL, nodes=GONE, nodes_min=1), Verdict.RUNNING),
        (replace(WELL, nodes=GONE, nodes_min=2), Verdict.LOST),
        (replace(WELL, nodes=(node(0), node(1, NodeState.STOPPED)), nodes_min=1), Verdict.LOST),
        (replace(WELL, nodes=(node(0, NodeState.TERMINATED), node(1)), nodes_min=1), Verdict.LOST),
        (replace(WELL, nodes=GONE, nodes_min=1, status=RunStatus.FAILED, returncode=1), Verdict.LOST),
        (replace(WELL, nodes=GONE, nodes_min=1, status=RunStatus.SETTING_UP), Verdict.LOST),
    ],
)
def test_verdict_of_each_outcome(signals: HealthSignals, verdict: Verdict) -> None:
    assert classify(signals) is verdict


@pytest.mark.parametrize(
    ("strategy", "order"),
    [
        (None, ["east1b", "east1a", "west1a"]),
        ("failover", ["east1b", "east1a", "west1a"]),
        ("eager_next_region", ["west1a", "east1a", "east1b"]),
        ("cheapest", ["east1a", "east1b", "west1a"]),
    ],
)
def test_recovery_goes_where_its_strategy_says(strategy: str | None, order: list[str]) -> None:
    task = Task(num_nodes=2, recovery=JobRecovery(strategy=strategy))
    plan = make_plan(task)
    last = Attempt(job_id=1, number=1, cluster="c", placement=plan.estimates[1].placement, started_s=0.0)
    assert [e.placement.offer.zone for e in order_plan(plan, [last]).estimates] == order


def test_logs_do_not_grow_forever(tmp_path: Path) -> None:
    world = World(tmp_path)
    log = tmp_path / "daemon.log"
    with log.open("ab", buffering=0) as writer:
        writer.write(b"x" * (DAEMON_LOG_BYTES_MAX + 1))
        rotate_log(log)
        writer.write(b"next\n")
    assert log.read_bytes() == b"next\n"
    assert (tmp_path / "daemon.log.1").stat().st_size == DAEMON_LOG_BYTES_MAX + 1
    ended, recent = (world.store.jobs.add(name, world.task).id for name in ("ended", "recent"))
    for job_id in (world.job_id, ended, recent):
        path = get_log_path(tmp_path, job_id)
        path.parent.mkdir(exist_ok=True)
        path.write_text("hello\n")
        os.utime(path, (1000.0, 9000.0 if job_id == recent else 1000.0))
    for job_id in (ended, recent):
        world.store.jobs.set_status(job_id, JobStatus.SUCCEEDED)
    forget_logs(world.store, tmp_path, older_than_s=5000.0)
    left = sorted(int(path.stem) for path in (tmp_path / "jobs").iterdir())
    assert left == sorted([world.job_id, recent]), "a live job's log stays, however long it was silent"


@pytest.mark.parametrize("jump_s", [-3600.0, 3600.0])
def test_leases_and_lists_survive_clock_jumps(jump_s: float) -> None:
    watch = AttemptMonitor("c")
    report = Report(status=RunStatus.RUNNING, returncode=None, unreachable=(), progress=None)
    watch.record_lease(1000.0)
    watch.record_list(1000.0)
    assert not watch.needs_lease(1001.0) and not watch.needs_list(report, 1001.0)
    assert watch.needs_lease(1001.0 + jump_s) and watch.needs_list(report, 1001.0 + jump_s)
    watch.record_silence(1000.0)
    assert not watch.record_silence(1000.0 - 3600.0)
    assert not watch.record_silence(1001.0 - 3600.0), "silence counts from the new time on"


def test_after_a_notice_new_nodes_are_requested_before_the_old_ones_end(tmp_path: Path) -> None:
    """One spot node had a notice and its program has ended: no fault of the user's, and no time to lose."""
    world = World(tmp_path)
    controller = world.make_controller()
    while world.get_job().status is not JobStatus.RUNNING:
        world.clock.run(controller.step)
        world.clock.run(lambda: world.clock.sleep(1.0))
    poll = world.gang.poll

    async def warn(cluster: Cluster, run_id: int) -> Report:
        report = await poll(cluster, run_id)
        if cluster.attempt > 1:
            return report
        return replace(report, status=RunStatus.FAILED, returncode=None, reason="preempted")

    world.gang.poll = warn  # type: ignore[method-assign]
    world.clock.run(controller.step)
    job = world.get_job()
    assert job.status is JobStatus.RECOVERING and "notice" in describe_outcome(job.attempts[0].outcome)
    run_to_end(world, "plain")
    check(world, JobStatus.SUCCEEDED)
    assert len(world.get_job().attempts) == 2


def test_a_users_failure_ends_the_job_with_its_exit_code(tmp_path: Path) -> None:
    world = World(tmp_path, exit_codes=(7, 7, 7))
    run_to_end(world, "plain")
    check(world, JobStatus.FAILED)
    assert world.get_job().failure == "`run` exited with code 7, 3 times at step 30"


def test_no_offer_ends_the_job_with_the_reason(tmp_path: Path) -> None:
    world = World(tmp_path)

    def refuse(task: Task, avoid: object) -> Plan:
        raise NoOfferError("nothing fits")

    controller = JobController(
        world.job_id,
        store=world.store,
        provisioner=world.make_provisioner(),
        gang=world.gang,
        planner=refuse,
        clock=world.clock,
        config=Config(home=tmp_path, owner=OWNER),
    )
    world.clock.run(controller.step)
    assert world.get_job().status is JobStatus.FAILED_NO_RESOURCE
    assert math.isinf(world.clock.run(controller.step))


@pytest.mark.parametrize(
    ("error", "clusters", "words"),
    [
        (InvalidRequestError("`workdir`: ./src no longer exists"), 1, "./src no longer exists"),
        (TransientError("the agent fails: no python3"), 3, "on 3 clusters: the agent fails: no python3"),
    ],
)
def test_a_job_that_cannot_be_started_ends_with_the_reason_and_leaves_no_node(
    tmp_path: Path, error: CloudError, clusters: int, words: str
) -> None:
    world = World(tmp_path)
    world.gang.start_error = error
    controller = world.make_controller()
    for _ in range(3000):
        wait_s = world.clock.run(controller.step)
        if math.isinf(wait_s):
            break
        world.clock.run(lambda wait_s=wait_s: world.clock.sleep(wait_s))
    job = world.get_job()
    assert job.status is JobStatus.FAILED_PRECHECKS and words in job.failure
    assert len(job.attempts) == clusters
    assert not world.list_live_nodes()


def test_a_login_that_expires_during_a_job_only_makes_it_wait(tmp_path: Path) -> None:
    world = World(tmp_path)
    create, asked, refused = world.cloud.create_nodes, 0, 0

    async def create_when_logged_in(request: NodeRequest) -> Sequence[Node]:
        nonlocal asked, refused
        asked += 1
        if asked > 1 and refused < 3:
            refused += 1
            raise AuthError("the login has expired")
        return await create(request)

    world.cloud.create_nodes = create_when_logged_in  # type: ignore[method-assign]
    run_to_end(world, "preemption")
    assert refused == 3
    assert world.get_job().status is JobStatus.SUCCEEDED
    kinds = (EventKind.WAITING, EventKind.REPLACEMENT_FAILED)
    told = [event.message for event in world.store.events.list(job_id=world.job_id) if event.kind in kinds]
    assert len(told) == 3 and "the login has expired; retrying in" in told[1]


def test_a_recovery_that_finds_no_capacity_is_shown_as_one_and_keeps_its_slot(tmp_path: Path) -> None:
    world = World(tmp_path)
    create, asked, seen = world.cloud.create_nodes, 0, list[JobStatus]()

    async def create_when_there_is_room(request: NodeRequest) -> Sequence[Node]:
        nonlocal asked
        asked += 1
        seen.append(world.get_job().status)
        if 1 < asked < 40:
            raise CapacityError("no capacity")
        return await create(request)

    world.cloud.create_nodes = create_when_there_is_room  # type: ignore[method-assign]
    run_to_end(world, "preemption")
    assert world.get_job().status is JobStatus.SUCCEEDED
    assert seen[0] is JobStatus.STARTING and set(seen[1:]) == {JobStatus.RECOVERING}


def test_buckets_of_a_task_are_mounted_before_its_own_setup(tmp_path: Path) -> None:
    world = World(tmp_path)
    mount = StorageMount(target="/in", source=("s3://b",), mode="COPY")
    world.job_id = world.store.jobs.add("reads", replace(world.task, setup="pip list", storage_mounts=(mount,))).id
    start, setups = world.gang.start, list[str]()

    async def note(cluster: Cluster, task: Task, **options: Any) -> None:
        setups.append(task.setup or "")
        await start(cluster, task, **options)

    world.gang.start = note  # type: ignore[method-assign]
    run_to_end(world, "plain")
    assert setups and all("COPY s3://b /in || exit $?\npip list" in each for each in setups)


def make_stalling(folder: Path, hangs: int) -> World:
    world = World(folder)
    world.gang.hangs = hangs
    recovery = JobRecovery(stall_timeout_s=60.0)
    world.job_id = world.store.jobs.add("hung", replace(world.task, recovery=recovery)).id
    return world


def make_report(*, step: int | None, unreachable: tuple[int, ...] = ()) -> Report:
    progress = None if step is None else Progress(step=step, total=100)
    return Report(status=RunStatus.RUNNING, returncode=None, unreachable=unreachable, progress=progress)


def test_a_hung_program_is_restarted_on_new_nodes_and_finishes(tmp_path: Path) -> None:
    world = make_stalling(tmp_path, hangs=1)
    run_to_end(world, "plain")
    job = world.get_job()
    assert job.status is JobStatus.SUCCEEDED
    assert [describe_outcome(attempt.outcome) for attempt in job.attempts] == ["stalled at step 15", "succeeded"]
    assert not world.list_live_nodes()


def test_an_hour_without_observations_does_not_count_as_a_stall() -> None:
    """A laptop may sleep and a clock may be set: the healthy program must not be restarted for it."""
    watch, seen = AttemptMonitor("job-1-1"), make_report(step=7)
    assert watch.measure_stall_s(seen, 1000.0) == 0.0
    assert watch.measure_stall_s(seen, 1010.0) == 10.0
    assert watch.measure_stall_s(seen, 4610.0) <= 60.0
    assert watch.measure_stall_s(seen, 1020.0) <= 60.0  # and back again
    stalls_s = [watch.measure_stall_s(seen, 1020.0 + 20.0 * look) for look in range(100)]
    assert stalls_s[-1] >= 1980.0, "time in which it is watched counts in full"


def test_an_unreachable_head_does_not_count_as_a_stalled_program() -> None:
    watch = AttemptMonitor("job-1-1")
    assert watch.measure_stall_s(make_report(step=7), 0.0) == 0.0
    assert watch.measure_stall_s(make_report(step=7), 10.0) == 10.0
    silent = [watch.measure_stall_s(make_report(step=None, unreachable=(0,)), 10.0 + 5 * look) for look in range(1, 20)]
    assert set(silent) == {10.0}
    assert watch.measure_stall_s(make_report(step=7), 110.0) == 15.0
    assert watch.measure_stall_s(make_report(step=8), 115.0) == 0.0


def test_a_clock_jump_does_not_count_as_silence() -> None:
    watch = AttemptMonitor("job-1-1")
    assert not any(watch.record_silence(now_s) for now_s in (0.0, 1.0, 2.0, 7202.0, 7203.0))
    assert watch.record_silence(7300.0) or watch.record_silence(7330.0) or watch.record_silence(7360.0)


def test_a_program_that_always_hangs_at_one_step_fails(tmp_path: Path) -> None:
    world = make_stalling(tmp_path, hangs=9)
    run_to_end(world, "plain")
    job = world.get_job()
    assert job.status is JobStatus.FAILED and "3 times at step 15" in job.failure
    assert not world.list_live_nodes()


def test_a_job_never_costs_more_than_its_budget_and_one_poll(tmp_path: Path) -> None:
    world = World(tmp_path)
    goal = Goal(budget_usd=0.02)  # the gang costs 2 USD/h: 36 s of it
    world.job_id = world.store.jobs.add("dear", replace(world.task, goal=goal)).id
    run_to_end(world, "plain")
    job = world.get_job()
    assert job.status is JobStatus.FAILED and "budget of 0.0200 USD" in job.failure
    spent_usd = world.store.bills.spend_usd(job_id=job.id, now_s=world.clock.now_s())
    assert 0.02 <= spent_usd < 0.02 + 2.0 * 40 / 3600
    assert not world.list_live_nodes()


def test_nodes_that_never_boot_cost_no_more_than_the_budget(tmp_path: Path) -> None:
    world = World(tmp_path, faults=FaultRates(never_boots=1.0))
    world.job_id = world.store.jobs.add("dear", replace(world.task, goal=Goal(budget_usd=0.02))).id
    run_to_end(world, "plain")
    job = world.get_job()
    assert job.status is JobStatus.FAILED and "budget of 0.0200 USD" in job.failure
    assert world.cloud.bill_usd() < 0.02 + 2.0 * 10 / 3600  # one look, and the end of two nodes
    assert len([node for node in world.cloud.observe() if node.owner == OWNER]) == 2, "no second gang was asked for"
    assert not world.list_live_nodes()


def test_a_gang_that_cannot_be_started_costs_no_more_than_the_budget(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.gang.start_error = TransientError("no route to host")
    world.job_id = world.store.jobs.add("dear", replace(world.task, goal=Goal(budget_usd=0.04))).id
    run_to_end(world, "plain")
    assert world.get_job().status is JobStatus.FAILED
    assert world.cloud.bill_usd() < 0.04 + 2.0 * 10 / 3600
    assert not world.list_live_nodes()


def test_the_remaining_goal_shrinks_with_saved_steps_time_and_money(tmp_path: Path) -> None:
    job = Job(
        id=1, name="j", status=JobStatus.RECOVERING, submitted_s=0.0,
        progress=Progress(step=60, total=100, checkpoint_step=50),
        task=Task(goal=Goal(work_hours=10.0, deadline_hours=20.0, budget_usd=30.0)),
    )  # fmt: skip
    goal = cut_to_rest(job, now_s=7200.0, spent_usd=12.5).goal
    assert goal is not None
    assert (goal.work_hours, goal.deadline_hours, goal.budget_usd) == (5.0, 18.0, 17.5)


def test_a_late_job_continues_without_its_deadline(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.job_id = world.store.jobs.add("late", replace(world.task, goal=Goal(deadline_hours=0.001))).id
    asked: list[float | None] = []

    def plan(task: Task, avoid: object) -> Plan:
        assert task.goal is not None
        asked.append(task.goal.deadline_hours)
        if len(asked) > 1 and task.goal.deadline_hours is not None:
            raise NoOfferError("nothing is fast enough")
        return make_plan(task)

    run_to_end(world, "preemption", planner=plan)
    assert world.get_job().status is JobStatus.SUCCEEDED
    assert asked[-1] is None
    assert "late" in [event.kind for event in world.store.events.list(job_id=world.job_id)]


def test_the_log_of_all_attempts_has_no_gap_and_no_repeat_even_across_a_crash(tmp_path: Path) -> None:
    for crash_at in (None, 60, 75, 90, 130):
        folder = tmp_path / str(crash_at)
        folder.mkdir()
        world = World(folder, crash_at=crash_at)
        run_to_end(world, "preemption")
        lines = get_log_path(folder / "logs", world.job_id).read_text().splitlines()
        name = world.get_job().name_cluster(1)
        first = [line for line in lines if line.startswith(f"{name} ")]
        assert first and first == [f"{name} step {n}" for n in range(1, len(first) + 1)]
        assert len(lines) == len(set(lines)) and lines[-1].endswith("step 30")


def test_the_summary_counts_losses_and_costs(tmp_path: Path) -> None:
    world = World(tmp_path)
    run_to_end(world, "preemption")
    job, now_s = world.get_job(), world.clock.now_s()
    paid_usd = world.store.bills.spend_usd(job_id=job.id, now_s=now_s)
    ondemand_usd = world.store.bills.ondemand_since_usd(0.0, now_s=now_s, job_id=job.id)
    steps = world.store.jobs.list_steps(job.id)
    summary = summarize(job, job.attempts, steps, paid_usd=paid_usd, ondemand_usd=ondemand_usd, now_s=now_s)
    assert (summary.steps, summary.recoveries) == (30, 1)
    assert 0 <= summary.steps_lost < 10
    assert 2.5 * paid_usd < summary.ondemand_usd < 3.5 * paid_usd
    assert 0 < summary.useful_s < summary.total_s
    first, second = job.attempts
    assert first.lost_s is not None and second.resumed_s is not None
    assert summary.recovery_s == second.resumed_s - first.lost_s > 0
    told = [event.message for event in world.store.events.list(job_id=job.id) if event.kind == "recovered"]
    assert len(told) == 1 and f"{summary.recovery_s:.1f} s after the loss" in told[0]


def test_a_command_that_checks_for_the_daemon_does_not_stop_it(tmp_path: Path) -> None:
    world = World(tmp_path)
    config = Config(home=tmp_path, owner=OWNER)
    provisioner = world.make_provisioner()

    async def work() -> None:
        with hold_lock(config) as is_held:  # a command holds it for an instant only
            assert is_held
            daemon = asyncio.ensure_future(
                run_daemon(
                    store=world.store,
                    make_controller=lambda job_id: world.make_controller(provisioner),
                    provisioner=provisioner,
                    clock=world.clock,
                    config=config,
                )
            )
            await world.clock.sleep(0.1)
        await daemon

    world.clock.run(work)
    assert world.get_job().status is JobStatus.SUCCEEDED


def test_a_daemon_suspended_during_its_replacement_writes_nothing_afterwards(tmp_path: Path) -> None:
    world = World(tmp_path)
    config = Config(home=tmp_path, owner=OWNER)
    successor = world.open()

    async def work() -> None:
        provisioner = world.make_provisioner()
        daemon = asyncio.ensure_future(
            run_daemon(
                store=world.store,
                make_controller=lambda job_id: world.make_controller(provisioner),
                provisioner=provisioner,
                clock=world.clock,
                config=config,
            )
        )
        await world.clock.sleep(5.0)
        successor.leader.lead()
        before = len(successor.events.list())
        with pytest.raises(FencedError):
            world.store.events.add(make_event(EventKind.LATE))
        await daemon
        assert len(successor.events.list()) == before

    world.clock.run(work)
    assert world.get_job().status is not JobStatus.SUCCEEDED
    world.reborn()  # a new process continues from what it finds
    run_to_end(world, "plain")
    check(world, JobStatus.SUCCEEDED)


def test_a_daemon_that_cannot_start_reports_the_reason(tmp_path: Path) -> None:
    config = Config(home=tmp_path, owner=OWNER)
    store = Store(config.database, clock=SystemClock())
    with pytest.raises(StateError, match="no such thing"):
        ensure_daemon(config, store, [sys.executable, "-c", "import sys; sys.exit('no such thing')"])


def test_the_daemon_finishes_every_job_though_one_controller_is_broken_and_then_leaves(tmp_path: Path) -> None:
    world = World(tmp_path)
    config = Config(home=tmp_path, owner=OWNER)
    provisioner = world.make_provisioner()
    broken = world.store.jobs.add("broken", world.task).id
    failures = 0

    def make(job_id: int) -> JobController:
        nonlocal failures
        if job_id == broken and failures < 5:
            failures += 1
            raise RuntimeError("a bug")
        world.job_id = job_id
        return world.make_controller(provisioner)

    async def work() -> None:
        daemon = run_daemon(
            store=world.store, make_controller=make, provisioner=provisioner, clock=world.clock, config=config
        )
        second = run_daemon(
            store=world.store, make_controller=make, provisioner=provisioner, clock=world.clock, config=config
        )
        first = asyncio.ensure_future(daemon)
        await world.clock.sleep(1.0)
        before_s = world.clock.now_s()
        await second
        assert world.clock.now_s() - before_s < STALE_S, "the second daemon does not disturb the first"
        await first

    world.clock.run(work)
    assert [job.status for job in world.store.jobs.list()] == [JobStatus.SUCCEEDED] * 2
    assert not world.list_live_nodes()
