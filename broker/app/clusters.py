"""Operations on clusters: status, output, runs, autostop and termination."""

from __future__ import annotations

import asyncio
import fnmatch
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import field, replace

from broker.app.container import Context
from broker.app.uploads import wait_for_uploads
from broker.app.visibility import Visibility, read_visibility
from broker.errors import BrokerError, CloudError, RunFailedError, TransientError, UsageError
from broker.formatting import format_count, strip_control
from broker.frozen import frozen
from broker.state.people import Owned
from broker.types import Autostop, Cluster, ClusterStatus, RunStatus

POLL_S = 0.3
SILENCE_S_MAX = 120.0  # of nodes that have answered before: the connection of a laptop is interrupted now and then
UNKNOWN_S_MAX = 60.0  # until a run that was drawn is known on a node; reports of nodes may be that late


@frozen
class Status:
    """Clusters, their cost so far, and the managed jobs that have not ended.

    `users`: the owner of each cluster on a server. `only`: the user whose clusters and jobs these are, "" for all;
    `other_count` is the number of clusters left out.
    """

    clusters: tuple[Cluster, ...]
    spent_usd: Mapping[str, float]  # by cluster
    total_usd: float  # of all clusters and jobs, including ended ones
    live_job_ids: tuple[int, ...]
    failures: Mapping[str, CloudError]  # by cloud: its clusters show their last known state
    users: Mapping[str, str] = field(default_factory=dict)
    only: str = ""
    other_count: int = 0


def narrow_status(status: Status, patterns: Sequence[str]) -> Status:
    """Keep the clusters whose names match. Raises UsageError for a name or pattern that matches none."""
    for pattern in patterns:
        if not fnmatch.filter([each.name for each in status.clusters], pattern):
            raise UsageError(f"unknown cluster `{pattern}`", hints=["list all with `broker status`"])
    chosen = [each for each in status.clusters if any(fnmatch.fnmatch(each.name, pattern) for pattern in patterns)]
    return replace(status, clusters=tuple(chosen))


def find_up(context: Context, name: str) -> Cluster:
    """Find a cluster that is up. Raises UsageError if it is unknown or in any other state."""
    cluster = context.find_cluster(name)
    if cluster.status is ClusterStatus.STOPPED:
        raise UsageError(f"cluster `{name}` is stopped", hints=[f"restart it with `broker start {name}`"])
    if cluster.status is not ClusterStatus.UP:
        raise UsageError(f"cluster `{name}` is {cluster.status.value}, not UP", hints=["see `broker status`"])
    return cluster


async def read_status(context: Context, *, is_refreshing: bool, of_all_users: bool = True) -> Status:
    """Read the records of clusters; with `is_refreshing`, query the clouds for their current state.

    On a server, read only the caller's own clusters and jobs unless `of_all_users`.
    """
    visibility = read_visibility(context, Owned.CLUSTER, of_all_users=of_all_users)
    jobs = read_visibility(context, Owned.JOB, of_all_users=of_all_users)
    services = read_visibility(context, Owned.SERVICE, of_all_users=of_all_users)
    everything = context.store.clusters.list(on_damage=context.warn)
    of_services = context.store.services.list_jobs() if context.payee.user else {}

    def find_owned(cluster: Cluster) -> tuple[Visibility, str]:
        if cluster.job_id is None:
            return visibility, cluster.name
        service = of_services.get(cluster.job_id)
        return (jobs, str(cluster.job_id)) if service is None else (services, service)

    known = [each for each in everything for owned, name in [find_owned(each)] if owned.shows(name)]
    clusters, failures = await refresh_clusters(context, known) if is_refreshing else (known, {})
    users = {each.name: owned.owners.get(name) for each in clusters for owned, name in [find_owned(each)]}
    now_s = context.clock.now_s()
    return Status(
        clusters=tuple(clusters),
        spent_usd={each.name: context.store.bills.spend_usd(cluster=each.name, now_s=now_s) for each in clusters},
        total_usd=context.store.bills.spend_usd(now_s=now_s),
        live_job_ids=tuple(job_id for job_id in context.store.jobs.list_live_ids() if jobs.shows(job_id)),
        failures=failures,
        users={name: user for name, user in users.items() if user is not None},
        only=visibility.only,
        other_count=len(everything) - len(known),
    )


