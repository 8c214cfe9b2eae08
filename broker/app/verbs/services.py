"""Verbs on services: bring up, update, show, explain, follow and terminate."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from broker.app import gateways, jobs, services
from broker.app.buckets import TrackUpload
from broker.app.clusters import LogChunk
from broker.app.container import Context
from broker.app.launching import Callbacks, ignore_upload
from broker.app.services import ServiceLine, find_service
from broker.app.serving_pipelines import record_service, record_version
from broker.formatting import strip_control
from broker.frozen import frozen
from broker.serve.replicas import find_folder
from broker.state.people import Owned
from broker.state.services import ServiceEvent
from broker.types import Plan, Service, Task, UpdateMode

Show = Callable[[Sequence[Plan]], None]


@frozen
class ServiceExplanation:
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
    """Record a service for its controller to bring up; return None for a dry run. Raises UsageError."""
    callbacks = Callbacks(show=show, confirm=confirm, track_upload=track_upload)
    made, _ = record_service(
        context, (), task, service=service, host=host, port=port, callbacks=callbacks, is_dryrun=is_dryrun
    )
    return made


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
    callbacks = Callbacks(show=show, confirm=confirm, track_upload=track_upload)
    version, _ = record_version(context, (), task, service=service, mode=mode, callbacks=callbacks)
    on_recorded(version)
    context.ensure_daemon()


def list_services(context: Context, *, names: tuple[str, ...] = ()) -> tuple[ServiceLine, ...]:
    """Describe these services, or all. Raises UsageError for an unknown name."""
    context.restart_daemon_if_needed()
    return tuple(services.describe_services(context, names))


def explain_service(context: Context, *, service: str) -> ServiceExplanation:
    """Explain the status of a service. Raises UsageError."""
    context.restart_daemon_if_needed()
    (line,) = services.describe_services(context, [service])
    return ServiceExplanation(line=line, events=tuple(services.list_service_events(context, service)))


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
    """Pass a replica's output, from `offset`, to `on_chunk`; for None, the balancer's log, which is not followed."""
    found = find_service(context, service)
    if replica is None:
        gateways.check_has_log(context, found)
        path = find_folder(context.config, found).log
        text = path.read_bytes() if path.exists() else b""
        lines = text[offset:].decode(errors="replace").splitlines()
        on_chunk(LogChunk(lines=tuple(map(strip_control, lines)), offset=len(text)))
        return
    job_id = services.find_replica_job(context, found, replica)
    if not is_following:
        for chunk in jobs.read_chunks(context, job_id, offset=offset):
            on_chunk(chunk)
        return

    async def follow() -> None:
        async for chunk in jobs.follow_chunks(context, job_id, offset=offset):
            on_chunk(chunk)

    asyncio.run(follow())


def preview_services_down(context: Context, *, names: tuple[str, ...], is_all: bool = False) -> tuple[str, ...]:
    """Return the services that `down` would terminate. Raises UsageError for an unknown name."""
    if is_all:
        return tuple(each.name for each in context.store.services.list())
    return tuple(dict.fromkeys(find_service(context, each).name for each in names))


def terminate_services(context: Context, *, names: tuple[str, ...]) -> None:
    """Request the termination of services, and wait until their machines and balancers are gone."""
    found = [find_service(context, each).name for each in names]
    for each in found:
        with context.store.transaction():
            context.check_owner(Owned.SERVICE, each)
            context.store.services.request_down(each)
    asyncio.run(services.wait_until_down(context, found))
