"""Reach a node on a host of an SSH pool: log in as configured in `ssh_pools.yaml`, then use the node's machine."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from broker.clock import Clock
from broker.config import Config
from broker.errors import TransientError
from broker.runtime.transports.machine import MachineTransport, read_site_file
from broker.sites import FILES
from broker.sites.login import SshLogin
from broker.sites.pools import read_pools
from broker.types import Node
from broker.user_files import UserFile

SCHEME = "pool://"


def make_transport(config: Config, *, clock: Clock) -> PoolTransport:
    """Create the transport, for the registry."""
    return PoolTransport(config, clock=clock)


class PoolTransport(MachineTransport):
    """Handles are `pool://POOL/HOST/NODE?uid=USER`."""

    def __init__(self, config: Config, *, clock: Clock) -> None:
        super().__init__(clock=clock)
        path = config.home / FILES["ssh"]
        self._file = UserFile(path, lambda: _read_logins(path))

    def _make_argv(self, node: Node, command: Sequence[str], *, has_terminal: bool = False) -> Sequence[str]:
        key = node.handle.removeprefix(SCHEME).rpartition("/")[0]
        login = read_site_file(self._file).get(key)
        if login is None:
            raise TransientError(
                f"host `{key}` of node `{node.id}` is not in `ssh_pools.yaml`",
                hints=("restore its entry until the node is terminated, or use the BROKER_HOME that launched it",),
            )
        return [*login.make_argv("-t" if has_terminal else "-T"), "exec " + shlex.join(command)]

    def _find_folder(self, node: Node) -> str:
        return f".broker-pool/{node.id}"


def _read_logins(path: Path) -> Mapping[str, SshLogin]:
    pools = read_pools(path) if path.is_file() else {}
    return {host.key: host.login for pool in pools.values() for host in pool}
