"""What people do with a cluster that is up: status, logs, queue, cancel."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from broker.cli.completion import complete_clusters
from broker.cli.context import Context
from broker.cli.refreshing import raise_unasked, refresh_clusters
from broker.cli.render import (
    clean,
    note_damage,
    plain,
    print_json,
    print_line,
    print_note,
    print_table,
    show_count,
    show_duration,
    show_usd,
)
from broker.errors import RunFailedError, UsageError
from broker.types import Cluster, ClusterStatus, Run, RunStatus

POLL_S = 0.3
ClusterName = Annotated[
    str, typer.Argument(help="The cluster's name.", show_default=False, autocompletion=complete_clusters)
]


def find_up(context: Context, name: str) -> Cluster:
    """A cluster that can take work."""
    cluster = context.find_cluster(name)
    if cluster.status is ClusterStatus.STOPPED:
        raise UsageError(f"cluster `{name}` is stopped", hints=[f"`broker start {name}`"])
    if cluster.status is not ClusterStatus.UP:
        raise UsageError(f"cluster `{name}` is {cluster.status.value}", hints=["`broker status`"])
    return cluster


def follow_unless(context: Context, name: str, run_id: int, *, detach: bool) -> None:
    come_back = f"`broker logs {name} {run_id}` shows its output, `broker down {name}` ends the cluster"
    if detach:
        print_note(f"run {run_id} is submitted; {come_back}")
        return
    try:
        asyncio.run(_follow(context, context.find_cluster(name), run_id, is_following=True))
    except KeyboardInterrupt:
        print_note(f"\ndetached; the run continues. {come_back}")
        raise typer.Exit(130) from None


async def _follow(context: Context, cluster: Cluster, run_id: int, *, is_following: bool) -> None:
    """Print the merged log; a failed run is this command's failure."""
    offset, rest = 0, b""
    while True:
        report = await context.gang.poll(cluster, run_id)
        if report.unreachable and len(report.unreachable) == len(cluster.nodes):
            raise UsageError(f"no node of `{cluster.name}` answers", hints=["`broker status --refresh`"])
        chunk, offset = await context.gang.read_log(cluster, run_id, offset=offset)
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            print_line(clean(line.decode(errors="replace")))
        if not chunk and (report.status.is_terminal or not is_following):
            break
        if not chunk:
            await context.clock.sleep(POLL_S)
    if rest:
        print_line(clean(rest.decode(errors="replace")))
    if report.status.is_terminal:
        print_note(f"run {run_id} on `{cluster.name}` ended {report.status.value}")
        if report.status is not RunStatus.SUCCEEDED:
            code = "" if report.returncode is None else f" with exit code {report.returncode}"
            raise RunFailedError(f"run {run_id} ended {report.status.value}{code}", returncode=report.returncode or 1)


def logs(
    cluster: ClusterName,
    run_id: Annotated[int | None, typer.Argument(help="Which run; the newest without it.", show_default=False)] = None,
    follow: Annotated[bool, typer.Option("--follow/--no-follow", help="Go on until the run ends.")] = True,
) -> None:
    """Show what a run prints."""
    context = Context()
    found = find_up(context, cluster)
    wanted = run_id or context.store.newest_run_id(cluster)
    if not wanted:
        raise UsageError(f"nothing has run on `{cluster}`", hints=[f"`broker exec {cluster} TASK.yaml`"])
    try:
        asyncio.run(_follow(context, found, wanted, is_following=follow))
    except KeyboardInterrupt:
        print_note(f"\ndetached; `broker logs {cluster} {wanted}` reattaches")
        raise typer.Exit(130) from None


def queue(cluster: ClusterName, as_json: Annotated[bool, typer.Option("--json", help="As data.")] = False) -> None:
    """List the runs of a cluster."""
    context = Context()
    runs = asyncio.run(context.gang.list_runs(find_up(context, cluster)))
    if as_json:
        print_json(plain(list(runs)))
        return
    now_s = context.clock.now_s()
    rows = [
        [str(run.id), run.name or "-", run.accelerators or "-", run.status.value, _show_time(run, now_s),
         "-" if run.returncode is None else str(run.returncode)]
        for run in sorted(runs, key=lambda run: -run.id)
    ]  # fmt: skip
    print_table(["ID", "NAME", "ACCELERATORS", "STATUS", "TIME", "EXIT CODE"], rows, right=("ID", "TIME", "EXIT CODE"))


def _show_time(run: Run, now_s: float) -> str:
    """Since it was submitted; a run that was submitted just now may not have noted when."""
    return show_duration((run.ended_s or now_s) - run.started_s) if run.started_s else "-"


def cancel(
    cluster: ClusterName,
    run_ids: Annotated[list[int] | None, typer.Argument(help="Which runs; all live ones with --all.")] = None,
    everything: Annotated[bool, typer.Option("--all", "-a", help="Every live run.")] = False,
) -> None:
    """End runs of a cluster."""
    context = Context()
    found = find_up(context, cluster)

    async def end() -> list[int]:
        runs = await context.gang.list_runs(found)
        live = [run.id for run in runs if not run.status.is_terminal]
        for run_id in set(run_ids or []) - {run.id for run in runs}:
            print_note(f"there is no run {run_id} on `{cluster}`")
        wanted = live if everything else [each for each in run_ids or [] if each in live]
        for run_id in wanted:
            await context.gang.cancel(found, run_id)
        return wanted

    ended = asyncio.run(end())
    for run_id in ended:
        print_line(f"run {run_id} is cancelled")
    if not ended:
        print_line("nothing to cancel")


def status(
    refresh: Annotated[bool, typer.Option("--refresh", "-r", help="Ask the clouds first.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="As data.")] = False,
) -> None:
    """Show clusters, managed jobs and what they have cost."""
    context = Context()
    known = context.store.list_clusters(on_damage=note_damage)
    clusters, failures = asyncio.run(refresh_clusters(context, known)) if refresh else (known, {})
    now_s = context.clock.now_s()
    spent = {each.name: context.store.spend_usd(cluster=each.name, now_s=now_s) for each in clusters}
    jobs = context.store.list_live_job_ids()
    context.keep_jobs_going()
    if as_json:
        print_json(
            {
                "clusters": [{**plain(each), "spent_usd": spent[each.name]} for each in clusters],
                "live_jobs": list(jobs),
                "spent_usd": context.store.spend_usd(now_s=now_s),
                "not_asked": {name: error.message for name, error in failures.items()},
            }
        )
        raise_unasked(failures)
        return
    rows = []
    for each in clusters:
        offer = each.placement.offer
        lost = sum(1 for node in each.nodes if node.state == "TERMINATED")
        state = each.status.value + (f" ({lost} lost)" if lost else "")
        where = f"{offer.cloud} {offer.zone or offer.region}"
        rate = "-" if each.status is ClusterStatus.STOPPED else show_usd(each.placement.usd_hour)
        rows.append(
            [each.name, state, f"{each.placement.node_count} x {offer.instance_type}", where,
             show_duration(now_s - each.created_s), rate, show_usd(spent[each.name])]
        )  # fmt: skip
    if rows:
        columns = ["CLUSTER", "STATUS", "NODES", "WHERE", "AGE", "USD/h", "USD"]
        print_table(columns, rows, right=("AGE", "USD/h", "USD"))
    else:
        print_line("No clusters; `broker launch TASK.yaml` makes one")
    if jobs:
        print_line(f"{show_count(len(jobs), 'managed job')} live; `broker jobs queue` shows them")
    print_line(f"Spent so far: {show_usd(context.store.spend_usd(now_s=now_s))} USD")
    raise_unasked(failures)
