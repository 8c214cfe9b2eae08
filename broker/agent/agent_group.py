"""Keep the addresses of the tasks that belong to one job group. Standard library only.

The broker sends them when every task of the group is set up, which starts `run`, and whenever they change. Programs
read them from variables (as of their start), from the file BROKER_GROUP_FILE, and by host names in /etc/hosts.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from broker.agent import agent_files
else:
    import agent_files

PEERS = "peers.json"
HOSTS = Path("/etc/hosts")
BEGIN, END = "# begin broker job group", "# end broker job group"
SAFE = re.compile(r"[A-Za-z0-9.:_-]+")


def receive(request: dict[str, Any]) -> dict[str, Any]:
    """Write the addresses for a run on this node, and the host names if the node is a machine of its own."""
    folder = agent_files.run_folder(int(request["run_id"]))
    peers = request["peers"]
    if folder.exists():
        agent_files.write_json(folder / PEERS, peers)
        if owns_machine():
            write_hosts(list_hosts(peers))
    return {}


def read_peers(folder: Path) -> dict[str, Any] | None:
    """Return the addresses; None before the group may start."""
    return agent_files.read_json(folder / PEERS)


def make_envs(folder: Path) -> dict[str, str]:
    """Return BROKER_GROUP_FILE, and for each task its addresses (one per line) and its port."""
    envs = {"BROKER_GROUP_FILE": str(folder / PEERS)}
    peers = read_peers(folder) or {}
    for task, known in peers.get("tasks", {}).items():
        name = "BROKER_GROUP_" + re.sub(r"[^A-Z0-9]", "_", str(task).upper())
        envs[name + "_IPS"] = "\n".join(known["addresses"])
        envs[name + "_PORT"] = str(known["port"] or "")
    return envs


def list_hosts(peers: dict[str, Any]) -> list[str]:
    """Return the lines of /etc/hosts, with SkyPilot's names: `TASK-RANK.GROUP`."""
    lines = []
    for task, known in sorted(peers["tasks"].items()):
        for rank, address in enumerate(known["addresses"]):
            name = "{}-{}.{}".format(task, rank, peers["group"])
            if SAFE.fullmatch(name) and SAFE.fullmatch(address):
                lines.append(f"{address} {name}")
    return lines


def owns_machine() -> bool:
    """Return whether this node is a machine of its own: nodes of the local cloud share one, and its /etc/hosts."""
    node = agent_files.read_json(agent_files.STATE / "node.json") or {}
    return bool(node.get("power_off", "file") != "file")


def write_hosts(lines: list[str], path: Path = HOSTS) -> None:
    """Replace our block of /etc/hosts in place: a container may have mounted the file. A failure is not fatal."""
    try:
        old = path.read_text(encoding="utf-8", errors="surrogateescape")
        text = replace_block(old, lines)
        if text == old:
            return
        data = text.encode("utf-8", "surrogateescape")
        if os.access(str(path), os.W_OK):
            with path.open("r+b") as file:
                if hasattr(os, "posix_fallocate"):  # a full disk must fail before the file has lost anything
                    os.posix_fallocate(file.fileno(), 0, len(data))
                file.write(data)
                file.truncate()
        else:
            subprocess.run(["sudo", "-n", "tee", str(path)], input=data, stdout=subprocess.DEVNULL, check=False)
    except OSError:
        pass  # programs still find the addresses in the file and the variables


def replace_block(text: str, lines: list[str]) -> str:
    """Return the text with our block replaced by these lines, at its end."""
    kept, is_ours = [], False
    for line in text.splitlines():
        is_ours = is_ours or line == BEGIN
        if not is_ours:
            kept.append(line)
        is_ours = is_ours and line != END
    return "".join(line + "\n" for line in [*kept, BEGIN, *lines, END])
