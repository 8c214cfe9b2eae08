"""`broker local`: what a spot market does, done to the pretend machines of this one."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from broker.cli.completion import complete_clusters
from broker.cli.context import Context
from broker.cli.render import print_line, show_duration
from broker.clouds.base import CanPreempt
from broker.errors import UsageError

app = typer.Typer(
    help="The pretend cloud on this machine",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@app.callback()
def root() -> None:
    """The pretend cloud on this machine."""


@app.command()
def preempt(
    cluster: Annotated[
        str,
        typer.Argument(
            help="A cluster, or a managed job's id or name.", show_default=False, autocompletion=complete_clusters
        ),
    ],
    node: Annotated[int | None, typer.Option("--node", min=0, help="One rank only.")] = None,
    notice: Annotated[float, typer.Option("--notice", min=0, help="Seconds of warning.")] = 0,
) -> None:
    """Take nodes away, as a spot market does."""
    context = Context()
    clusters = context.store.list_clusters()
    jobs = [job for job in context.store.list_jobs() if cluster in (str(job.id), job.name)]
    ids = {job.id for job in jobs if not job.status.is_terminal}
    found = next((each for each in clusters if each.name == cluster or each.job_id in ids), None)
    found = found or context.find_cluster(cluster)
    cloud = context.clouds[found.placement.offer.cloud]
    if not isinstance(cloud, CanPreempt):
        raise UsageError(f"`{found.name}` is on {cloud.name}, where only the market preempts")
    if not found.nodes:
        raise UsageError(f"`{found.name}` has no nodes yet", hints=["`broker status` shows when it is up"])
    wanted = [each for each in found.nodes if node is None or each.rank == node]
    if not wanted:
        raise UsageError(f"`{found.name}` has no node {node}")
    asyncio.run(cloud.preempt_nodes([each.id for each in wanted], notice_s=notice))
    when = f"in {show_duration(notice)}" if notice else "now"
    print_line(f"{len(wanted)} of {len(found.nodes)} nodes of `{found.name}` are taken away {when}")
