"""Cluster life cycle: stop, start, down and autostop; and SSH to a node."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Sequence
from typing import Annotated

import typer

from broker.app.clusters import find_up, raise_failures
from broker.app.verbs.clusters import preview_down, set_autostop, start_cluster, stop_cluster, terminate_clusters
from broker.app.verbs.shells import NodeName, ShellOutput, find_node, get_node, run_on_node
from broker.cli import options
from broker.cli.clusters import ClusterNames
from broker.cli.completion import complete_clusters
from broker.cli.context import make_context, make_session
from broker.cli.render import print_line, print_note
from broker.cli.terminal import show_wait
from broker.config import find_login
from broker.errors import BrokerError, RunFailedError, UsageError
from broker.formatting import format_count
from broker.types import Autostop


def stop(clusters: ClusterNames, yes: options.Agreed = False) -> None:
    """Stop clusters and keep their disks."""
    session = make_session()

    def act(name: str) -> str:
        session.call(stop_cluster, cluster=name)
        return f"stopped cluster `{name}`; restart it with `broker start {name}`"

    _act_on_each(clusters, act, verb="stop", doing="stopping")


def start(clusters: ClusterNames, yes: options.Agreed = False) -> None:
    """Restart stopped clusters."""
    session = make_session()

    def act(name: str) -> str:
        session.call(start_cluster, cluster=name)
        return f"cluster `{name}` is up"

    _act_on_each(clusters, act, verb="start", doing="starting")


def _act_on_each(names: Sequence[str], act: Callable[[str], str], *, verb: str, doing: str) -> None:
    """Act on each cluster once, and print the result. Failures are raised after the last cluster."""
    chosen = tuple(dict.fromkeys(names))
    failures: list[BrokerError] = []
    for name in chosen:
        try:
            with show_wait(f"{doing} `{name}`", is_printed=False):
                line = act(name)
            print_line(line)
        except BrokerError as error:
            failures.append(error)
    raise_failures(failures, ended_count=len(chosen) - len(failures), verb=verb)


def down(
    clusters: Annotated[
        list[str] | None,
        typer.Argument(metavar="CLUSTER...", help="Names or patterns, e.g. `dev-*`.", autocompletion=complete_clusters),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", "-a", help="Terminate all clusters.")] = False,
    now: Annotated[bool, typer.Option("--now", help="Do not wait for pending uploads to mounted buckets.")] = False,
    yes: options.Yes = False,
) -> None:
    """Terminate clusters and delete their disks."""
    patterns = ("*",) if everything else tuple(clusters or ())
    if not patterns:
        raise UsageError("no cluster was named", hints=["name one with `broker down NAME`, or pass `--all`"])
    session = make_session()
    found = session.call(preview_down, patterns=patterns, is_all=everything)
    wanted = found.names
    if not wanted:
        raise_failures(found.failures, ended_count=0)
    options.confirm(f"Terminate {', '.join(wanted)}?", yes=yes)
    left = list(wanted)

    def on_down(name: str) -> None:
        left.remove(name)
        print_line(f"terminated cluster `{name}`")

    try:
        with show_wait(f"terminating {format_count(len(wanted), 'cluster')}", is_printed=False):
            refused = session.call(terminate_clusters, names=wanted, on_down=on_down, is_immediate=now)
    except KeyboardInterrupt:
        names = " ".join(left)
        print_note(f"\ninterrupted; not confirmed as terminated: {names}; repeat `broker down {names}`")
        raise typer.Exit(130) from None
    raise_failures([*found.failures, *refused], ended_count=len(wanted) - len(refused))


def autostop(
    clusters: ClusterNames,
    idle: Annotated[
        int,
        typer.Option("--idle-minutes", "-i", metavar="MINUTES", min=0, help="Idle minutes before the cluster stops."),
    ] = 5,
    down: Annotated[bool, typer.Option("--down", help="Terminate the cluster instead of stopping it.")] = False,
    cancel: Annotated[bool, typer.Option("--cancel", help="Disable autostop.")] = False,
    yes: options.Agreed = False,
) -> None:
    """Stop clusters automatically when they are idle."""
    rule = None if cancel else Autostop(idle_minutes=idle, is_down=down)
    session = make_session()

    def act(name: str) -> str:
        session.call(set_autostop, cluster=name, rule=rule)
        if rule is None:
            return f"disabled autostop for cluster `{name}`"
        action = "will be terminated" if down else "will stop"
        return f"cluster `{name}` {action} after {idle} idle minutes"

    _act_on_each(clusters, act, verb="set autostop for", doing="setting autostop for")


def ssh(
    node: Annotated[
        str,
        typer.Argument(
            metavar="NODE",
            help="Cluster name, or CLUSTER-RANK for a node other than the head.",
            autocompletion=complete_clusters,
        ),
    ],
    command: Annotated[
        list[str] | None, typer.Argument(metavar="COMMAND...", help="Command to run, after `--` (default: a shell).")
    ] = None,
) -> None:
    """Open a shell on a node, or run a command there."""
    session = make_session()
    found = session.call(find_node, node=node)
    if command:
        words = tuple(command)
        code = session.call(
            run_on_node, cluster=found.cluster, rank=found.rank, command=words, on_output=_print_output
        )  # fmt: skip
        if code:
            raise RunFailedError(f"the command exited with code {code}", returncode=code)
    elif find_login() is None:
        _execute_shell(found)
    else:
        from broker.client.remote import RemoteSession
        from broker.client.shell import use_shell

        assert isinstance(session, RemoteSession)
        if code := use_shell(session, cluster=found.cluster, rank=found.rank):
            raise typer.Exit(code)


def _print_output(output: ShellOutput) -> None:
    file = sys.stderr if output.is_error else sys.stdout
    file.buffer.write(output.read())
    file.buffer.flush()


def _execute_shell(node: NodeName) -> None:
    """Replace this process by the shell."""
    context = make_context()
    found = get_node(find_up(context, node.cluster), node.rank)
    shell = asyncio.run(context.transport.open_shell(found))
    os.chdir(shell.folder)
    terminal = {name: value for name in ("TERM", "LANG", "COLUMNS", "LINES") if (value := os.getenv(name))}
    os.execvpe(shell.argv[0], shell.argv, {**terminal, **shell.env})
