"""Measure the work of a daemon for its heartbeat."""

from __future__ import annotations

from bisect import bisect_left

from broker.state.daemon_stats import STEP_BOUNDS_S, DaemonStats


class DaemonMeter:
    """Counts steps and failures since the daemon started."""

    def __init__(self) -> None:
        self._counts = [0] * (len(STEP_BOUNDS_S) + 1)
        self._step_s = 0.0
        self._failures = 0
        self._lag_s = 0.0

    def add_step(self, took_s: float) -> None:
        """Count a step of a controller."""
        took_s = max(0.0, took_s)  # the clock may be set back
        self._counts[bisect_left(STEP_BOUNDS_S, took_s)] += 1
        self._step_s += took_s

    def add_failure(self) -> None:
        """Count a step that ended in an unexpected error."""
        self._failures += 1

    def set_lag(self, lag_s: float) -> None:
        """Set how late the newest turn of the main loop was."""
        self._lag_s = max(0.0, lag_s)

    def read(self) -> DaemonStats:
        """Return the sums so far."""
        return DaemonStats(
            step_counts=tuple(self._counts), step_s=self._step_s, failures=self._failures, lag_s=self._lag_s
        )
