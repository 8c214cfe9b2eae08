"""The result of a rehearsal: events, measurements, and findings for the real run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from broker.errors import NoOfferError
from broker.formatting import strip_control
from broker.jobs.deadline import estimate_hazard
from broker.jobs.log_files import get_log_path
from broker.jobs.summary import RunSummary, summarize
from broker.rehearsal.cloud import NOTICE_S_MAX
from broker.rehearsal.report import (
    Comparison,
    Measures,
    ReportedAttempt,
    Resume,
    compare_repeats,
    compare_runs,
    find_resumes,
    measure,
    measure_start_s,
    read_lines,
)
from broker.rehearsal.verdict import (
    CheckpointInterval,
    Finding,
    judge_interval,
    judge_losses,
    judge_notices,
    judge_resume,
    weigh_interval,
)
from broker.types import CheckpointSpec, Estimate, Job, JobStatus, Placement, Plan

if TYPE_CHECKING:
    from broker.rehearsal.context import RehearsalContext
    from broker.rehearsal.run import JobDriver

LOG_TAIL_BYTES = 4096
MISSING_MODULE = re.compile(r"ModuleNotFoundError: No module named '([\w.]+)'")
WORDS_MAX = 160


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """The result. `summary` is in simulated time and money, `measures` in real seconds, `work_hours` simulated work."""

    status: JobStatus
    failure: str
    summary: RunSummary
    trials: tuple[ReportedAttempt, ...]
    resumes: tuple[Resume, ...]
    repeats: Comparison
    measures: Measures
    preemptions: int
    refusals: int
    notices: int
    notices_ignored: int
    places: tuple[str, ...]
    work_hours: float
    hazard: float  # preemptions per hour of the whole gang where it ran first, by the market model
    checkpoint: CheckpointSpec
    interval: CheckpointInterval | None
    forecast: Estimate | None  # of the real run, with the program's own checkpoint interval; None without a goal
    forecast_failure: str = ""
    has_goal: bool = False
    deadline_hours: float | None = None
    real_s: float = 0.0
    has_saved: bool = True  # the checkpoint folder is not empty
    last_words: str = ""  # of its log, if it failed
    missing_module: str = ""  # that Python could not import, if it failed
    grace_s: float = NOTICE_S_MAX  # real seconds from a warning to the end
    unbroken: Comparison | None = None

    @property
    def findings(self) -> tuple[Finding, ...]:
        """List findings, most important first."""
        return (
            *judge_resume(
                self.trials,
                self.resumes,
                preemptions=self.preemptions,
                has_saved=self.has_saved,
                failure=self.failure,
                last_words=self.last_words,
                missing_module=self.missing_module,
            ),
            *judge_losses(self.repeats, self.unbroken),
            *judge_notices(given=self.notices, ignored=self.notices_ignored, grace_s=self.grace_s),
            *judge_interval(self.interval, self.hazard, self.checkpoint.stall_s),
        )

    def compare(self, unbroken: Rehearsal) -> Rehearsal:
        """Return this result with the losses of an uninterrupted run added to its own."""
        return replace(self, unbroken=compare_runs(self.trials, unbroken.trials))

    def describe(self) -> dict[str, Any]:
        """Return everything but the lines of the progress files, JSON-ready."""
        from broker.formatting import to_plain

        hidden = {"trials", "forecast"}
        data = {name: to_plain(getattr(self, name)) for name in self.__dataclass_fields__ if name not in hidden}
        data["trials"] = [
            {
                "attempt": trial.number,
                "begin_step": trial.begin_step,
                "last_step": trial.last_step,
                "start_s": trial.start_s,
            }
            for trial in self.trials
        ]
        data["forecast"] = to_plain(self.forecast) if self.forecast else None
        data["findings"] = to_plain(self.findings)
        return data


def make_rehearsal(context: RehearsalContext, driver: JobDriver, job: Job, plan: Plan) -> Rehearsal:
    """Collect the result from the store, the clouds and the progress files before they are deleted."""
    store, now_s, task, config = context.store, context.clock.now_s(), context.stage.task, context.config
    paid = store.bills.spend_usd(job_id=job.id, now_s=now_s)
    ondemand_usd = store.bills.ondemand_since_usd(0.0, now_s=now_s, job_id=job.id)
    steps = store.jobs.list_steps(job.id)
    summary = summarize(job, job.attempts, steps, paid_usd=paid, ondemand_usd=ondemand_usd, now_s=now_s)
    trials = read_trials(context)
    measures = measure(trials)
    first = job.attempts[0].placement if job.attempts else plan.choice.placement
    chosen = next((estimate for estimate in plan.estimates[:200] if _is_same(estimate.placement, first)), plan.choice)
    hazard = find_gang_hazard(first, task.num_nodes)
    work_s = (measures.total or 0) * (measures.step_s or 0.0) * context.speed
    if task.goal and task.goal.work_hours is not None and chosen.breakdown is not None:
        work_s = chosen.breakdown.work_hours * 3600
    interval = weigh_interval(measures, work_hours=work_s / 3600, hazard=hazard, checkpoint=task.checkpoint)
    forecast, failure = _forecast(context, interval)
    clouds = list(context.rehearsed.values())
    log = get_log_path(config.logs, job.id) if job.status is not JobStatus.SUCCEEDED else None
    return Rehearsal(
        status=job.status,
        failure=job.failure,
        summary=summary,
        trials=trials,
        resumes=find_resumes(trials),
        repeats=compare_repeats(trials),
        measures=measures,
        preemptions=sum(cloud.preemptions for cloud in clouds),
        refusals=sum(cloud.refusals for cloud in clouds),
        notices=sum(each.notice_s > 0 for each in driver.forced_preemptions),
        notices_ignored=sum(cloud.ignored_notices for cloud in clouds),
        places=tuple(name_place(attempt.placement) for attempt in job.attempts),
        work_hours=work_s / 3600,
        hazard=hazard,
        checkpoint=task.checkpoint,
        interval=interval,
        forecast=forecast,
        forecast_failure=failure,
        has_goal=task.goal is not None and task.goal.work_hours is not None,
        deadline_hours=task.goal.deadline_hours if task.goal else None,
        real_s=driver.real_s,
        has_saved=any(path.is_file() for path in context.config.checkpoints.rglob("*")),
        last_words=read_last_words(log) if log else "",
        missing_module=find_missing_module(log) if log else "",
        grace_s=min(max((each.notice_s for each in driver.forced_preemptions), default=NOTICE_S_MAX), NOTICE_S_MAX),
    )


def find_gang_hazard(placement: Placement, node_count: int) -> float:
    """Return the preemptions per hour that a job without history expects of a gang of `node_count` nodes there.

    The rehearsed placement may have fewer nodes. Its simulated preemptions are not observations of the market.
    """
    return estimate_hazard(replace(placement, node_count=node_count), {})


def read_last_words(log: Path) -> str:
    """Return the last line of a log that is not blank; empty if there is none."""
    lines = _read_tail(log).splitlines()
    return next((strip_control(line).strip()[:WORDS_MAX] for line in reversed(lines) if line.strip()), "")


def find_missing_module(log: Path) -> str:
    """Return the module of the last `ModuleNotFoundError` in a log; empty if there is none."""
    modules = MISSING_MODULE.findall(_read_tail(log))
    return str(modules[-1]) if modules else ""


def _read_tail(log: Path) -> str:
    try:
        return log.read_bytes()[-LOG_TAIL_BYTES:].decode("utf-8", "replace")
    except OSError:
        return ""


def read_trials(context: RehearsalContext) -> tuple[ReportedAttempt, ...]:
    """Read the progress file of every attempt, in order."""
    trials: list[ReportedAttempt] = []
    for number, watched in sorted(context.program.attempts.items()):
        lines = read_lines(watched.progress_file)
        trials.append(ReportedAttempt(number=number, lines=lines, start_s=measure_start_s(lines, watched.started_s)))
    return tuple(trials)


def _forecast(context: RehearsalContext, interval: CheckpointInterval | None) -> tuple[Estimate | None, str]:
    """Plan the real task with the program's own checkpoint interval."""
    task = context.stage.task
    if task.goal is None or task.goal.work_hours is None:
        return None, ""
    every_s = interval.every_s if interval else task.checkpoint.every_s
    try:
        return context.plan_real(replace(task, checkpoint=replace(task.checkpoint, every_s=every_s))).choice, ""
    except NoOfferError as error:
        return None, error.message


def _is_same(one: Placement, other: Placement) -> bool:
    """Return whether two placements differ at most in the number of nodes, which is smaller here."""
    kind = (one.offer.cloud, one.offer.region, one.offer.zone, one.offer.instance_type, one.is_spot)
    return kind == (
        other.offer.cloud, other.offer.region, other.offer.zone, other.offer.instance_type, other.is_spot
    )  # fmt: skip


def name_place(placement: Placement) -> str:
    """Return the cloud and the zone, or the region if there is no zone."""
    return f"{placement.offer.cloud} {placement.offer.zone or placement.offer.region}"


def list_places(places: Sequence[str]) -> list[str]:
    """List places once each, in the order of use."""
    return list(dict.fromkeys(places))
