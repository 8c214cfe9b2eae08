"""Find nodes that slow their gang down, from the time that each node reports for its own part of a step. Pure.

Nodes of a synchronous program finish each step together, so only the time before they wait for each other tells them
apart: `own_s` in the progress lines of each node. A node is slow if it takes 1.5 times what the others take, at each of
five steps in a row: of 0.8, 0.8 and 1.3 s the last one is slow, of 0.8, 0.8 and 1.1 s none.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from broker.frozen import frozen
from broker.types import OwnTime

RATIO_MIN = 1.5  # a gang that it holds up loses a third of its time
STEPS_MIN = 5  # a pause for a checkpoint or another program is no property of the node


@frozen
class Straggler:
    """A slow node; `usual_s` is the median of the others."""

    rank: int
    own_s: float
    usual_s: float


class StragglerWatch:
    """Count, for one gang, the steps in a row at which a node was slow. Each node is reported once."""

    def __init__(self) -> None:
        self._slow_steps: dict[int, int] = {}
        self._last_step: dict[int, int] = {}
        self._reported: set[int] = set()

    def observe(self, times: Sequence[OwnTime]) -> Sequence[Straggler]:
        """Return nodes that are slow now and were not reported before; `times` has at most one entry for each rank."""
        found = []
        for each in times:
            if self._last_step.get(each.rank) == each.step:
                continue
            self._last_step[each.rank] = each.step
            others = [other.own_s for other in times if other.rank != each.rank]
            is_slow = bool(others) and each.own_s > RATIO_MIN * median(others)
            self._slow_steps[each.rank] = self._slow_steps.get(each.rank, 0) + 1 if is_slow else 0
            if self._slow_steps[each.rank] >= STEPS_MIN and each.rank not in self._reported:
                self._reported.add(each.rank)
                found.append(Straggler(rank=each.rank, own_s=each.own_s, usual_s=median(others)))
        return found
