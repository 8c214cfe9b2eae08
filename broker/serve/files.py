"""The two files between a service's controller and its balancer, each replaced atomically by its only writer.

`routing.json` says where replicas are, and that the balancer has to stop; `load.json` says which of them are ready and
how busy they are. Either process may be killed at any time: the other continues with the last file.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import TypeVar

import msgspec

from broker.errors import StateError
from broker.frozen import frozen
from broker.state.faults import explain_os_error
from broker.types import ReadinessProbe, TlsFiles

T = TypeVar("T")


@frozen
class Backend:
    """A replica whose program runs, at `host` and `port`. A draining one gets no new requests.

    `is_encrypted`: its node answers there with TLS and admits only the balancer's certificate.
    """

    number: int
    version: int
    host: str
    port: int
    is_draining: bool = False
    is_encrypted: bool = False


@frozen
class Routing:
    """The balancer's instructions. `generation` grows with each change, so that the controller sees which one acts."""

    generation: int
    host: str
    port: int
    probe: ReadinessProbe
    backends: tuple[Backend, ...] = ()
    balancing: str = "least_load"
    stream_timeout_s: float = 120.0
    tls: TlsFiles | None = None
    is_stopped: bool = False
    shares: Mapping[int, float] = field(default_factory=dict)  # of requests, by version; the others share the rest


@frozen
class LoadWindow:
    """Responses of the last minute: rates per second, percentiles in seconds; None: no stream ended."""

    requests: int = 0
    errors: int = 0  # 5xx
    qps: float = 0.0
    prompt_tokens_s: float = 0.0
    completion_tokens_s: float = 0.0
    ttft_p50_s: float | None = None  # to the first token
    ttft_p95_s: float | None = None
    tpot_p50_s: float | None = None  # per token after it
    tpot_p95_s: float | None = None


@frozen
class ReplicaLoad:
    """The state of one replica as the balancer sees it; `since_s` is when it became ready, or stopped being so."""

    is_ready: bool
    in_flight: int
    since_s: float
    error: str = ""
    window: LoadWindow = LoadWindow()


@frozen
class Load:
    """The load of a service. `arrivals` counts requests since the balancer started, `pid` tells one from another."""

    generation: int
    time_s: float
    pid: int
    arrivals: int = 0
    in_flight: int = 0
    waiting: int = 0
    resumed: int = 0  # streams that another replica continued
    broken: int = 0  # responses that ended in the middle
    window: LoadWindow = LoadWindow()
    replicas: Mapping[int, ReplicaLoad] = field(default_factory=dict)


@frozen
class ServiceFolder:
    """The files of one service: its own folder in the state folder."""

    path: Path

    @property
    def routing(self) -> Path:
        """Replicas to send requests to; written by the controller."""
        return self.path / "routing.json"

    @property
    def load(self) -> Path:
        """Load and readiness of the replicas; written by the balancer."""
        return self.path / "load.json"

    @property
    def keys(self) -> Path:
        """API keys by their SHA-256; written by `serve keys`."""
        return self.path / "keys.json"

    @property
    def keys_lock(self) -> Path:
        """Lock of the writers of `keys.json`."""
        return self.path / "keys.lock"

    @property
    def usage(self) -> Path:
        """Usage by API key; written by the balancer."""
        return self.path / "usage.json"

    @property
    def canary(self) -> Path:
        """Version and share of the canary, if there is one."""
        return self.path / "canary.json"

    @property
    def balancer_pem(self) -> Path:
        """Key and certificate with which the balancer connects to replicas."""
        return self.path / "balancer.pem"

    @property
    def replica_pem(self) -> Path:
        """Key and certificate of the replicas."""
        return self.path / "replica.pem"

    @property
    def lock(self) -> Path:
        """Lock that the running balancer holds."""
        return self.path / "balancer.lock"

    @property
    def log(self) -> Path:
        """Output of the balancer."""
        return self.path / "balancer.log"


def write_file(path: Path, content: object) -> None:
    """Replace a file atomically. Raises StateError."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(msgspec.json.encode(content))
        aside.replace(path)
    except OSError as error:
        raise explain_os_error(error, default=path) from error


def read_file(path: Path, kind: type[T]) -> T | None:
    """Return the content; None if there is no file. Raises StateError for a damaged one."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StateError(f"cannot read {path}: {error}") from error
