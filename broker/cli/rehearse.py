"""`broker rehearse`: run a spot job or service on this machine: real plan and program, simulated clouds."""

from __future__ import annotations

import asyncio
import re
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from broker.app.launching import fetch_repositories
from broker.app.planning import check_notices, check_place
from broker.cli import options
from broker.cli.context import make_context
from broker.cli.plan_table import show_plan
from broker.cli.render import print_json, print_line, print_note
from broker.cli.terminal import is_drawing, show_wait
from broker.errors import UsageError
from broker.formatting import strip_control
from broker.types import Plan, Task

if TYPE_CHECKING:
    from collections.abc import Sequence

    from broker.app.container import Context
    from broker.dashboard.model import JobPage
    from broker.rehearsal.context import Stage
    from broker.rehearsal.result import Rehearsal

SPEED = 600.0  # without a goal that specifies the amount of work: one second represents ten minutes
DURATION = "12h"  # of a service

PreemptionsOption = Annotated[
    int | None,
    typer.Option(
        "--preemptions",
        metavar="N",
        min=0,
        help="Preemptions in addition to the market's (default: 1, or 0 with --traces).",
    ),
]
NoticeOption = Annotated[
    float | None,
    typer.Option(
        "--notice",
        metavar="SECONDS",
        min=0,
        help="Preemption warning in seconds (default: alternate between none and the cloud's).",
    ),
]
SpeedOption = Annotated[
    float | None,
    typer.Option(
        "--speed",
        metavar="FACTOR",
        min=1,
        help="Simulated seconds per second of work (default: from the goal, or 600).",
    ),
]
TracesOption = Annotated[
    Path | None,
    typer.Option("--traces", metavar="PATH", help="Trace file, or folder of recorded spot availability."),
]
SeedOption = Annotated[int, typer.Option("--seed", metavar="N", help="Random seed for the simulated spot market.")]
NodesLocalOption = Annotated[
    int | None,
    typer.Option("--nodes-local", metavar="N", min=1, help="Maximum number of nodes run here; the bill counts all."),
]
HtmlOption = Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write an HTML report.")]
VerifyOption = Annotated[bool, typer.Option("--verify", help="Compare losses with an uninterrupted run.")]
ForOption = Annotated[
    str | None,
    typer.Option("--for", metavar="TIME", help=f"Simulated time that a service runs (default: {DURATION})."),
]


@options.task_options("infra", "gpus", "num_nodes", *options.ENVIRONMENT)
def rehearse(
    entrypoint: options.Entrypoint,
    preemptions: PreemptionsOption = None,
    notice: NoticeOption = None,
    speed: SpeedOption = None,
    traces: TracesOption = None,
    seed: SeedOption = 0,
    nodes_local: NodesLocalOption = None,
    duration: ForOption = None,
    verify: VerifyOption = False,
    html: HtmlOption = None,
    overrides: options.Overrides = options.NO_OVERRIDES,
    as_json: options.AsJson = False,
) -> None:
    """Run a spot job or service on this machine, with preemptions.

    Clouds, time and prices are simulated; the program is real. The exit code is 1 if it does not recover.
    """
    from broker.rehearsal.staging import open_market, set_stage

    (first, *others) = options.read_tasks(entrypoint, overrides)
    if others:
        print_note(f"note: rehearsing only the first of {len(others) + 1} tasks")
    is_service = first.service is not None
    duration_s = read_duration_s(duration or DURATION)
    check_options(is_service=is_service, duration=duration, verify=verify)
    plan = _plan_rehearsal(make_context(), first)
    stage = set_stage(plan, open_market(traces, seed), nodes_local, has_given_speed=speed is not None)
    if not as_json:
        show_plan(plan, top=5)
        show_stage(stage, speed)
    forced = (0 if traces else 1) if preemptions is None else preemptions
    if is_service:
        from broker.cli.rehearse_service import rehearse_service

        rehearse_service(
            stage, duration_s=duration_s, preemptions=forced, notice_s=notice, speed=speed or SPEED, as_json=as_json,
            html=html,
        )  # fmt: skip
    else:
        _rehearse_job(
            stage, plan, preemptions=forced, notice_s=notice, speed=speed or SPEED, is_verified=verify, as_json=as_json,
            html=html,
        )  # fmt: skip


