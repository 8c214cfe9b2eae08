"""Simulation: replays of a task on spot markets under several policies, to compare their costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from broker.app.container import Context
from broker.app.planning import check_notices
from broker.errors import NoOfferError, UsageError
from broker.formatting import format_hours, format_usd
from broker.frozen import frozen

if TYPE_CHECKING:
    from broker.lab.benchmark import Benchmark
    from broker.lab.markets import Site
    from broker.lab.parts import Scene
    from broker.lab.traces import Trace
    from broker.types import Estimate, Offer, Plan, Task

SLACK_DEFAULT = 1.5  # deadline / work, for a task without a deadline
STARTS_MAX = 100_000


@frozen
class SimulationRequest:
    """The markets, policies and replays of a simulation."""

    traces: Path | None = None  # a trace file, or a folder of them; None draws synthetic markets
    policies: tuple[str, ...] | None = None  # None: all of them
    starts: int = 16
    optima: int | None = None  # replays for which the optimum is computed; None: as many as a few seconds allow
    is_apart: bool = False  # each trace is a separate market, not a zone of one market
    notice_s: float = 0.0
    deadline_hours: float | None = None
    workers: int = 1  # processes for a large simulation


@frozen
class Simulation:
    """The scores of all policies, and the markets and machines that they were replayed on."""

    job: SimulatedJob
    traces: tuple[Trace, ...]
    study: Benchmark


def simulate(
    context: Context,
    task: Task,
    request: SimulationRequest,
    *,
    on_progress: Callable[[int, int, str], None] | None = None,
) -> Simulation:
    """Replay the task under every policy. `on_progress` is called with steps done, total steps, and the next step.

    Raises UsageError for a task without work, an unknown policy or missing traces, and NoOfferError if no offer has
    both prices.
    """
    from broker.lab.benchmark import run_study
    from broker.lab.trace_files import align_traces
    from broker.spot.policies import POLICIES

    names = choose_policies(request.policies, tuple(POLICIES))
    traces = [_require_nodes(each, task.num_nodes) for each in read_traces(request.traces)]
    if not request.is_apart:
        traces = align_traces(traces)
    job = measure_job(context, task, traces, request.deadline_hours, request.notice_s)
    scenes = set_scenes(job, traces, request.starts, is_apart=request.is_apart)
    study = run_study(scenes, names, optima_count=request.optima, on_step=on_progress, workers=request.workers)
    return Simulation(job=job, traces=tuple(traces), study=study)


@dataclass(frozen=True, kw_only=True)
class SimulatedKind:
    """Other machines that the task accepts; `speed` is relative to the machines of the plan's choice."""

    estimate: Estimate
    ondemand: Offer  # the cheapest of its kind, which may be elsewhere
    ondemand_usd_hour: float  # of the gang there, per hour of the work of `estimate`
    spot_usd_hour: float
    speed: float
    start_hours: float


@dataclass(frozen=True, kw_only=True)
class SimulatedJob:
    """The task, with the prices and times of the instances that it would run on.

    Hours of work refer to the machines of `estimate`; `others` are machines of other kinds, between which a policy may
    switch. `spot_speed` and `ondemand_speed` are below 1 because checkpoints stall the work: on spot always, on-demand
    only at an interval that the task fixes, as in a plan.
    """

    estimate: Estimate
    ondemand: Offer
    ondemand_usd_hour: float  # as for `SimulatedKind`
    spot_usd_hour: float
    work_hours: float
    deadline_hours: float
    is_deadline_assumed: bool
    start_hours: float
    save_every_hours: float
    spot_speed: float
    ondemand_speed: float
    notice_hours: float
    others: tuple[SimulatedKind, ...] = ()
    hour_value_usd: float | None = None

    @property
    def ondemand_hours(self) -> float:
        """Minimum hours to finish on-demand from the beginning."""
        work = self.work_hours / self.ondemand_speed
        return min([work + self.start_hours, *(work / each.speed + each.start_hours for each in self.others)])

    def list_facts(self) -> list[tuple[str, str]]:
        """List the facts that all replays have in common, as (name, text)."""
        offer = self.estimate.placement.offer
        assumed = f" (assumed: {SLACK_DEFAULT:g} times the work)" if self.is_deadline_assumed else ""
        every = format_hours(self.save_every_hours) if self.save_every_hours else "-"
        more = [fact for each in self.others for fact in _list_kind_facts(each)]
        return [
            ("machines", f"{self.estimate.placement.node_count} x {offer.cloud} {offer.instance_type}"),
            ("prices", _describe_prices(self, offer)),
            *more,
            ("work", format_hours(self.work_hours)),
            ("deadline", f"{format_hours(self.deadline_hours)}{assumed}"),
            ("start", f"{format_hours(self.start_hours)} each time, billed"),
            ("checkpoint", f"every {every}"),
        ]


