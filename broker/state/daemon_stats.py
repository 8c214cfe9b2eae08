"""What a daemon reports of its own work with each heartbeat: how long steps took, failures, and how late it is."""

from __future__ import annotations

import json

from broker.frozen import frozen

STEP_BOUNDS_S = (0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0)  # of the histogram of steps


@frozen
class DaemonStats:
    """Sums since the daemon started.

    `step_counts`: steps of controllers by duration, one number for each bound and one for longer ones; `step_s`: their
    total. `failures`: steps that ended in an unexpected error and were repeated. `lag_s`: how late the main loop was.
    """

    step_counts: tuple[int, ...] = (0,) * (len(STEP_BOUNDS_S) + 1)
    step_s: float = 0.0
    failures: int = 0
    lag_s: float = 0.0

    def encode(self) -> str:
        """Return the text for the store."""
        return json.dumps([self.step_counts, self.step_s, self.failures, self.lag_s])


def decode_stats(text: str) -> DaemonStats | None:
    """Read the text of `encode`; None for a daemon that reported nothing, or nothing readable."""
    try:
        counts, step_s, failures, lag_s = json.loads(text)
        stats = DaemonStats(
            step_counts=tuple(map(int, counts)), step_s=float(step_s), failures=int(failures), lag_s=float(lag_s)
        )
    except (ValueError, TypeError):
        return None
    return stats if len(stats.step_counts) == len(STEP_BOUNDS_S) + 1 else None
