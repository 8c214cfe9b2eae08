"""The checkpoint interval that minimizes lost time, from the measured cost of a save and the hazard."""

import math
import time
from collections.abc import Callable

from trainers.environment import Environment

AUTOMATIC = -1
# Without a figure from broker: one interruption of the gang in five hours, as on an average spot market.
HAZARD_PER_HOUR_DEFAULT = 0.2
# An upper bound on the work at risk, because the hazard is only an estimate.
INTERVAL_S_MAX = 1800.0
# Writing runs concurrently with training and slows it slightly: for at most this share of the time.
WRITE_SHARE_MAX = 0.1
# Steps until the durations of a step and of a save are known.
STEPS_FIRST = 5


def find_interval_s(stall_s: float, write_s: float, hazard_per_hour: float) -> float:
    """Return seconds of work between checkpoints.

    This is Daly's higher-order optimum of the time lost to saves and to repeated work (J. T. Daly, FGCS 22, 2006, eq.
    37), limited by the time that writing takes and by an upper bound. Training waits for `stall_s` of a save but not
    for `write_s`.
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
    """Decides after which steps to save. All ranks call it at the same steps and get the same answer."""

    def __init__(
        self, every_steps: int, environment: Environment, share: Callable[[int], int], *, step: int = 0
    ) -> None:
        """Save every `every_steps` steps, or with `AUTOMATIC` as the environment suggests.

        `share` returns the first rank's value on every rank.
        """
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
        """Update the interval with the cost of the previous save, when saving after `step`. A collective call."""
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
