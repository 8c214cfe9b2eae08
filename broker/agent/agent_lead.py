"""Start the coordinator of a gang on this node: the first one, or the successor of one that was lost.

Standard library only.
"""

from __future__ import annotations

import os
import socket
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from broker.agent import agent_files, agent_gang, agent_head, agent_health, agent_link, agent_network, agent_wire

    Message = dict[str, Any]  # not evaluated on the nodes, which may have Python 3.8
else:
    import agent_files
    import agent_gang
    import agent_head
    import agent_health
    import agent_link
    import agent_network
    import agent_wire


def coordinate(
    folder: Path,
    spec: Message,
    listener: socket.socket,
    *,
    epoch: int = 0,
    survivors: frozenset[int] | None = None,
) -> agent_gang.Coordinator:
    """Coordinate a gang at this listener, and record where."""
    address, port = listener.getsockname()[:2]
    rank = int(spec["rank"])
    if address in agent_link.ANY:
        print(f"{spec['node_ips'][rank]} is not an address of this machine: listening on all", file=sys.stderr)
    coordinator = agent_gang.Coordinator(
        listener,
        context=agent_wire.make_context(folder / agent_files.CREDENTIAL, is_server=True),
        num_nodes=int(spec["num_nodes"]),
        log=folder / "log",
        nodes_min=spec.get("nodes_min"),
        is_held=bool(spec.get("is_held")) and survivors is None,
        rank=rank,
        epoch=epoch,
        survivors=survivors,
        survey=agent_network.make_survey(spec, agent_health.read_order(spec), folder),
    )
    coordinator.start()
    agent_head.record_served(folder, epoch, agent_link.find_own(address), int(port))
    return coordinator


def take_over(folder: Path, spec: Message, head: Message) -> agent_gang.Coordinator | None:
    """Coordinate the remaining ranks after the loss of a head; return None if this node cannot listen.

    The merged log continues at the offset up to which the broker has copied the last head's.
    """
    try:
        listener = agent_link.listen(str(head["node_ips"][int(spec["rank"])]), int(spec["num_nodes"]))
    except OSError as error:
        print(f"cannot coordinate: {error}", file=sys.stderr)
        return None
    log = folder / "log"
    if not log.exists():
        log.touch(mode=0o600)
        os.truncate(str(log), int(head.get("log_bytes") or 0))
    survivors = frozenset(int(rank) for rank in head.get("members") or ())
    return coordinate(folder, spec, listener, epoch=int(head["epoch"]), survivors=survivors)
