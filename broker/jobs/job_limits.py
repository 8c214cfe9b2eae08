"""The limits of a job: the budget of its goal, and `max_duration`, the time from its first machines to its end.

`max_duration` counts from the search that found the first attempt's machines, through every recovery, until the job's
last machine is gone; earlier waits, in the queue or between searches, do not count. The program is signalled to save
before the end, so that the machines are released in time: with a limit of 2 h, at 1 h 59 min.
"""

from __future__ import annotations

from broker.clock import Clock, Stopwatch
from broker.frozen import frozen
from broker.jobs.allowance import measure_allowance_s
from broker.state.store import Store
from broker.types import Cluster, Job, OutcomeKind
from broker.wording import explain_budget, explain_max_duration

BUDGET_GRACE_S = 30.0  # for a program that is stopped because the budget is used up
SAVE_S_MAX = 60.0  # before the end of `max_duration`, for the program to save its state
SAVE_SHARE = 0.1  # of `max_duration`, if that is shorter
GAP_S_MAX = 30.0  # as in a monitor: longer gaps mean a suspension or a changed clock
LEASE_S_MIN = 1.0  # an agent interprets 0 as no lease


@frozen
class Breach:
    """The limit that a job has reached, and the time its program has to save, in seconds."""

    kind: OutcomeKind
    failure: str  # for people
    grace_s: float = BUDGET_GRACE_S


class LimitReached(Exception):
    """Raised when the search for machines has used up the remaining budget or time."""

    def __init__(self, breach: Breach) -> None:
        super().__init__(breach.failure)
        self.breach = breach


class JobLimits:
    """Check the limits of one job. Its memory only matters when the wall clock is set back."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._watch = Stopwatch(GAP_S_MAX)
        self._watched_s = 0.0
        self._used_s = 0.0

    def find_breach(self, job: Job) -> Breach | None:
        """Return the limit that the job has reached; None while it may continue."""
        if failure := self._find_overspending(job):
            return Breach(kind=OutcomeKind.BUDGET_EXCEEDED, failure=failure)
        limit_s = job.task.max_duration_s
        if limit_s is not None and self._measure_used_s(job) >= limit_s - find_save_s(limit_s):
            grace_s = min(find_save_s(limit_s), max(0.0, limit_s - self._used_s))
            failure = explain_max_duration(limit_s)
            return Breach(kind=OutcomeKind.MAX_DURATION_EXCEEDED, failure=failure, grace_s=grace_s)
        return None

    def _find_overspending(self, job: Job) -> str:
        budget_usd = job.task.goal.budget_usd if job.task.goal else None
        if budget_usd is None:
            return ""
        spent_usd = self._store.bills.spend_usd(job_id=job.id, now_s=self._clock.now_s())
        return "" if spent_usd < budget_usd else explain_budget(budget_usd, spent_usd)

    def check(self, job: Job) -> None:
        """Raise LimitReached if the job may not continue."""
        if breach := self.find_breach(job):
            raise LimitReached(breach)

    def find_lease_s(self, job: Job, cluster: Cluster) -> float:
        """Return the current lease of the job's gang in seconds.

        It is computed at the price of a full gang, because lost nodes may be replaced.

        A node measures its lease by its uptime, so that it ends in time without a broker, regardless of the clocks.
        """
        now_s = self._clock.now_s()
        has_budget = job.task.goal is not None and job.task.goal.budget_usd is not None
        allowed_s = measure_allowance_s(
            job.task,
            usd_hour=cluster.placement.usd_hour,
            spent_usd=self._store.bills.spend_usd(job_id=job.id, now_s=now_s) if has_budget else 0.0,
            submitted_s=job.submitted_s,
            now_s=now_s,
            used_s=self._measure_used_s(job, begin_s=cluster.created_s),
        )
        return max(LEASE_S_MIN, allowed_s)

    def _measure_used_s(self, job: Job, *, begin_s: float | None = None) -> float:
        """Return the seconds that count towards `max_duration`.

        They are measured by the wall clock, which also counts while the broker is unavailable or suspended. If the
        clock is set back, counting continues from the last measurement, by what this process observes; a clock that is
        set forward cannot be distinguished from a suspension, and counts. `begin_s`: start of machines whose attempt is
        not part of the given job yet.
        """
        begin_s = job.attempts[0].started_s if job.attempts else begin_s
        if begin_s is None:
            return 0.0
        now_s = self._clock.now_s()
        watched_s = self._watch.observe(now_s)
        step_s, self._watched_s = watched_s - self._watched_s, watched_s
        self._used_s = max(now_s - begin_s, self._used_s + step_s if self._used_s else 0.0)
        return self._used_s


def find_save_s(limit_s: float) -> float:
    """Return the seconds before the end of `max_duration` at which to save: 2 h -> 60 s, 5 min -> 30 s."""
    return min(SAVE_S_MAX, limit_s * SAVE_SHARE)
