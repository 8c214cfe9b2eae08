"""`broker sweep`: search hyperparameters with managed jobs, and show the results."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from broker.cli import options
from broker.cli.context import make_context
from broker.cli.render import print_json, print_line, print_note, print_table
from broker.cli.terminal import show_progress
from broker.formatting import format_count, format_usd

if TYPE_CHECKING:
    from broker.app.sweeping import SweepDriver, SweepView
    from broker.types import Plan


class EarlyStop(StrEnum):
    NONE = "none"
    ASHA = "asha"


Param = Annotated[
    list[str],
    typer.Option(
        "--param", "-p", metavar="NAME=VALUES", show_default=False,
        help="Variable to search: lr=1e-4..1e-2:log, layers=2..12:int or seed=0,1,2. Repeatable.",
    ),
]  # fmt: skip
Runs = Annotated[
    int | None,
    typer.Option(
        "--runs", metavar="N", min=1, max=10_000, show_default=False,
        help="Number of runs (default: all combinations of lists).",
    ),
]  # fmt: skip
Early = Annotated[EarlyStop, typer.Option("--early-stop", help="Rule that stops runs with a poor loss early.")]
Parallel = Annotated[int, typer.Option("--parallel", metavar="N", min=1, help="Number of runs at the same time.")]
Seed = Annotated[int, typer.Option("--seed", metavar="N", help="Seed of the drawn values.")]
Plot = Annotated[Path | None, typer.Option("--plot", metavar="FILE.svg", help="Write a plot of the losses.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the results, or with -d the state, as JSON.")]
ROWS_MAX = 20


@options.task_options("workdir", *options.RESOURCES, *options.ENVIRONMENT)
def sweep(
    entrypoint: options.Entrypoint,
    param: Param,
    overrides: options.Overrides = options.NO_OVERRIDES,
    runs: Runs = None,
    early_stop: Early = EarlyStop.NONE,
    parallel: Parallel = 8,
    seed: Seed = 0,
    plot: Plot = None,
    yes: options.Yes = False,
    detach: options.Detach = False,
    dryrun: options.Dryrun = False,
    as_json: AsJson = False,
) -> None:
    """Search hyperparameters with managed jobs.

    Each run gets its values as environment variables and reports its loss in progress lines. The same command
    continues an interrupted sweep, or shows the results of one that has ended.
    """
    from broker.app.sweeping import SweepDriver, SweepRequest
    from broker.cli.launch import make_callbacks
    from broker.cli.plan_table import show_plan

    def show(plans: Sequence[Plan]) -> None:
        if not as_json:
            show_plan(plans[0])
        count = len(driver.configurations)
        print_note(f"{format_count(count, 'run')}, each at the price of the first placement, {parallel} at a time")

    if plot is not None:
        from broker.cli.sweep_plot import check_file

        check_file(plot)
    request = SweepRequest(
        task=options.read_task(entrypoint, overrides), parameters=tuple(param), runs=runs, parallel=parallel,
        early=early_stop.value, seed=seed,
    )  # fmt: skip
    driver = SweepDriver(make_context(), request, callbacks=make_callbacks(show, yes=yes))
    if dryrun:
        driver.show()
        print_table(["RUN", *driver.names], [[str(index + 1), *each.values()] for index, each in _list_all(driver)])
        return
    view = driver.advance()  # asks for the price, so before any bar
    if not detach:
        view = _follow(driver)
    _show(driver, view, as_json=as_json)
    if plot is not None and not detach:
        from broker.cli.sweep_plot import write_plot

        write_plot(plot, driver, view)
        print_note(f"wrote {plot}")
    if detach and not view.is_over:
        _note_left(driver, view)


def _list_all(driver: SweepDriver) -> list[tuple[int, Any]]:
    return list(enumerate(driver.configurations))


def _follow(driver: SweepDriver) -> SweepView:
    async def follow() -> SweepView:
        view = None
        async for view in driver.follow():
            ended = sum(job.status.is_terminal for job in view.jobs.values())
            bar.update(ended, total=len(driver.configurations))
            bar.describe(f"{driver.group}: {_describe_state(driver, view)}")
        assert view is not None
        return view

    try:
        with show_progress(driver.group) as bar:
            return asyncio.run(follow())
    except KeyboardInterrupt:
        print_note("interrupted")
        _note_left(driver, driver.look())
        raise typer.Exit(130) from None


def _describe_state(driver: SweepDriver, view: SweepView) -> str:
    live = sum(not job.status.is_terminal for job in view.jobs.values())
    spent = format_usd(sum(view.usd.values()))
    return (
        f"{len(view.jobs)} of {format_count(len(driver.configurations), 'run')} started, {live} live, "
        f"{len(view.stopped)} stopped early, {spent} USD"
    )


def _note_left(driver: SweepDriver, view: SweepView) -> None:
    """Say what continues by itself, and what the command is needed for."""
    left = len(driver.configurations) - len(view.jobs)
    print_note(
        f"{driver.group}: the runs that were started continue by themselves; "
        f"{left} are left, which the same command without `-d` starts; it also stops poor runs early"
    )
    print_note(f"cancel the started runs with `broker jobs cancel {driver.group}`")


def describe(driver: SweepDriver, view: SweepView) -> dict[str, Any]:
    """Describe a sweep as JSON: its runs, the best first."""
    from broker.sweeps.board import find_best, rank

    best = find_best(view.jobs)
    rows = []
    for run in rank(view.jobs, view.stopped):
        progress = view.jobs[run].progress
        rows.append({
            "run": run + 1, "job": view.jobs[run].id, "parameters": dict(driver.configurations[run]),
            "status": view.jobs[run].status.value, "is_stopped_early": run in view.stopped,
            "step": progress.step if progress else None, "total": progress.total if progress else None,
            "loss": progress.loss if progress else None, "usd": view.usd[run],
        })  # fmt: skip
    return {
        "name": driver.group, "runs": len(driver.configurations), "is_over": view.is_over,
        "usd": sum(view.usd.values()), "best": None if best is None else dict(driver.configurations[best]),
        "results": rows,
    }  # fmt: skip


def _show(driver: SweepDriver, view: SweepView, *, as_json: bool) -> None:
    found = describe(driver, view)
    if as_json:
        print_json(found)
        return
    rows = [
        [
            str(each["run"]), str(each["job"]), *each["parameters"].values(),
            "STOPPED" if each["is_stopped_early"] else each["status"],
            "-" if each["step"] is None else f"{each['step']}/{each['total'] or '-'}",
            "-" if each["loss"] is None else f"{each['loss']:.4g}", format_usd(each["usd"]),
        ]
        for each in found["results"]
    ]  # fmt: skip
    columns = ["RUN", "JOB", *driver.names, "STATUS", "STEP", "LOSS", "USD"]
    print_table(columns, rows[:ROWS_MAX], right=("RUN", "JOB", "STEP", "LOSS", "USD"))
    if len(rows) > ROWS_MAX:
        print_line(f"... and {len(rows) - ROWS_MAX} more; `--json` prints all")
    print_line(f"{driver.group}: {_describe_state(driver, view)}")
    if found["best"]:
        print_line("Best: " + " ".join(f"--env {name}={value}" for name, value in found["best"].items()))