def _list_kind_facts(kind: SimulatedKind) -> list[tuple[str, str]]:
    placement = kind.estimate.placement
    name = f"{placement.node_count} x {placement.offer.cloud} {placement.offer.instance_type}"
    speed = f"{kind.speed:.2g}"
    return [
        ("or", f"{name}, {'as fast' if speed == '1' else f'{speed} times as fast'}"),
        ("prices", _describe_prices(kind, placement.offer)),
    ]


def _describe_prices(kind: SimulatedKind | SimulatedJob, spot: Offer) -> str:
    other = kind.ondemand
    is_same = (other.cloud, other.instance_type) == (spot.cloud, spot.instance_type)
    where = "" if is_same else f" ({other.cloud} {other.instance_type})"
    return f"{format_usd(kind.ondemand_usd_hour)} on-demand{where}, {format_usd(kind.spot_usd_hour)} spot, USD/h"


def choose_policies(wanted: Sequence[str] | None, known: Sequence[str]) -> list[str]:
    """Return the policies, with the baseline `on-demand` first. Raises UsageError for an unknown policy."""
    names = list(known if wanted is None else dict.fromkeys(wanted))
    for name in names:
        if name not in known:
            import difflib

            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean `{near[0]}`?" if near else f"known policies: {', '.join(known)}"
            raise UsageError(f"unknown policy `{name}`", hints=[hint])
    if not names:
        raise UsageError("`--policy` must name a policy", hints=[f"known policies: {', '.join(known)}"])
    return ["on-demand", *(name for name in names if name != "on-demand")]


def read_traces(path: Path | None) -> list[Trace]:
    """Read traces from a file or folder; without a path, return the synthetic markets."""
    from broker.lab.trace_files import read_traces
    from broker.lab.traces import make_default_traces

    return list(make_default_traces()) if path is None else read_traces(path)


def _require_nodes(trace: Trace, node_count: int) -> Trace:
    """Return the trace as a market for that many nodes, if it counts more instances than its own gang needs."""
    return replace(trace, gang=max(trace.gang, node_count)) if max(trace.counts) > trace.gang else trace


