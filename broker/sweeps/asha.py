"""Decide by asynchronous successive halving which runs to stop. Pure.

This is the stopping variant of Li et al., 2020, "A System for Massively Parallel Hyperparameter Tuning".

With `eta` 3 and 810 steps the rungs are at 30, 90 and 270 steps. A run that reaches a rung continues only if its loss
is in the best third of those that have reached it so far. No run waits for another, and the first at a rung continues.

    rung 30, losses so far     a run arrives with     it
    (none)                     2.9                    continues   1 of 1: the best third, rounded up
    2.9                        3.4                    stops       2nd of 2
    2.9 3.4                    2.7                    continues   1st of 3
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

ETA = 3
RUNGS_MAX = 3
Records = Mapping[int, Mapping[int, float]]  # rung -> run -> its loss there


def list_rungs(total: int, *, eta: int = ETA, rungs_max: int = RUNGS_MAX) -> Sequence[int]:
    """Return the steps of the rungs of a run of `total` steps, the first one first; none for a very short run."""
    steps = [total // eta**power for power in range(rungs_max, 0, -1)]
    return [step for index, step in enumerate(steps) if step > 0 and step not in steps[:index]]


def is_kept(records: Mapping[int, float], run: int, *, eta: int = ETA) -> bool:
    """Return whether a run is in the best 1/eta, rounded up, of the runs recorded at a rung."""
    order = sorted(records, key=lambda each: (_rank(records[each]), each))
    return order.index(run) < math.ceil(len(order) / eta)


def _rank(loss: float) -> float:
    return math.inf if math.isnan(loss) else loss


def record(
    records: Records, rungs: Sequence[int], run: int, step: int, loss: float, *, eta: int = ETA
) -> tuple[Records, bool]:
    """Record a run's loss at the highest rung that it has passed, once; return the records, and whether it continues.

    A run that is first observed after several rungs, because the command was not running, is not recorded at the lower
    ones: its later and better loss would stop every run that reaches them in time. For the same reason a run that has
    finished its steps is not recorded at all.
    """
    rung = max((each for each in rungs if each <= step), default=None)
    if rung is None or step >= rung * eta or run in records.get(rung, {}):
        return records, True
    added = {**records, rung: {**records.get(rung, {}), run: loss}}
    return added, is_kept(added[rung], run, eta=eta)
