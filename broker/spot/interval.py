"""The optimal checkpoint interval, and the time of a run at a given one."""

from __future__ import annotations

import math

INTERVAL_S_MIN = 1.0


def find_best_interval_s(stall_s: float, hazard_per_hour: float) -> float:
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


def find_expected_hours(work_hours: float, hazard: float, every_s: float, stall_s: float, restart_s: float) -> float:
    """Return the expected hours of a run at one place; `hazard` is in preemptions of the gang per hour.

    With tau, delta and R for interval, stall and restart: W / tau (1/H + R) (exp(H (tau + delta)) - 1). Daly has
    exp(H R) / H in place of 1/H + R because there preemptions also strike restarts.
    """
    tau, delta, restart = every_s / 3600, stall_s / 3600, restart_s / 3600
    if hazard * (tau + delta) < 1e-12:
        return work_hours * (1 + delta / tau)
    exponent = hazard * (tau + delta)
    return work_hours / tau * (1 / hazard + restart) * (math.expm1(exponent) if exponent <= 700 else math.inf)
