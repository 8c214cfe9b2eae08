"""`broker local`: control the local simulated cloud."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from broker.cli.completion import complete_clusters
from broker.cli.context import make_context
from broker.cli.render import print_line
from broker.clouds.base import CanPreempt
from broker.errors import UsageError
from broker.formatting import format_duration

app = typer.Typer(
    help="Control the local simulated cloud.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@app.callback()
def root() -> None:
    """Control the local simulated cloud."""


@app.command()
def preempt(
    cluster: Annotated[
        str,
        typer.Argument(
            metavar="CLUSTER",
            help="Cluster name, or ID or name of a managed job.",
            show_default=False,
            autocompletion=complete_clusters,
        ),
    ],
    node: Annotated[int | None, typer.Option("--node", metavar="RANK", min=0, help="Preempt only this rank.")] = None,
    notice: Annotated[
        float, typer.Option("--notice", metavar="SECONDS", min=0, help="Preemption warning in seconds.")
    ] = 0,
) -> None:
    """Preempt nodes, as a spot market does."""
    context = make_context()
    clusters = context.store.clusters.list()
    jobs = [job for job in context.store.jobs.list() if cluster in (str(job.id), job.name)]
    ids = {job.id for job in jobs if not job.status.is_terminal}
    found = next((each for each in clusters if each.name == cluster or each.job_id in ids), None)
    found = found or context.find_cluster(cluster)
    cloud = context.clouds[found.placement.offer.cloud]
    if not isinstance(cloud, CanPreempt):
        raise UsageError(f"`{found.name}` is on {cloud.name}; only clusters on `local` can be preempted on request")
    if not found.nodes:
        raise UsageError(f"`{found.name}` has no nodes yet", hints=["wait until `broker status` shows it as UP"])
    wanted = [each for each in found.nodes if node is None or each.rank == node]
    if not wanted:
        raise UsageError(f"`{found.name}` has no node {node}", hints=[f"name a node from 0 to {len(found.nodes) - 1}"])
    asyncio.run(cloud.preempt_nodes([each.id for each in wanted], notice_s=notice))
    when = f"in {format_duration(notice)}" if notice else "now"
    print_line(f"preempting {len(wanted)} of {len(found.nodes)} nodes of `{found.name}` {when}")
