"""The checkpoint interval that loses the least time, from the measured cost of a save and the hazard."""

import math
import time
from collections.abc import Callable

from trainers.environment import Environment

AUTOMATIC = -1
# Without a figure from the broker: a gang that is interrupted once in five hours, as on a middling spot market.
HAZARD_PER_HOUR_DEFAULT = 0.2
# A hazard is an estimate. More work than this is not staked on it.
INTERVAL_S_MAX = 1800.0
# Writing runs beside training and slows it a little: for no more than this share of the time.
WRITE_SHARE_MAX = 0.1
# Steps until what a step and a save take is known.
STEPS_FIRST = 5


def find_interval_s(stall_s: float, write_s: float, hazard_per_hour: float) -> float:
    """Return seconds of work between checkpoints.

    Daly's higher-order optimum of the time lost to saves and to work done twice (J. T. Daly, FGCS 22, 2006, eq. 37),
    within what writing allows and caution asks. `stall_s` holds up training; `write_s` of writing do not.
    """
    interval_s = math.inf
    if hazard_per_hour > 0:
        mean_s = 3600 / hazard_per_hour
        ratio = math.sqrt(stall_s / (2 * mean_s))
        interval_s = math.sqrt(2 * stall_s * mean_s) * (1 + ratio / 3 + ratio * ratio / 9) - stall_s
        if stall_s >= 2 * mean_s:
            interval_s = mean_s
    interval_s = max(interval_s, write_s / WRITE_SHARE_MAX)
    return max(min(interval_s, INTERVAL_S_MAX), write_s)


class Pacer:
    """Says after which steps to save. All ranks ask at the same steps and hear the same."""

    def __init__(
        self, every_steps: int, environment: Environment, share: Callable[[int], int], *, step: int = 0
    ) -> None:
        """Keep to `every_steps`, or with `AUTOMATIC` to the environment. `share` gives all the first rank's value."""
        self._every_steps, self._environment, self._share = every_steps, environment, share
        self._step, self._begin_s = step, time.perf_counter()
        self._saves = 0
        self._next_step = step + STEPS_FIRST

    def is_due(self, step: int) -> bool:
        """Return whether to save after this step."""
        if self._every_steps == AUTOMATIC:
            return step >= self._next_step
        return self._every_steps > 0 and step % self._every_steps == 0

    def note(self, step: int, *, stall_s: float, write_s: float) -> None:
        """Learn from the save before this one, at a save after `step`; a collective call."""
        if self._every_steps != AUTOMATIC:
            return
        now_s = time.perf_counter()
        step_s = (now_s - self._begin_s) / max(1, step - self._step)
        self._step, self._begin_s = step, now_s
        self._saves += 1
        steps = STEPS_FIRST
        if self._saves > 1:
            steps = max(1, round(self._choose_s(stall_s, write_s) / max(step_s, 1e-6)))
        self._next_step = step + self._share(steps)

    def _choose_s(self, stall_s: float, write_s: float) -> float:
        if self._environment.checkpoint_every_s is not None:
            return self._environment.checkpoint_every_s
        hazard = self._environment.hazard_per_hour
        return find_interval_s(stall_s, write_s, HAZARD_PER_HOUR_DEFAULT if hazard is None else hazard)