async def refresh_clusters(
    context: Context, clusters: Sequence[Cluster]
) -> tuple[Sequence[Cluster], Mapping[str, CloudError]]:
    """Refresh the clusters, in the same order; keep the last known state on failure, and return failures by cloud."""
    failures: dict[str, CloudError] = {}

    async def refresh(cluster: Cluster) -> Cluster:
        try:
            return await context.provisioner.refresh(cluster) if cluster.nodes else cluster
        except CloudError as error:
            failures.setdefault(cluster.placement.offer.cloud, error)
            return cluster

    return await asyncio.gather(*(refresh(each) for each in clusters)), failures


def raise_query_failures(failures: Mapping[str, CloudError]) -> None:
    """Raise CloudError if a cloud failed. Call this after the output; the exit code marks it as outdated."""
    if failures:
        raise CloudError(
            f"could not query {' and '.join(failures)}: clusters there show their last known state",
            details=[f"{name}: {error.message}" for name, error in failures.items()],
            hints=list(dict.fromkeys(hint for error in failures.values() for hint in error.hints)),
        )


def find_run_id(context: Context, cluster: str, run_id: int | None) -> int:
    """Return the given run ID, or the newest. Raises UsageError if the cluster has no runs, or not this one.

    The nodes cannot tell an unknown run from one that is about to arrive: following it would never end.
    """
    newest = context.store.clusters.newest_run_id(cluster)
    if not newest:
        raise UsageError(
            f"cluster `{cluster}` has no runs yet", hints=[f"run a task with `broker exec {cluster} TASK.yaml`"]
        )
    wanted = newest if run_id is None else run_id
    if not 1 <= wanted <= newest:
        raise UsageError(f"unknown run {wanted} on `{cluster}`", hints=[f"list the runs with `broker queue {cluster}`"])
    return wanted


@frozen
class LogChunk:
    """Complete lines of a log; reading again from `offset` continues after them."""

    lines: tuple[str, ...]
    offset: int


async def follow_run(context: Context, cluster: Cluster, run_id: int, *, is_following: bool) -> AsyncIterator[str]:
    """Yield the lines of all nodes' merged log; with `is_following`, until the run ends.

    Raises RunFailedError, after the last line, for a run that did not succeed.
    """
    async for chunk in follow_chunks(context, cluster, run_id, is_following=is_following):
        for line in chunk.lines:
            yield line


async def follow_chunks(
    context: Context, cluster: Cluster, run_id: int, *, is_following: bool, offset: int = 0
) -> AsyncIterator[LogChunk]:
    """Yield the lines after `offset` bytes of the merged log, as `follow_run` does.

    A shorter silence of the nodes than SILENCE_S_MAX does not end it, as the run continues. Raises UsageError if no
    node knows the run for longer than UNKNOWN_S_MAX: its ID is drawn before its files are uploaded.
    """
    rest, was_heard, silent_since_s, begin_s, is_known = b"", False, None, context.clock.now_s(), False
    while True:
        try:
            report = await context.gang.poll(cluster, run_id)
            if report.unreachable and len(report.unreachable) == len(cluster.nodes):
                message = f"no node of cluster `{cluster.name}` responds"
                raise UsageError(message, hints=["see `broker status --refresh`"])
            chunk, offset = await context.gang.read_log(cluster, run_id, offset=offset)
        except (UsageError, TransientError):
            now_s = context.clock.now_s()
            silent_since_s = now_s if silent_since_s is None else silent_since_s
            is_short = 0 <= now_s - silent_since_s < SILENCE_S_MAX
            if not (is_following and was_heard and is_short and _is_still_up(context, cluster)):
                raise
            await context.clock.sleep(POLL_S)
            continue
        was_heard, silent_since_s = True, None
        is_known = is_known or bool(report.unreachable) or any(report.statuses)
        if not is_known and is_following and context.clock.now_s() - begin_s > UNKNOWN_S_MAX:
            raise UsageError(
                f"run {run_id} has not reached the nodes of `{cluster.name}`: it is being submitted, or that failed",
                hints=[f"list the runs with `broker queue {cluster.name}`"],
            )
        *lines, rest = (rest + chunk).split(b"\n")
        if lines:
            shown = tuple(strip_control(line.decode(errors="replace")) for line in lines)
            yield LogChunk(lines=shown, offset=offset - len(rest))
        if not chunk and (report.status.is_terminal or not is_following):
            break
        if not chunk:
            await context.clock.sleep(POLL_S)
    if rest:
        yield LogChunk(lines=(strip_control(rest.decode(errors="replace")),), offset=offset)
    if report.status.is_terminal:
        context.note(f"run {run_id} on `{cluster.name}` ended with status {report.status.value}")
        if report.status is not RunStatus.SUCCEEDED:
            code = "" if report.returncode is None else f" with exit code {report.returncode}"
            raise RunFailedError(
                f"run {run_id} ended with status {report.status.value}{code}", returncode=report.returncode or 1
            )


