"""Commands on running clusters: status, logs, queue and cancel."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from broker.app.container import Context
from broker.cli import options
from broker.cli.completion import complete_clusters
from broker.cli.context import make_context
from broker.cli.render import note_damage, print_json, print_line, print_note, print_table
from broker.cli.status_refresh import raise_failures, refresh_clusters
from broker.errors import RunFailedError, UsageError
from broker.formatting import format_count, format_duration, format_usd, strip_control, to_plain
from broker.types import Cluster, ClusterStatus, Run, RunStatus

POLL_S = 0.3
ClusterName = Annotated[str, typer.Argument(help="Cluster name.", show_default=False, autocompletion=complete_clusters)]


def find_up(context: Context, name: str) -> Cluster:
    """Find a cluster that is up. Raises UsageError for an unknown one, and for any other state."""
    cluster = context.find_cluster(name)
    if cluster.status is ClusterStatus.STOPPED:
        raise UsageError(f"cluster `{name}` is stopped", hints=[f"restart it with `broker start {name}`"])
    if cluster.status is not ClusterStatus.UP:
        raise UsageError(f"cluster `{name}` is {cluster.status.value}, not UP", hints=["see `broker status`"])
    return cluster


def follow_unless(context: Context, name: str, run_id: int, *, detach: bool) -> None:
    """Follow the run's output, or say how to with `detach` and after Ctrl-C."""
    come_back = f"show its output with `broker logs {name} {run_id}`, terminate the cluster with `broker down {name}`"
    if detach:
        print_note(f"submitted run {run_id}; {come_back}")
        return
    try:
        asyncio.run(_follow(context, context.find_cluster(name), run_id, is_following=True))
    except KeyboardInterrupt:
        print_note(f"\ndetached; the run continues; {come_back}")
        raise typer.Exit(130) from None


async def _follow(context: Context, cluster: Cluster, run_id: int, *, is_following: bool) -> None:
    """Print the merged log of all nodes. Raises RunFailedError for a failed run."""
    offset, rest = 0, b""
    while True:
        report = await context.gang.poll(cluster, run_id)
        if report.unreachable and len(report.unreachable) == len(cluster.nodes):
            raise UsageError(f"no node of cluster `{cluster.name}` responds", hints=["see `broker status --refresh`"])
        chunk, offset = await context.gang.read_log(cluster, run_id, offset=offset)
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            print_line(strip_control(line.decode(errors="replace")))
        if not chunk and (report.status.is_terminal or not is_following):
            break
        if not chunk:
            await context.clock.sleep(POLL_S)
    if rest:
        print_line(strip_control(rest.decode(errors="replace")))
    if report.status.is_terminal:
        print_note(f"run {run_id} on `{cluster.name}` ended with status {report.status.value}")
        if report.status is not RunStatus.SUCCEEDED:
            code = "" if report.returncode is None else f" with exit code {report.returncode}"
            raise RunFailedError(
                f"run {run_id} ended with status {report.status.value}{code}", returncode=report.returncode or 1
            )


def logs(
    cluster: ClusterName,
    run_id: Annotated[int | None, typer.Argument(help="Run ID (default: the newest).", show_default=False)] = None,
    follow: Annotated[bool, typer.Option("--follow/--no-follow", help="Keep printing until the run ends.")] = True,
) -> None:
    """Print the output of a run."""
    context = make_context()
    found = find_up(context, cluster)
    wanted = run_id or context.store.clusters.newest_run_id(cluster)
    if not wanted:
        raise UsageError(
            f"cluster `{cluster}` has no runs yet", hints=[f"run a task with `broker exec {cluster} TASK.yaml`"]
        )
    try:
        asyncio.run(_follow(context, found, wanted, is_following=follow))
    except KeyboardInterrupt:
        print_note(f"\ndetached; `broker logs {cluster} {wanted}` reattaches")
        raise typer.Exit(130) from None


