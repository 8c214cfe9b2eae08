"""`broker gc`: find and terminate orphaned cloud resources of this installation."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from broker.app.container import Context
from broker.cli import options
from broker.cli.context import make_context
from broker.cli.render import note_damage, print_json, print_line, print_note
from broker.cli.terminal import show_wait
from broker.errors import CloudError
from broker.formatting import format_count, to_plain
from broker.jobs.setup_archives import choose_expired, delete_archive, list_archives, list_places


def gc(
    dry_run: Annotated[
        bool, typer.Option("--dryrun", "--dry-run", help="Show what would be terminated without terminating it.")
    ] = False,
    as_json: options.AsJson = False,
) -> None:
    """Terminate orphaned cloud resources.

    A crash or an interrupted termination can orphan them.
    """
    context = make_context()
    context.keep_jobs_going()
    clouds = ", ".join(context.clouds)
    with show_wait(f"searching {clouds} for nodes of this installation") as bar:
        adopted = [] if dry_run else asyncio.run(context.provisioner.adopt())
        nodes, names = asyncio.run(context.provisioner.find_lost())
        if not dry_run and (nodes or names):
            bar.describe(f"terminating {format_count(len(nodes), 'node')} and {format_count(len(names), 'cluster')}")
        if not dry_run:
            asyncio.run(context.provisioner.collect())
    if not dry_run:
        _sweep_access(context)
    archives = _sweep_archives(context, is_dry=dry_run)
    if as_json:
        print_json(
            {
                "nodes": to_plain(list(nodes)), "clusters": list(names), "is_ended": not dry_run,
                "adopted": list(adopted), "setup_archives": archives,
            }
        )  # fmt: skip
        return
    verb = "would terminate" if dry_run else "terminated"
    for node in nodes:
        print_line(f"{verb} node {node.id} of `{node.cluster}` in {node.cloud} {node.zone or node.region}")
    for name in adopted:
        print_line(f"adopted cluster `{name}`, which was running without a record: see `broker status`")
    for name in names:
        print_line(f"{verb} cluster `{name}`")
    if not nodes and not names and not adopted:
        print_line("Nothing to collect: every node of this installation belongs to a cluster")


def _sweep_access(context: Context) -> None:
    """Delete bucket access accounts once no cluster or job remains; until then, a node may need them."""
    if not (context.config.home / "access").is_dir() or context.store.clusters.list(on_damage=note_damage):
        return
    if any(not job.status.is_terminal for job in context.store.jobs.list(on_damage=note_damage)):
        return
    try:
        count = context.grants.sweep()
    except CloudError as error:
        print_note(f"could not delete bucket access accounts yet: {error.message}")
        return
    if count:
        print_note(f"deleted {format_count(count, 'bucket access account')}")


def _sweep_archives(context: Context, *, is_dry: bool) -> list[dict[str, object]]:
    """Delete expired setup archives. Return all archives, including those that are kept."""
    found: list[dict[str, object]] = []
    for place in list_places(context.store):
        try:
            archives = list_archives(place)
            expired = choose_expired(archives, now_s=context.clock.now_s())
            for archive in () if is_dry else expired:
                delete_archive(archive)
        except CloudError as error:
            print_note(f"could not check the setup archives at {place}: {error.message}")
            continue
        found += [
            {"place": place, "name": each.name, "size_bytes": each.size_bytes, "used_s": each.used_s,
             "is_expired": each in expired}
            for each in archives
        ]  # fmt: skip
        if archives:
            gib = sum(each.size_bytes for each in archives if each not in expired) / 2**30
            verb = "would delete" if is_dry else "deleted"
            kept = format_count(len(archives) - len(expired), "setup archive")
            print_note(f"{kept} at {place}, {gib:.2f} GiB; {verb} {len(expired)} expired")
    return found
