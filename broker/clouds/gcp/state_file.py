"""A file of the nodes that this installation has seen at Google, which forgets a deleted instance at once.

It lies next to the state, so that later commands know these nodes too. It is an aid, not a record: without it, a node
counts as gone only after it has been missing for long.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from broker.errors import TransientError
from broker.locks import hold_lock
from broker.types import Node, NodeState

KEEP_ENDED_S = 3600.0  # as EC2, which lists a terminated instance for about an hour


class GcpStateFile:
    """Nodes in a file, because Google removes deleted instances from its lists at once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / "nodes.json"

    def read(self) -> Mapping[str, Node]:
        """Return nodes by id; empty if the file is missing or damaged.

        Raises TransientError if it cannot be read now, as without a free descriptor: `note` would replace it.
        """
        try:
            return {node.id: node for node in msgspec.json.decode(self._path.read_bytes(), type=list[Node])}
        except (FileNotFoundError, msgspec.DecodeError, msgspec.ValidationError):
            return {}
        except OSError as error:
            raise TransientError(f"cannot read {self._path}: {error.strerror}") from error

    def note(self, nodes: Sequence[Node], *, now_s: float) -> None:
        """Record the current state of these nodes. An end is never revoked, and is forgotten after an hour."""
        if not nodes:
            return
        with hold_lock(self._folder / "lock"):
            recorded = dict(self.read())
            for node in nodes:
                before = recorded.get(node.id)
                if before is None or before.state is not NodeState.TERMINATED:
                    recorded[node.id] = node
            kept = [
                node for node in recorded.values() if now_s - (node.ended_s or now_s) < KEEP_ENDED_S or _lives(node)
            ]
            aside = self._path.with_suffix(f".{os.getpid()}")
            with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(msgspec.json.encode(kept))
            aside.replace(self._path)


def _lives(node: Node) -> bool:
    return node.state is not NodeState.TERMINATED
