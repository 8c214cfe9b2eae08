"""Verbs that open a shell on a node, or run a command there, for a user of a server."""

from __future__ import annotations

import asyncio
import base64
import re
from collections.abc import Callable

from broker.app.clusters import find_up
from broker.app.consoles import ScreenSize
from broker.app.container import Context
from broker.errors import InvalidRequestError, UsageError
from broker.frozen import frozen
from broker.runtime.base import CanStream
from broker.runtime.commands import run_with_output
from broker.state.people import Owned
from broker.state.store import Store
from broker.types import Cluster, Node

COMMAND_S_MAX = 3600.0
SIDE_MAX = 10_000  # rows or columns of a terminal
TERM = r"[A-Za-z0-9._+-]{1,64}"


@frozen
class NodeName:
    """A node: its cluster and its rank there."""

    cluster: str
    rank: int


@frozen
class ShellOutput:
    """Output of a shell or command, in base64 because it may be any bytes; `is_error`: of stderr."""

    data: str
    is_error: bool = False

    @classmethod
    def make(cls, data: bytes, *, is_error: bool = False) -> ShellOutput:
        """Encode output."""
        return cls(data=base64.b64encode(data).decode(), is_error=is_error)

    def read(self) -> bytes:
        """Return the bytes of the output."""
        return base64.b64decode(self.data)


@frozen
class ShellInput:
    """Keys typed in a shell, in base64, and the new size of its terminal, if it has changed."""

    data: str = ""
    size: ScreenSize | None = None

    def read(self) -> bytes:
        """Return the typed bytes. Raises InvalidRequestError for invalid base64, or an invalid size."""
        try:
            if self.size is not None:
                check_size(self.size)
            return base64.b64decode(self.data, validate=True)
        except (ValueError, UsageError):
            raise InvalidRequestError("the input is invalid") from None


@frozen
class UserTerminal:
    """The user's terminal: its type, as in the variable TERM, and its size."""

    term: str
    size: ScreenSize


def check_size(size: ScreenSize) -> None:
    """Raise UsageError unless the size is that of a terminal."""
    if not (0 < size.rows <= SIDE_MAX and 0 < size.columns <= SIDE_MAX):
        raise UsageError("invalid size of the terminal")


def find_node(context: Context, *, node: str) -> NodeName:
    """Find a node by the name of its cluster, which means the head, or by CLUSTER-RANK. Raises UsageError."""
    name = NodeName(cluster=node, rank=0)
    if context.store.clusters.get(node) is None and (found := re.fullmatch(r"(.+)-(\d{1,6})", node)):
        name = NodeName(cluster=found[1], rank=int(found[2]))
    get_node(find_up(context, name.cluster), name.rank)
    return name


def get_node(cluster: Cluster, rank: int) -> Node:
    """Return the node with this rank. Raises UsageError."""
    found = next((each for each in cluster.nodes if each.rank == rank), None)
    if found is None:
        raise UsageError(
            f"cluster `{cluster.name}` has no node {rank}", hints=[f"valid ranks: 0 to {len(cluster.nodes) - 1}"]
        )
    return found


def find_owned(store: Store, cluster: Cluster) -> tuple[Owned, str]:
    """Return what a cluster belongs to: the service of a replica or gateway, the managed job, or only itself."""
    if cluster.job_id is None:
        return Owned.CLUSTER, cluster.name
    service = store.services.list_jobs().get(cluster.job_id)
    return (Owned.JOB, str(cluster.job_id)) if service is None else (Owned.SERVICE, service)


def _find_own(context: Context, name: str) -> Cluster:
    """Find a cluster that is up, then compare its owner again: the name may be another user's by now."""
    found = find_up(context, name)
    context.check_owner(*find_owned(context.store, found))
    context.check_shell(found)
    return found


def run_on_node(
    context: Context,
    *,
    cluster: str,
    rank: int,
    command: tuple[str, ...],
    on_output: Callable[[ShellOutput], None],
) -> int:
    """Run a command on a node without a terminal or input, for at most an hour; return its exit code.

    Its output is passed on as it appears.
    """
    if not command:
        raise UsageError("no command was given")
    found = _find_own(context, cluster)

    def show(name: str, data: bytes) -> None:
        on_output(ShellOutput.make(data, is_error=name == "err"))

    transport = context.transport
    if not isinstance(transport, CanStream):
        raise UsageError(f"commands cannot be run on the nodes of `{cluster}`")
    run = run_with_output(
        transport, get_node(found, rank), command, timeout_s=COMMAND_S_MAX, on_output=show
    )  # fmt: skip
    return asyncio.run(context.run_paid(run))


def open_shell(
    context: Context, *, cluster: str, rank: int, terminal: UserTerminal, on_output: Callable[[ShellOutput], None]
) -> int:
    """Open a shell on a node, with the input of the context's console, until it or its user ends; return its exit code.

    The first output is empty: from then on, input is read.
    """
    if not re.fullmatch(TERM, terminal.term):
        raise UsageError("invalid type of terminal")
    check_size(terminal.size)
    found = _find_own(context, cluster)
    shell = asyncio.run(context.run_paid(context.transport.open_shell(get_node(found, rank))))
    argv = (shell.argv[0], *shell.relayed_options, *shell.argv[1:])
    env = {"TERM": terminal.term, "LANG": "C.UTF-8", **shell.env}
    return context.console.run(
        argv, env=env, folder=shell.folder, size=terminal.size, on_output=lambda data: on_output(ShellOutput.make(data))
    )
