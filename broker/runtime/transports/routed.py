"""Route calls to the transport that a node's handle names, so that one transport serves every cloud."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from broker.errors import TransientError
from broker.runtime.base import CanStream, Shell, Transport
from broker.runtime.streams import Stream
from broker.sites.openssh import Completed
from broker.types import Node

DEFAULT_SCHEME = "local"  # its handles are folders


class RoutedTransport:
    """A transport that creates others on first use: a command on local nodes does not import ssh."""

    def __init__(self, make: Mapping[str, Callable[[], Transport]]) -> None:
        self._make = make
        self._made: dict[str, Transport] = {}

    async def run(
        self,
        node: Node,
        argv: Sequence[str],
        *,
        timeout_s: float,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
    ) -> Completed:
        """Run through the transport that the node's handle names."""
        return await self._choose(node).run(node, argv, timeout_s=timeout_s, stdin=stdin, env=env)

    async def put(self, node: Node, source: Path, target: str) -> None:
        """Copy through the transport that the node's handle names."""
        await self._choose(node).put(node, source, target)

    async def open_shell(self, node: Node) -> Shell:
        """Open a shell through the transport that the node's handle names."""
        return await self._choose(node).open_shell(node)

    async def open_stream(self, node: Node, argv: Sequence[str], *, carries_calls: bool = True) -> Stream:
        """Open a session. Raises TransientError if the node's transport has none."""
        transport = self._choose(node)
        if not isinstance(transport, CanStream):
            raise TransientError(f"the transport to node `{node.id}` does not support sessions")
        return await transport.open_stream(node, argv, carries_calls=carries_calls)

    def _choose(self, node: Node) -> Transport:
        scheme, separator, _ = node.handle.partition("://")
        name = scheme if separator else DEFAULT_SCHEME
        if name not in self._made:
            self._made[name] = self._make[name]()
        return self._made[name]
