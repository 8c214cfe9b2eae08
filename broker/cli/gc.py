"""`broker gc`: find and terminate orphaned cloud resources of this installation."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
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
    clouds = ", ".join(context.clouds)
    with show_wait(f"searching {clouds} for nodes of this installation") as bar:
        adopted = [] if dry_run else asyncio.run(context.provisioner.adopt())
        lost = asyncio.run(context.provisioner.find_lost())
        failures = dict(lost.failures)
        if not dry_run and (lost.nodes or lost.names):
            counts = f"{format_count(len(lost.nodes), 'node')} and {format_count(len(lost.names), 'cluster')}"
            bar.describe(f"terminating {counts}")
        if not dry_run:
            asyncio.run(context.provisioner.collect(failures.setdefault))
    if not dry_run:
        _sweep_access(context)
    context.restart_daemon_if_needed()  # last: a daemon would collect at the same time, and this command report nothing
    archives = _sweep_archives(context, is_dry=dry_run)
    nodes = [node for node in lost.nodes if node.cloud not in failures]
    names = [name for name in lost.names if name not in failures]
    if as_json:
        print_json(
            {
                "nodes": to_plain(nodes), "clusters": names, "is_ended": not dry_run,
                "adopted": list(adopted), "setup_archives": archives,
            }
        )  # fmt: skip
        raise_failures(failures)
        return
    verb = "would terminate" if dry_run else "terminated"
    for node in nodes:
        print_line(f"{verb} node {node.id} of `{node.cluster}` in {node.cloud} {node.zone or node.region}")
    for name in adopted:
        print_line(f"adopted cluster `{name}`, which was running without a record: see `broker status`")
    for name in names:
        print_line(f"{verb} cluster `{name}`")
    if not nodes and not names and not adopted and not failures:
        print_line("Nothing to collect: every node of this installation belongs to a cluster")
    raise_failures(failures)


def raise_failures(failures: Mapping[str, CloudError]) -> None:
    """Raise CloudError if some resources could not be searched or terminated: they may still cost money."""
    if failures:
        raise CloudError(
            f"could not collect everything: {' and '.join(failures)} may have nodes that cost money",
            details=[f"{name}: {error.message}" for name, error in failures.items()],
            hints=list(dict.fromkeys(hint for error in failures.values() for hint in error.hints)),
        )


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
