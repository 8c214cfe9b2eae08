"""The report of a month: purchases, savings against on-demand, losses to preemptions, and the accuracy of forecasts.

`make_report` is pure and computes a report from rows of the store; `read_report` reads those rows.
"""

from __future__ import annotations

import math
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from broker.app.forecasts import PaidForecast, list_paid
from broker.errors import DamagedRowError, UsageError
from broker.frozen import frozen
from broker.jobs.summary import count_lost_steps, measure_step_s
from broker.types import JobStatus, OutcomeKind

if TYPE_CHECKING:
    from broker.app.container import Context
    from broker.state.clusters import Bill
    from broker.state.history import StepRange
    from broker.types import Attempt, Job

MONTH = re.compile(r"\d{4}-(0[1-9]|1[0-2])")


@frozen
class Period:
    """A month of local time: `name` as YYYY-MM, from `begin_s` up to `end_s`."""

    name: str
    begin_s: float
    end_s: float


@frozen
class MachineUse:
    """Node-hours and USD of one cloud, instance type and market; "-" where a bill's cluster is no longer known."""

    cloud: str
    instance_type: str
    market: str
    node_hours: float
    usd: float
    ondemand_usd: float  # of the same hours, at the on-demand price of the attempt's offer; `usd` if unknown


@frozen
class JobShare:
    """One job's part of the month. Steps and recoveries count in the month in which the attempt was lost.

    `lost_usd` is what preemptions cost: the steps that were repeated, and the next attempts until their first step.
    """

    job_id: int
    name: str
    status: str
    usd: float
    ondemand_usd: float
    preemptions: int
    steps_lost: int
    lost_usd: float = 0.0


@frozen
class Report:
    """A month's report. Bills of pruned jobs appear in no month's report because their days are no longer known."""

    period: Period
    made_s: float
    bought: tuple[MachineUse, ...]  # the most expensive first
    jobs: tuple[JobShare, ...]  # the most expensive first
    forecasts: tuple[PaidForecast, ...]  # of the jobs that succeeded in the month

    @property
    def usd(self) -> float:
        """USD paid for all machines of the period."""
        return sum(each.usd for each in self.bought)

    @property
    def node_hours(self) -> float:
        """Node-hours of all machines of the period."""
        return sum(each.node_hours for each in self.bought)

    @property
    def ondemand_usd(self) -> float:
        """USD that the same node-hours would have cost on-demand."""
        return sum(each.ondemand_usd for each in self.bought)

    @property
    def saved_usd(self) -> float:
        """USD saved compared to the same node-hours on-demand; repeated work is not subtracted."""
        return self.ondemand_usd - self.usd

    @property
    def preemptions(self) -> int:
        """Number of preemptions of the period's jobs."""
        return sum(each.preemptions for each in self.jobs)

    @property
    def steps_lost(self) -> int:
        """Number of steps that the period's jobs repeated."""
        return sum(each.steps_lost for each in self.jobs)

    @property
    def lost_usd(self) -> float:
        """USD that preemptions cost: repeated steps, and the starts of the next attempts."""
        return sum(each.lost_usd for each in self.jobs)

    @property
    def forecast_error_ratio(self) -> float | None:
        """The mean of |paid - forecast| / forecast; None without forecasts."""
        errors = [abs(each.ratio - 1) for each in self.forecasts]
        return sum(errors) / len(errors) if errors else None


def read_month(text: str | None, *, now_s: float) -> Period:
    """Read YYYY-MM, or use the current month for None. Raises UsageError."""
    name = time.strftime("%Y-%m", time.localtime(now_s)) if text is None else text
    if not MONTH.fullmatch(name):
        raise UsageError(f"`--month` must be YYYY-MM, not `{name}`", hints=["for example `--month 2026-11`"])
    year, month = int(name[:4]), int(name[5:])
    begin_s = time.mktime((year, month, 1, 0, 0, 0, 0, 0, -1))
    return Period(name=name, begin_s=begin_s, end_s=time.mktime((year, month + 1, 1, 0, 0, 0, 0, 0, -1)))


def read_report(
    context: Context, period: Period, *, on_damage: Callable[[DamagedRowError], None] | None = None
) -> Report:
    """Read a month's report from the store."""
    store, now_s = context.store, context.clock.now_s()
    jobs = store.jobs.list(on_damage=on_damage)
    wanted = [job for job in jobs if job.submitted_s < period.end_s and (job.ended_s or now_s) >= period.begin_s]
    return make_report(
        period,
        bills=store.bills.list(on_damage=on_damage),
        jobs=jobs,
        steps={job.id: store.jobs.list_steps(job.id) for job in wanted},
        forecasts=list_paid(context),
        now_s=now_s,
    )


