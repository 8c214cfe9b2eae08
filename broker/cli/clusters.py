"""Commands on running clusters: status, logs, queue and cancel."""

from __future__ import annotations

from typing import Annotated

import typer

from broker.app.clusters import LogChunk, Status, narrow_status, raise_query_failures
from broker.app.session import Session
from broker.app.verbs.clusters import cancel_runs, find_run, follow_run, list_runs, show_status
from broker.cli import options
from broker.cli.completion import complete_clusters
from broker.cli.context import make_session
from broker.cli.render import print_json, print_line, print_note, print_table
from broker.formatting import format_count, format_duration, format_usd, to_plain
from broker.types import Cluster, ClusterStatus, NodeState, Run, RunStatus

ClusterName = Annotated[
    str, typer.Argument(metavar="CLUSTER", help="Cluster name.", show_default=False, autocompletion=complete_clusters)
]
ClusterNames = Annotated[
    list[str],
    typer.Argument(metavar="CLUSTER...", help="Cluster names.", show_default=False, autocompletion=complete_clusters),
]


def follow_unless(session: Session, name: str, run_id: int, *, detach: bool) -> None:
    """Follow the run's output. With `detach`, and after Ctrl-C, print how to follow it."""
    come_back = f"show its output with `broker logs {name} {run_id}`, terminate the cluster with `broker down {name}`"
    if detach:
        print_note(f"submitted run {run_id}; {come_back}")
        return
    try:
        session.call(follow_run, cluster=name, run_id=run_id, on_chunk=print_chunk)
    except KeyboardInterrupt:
        print_note(f"\ndetached; the run continues; {come_back}")
        raise typer.Exit(130) from None


def print_chunk(chunk: LogChunk) -> None:
    """Print the lines of a part of a log."""
    for line in chunk.lines:
        print_line(line)


def logs(
    cluster: ClusterName,
    run_id: Annotated[
        int | None, typer.Argument(metavar="RUN", help="Run ID (default: the newest).", show_default=False)
    ] = None,
    follow: Annotated[bool, typer.Option("--follow/--no-follow", help="Keep printing until the run ends.")] = True,
) -> None:
    """Print the output of a run."""
    session = make_session()
    wanted = session.call(find_run, cluster=cluster, run_id=run_id)
    try:
        session.call(follow_run, cluster=cluster, run_id=wanted, on_chunk=print_chunk, is_following=follow)
    except KeyboardInterrupt:
        print_note(f"\ndetached; `broker logs {cluster} {wanted}` reattaches")
        raise typer.Exit(130) from None


def queue(cluster: ClusterName, as_json: options.AsJson = False) -> None:
    """List the runs of a cluster."""
    session = make_session()
    runs = session.call(list_runs, cluster=cluster)
    if as_json:
        print_json(to_plain(list(runs)))
        return
    now_s = session.clock.now_s()
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
    run_ids: Annotated[
        list[int] | None, typer.Argument(metavar="RUN...", help="Run IDs (default: the newest running one).")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", "-a", help="Cancel all live runs.")] = False,
    yes: options.Yes = False,
) -> None:
    """Cancel runs on a cluster."""
    session = make_session()
    wanted = None if everything else tuple(run_ids or _find_newest(session, cluster))
    if wanted != ():
        which = "all live runs" if wanted is None else "run " + ", ".join(map(str, wanted))
        options.confirm(f"Cancel {which} on {cluster}?", yes=yes)
    ended = session.call(cancel_runs, cluster=cluster, run_ids=wanted)
    for run_id in ended:
        print_line(f"cancelled run {run_id}")
    if not ended:
        print_line("no live runs to cancel")


def _find_newest(session: Session, cluster: str) -> list[int]:
    """Return the newest run that has begun, as `sky cancel CLUSTER` chooses it, or none."""
    begun = (RunStatus.SETTING_UP, RunStatus.RUNNING)
    return sorted(run.id for run in session.call(list_runs, cluster=cluster) if run.status in begun)[-1:]


def status(
    clusters: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="CLUSTER...",
            help="Names or patterns, e.g. `dev-*` (default: all).",
            autocompletion=complete_clusters,
        ),
    ] = None,
    refresh: Annotated[bool, typer.Option("--refresh", "-r", help="Query the clouds for current node states.")] = False,
    all_users: options.AllUsers = False,
    as_json: options.AsJson = False,
) -> None:
    """Show clusters, managed jobs and their cost.

    With --refresh, the exit code is 5 if a cloud could not be queried.
    """
    session = make_session()
    found = session.call(show_status, is_refreshing=refresh, of_all_users=all_users)
    found = narrow_status(found, clusters) if clusters else found
    if as_json:
        _print_status(found)
    else:
        _show_status(found, session.clock.now_s())
    raise_query_failures(found.failures)


def _print_status(found: Status) -> None:
    print_json(
        {
            "clusters": [
                {**to_plain(each), "spent_usd": found.spent_usd[each.name], "user": found.users.get(each.name)}
                for each in found.clusters
            ],
            "live_jobs": list(found.live_job_ids),
            "spent_usd": found.total_usd,
            "not_asked": {name: error.message for name, error in found.failures.items()},
        }
    )


def _show_status(found: Status, now_s: float) -> None:
    rows = []
    for each in found.clusters:
        offer = each.placement.offer
        where = f"{offer.cloud} {offer.zone or offer.region}"
        is_free = each.status is ClusterStatus.STOPPED or _has_ended(each)
        rate = "-" if is_free else format_usd(each.placement.usd_hour)
        user = [] if found.only or not found.users else [found.users.get(each.name, "-")]
        rows.append(
            [each.name, *user, _describe_state(each), f"{each.placement.node_count} x {offer.instance_type}", where,
             format_duration(now_s - each.created_s), rate, format_usd(found.spent_usd[each.name])]
        )  # fmt: skip
    if rows:
        user = [] if found.only or not found.users else ["USER"]
        columns = ["CLUSTER", *user, "STATUS", "NODES", "LOCATION", "AGE", "USD/h", "USD"]
        print_table(columns, rows, right=("AGE", "USD/h", "USD"))
    else:
        print_line("No clusters; start one with `broker launch TASK.yaml`")
    if found.other_count:
        print_line(f"{format_count(found.other_count, 'cluster')} of other users; show them with `--all-users`")
    if found.live_job_ids:
        print_line(f"{format_count(len(found.live_job_ids), 'live managed job')}; see `broker jobs queue`")
    whose = " of all users" if found.only else ""
    print_line(f"Total cost so far{whose}: {format_usd(found.total_usd)} USD")
    if ended := [each.name for each in found.clusters if _has_ended(each)]:
        print_note(f"the machines of {', '.join(ended)} are gone; remove the record with `broker down {ended[0]}`")


def _describe_state(cluster: Cluster) -> str:
    if _has_ended(cluster):
        return "ENDED"
    lost = sum(node.state is NodeState.TERMINATED for node in cluster.nodes)
    return cluster.status.value + (f" ({lost} lost)" if lost else "")


def _has_ended(cluster: Cluster) -> bool:
    """Return whether a cluster that was up has no machine left, as after autostop. A job replaces its own."""
    is_gone = bool(cluster.nodes) and all(node.state is NodeState.TERMINATED for node in cluster.nodes)
    return is_gone and cluster.status is ClusterStatus.UP and cluster.job_id is None
