"""The gang of a rehearsal: run the real program, advance the simulated clock, and keep its progress files."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from broker.clock import SystemClock
from broker.rehearsal.cloud import Pace
from broker.rehearsal.report import Line, ReportedAttempt, read_lines, read_newest_line
from broker.types import Cluster, GangHead, Resources, RunStatus, Task

if TYPE_CHECKING:
    from broker.jobs.gang import Gang, GangReport

LEASE_EVERY_REAL_S = 20.0
LEASE_REAL_S = 900.0  # minimum: a budget limits the lease in simulated time, and nothing here costs money
RUN_FOLDER = "home/.broker/runs"


@dataclass
class WatchedProgram:
    """Observations of one attempt's program; times are real, in seconds since the epoch."""

    number: int
    started_s: float
    source: Path  # the progress file in the head's folder, deleted with the node
    progress_file: Path  # a hard link to it
    running_s: float | None = None  # when `run` was first observed: `setup` may take minutes
    observations: list[tuple[float, int]] = field(default_factory=list)  # time, and newest step then


class BareGang:
    """A `Gang` that wraps the real one: programs start without accelerators, and leases count real time."""

    def __init__(self, gang: Gang, pace: Pace) -> None:
        self._gang = gang
        self._pace = pace
        self._leased_s: dict[str, float] = {}  # by cluster
        self.started_s: dict[str, float] = {}  # when the program of a cluster was started, in real time
        self._real = SystemClock()

    async def prepare(self, cluster: Cluster, task: Task) -> None:
        self._pace.start(cluster.name)
        await self._gang.prepare(cluster, task)

    async def start(
        self,
        cluster: Cluster,
        task: Task,
        *,
        run_id: int,
        envs: Mapping[str, str],
        lease_s: float | None = None,
        head: GangHead | None = None,
    ) -> None:
        """Start the task without accelerators, which this machine only simulates."""
        offer = replace(cluster.placement.offer, accelerator=None, accelerator_count=0)
        bare = replace(cluster, placement=replace(cluster.placement, offer=offer, alternative=0))
        lease_s = max(lease_s or 0.0, LEASE_REAL_S)
        task = replace(task, resources=(Resources(),))
        await self._gang.start(bare, task, run_id=run_id, envs=envs, lease_s=lease_s, head=head)
        self.started_s[cluster.name] = self._leased_s[cluster.name] = self._real.now_s()

    async def send_peers(self, cluster: Cluster, run_id: int, peers: Mapping[str, object]) -> None:
        await self._gang.send_peers(cluster, run_id, peers)

    async def move_head(
        self, cluster: Cluster, run_id: int, head: GangHead, *, members: Sequence[int], log_bytes: int
    ) -> bool:
        return await self._gang.move_head(cluster, run_id, head, members=members, log_bytes=log_bytes)

    async def poll(self, cluster: Cluster, run_id: int) -> GangReport:
        return await self._gang.poll(cluster, run_id)

    async def cancel(self, cluster: Cluster, run_id: int) -> None:
        self._pace.run()
        await self._gang.cancel(cluster, run_id)

    async def read_log(self, cluster: Cluster, run_id: int, *, offset: int) -> tuple[bytes, int]:
        return await self._gang.read_log(cluster, run_id, offset=offset)

    async def renew_lease(self, cluster: Cluster, *, lease_s: float) -> None:
        """Renew the lease less often: the nodes' agents count real time, which passes more slowly than the caller's."""
        if self._real.now_s() - self._leased_s.get(cluster.name, -math.inf) >= LEASE_EVERY_REAL_S:
            await self._gang.renew_lease(cluster, lease_s=max(lease_s, LEASE_REAL_S))
            self._leased_s[cluster.name] = self._real.now_s()


class RehearsedGang(BareGang):
    """The gang of a job: its steps advance the clock, and its progress files are kept."""

    def __init__(
        self, gang: Gang, pace: Pace, *, folder: Path, speed: float, work_s_of: Callable[[Cluster], float | None]
    ) -> None:
        """`work_s_of` returns the seconds of work that a run on a cluster represents; if None, `speed` applies."""
        super().__init__(gang, pace)
        self._folder = folder
        self._speed = speed
        self._work_s_of = work_s_of
        self._pending_s = 0.0
        self.attempts: dict[int, WatchedProgram] = {}

    async def start(
        self,
        cluster: Cluster,
        task: Task,
        *,
        run_id: int,
        envs: Mapping[str, str],
        lease_s: float | None = None,
        head: GangHead | None = None,
    ) -> None:
        """Start the task, and watch the progress file of this attempt."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        number = cluster.attempt + run_id - 1  # later runs on a cluster are later attempts
        file = self._folder / f"progress-{number}.jsonl"
        first = min(cluster.nodes, key=lambda node: node.rank)
        source = Path(first.handle) / RUN_FOLDER / str(run_id) / "progress.jsonl"
        self.attempts.setdefault(number, WatchedProgram(number, self._real.now_s(), source, file))
        await super().start(cluster, task, run_id=run_id, envs=envs, lease_s=lease_s, head=head)

    async def poll(self, cluster: Cluster, run_id: int) -> GangReport:
        """Advance time by the steps of the last poll, then poll: steps are reported at the time of their end."""
        self.pass_steps()
        report = await super().poll(cluster, run_id)
        number = cluster.attempt + run_id - 1
        watched = self._keep_progress(number)
        if watched is not None and watched.running_s is None and report.status is RunStatus.RUNNING:
            watched.running_s = self._real.now_s()
        if report.progress is not None:
            self._add_work(cluster, number, report.progress.step, report.progress.total)
        if report.status.is_terminal:
            self.pass_steps()
        return report

    def pass_steps(self) -> None:
        """Advance the clock by the time that the steps seen so far represent."""
        self._pace.clock.advance(self._pending_s)
        self._pending_s = 0.0

    def read_progress(self, cluster: Cluster, number: int, *, is_resumed: bool) -> Line | None:
        """Read the newest line of attempt `number`; advance the clock up to it once the program has resumed."""
        watched = self._keep_progress(number)
        if watched is None:
            return None
        line = read_newest_line(watched.progress_file)
        if line is not None and is_resumed:
            self._add_work(cluster, number, line.step, line.total)
            self.pass_steps()
        return line

    def _keep_progress(self, number: int) -> WatchedProgram | None:
        watched = self.attempts.get(number)
        if watched is not None and not watched.progress_file.exists():
            with contextlib.suppress(OSError):
                os.link(watched.source, watched.progress_file)
        return watched

    def _add_work(self, cluster: Cluster, number: int, step: int, total: int | None) -> None:
        """Add the simulated seconds that new steps represent, beyond the real ones they took."""
        watched = self.attempts.get(number)
        if watched is None or (watched.observations and step <= watched.observations[-1][1]):
            return
        now_s = self._real.now_s()
        if watched.observations:
            before_s, before = watched.observations[-1]
        else:
            begin = ReportedAttempt(number=0, lines=read_lines(watched.progress_file)).begin_step
            before_s, before = now_s, step if begin is None else begin
        real_s = now_s - before_s
        work_s = self._work_s_of(cluster) if total else None
        stood_s = work_s / total * (step - before) if work_s and total else real_s * self._speed
        self._pending_s += max(0.0, stood_s - real_s)
        watched.observations.append((now_s, step))
