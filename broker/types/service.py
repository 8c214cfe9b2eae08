"""Services: the number of replicas of a task, the readiness of a replica, and the settings for availability."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from enum import StrEnum

from broker.frozen import frozen

GATEWAYS_MAX = 2  # of a service: replicas accept the certificates of this many


@frozen
class ReadinessProbe:
    """The request that a replica must answer with a 2xx status before it receives traffic.

    An empty `path` means that no request is made, and an accepted connection is enough; `tcp` and `grpc` use this
    probe.
    """

    path: str
    initial_delay_s: float = 1200.0  # a replica that is not ready within this time has failed (SkyPilot's default)
    timeout_s: float = 15.0
    interval_s: float = 1.0
    failure_s: float = 180.0  # a ready replica that then fails probes for this time is replaced
    post_data: str | None = None  # the body of a POST; None: the probe is a GET
    headers: Mapping[str, str] = field(default_factory=dict)


@frozen
class ReplicaPolicy:
    """Bounds and targets for the number of replicas. `replicas_max` None: the number is fixed."""

    replicas_min: int = 1
    replicas_max: int | None = None
    spare_count: int = 0
    target_qps: Mapping[str, float] = field(default_factory=dict)  # by accelerator; "" for any
    target_in_flight: float | None = None  # requests in flight per replica
    target_ttft_s: float | None = None  # 95th percentile of the time to a stream's first token
    target_tpot_s: float | None = None  # 95th percentile of the time per token after the first
    is_predictive: bool = False  # a rising load is continued by the time that a replica needs to start
    ondemand_min: int = 0
    has_ondemand_fallback: bool = False
    upscale_delay_s: float = 0.0
    downscale_delay_s: float = 1200.0  # SkyPilot's default

    @property
    def has_latency_target(self) -> bool:
        """Whether streams have a latency target."""
        return self.target_ttft_s is not None or self.target_tpot_s is not None

    @property
    def has_target(self) -> bool:
        """Whether measurements determine the number of replicas."""
        return bool(self.target_qps or self.target_in_flight or self.has_latency_target)


@frozen
class TlsFiles:
    """Paths of a private key and its certificate, in PEM format.

    `client_ca_path`: clients must present a certificate signed by this authority.
    """

    key_path: str
    certificate_path: str
    client_ca_path: str | None = None


class ServiceProtocol(StrEnum):
    """The protocol of clients; the balancer only reads requests of `http`, and forwards other bytes."""

    HTTP = "http"
    TCP = "tcp"
    GRPC = "grpc"


class BalancerType(StrEnum):
    """The program that chooses the replica of each request."""

    BROKER = "broker"
    HAPROXY = "haproxy"
    SMG = "smg"
    VLLM_ROUTER = "vllm-router"

    @property
    def is_router(self) -> bool:
        """Return whether an inference router chooses the replicas, behind broker's own balancer."""
        return self in (BalancerType.SMG, BalancerType.VLLM_ROUTER)


def reads_requests(protocol: ServiceProtocol, balancer: BalancerType) -> bool:
    """Return whether a balancer reads requests, instead of passing bytes or connections on."""
    return protocol is ServiceProtocol.HTTP and balancer is not BalancerType.HAPROXY


@frozen
class GatewayPlace:
    """A location of gateways; None: any."""

    cloud: str | None = None
    region: str | None = None
    zone: str | None = None


@frozen
class GatewaySpec:
    """The machines that run the balancers of a service: gateway 1 in the first place, gateway 2 in the second, if any.

    If `places` is empty: on this machine if the replicas are local processes, else in the cheapest location.
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
    gateway: GatewaySpec | None = None  # None: one balancer, next to the controller
    is_tls_passed: bool = False  # the program terminates TLS itself; the balancer forwards it
    protocol: ServiceProtocol = ServiceProtocol.HTTP
    balancer: BalancerType = BalancerType.BROKER

    @property
    def can_check_keys(self) -> bool:
        """Whether the balancer reads requests, and can therefore check API keys."""
        return reads_requests(self.protocol, self.balancer)


class ServiceEventKind(StrEnum):
    """The kinds of events of a service; `serve/wording.py` renders them as sentences."""

    CREATED = "CREATED"
    UPDATED = "UPDATED"
    SCALED = "SCALED"
    REPLICA_STARTED = "REPLICA_STARTED"
    REPLICA_READY = "REPLICA_READY"
    # Derived from the events of a replica's job when they are listed; never stored
    REPLICA_NOTICED = "REPLICA_NOTICED"
    REPLICA_LOST = "REPLICA_LOST"
    REPLICA_RESTARTED = "REPLICA_RESTARTED"
    REPLICA_RECOVERING = "REPLICA_RECOVERING"
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
    CERTIFICATE_EXPIRES = "CERTIFICATE_EXPIRES"
    DOWN_REQUESTED = "DOWN_REQUESTED"


class UpdateMode(StrEnum):
    """The way in which a new version replaces the old one, with SkyPilot's names."""

    ROLLING = "rolling"  # one replica at a time
    BLUE_GREEN = "blue_green"  # the old replicas serve until all new ones are ready


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
    wanted: int = 0  # set by the autoscaler, without spare ones
    down_requested: bool = False
    failure: str = ""  # the reason why no more replicas are started


@frozen
class Replica:
    """One replica: a managed job with a number that is never reused. `zone` and `is_spot`: as placed."""

    service: str
    number: int
    version: int
    job_id: int
    port: int
    created_s: float
    is_spot: bool | None = None  # None: as specified by the task
    region: str | None = None
    zone: str | None = None
    ready_s: float | None = None  # time when its program became ready; after a preemption, that of its next program
    drained_s: float | None = None  # time since which it receives no new requests
    failure: str = ""  # the reason why it is replaced
