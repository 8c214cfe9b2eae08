"""Commands on running clusters: status, logs, queue and cancel."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from broker.app.clusters import (
    Status,
    cancel_runs,
    find_run_id,
    find_up,
    follow_run,
    raise_unasked,
    read_status,
)
from broker.app.container import Context
from broker.cli import options
from broker.cli.completion import complete_clusters
from broker.cli.context import make_context
from broker.cli.render import print_json, print_line, print_note, print_table
from broker.formatting import format_count, format_duration, format_usd, to_plain
from broker.types import Cluster, ClusterStatus, Run

ClusterName = Annotated[str, typer.Argument(help="Cluster name.", show_default=False, autocompletion=complete_clusters)]


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
    async for line in follow_run(context, cluster, run_id, is_following=is_following):
        print_line(line)


def logs(
    cluster: ClusterName,
    run_id: Annotated[int | None, typer.Argument(help="Run ID (default: the newest).", show_default=False)] = None,
    follow: Annotated[bool, typer.Option("--follow/--no-follow", help="Keep printing until the run ends.")] = True,
) -> None:
    """Print the output of a run."""
    context = make_context()
    found = find_up(context, cluster)
    wanted = find_run_id(context, cluster, run_id)
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
    wanted = None if everything else run_ids or []
    ended = asyncio.run(cancel_runs(context, find_up(context, cluster), wanted))
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
    found = asyncio.run(read_status(context, is_refreshing=refresh))
    context.keep_jobs_going()
    if as_json:
        _print_status(found)
    else:
        _show_status(found, context.clock.now_s())
    raise_unasked(found.failures)


def _print_status(found: Status) -> None:
    print_json(
        {
            "clusters": [{**to_plain(each), "spent_usd": found.spent_usd[each.name]} for each in found.clusters],
            "live_jobs": list(found.live_job_ids),
            "spent_usd": found.total_usd,
            "not_asked": {name: error.message for name, error in found.failures.items()},
        }
    )


def _show_status(found: Status, now_s: float) -> None:
    rows = []
    for each in found.clusters:
        offer = each.placement.offer
        lost = sum(1 for node in each.nodes if node.state == "TERMINATED")
        state = each.status.value + (f" ({lost} lost)" if lost else "")
        where = f"{offer.cloud} {offer.zone or offer.region}"
        rate = "-" if each.status is ClusterStatus.STOPPED else format_usd(each.placement.usd_hour)
        rows.append(
            [each.name, state, f"{each.placement.node_count} x {offer.instance_type}", where,
             format_duration(now_s - each.created_s), rate, format_usd(found.spent_usd[each.name])]
        )  # fmt: skip
    if rows:
        columns = ["CLUSTER", "STATUS", "NODES", "WHERE", "AGE", "USD/h", "USD"]
        print_table(columns, rows, right=("AGE", "USD/h", "USD"))
    else:
        print_line("No clusters; start one with `broker launch TASK.yaml`")
    if found.live_job_ids:
        print_line(f"{format_count(len(found.live_job_ids), 'managed job')} live; see `broker jobs queue`")
    print_line(f"Total cost so far: {format_usd(found.total_usd)} USD")
