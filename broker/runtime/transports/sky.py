"""Reach a node behind SkyPilot: ssh with the configuration that SkyPilot wrote, including its proxy."""

from __future__ import annotations

import hashlib
from pathlib import Path

from broker.clock import Clock
from broker.config import Config
from broker.errors import StateError
from broker.runtime.keys import Keys
from broker.runtime.transports.ssh import PATIENCE_S, SshTransport
from broker.runtime.transports.ssh_options import SshRoute
from broker.sites.openssh import ALIVE_COUNT_MAX, ALIVE_INTERVAL_S, escape, make_control_folder
from broker.types import Node

SCHEME = "sky://"
CONNECT_S = 20  # a proxy is a program that must start first (Kubernetes: a websocket to the API server)


def make_transport(config: Config, *, clock: Clock) -> SkyTransport:
    """Create the transport, for the registry."""
    return SkyTransport(config, clock=clock)


class SkyTransport(SshTransport):
    """An SshTransport without known host keys: SkyPilot does not verify them either."""

    def __init__(self, config: Config, *, clock: Clock, patience_s: float = PATIENCE_S) -> None:
        super().__init__(Keys(config.keys), clock=clock, patience_s=patience_s)
        self._folder = config.home / "sky" / "ssh"

    def _find(self, node: Node) -> SshRoute:
        """Find the route. Raises StateError if SkyPilot's file was not fetched or the handle is not SkyPilot's."""
        name, slash, rank = node.handle.removeprefix(SCHEME).partition("/")
        if not node.handle.startswith(SCHEME) or not slash or not rank.isdigit():
            raise StateError(f"invalid node handle `{node.handle}`", hints=("the format is `sky://NAME/RANK`",))
        path = self._folder / name
        if not path.is_file():
            raise StateError(
                f"the ssh configuration of `{name}` is not in this state folder",
                hints=(
                    "run `broker status`, which fetches it, or use the BROKER_HOME that `{name}` was launched with",
                ),
            )
        host = name if rank == "0" else f"{name}-worker{rank}"
        control = make_control_folder() / f"sky-{_digest(path, host)}"
        pairs = {
            "BatchMode": "yes",
            "ConnectTimeout": str(CONNECT_S),
            "ServerAliveInterval": str(ALIVE_INTERVAL_S),
            "ServerAliveCountMax": str(ALIVE_COUNT_MAX),
            "ControlPath": escape(control),
            "LogLevel": "ERROR",
        }
        words = ["-F", str(path)]
        for option, value in pairs.items():
            words += ["-o", f"{option}={value}"]
        return SshRoute(options=tuple(words), host=host, control=control, connect_s_max=CONNECT_S + 10.0)


def _digest(path: Path, host: str) -> str:
    """Return a digest that covers the file's content because a restarted cluster has another address."""
    return hashlib.sha256(path.read_bytes() + b"\0" + host.encode()).hexdigest()[:16]
