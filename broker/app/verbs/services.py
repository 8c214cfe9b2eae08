"""Verbs on services: bring up, update, show, explain, follow and terminate."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from broker.app import jobs, services
from broker.app.buckets import TrackUpload
from broker.app.canaries import check_no_canary
from broker.app.clusters import LogChunk
from broker.app.container import Context
from broker.app.launching import Callbacks, check_cluster_name, ignore_upload, prepare
from broker.app.limits import LaunchSize
from broker.app.services import ServiceLine, ServiceTarget, find_service
from broker.errors import UsageError
from broker.formatting import strip_control
from broker.frozen import frozen
from broker.serve.replicas import find_folder
from broker.state.people import Owned
from broker.state.services import ServiceEvent
from broker.types import Plan, Service, Task, UpdateMode

Show = Callable[[Sequence[Plan]], None]


@frozen
class ServiceStory:
    """A service with its events, oldest first."""

    line: ServiceLine
    events: tuple[ServiceEvent, ...]


def bring_up_service(
    context: Context,
    *,
    task: Task,
    service: str,
    host: str,
    port: int | None,
    is_dryrun: bool,
    show: Show,
    confirm: Show,
    track_upload: TrackUpload = ignore_upload,
) -> Service | None:
    """Record a service, which its controller then brings up; return None for a dry run. Raises UsageError."""
    check_cluster_name(service)
    if context.store.services.get(service) is not None:
        raise UsageError(
            f"service `{service}` exists", hints=[f"change it with `broker serve update {service} TASK.yaml`"]
        )
    callbacks = Callbacks(show=show, confirm=confirm, track_upload=track_upload)
    ready = _prepare(context, service, task, callbacks, is_dryrun=is_dryrun)
    if ready is None:
        return None
    spec = services.check_service(ready)
    chosen = services.choose_port(context, host, port)
    return context.store.services.add(service, ready, host=host, port=chosen, wanted=spec.policy.replicas_min)


def start_service_controller(context: Context) -> None:
    """Start the daemon, which runs the controllers of recorded services."""
    context.ensure_daemon()


def update_service(
    context: Context,
    *,
    service: str,
    task: Task,
    mode: UpdateMode,
    show: Show,
    confirm: Show,
    on_recorded: Callable[[int], None],
    track_upload: TrackUpload = ignore_upload,
) -> None:
    """Record a new version of a service and pass its number to `on_recorded`; its controller replaces the replicas."""
    found = find_service(context, service)
    check_no_canary(context, found)
    callbacks = Callbacks(show=show, confirm=confirm, track_upload=track_upload)
    ready = _prepare(context, found.name, task, callbacks, is_dryrun=False)
    assert ready is not None
    with context.store.transaction():
        version = context.store.services.add_version(found.name, ready, mode=mode)
        context.store.services.add_event(found.name, services.UPDATED, detail=str(version))
    on_recorded(version)
    context.ensure_daemon()


def _prepare(context: Context, name: str, task: Task, callbacks: Callbacks, *, is_dryrun: bool) -> Task | None:
    """Check, plan and upload a task; return None for a dry run."""
    services.check_store(context)
    services.check_library()
    count = services.count_replicas(services.check_service(task))
    known = context.store.services.get(name)
    names = (name,) if known is None else (name, known.uid)
    demand = LaunchSize(kind=Owned.SERVICE, names=names, parallel=count, total=count)
    target, tasks = ServiceTarget(context=context), [services.drop_notice(task)]
    ready = prepare(context, tasks, target, callbacks=callbacks, is_dryrun=is_dryrun, demand=demand)
    return None if is_dryrun else ready.tasks[0]


def list_services(context: Context, *, names: tuple[str, ...] = ()) -> tuple[ServiceLine, ...]:
    """Describe these services, or all. Raises UsageError for an unknown name."""
    context.keep_jobs_going()
    return tuple(services.describe_services(context, names))


def explain_service(context: Context, *, service: str) -> ServiceStory:
    """Explain the status of a service. Raises UsageError."""
    context.keep_jobs_going()
    (line,) = services.describe_services(context, [service])
    return ServiceStory(line=line, events=tuple(services.list_service_events(context, service)))


def wait_for_service(context: Context, *, service: str) -> None:
    """Wait until a replica is ready. Raises UsageError for a service that is gone, StateError for one that failed."""
    asyncio.run(services.wait_until_ready(context, service))


def follow_service_log(
    context: Context,
    *,
    service: str,
    replica: int | None,
    on_chunk: Callable[[LogChunk], None],
    is_following: bool = True,
    offset: int = 0,
) -> None:
    """Pass a replica's output from `offset` on to `on_chunk`; with None, the balancer's log, which is not followed."""
    found = find_service(context, service)
    if replica is None:
        path = find_folder(context.config, found).log
        text = path.read_bytes() if path.exists() else b""
        lines = text[offset:].decode(errors="replace").splitlines()
        on_chunk(LogChunk(lines=tuple(map(strip_control, lines)), offset=len(text)))
        return
    job_id = services.find_replica_job(context, found, replica)
    if not is_following:
        read, end = jobs.read_log(context, job_id, offset)
        on_chunk(LogChunk(lines=tuple(read), offset=end))
        return

    async def follow() -> None:
        async for chunk in jobs.follow_chunks(context, job_id, offset=offset):
            on_chunk(chunk)

    asyncio.run(follow())


def preview_services_down(context: Context, *, names: tuple[str, ...], is_all: bool = False) -> tuple[str, ...]:
    """Return the services that a `down` would terminate. Raises UsageError for an unknown name."""
    if is_all:
        return tuple(each.name for each in context.store.services.list())
    return tuple(find_service(context, each).name for each in names)


def terminate_services(context: Context, *, names: tuple[str, ...]) -> None:
    """Request the termination of services, and wait until their machines and balancers are gone."""
    found = [find_service(context, each).name for each in names]
    for each in found:
        context.store.services.request_down(each)
    asyncio.run(services.wait_until_down(context, found))