def queue(cluster: ClusterName, as_json: options.AsJson = False) -> None:
    """List the runs of a cluster."""
    context = make_context()
    runs = asyncio.run(context.gang.list_runs(find_up(context, cluster)))
    if as_json:
        print_json(to_plain(list(runs)))
        return
    now_s = context.clock.now_s()
    rows = [
        [str(run.id), run.name or "-", run.accelerators or "-", run.status.value, _show_time(run, now_s),
         "-" if run.returncode is None else str(run.returncode)]
        for run in sorted(runs, key=lambda run: -run.id)
    ]  # fmt: skip
    print_table(["ID", "NAME", "ACCELERATORS", "STATUS", "TIME", "EXIT CODE"], rows, right=("ID", "TIME", "EXIT CODE"))


def _show_time(run: Run, now_s: float) -> str:
    """Show the time since submission; a run that was submitted just now may not have recorded it."""
    return format_duration((run.ended_s or now_s) - run.started_s) if run.started_s else "-"


def cancel(
    cluster: ClusterName,
    run_ids: Annotated[list[int] | None, typer.Argument(help="Run IDs.")] = None,
    everything: Annotated[bool, typer.Option("--all", "-a", help="Cancel all live runs.")] = False,
) -> None:
    """Cancel runs on a cluster."""
    context = make_context()
    found = find_up(context, cluster)

    async def end() -> list[int]:
        runs = await context.gang.list_runs(found)
        live = [run.id for run in runs if not run.status.is_terminal]
        for run_id in set(run_ids or []) - {run.id for run in runs}:
            print_note(f"unknown run {run_id} on `{cluster}`")
        wanted = live if everything else [each for each in run_ids or [] if each in live]
        for run_id in wanted:
            await context.gang.cancel(found, run_id)
        return wanted

    ended = asyncio.run(end())
    for run_id in ended:
        print_line(f"cancelled run {run_id}")
    if not ended:
        print_line("no live runs to cancel")


def status(
    refresh: Annotated[bool, typer.Option("--refresh", "-r", help="Query the clouds for current node states.")] = False,
    as_json: options.AsJson = False,
) -> None:
    """Show clusters, managed jobs and their cost.

    With --refresh: exit code 5 where a cloud could not be queried.
    """
    context = make_context()
    known = context.store.clusters.list(on_damage=note_damage)
    clusters, failures = asyncio.run(refresh_clusters(context, known)) if refresh else (known, {})
    now_s = context.clock.now_s()
    spent = {each.name: context.store.bills.spend_usd(cluster=each.name, now_s=now_s) for each in clusters}
    jobs = context.store.jobs.list_live_ids()
    context.keep_jobs_going()
    if as_json:
        print_json(
            {
                "clusters": [{**to_plain(each), "spent_usd": spent[each.name]} for each in clusters],
                "live_jobs": list(jobs),
                "spent_usd": context.store.bills.spend_usd(now_s=now_s),
                "not_asked": {name: error.message for name, error in failures.items()},
            }
        )
        raise_failures(failures)
        return
    rows = []
    for each in clusters:
        offer = each.placement.offer
        lost = sum(1 for node in each.nodes if node.state == "TERMINATED")
        state = each.status.value + (f" ({lost} lost)" if lost else "")
        where = f"{offer.cloud} {offer.zone or offer.region}"
        rate = "-" if each.status is ClusterStatus.STOPPED else format_usd(each.placement.usd_hour)
        rows.append(
            [each.name, state, f"{each.placement.node_count} x {offer.instance_type}", where,
             format_duration(now_s - each.created_s), rate, format_usd(spent[each.name])]
        )  # fmt: skip
    if rows:
        columns = ["CLUSTER", "STATUS", "NODES", "WHERE", "AGE", "USD/h", "USD"]
        print_table(columns, rows, right=("AGE", "USD/h", "USD"))
    else:
        print_line("No clusters; start one with `broker launch TASK.yaml`")
    if jobs:
        print_line(f"{format_count(len(jobs), 'managed job')} live; see `broker jobs queue`")
    print_line(f"Total cost so far: {format_usd(context.store.bills.spend_usd(now_s=now_s))} USD")
    raise_failures(failures)