def _is_still_up(context: Context, cluster: Cluster) -> bool:
    current = context.store.clusters.get(cluster.name)
    return current is not None and (current.created_s, current.status) == (cluster.created_s, ClusterStatus.UP)


async def cancel_runs(context: Context, cluster: Cluster, run_ids: Sequence[int] | None) -> Sequence[int]:
    """Cancel the runs, or all if None; return those that were live. Unknown runs only cause a note."""
    runs = await context.gang.list_runs(cluster)
    live = [run.id for run in runs if not run.status.is_terminal]
    for run_id in set(run_ids or []) - {run.id for run in runs}:
        context.note(f"unknown run {run_id} on `{cluster.name}`")
    wanted = live if run_ids is None else [each for each in run_ids if each in live]
    for run_id in wanted:
        await context.gang.cancel(cluster, run_id)
    return wanted


async def restart(context: Context, name: str) -> Cluster:
    """Restart a stopped cluster, and set its autostop rule again, which the agents lost when their machines stopped."""
    rule = context.find_cluster(name).autostop
    started = await context.provisioner.start(name)
    if rule:
        await context.gang.set_autostop(started, rule)
    return started


async def set_autostop(context: Context, name: str, rule: Autostop | None) -> None:
    """Set or remove the rule, first on the nodes. Raises UsageError if autostop would delete the disks."""
    cluster = find_up(context, name)
    context.check_autostop(rule, {cluster.placement.offer.cloud})
    await context.gang.set_autostop(cluster, rule)
    with context.store.transaction():
        current = find_up(context, name)  # it may have been terminated, or one of its nodes replaced
        context.store.clusters.put(replace(current, autostop=rule))


def select_clusters(
    context: Context, patterns: Sequence[str], *, is_all: bool = False
) -> tuple[list[Cluster], list[BrokerError]]:
    """Select the matching clusters that may be terminated; return an error for every other name or cluster."""
    known = context.store.clusters.list(on_damage=context.warn)
    matching = [each for each in known if any(fnmatch.fnmatch(each.name, pattern) for pattern in patterns)]
    failures: list[BrokerError] = []
    for pattern in patterns:
        if not is_all and not any(fnmatch.fnmatch(each.name, pattern) for each in known):
            failures.append(context.explain_missing(pattern, but=[each.name for each in matching]))
    live_jobs = context.store.jobs.list_live_ids()  # a cluster of an ended job may be terminated like any other cluster
    for each in matching:
        if each.job_id in live_jobs:
            hint = f"cancel the job, which terminates its cluster: `broker jobs cancel {each.job_id}`"
            failures.append(UsageError(f"cluster `{each.name}` belongs to managed job {each.job_id}", hints=[hint]))
    return [each for each in matching if each.job_id not in live_jobs], failures


async def take_down(
    context: Context,
    clusters: Sequence[Cluster],
    *,
    on_down: Callable[[Cluster], None] = lambda cluster: None,
    is_immediate: bool = False,
) -> list[BrokerError]:
    """Terminate all concurrently; the failure of one cloud does not affect the clusters of others.

    Terminate each once its files for mounted buckets are uploaded, or at once with `is_immediate`.
    """

    async def terminate(cluster: Cluster) -> BrokerError | None:
        try:
            if not is_immediate:
                await wait_for_uploads(context, cluster)
            await context.provisioner.down(cluster.name)
        except BrokerError as error:
            return error
        on_down(cluster)
        return None

    failures = [each for each in await asyncio.gather(*(terminate(each) for each in clusters)) if each]
    await context.provisioner.sweep()
    return failures


def raise_failures(failures: Sequence[BrokerError], *, ended_count: int, verb: str = "terminate") -> None:
    """Raise the failure itself if it is the only one and nothing was done, else one error that lists all of them."""
    if not failures:
        return
    if len(failures) == 1 and not ended_count:
        raise failures[0]
    is_wrong_line = not ended_count and all(isinstance(each, UsageError) for each in failures)
    raise (UsageError if is_wrong_line else BrokerError)(
        f"could not {verb} {format_count(len(failures), 'cluster')}",
        details=[line for each in failures for line in (each.message, *each.details)],
        hints=list(dict.fromkeys(hint for each in failures for hint in each.hints)),
    )
