"""A cluster whose program has ended is kept while its nodes upload what it wrote to mounted buckets."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from broker.config import Config
from broker.jobs import log_files
from broker.jobs.controller import JobController
from broker.types import Cluster, JobRecovery, JobStatus, OutcomeKind, RunStatus, StorageMount
from broker.wording import describe_outcome
from tests.simulation.world import OWNER, Report, SimulatedGang, World
from tests.tiers import long

UPLOAD_S = 1200.0
NOTE = "written files are not in `s3://b` yet"


class UploadingGang(SimulatedGang):
    """A gang whose run ends only some time after its program: its files take a while."""

    flushed_s = math.inf
    failure = ""
    reports_loss = True  # that the program succeeded, and its files did not arrive

    async def poll(self, cluster: Cluster, run_id: int) -> Report:
        report = await super().poll(cluster, run_id)
        if not report.status.is_terminal:
            return report
        now_s = self._clock.now_s()
        self.flushed_s = min(self.flushed_s, now_s + UPLOAD_S)
        if now_s < self.flushed_s:
            return replace(report, status=RunStatus.RUNNING, returncode=None, flush=NOTE)
        if self.failure:
            unflushed = self.failure if self.reports_loss else ""
            return replace(report, status=RunStatus.FAILED, returncode=74, flush=self.failure, unflushed=unflushed)
        return report


@pytest.fixture
def world(tmp_path: Path) -> World:
    world = World(tmp_path)
    world.gang = UploadingGang(world.cloud, world.clock)
    mount = StorageMount(target="/out", source=("s3://b",), mode="MOUNT_CACHED")
    recovery = JobRecovery(stall_timeout_s=60.0)
    world.job_id = world.store.jobs.add("writes", replace(world.task, storage_mounts=(mount,), recovery=recovery)).id
    return world


def play(world: World, *, cancel_at_s: float = math.inf) -> float:
    """Let the controller work to the end of the job; return when its last node ended."""
    begin_s = world.clock.now_s()

    async def work() -> None:
        controller: JobController = world.make_controller()
        while (wait_s := await controller.step()) != math.inf:
            await world.clock.sleep(max(wait_s, 0.1))
            if world.clock.now_s() - begin_s > cancel_at_s:
                world.store.jobs.request_cancel(world.job_id)

    world.clock.run(work)
    assert not world.list_live_nodes()
    return max(node.ended_s or 0.0 for node in world.cloud.observe() if node.owner == OWNER)


class TalkingGang(SimulatedGang):
    """A gang whose program prints so much at its end that one poll copies only a part of it."""

    async def read_log(self, cluster: Cluster, run_id: int, *, offset: int) -> tuple[bytes, int]:
        self._reach(cluster)
        report = await self.poll(cluster, run_id)
        text = b"".join(b"line %d\n" % number for number in range(300)) if report.status.is_terminal else b""
        return text[offset : offset + 8], offset + len(text[offset : offset + 8])


def test_whole_log_is_copied_before_the_cluster_is_terminated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon that was not running for a night has a large part to copy; its last lines were lost with the node."""
    monkeypatch.setattr(log_files, "CHUNKS_MAX", 4)
    world = World(tmp_path)
    world.gang = TalkingGang(world.cloud, world.clock)
    play(world)
    log = log_files.get_log_path(Config(home=world.folder, owner=OWNER).logs, world.job_id).read_text()
    assert log.splitlines() == [f"line {number}" for number in range(300)]


def list_notes(world: World) -> list[str]:
    return [event.message for event in world.store.events.list(job_id=world.job_id) if event.kind == "flushing"]


def test_finished_cluster_is_kept_until_its_files_have_arrived(world: World) -> None:
    ended_s = play(world)
    job = world.get_job()
    assert job.status is JobStatus.SUCCEEDED and len(job.attempts) == 1, "uploading is not a stall"
    assert isinstance(world.gang, UploadingGang) and ended_s >= world.gang.flushed_s
    assert list_notes(world) == [NOTE], "reported once"


def test_cancelled_cluster_is_kept_until_its_files_have_arrived(world: World) -> None:
    ended_s = play(world, cancel_at_s=20.0)
    assert world.get_job().status is JobStatus.CANCELLED
    assert isinstance(world.gang, UploadingGang) and ended_s >= world.gang.flushed_s
    assert list_notes(world) == [NOTE]


def test_files_that_did_not_arrive_are_reported(world: World) -> None:
    assert isinstance(world.gang, UploadingGang)
    world.gang.failure = "written files did not arrive: 1 files (2.000 GB) for `s3://b`"
    ended_s = play(world)
    assert list_notes(world)[:2] == [NOTE, world.gang.failure]
    job = world.get_job()
    assert job.status is JobStatus.FAILED and ended_s >= world.gang.flushed_s
    assert len(job.attempts) == 1 and job.progress is not None and job.progress.step > 0, "it is not run again"
    assert job.failure.startswith(f"the program succeeded, but {world.gang.failure}") and "lost" in job.failure
    assert job.outcome_kind is OutcomeKind.FILES_LOST
    assert describe_outcome(job.attempts[0].outcome) == "files were not uploaded"


@long
def test_exit_code_without_a_report_of_lost_files_is_the_programs(world: World) -> None:
    assert isinstance(world.gang, UploadingGang)
    world.gang.failure, world.gang.reports_loss = "written files did not arrive", False
    play(world)
    assert len(world.get_job().attempts) > 1, "a death at a later step than before is a restart"


def test_cancelled_job_without_mounts_waits_for_nothing(tmp_path: Path) -> None:
    world = World(tmp_path)
    begin_s = world.clock.now_s()
    task = replace(world.task, storage_mounts=(StorageMount(target="/in", source=("s3://b",), mode="COPY"),))
    world.job_id = world.store.jobs.add("writes", task).id
    ended_s = play(world, cancel_at_s=20.0)
    assert world.get_job().status is JobStatus.CANCELLED and ended_s - begin_s < 120.0
