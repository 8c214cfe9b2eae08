"""Services: how many replicas a task is served by, when a replica is ready, and what may be spent on availability."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from enum import StrEnum

from broker.frozen import frozen

GATEWAYS_MAX = 2  # of a service: replicas admit the certificates of so many


@frozen
class ReadinessProbe:
    """The request that a replica must answer with a 2xx status before it receives traffic.

    `path` empty: no request, an accepted connection is enough. This is the probe of `tcp` and `grpc`.
    """

    path: str
    initial_delay_s: float = 1200.0  # a replica that was never ready for this long has failed (SkyPilot's default)
    timeout_s: float = 15.0
    interval_s: float = 1.0
    failure_s: float = 180.0  # a replica that was ready and fails probes for this long is replaced
    post_data: str | None = None  # the body of a POST; None: the probe is a GET
    headers: Mapping[str, str] = field(default_factory=dict)


@frozen
class ReplicaPolicy:
    """Bounds and targets of the number of replicas. `replicas_max` None: the number is fixed."""

    replicas_min: int = 1
    replicas_max: int | None = None
    spare_count: int = 0
    target_qps: Mapping[str, float] = field(default_factory=dict)  # by accelerator; "" for any
    target_in_flight: float | None = None  # requests in flight per replica
    target_ttft_s: float | None = None  # 95th percentile of the time to a stream's first token
    target_tpot_s: float | None = None  # 95th percentile of the time per token after it
    ondemand_min: int = 0
    has_ondemand_fallback: bool = False
    upscale_delay_s: float = 0.0
    downscale_delay_s: float = 1200.0  # SkyPilot's default

    @property
    def has_latency_target(self) -> bool:
        """Whether streams are to keep a service level."""
        return self.target_ttft_s is not None or self.target_tpot_s is not None

    @property
    def has_target(self) -> bool:
        """Whether anything measured determines the number of replicas."""
        return bool(self.target_qps or self.target_in_flight or self.has_latency_target)


@frozen
class TlsFiles:
    """Paths of a private key and its certificate, in PEM format.

    `client_ca_path`: clients must present a certificate that this authority signed.
    """

    key_path: str
    certificate_path: str
    client_ca_path: str | None = None


class ServiceProtocol(StrEnum):
    """What clients speak; the balancer reads requests of `http` only, and passes bytes of the others on."""

    HTTP = "http"
    TCP = "tcp"
    GRPC = "grpc"


class BalancerType(StrEnum):
    """The program that clients connect to."""

    BROKER = "broker"
    HAPROXY = "haproxy"


@frozen
class GatewayPlace:
    """A location of gateways; None: any."""

    cloud: str | None = None
    region: str | None = None
    zone: str | None = None


@frozen
class GatewaySpec:
    """The machines that the balancers of a service run on: gateway 1 in the first place, 2 in the second if there is.

    `places` empty: on this machine if the replicas are local processes, else wherever it is cheapest.
    """

    count: int = 1
    places: tuple[GatewayPlace, ...] = ()
    vcpus_min: float = 2.0


@frozen
class ServiceSpec:
    """The `service` of a task. `availability` None: replicas are placed by price alone."""

    probe: ReadinessProbe | None = None  # required by `serve up`
    policy: ReplicaPolicy = ReplicaPolicy()
    port: int | None = None  # None: the only port of the task's resources
    availability: float | None = None
    balancing: str = "least_load"
    stream_timeout_s: float = 120.0  # SkyServe's default
    tls: TlsFiles | None = None
    gateway: GatewaySpec | None = None  # None: one balancer, beside the controller
    is_tls_passed: bool = False  # the program ends TLS itself; the balancer passes it on
    protocol: ServiceProtocol = ServiceProtocol.HTTP
    balancer: BalancerType = BalancerType.BROKER

    @property
    def has_keys(self) -> bool:
        """Return whether the balancer reads requests, and thus can check API keys."""
        return self.protocol is ServiceProtocol.HTTP and self.balancer is BalancerType.BROKER


class ServiceEventKind(StrEnum):
    """An event of a service; `serve/wording.py` makes sentences of it."""

    CREATED = "CREATED"
    UPDATED = "UPDATED"
    SCALED = "SCALED"
    REPLICA_STARTED = "REPLICA_STARTED"
    REPLICA_READY = "REPLICA_READY"
    REPLICA_FAILED = "REPLICA_FAILED"
    REPLICA_DRAINED = "REPLICA_DRAINED"
    ROLLED_BACK = "ROLLED_BACK"
    FAILED = "FAILED"
    CANARY_STARTED = "CANARY_STARTED"
    CANARY_ENDED = "CANARY_ENDED"
    BALANCER_STARTED = "BALANCER_STARTED"
    GATEWAY_STARTED = "GATEWAY_STARTED"
    GATEWAY_LOST = "GATEWAY_LOST"
    KEYS_MISSING = "KEYS_MISSING"
    DOWN_REQUESTED = "DOWN_REQUESTED"


class UpdateMode(StrEnum):
    """The way in which a new version replaces the old one, in SkyPilot's words."""

    ROLLING = "rolling"  # one replica at a time
    BLUE_GREEN = "blue_green"  # the old ones serve until all new ones are ready


@frozen
class Service:
    """A service: the wanted version and number of replicas, and the address of its balancer.

    With gateways, `host` and `port` are those on which gateway 1 listens on its own machine.
    """

    name: str
    uid: str
    version: int
    host: str
    port: int
    created_s: float
    mode: UpdateMode = UpdateMode.ROLLING
    wanted: int = 0  # by the autoscaler, spare ones excluded
    down_requested: bool = False
    failure: str = ""  # why no more replicas are started


@frozen
class Replica:
    """One replica: a managed job with a number that is never reused. `zone` and `is_spot`: as it was placed."""

    service: str
    number: int
    version: int
    job_id: int
    port: int
    created_s: float
    is_spot: bool | None = None  # None: as the task says
    region: str | None = None
    zone: str | None = None
    ready_s: float | None = None  # when it first was
    drained_s: float | None = None  # since then it gets no new requests
    failure: str = ""  # why it is replaced
