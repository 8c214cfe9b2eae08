"""`broker gc`: find what this installation owns and nobody needs, and end it."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from broker.cli import options
from broker.cli.context import Context
from broker.cli.render import note_damage, plain, print_json, print_line, print_note, show_count
from broker.cli.terminal import show_wait
from broker.errors import CloudError


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
    if not dry_run:
        _sweep_access(context)
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


def _sweep_access(context: Context) -> None:
    """Accounts and users that reach buckets go with the last cluster and job: until then a node may need them."""
    if not (context.config.home / "access").is_dir() or context.store.list_clusters(on_damage=note_damage):
        return
    if any(not job.status.is_terminal for job in context.store.list_jobs(on_damage=note_damage)):
        return
    try:
        count = context.grants.sweep()
    except CloudError as error:
        print_note(f"what was made for access to buckets stays for now: {error.message}")
        return
    if count:
        print_note(f"{show_count(count, 'login')} made for access to buckets deleted")
