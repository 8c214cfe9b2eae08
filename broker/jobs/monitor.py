"""What a controller remembers between two looks at one attempt. Lost in a crash, it only makes the next one patient."""

from __future__ import annotations

from broker.clock import Stopwatch
from broker.jobs.gang import GangReport
from broker.jobs.health import MISSES_MIN, UNREACHABLE_S_MIN, HealthSignals
from broker.types import Cluster, NodeEnd, NodeState, Progress, RunStatus

LIST_EVERY_S = 10.0  # with nothing suspicious; at once otherwise
LEASE_EVERY_S = 60.0
ATTENDED_S = 5 * LEASE_EVERY_S  # without a renewal, which may fail a few times, before the nodes count as left alone
GAP_S_MAX = 30.0  # between two looks; a slow answer takes as long


def is_due(last_s: float, every_s: float, now_s: float) -> bool:
    """Also when the last time lies ahead: a wall clock set back by an hour must not stop what keeps nodes alive."""
    return not 0.0 <= now_s - last_s < every_s


def list_answering(report: GangReport, cluster: Cluster) -> frozenset[str]:
    """Ids of the nodes whose agents have just answered: proof of life that no list can take back."""
    silent = report.unreachable
    nodes = (node for node in cluster.nodes if node.state is not NodeState.TERMINATED)
    return frozenset(node.id for node in nodes if node.rank not in silent)


class AttemptMonitor:
    def __init__(self, cluster: str) -> None:
        self.cluster = cluster
        self._stopwatch = Stopwatch(GAP_S_MAX)
        self._misses = 0
        self._silent_since_s: float | None = None
        self._failed_since_s: float | None = None
        self._listed_s = float("-inf")
        self._leased_s = float("-inf")
        self._step: int | None = None
        self._stepped_s: float | None = None
        self._stall_looked_s: float | None = None
        self._line: Progress | None = None  # as last seen
        self._busy_until_s = float("-inf")
        self._advised: set[str] = set()
        self._unreached_since_s: dict[str, float] = {}  # by node id
        self.has_succeeded = False
        self.unflushed = ""

    def hear(self, report: GangReport) -> None:
        """A success stays one: it may not be on record yet when the gang is asked again, or gone."""
        self.has_succeeded = self.has_succeeded or report.status is RunStatus.SUCCEEDED
        self.unflushed = self.unflushed or report.unflushed

    def is_suspicious(self, report: GangReport) -> bool:
        return bool(report.unreachable) or report.status in (RunStatus.FAILED, RunStatus.FAILED_SETUP)

    def needs_list(self, report: GangReport, now_s: float) -> bool:
        return self.is_suspicious(report) or is_due(self._listed_s, LIST_EVERY_S, now_s)

    def take_advised(self, report: GangReport, cluster: Cluster) -> list[int]:
        """Ranks that the cloud advises to leave, each node once."""
        new = [node for node in cluster.nodes if node.rank in report.advised and node.id not in self._advised]
        self._advised.update(node.id for node in new)
        return sorted(node.rank for node in new)

    def note_list(self, now_s: float) -> None:
        self._listed_s = now_s

    def needs_lease(self, now_s: float) -> bool:
        return is_due(self._leased_s, LEASE_EVERY_S, now_s)

    def is_attended(self, now_s: float) -> bool:
        """Whether this controller has renewed the lease itself, not long ago."""
        return not is_due(self._leased_s, ATTENDED_S, now_s)

    def note_lease(self, now_s: float) -> None:
        self._leased_s = now_s

    def note_silence(self, now_s: float) -> bool:
        """Whether the silence has lasted long enough to be believed."""
        seen_s = self._stopwatch.look(now_s)
        self._misses += 1
        if self._silent_since_s is None:
            self._silent_since_s = seen_s
        return self._misses >= MISSES_MIN and seen_s - self._silent_since_s >= UNREACHABLE_S_MIN

    def measure_boot_s(self, node_id: str, now_s: float) -> float:
        """Seconds since this node, which its cloud lists as running, was first found not to answer yet.

        By our own clock: a node's `created_s` is of its cloud's, from which ours may differ by more than a boot takes.
        """
        seen_s = self._stopwatch.look(now_s)
        return seen_s - self._unreached_since_s.setdefault(node_id, seen_s)

    def measure_stall_s(self, report: GangReport, now_s: float) -> float:
        """Seconds without a new step; a program that has reported none yet counts from the first look.

        While the head is silent no time counts: it may well be working. Nor does the time for which the program's
        newest line says that no step is to be expected (`busy_s`: a restore, a compilation).
        """
        step = report.progress.step if report.progress else None
        seen_s = self._stopwatch.look(now_s)
        is_silent = 0 in report.unreachable
        if self._stepped_s is None or (step != self._step and not is_silent):
            self._step, self._stepped_s = step, seen_s
        elif is_silent and self._stall_looked_s is not None:
            self._stepped_s += seen_s - self._stall_looked_s
        self._stall_looked_s = seen_s
        if report.progress is not None and report.progress != self._line:
            self._line, busy_s = report.progress, report.progress.busy_s
            # A line without it ends the excuse, and is none itself: only a step is headway.
            self._busy_until_s = seen_s + busy_s if busy_s else min(self._busy_until_s, seen_s)
        return max(0.0, seen_s - max(self._stepped_s, self._busy_until_s))

    def read_signals(
        self, report: GangReport, cluster: Cluster, now_s: float, *, nodes_min: int | None = None
    ) -> HealthSignals:
        seen_s = self._stopwatch.look(now_s)
        if report.unreachable:
            self.note_silence(now_s)
        else:
            self._misses, self._silent_since_s = 0, None
        if report.status in (RunStatus.FAILED, RunStatus.FAILED_SETUP):
            self._failed_since_s = seen_s if self._failed_since_s is None else self._failed_since_s
        else:
            self._failed_since_s = None
        return HealthSignals(
            status=RunStatus.SUCCEEDED if self.has_succeeded else report.status,
            returncode=report.returncode,
            unreachable=tuple(report.unreachable),
            nodes=cluster.nodes,
            is_spot=cluster.placement.is_spot,
            misses=self._misses,
            unreachable_s=0.0 if self._silent_since_s is None else seen_s - self._silent_since_s,
            failed_s=0.0 if self._failed_since_s is None else seen_s - self._failed_since_s,
            is_unflushed=bool(self.unflushed),
            is_noticed=report.reason == NodeEnd.PREEMPTED,
            nodes_min=nodes_min,
        )
