"""The two files between a service's controller and its balancer, each replaced atomically by its only writer.

`routing.json` says where replicas are, and whether the balancer must stop; `load.json` says which of them are ready and
how busy they are. Either process may be killed at any time: the other continues with the last file.

A gateway has a folder of the same form on its own machine, whose files the controller pushes and reads.
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
from broker.types import BalancerType, ReadinessProbe, ServiceProtocol, TlsFiles
from broker.types.service import reads_requests

T = TypeVar("T")


@frozen
class Backend:
    """A replica whose program runs, at `host` and `port`. A draining one gets no new requests.

    One that is leaving has a preemption notice: it gets new requests only if all others are leaving as well.
    `is_encrypted`: its node answers there with TLS and admits only the balancer's certificate. A replica with twice the
    `capacity` of another is as busy with twice its load.
    """

    number: int
    version: int
    host: str
    port: int
    is_draining: bool = False
    is_leaving: bool = False
    is_encrypted: bool = False
    capacity: float = 1.0
    region: str = ""  # `CLOUD/REGION`; empty: unknown
    program: str = ""  # a digest of what it runs; versions may differ in the rest, such as the number of replicas

    def is_like(self, other: Backend) -> bool:
        """Return whether it serves the same model as another one: of the same version, or with the same program."""
        return self.version == other.version or self.program == other.program


@frozen
class Routing:
    """The balancer's instructions. `generation` increases with each change: the controller sees which is in effect."""

    generation: int
    host: str
    port: int
    probe: ReadinessProbe
    probes: Mapping[int, ReadinessProbe] = field(default_factory=dict)  # of versions with another one
    backends: tuple[Backend, ...] = ()
    balancing: str = "least_load"
    stream_timeout_s: float = 120.0
    tls: TlsFiles | None = None
    is_stopped: bool = False
    shares: Mapping[int, float] = field(default_factory=dict)  # of requests, by version; other versions share the rest
    balancers: int = 1  # among which the limits per minute of API keys are divided
    protocol: ServiceProtocol = ServiceProtocol.HTTP
    balancer: BalancerType = BalancerType.BROKER
    is_tls_passed: bool = False
    region: str = ""  # the balancer's region, as in `Backend`; replicas there come first
    near_in_flight_max: float = 0.0  # requests in flight up to which a replica in that region is preferred
    has_json_logs: bool = False  # as `log_format` says; read when the balancer starts
    failure: str = ""  # why no more replicas are started; empty while they are

    def find_probe(self, version: int) -> ReadinessProbe:
        """Return the probe of a version: another one may serve another model, or at another path."""
        return self.probes.get(version, self.probe)

    @property
    def can_check_keys(self) -> bool:
        """Whether the balancer reads requests, and can therefore check API keys."""
        return reads_requests(self.protocol, self.balancer)


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


FIRST_TOKEN_BOUNDS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
REQUEST_BOUNDS_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


@frozen
class DurationCounts:
    """Durations by ascending bounds: one count for each bound, and one for longer ones. Empty: none was counted."""

    counts: tuple[int, ...] = ()
    sum_s: float = 0.0


@frozen
class LoadTotals:
    """Responses since the balancer started, which only grow. `responses` is by status code."""

    responses: Mapping[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    first_token: DurationCounts = DurationCounts()  # of streams, by `FIRST_TOKEN_BOUNDS_S`
    request: DurationCounts = DurationCounts()  # until the end of the response, by `REQUEST_BOUNDS_S`


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
    """The load at one balancer. `arrivals` counts requests since it started, `pid` distinguishes them.

    The load of a service with gateways is the sum of theirs (`merging.py`); its `pid` is 0.
    """

    generation: int
    time_s: float
    pid: int
    arrivals: int = 0
    in_flight: int = 0
    waiting: int = 0
    resumed: int = 0  # streams that another replica continued
    broken: int = 0  # responses that ended in the middle
    window: LoadWindow = LoadWindow()
    totals: LoadTotals = LoadTotals()
    replicas: Mapping[int, ReplicaLoad] = field(default_factory=dict)
    certificate_ends_s: float | None = None  # when the one that clients get expires; None: without one


@frozen
class GatewayBook:
    """The newest load that each gateway reported, by its number; times are by the controller's clock.

    `ended` has the responses of earlier balancers under that number.
    """

    loads: Mapping[int, Load] = field(default_factory=dict)
    ended: Mapping[int, LoadTotals] = field(default_factory=dict)


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
        """Usage by API key; written by the balancer, with gateways by the controller."""
        return self.path / "usage.json"

    @property
    def other_usage(self) -> Path:
        """Usage by API key at the other gateways; pushed by the controller."""
        return self.path / "other-usage.json"

    @property
    def gateways(self) -> Path:
        """Loads of the gateways; written by the controller."""
        return self.path / "gateways.json"

    def gateway_usage(self, number: int) -> Path:
        """Return the path of the usage at one gateway; written by the controller, for a machine that replaces it."""
        return self.path / f"usage-{number}.json"

    def gateway_pem(self, number: int) -> Path:
        """Return the path of the key and certificate with which a gateway connects to replicas."""
        return self.path / f"gateway-{number}.pem"

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


def encode(content: object) -> bytes:
    """Return the text of a file."""
    return msgspec.json.encode(content)


def write_file(path: Path, content: object) -> None:
    """Replace a file atomically. Raises StateError."""
    write_bytes(path, encode(content))


def write_bytes(path: Path, content: bytes) -> None:
    """Replace a file atomically by these bytes, mode 0600. Raises StateError."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(content)
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
