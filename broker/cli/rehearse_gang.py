"""The gang of a rehearsal: runs the program as it is on processes here, sets the clock's pace, and keeps what it said."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from broker.clock import SystemClock
from broker.clouds.rehearsed import Pace
from broker.types import Cluster, Progress, Resources, Task

if TYPE_CHECKING:
    from broker.jobs.gang import Gang, GangReport

LEASE_EVERY_REAL_S = 20.0
RUN_FOLDER = "home/.broker/runs"


@dataclass
class Watched:
    """What was seen of one attempt's program; times are real ones, seconds since the epoch."""

    number: int
    started_s: float
    progress_file: Path
    looks: list[tuple[float, int]] = field(default_factory=list)  # when, and the step that was the newest then


class RehearsedGang:
    """`Gang`, over the real one."""

    def __init__(
        self, gang: Gang, pace: Pace, *, folder: Path, work_s_of: Callable[[Cluster], float | None] | None = None
    ) -> None:
        """`work_s_of` tells for how many simulated seconds a whole run on this cluster stands; None keeps the speed."""
        self._gang = gang
        self._pace = pace
        self._folder = folder
        self._work_s_of = work_s_of
        self._leased_s = 0.0
        self._real = SystemClock()
        self.attempts: dict[int, Watched] = {}

    async def prepare(self, cluster: Cluster, task: Task) -> None:
        self._pace.start()
        await self._gang.prepare(cluster, task)

    async def start(
        self, cluster: Cluster, task: Task, *, run_id: int, envs: Mapping[str, str], lease_s: float | None = None
    ) -> None:
        """With no accelerators: this machine stands in for those that have them."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = self._folder / f"progress-{cluster.attempt}.jsonl"
        self.attempts.setdefault(cluster.attempt, Watched(cluster.attempt, self._real.now_s(), file))
        offer = replace(cluster.placement.offer, accelerator=None, accelerator_count=0)
        bare = replace(cluster, placement=replace(cluster.placement, offer=offer))
        await self._gang.start(
            bare, replace(task, resources=(Resources(),)), run_id=run_id, envs=envs, lease_s=lease_s
        )
        self._leased_s = self._real.now_s()

    async def poll(self, cluster: Cluster, run_id: int) -> GangReport:
        self._keep_progress(cluster, run_id)
        report = await self._gang.poll(cluster, run_id)
        self._keep_progress(cluster, run_id)
        if report.status.is_terminal or report.unreachable:
            self._pace.start()
        elif report.progress is not None:
            self._note_step(cluster, report.progress)
        return report

    async def cancel(self, cluster: Cluster, run_id: int) -> None:
        self._pace.start()
        await self._gang.cancel(cluster, run_id)

    async def read_log(self, cluster: Cluster, run_id: int, *, offset: int) -> tuple[bytes, int]:
        return await self._gang.read_log(cluster, run_id, offset=offset)

    async def renew_lease(self, cluster: Cluster, *, lease_s: float) -> None:
        """The nodes' agents count in real time, and it passes slower than the caller's."""
        if self._real.now_s() - self._leased_s >= LEASE_EVERY_REAL_S:
            await self._gang.renew_lease(cluster, lease_s=lease_s)
            self._leased_s = self._real.now_s()

    def _note_step(self, cluster: Cluster, progress: Progress) -> None:
        watched = self.attempts.get(cluster.attempt)
        if watched is None:
            return
        if not watched.looks or watched.looks[-1][1] != progress.step:
            watched.looks.append((self._real.now_s(), progress.step))
        (first_s, first), (last_s, last) = watched.looks[0], watched.looks[-1]
        if last <= first:
            return
        work_s = self._work_s_of(cluster) if self._work_s_of and progress.total else None
        if work_s and progress.total:
            self._pace.speed = max(1.0, work_s / progress.total / ((last_s - first_s) / (last - first)))
        self._pace.step()

    def _keep_progress(self, cluster: Cluster, run_id: int) -> None:
        """A second name for the head's progress file: a node that is taken away takes its folder with it."""
        watched = self.attempts.get(cluster.attempt)
        head = min(cluster.nodes, key=lambda node: node.rank)
        if watched is None or watched.progress_file.exists():
            return
        with contextlib.suppress(OSError):
            os.link(Path(head.handle) / RUN_FOLDER / str(run_id) / "progress.jsonl", watched.progress_file)
