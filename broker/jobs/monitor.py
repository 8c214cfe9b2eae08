"""Keep a controller's observations of one attempt between polls. Losing them in a crash only delays its decisions.

Only silence is recorded in the store: otherwise, a broker that restarts every few minutes would never give up nodes
that lost power while their cloud lists them as running.
"""

from __future__ import annotations

from dataclasses import replace

from broker.clock import Stopwatch
from broker.jobs.gang import GangReport
from broker.jobs.health import MISSES_MIN, UNREACHABLE_S_MIN, HealthSignals
from broker.types import Attempt, Cluster, Node, NodeEnd, NodeState, Progress, RunStatus

LIST_EVERY_S = 10.0  # without suspicious signals; at once otherwise
LEASE_EVERY_S = 60.0
ATTENDED_S = 5 * LEASE_EVERY_S  # time without a renewal, which may fail a few times, before nodes count as unattended
GAP_S_MAX = 30.0  # between two observations; a slow response takes that long
SILENCE_EVERY_S = 60.0  # between two records of a silence; a restart loses at most this much of it


def is_due(last_s: float, every_s: float, now_s: float) -> bool:
    """Return whether a periodic action is due. A `last_s` in the future counts as due: the clock was set back."""
    return not 0.0 <= now_s - last_s < every_s


def list_answering(report: GangReport, cluster: Cluster) -> frozenset[str]:
    """Return the IDs of nodes whose agents just responded: stronger evidence than any list."""
    silent = report.unreachable
    nodes = (node for node in cluster.nodes if node.state is not NodeState.TERMINATED)
    return frozenset(node.id for node in nodes if node.rank not in silent)


def with_silence(attempt: Attempt, silent_s: float) -> Attempt:
    """Return the attempt with the silence to record: zero as soon as its nodes respond."""
    is_recorded = bool(silent_s) and silent_s - attempt.silent_s < SILENCE_EVERY_S
    return attempt if is_recorded else replace(attempt, silent_s=silent_s)


