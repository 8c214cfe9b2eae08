"""`broker sweep`: search hyperparameters with managed jobs, and show the results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from broker.cli import options
from broker.cli.context import make_session
from broker.cli.render import print_json, print_line, print_note, print_table
from broker.cli.terminal import Bar, show_progress
from broker.errors import RunFailedError
from broker.formatting import format_count, format_usd
from broker.types import JobStatus

if TYPE_CHECKING:
    from broker.app.session import Session
    from broker.app.sweeping import SweepRequest
    from broker.app.verbs.batches import SweepState
    from broker.types import Plan


class EarlyStop(StrEnum):
    """The rule that stops poor runs early."""

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
        help="Number of runs (default: every combination of the listed values).",
    ),
]  # fmt: skip
Early = Annotated[EarlyStop, typer.Option("--early-stop", help="Rule for stopping runs with a poor loss early.")]
Parallel = Annotated[int, typer.Option("--parallel", metavar="N", min=1, help="Maximum number of concurrent runs.")]
Seed = Annotated[int, typer.Option("--seed", metavar="N", help="Random seed for the sampled values.")]
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

    Each run receives its values as environment variables and reports its loss in progress lines. Repeat the
    command to continue an interrupted sweep, or to show the results of one that has ended.
    """
    from broker.app.sweeping import SweepRequest

    if plot is not None:
        from broker.cli.sweep_plot import check_file

        check_file(plot)
    session = make_session()
    request = SweepRequest(
        task=options.read_task(entrypoint, overrides), parameters=tuple(param), runs=runs, parallel=parallel,
        early=early_stop.value, seed=seed,
    )  # fmt: skip
    state = _run(session, request, yes=yes, detach=detach, dryrun=dryrun, as_json=as_json)
    if dryrun:
        rows = [[str(index + 1), *each.values()] for index, each in enumerate(state.configurations)]
        print_table(["RUN", *state.parameters], rows)
        return
    _show(state, as_json=as_json)
    if plot is not None and not detach:
        from broker.cli.sweep_plot import write_plot

        write_plot(plot, state)
        print_note(f"wrote {plot}")
    if detach and not state.is_over:
        _note_left(state, early_stop)
    _check_runs(state)


def _run(
    session: Session, request: SweepRequest, *, yes: bool, detach: bool, dryrun: bool, as_json: bool
) -> SweepState:
    """Run the sweep with a progress bar; return its state at the end, or at once if detached."""
    from broker.app.verbs.batches import read_sweep, run_sweep
    from broker.cli.launch import confirm_price, show_upload
    from broker.cli.plan_table import show_plan

    count = count_configurations(request)
    parallel = min(request.parallel, count)

    def show(plans: Sequence[Plan]) -> None:
        if not as_json:
            show_plan(plans[0])
        print_note(f"{format_count(count, 'run')}, each at the price of the first placement, {parallel} at a time")

    with ExitStack() as stack:
        bar: Bar | None = None

        def begin(state: SweepState) -> None:
            nonlocal bar
            if not detach:  # the price has been confirmed, so the bar no longer hides a prompt
                bar = stack.enter_context(show_progress(state.name))

        def draw(state: SweepState) -> None:
            assert bar is not None
            bar.update(sum(each.status.is_terminal for each in state.runs), total=len(state.configurations))
            bar.describe(f"{state.name}: {_describe_state(state)}")

        try:
            return session.call(
                run_sweep, request=request, is_detached=detach, is_dryrun=dryrun, show=show,
                confirm=lambda plans: confirm_price(plans, yes=yes, parallel=parallel, total=count),
                on_begin=begin, on_change=draw,
                track_upload=show_upload,
            )  # fmt: skip
        except KeyboardInterrupt:
            if bar is None:
                raise
            stack.close()
            print_note("interrupted")
            _note_left(session.call(read_sweep, request=request), EarlyStop(request.early))
            raise typer.Exit(130) from None


