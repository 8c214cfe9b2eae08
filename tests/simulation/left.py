"""Outcomes that simulated heads leave in their bucket: a stand-in for `broker.jobs.outcomes.BucketOutcomes`."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from broker.jobs.outcomes import RunResult
from broker.types import Progress, RunStatus
from tests.clouds.simulated import SimulatedCloud
from tests.simulation.events import LOST, Event, Violation
from tests.simulation.machines import MachineGang, MachineRun

if TYPE_CHECKING:
    from tests.simulation.universe import Universe


class SimulatedOutcomes:
    def __init__(
        self, gang: MachineGang, cloud: SimulatedCloud, *, is_silent: Callable[[MachineRun], bool] = lambda run: False
    ) -> None:
        """Wrap the gang; `is_silent` returns whether the bucket gives no answer this time."""
        self._gang = gang
        self._cloud = cloud
        self._is_silent = is_silent

    async def read_outcome(self, place: str, attempt: int) -> RunResult | None:
        """Return the outcome, which exists where the run ended before its head did."""
        run = self._find_run(place, attempt)
        return None if run is None or self._is_silent(run) else self.find_outcome(run)

    def find_outcome(self, run: MachineRun) -> RunResult | None:
        status, code = self._gang.measure(run)[1:]
        end_s = self._gang.measure_end_s(run)
        head = self._cloud.find(run.ids[:1])[0]
        if not status.is_terminal or (head.ended_s is not None and end_s >= head.ended_s):
            return None
        left_s = run.lease_s.get(head.id, math.inf) - end_s
        step = self._gang.measure(run)[0]
        progress = Progress(step=step, total=run.program.steps) if step > run.first_step else None
        return RunResult(status=status, returncode=code, lease_left_s=left_s, progress=progress)

    async def read_log(self, place: str, attempt: int) -> bytes | None:
        run = self._find_run(place, attempt)
        return None if run is None else b"x" * (8 * (self._gang.measure(run)[0] - run.first_step))

    def _find_run(self, place: str, attempt: int) -> MachineRun | None:
        found = re.search(r"-job-(\d+)(?:-|$)", place)
        assert found, place
        root, roots = int(found[1]), self._gang.roots
        runs = (run for job, of in self._gang.runs_by_job.items() if roots.get(job, job) == root for run in of)
        return next((run for run in runs if run.attempt == attempt and run.has_bucket), None)


def check_s7_left_success_is_heard(universe: Universe, event: Event) -> None:
    """Check that an attempt does not count as lost when its success is in a bucket that answers."""
    if "attempts" not in event.written:
        return
    known = universe.memory.setdefault("lost attempts", set())
    for job_id, number in universe.read(
        f"SELECT job_id, number FROM attempts WHERE outcome_kind IN {tuple(kind.value for kind in LOST)}"
    ):
        runs = universe.gang.runs_by_job.get(job_id, ())
        run = next((each for each in runs if each.attempt == number), None)
        if (job_id, number) in known or run is None:
            continue
        known.add((job_id, number))
        cluster = run.cluster
        is_excused = not run.has_bucket or cluster in universe.unread or cluster in universe.asked_down
        left = None if is_excused else universe.outcomes.find_outcome(run)
        if left is not None and left.status is RunStatus.SUCCEEDED:
            raise Violation("S7", f"{cluster} has left its success in the bucket and counts as lost")
