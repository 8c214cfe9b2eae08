"""Start an MPI program on all nodes of a task without ssh: `python -m trainers.frameworks.mpi_launch -m my.program`.

MPICH's mpiexec runs on the first node and prints, for each node, the command of a proxy that starts the ranks
there. The commands reach the other nodes through the checkpoint folder, which all nodes share.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

from trainers import bridge

LAUNCH = "HYDRA_LAUNCH: "
WAIT_S_MAX = 600.0  # limit until the first node has written the commands
POLL_S = 0.2


def main(program: list[str]) -> int:
    """Return the exit code of mpiexec on the first node, and of the node's proxy on the others."""
    folder = bridge.checkpoint_folder() / f"mpi-attempt-{bridge.attempt():04}"
    if bridge.node_rank() == 0:
        return launch(folder, program)
    return subprocess.run(await_command(folder, bridge.node_rank()), check=False).returncode


def launch(folder: Path, program: list[str]) -> int:
    """Run mpiexec, write the commands of the other nodes' proxies, and start the first node's proxy."""
    folder.mkdir(parents=True, exist_ok=True)
    nodes = bridge.node_count()
    ranks_per_node = int(os.environ.get("RANKS_PER_NODE") or 1)
    names = ",".join(f"node-{rank}" for rank in range(nodes))  # never resolved: the proxies connect to the first node
    counts = ["-ppn", str(ranks_per_node), "-np", str(nodes * ranks_per_node)]
    # `-genvnone`: ranks inherit the environment of their own node, not the first node's.
    argv = ["mpiexec", "-launcher", "manual", "-genvnone", "-localhost", bridge.node_addresses()[0], "-hosts", names]
    mpiexec = subprocess.Popen([*argv, *counts, sys.executable, *program], stdout=subprocess.PIPE, text=True)
    assert mpiexec.stdout is not None
    proxies, place = [], 0
    for line in mpiexec.stdout:
        if not line.startswith(LAUNCH):
            if not line.startswith("HYDRA_LAUNCH_END"):
                print(line, end="", flush=True)
            continue
        command = line[len(LAUNCH) :].strip()
        if place == 0:
            proxies.append(subprocess.Popen(shlex.split(command)))
        else:
            aside = folder / f".node-{place}"
            aside.write_text(command)
            aside.replace(folder / f"node-{place}")  # atomic: readers see the whole command
        place += 1
    code = mpiexec.wait()
    for proxy in proxies:
        proxy.wait()
    return code


def await_command(folder: Path, rank: int) -> list[str]:
    """Return the command of this node's proxy. Raises SystemExit if none appears in time."""
    end_s = time.monotonic() + WAIT_S_MAX
    path = folder / f"node-{rank}"
    while not path.exists():
        if time.monotonic() > end_s:
            sys.exit(f"error: the first node wrote no command to {path}")
        time.sleep(POLL_S)
    return shlex.split(path.read_text())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
