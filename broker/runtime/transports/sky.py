"""The way to a node behind SkyPilot: ssh by the file that SkyPilot wrote, through whatever proxy it names."""

from __future__ import annotations

import hashlib
from pathlib import Path

from broker.clock import Clock
from broker.config import Config
from broker.errors import StateError
from broker.runtime.keys import Keys
from broker.runtime.transports.ssh import PATIENCE_S, SshTransport
from broker.runtime.transports.ssh_options import (
    ALIVE_COUNT_MAX,
    ALIVE_INTERVAL_S,
    Route,
    escape,
    make_control_folder,
)
from broker.types import Node

SCHEME = "sky://"
CONNECT_S = 20  # a proxy is a program that first has to start (Kubernetes: a websocket to the API server)


def make_transport(config: Config, *, clock: Clock) -> SkyTransport:
    """For the registry."""
    return SkyTransport(config, clock=clock)


class SkyTransport(SshTransport):
    """As SshTransport, but which key a host shows is not known: SkyPilot does not look at it either."""

    def __init__(self, config: Config, *, clock: Clock, patience_s: float = PATIENCE_S) -> None:
        super().__init__(Keys(config.keys), clock=clock, patience_s=patience_s)
        self._folder = config.home / "sky" / "ssh"

    def _find(self, node: Node) -> Route:
        """Raises StateError where SkyPilot's file has not been fetched, or the handle is none of SkyPilot's."""
        name, slash, rank = node.handle.removeprefix(SCHEME).partition("/")
        if not node.handle.startswith(SCHEME) or not slash or not rank.isdigit():
            raise StateError(f"`{node.handle}` does not say where a node listens", hints=("it is `sky://NAME/RANK`",))
        path = self._folder / name
        if not path.is_file():
            raise StateError(
                f"how to reach `{name}` is not in this state folder",
                hints=("run `broker status`, which asks SkyPilot, or use the BROKER_HOME it was made with",),
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
        return Route(options=tuple(words), host=host, control=control, connect_s_max=CONNECT_S + 10.0)


def _digest(path: Path, host: str) -> str:
    """Of the file's content too: a cluster that started again listens elsewhere."""
    return hashlib.sha256(path.read_bytes() + b"\0" + host.encode()).hexdigest()[:16]