class AttemptMonitor:
    """Observations of one attempt's nodes: misses, silence, and the times of lease renewals."""

    def __init__(self, cluster: str, *, silent_s: float = 0.0) -> None:
        """Create the monitor. `silent_s`: seconds of silence observed by an earlier process."""
        self.cluster = cluster
        self._earlier_silent_s = silent_s
        self._stopwatch = Stopwatch(GAP_S_MAX)
        self._misses = 0
        self._silent_since_s: float | None = None
        self._failed_since_s: float | None = None
        self._listed_s = float("-inf")
        self._leased_s = float("-inf")
        self._step: int | None = None
        self._stepped_s: float | None = None
        self._stall_checked_s: float | None = None
        self._line: Progress | None = None  # the last one reported
        self._busy_until_s = float("-inf")
        self._advised: set[str] = set()
        self._noticed: set[str] = set()
        self._head_rank = 0
        self._unreached_since_s: dict[str, float] = {}  # by node ID
        self.has_succeeded = False
        self.unflushed = ""

    def observe(self, report: GangReport) -> None:
        """Remember a success, which may not be recorded yet when the gang is polled again or is gone."""
        self.has_succeeded = self.has_succeeded or report.status is RunStatus.SUCCEEDED
        self.unflushed = self.unflushed or report.unflushed

    def is_suspicious(self, report: GangReport) -> bool:
        """Return whether a report requires a list of the cloud: a silent node or a failed run."""
        return bool(report.unreachable) or report.status in (RunStatus.FAILED, RunStatus.FAILED_SETUP)

    def needs_list(self, report: GangReport, now_s: float) -> bool:
        """Return whether to list the cloud's nodes now: on suspicion, and otherwise periodically."""
        return self.is_suspicious(report) or is_due(self._listed_s, LIST_EVERY_S, now_s)

    def list_new_advisories(self, report: GangReport, cluster: Cluster) -> list[int]:
        """Return the ranks that the cloud newly recommends leaving; each node is returned once."""
        new = [node for node in cluster.nodes if node.rank in report.advised and node.id not in self._advised]
        self._advised.update(node.id for node in new)
        return sorted(node.rank for node in new)

    def list_new_notices(self, report: GangReport, cluster: Cluster) -> list[Node]:
        """Return the nodes whose preemption the cloud newly announced, by rank; each node is returned once."""
        new = [node for node in cluster.nodes if node.rank in report.noticed and node.id not in self._noticed]
        self._noticed.update(node.id for node in new)
        return sorted(new, key=lambda node: node.rank)

    def record_list(self, now_s: float) -> None:
        """Record the time of a complete list, which restarts the period."""
        self._listed_s = now_s

    def needs_lease(self, now_s: float) -> bool:
        """Return whether the leases of the nodes are due for renewal."""
        return is_due(self._leased_s, LEASE_EVERY_S, now_s)

    def is_attended(self, now_s: float) -> bool:
        """Return whether this controller has recently renewed the lease."""
        return not is_due(self._leased_s, ATTENDED_S, now_s)

    def record_lease(self, now_s: float) -> None:
        """Note a successful renewal; a failed one stays due."""
        self._leased_s = now_s

    def record_silence(self, now_s: float) -> bool:
        """Return whether the silence has lasted long enough to count as a loss."""
        elapsed_s = self._stopwatch.observe(now_s)
        self._misses += 1
        if self._silent_since_s is None:
            self._silent_since_s = elapsed_s - self._earlier_silent_s
        return self._misses >= MISSES_MIN and elapsed_s - self._silent_since_s >= UNREACHABLE_S_MIN

    def measure_boot_s(self, node_id: str, now_s: float) -> float:
        """Return the seconds since this node, listed as running, was first observed not to respond.

        Uses the local clock: a node's `created_s` is from its cloud's clock, which may differ by more than a boot
        takes.
        """
        elapsed_s = self._stopwatch.observe(now_s)
        return elapsed_s - self._unreached_since_s.setdefault(node_id, elapsed_s)

    def measure_stall_s(self, report: GangReport, now_s: float) -> float:
        """Return the seconds without a new step, counted from the first poll if the program has reported none.

        Time during which the head is silent does not count, because the program may be working. Neither does time for
        which the program announced that no step is expected (`busy_s`: a restore, a compilation).
        """
        step = report.progress.step if report.progress else None
        elapsed_s = self._stopwatch.observe(now_s)
        is_silent = self._head_rank in report.unreachable
        if self._stepped_s is None or (step != self._step and not is_silent):
            self._step, self._stepped_s = step, elapsed_s
        elif is_silent and self._stall_checked_s is not None:
            self._stepped_s += elapsed_s - self._stall_checked_s
        self._stall_checked_s = elapsed_s
        if report.progress is not None and report.progress != self._line:
            self._line, busy_s = report.progress, report.progress.busy_s
            # A line without `busy_s` ends the exemption, but only a step counts as progress.
            self._busy_until_s = elapsed_s + busy_s if busy_s else min(self._busy_until_s, elapsed_s)
        return max(0.0, elapsed_s - max(self._stepped_s, self._busy_until_s))

    def read_signals(
        self, report: GangReport, cluster: Cluster, now_s: float, *, nodes_min: int | None = None, head: int = 0
    ) -> HealthSignals:
        """Combine the report, the listed nodes and elapsed time into the signals for `classify`."""
        self._head_rank = head
        elapsed_s = self._stopwatch.observe(now_s)
        if report.unreachable:
            self.record_silence(now_s)
        else:
            self._misses, self._silent_since_s, self._earlier_silent_s = 0, None, 0.0
        if report.status in (RunStatus.FAILED, RunStatus.FAILED_SETUP):
            self._failed_since_s = elapsed_s if self._failed_since_s is None else self._failed_since_s
        else:
            self._failed_since_s = None
        return HealthSignals(
            status=RunStatus.SUCCEEDED if self.has_succeeded else report.status,
            returncode=report.returncode,
            unreachable=tuple(report.unreachable),
            nodes=cluster.nodes,
            is_spot=cluster.placement.is_spot,
            misses=self._misses,
            unreachable_s=0.0 if self._silent_since_s is None else elapsed_s - self._silent_since_s,
            failed_s=0.0 if self._failed_since_s is None else elapsed_s - self._failed_since_s,
            is_unflushed=bool(self.unflushed),
            is_noticed=report.reason == NodeEnd.PREEMPTED,
            nodes_min=nodes_min,
            head_rank=head,
            statuses=tuple(report.statuses),
            followers=tuple(report.followers),
        )
