"""`broker serve`: start, update, terminate and show services."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from broker.app import canaries
from broker.app.clusters import LogChunk
from broker.app.gateways import READY, show_endpoint
from broker.app.launching import Callbacks
from broker.app.service_checks import check_service
from broker.app.services import ServiceLine, count_replicas, find_service
from broker.app.serving_pipelines import record_service, record_version, split_pipeline
from broker.app.verbs import services as verbs
from broker.cli import options, serve_keys, serve_top
from broker.cli.context import check_embedded, make_context, make_session
from broker.cli.launch import confirm_price, show_upload
from broker.cli.plan_table import show_plan
from broker.cli.render import format_table, print_json, print_line, print_note
from broker.errors import UsageError
from broker.formatting import format_count, format_duration, format_second, format_usd, strip_control, to_plain
from broker.serve.admission import is_loopback
from broker.types import ServiceProtocol, Task, UpdateMode

if TYPE_CHECKING:
    from broker.types import Job, Plan

app = typer.Typer(
    help="Serve a task with replicas behind a load balancer.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.add_typer(serve_keys.app, name="keys")
ServiceName = Annotated[str, typer.Argument(metavar="SERVICE", help="Service name.", show_default=False)]
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
    host: Annotated[
        str, typer.Option("--host", metavar="ADDRESS", help="Address that the balancer listens on.")
    ] = "127.0.0.1",
    port: Annotated[
        int | None,
        typer.Option("--port", metavar="PORT", help="Port of the balancer (default: a free one from 30001 on)."),
    ] = None,
    wait: WaitOption = False,
    yes: options.Yes = False,
    dryrun: options.Dryrun = False,
) -> None:
    """Start a service: replicas behind a load balancer.

    The load balancer runs on this machine, on the server, or on the gateways that the task requests.
    """
    before, task = split_pipeline(options.read_tasks(entrypoint, overrides))
    session = make_session()
    name = service_name or task.name or "service"
    show, confirm = _make_callbacks(yes=yes)
    if before:
        check_embedded("serve up PIPELINE.yaml")
        callbacks = Callbacks(show=show, confirm=confirm, track_upload=show_upload)
        made, jobs = record_service(
            make_context(), before, task, service=name, host=host, port=port, callbacks=callbacks, is_dryrun=dryrun
        )
        _print_submitted_jobs(jobs)
    else:
        made = session.call(
            verbs.bring_up_service, task=task, service=name, host=host, port=port, is_dryrun=dryrun, show=show,
            confirm=confirm, track_upload=show_upload,
        )  # fmt: skip
    if made is None:
        return
    # Printed before the daemon starts: after that, the service may cost money.
    if task.service is not None and task.service.gateway is not None and not is_loopback(made.host):
        print_line(f"Service {name} is recorded; `broker serve status {name}` shows the endpoints of its gateways")
    else:
        print_line(f"Service {name} is recorded; its endpoint is {_show_endpoint(made.host, made.port, task)}")
    if not is_loopback(made.host) and (task.service is None or task.service.can_check_keys):
        print_note(f"it refuses requests until it has a key: `broker serve keys create {name}`")
    print_note(f"show it with `broker serve status {name}`, terminate it with `broker serve down {name}`")
    session.call(verbs.start_service_controller)
    if wait:
        session.call(verbs.wait_for_service, service=name)
        print_line(f"Service {name} is ready")


@app.command()
@options.task_options("workdir", *options.RESOURCES, *options.ENVIRONMENT)
def update(
    service: ServiceName,
    entrypoint: options.Entrypoint,
    overrides: options.Overrides = options.NO_OVERRIDES,
    mode: Annotated[
        UpdateMode,
        typer.Option("--mode", help="Replace replicas one by one, or all at once when the new ones are ready."),
    ] = UpdateMode.ROLLING,
    canary: Annotated[
        str | None,
        typer.Option("--canary", metavar="SHARE", help="Start a canary with this share of requests, e.g. 10%."),
    ] = None,
    yes: options.Yes = False,
) -> None:
    """Replace the task of a service without downtime."""
    share = None if canary is None else canaries.read_share(canary)
    before, task = split_pipeline(options.read_tasks(entrypoint, overrides))
    show, confirm = _make_callbacks(yes=yes)

    def tell(version: int) -> None:
        if share is None:
            print_line(f"Updating service {service} to version {version}")
            return
        print_line(f"Starting version {version} of service {service} as a canary with {share:.0%} of requests")
        print_note(f"end it with `broker serve promote {service}` or `broker serve rollback {service}`")

    if not before and share is None:
        make_session().call(
            verbs.update_service, service=service, task=task, mode=mode, show=show, confirm=confirm, on_recorded=tell,
            track_upload=show_upload,
        )  # fmt: skip
        return
    check_embedded("serve update PIPELINE.yaml" if before else "serve update --canary")
    context = make_context()
    callbacks = Callbacks(show=show, confirm=confirm, track_upload=show_upload)
    version, jobs = record_version(
        context, before, task, service=service, mode=mode, callbacks=callbacks, canary_share=share
    )
    _print_submitted_jobs(jobs)
    tell(version)
    context.ensure_daemon()


@app.command()
def promote(service: ServiceName) -> None:
    """Promote the canary of a service without downtime."""
    check_embedded("serve promote")
    context = make_context()
    version = canaries.promote_canary(context, find_service(context, service))
    print_line(f"Updating service {service} to version {version}")
    context.ensure_daemon()


@app.command()
def rollback(service: ServiceName) -> None:
    """End the canary of a service and drain its replicas."""
    check_embedded("serve rollback")
    context = make_context()
    version = canaries.roll_back_canary(context, find_service(context, service))
    print_line(f"Service {service} stays at version {version}")
    context.ensure_daemon()


def _print_submitted_jobs(jobs: Sequence[Job]) -> None:
    for job in jobs:
        print_line(f"Submitted managed job {job.id} ({job.name}); replicas start after it has succeeded")


def _make_callbacks(*, yes: bool) -> tuple[verbs.Show, verbs.Show]:
    """Return functions that show the plans and confirm the price.

    The price is that of all replicas of a service, or of the jobs that precede it.
    """

    def show(plans: Sequence[Plan]) -> None:
        for plan in plans:
            show_plan(plan)
            if plan.task.service is not None:
                count, usd_hour = count_replicas(check_service(plan.task)), plan.choice.placement.usd_hour
                print_note(f"{format_count(count, 'replica')} of this price: {format_usd(count * usd_hour)} USD/h")

    def confirm(plans: Sequence[Plan]) -> None:
        plan = plans[0]
        if plan.task.service is None:
            confirm_price(plans, yes=yes)
            return
        count = count_replicas(check_service(plan.task))
        usd_hour = count * plan.choice.placement.usd_hour
        if plan.choice.placement.offer.cloud != "local" and not yes:
            options.ask(f"Start {format_count(count, 'replica')} at {format_usd(usd_hour)} USD/h?")

    return show, confirm


@app.command()
def status(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="SERVICE...", help="Service names (default: all).")
    ] = None,
    as_json: options.AsJson = False,
    output: options.Output = options.Format.TABLE,
) -> None:
    """Show services with their replicas, load and cost."""
    session = make_session()
    lines = session.call(verbs.list_services, names=tuple(names or ()))
    if as_json or output is options.Format.JSON:
        print_json([{**to_plain(each), "endpoint": each.endpoint} for each in lines])
        return
    if not lines:
        print_line("No services; start one with `broker serve up TASK.yaml`")
        return
    now_s = session.clock.now_s()
    for row in format_table(
        ["NAME", "VERSION", "STATUS", "REPLICAS", "ENDPOINT", "AGE", "USD"],
        [_list_cells(each, now_s) for each in lines], right=("VERSION", "AGE", "USD"),
    ):  # fmt: skip
        print_line(row)
    gateways = [cells for each in lines for cells in _list_gateway_cells(each)]
    if gateways:
        print_line("")
        for row in format_table(["SERVICE", "GATEWAY", "STATUS", "ENDPOINT", "LOCATION", "IN FLIGHT", "JOB"], gateways):
            print_line(row)
    rows = [cells for each in lines for cells in _list_replica_cells(each)]
    if rows:
        print_line("")
        for row in format_table(["SERVICE", "REPLICA", "VERSION", "STATUS", "LOCATION", "IN FLIGHT", "JOB"], rows):
            print_line(row)
    for each in lines:
        _warn_of_expiry(each, now_s, indent="")


def _warn_of_expiry(line: ServiceLine, now_s: float, *, indent: str) -> None:
    from broker.serve.wording import warn_of_expiry

    warning = warn_of_expiry(line.load.certificate_ends_s, now_s) if line.load is not None else ""
    if warning:
        print_line(f"{indent}service {line.service.name}: {warning}")


def _list_cells(line: ServiceLine, now_s: float) -> list[str]:
    ready = sum(each.status == READY for each in line.replicas)
    service = line.service
    return [
        service.name, str(service.version), line.status, f"{ready}/{service.wanted}", line.endpoint,
        format_duration(now_s - service.created_s), format_usd(line.paid_usd),
    ]  # fmt: skip


def _list_gateway_cells(line: ServiceLine) -> list[list[str]]:
    return [
        [
            line.service.name, str(each.number), each.status, each.endpoint or "-", each.place,
            "-" if each.load is None else str(each.load.in_flight), "-" if each.job_id is None else str(each.job_id),
        ]
        for each in line.gateways
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
    replica: Annotated[
        int | None, typer.Argument(metavar="REPLICA", help="Replica number (default: the balancer's log).")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow/--no-follow", help="Keep printing a replica's output.")] = True,
) -> None:
    """Print the output of a replica, or of the balancer."""

    def print_lines(chunk: LogChunk) -> None:
        for line in chunk.lines:
            print_line(line)
        sys.stdout.flush()

    make_session().call(
        verbs.follow_service_log, service=service, replica=replica, on_chunk=print_lines, is_following=follow
    )


app.command()(serve_top.top)


@app.command()
def why(service: ServiceName, as_json: options.AsJson = False, output: options.Output = options.Format.TABLE) -> None:
    """Explain the status of a service and its replicas.

    Lists the events of the service with their reasons.
    """
    from broker.serve.wording import describe_service_event

    session = make_session()
    story = session.call(verbs.explain_service, service=service)
    line, events = story.line, story.events
    if as_json or output is options.Format.JSON:
        described = [{**to_plain(each), "message": describe_service_event(each)} for each in events]
        print_json({**to_plain(line), "events": described})
        return
    print_line(f"Service {service} is {line.status}" + (f": {line.service.failure}" if line.service.failure else ""))
    _warn_of_expiry(line, session.clock.now_s(), indent="  ")
    for gateway in line.gateways:
        reason = f": {strip_control(gateway.error)}" if gateway.error else ""
        print_line(f"  gateway {gateway.number} is {gateway.status}{reason}")
    for each in line.replicas:
        reason = f": {strip_control(each.error)}" if each.error and each.status != READY else ""
        print_line(f"  replica {each.replica.number} is {each.status}{reason}")
    for event in events:
        stamp = format_second(event.time_s)
        print_line(f"{stamp}  {strip_control(describe_service_event(event))}")


@app.command()
def down(
    names: Annotated[list[str] | None, typer.Argument(metavar="SERVICE...", help="Service names.")] = None,
    everything: Annotated[bool, typer.Option("--all", "-a", help="Terminate all services.")] = False,
    yes: options.Yes = False,
) -> None:
    """Terminate services and wait until their replicas are gone."""
    if not names and not everything:
        raise UsageError("no service was named", hints=["name one with `broker serve down NAME`, or pass `--all`"])
    session = make_session()
    chosen = session.call(verbs.preview_services_down, names=tuple(names or ()), is_all=everything)
    if chosen:
        options.confirm(f"Terminate {', '.join(chosen)}?", yes=yes)
    try:
        session.call(verbs.terminate_services, names=chosen)
    except KeyboardInterrupt:
        print_note("interrupted; the daemon continues to terminate the replicas: see `broker serve status`")
        raise typer.Exit(130) from None
    for each in chosen:
        print_line(f"Service {each} is terminated")


def _show_endpoint(host: str, port: int, task: Task) -> str:
    if task.service and task.service.protocol is not ServiceProtocol.HTTP:
        return show_endpoint(host, port)
    scheme = "https" if task.service and task.service.tls else "http"
    return f"{scheme}://{show_endpoint(host, port)}"
