"""`broker simulate TASK.yaml`: compare spot policies for a task on recorded or synthetic markets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from broker.cli import options
from broker.cli.render import print_json, print_line, print_note, print_table
from broker.cli.terminal import show_progress
from broker.errors import NoOfferError, UsageError
from broker.formatting import format_count, format_hours, format_usd, to_plain

if TYPE_CHECKING:
    from broker.lab.benchmark import Benchmark, Score
    from broker.lab.traces import Trace
    from broker.types import Estimate, Task

SLACK_DEFAULT = 1.5  # deadline / work, for a task without a deadline
STARTS_MAX = 100_000
BAR_WIDTH = 44


def simulate(
    entrypoint: options.Entrypoint,
    traces: Annotated[
        Path | None, typer.Option("--traces", metavar="PATH", help="Trace file, or folder of traces.")
    ] = None,
    policy: Annotated[
        str | None, typer.Option("--policy", metavar="NAME[,...]", help="Policies (default: all).")
    ] = None,
    starts: Annotated[
        int, typer.Option("--starts", metavar="N", min=1, max=STARTS_MAX, help="Number of start times to sample.")
    ] = 16,
    optima: Annotated[
        int | None,
        typer.Option(
            "--optima",
            metavar="N",
            min=0,
            help="Number of start times to compute the optimum for (default: by effort).",
        ),
    ] = None,
    apart: Annotated[
        bool, typer.Option("--apart", help="Replay each trace as a market of its own (default: zones of one market).")
    ] = False,
    notice: Annotated[
        float, typer.Option("--notice", metavar="SECONDS", min=0, help="Preemption warning in seconds.")
    ] = 0,
    deadline_hours: Annotated[
        float | None,
        typer.Option("--deadline-hours", metavar="HOURS", help=f"Deadline in hours ({options.OVERRIDES})."),
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write an HTML report with timelines.")
    ] = None,
    infra: options.Infra = None,
    gpus: options.Gpus = None,
    num_nodes: options.NumNodes = None,
    as_json: options.AsJson = False,
) -> None:
    """Compare spot policies for a task on recorded markets.

    Without --traces, the markets are synthetic.
    """
    from broker.cli.context import make_context
    from broker.lab.benchmark import run_study
    from broker.spot.policies import POLICIES

    names = _choose_policies(policy, tuple(POLICIES))
    task = options.read_task(entrypoint, options.Overrides(infra=infra, gpus=gpus, num_nodes=num_nodes))
    found = _read_traces(traces)
    job = _measure(make_context(), task, found, deadline_hours, notice)
    scenes = _set_scenes(job, found, starts, is_apart=apart)
    with show_progress("replaying") as bar:

        def tell(done: int, total: int, step: str) -> None:
            bar.describe(f"replaying: {step}")
            bar.update(done, total=total)

        study = run_study(scenes, names, optima_count=optima, on_step=tell)
    if html is not None:
        from broker.cli.simulate_html import write_report

        kind = "synthetic" if traces is None else "recorded"
        facts = [("markets", f"{len(found)} {kind}"), *job.list_facts()]
        write_report(html, study, title=f"{task.name or 'task'} on {kind} spot markets", facts=facts)
    if as_json:
        print_json(_describe(job, study, found))
        return
    _show(job, study, found, source=traces)
    if html is not None:
        print_note(f"wrote {html}")


@dataclass(frozen=True, kw_only=True)
class SimulatedJob:
    """The task on the instances that it would run on."""

    estimate: Estimate
    ondemand_usd_hour: float  # of the gang
    spot_usd_hour: float
    work_hours: float
    deadline_hours: float
    is_deadline_assumed: bool
    start_hours: float
    save_every_hours: float
    spot_speed: float
    notice_hours: float

    def list_facts(self) -> list[tuple[str, str]]:
        offer = self.estimate.placement.offer
        assumed = f" (assumed: {SLACK_DEFAULT:g} times the work)" if self.is_deadline_assumed else ""
        every = format_hours(self.save_every_hours) if self.save_every_hours else "-"
        return [
            ("machines", f"{self.estimate.placement.node_count} x {offer.cloud} {offer.instance_type}"),
            ("prices", f"{format_usd(self.ondemand_usd_hour)} on-demand, {format_usd(self.spot_usd_hour)} spot, USD/h"),
            ("work", format_hours(self.work_hours)),
            ("deadline", f"{format_hours(self.deadline_hours)}{assumed}"),
            ("start", f"{format_hours(self.start_hours)} each time, billed"),
            ("checkpoint", f"every {every}"),
        ]


def _choose_policies(text: str | None, known: Sequence[str]) -> list[str]:
    names = list(dict.fromkeys(each.strip() for each in text.split(",") if each.strip())) if text else list(known)
    for name in names:
        if name not in known:
            import difflib

            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean `{near[0]}`?" if near else f"known policies: {', '.join(known)}"
            raise UsageError(f"unknown policy `{name}`", hints=[hint])
    if not names:
        raise UsageError("`--policy` must name a policy", hints=[f"known policies: {', '.join(known)}"])
    return ["on-demand", *(name for name in names if name != "on-demand")]


def _read_traces(path: Path | None) -> list[Trace]:
    from broker.lab.trace_files import read_traces
    from broker.lab.traces import make_default_traces

    return list(make_default_traces()) if path is None else read_traces(path)


def _measure(
    context: Any, task: Task, traces: Sequence[Trace], deadline_hours: float | None, notice_s: float
) -> SimulatedJob:
    """Plan the task. Raises UsageError without work, NoOfferError without an offer of both spot and on-demand."""
    from dataclasses import replace

    from broker.optimizer.cost import Terms
    from broker.spot.interval import best_interval_s

    if task.goal is None or task.goal.work_hours is None:
        raise UsageError(
            "a simulation requires the amount of work, which the task does not specify",
            hints=["add `goal: {work: 40h, deadline: 60h}` to the task"],
        )
    resources = tuple(replace(each, use_spot=None) for each in context.resolve(task).resources)
    free = replace(task, resources=resources)
    plan = context.plan(replace(free, goal=replace(task.goal, deadline_hours=None, budget_usd=None)))
    both = (each for each in plan.estimates if each.placement.is_spot and each.placement.offer.ondemand_usd_hour)
    estimate = next(both, None)
    if estimate is None or estimate.breakdown is None:
        raise NoOfferError("no offer that fits the task is available both as spot and on-demand")
    placement = estimate.placement
    work = estimate.breakdown.work_hours
    deadline = deadline_hours or task.goal.deadline_hours
    terms = Terms.of(work, 0.0, task.checkpoint, None, placement.offer.cloud, placement.node_count)
    every_s = task.checkpoint.every_s or best_interval_s(task.checkpoint.stall_s, _mean_hazard(traces))
    every = min(every_s / 3600, work)
    stall = task.checkpoint.stall_s / 3600
    assert placement.offer.ondemand_usd_hour is not None
    job = SimulatedJob(
        estimate=estimate,
        ondemand_usd_hour=placement.offer.ondemand_usd_hour * placement.node_count,
        spot_usd_hour=placement.usd_hour,
        work_hours=work,
        deadline_hours=deadline or SLACK_DEFAULT * work,
        is_deadline_assumed=not deadline,
        start_hours=terms.recovery_hours,
        save_every_hours=every,
        spot_speed=every / (every + stall),
        notice_hours=notice_s / 3600,
    )
    if job.deadline_hours < job.work_hours + job.start_hours:
        raise UsageError(
            f"the deadline of {format_hours(job.deadline_hours)} cannot be met even on-demand: "
            f"{format_hours(job.work_hours)} of work and {format_hours(job.start_hours)} to start",
            hints=[f"pass `--deadline-hours {1.2 * (job.work_hours + job.start_hours):.1f}"],
        )
    return job


def _mean_hazard(traces: Sequence[Trace]) -> float:
    """Return preemptions per hour of available spot, over all recordings."""
    seen = [trace.count_spells() for trace in traces]
    hours = sum(sum(each.open_hours) for each in seen)
    return sum(sum(each.open_ends) for each in seen) / hours if hours > 0 else 0.0


def _set_scenes(job: SimulatedJob, traces: Sequence[Trace], starts: int, *, is_apart: bool) -> list[Any]:
    from broker.lab.benchmark import Scene, spread_starts
    from broker.lab.markets import Site
    from broker.lab.replay import Case
    from broker.types import Offer, Placement

    # The catalog's price is the cheapest zone's; differences between zones and over time are as recorded.
    least = min((each.prices[0] for each in traces if each.prices and each.prices[0] > 0), default=1.0)

    def place(trace: Trace) -> Site:
        spot = job.spot_usd_hour * (trace.prices[0] / least if trace.prices and not is_apart else 1.0)
        base = job.estimate.placement.offer
        offer = Offer(
            cloud=base.cloud, region=trace.name, zone=trace.name, instance_type=base.instance_type, vcpus=base.vcpus,
            memory_gib=base.memory_gib, ondemand_usd_hour=job.ondemand_usd_hour, spot_usd_hour=spot,
        )  # fmt: skip
        return Site(
            trace=trace,
            spot=Placement(offer=offer, is_spot=True, node_count=1),  # the offer stands for the whole gang
            ondemand=Placement(offer=offer, is_spot=False, node_count=1),
            start_hours=job.start_hours,
            spot_speed=job.spot_speed,
        )

    sites = [place(trace) for trace in traces]
    groups = [(site,) for site in sites] if is_apart else [tuple(sites)]
    scenes = []
    for number, group in enumerate(groups):
        case = Case(
            sites=group, work_hours=job.work_hours, deadline_hours=job.deadline_hours,
            save_every_hours=job.save_every_hours, notice_hours=job.notice_hours,
        )  # fmt: skip
        own = starts * (number + 1) // len(groups) - starts * number // len(groups)
        hours = spread_starts(group, job.deadline_hours, own)
        scenes += [Scene(case=case, from_hour=hour) for hour in hours]
    return scenes


def _show(job: SimulatedJob, study: Benchmark, traces: Sequence[Trace], *, source: Path | None) -> None:
    print_line(f"{len(study.scenes)} replays per policy on {_name_source(traces, source)}")
    for name, text in job.list_facts():
        print_line(f"{name:>12}  {text}")
    print_line()
    base = next(each for each in study.scores if each.policy == "on-demand").usd_mean
    columns = ["POLICY", "USD", "P95", "SAVED", "OVER", "TIME", "P95", "LOST", "LATE"]
    rows = [_list_cells(each, base) for each in study.scores]
    print_table(columns, rows, right=columns[1:], firm=columns)
    print_line()
    for line in _draw(study, base):
        print_line(line)
    if any(each.is_oracle for each in study.scores):
        print_line("* knows when each spot interval ends, which no real policy can")
    print_line("USD and TIME to finish, mean and 95th percentile; LOST: preemptions per replay")
    known = sum(each is not None for each in study.optima)
    if known:
        print_line("OVER: mean cost above the optimum, which knows the future; accurate to 0.3 %")
        if known < len(study.scenes):
            print_line(f"The optimum is computed for {known} of the replays and estimated for the others")


def _name_source(traces: Sequence[Trace], source: Path | None) -> str:
    if source is not None:
        return f"{format_count(len(traces), 'trace')} from {source}"
    return f"{len(traces)} synthetic traces (use recordings with `--traces DIR`)"


def _list_cells(score: Score, base: float) -> list[str]:
    over = "-" if score.over_optimum is None else f"{score.over_optimum:+.1%}"
    return [
        score.policy + ("*" if score.is_oracle else ""), _show_cost(score.usd_mean), _show_cost(score.usd_p95),
        f"{1 - score.usd_mean / base:.0%}", over, format_hours(score.hours_mean), format_hours(score.hours_p95),
        f"{score.preemptions_mean:.1f}", f"{score.late / score.replays:.0%}" if score.late else "0",
    ]  # fmt: skip


def _show_cost(usd: float) -> str:
    """Show amounts from 1,000 USD without cents, so that the table fits."""
    return f"{usd:,.0f}" if usd >= 1000 else format_usd(usd)


def _draw(study: Benchmark, base: float) -> list[str]:
    """Draw mean costs as bars."""
    bars = [(each.policy, each.usd_mean) for each in study.scores]
    if study.optimum_usd_mean is not None:
        bars.append(("(optimum)", study.optimum_usd_mean))
    most = max(usd for _, usd in bars)
    width = max(len(name) for name, _ in bars)
    return [f"{name:>{width}}  {'█' * max(round(usd / most * BAR_WIDTH), 1)} {usd / base:.0%}" for name, usd in bars]


def _describe(job: SimulatedJob, study: Benchmark, traces: Sequence[Trace]) -> dict[str, object]:
    offer = job.estimate.placement.offer
    return {
        "job": {
            "cloud": offer.cloud, "instance_type": offer.instance_type, "node_count": job.estimate.placement.node_count,
            "ondemand_usd_hour": job.ondemand_usd_hour, "spot_usd_hour": job.spot_usd_hour,
            "work_hours": job.work_hours, "deadline_hours": job.deadline_hours, "start_hours": job.start_hours,
            "save_every_hours": job.save_every_hours, "notice_hours": job.notice_hours,
        },
        "traces": [{"name": each.name, "hours": each.hours, "open_share": each.open_share} for each in traces],
        "policies": [to_plain(each) for each in study.scores],
        "optimum_usd": list(study.optima),
        "optimum_usd_mean": study.optimum_usd_mean,
        "outcomes": {
            score.policy: [
                {"from_hour": scene.from_hour, "usd": each.usd, "hours": each.hours, "is_late": each.is_late,
                 "preemptions": each.preemptions}
                for scene, each in zip(study.scenes, found, strict=True)
            ]
            for score, found in zip(study.scores, study.outcomes, strict=True)
        },
    }  # fmt: skip