def measure_job(
    context: Context, task: Task, traces: Sequence[Trace], deadline_hours: float | None, notice_s: float
) -> SimulatedJob:
    """Plan the task. Raises UsageError if it specifies no work, NoOfferError if no offer has both prices."""
    from broker.jobs.deadline import HAZARD_MIN
    from broker.spot.interval import find_best_interval_s

    task = context.resolve(task)
    about_speed = tuple(each for each in task.notices if each.field in ("accelerators", "goal"))
    check_notices([replace(task, notices=about_speed)], is_launch=False, note=context.note)
    if task.goal is None or task.goal.work_hours is None:
        raise UsageError(
            "a simulation requires the amount of work, which the task does not specify",
            hints=["add `goal: {work: 40h, deadline: 60h}` to the task"],
        )
    resources = tuple(replace(each, use_spot=None) for each in task.resources)
    free = replace(task, resources=resources)
    plan = context.plan(replace(free, goal=replace(task.goal, deadline_hours=None, budget_usd=None)))
    estimate, *others = _choose_kinds(plan)
    assert estimate.breakdown is not None
    placement = estimate.placement
    work = estimate.breakdown.work_hours
    deadline = task.goal.deadline_hours if deadline_hours is None else deadline_hours
    # Jobs with a deadline expect preemptions in a market without any; else all their work would be at risk on spot.
    hazard = max(_mean_hazard(traces), HAZARD_MIN)
    every_s = task.checkpoint.every_s or find_best_interval_s(task.checkpoint.stall_s, hazard)
    every = min(every_s / 3600, work)
    speed = every / (every + task.checkpoint.stall_s / 3600)
    ondemand, ondemand_usd_hour = _choose_ondemand(plan, estimate)
    job = SimulatedJob(
        estimate=estimate,
        ondemand=ondemand,
        ondemand_usd_hour=ondemand_usd_hour,
        spot_usd_hour=placement.usd_hour,
        work_hours=work,
        deadline_hours=SLACK_DEFAULT * work if deadline is None else deadline,
        is_deadline_assumed=deadline is None,
        start_hours=estimate.breakdown.recovery_s / 3600,
        save_every_hours=every,
        spot_speed=speed,
        ondemand_speed=1.0 if task.checkpoint.every_s is None else speed,
        notice_hours=notice_s / 3600,
        others=tuple(_make_kind(plan, each, work) for each in others),
        hour_value_usd=task.goal.hour_value_usd,
    )
    if job.deadline_hours < job.ondemand_hours:
        raise UsageError(
            f"the deadline of {format_hours(job.deadline_hours)} cannot be met even on-demand: "
            f"{format_hours(job.work_hours / job.ondemand_speed)} of work and {format_hours(job.start_hours)} to start",
            hints=[f"pass `--deadline-hours {1.2 * job.ondemand_hours:.1f}`"],
        )
    return job


def _choose_kinds(plan: Plan) -> list[Estimate]:
    """Return the first spot estimate with both prices for each kind of machine between which the job may switch.

    Raises NoOfferError if there is none.
    """
    from broker.jobs.kinds import KINDS_MAX, find_kind, has_kinds

    found: dict[object, Estimate] = {}
    for each in plan.estimates:
        if each.placement.is_spot and each.placement.offer.ondemand_usd_hour and each.breakdown is not None:
            found.setdefault(find_kind(each.placement), each)
            if len(found) == KINDS_MAX or not has_kinds(plan.task):
                break
    if not found:
        raise NoOfferError(
            "no offer that fits the task is available both as spot and on-demand",
            hints=("`broker plan` lists the offers that fit; widen `resources` so that a machine sold both ways fits",),
        )
    first, *others = found.values()
    if plan.task.checkpoint.is_for_same_ranks:  # the first machine to run fixes the number of ranks
        ranks = first.placement.offer.accelerator_count
        others = [each for each in others if each.placement.offer.accelerator_count == ranks]
    return [first, *others]


def _choose_ondemand(plan: Plan, spot: Estimate) -> tuple[Offer, float]:
    """Return the offer with the cheapest on-demand gang, perhaps elsewhere, and USD per hour of the work of `spot`.

    Jobs continue there. Own machines without a price are left out: they may be busy. Machines of other kinds
    have their own prices.
    """
    from broker.jobs.kinds import find_kind, has_kinds

    own = spot.placement.offer
    assert spot.breakdown is not None and own.ondemand_usd_hour is not None
    best = own, own.ondemand_usd_hour * spot.placement.node_count
    for each in plan.estimates:
        placement = each.placement
        if placement.is_spot or placement.usd_hour <= 0 or each.breakdown is None:
            continue
        if has_kinds(plan.task) and find_kind(placement) != find_kind(spot.placement):
            continue
        usd_hour = placement.usd_hour * each.breakdown.work_hours / spot.breakdown.work_hours
        if usd_hour < best[1]:
            best = placement.offer, usd_hour
    return best


