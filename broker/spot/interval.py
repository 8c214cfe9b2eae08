"""The optimal checkpoint interval."""

from __future__ import annotations

import math

INTERVAL_S_MIN = 1.0


def best_interval_s(stall_s: float, hazard_per_hour: float) -> float:
    """Return the seconds of work between checkpoints that minimise lost time; infinite without hazard.

    Daly's higher-order optimum (J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart
    dumps", FGCS 22, 2006); its first term is Young's sqrt(2 delta M) (CACM 17, 1974).
    """
    if hazard_per_hour <= 0:
        return math.inf
    mean_s = 3600 / hazard_per_hour
    if stall_s >= 2 * mean_s:
        return max(mean_s, INTERVAL_S_MIN)
    ratio = math.sqrt(stall_s / (2 * mean_s))
    interval_s = math.sqrt(2 * stall_s * mean_s) * (1 + ratio / 3 + ratio * ratio / 9) - stall_s
    return max(interval_s, INTERVAL_S_MIN)
