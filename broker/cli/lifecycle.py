"""A cluster's end and pauses: stop, start, down, autostop; and a shell on a node."""

from __future__ import annotations

import asyncio
import fnmatch
import os
import re
import sys
from dataclasses import replace
from typing import Annotated

import typer

from broker.cli import options
from broker.cli.clusters import ClusterName, find_up
from broker.cli.context import Context
from broker.cli.render import note_damage, print_line
from broker.errors import RunFailedError, UsageError
from broker.types import Autostop


def stop(cluster: ClusterName, yes: options.Agreed = False) -> None:
    """Stop a cluster's machines and keep their disks."""
    context = Context()
    find_up(context, cluster)
    asyncio.run(context.provisioner.stop(cluster))
    print_line(f"cluster `{cluster}` is stopped; `broker start {cluster}` goes on")


def start(cluster: ClusterName, yes: options.Agreed = False) -> None:
    """Start a stopped cluster again."""
    context = Context()
    rule = context.find_cluster(cluster).autostop

    async def go_on() -> None:
        started = await context.provisioner.start(cluster)
        if rule:  # what the agents knew ended with their machines
            await context.gang.set_autostop(started, rule)

    asyncio.run(go_on())
    print_line(f"cluster `{cluster}` is up")


def down(
    clusters: Annotated[list[str] | None, typer.Argument(help="Names or patterns like `dev-*`.")] = None,
    everything: Annotated[bool, typer.Option("--all", "-a", help="Every cluster.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Don't ask.")] = False,
) -> None:
    """Take clusters down for good; what was on their disks is gone."""
    context = Context()
    known = context.store.list_clusters(on_damage=note_damage)
    patterns = ["*"] if everything else clusters or []
    if not patterns:
        raise UsageError("no cluster was named", hints=["`broker down NAME`, or `--all`"])
    wanted = [each for each in known if any(fnmatch.fnmatch(each.name, pattern) for pattern in patterns)]
    for pattern in patterns:
        if not everything and not any(fnmatch.fnmatch(each.name, pattern) for each in known):
            context.find_cluster(pattern)
    live_jobs = context.store.list_live_job_ids()  # what an ended job has left may be taken down like any other
    if owned := [each for each in wanted if each.job_id in live_jobs]:
        raise UsageError(
            f"cluster `{owned[0].name}` belongs to managed job {owned[0].job_id}",
            hints=[f"`broker jobs cancel {owned[0].job_id}` ends the job and its cluster"],
        )
    if wanted and not yes and sys.stdin.isatty():
        typer.confirm(f"Take down {', '.join(each.name for each in wanted)}?", abort=True)

    async def end() -> None:
        for each in wanted:
            await context.provisioner.down(each.name)
            print_line(f"cluster `{each.name}` is down")
        await context.provisioner.sweep()

    asyncio.run(end())


def autostop(
    cluster: ClusterName,
    idle: Annotated[int, typer.Option("--idle-minutes", "-i", min=0, help="How long idle before.")] = 5,
    down: Annotated[bool, typer.Option("--down", help="Take it down instead of stopping it.")] = False,
    cancel: Annotated[bool, typer.Option("--cancel", help="Let it stay up.")] = False,
) -> None:
    """Stop a cluster by itself when it is idle."""
    context = Context()
    found = find_up(context, cluster)
    rule = None if cancel else Autostop(idle_minutes=idle, is_down=down)
    context.check_autostop(rule, {found.placement.offer.cloud})
    asyncio.run(context.gang.set_autostop(found, rule))
    context.store.put_cluster(replace(found, autostop=rule))
    what = "stays up" if rule is None else f"{'goes down' if down else 'stops'} after {idle} idle minutes"
    print_line(f"cluster `{cluster}` {what}")


def ssh(
    node: Annotated[str, typer.Argument(help="CLUSTER, or CLUSTER-RANK for a node other than the head.")],
    command: Annotated[list[str] | None, typer.Argument(help="What to run, after `--`; a shell without it.")] = None,
) -> None:
    """Open a shell on a node, or run one command there."""
    context = Context()
    name, rank = node, 0
    if context.store.get_cluster(node) is None and (found := re.fullmatch(r"(.+)-(\d+)", node)):
        name, rank = found[1], int(found[2])
    cluster = find_up(context, name)
    wanted = next((each for each in cluster.nodes if each.rank == rank), None)
    if wanted is None:
        raise UsageError(f"`{name}` has no node {rank}", hints=[f"its nodes are 0 to {len(cluster.nodes) - 1}"])
    if command:
        done = asyncio.run(context.transport.run(wanted, command, timeout_s=3600))
        sys.stdout.buffer.write(done.stdout)
        sys.stderr.buffer.write(done.stderr)
        if done.returncode:
            raise RunFailedError(f"the command exited with code {done.returncode}", returncode=done.returncode)
        return
    shell = asyncio.run(context.transport.open_shell(wanted))
    os.chdir(shell.folder)
    terminal = {name: value for name in ("TERM", "LANG", "COLUMNS", "LINES") if (value := os.getenv(name))}
    os.execvpe(shell.argv[0], shell.argv, {**terminal, **shell.env})
