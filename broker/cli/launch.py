"""`broker launch` starts a cluster and runs a task on it; `broker exec` runs a task on a running cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated

import typer

from broker.app.clusters import find_up
from broker.app.container import Context
from broker.app.launching import Callbacks, ClusterTarget, describe_interrupted, exec_task, prepare, start_cluster
from broker.cli import options
from broker.cli.clusters import ClusterName, follow_unless
from broker.cli.context import make_context
from broker.cli.plan_table import describe_plan, show_plan
from broker.cli.render import print_json, print_note
from broker.cli.terminal import show_progress, show_wait
from broker.formatting import format_usd
from broker.types import Autostop, Plan


def make_callbacks(show: Callable[[Sequence[Plan]], None], *, yes: bool) -> Callbacks:
    """Show plans by `show`, ask for the price unless `yes`, and draw a bar for uploads."""
    return Callbacks(show=show, confirm=lambda plans: confirm_price(plans, yes=yes), track_upload=_show_upload)


def confirm_price(plans: Sequence[Plan], *, yes: bool) -> None:
    """Ask before anything paid starts, unless `yes`."""
    choices = [plan.choice for plan in plans]
    text = f"{format_usd(max(each.placement.usd_hour for each in choices))} USD/h"
    if all(each.expected_usd is not None for each in choices):
        text += f", {format_usd(sum(each.expected_usd or 0.0 for each in choices))} USD expected in total"
    if all(each.placement.offer.cloud == "local" for each in choices):
        print_note(f"simulated price: {text}")
    elif not yes:
        typer.confirm(f"Start at {text}?", abort=True)


@contextmanager
def _show_upload(url: str) -> Iterator[Callable[[int, int], None]]:
    with show_progress(f"uploading to {url}", is_bytes=True) as bar:
        yield lambda done, total: bar.update(done, total=total)


IdleOption = Annotated[
    int | None,
    typer.Option(
        "--idle-minutes-to-autostop",
        "-i",
        metavar="MINUTES",
        min=0,
        help="Stop the cluster after this many idle minutes.",
    ),
]
DownOption = Annotated[bool, typer.Option("--down", help="Terminate the idle cluster instead of stopping it.")]
RetryUntilUpOption = Annotated[
    bool, typer.Option("--retry-until-up", "-r", help="Keep retrying until capacity is available.")
]
AsJsonOption = Annotated[bool, typer.Option("--json", help="With --dryrun: print the plan as JSON.")]


@options.task_options("name", "workdir", *options.RESOURCES, *options.ENVIRONMENT)
def launch(
    entrypoint: options.Entrypoint,
    cluster: options.ClusterOption = None,
    overrides: options.Overrides = options.NO_OVERRIDES,
    idle: IdleOption = None,
    down: DownOption = False,
    hedge: options.Hedge = 2,
    retry_until_up: RetryUntilUpOption = False,
    yes: options.Yes = False,
    detach: options.Detach = False,
    dryrun: options.Dryrun = False,
    as_json: AsJsonOption = False,
) -> None:
    """Start a cluster and run a task on it."""
    context = make_context()
    task = options.read_task(entrypoint, overrides)
    autostop = None
    if idle is not None or down:
        autostop = Autostop(idle_minutes=0 if idle is None else idle, is_down=down)
    target = ClusterTarget.of(context, task, name=cluster, autostop=autostop)

    def show(plans: Sequence[Plan]) -> None:
        (plan,) = plans
        if dryrun and as_json:
            print_json(describe_plan(plan, 10))
            return
        if not dryrun:
            context.prepare(plan)
        show_plan(plan)

    ready = prepare(context, [task], target, callbacks=make_callbacks(show, yes=yes), is_dryrun=dryrun)
    if dryrun:
        return
    try:
        with show_wait(f"starting `{target.name}`", is_told=False) as bar:
            starting = start_cluster(
                context, target, ready, hedge=hedge, retry_until_up=retry_until_up, on_stage=bar.describe
            )
            run_id = asyncio.run(starting)
    except KeyboardInterrupt:
        tell_what_is_left(context, target.name)
        raise typer.Exit(130) from None
    if run_id is None:
        _note_development(target.name)
    else:
        follow_unless(context, target.name, run_id, detach=detach)


def _note_development(name: str) -> None:
    """Say how to use a cluster whose task has no `run`."""
    print_note(
        f"the task has no `run:`, so nothing runs; open a shell with `broker ssh {name}`, "
        f"run a task with `broker exec {name} TASK.yaml`, terminate the cluster with `broker down {name}`"
    )


def tell_what_is_left(context: Context, name: str) -> None:
    """After Ctrl-C, print what was started and still costs money."""
    for line in describe_interrupted(context, name):
        print_note(line)


@options.task_options("name", "workdir", "gpus", *options.ENVIRONMENT)
def exec_(
    cluster: ClusterName,
    entrypoint: options.Entrypoint,
    overrides: options.Overrides = options.NO_OVERRIDES,
    detach: options.Detach = False,
) -> None:
    """Run a task on a running cluster.

    The task's `setup` is not run. A task that requests accelerators reserves them and runs beside others; any
    other task has the whole cluster.
    """
    context = make_context()
    found = find_up(context, cluster)
    run_id = asyncio.run(exec_task(context, found, options.read_task(entrypoint, overrides)))
    follow_unless(context, cluster, run_id, detach=detach)
