"""Cluster life cycle: stop, start, down and autostop; and SSH to a node."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from typing import Annotated

import typer

from broker.app.clusters import find_up, raise_failures, restart, select_clusters, set_autostop, take_down
from broker.cli import options
from broker.cli.clusters import ClusterName
from broker.cli.completion import complete_clusters
from broker.cli.context import make_context
from broker.cli.render import print_line
from broker.cli.terminal import show_wait
from broker.errors import RunFailedError, UsageError
from broker.formatting import format_count
from broker.types import Autostop, Cluster


def stop(cluster: ClusterName, yes: options.Agreed = False) -> None:
    """Stop a cluster and keep its disks."""
    context = make_context()
    find_up(context, cluster)
    with show_wait(f"stopping `{cluster}`", is_told=False):
        asyncio.run(context.provisioner.stop(cluster))
    print_line(f"stopped cluster `{cluster}`; restart it with `broker start {cluster}`")


def start(cluster: ClusterName, yes: options.Agreed = False) -> None:
    """Restart a stopped cluster."""
    context = make_context()
    context.find_cluster(cluster)
    with show_wait(f"starting `{cluster}`", is_told=False):
        asyncio.run(restart(context, cluster))
    print_line(f"cluster `{cluster}` is up")


def down(
    clusters: Annotated[
        list[str] | None, typer.Argument(help="Names or patterns, e.g. `dev-*`.", autocompletion=complete_clusters)
    ] = None,
    everything: Annotated[bool, typer.Option("--all", "-a", help="Terminate all clusters.")] = False,
    yes: options.Yes = False,
) -> None:
    """Terminate clusters and delete their disks."""
    context = make_context()
    patterns = ["*"] if everything else clusters or []
    if not patterns:
        raise UsageError("no cluster was named", hints=["name one: `broker down NAME`, or pass `--all`"])
    wanted, failures = select_clusters(context, patterns, is_all=everything)
    if not wanted:
        raise_failures(failures, ended_count=0)
    if wanted and not yes and sys.stdin.isatty():
        typer.confirm(f"Terminate {', '.join(each.name for each in wanted)}?", abort=True)
    with show_wait(f"terminating {format_count(len(wanted), 'cluster')}", is_told=False):
        refused = asyncio.run(take_down(context, wanted, on_down=_tell_terminated))
    raise_failures([*failures, *refused], ended_count=len(wanted) - len(refused))


def _tell_terminated(cluster: Cluster) -> None:
    print_line(f"terminated cluster `{cluster.name}`")


def autostop(
    cluster: ClusterName,
    idle: Annotated[
        int,
        typer.Option("--idle-minutes", "-i", metavar="MINUTES", min=0, help="Idle minutes before the cluster stops."),
    ] = 5,
    down: Annotated[bool, typer.Option("--down", help="Terminate the cluster instead of stopping it.")] = False,
    cancel: Annotated[bool, typer.Option("--cancel", help="Disable autostop.")] = False,
) -> None:
    """Stop a cluster automatically when it is idle."""
    context = make_context()
    rule = None if cancel else Autostop(idle_minutes=idle, is_down=down)
    asyncio.run(set_autostop(context, cluster, rule))
    if rule is None:
        print_line(f"disabled autostop for cluster `{cluster}`")
    else:
        action = "will be terminated" if down else "will stop"
        print_line(f"cluster `{cluster}` {action} after {idle} idle minutes")


def ssh(
    node: Annotated[
        str,
        typer.Argument(
            help="Cluster name, or CLUSTER-RANK for a node other than the head.", autocompletion=complete_clusters
        ),
    ],
    command: Annotated[list[str] | None, typer.Argument(help="Command to run, after `--` (default: a shell).")] = None,
) -> None:
    """Open a shell on a node, or run a command there."""
    context = make_context()
    name, rank = node, 0
    if context.store.clusters.get(node) is None and (found := re.fullmatch(r"(.+)-(\d+)", node)):
        name, rank = found[1], int(found[2])
    cluster = find_up(context, name)
    wanted = next((each for each in cluster.nodes if each.rank == rank), None)
    if wanted is None:
        raise UsageError(f"cluster `{name}` has no node {rank}", hints=[f"valid ranks: 0 to {len(cluster.nodes) - 1}"])
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
