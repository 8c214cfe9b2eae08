"""One transport for clusters of every cloud: a node's handle says which way leads to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from broker.errors import TransientError
from broker.runtime.base import CanStream, Completed, Shell, Transport
from broker.runtime.streams import Stream
from broker.types import Node

DEFAULT_WAY = "local"  # whose handle is a folder


class RoutedTransport:
    """Ways are made on first use: a command on local nodes loads nothing of ssh."""

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
        return await self._choose(node).run(node, argv, timeout_s=timeout_s, stdin=stdin, env=env)

    async def put(self, node: Node, source: Path, target: str) -> None:
        await self._choose(node).put(node, source, target)

    async def open_shell(self, node: Node) -> Shell:
        return await self._choose(node).open_shell(node)

    async def open_stream(self, node: Node, argv: Sequence[str]) -> Stream:
        way = self._choose(node)
        if not isinstance(way, CanStream):
            raise TransientError(f"the way to node `{node.id}` keeps no sessions")
        return await way.open_stream(node, argv)

    def _choose(self, node: Node) -> Transport:
        scheme, separator, _ = node.handle.partition("://")
        way = scheme if separator else DEFAULT_WAY
        if way not in self._made:
            self._made[way] = self._make[way]()
        return self._made[way]
