"""Build the variables for a run's setup and program. Standard library only."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from broker.agent import (
        agent_access,
        agent_container,
        agent_files,
        agent_group,
        agent_head,
        agent_limits,
        agent_paths,
        agent_turn,
    )
else:
    import agent_access
    import agent_files
    import agent_group
    import agent_head
    import agent_limits
    import agent_paths
    import agent_turn


def make_envs(
    spec: dict[str, Any],
    folder: Path,
    *,
    mark: str,
    held: dict[str, Any] | None,
    container: agent_container.Container | None,
) -> dict[str, str]:
    """Return the variables that we set, which override those of the node or container. `mark` is a `NAME=value`."""
    ips: list[str] = spec["node_ips"]
    env: dict[str, str] = {"PYTHONUNBUFFERED": "1"}  # so that the log shows a print at once; SkyPilot sets it as well
    if container:
        env["HOME"] = str(agent_files.HOME)
    is_local = all(ip.startswith("127.") for ip in ips)
    if not float(spec["gpus_per_node"]) and (threads := count_threads(is_local=is_local)):
        env["OMP_NUM_THREADS"] = threads
    if is_local:
        env["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform.startswith("linux") else "lo0"
    env.update(agent_access.read_envs(int(spec["run_id"])))  # the task's own variables win
    env.update(agent_turn.name_cards(held, spec, {} if container else os.environ))
    env.update(spec["envs"])
    env.update(spec["secrets"])
    name, _, value = mark.partition("=")
    of_node = {
        "NODE_RANK": str(spec["rank"]),
        "NODE_IPS": "\n".join(ips),
        "NUM_GPUS_PER_NODE": str(math.ceil(float(spec["gpus_per_node"]))),
    }
    for key, each in of_node.items():
        env.update({f"SKYPILOT_{key}": each, f"SKYPILOT_SETUP_{key}": each})  # the latter for `setup`, in SkyPilot
    env.update(
        {
            name: value,
            "SKYPILOT_NUM_NODES": str(spec["num_nodes"]),
            "SKYPILOT_INTERNAL_JOB_ID": str(spec["run_id"]),
            "BROKER_MASTER_PORT": str(spec["head"]["master_port"]),
            "BROKER_PROGRESS_FILE": str(folder / "progress.jsonl"),
            "BROKER_PREEMPTION_FILE": str(folder / "preemption"),
            "BROKER_GANG_PEM": str(folder / agent_files.CREDENTIAL),
            "BROKER_GANG_FILE": str(folder / agent_head.GANG),
        }
    )
    if spec.get("nodes_min"):
        env["BROKER_NODES_MIN"] = str(spec["nodes_min"])
    if spec.get("trainers"):
        env["BROKER_PYTHON"] = str(agent_paths.find_python_folder(container))
    return {**env, **agent_group.make_envs(folder)} if spec.get("is_held") else env


def count_threads(*, is_local: bool, proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> str:
    """Return the number of threads for libraries, which `nproc` prints as well; "" for all processors of the node.

    Nodes of the local cloud share one machine. In a pod, libraries see the processors of the host, not the limit.
    """
    if "OMP_NUM_THREADS" in os.environ or is_local:
        return os.environ.get("OMP_NUM_THREADS", "1")
    cpu = agent_limits.Groups(proc, groups).read_cpu()
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return str(max(1, math.floor(cpu.processors))) if cpu is not None and cpu.processors < count else ""