def make_report(
    period: Period,
    *,
    bills: Sequence[Bill],
    jobs: Sequence[Job],
    steps: Mapping[int, Mapping[int, StepRange]],
    forecasts: Sequence[PaidForecast],
    now_s: float,
) -> Report:
    """Make a month's report; `steps` are by job, `forecasts` may be from any month."""
    attempts = {each.cluster: each for job in jobs for each in job.attempts}
    billed_s: dict[str, float] = {}  # cluster -> when its first node was billed
    for bill in bills:
        billed_s[bill.cluster] = min(bill.created_s, billed_s.get(bill.cluster, math.inf))
    ended = {job.id for job in jobs if _succeeded_in(job, period)}
    kinds: dict[tuple[str, str, str], tuple[float, float, float]] = defaultdict(lambda: (0.0, 0.0, 0.0))
    owners: dict[int, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
    for bill in bills:
        hours = measure_hours(bill, period, now_s)
        if hours <= 0:
            continue
        attempt = attempts.get(bill.cluster)
        usd, ondemand_usd = hours * bill.usd_hour, hours * _find_ondemand_usd_hour(bill, attempt)
        key = _name_kind(bill, attempt)
        old = kinds[key]
        kinds[key] = (old[0] + hours, old[1] + usd, old[2] + ondemand_usd)
        if bill.job_id is not None:
            owners[bill.job_id] = (owners[bill.job_id][0] + usd, owners[bill.job_id][1] + ondemand_usd)
    bought = [
        MachineUse(
            cloud=key[0], instance_type=key[1], market=key[2], node_hours=hours, usd=usd, ondemand_usd=ondemand_usd
        )
        for key, (hours, usd, ondemand_usd) in kinds.items()
    ]
    lines = [
        JobShare(
            job_id=job.id,
            name=job.name,
            status=job.status.value,
            usd=owners[job.id][0],
            ondemand_usd=owners[job.id][1],
            preemptions=sum(_is_preempted(each, period) for each in job.attempts),
            steps_lost=_count_lost(job, steps.get(job.id, {}), period),
            lost_usd=sum(_price_losses(job, steps.get(job.id, {}), period, billed_s)),
        )
        for job in jobs
        if job.id in owners
    ]
    return Report(
        period=period,
        made_s=now_s,
        bought=tuple(sorted(bought, key=lambda each: -each.usd)),
        jobs=tuple(sorted(lines, key=lambda each: -each.usd)),
        forecasts=tuple(each for each in forecasts if each.job_id in ended),
    )


def measure_hours(bill: Bill, period: Period, now_s: float) -> float:
    """Return the hours of a bill that lie in a period, up to now."""
    end_s = min(now_s if bill.ended_s is None else bill.ended_s, period.end_s)
    return max(0.0, end_s - max(bill.created_s, period.begin_s)) / 3600


def _name_kind(bill: Bill, attempt: Attempt | None) -> tuple[str, str, str]:
    if attempt is None:
        return bill.cloud, "-", "-"
    market = "spot" if attempt.placement.is_spot else "on-demand"
    return bill.cloud, attempt.placement.offer.instance_type, market


def _find_ondemand_usd_hour(bill: Bill, attempt: Attempt | None) -> float:
    price = None if attempt is None else attempt.placement.offer.ondemand_usd_hour
    return bill.usd_hour if price is None else price


def _is_preempted(attempt: Attempt, period: Period) -> bool:
    lost_s = attempt.lost_s or attempt.ended_s
    kind = None if attempt.outcome is None else attempt.outcome.kind
    return kind is OutcomeKind.PREEMPTED and lost_s is not None and period.begin_s <= lost_s < period.end_s


def _count_lost(job: Job, steps: Mapping[int, StepRange], period: Period) -> int:
    """Count the steps lost to the month's preemptions: those missing from the checkpoint that was resumed from."""
    pairs = zip(job.attempts, job.attempts[1:], strict=False)
    return sum(
        count_lost_steps(steps.get(old.number), steps.get(new.number))
        for old, new in pairs
        if _is_preempted(old, period)
    )


def _price_losses(
    job: Job, steps: Mapping[int, StepRange], period: Period, billed_s: Mapping[str, float]
) -> Iterator[float]:
    """Yield the cost of each preemption of the month, in USD.

    25 lost steps of 36 s at 2 USD/h: 0.50 USD, plus the next attempt from its first bill to its first step. An attempt
    that is preempted before its program starts costs all that was paid for it.
    """
    saved = 0  # the step that the attempt began at
    for old, new in zip(job.attempts, (*job.attempts[1:], None), strict=False):
        reached = steps.get(old.number)
        if _is_preempted(old, period):
            if not _has_started(old):
                yield _price_until(old, old.lost_s or old.ended_s, billed_s)
            if new is not None and reached is not None:
                lost = count_lost_steps(reached, steps.get(new.number))
                yield lost * measure_step_s(old, reached, saved) / 3600 * old.placement.usd_hour
            if new is not None and _has_started(new):
                yield _price_until(new, new.resumed_s or new.running_s, billed_s)
        saved = saved if reached is None else reached.checkpoint_step or saved


def _has_started(attempt: Attempt) -> bool:
    return attempt.resumed_s is not None or attempt.running_s is not None


def _price_until(attempt: Attempt, end_s: float | None, billed_s: Mapping[str, float]) -> float:
    """Return the cost of an attempt from its first bill to `end_s`, in USD."""
    paid_s = 0.0 if end_s is None else end_s - max(attempt.started_s, billed_s.get(attempt.cluster, math.inf))
    return max(0.0, paid_s) / 3600 * attempt.placement.usd_hour


def _succeeded_in(job: Job, period: Period) -> bool:
    is_in = job.ended_s is not None and period.begin_s <= job.ended_s < period.end_s
    return is_in and job.status is JobStatus.SUCCEEDED
