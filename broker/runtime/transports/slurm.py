"""Reach a node of a Slurm allocation: a step of its job (`srun --overlap`), here or from the login node."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from broker.clock import Clock
from broker.config import Config
from broker.errors import TransientError
from broker.runtime.transports.machine import MachineTransport, read_site_file
from broker.sites import FILES
from broker.sites.slurm import NODE_ROOT, SlurmCluster, join_command, read_clusters
from broker.types import Node
from broker.user_files import UserFile

SCHEME = "slurm://"


def make_transport(config: Config, *, clock: Clock) -> SlurmTransport:
    """Create the transport, for the registry."""
    return SlurmTransport(config, clock=clock)


class SlurmTransport(MachineTransport):
    """Handles are `slurm://CLUSTER/JOB/HOST/NODE`."""

    def __init__(self, config: Config, *, clock: Clock) -> None:
        super().__init__(clock=clock)
        path = config.home / FILES["slurm"]
        self._file = UserFile(path, lambda: _read_clusters(path))

    def _make_argv(self, node: Node, command: Sequence[str], *, has_terminal: bool = False) -> Sequence[str]:
        name, job, host, _ = node.handle.removeprefix(SCHEME).split("/", 3)
        cluster = read_site_file(self._file).get(name)
        if cluster is None:
            raise TransientError(
                f"cluster `{name}` of node `{node.id}` is not in `slurm.yaml`",
                hints=("restore its entry until the node is terminated, or use the BROKER_HOME that launched it",),
            )
        # The step shares the job's resources: it takes no CPU, memory or card from the program.
        step = ["srun", "--overlap", "--quiet", f"--jobid={job}", "--nodes=1", "--ntasks=1", f"--nodelist={host}"]
        step += ["--mem=0", *(["--pty"] if has_terminal else ["--unbuffered"])]
        if cluster.login is None:
            return ["env", *list_removals(os.environ), *step, *command]  # noqa: TID251 - of this allocation, not of ours
        argv = cluster.login.make_argv("-t" if has_terminal else "-T")
        return [*argv, "exec " + join_command([*step, *command])]

    def _find_folder(self, node: Node) -> str:
        return f"{NODE_ROOT}/{node.id}"


def _read_clusters(path: Path) -> Mapping[str, SlurmCluster]:
    return read_clusters(path) if path.is_file() else {}


def list_removals(environment: Iterable[str]) -> list[str]:
    """Return the options of `env` that remove Slurm's variables.

    Broker may run inside an allocation of its own. With `SLURM_GPUS`, `SLURM_EXPORT_ENV` and the like, srun would
    request the GPUs and the environment of that allocation for the step, and fail.
    """
    names = [name for name in sorted(environment) if name.startswith("SLURM") and name != "SLURM_CONF"]
    return [word for name in names for word in ("-u", name)]
