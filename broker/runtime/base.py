"""Define the interface to a node: run a command, copy files, open a shell or a stream."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from broker.frozen import frozen
from broker.sites.openssh import Completed
from broker.types import Cluster, Node, Task

if TYPE_CHECKING:
    from broker.runtime.streams import Stream


@frozen
class Shell:
    """The command to execute in the user's terminal to get a shell on a node.

    `relayed_options` follow the program if a server executes it for a user: they disable keys with which that user
    could act as the server's own user on its machine.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]
    folder: str
    relayed_options: tuple[str, ...] = ()


class Transport(Protocol):
    """A way to reach nodes. Raises TransientError if the node cannot be reached or does not answer in time."""

    async def run(
        self,
        node: Node,
        argv: Sequence[str],
        *,
        timeout_s: float,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
    ) -> Completed:
        """Run a program on the node and return its output; a nonzero exit code is not an error."""

    async def put(self, node: Node, source: Path, target: str) -> None:
        """Copy a file or a folder's content to `target` (relative to the node's HOME); unchanged files are not sent."""

    async def open_shell(self, node: Node) -> Shell:
        """Return the command that opens an interactive shell on the node."""


@runtime_checkable
class AsksForAccess(Protocol):
    """A transport that a firewall may block.

    `renew_access` is called before giving up on a node, and returns whether to try again. It raises CloudError if the
    cloud refuses to admit this machine.
    """

    renew_access: Callable[[Node], Awaitable[bool]]


@runtime_checkable
class CanStream(Protocol):
    """A transport that supports long-lived input and output of a program."""

    async def open_stream(self, node: Node, argv: Sequence[str], *, carries_calls: bool = True) -> Stream:
        """Start the program in the node's HOME. Raises TransientError if the node cannot be reached.

        `carries_calls`: other calls to the node may use the stream's connection, if the transport keeps one. A program
        that exits at once ends the stream. The program's input closes with this process, however it dies.
        """
        ...


class GrantsAccess(Protocol):
    """Creates the files that give nodes access to a task's buckets: the request of the agent's verb `access`."""

    async def grant(self, cluster: Cluster, task: Task) -> Mapping[str, Any] | None:
        """Grant access for a run that is about to start; None if its nodes need none. Raises CloudError."""
        ...

    async def renew(self, cluster: Cluster, deliver: Callable[[Mapping[str, Any]], Awaitable[object]]) -> None:
        """Replace the files of a running task when they are due. Never raises."""
        ...
