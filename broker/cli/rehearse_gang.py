"""The gang of a rehearsal: runs the program as it is, sets the clock's pace, and keeps what the program said."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from broker.cli.rehearse_report import Line, read_newest_line
from broker.clock import SystemClock
from broker.clouds.rehearsed import Pace
from broker.types import Cluster, Resources, Task

if TYPE_CHECKING:
    from broker.jobs.gang import Gang, GangReport

LEASE_EVERY_REAL_S = 20.0
RUN_FOLDER = "home/.broker/runs"


@dataclass
class Watched:
    """What was seen of one attempt's program; times are real ones, seconds since the epoch."""

    number: int
    started_s: float
    source: Path  # the progress file in the head's folder, which goes with the node
    progress_file: Path  # a second name for it
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
        head = min(cluster.nodes, key=lambda node: node.rank)
        source = Path(head.handle) / RUN_FOLDER / str(run_id) / "progress.jsonl"
        self.attempts.setdefault(cluster.attempt, Watched(cluster.attempt, self._real.now_s(), source, file))
        offer = replace(cluster.placement.offer, accelerator=None, accelerator_count=0)
        bare = replace(cluster, placement=replace(cluster.placement, offer=offer))
        await self._gang.start(bare, replace(task, resources=(Resources(),)), run_id=run_id, envs=envs, lease_s=lease_s)
        self._leased_s = self._real.now_s()

    async def poll(self, cluster: Cluster, run_id: int) -> GangReport:
        report = await self._gang.poll(cluster, run_id)
        if report.status.is_terminal or report.unreachable:
            self._pace.start()
        else:
            self.look(cluster)
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

    def look(self, cluster: Cluster) -> Line | None:
        """The newest line of the attempt's progress file, as it is now; sets the pace by it."""
        watched = self.attempts.get(cluster.attempt)
        if watched is None:
            return None
        if not watched.progress_file.exists():
            with contextlib.suppress(OSError):
                os.link(watched.source, watched.progress_file)
        line = read_newest_line(watched.progress_file)
        if line is not None:
            if not watched.looks or watched.looks[-1][1] != line.step:
                watched.looks.append((self._real.now_s(), line.step))
            self._set_pace(cluster, watched, line)
        return line

    def _set_pace(self, cluster: Cluster, watched: Watched, line: Line) -> None:
        (first_s, first), (last_s, last) = watched.looks[0], watched.looks[-1]
        if last <= first:
            return
        work_s = self._work_s_of(cluster) if self._work_s_of and line.total else None
        if work_s and line.total:
            self._pace.speed = max(1.0, work_s / line.total / ((last_s - first_s) / (last - first)))
        self._pace.step()
