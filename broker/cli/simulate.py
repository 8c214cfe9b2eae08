"""`broker simulate TASK.yaml`: compare spot policies for a task on recorded or synthetic markets."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from broker.app.simulating import STARTS_MAX, SimulatedJob, SimulationRequest
from broker.app.simulating import simulate as replay
from broker.cli import options
from broker.cli.context import make_context
from broker.cli.render import print_json, print_line, print_note, print_table
from broker.cli.terminal import show_progress
from broker.formatting import format_count, format_hours, format_usd, to_plain

if TYPE_CHECKING:
    from broker.lab.benchmark import Benchmark, Score
    from broker.lab.traces import Trace

BAR_WIDTH = 44


TracesOption = Annotated[Path | None, typer.Option("--traces", metavar="PATH", help="Trace file, or folder of traces.")]
PolicyOption = Annotated[str | None, typer.Option("--policy", metavar="NAME[,...]", help="Policies (default: all).")]
StartsOption = Annotated[
    int, typer.Option("--starts", metavar="N", min=1, max=STARTS_MAX, help="Number of start times to sample.")
]
OptimaOption = Annotated[
    int | None,
    typer.Option(
        "--optima",
        metavar="N",
        min=0,
        help="Number of start times with a computed optimum (default: a few seconds' worth).",
    ),
]
ApartOption = Annotated[
    bool, typer.Option("--apart", help="Replay each trace as a separate market (default: zones of one market).")
]
NoticeOption = Annotated[
    float, typer.Option("--notice", metavar="SECONDS", min=0, help="Preemption warning in seconds.")
]
DeadlineHoursOption = Annotated[
    float | None,
    typer.Option("--deadline-hours", metavar="HOURS", help=f"Deadline in hours ({options.OVERRIDES})."),
]
HtmlOption = Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write an HTML report with timelines.")]


@options.task_options("infra", "gpus", "num_nodes")
def simulate(
    entrypoint: options.Entrypoint,
    traces: TracesOption = None,
    policy: PolicyOption = None,
    starts: StartsOption = 16,
    optima: OptimaOption = None,
    apart: ApartOption = False,
    notice: NoticeOption = 0,
    deadline_hours: DeadlineHoursOption = None,
    html: HtmlOption = None,
    overrides: options.Overrides = options.NO_OVERRIDES,
    as_json: options.AsJson = False,
) -> None:
    """Compare spot policies for a task on recorded markets.

    Without --traces, the markets are synthetic.
    """
    request = SimulationRequest(
        traces=traces,
        policies=tuple(each.strip() for each in policy.split(",") if each.strip()) if policy else None,
        starts=starts, optima=optima, is_apart=apart, notice_s=notice, deadline_hours=deadline_hours,
        workers=os.cpu_count() or 1,
    )  # fmt: skip
    task = options.read_task(entrypoint, overrides)
    with show_progress("replaying") as bar:

        def tell(done: int, total: int, step: str) -> None:
            bar.describe(f"replaying: {step}")
            bar.update(done, total=total)

        result = replay(make_context(), task, request, on_progress=tell)
    job, study, found = result.job, result.study, result.traces
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


def _show(job: SimulatedJob, study: Benchmark, traces: Sequence[Trace], *, source: Path | None) -> None:
    print_line(f"{len(study.scenes)} replays per policy on {_name_source(traces, source)}")
    for name, text in job.list_facts():
        print_line(f"{name:>12}  {text}")
    print_line()
    base = next(score for score in study.scores if score.policy == "on-demand").usd_mean
    columns = ["POLICY", "USD", "P95", "SAVED", "OVER", "TIME", "P95", "LOST", "LATE"]
    rows = [_list_cells(score, base) for score in study.scores]
    print_table(columns, rows, right=columns[1:], firm=columns)
    print_line()
    for line in _draw(study, base):
        print_line(line)
    if any(score.is_oracle for score in study.scores):
        print_line("* knows when each spot interval ends, which no real policy can")
    print_line("USD and TIME to finish, mean and 95th percentile; LOST: preemptions per replay")
    known = sum(each is not None for each in study.optima)
    if known:
        print_line("OVER: mean cost above the optimum, computed with hindsight; accurate to 0.3 %")
        if job.others:
            print_line("The optimum changes between all machines on spot, and uses one kind on-demand")
        if known < len(study.scenes):
            print_line(f"The optimum is computed for {known} of the replays and estimated for the others")


def _name_source(traces: Sequence[Trace], source: Path | None) -> str:
    if source is not None:
        return f"{format_count(len(traces), 'trace')} from {source}"
    return f"{len(traces)} synthetic traces (use recordings with `--traces DIR`)"


def _list_cells(score: Score, base: float) -> list[str]:
    over = "-" if score.over_optimum is None else f"{score.over_optimum:+z.1%}"
    return [
        score.policy + ("*" if score.is_oracle else ""), _show_cost(score.usd_mean), _show_cost(score.usd_p95),
        f"{1 - score.usd_mean / base:z.0%}", over, format_hours(score.hours_mean), format_hours(score.hours_p95),
        f"{score.preemptions_mean:.1f}", f"{score.late / score.replays:.0%}" if score.late else "0",
    ]  # fmt: skip


def _show_cost(usd: float) -> str:
    """Show amounts from 1,000 USD without cents, so that the table fits."""
    return f"{usd:,.0f}" if usd >= 1000 else format_usd(usd)


def _draw(study: Benchmark, base: float) -> list[str]:
    """Draw mean costs as bars."""
    bars = [(score.policy, score.usd_mean) for score in study.scores]
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
            "ondemand_cloud": job.ondemand.cloud, "ondemand_instance_type": job.ondemand.instance_type,
            "ondemand_usd_hour": job.ondemand_usd_hour, "spot_usd_hour": job.spot_usd_hour,
            "work_hours": job.work_hours, "deadline_hours": job.deadline_hours, "start_hours": job.start_hours,
            "save_every_hours": job.save_every_hours, "notice_hours": job.notice_hours,
            "other_kinds": [
                {"cloud": each.estimate.placement.offer.cloud,
                 "instance_type": each.estimate.placement.offer.instance_type,
                 "ondemand_usd_hour": each.ondemand_usd_hour, "spot_usd_hour": each.spot_usd_hour, "speed": each.speed}
                for each in job.others
            ],
        },
        "traces": [{"name": trace.name, "hours": trace.hours, "open_share": trace.open_share} for trace in traces],
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
