"""Know which node coordinates an elastic gang, even after the first one is lost. Standard library only.

`gang.json` in the run's folder names the head: {epoch, rank, address, port, node_ips}. The broker replaces it through
the verb `head`, always with a higher epoch when another node takes over, so a head that was only cut off is refused by
every member that knows its successor. Programs find the file by BROKER_GANG_FILE; one that continues without the first
node creates `gang.json.followed` beside it. Without that mark, the loss of the head ends the program at once.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False  # `typing` would take a tenth of the time of a request
if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

    from broker.agent import agent_files

    Message = dict[str, Any]  # not evaluated on the nodes, which may have Python 3.8
else:
    import agent_files

GANG = "gang.json"
FOLLOWED = "gang.json.followed"
COORDINATOR = "coordinator.json"  # {epoch, port}: what the runner of this node serves


def read_head(folder: Path) -> Message:
    """Return the head that this node knows of; {} before the run was submitted."""
    return agent_files.read_json(folder / GANG) or {}


def is_head(folder: Path, spec: Message) -> bool:
    """Return whether this node coordinates its gang, as far as it knows."""
    return int(spec.get("rank", -1)) == int(read_head(folder).get("rank", 0))


def read_port(folder: Path) -> int | None:
    """Return the port at which the head coordinates; None until it does."""
    port = read_head(folder).get("port")
    return None if port is None else int(port)


def is_followed(folder: Path) -> bool:
    """Return whether the program on this node continues when the head moves."""
    return (folder / FOLLOWED).exists()


def describe(folder: Path) -> Message:
    """Return the fields of a status report: the head by this node's knowledge, and whether its program follows it."""
    head = read_head(folder)
    return {"head_epoch": head.get("epoch", 0), "head_rank": head.get("rank", 0), "is_followed": is_followed(folder)}


def record_first(folder: Path, spec: Message) -> None:
    """Record the head that a submission names. Only called before the runner starts."""
    head = spec["head"]
    fields = {"epoch": head.get("epoch", 0), "rank": head.get("rank", 0), "address": head["address"]}
    agent_files.write_json(
        folder / GANG, {**fields, "port": head.get("coordinator_port"), "node_ips": spec["node_ips"]}
    )


def receive(request: Message) -> Message:
    """Record the head of a run, unless this node knows a newer one; return {epoch, port}.

    `port` is where this node coordinates at the requested epoch, or None. A request without a port asks the named node
    to take over; its runner needs a moment, so the broker repeats the call. Equal calls change nothing. With an epoch
    that is known, only the addresses of the nodes may change.
    """
    folder = agent_files.run_folder(int(request["run_id"]))
    if not (folder / "spec.json").exists():
        return {"epoch": -1, "port": None}
    lock = agent_files.wait_lock(folder / "head.lock")
    try:
        known = read_head(folder)
        epoch, rank = int(request["epoch"]), int(request["rank"])
        known_epoch = int(known.get("epoch", 0))
        if epoch < known_epoch or (epoch == known_epoch and rank != int(known.get("rank", 0))):
            return {"epoch": known_epoch, "port": None}
        new = {
            key: request.get(key) for key in ("epoch", "rank", "address", "port", "node_ips", "members", "log_bytes")
        }
        if epoch == known_epoch:  # the first answer stays
            new = {**new, **{key: value for key, value in known.items() if value is not None and key != "node_ips"}}
        if new != known:
            agent_files.write_json(folder / GANG, new)
    finally:
        os.close(lock)
    served = agent_files.read_json(folder / COORDINATOR) or {}
    return {"epoch": epoch, "port": served.get("port") if served.get("epoch") == epoch else None}


def find_own(folder: Path, head: Message) -> str:
    """Return the address at which this node reaches the coordinator that it serves."""
    served = agent_files.read_json(folder / COORDINATOR) or {}
    return str(served.get("address") or head["address"])


def record_served(folder: Path, epoch: int, address: str, port: int) -> None:
    """Record where this node coordinates, for the verb `head` and for its own runner."""
    agent_files.write_json(folder / COORDINATOR, {"epoch": epoch, "port": port, "address": address})


def record_port(folder: Path, epoch: int) -> None:
    """Complete the record of a head that this node has become, unless a newer one is known already."""
    served = agent_files.read_json(folder / COORDINATOR) or {}
    lock = agent_files.wait_lock(folder / "head.lock")
    try:
        known = read_head(folder)
        if int(known.get("epoch", 0)) == epoch == served.get("epoch"):
            agent_files.write_json(folder / GANG, {**known, "port": served["port"]})
    finally:
        os.close(lock)