def count_configurations(request: SweepRequest) -> int:
    """Return the number of runs. Raises UsageError for parameters that cannot be used."""
    from broker.sweeps.space import draw, parse_parameters

    return len(draw(parse_parameters(request.parameters), runs=request.runs, seed=request.seed))


def _describe_state(state: SweepState) -> str:
    live = sum(not each.status.is_terminal for each in state.runs)
    stopped = sum(each.is_stopped_early for each in state.runs)
    spent = format_usd(sum(each.usd for each in state.runs))
    return (
        f"{len(state.runs)} of {format_count(len(state.configurations), 'run')} started, {live} live, "
        f"{stopped} stopped early, {spent} USD"
    )


def _note_left(state: SweepState, early: EarlyStop) -> None:
    """Print which runs continue on their own, and what requires the command."""
    left = len(state.configurations) - len(state.runs)
    tasks = [f"starts the remaining {format_count(left, 'run')}"] if left else []
    tasks += ["stops poor runs early"] if early is EarlyStop.ASHA else []
    print_note(
        f"{state.name}: started runs continue on their own; "
        f"the same command without `-d` {' and '.join(tasks) or 'shows their results'}"
    )
    print_note(f"cancel the started runs with `broker jobs cancel {state.name}`")


def _check_runs(state: SweepState) -> None:
    """Raise RunFailedError if every run has failed, so that a script does not continue."""
    if state.is_over and not any(each.status in (JobStatus.SUCCEEDED, JobStatus.CANCELLED) for each in state.runs):
        raise RunFailedError(
            f"no run of {state.name} has succeeded", returncode=1,
            hints=[f"see the output of one with `broker jobs logs {state.runs[0].job_id}`"],
        )  # fmt: skip


def describe(state: SweepState) -> dict[str, Any]:
    """Return a sweep as JSON-ready data, with the best run first."""
    rows = [
        {
            "run": each.number + 1, "job": each.job_id, "parameters": dict(state.configurations[each.number]),
            "status": each.status.value, "is_stopped_early": each.is_stopped_early,
            "step": each.progress.step if each.progress else None,
            "total": each.progress.total if each.progress else None,
            "loss": each.progress.loss if each.progress else None,
            "is_diverged": each.progress is not None and each.progress.is_diverged, "usd": each.usd,
        }
        for each in state.runs
    ]  # fmt: skip
    return {
        "name": state.name, "runs": len(state.configurations), "is_over": state.is_over,
        "usd": sum(each.usd for each in state.runs),
        "best": None if state.best is None else dict(state.configurations[state.best]), "results": rows,
    }  # fmt: skip


def _format_loss(result: Mapping[str, Any]) -> str:
    if result["loss"] is not None:
        return f"{result['loss']:.4g}"
    return "diverged" if result["is_diverged"] else "-"


def _show(state: SweepState, *, as_json: bool) -> None:
    found = describe(state)
    if as_json:
        print_json(found)
        return
    rows = [
        [
            str(each["run"]), str(each["job"]), *each["parameters"].values(),
            "STOPPED" if each["is_stopped_early"] else each["status"],
            "-" if each["step"] is None else f"{each['step']}/{each['total'] or '-'}",
            _format_loss(each), format_usd(each["usd"]),
        ]
        for each in found["results"]
    ]  # fmt: skip
    columns = ["RUN", "JOB", *state.parameters, "STATUS", "STEP", "LOSS", "USD"]
    print_table(columns, rows[:ROWS_MAX], right=("RUN", "JOB", "STEP", "LOSS", "USD"))
    if len(rows) > ROWS_MAX:
        print_line(f"... and {len(rows) - ROWS_MAX} more; `--json` prints all")
    print_line(f"{state.name}: {_describe_state(state)}")
    if found["best"]:
        print_line("Best: " + " ".join(f"--env {name}={value}" for name, value in found["best"].items()))
