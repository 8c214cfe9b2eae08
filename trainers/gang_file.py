"""The file in which broker names the node that leads an elastic run, and the present addresses of all nodes.

`BROKER_GANG_FILE` is replaced as a whole when the leader was lost, with a higher `epoch`, and when a node was replaced.
A program that continues without the first node creates `$BROKER_GANG_FILE.followed`; otherwise broker ends it when that
node is lost, and starts the next attempt.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "BROKER_GANG_FILE"
FOLLOWED_SUFFIX = ".followed"
NAMED_VARIABLE = "BROKER_ELASTIC_NAMED"  # set for workers of a run whose leader broker names


@dataclass(frozen=True, kw_only=True)
class NamedLeader:
    """The content of the file: the node of this rank leads in this epoch."""

    epoch: int
    rank: int
    addresses: tuple[str, ...]


def read_leader(variables: Mapping[str, str]) -> NamedLeader | None:
    """Return the content of the file; None without one, or if it is not readable."""
    try:
        content = json.loads(Path(variables[VARIABLE]).read_text(encoding="utf-8"))
        addresses = tuple(map(str, content["node_ips"]))
        leader = NamedLeader(epoch=int(content["epoch"]), rank=int(content["rank"]), addresses=addresses)
    except (KeyError, OSError, TypeError, ValueError, RecursionError):
        return None
    return leader if 0 <= leader.rank < len(addresses) else None


def find_epoch(variables: Mapping[str, str], node_rank: int) -> int | None:
    """Return the epoch in which the node of this rank leads; None if another one does, or it is unknown."""
    leader = read_leader(variables)
    return leader.epoch if leader is not None and leader.rank == node_rank else None


def mark_followed(variables: Mapping[str, str]) -> None:
    """Mark this program as able to continue without the first node. Without the mark, broker restarts it instead."""
    if path := variables.get(VARIABLE):
        with suppress(OSError):
            Path(path + FOLLOWED_SUFFIX).touch(mode=0o600)
