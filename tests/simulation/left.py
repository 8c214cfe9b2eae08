"""What simulated heads leave in their bucket: stands in for `broker.jobs.outcomes.BucketOutcomes`."""

from __future__ import annotations

import math
import re

from broker.clouds.simulated import SimulatedCloud
from broker.jobs.outcomes import Outcome
from tests.simulation.machines import MachineGang, MachineRun


class SimulatedOutcomes:
    def __init__(self, gang: MachineGang, cloud: SimulatedCloud) -> None:
        self._gang = gang
        self._cloud = cloud

    async def read_outcome(self, place: str, attempt: int) -> Outcome | None:
        """There is one where the run ended before its head did."""
        run = self._find_run(place, attempt)
        if run is None:
            return None
        status, code = self._gang.measure(run)[1:]
        end_s = self._gang.measure_end_s(run)
        head = self._cloud.find(run.ids[:1])[0]
        if not status.is_terminal or (head.ended_s is not None and end_s >= head.ended_s):
            return None
        left_s = run.lease_s.get(head.id, math.inf) - end_s
        return Outcome(status=status, returncode=code, lease_left_s=left_s)

    async def read_log(self, place: str, attempt: int) -> bytes | None:
        run = self._find_run(place, attempt)
        return None if run is None else b"x" * (8 * (self._gang.measure(run)[0] - run.first_step))

    def _find_run(self, place: str, attempt: int) -> MachineRun | None:
        found = re.search(r"-job-(\d+)(?:-|$)", place)
        assert found, place
        root, roots = int(found[1]), self._gang.roots
        runs = (run for job, of in self._gang.runs_by_job.items() if roots.get(job, job) == root for run in of)
        return next((run for run in runs if run.attempt == attempt and run.has_bucket), None)
