"""Verbs on clusters: status, output, runs, life cycle and termination."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from broker.app import clusters
from broker.app.clusters import LogChunk, Status
from broker.app.container import Context
from broker.app.limits import LaunchSize
from broker.errors import BrokerError
from broker.frozen import frozen
from broker.state.people import Owned
from broker.types import Autostop, Estimate, Run


@frozen
class DownPreview:
    """The clusters that `down` would terminate, and an error for every other given name."""

    names: tuple[str, ...]
    failures: tuple[BrokerError, ...]


def show_status(context: Context, *, is_refreshing: bool = False, of_all_users: bool = True) -> Status:
    """Read clusters, of all users or only of the caller, and restart a dead daemon while any job is live."""
    found = asyncio.run(clusters.read_status(context, is_refreshing=is_refreshing, of_all_users=of_all_users))
    context.restart_daemon_if_needed()
    return found


def check_up(context: Context, *, cluster: str) -> None:
    """Raise UsageError unless the cluster is up."""
    clusters.find_up(context, cluster)


def find_run(context: Context, *, cluster: str, run_id: int | None = None) -> int:
    """Return the run ID given, or the newest of a cluster that is up. Raises UsageError."""
    return clusters.find_run_id(context, clusters.find_up(context, cluster).name, run_id)


def follow_run(
    context: Context,
    *,
    cluster: str,
    run_id: int,
    on_chunk: Callable[[LogChunk], None],
    is_following: bool = True,
    offset: int = 0,
) -> None:
    """Pass a run's output, starting at `offset`, to `on_chunk`. Raises RunFailedError if the run fails."""

    async def follow() -> None:
        found = clusters.find_up(context, cluster)
        async for chunk in clusters.follow_chunks(context, found, run_id, is_following=is_following, offset=offset):
            on_chunk(chunk)

    asyncio.run(follow())


def list_runs(context: Context, *, cluster: str) -> tuple[Run, ...]:
    """List the runs of a cluster that is up."""
    return tuple(asyncio.run(context.gang.list_runs(clusters.find_up(context, cluster))))


def cancel_runs(context: Context, *, cluster: str, run_ids: tuple[int, ...] | None) -> tuple[int, ...]:
    """Cancel the runs, or all if None; return those that were live."""
    return tuple(asyncio.run(clusters.cancel_runs(context, clusters.find_up(context, cluster), run_ids)))


def stop_cluster(context: Context, *, cluster: str) -> None:
    """Stop a cluster that is up, and keep its disks."""
    clusters.find_up(context, cluster)
    asyncio.run(context.provisioner.stop(cluster))


def start_cluster(context: Context, *, cluster: str) -> None:
    """Restart a stopped cluster."""
    found = context.find_cluster(cluster)
    context.admit([Estimate(placement=found.placement)], LaunchSize(kind=Owned.CLUSTER, names=(cluster,)))
    asyncio.run(context.run_paid(clusters.restart(context, cluster)))


def set_autostop(context: Context, *, cluster: str, rule: Autostop | None) -> None:
    """Set or remove the autostop rule."""
    asyncio.run(clusters.set_autostop(context, cluster, rule))


def preview_down(context: Context, *, patterns: tuple[str, ...], is_all: bool = False) -> DownPreview:
    """Select what `down` would terminate, without terminating anything."""
    wanted, failures = clusters.select_clusters(context, patterns, is_all=is_all)
    return DownPreview(names=tuple(each.name for each in wanted), failures=tuple(failures))


def terminate_clusters(
    context: Context, *, names: tuple[str, ...], on_down: Callable[[str], None], is_immediate: bool = False
) -> tuple[BrokerError, ...]:
    """Terminate clusters concurrently; return the errors of those that could not be terminated.

    Each cluster first uploads its files for mounted buckets, unless `is_immediate`.
    """
    wanted, failures = clusters.select_clusters(context, names)
    for each in wanted:
        context.check_owner(Owned.CLUSTER, each.name)
    taking = clusters.take_down(
        context, wanted, on_down=lambda cluster: on_down(cluster.name), is_immediate=is_immediate
    )
    refused = asyncio.run(taking)
    return (*failures, *refused)
