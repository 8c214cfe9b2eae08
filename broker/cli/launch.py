"""`broker launch` starts a cluster and runs a task on it; `broker exec` runs a task on a running cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Annotated

import typer

from broker.app.container import Context
from broker.app.launching import describe_interrupted
from broker.app.verbs import launching as verbs
from broker.app.verbs.clusters import check_up
from broker.cli import options
from broker.cli.clusters import ClusterName, follow_unless
from broker.cli.context import make_session
from broker.cli.plan_table import describe_plan, show_plan
from broker.cli.render import print_json, print_note
from broker.cli.terminal import Bar, show_progress, show_wait
from broker.formatting import format_usd
from broker.pipelines.concurrency import find_usd_hour_max
from broker.types import Autostop, Plan


def confirm_price(plans: Sequence[Plan], *, yes: bool, parallel: int = 1, total: int = 1) -> None:
    """Ask for confirmation before anything that costs money starts, unless `yes`.

    Each plan is for `total` gangs, of which `parallel` run at a time.
    """
    choices = [plan.choice for plan in plans]
    usd_hour = parallel * find_usd_hour_max(plans)
    text = f"{'up to ' if len(plans) > 1 else ''}{format_usd(usd_hour)} USD/h"
    if all(each.expected_usd is not None for each in choices):
        text += f", {format_usd(total * sum(each.expected_usd or 0.0 for each in choices))} USD expected in total"
    if all(each.placement.offer.cloud == "local" for each in choices):
        print_note(f"simulated price: {text}")
    elif not yes:
        options.ask(f"Start at {text}?")


@contextmanager
def show_upload(url: str) -> Iterator[Callable[[int, int], None]]:
    """Show the progress of an upload to `url` in bytes."""
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
    session = make_session()
    task = options.read_task(entrypoint, overrides)
    autostop = None
    if idle is not None or down:
        autostop = Autostop(idle_minutes=0 if idle is None else idle, is_down=down)
    name = session.call(verbs.name_target, task=task) if cluster is None else cluster

    def show(plans: Sequence[Plan]) -> None:
        (plan,) = plans
        if dryrun and as_json:
            print_json(describe_plan(plan, 10))
            return
        show_plan(plan)

    with ExitStack() as stack:
        bar: Bar | None = None

        def show_stage(text: str) -> None:
            nonlocal bar
            if bar is None:
                bar = stack.enter_context(show_wait(text, is_printed=False))
            bar.describe(text)

        try:
            started = session.call(
                verbs.launch, task=task, cluster=name, autostop=autostop, hedge=hedge, retry_until_up=retry_until_up,
                is_dryrun=dryrun, show=show, confirm=lambda plans: confirm_price(plans, yes=yes),
                on_stage=show_stage, track_upload=show_upload,
            )  # fmt: skip
        except KeyboardInterrupt:
            if bar is None:
                raise  # nothing was started
            stack.close()
            for line in session.call(verbs.describe_interrupted, cluster=name):
                print_note(line)
            raise typer.Exit(130) from None
    if dryrun:
        return
    if started.run_id is None:
        _note_development(name)
    else:
        follow_unless(session, name, started.run_id, detach=detach)


def _note_development(name: str) -> None:
    """Print how to use a cluster whose task has no `run`."""
    print_note(
        f"the task has no `run:`, so nothing runs; open a shell with `broker ssh {name}`, "
        f"run a task with `broker exec {name} TASK.yaml`, terminate the cluster with `broker down {name}`"
    )


def note_remaining(context: Context, name: str) -> None:
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

    Skips the task's `setup`. A task that requests accelerators reserves them and shares the cluster with other
    runs; any other task has the cluster to itself.
    """
    session = make_session()
    session.call(check_up, cluster=cluster)  # first: a missing cluster matters more than an error in the task file
    run_id = session.call(verbs.exec_task, cluster=cluster, task=options.read_task(entrypoint, overrides))
    follow_unless(session, cluster, run_id, detach=detach)