def _plan_rehearsal(context: Context, task: Task) -> Plan:
    """Plan the task as a spot job or service; its repository is cloned first, if it has one."""
    from broker.rehearsal.staging import choose_resources

    task = choose_resources(context.resolve(task), note=print_note)
    if task.service is not None:
        from broker.rehearsal.service_staging import choose_service

        task = choose_service(task, note=print_note)
    check_notices([task], is_launch=True, note=print_note)
    check_place(task, {"local"}, is_launch=False, note=print_note)
    (task,) = fetch_repositories(context, [task])
    return context.plan(task)


def _rehearse_job(
    stage: Stage,
    plan: Plan,
    *,
    preemptions: int,
    notice_s: float | None,
    speed: float,
    is_verified: bool,
    as_json: bool,
    html: Path | None,
) -> None:
    """Rehearse a job, and show the verdict. Raises BrokerError if it fails or does not recover."""
    from broker.rehearsal.staging import raise_failure

    result, page, log = run_rehearsal(
        stage, plan, preemptions=preemptions, notice_s=notice_s, speed=speed, is_quiet=as_json
    )
    if is_verified:
        unbroken, _, _ = run_rehearsal(
            stage, plan, preemptions=0, notice_s=None, speed=speed, is_quiet=as_json, is_calm=True
        )
        result = result.compare(unbroken)
    if as_json:
        print_json(result.describe())
    else:
        from broker.cli.rehearse_show import show_rehearsal

        show_rehearsal(result)
    if html is not None:
        from broker.cli.rehearse_html import write_rehearsal

        write_rehearsal(html, result, page, log)
        print_note(f"wrote {html}")
    raise_failure(result, preemptions, is_shown=not as_json)


def read_duration_s(text: str) -> float:
    """Read `--for`. Raises UsageError."""
    from broker.task.measures import Duration

    measure = Duration(bare_unit="m")
    if not re.fullmatch(measure.pattern, text):
        raise UsageError(f"`--for` must be {measure.expected}, not `{text}`", hints=["for example `--for 12h`"])
    return measure.convert(text)


def check_options(*, is_service: bool, duration: str | None, verify: bool) -> None:
    """Raise UsageError for an option of jobs with a service, or the reverse."""
    if is_service and verify:
        raise UsageError("`--verify` compares losses, which a service does not have", hints=["omit `--verify`"])
    if not is_service and duration is not None:
        raise UsageError(
            "`--for` is available for services only: a job runs until its program ends", hints=["omit `--for`"]
        )


def show_stage(stage: Stage, speed: float | None) -> None:
    """Print what the rehearsal simulates, and how fast its clock runs."""
    played = stage.node_count
    if played < stage.task.num_nodes:
        print_line(f"Running {played} of {stage.task.num_nodes} nodes on this machine; the bill counts all nodes")
    clouds = ", ".join(sorted(stage.clouds))
    if stage.task.service is not None:
        print_line(
            f"Simulated: {clouds}; undisturbed hours pass {speed or SPEED:g} times faster, the rest in real time"
        )
        return
    pace = "at the pace of the goal" if speed is None and stage.has_work else f"{speed or SPEED:g} times faster"
    print_line(f"Simulated: {clouds}; steps run {pace}, everything else in real time")


def run_rehearsal(
    stage: Stage,
    plan: Plan,
    *,
    preemptions: int,
    notice_s: float | None,
    speed: float,
    is_quiet: bool,
    is_calm: bool = False,
) -> tuple[Rehearsal, JobPage, Sequence[str]]:
    """Run the task to its end in a temporary state folder; return the result, the job's page data, and its log.

    `is_calm`: no preemptions, unlimited capacity.
    """
    from broker.app.jobs import read_chunks
    from broker.dashboard.model import read_job
    from broker.rehearsal.context import RehearsalContext
    from broker.rehearsal.market import SeededMarket
    from broker.rehearsal.result import make_rehearsal
    from broker.rehearsal.run import JobDriver

    def tell(text: str) -> None:
        (print_note if is_quiet else print_line)(strip_control(text))

    if is_calm:
        tell("running again without preemptions:")
        stage = replace(stage, market=SeededMarket(seed=0, full_share=0.0))
    home = Path(tempfile.mkdtemp(prefix="broker-rehearsal-"))
    try:
        context = RehearsalContext(home, stage, speed=speed, on_event=lambda message: driver.report_market(message))
        with show_wait("rehearsing", is_printed=False) as bar:
            driver = JobDriver(context, preemptions, notice_s, tell, bar if is_drawing(sys.stderr) else None)
            asyncio.run(driver.run())
        job = driver.job
        log = [line for chunk in read_chunks(context, job.id) for line in chunk.lines]
        return make_rehearsal(context, driver, job, plan), read_job(context, job), log
    finally:
        shutil.rmtree(home, ignore_errors=True)
