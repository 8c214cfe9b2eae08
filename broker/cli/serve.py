"""`broker serve`: bring services up, update them, take them down, and show them."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from broker.app import services
from broker.app.jobs import follow_job, read_log
from broker.app.services import ServiceLine, ServiceTarget, find_service
from broker.cli import options
from broker.cli.context import make_context
from broker.cli.plan_table import show_plan
from broker.cli.render import format_table, print_json, print_line, print_note
from broker.errors import UsageError
from broker.formatting import format_count, format_duration, format_usd, strip_control, to_plain
from broker.serve.replicas import find_folder
from broker.types import Task, UpdateMode

if TYPE_CHECKING:
    from broker.app.container import Context
    from broker.types import Plan

app = typer.Typer(
    help="Serve a task by replicas behind a balancer.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
ServiceName = Annotated[str, typer.Argument(help="Service name.", show_default=False)]
ServiceOption = Annotated[
    str | None, typer.Option("--service-name", "-n", metavar="NAME", help="Service name (default: the task's name).")
]
WaitOption = Annotated[bool, typer.Option("--wait", help="Wait until a replica is ready.")]


@app.command()
@options.task_options("workdir", *options.RESOURCES, *options.ENVIRONMENT)
def up(
    entrypoint: options.Entrypoint,
    service_name: ServiceOption = None,
    overrides: options.Overrides = options.NO_OVERRIDES,
    host: Annotated[str, typer.Option("--host", help="Address that the balancer listens on.")] = "127.0.0.1",
    port: Annotated[int | None, typer.Option("--port", help="Port of the balancer (default: 30001 or above).")] = None,
    wait: WaitOption = False,
    yes: options.Yes = False,
    dryrun: options.Dryrun = False,
) -> None:
    """Bring a service up: replicas behind a balancer on this machine."""
    from broker.app.launching import check_cluster_name

    context = make_context()
    task = options.read_task(entrypoint, overrides)
    name = service_name or task.name or "service"
    check_cluster_name(name)
    if context.store.services.get(name) is not None:
        raise UsageError(f"service `{name}` exists", hints=[f"change it with `broker serve update {name} TASK.yaml`"])
    ready = _prepare(context, task, yes=yes, dryrun=dryrun)
    if ready is None:
        return
    spec = services.check_service(ready)
    chosen = services.choose_port(context, host, port)
    service = context.store.services.add(name, ready, host=host, port=chosen, wanted=spec.policy.replicas_min)
    # Printed before the daemon starts: from here on, the service may cost money.
    print_line(f"Service {name} is recorded; its endpoint is {_show_endpoint(service.host, service.port, ready)}")
    print_note(f"show it with `broker serve status {name}`, terminate it with `broker serve down {name}`")
    context.ensure_daemon()
    if wait:
        asyncio.run(services.wait_until_ready(context, name))
        print_line(f"Service {name} is ready")


@app.command()
@options.task_options("workdir", *options.RESOURCES, *options.ENVIRONMENT)
def update(
    service: ServiceName,
    entrypoint: options.Entrypoint,
    overrides: options.Overrides = options.NO_OVERRIDES,
    mode: Annotated[
        UpdateMode, typer.Option("--mode", help="Replace replicas one by one, or all at once when the new are ready.")
    ] = UpdateMode.ROLLING,
    yes: options.Yes = False,
) -> None:
    """Replace the replicas of a service by those of another task, without an interruption."""
    context = make_context()
    found = find_service(context, service)
    ready = _prepare(context, options.read_task(entrypoint, overrides), yes=yes, dryrun=False)
    assert ready is not None
    with context.store.transaction():
        version = context.store.services.add_version(found.name, ready, mode=mode)
        context.store.services.add_event(found.name, services.UPDATED, detail=str(version))
    print_line(f"Updating service {found.name} to version {version}")
    context.ensure_daemon()


def _prepare(context: Context, task: Task, *, yes: bool, dryrun: bool) -> Task | None:
    """Check, plan and upload a task; return None for a dry run."""
    from broker.app.launching import Callbacks, prepare

    services.check_store(context)
    services.check_library()
    spec = services.check_service(task)
    count = max(spec.policy.replicas_min + spec.policy.spare_count, 1)

    def show(plans: Sequence[Plan]) -> None:
        show_plan(plans[0])
        usd_hour = plans[0].choice.placement.usd_hour
        print_note(f"{format_count(count, 'replica')} of this price: {format_usd(count * usd_hour)} USD/h")

    def confirm(plans: Sequence[Plan]) -> None:
        usd_hour = count * plans[0].choice.placement.usd_hour
        if plans[0].choice.placement.offer.cloud != "local" and not yes:
            typer.confirm(f"Start {format_count(count, 'replica')} at {format_usd(usd_hour)} USD/h?", abort=True)

    callbacks = Callbacks(show=show, confirm=confirm)
    target = ServiceTarget(context=context)
    ready = prepare(context, [services.drop_notice(task)], target, callbacks=callbacks, is_dryrun=dryrun)
    return None if dryrun else ready.tasks[0]


@app.command()
def status(
    names: Annotated[list[str] | None, typer.Argument(help="Service names (default: all).")] = None,
    as_json: options.AsJson = False,
    output: options.Output = options.Format.TABLE,
) -> None:
    """Show services with their replicas, load and cost."""
    context = make_context()
    context.keep_jobs_going()
    lines = services.describe_services(context, names or ())
    if as_json or output is options.Format.JSON:
        print_json([{**to_plain(each), "endpoint": each.endpoint} for each in lines])
        return
    if not lines:
        print_line("No services; start one with `broker serve up TASK.yaml`")
        return
    now_s = context.clock.now_s()
    for row in format_table(
        ["NAME", "VERSION", "STATUS", "REPLICAS", "ENDPOINT", "AGE", "USD"],
        [_list_cells(each, now_s) for each in lines], right=("VERSION", "AGE", "USD"),
    ):  # fmt: skip
        print_line(row)
    rows = [cells for each in lines for cells in _list_replica_cells(each)]
    if rows:
        print_line("")
        for row in format_table(["SERVICE", "REPLICA", "VERSION", "STATUS", "PLACE", "IN FLIGHT", "JOB"], rows):
            print_line(row)


def _list_cells(line: ServiceLine, now_s: float) -> list[str]:
    ready = sum(each.status == services.READY for each in line.replicas)
    service = line.service
    return [
        service.name, str(service.version), line.status, f"{ready}/{service.wanted}", line.endpoint,
        format_duration(now_s - service.created_s), format_usd(line.paid_usd),
    ]  # fmt: skip


def _list_replica_cells(line: ServiceLine) -> list[list[str]]:
    return [
        [
            line.service.name, str(each.replica.number), str(each.replica.version), each.status, each.place,
            "-" if each.in_flight is None else str(each.in_flight), str(each.replica.job_id),
        ]
        for each in line.replicas
    ]  # fmt: skip


@app.command()
def logs(
    service: ServiceName,
    replica: Annotated[int | None, typer.Argument(help="Replica number (default: the balancer's log).")] = None,
    follow: Annotated[bool, typer.Option("--follow/--no-follow", help="Keep printing a replica's output.")] = True,
) -> None:
    """Print the output of a replica, or of the balancer."""
    context = make_context()
    found = find_service(context, service)
    if replica is None:
        path = find_folder(context.config, found).log
        for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
            print_line(strip_control(line))
        return
    job_id = services.find_replica_job(context, found, replica)
    if not follow:
        for line in read_log(context, job_id)[0]:
            print_line(line)
        return

    async def print_lines() -> None:
        async for line in follow_job(context, job_id):
            print_line(line)
            sys.stdout.flush()

    asyncio.run(print_lines())


@app.command()
def why(service: ServiceName, as_json: options.AsJson = False, output: options.Output = options.Format.TABLE) -> None:
    """Explain the status of a service: its events, and the reasons of its replicas."""
    from broker.serve.wording import describe_service_event

    context = make_context()
    context.keep_jobs_going()
    (line,) = services.describe_services(context, [service])
    events = services.list_service_events(context, service)
    if as_json or output is options.Format.JSON:
        told = [{**to_plain(each), "message": describe_service_event(each)} for each in events]
        print_json({**to_plain(line), "events": told})
        return
    print_line(f"Service {service} is {line.status}" + (f": {line.service.failure}" if line.service.failure else ""))
    for each in line.replicas:
        reason = f": {strip_control(each.error)}" if each.error and each.status != services.READY else ""
        print_line(f"  replica {each.replica.number} is {each.status}{reason}")
    for event in events:
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event.time_s))
        print_line(f"{stamp}  {strip_control(describe_service_event(event))}")


@app.command()
def down(
    names: Annotated[list[str] | None, typer.Argument(help="Service names.")] = None,
    everything: Annotated[bool, typer.Option("--all", "-a", help="Terminate all services.")] = False,
    yes: options.Yes = False,
) -> None:
    """Terminate services, their replicas and balancers, and wait until they are gone."""
    context = make_context()
    if not names and not everything:
        raise UsageError("no service was named", hints=["name one: `broker serve down NAME`, or pass `--all`"])
    chosen = (
        [each.name for each in context.store.services.list()]
        if everything else [find_service(context, each).name for each in names or ()]
    )  # fmt: skip
    if chosen and not yes:
        typer.confirm(f"Terminate {', '.join(chosen)}?", abort=True)
    for each in chosen:
        context.store.services.request_down(each)
    try:
        asyncio.run(services.wait_until_down(context, chosen))
    except KeyboardInterrupt:
        print_note("interrupted; the daemon continues to terminate the replicas: see `broker serve status`")
        raise typer.Exit(130) from None
    for each in chosen:
        print_line(f"Service {each} is terminated")


def _show_endpoint(host: str, port: int, task: Task) -> str:
    scheme = "https" if task.service and task.service.tls else "http"
    return f"{scheme}://{host}:{port}"