def _make_kind(plan: Plan, estimate: Estimate, work_hours: float) -> SimulatedKind:
    placement, breakdown = estimate.placement, estimate.breakdown
    assert breakdown is not None
    ondemand, ondemand_usd_hour = _choose_ondemand(plan, estimate)
    return SimulatedKind(
        estimate=estimate,
        ondemand=ondemand,
        ondemand_usd_hour=ondemand_usd_hour,
        spot_usd_hour=placement.usd_hour,
        speed=work_hours / breakdown.work_hours,
        start_hours=breakdown.recovery_s / 3600,
    )


def _mean_hazard(traces: Sequence[Trace]) -> float:
    """Return preemptions per hour of available spot, over all recordings."""
    seen = [trace.count_periods() for trace in traces]
    hours = sum(sum(each.open_hours) for each in seen)
    return sum(sum(each.open_ends) for each in seen) / hours if hours > 0 else 0.0


def set_scenes(job: SimulatedJob, traces: Sequence[Trace], starts: int, *, is_apart: bool) -> list[Scene]:
    """Return one scene per start; with `is_apart`, per start and trace."""
    from broker.lab.benchmark import spread_starts
    from broker.lab.markets import Site
    from broker.lab.parts import Scene
    from broker.lab.replay import Case
    from broker.types import Offer, Placement

    # The catalog's price is the mean of the cheapest zone; differences between zones and over time are as recorded.
    least = min((each.open_usd_hour for each in traces if each.open_usd_hour), default=1.0)

    def place(trace: Trace, kind: SimulatedKind) -> Site:
        mean = trace.open_usd_hour if is_apart else least
        spot = kind.spot_usd_hour * (trace.prices[0] / mean if trace.prices and mean else 1.0)
        base = kind.estimate.placement.offer
        offer = Offer(
            cloud=base.cloud, region=trace.name, zone=trace.name, instance_type=base.instance_type, vcpus=base.vcpus,
            memory_gib=base.memory_gib, ondemand_usd_hour=kind.ondemand_usd_hour, spot_usd_hour=spot,
        )  # fmt: skip
        return Site(
            trace=trace,
            spot=Placement(offer=offer, is_spot=True, node_count=1),  # the offer represents the whole gang
            ondemand=Placement(offer=offer, is_spot=False, node_count=1),
            start_hours=kind.start_hours,
            spot_speed=job.spot_speed * kind.speed,
            ondemand_speed=job.ondemand_speed * kind.speed,
        )

    first = SimulatedKind(
        estimate=job.estimate, ondemand=job.ondemand, ondemand_usd_hour=job.ondemand_usd_hour,
        spot_usd_hour=job.spot_usd_hour, speed=1.0, start_hours=job.start_hours,
    )  # fmt: skip
    kinds = (first, *job.others)
    # Spot capacity of other machines does not open and close at the same times: each kind begins at a different hour.
    by_kind = [
        [place(trace.begin_at(number / len(kinds), name=trace.name) if number else trace, kind) for trace in traces]
        for number, kind in enumerate(kinds)
    ]
    groups = list(zip(*by_kind, strict=True)) if is_apart else [tuple(site for sites in by_kind for site in sites)]
    scenes = []
    for number, group in enumerate(groups):
        case = Case(
            sites=group, work_hours=job.work_hours, deadline_hours=job.deadline_hours,
            save_every_hours=job.save_every_hours, notice_hours=job.notice_hours, hour_value_usd=job.hour_value_usd,
        )  # fmt: skip
        own = starts * (number + 1) // len(groups) - starts * number // len(groups)
        hours = spread_starts(group, job.deadline_hours, own)
        scenes += [Scene(case=case, from_hour=hour) for hour in hours]
    return scenes
