"""The seam to a node: run a command on it, put files on it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from broker.nouns import noun
from broker.types import Cluster, Node, Task

if TYPE_CHECKING:
    from broker.runtime.streams import Stream


@noun
class Completed:
    returncode: int
    stdout: bytes
    stderr: bytes


@noun
class Shell:
    """What to execute in the user's own terminal to stand on a node."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    folder: str


class Transport(Protocol):
    """Raises TransientError when the node cannot be reached or does not answer in time."""

    async def run(
        self,
        node: Node,
        argv: Sequence[str],
        *,
        timeout_s: float,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
    ) -> Completed: ...

    async def put(self, node: Node, source: Path, target: str) -> None:
        """Copy a file or a folder's content to `target` (relative to the node's HOME); unchanged files stay."""

    async def open_shell(self, node: Node) -> Shell: ...


@runtime_checkable
class AsksForAccess(Protocol):
    """A transport that a firewall may keep out. `renew_access` is called before a node is given up; True: try again."""

    renew_access: Callable[[Node], Awaitable[bool]]


@runtime_checkable
class CanStream(Protocol):
    """A transport that can keep a program's input and output open."""

    async def open_stream(self, node: Node, argv: Sequence[str]) -> Stream:
        """Start the program in the node's HOME. Raises TransientError when the node cannot be reached; a program that
        ends at once is an end of the stream. The program's input ends when this process does, however it dies."""
        ...


class GrantsAccess(Protocol):
    """Makes the files by which nodes reach a task's buckets: what the agent's verb `access` is asked with."""

    async def grant(self, cluster: Cluster, task: Task) -> Mapping[str, Any] | None:
        """For a run that is about to start; None where its nodes need none. Raises CloudError."""
        ...

    async def renew(self, cluster: Cluster, deliver: Callable[[Mapping[str, Any]], Awaitable[object]]) -> None:
        """For what runs there, where the old files are due to be replaced. Raises nothing."""
        ...
