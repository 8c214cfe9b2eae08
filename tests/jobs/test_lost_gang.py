"""The outcome of an attempt whose nodes are gone: the program's end, the end of its allowance, or a loss."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from broker.config import Config
from broker.jobs.log_files import get_log_path
from broker.jobs.lost_gang import LEASES_APART_S, LostGang, is_programs_failure
from broker.jobs.node_health import UnhealthyNodes
from broker.jobs.outcome_recorder import OutcomeRecorder
from broker.jobs.outcomes import RunResult
from broker.types import (
    Attempt,
    CheckpointSpec,
    Cluster,
    ClusterStatus,
    Goal,
    Job,
    JobStatus,
    Node,
    NodeState,
    Outcome,
    OutcomeKind,
    Progress,
    RunStatus,
)
from broker.wording import describe_outcome
from tests.simulation.world import OWNER, Report, World, make_plan

FAILED = RunResult(status=RunStatus.FAILED, returncode=3, reason="rank 1 exited with 3", lease_left_s=9000.0)
SILENT = Report(status=RunStatus.SETTING_UP, returncode=None, unreachable=(0, 1), progress=None)


class Left:
    def __init__(self, outcome: RunResult | None, log: bytes | None = None) -> None:
        self.outcome = outcome
        self.log = log
        self.asked: list[tuple[str, int]] = []

    async def read_outcome(self, place: str, attempt: int) -> RunResult | None:
        self.asked.append((place, attempt))
        return self.outcome

    async def read_log(self, place: str, attempt: int) -> bytes | None:
        return self.log


def make_nodes(*reasons: str, state: NodeState = NodeState.TERMINATED) -> tuple[Node, ...]:
    return tuple(
        Node(
            id=f"n{rank}", cloud="simulated", owner=OWNER, cluster="job-1-1", attempt=1, rank=rank,
            state=state if reason else NodeState.RUNNING, reason=reason, ended_s=50.0 if reason else None, handle="ssh://h",
        )
        for rank, reason in enumerate(reasons)
    )  # fmt: skip


def conclude(
    folder: Path,
    left: Left,
    *reasons: str,
    to: str | None = "s3://bucket/runs",
    was_attended: bool = False,
    goal: Goal | None = None,
    world: World | None = None,
    is_starting: bool = False,
) -> tuple[Job, World]:
    world = world or World(folder)
    job = world.get_job()
    job = replace(job, task=replace(job.task, checkpoint=CheckpointSpec(to=to), goal=goal))
    placement = make_plan(job.task).choice.placement
    attempt = Attempt(job_id=job.id, number=1, cluster="job-1-1", placement=placement, started_s=0.0, running_s=1.0)
    world.store.jobs.put_attempt(attempt)
    nodes = make_nodes(*reasons)
    cluster = Cluster(name="job-1-1", status=ClusterStatus.UP, placement=placement, attempt=1, nodes=nodes)
    config = Config(home=folder, owner=OWNER)
    recorder, unhealthy = OutcomeRecorder(job.id, world.store, world.clock), UnhealthyNodes(world.store, world.clock)
    gang = LostGang(world.store, config, recorder, left, unhealthy)
    if is_starting:
        asyncio.run(gang.record_success(job, attempt, cluster))
        return world.get_job(), world
    asyncio.run(gang.record_loss(job, attempt, cluster, SILENT, is_noticed=False, was_attended=was_attended))
    return world.get_job(), world


def test_uploaded_success_ends_the_job_with_its_last_step_and_log(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.store.jobs.set_progress(world.job_id, Progress(step=5, total=40))
    left = Left(
        RunResult(status=RunStatus.SUCCEEDED, returncode=0, progress=Progress(step=40, total=40)), b"one\ntwo\n"
    )
    job, _ = conclude(tmp_path, left, "missing", "preempted", world=world)
    assert (job.status, describe_outcome(job.attempts[0].outcome)) == (JobStatus.SUCCEEDED, "succeeded")
    assert job.progress == Progress(step=40, total=40)
    assert get_log_path(tmp_path / "logs", job.id).read_bytes() == b"one\ntwo\n"
    assert left.asked == [(f"s3://bucket/runs/{OWNER}-{job.folder}", 1)]


def test_log_continues_where_the_copy_was_and_a_second_look_repeats_nothing(tmp_path: Path) -> None:
    from broker.state.jobs import LogOffset

    world = World(tmp_path)
    path = get_log_path(tmp_path / "logs", world.job_id)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"old attempt\none\n")
    world.store.jobs.set_log_offset(world.job_id, LogOffset(attempt=1, source_bytes=4, file_bytes=16))
    left = Left(None, b"one\ntwo\n")
    for outcome in (RunResult(status=RunStatus.CANCELLED), RunResult(status=RunStatus.CANCELLED)):
        left.outcome = outcome
        conclude(tmp_path, left, "lease", world=world)
        assert path.read_bytes() == b"old attempt\none\ntwo\n"


@pytest.mark.parametrize("reasons", [("done", "done"), ("lease", "lease"), ("lease", "done")])
def test_failure_counts_as_the_programs_where_all_nodes_ended_themselves(
    tmp_path: Path, reasons: tuple[str, ...]
) -> None:
    job, _ = conclude(tmp_path, Left(FAILED), *reasons)
    assert (job.status, job.failure) == (JobStatus.FAILED, "`run` exited with code 3")


@pytest.mark.parametrize("reasons", [("done", "done"), ("done", "preempted")])
def test_a_successful_program_is_not_rerun_for_missing_files(tmp_path: Path, reasons: tuple[str, ...]) -> None:
    left = replace(FAILED, returncode=74, unflushed="written files did not arrive: 1 files", lease_left_s=1.0)
    job, _ = conclude(tmp_path, Left(left), *reasons)
    assert job.status is JobStatus.FAILED
    assert job.failure.startswith("the program succeeded, but written files did not arrive: 1 files")


def test_an_unrecorded_start_may_have_ended(tmp_path: Path) -> None:
    unflushed = replace(FAILED, returncode=74, unflushed="written files did not arrive")
    for name, left, expected in (
        ("a", RunResult(status=RunStatus.SUCCEEDED, returncode=0), JobStatus.SUCCEEDED),
        ("b", unflushed, JobStatus.FAILED),
        ("c", FAILED, JobStatus.PENDING),  # the outcome of its nodes decides
    ):
        (tmp_path / name).mkdir()
        job, _ = conclude(tmp_path / name, Left(left), "done", "done", is_starting=True)
        assert job.status is expected, name


def test_failed_setup_is_reported_as_such(tmp_path: Path) -> None:
    job, _ = conclude(tmp_path, Left(replace(FAILED, status=RunStatus.FAILED_SETUP)), "done", "done")
    assert job.status is JobStatus.FAILED_SETUP


@pytest.mark.parametrize(
    ("left", "reasons"),
    [
        (FAILED, ("done", "preempted")),
        (FAILED, ("done", "missing")),
        (FAILED, ("done", "crashed")),
        (FAILED, ("done", "terminated")),
        (FAILED, ("done", "")),
        (replace(FAILED, returncode=None), ("done", "done")),
        (replace(FAILED, lease_left_s=None), ("done", "done")),
        (replace(FAILED, lease_left_s=LEASES_APART_S - 1), ("lease", "lease")),
        (replace(FAILED, status=RunStatus.CANCELLED), ("done", "done")),
    ],
)
def test_failure_that_may_be_a_lost_peers_is_a_loss(tmp_path: Path, left: RunResult, reasons: tuple[str, ...]) -> None:
    assert not is_programs_failure(left, make_nodes(*reasons), SILENT.unreachable)
    job, _ = conclude(tmp_path, Left(left), *reasons)
    assert job.status is JobStatus.RECOVERING and job.attempts[0].outcome
    assert job.attempts[0].outcome.kind is OutcomeKind.PREEMPTED


def test_failure_well_before_the_lease_ended_is_the_programs() -> None:
    left = replace(FAILED, lease_left_s=11 * 60.0)
    assert is_programs_failure(left, make_nodes("done", "done"), SILENT.unreachable)


def test_node_that_its_cloud_keeps_stopped_ended_itself_too() -> None:
    assert is_programs_failure(FAILED, make_nodes("lease", "lease", state=NodeState.STOPPED), (0, 1))


def test_node_that_still_answers_is_not_a_lost_one() -> None:
    assert is_programs_failure(FAILED, make_nodes("", "done"), ())
    assert not is_programs_failure(FAILED, make_nodes("", "done"), (0,))


def test_expired_allowance_is_described_and_not_a_preemption(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.store.jobs.set_progress(world.job_id, Progress(step=7))
    job, _ = conclude(tmp_path, Left(None), "lease", "lease", world=world)
    assert job.status is JobStatus.RECOVERING
    assert job.attempts[0].outcome == Outcome(kind=OutcomeKind.LEASE_EXPIRED, detail="12 h", step=7)
    assert job.attempts[0].lost_s == 50.0
    assert world.store.events.list(job_id=job.id)[-1].message == (
        "the unattended allowance of 12 h expired after step 7; restarting on new nodes"
    )


def test_allowance_that_the_budget_may_have_cut_is_described_as_an_upper_bound(tmp_path: Path) -> None:
    job, _ = conclude(tmp_path, Left(None), "lease", "lease", goal=Goal(budget_usd=3.0))
    assert job.attempts[0].outcome == Outcome(kind=OutcomeKind.LEASE_EXPIRED, detail="up to 12 h")


@pytest.mark.parametrize("reasons", [("lease", "preempted"), ("missing", "missing"), ("lease", "terminated")])
def test_other_ends_are_losses_as_before(tmp_path: Path, reasons: tuple[str, ...]) -> None:
    job, _ = conclude(tmp_path, Left(None), *reasons)
    assert describe_outcome(job.attempts[0].outcome) == "preempted: node 0 and 1 gone"
    assert job.attempts[0].lost_s == 50.0, "when the cloud says that they ended, not when it was noticed"


def test_node_that_goes_while_the_broker_renews_its_lease_is_lost(tmp_path: Path) -> None:
    job, _ = conclude(tmp_path, Left(None), "lease", "lease", was_attended=True)
    assert describe_outcome(job.attempts[0].outcome) == "preempted: node 0 and 1 gone"


def test_node_that_its_program_filled_counts_as_a_failure_of_the_program(tmp_path: Path) -> None:
    """Kubernetes ends the whole container if a process exceeds its memory: as a loss, it would be repeated forever."""
    job, _ = conclude(tmp_path, Left(None), "out of memory", "")
    assert (job.status, job.attempts[0].returncode) == (JobStatus.FAILED, 137)
    assert "running out of memory is the usual cause" in job.failure


def test_program_that_fills_its_node_after_some_steps_is_restarted(tmp_path: Path) -> None:
    world = World(tmp_path)
    placement = make_plan(world.get_job().task).choice.placement
    world.store.jobs.put_attempt(
        Attempt(job_id=world.job_id, number=1, cluster="job-1-1", placement=placement, started_s=0.0, running_s=1.0)
    )
    world.store.jobs.set_progress(world.job_id, Progress(step=7, total=40))
    job, _ = conclude(tmp_path, Left(None), "", "out of memory", world=world)
    assert job.status is JobStatus.RECOVERING and job.attempts[0].outcome
    assert (job.attempts[0].outcome.kind, job.attempts[0].outcome.step) == (OutcomeKind.PROGRAM_FAILED, 7)


def test_local_folder_is_not_read_as_a_bucket(tmp_path: Path) -> None:
    left = Left(FAILED)
    job, _ = conclude(tmp_path, left, "done", "done", to="/shared")
    assert not left.asked and job.status is JobStatus.RECOVERING


def test_log_so_far_is_fetched_where_the_run_never_ended(tmp_path: Path) -> None:
    job, _ = conclude(tmp_path, Left(None, b"step 1\n"), "lease", "preempted")
    assert job.status is JobStatus.RECOVERING
    assert get_log_path(tmp_path / "logs", job.id).read_bytes() == b"step 1\n"
