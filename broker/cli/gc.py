"""`broker gc`: find what this installation owns and nobody needs, and end it."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from broker.cli import options
from broker.cli.context import Context
from broker.cli.render import plain, print_json, print_line, show_count
from broker.cli.terminal import show_wait


def gc(
    dry_run: Annotated[
        bool, typer.Option("--dryrun", "--dry-run", help="Say what would be ended, and end nothing.")
    ] = False,
    as_json: options.AsJson = False,
) -> None:
    """End machines that nobody needs: left by a crash, or of clusters whose end was cut short."""
    context = Context()
    context.keep_jobs_going()
    clouds = ", ".join(context.clouds)
    with show_wait(f"looking for machines of this installation in {clouds}") as bar:
        adopted = [] if dry_run else asyncio.run(context.provisioner.adopt())
        nodes, names = asyncio.run(context.provisioner.find_lost())
        if not dry_run and (nodes or names):
            bar.describe(f"ending {show_count(len(nodes), 'node')} and {show_count(len(names), 'cluster')}")
        if not dry_run:
            asyncio.run(context.provisioner.collect())
    if as_json:
        print_json(
            {"nodes": plain(list(nodes)), "clusters": list(names), "is_ended": not dry_run, "adopted": list(adopted)}
        )
        return
    verb = "would be ended" if dry_run else "is ended"
    for node in nodes:
        print_line(f"node {node.id} of `{node.cluster}` in {node.cloud} {node.zone or node.region} {verb}")
    for name in adopted:
        print_line(f"cluster `{name}` was running without a record and has one now: `broker status` shows it")
    for name in names:
        print_line(f"cluster `{name}` {verb}")
    if not nodes and not names and not adopted:
        print_line("Nothing to collect: every machine of this installation belongs to a cluster")
