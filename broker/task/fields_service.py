"""The fields of `service`, and those of `pool`, which are parsed to find typos, and then reported as unsupported."""

from __future__ import annotations

from broker.task.fields_places import Infra
from broker.task.measures import Seconds
from broker.task.shapes import Anything, Choice, Either, Flag, ListOf, MapOf, Number, Text, Whole
from broker.task.tables import Field, Later, Table
from broker.types import (
    GATEWAYS_MAX,
    BalancerType,
    ReadinessProbe,
    ReplicaPolicy,
    ServiceProtocol,
    ServiceSpec,
)

PASSTHROUGH = "passthrough"
INSTANCE_AWARE = "instance_aware_least_load"

_SECONDS = Seconds()
_RATE = Number(above=None)

READINESS_PROBE = Table(
    name="readiness_probe",
    about="Readiness check of a replica.",
    fields={
        "path": Field(shape=Text(), about="URL path; required with `protocol: http`.", examples=("/health",)),
        "initial_delay_seconds": Field(
            shape=_SECONDS,
            about="Time in which a started replica must become ready; otherwise it is replaced (default: "
            f"{ReadinessProbe.initial_delay_s:g}).",
        ),
        "timeout_seconds": Field(shape=_SECONDS, about=f"Response timeout (default: {ReadinessProbe.timeout_s:g})."),
        "endpoint_probe_interval_seconds": Field(
            shape=_SECONDS, about=f"Time between probes (default: {ReadinessProbe.interval_s:g})."
        ),
        "consecutive_failure_threshold_timeout": Field(
            shape=_SECONDS,
            about="Time for which probes may fail before the replica counts as failed (default: "
            f"{ReadinessProbe.failure_s:g}).",
        ),
        "post_data": Field(
            shape=Either(shapes=(Text(), MapOf(value=Anything()))), about="Request body; makes the probe a POST."
        ),
        "headers": Field(shape=MapOf(value=Text()), about="HTTP headers."),
    },
)
REPLICA_POLICY = Table(
    name="replica_policy",
    about="Number of replicas, by load.",
    fields={
        "min_replicas": Field(shape=Whole(), about="Minimum number of replicas.", is_required=True, examples=(1,)),
        "max_replicas": Field(shape=Whole(), about="Maximum number of replicas (default: `min_replicas`)."),
        "num_overprovision": Field(shape=Whole(), about="Spare replicas (default: 0)."),
        "target_qps_per_replica": Field(
            shape=Either(shapes=(_RATE, MapOf(value=_RATE))),
            about="Target queries per second per replica: a number, or a mapping by accelerator "
            "(`{H100: 3, A100:8: 10}`), of which the lowest applies to all others.",
        ),
        "target_requests_in_flight_per_replica": Field(
            shape=Number(above=0), about="Target requests in flight per replica (broker extension)."
        ),
        "target_ttft_seconds": Field(
            shape=Number(above=0),
            about="Target 95th percentile of the time to a stream's first token (broker extension).",
        ),
        "target_tpot_seconds": Field(
            shape=Number(above=0),
            about="Target 95th percentile of the time per output token of a stream (broker extension).",
        ),
        "predictive_scaling": Field(
            shape=Flag(),
            about="Add replicas ahead of a rising load, by the time that they need to start (broker extension).",
        ),
        "dynamic_ondemand_fallback": Field(shape=Flag(), about="Use on-demand replicas while spot is unavailable."),
        "base_ondemand_fallback_replicas": Field(
            shape=Whole(), about="Number of replicas that are always on-demand (default: 0)."
        ),
        "spot_placer": Field(shape=Choice(words=("dynamic_fallback",)), about="Placement of spot replicas."),
        "upscale_delay_seconds": Field(
            shape=_SECONDS, about=f"Delay before scaling up (default: {ReplicaPolicy.upscale_delay_s:g})."
        ),
        "downscale_delay_seconds": Field(
            shape=_SECONDS, about=f"Delay before scaling down (default: {ReplicaPolicy.downscale_delay_s:g})."
        ),
    },
    retired={
        "qps_upper_threshold": "write `target_qps_per_replica`",
        "qps_lower_threshold": "write `target_qps_per_replica`",
        "auto_restart": "remove it: replicas are always restarted",
        "spot_policy": "write `dynamic_ondemand_fallback: true`",
        "spot_mixer": "write `dynamic_ondemand_fallback: true`",
    },
)
TLS = Table(
    name="tls",
    about="Certificates of the load balancer.",
    fields={
        "keyfile": Field(shape=Text(), about="Private key file.", is_required=True),
        "certfile": Field(shape=Text(), about="Certificate file.", is_required=True),
        "cafile": Field(
            shape=Text(),
            about="Certificate authority that must have signed client certificates (broker extension).",
        ),
    },
)
BALANCER = Table(
    name="balancer",
    about="The program that chooses the replica of each request (broker extension).",
    fields={
        "type": Field(
            shape=Choice(words=tuple(BalancerType)),
            about="`broker`: broker's own (default). `haproxy`, `smg`, `vllm-router`: these programs, which must be "
            "installed.",
            is_required=True,
            examples=("haproxy",),
        )
    },
)
GATEWAY = Table(
    name="gateway",
    about="Separate machines for the load balancer (broker extension).",
    fields={
        "count": Field(
            shape=Whole(minimum=1, maximum=GATEWAYS_MAX),
            about="Number of gateways, each with a load balancer.",
            examples=(2,),
        ),
        "infra": Field(
            shape=Either(shapes=(Infra(), ListOf(item=Infra(), count_min=1))),
            about="Location, or a list with one location per gateway (default: the cheapest; with local replicas, this "
            "machine).",
            examples=("aws/us-east-1",),
        ),
        "cpus": Field(shape=Number(above=0, at_most=1_000), about="Minimum number of vCPUs (default: 2)."),
    },
)
POOL = Table(
    name="pool",
    about="A pool of workers for managed jobs.",
    fields={
        "workers": Field(shape=Whole(), about="Number of workers."),
        "min_workers": Field(shape=Whole(), about="Minimum number of workers."),
        "max_workers": Field(shape=Whole(), about="Maximum number of workers."),
        "queue_length_threshold": Field(shape=Whole(minimum=1), about="Waiting jobs before a worker is added."),
        "upscale_delay_seconds": Field(shape=_SECONDS, about="Delay before scaling up."),
        "downscale_delay_seconds": Field(shape=_SECONDS, about="Delay before scaling down."),
    },
    retired={"spot_placer": "remove it: placements are chosen by expected cost"},
)
_POOLS = Later(
    message="worker pools are not supported", hint="launch one managed job per worker", applies=lambda value: True
)
SERVICE = Table(
    name="service",
    bare="readiness_probe",
    about="Serve the task behind a load balancer.",
    fields={
        "readiness_probe": Field(
            shape=Either(shapes=(Text(), READINESS_PROBE)), about="URL path, or a mapping.", examples=("/health",)
        ),
        "replicas": Field(shape=Whole(), about="Fixed number of replicas (default: 1)."),
        "replica_policy": Field(shape=REPLICA_POLICY, about="Autoscaling policy."),
        "ports": Field(
            shape=Whole(minimum=1, maximum=65535), about="Port of the replicas (default: the only one of `resources`)."
        ),
        "availability": Field(
            shape=Number(above=0, at_most=0.9999),
            about="Share of time with all requested replicas ready; determines the mix of spot and on-demand replicas "
            "(broker extension).",
            examples=(0.99,),
        ),
        "workers": Field(shape=Whole(), about="Number of workers in a pool.", later=_POOLS),
        "pool": Field(shape=POOL, about="Policy of a pool.", later=_POOLS),
        "load_balancer": Field(
            shape=Table(
                name="load_balancer",
                about="The load balancer.",
                fields={
                    "stream_timeout_seconds": Field(
                        shape=_SECONDS,
                        about=f"Maximum silence in a stream (default: {ServiceSpec.stream_timeout_s:g}).",
                    )
                },
            ),
            about="The load balancer.",
        ),
        "load_balancing_policy": Field(
            shape=Choice(words=("round_robin", "least_load", INSTANCE_AWARE, "prefix_affinity")),
            about=f"Load-balancing policy (default: `{ServiceSpec.balancing}`); `prefix_affinity` (broker extension) "
            "sends prompts with a common prefix to the same replica.",
        ),
        "tls": Field(
            shape=Either(shapes=(TLS, Choice(words=(PASSTHROUGH,)))),
            about="Certificates, or `passthrough` (broker extension): with `protocol: tcp` or `grpc`, the replicas "
            "terminate TLS.",
        ),
        "protocol": Field(
            shape=Choice(words=tuple(ServiceProtocol)),
            about="Protocol of clients and replicas: `http` (default), or `tcp` and `grpc`, whose connections are "
            "passed through (broker extension).",
            examples=("grpc",),
        ),
        "balancer": Field(shape=BALANCER, about="The program that clients connect to (broker extension)."),
        "gateway": Field(
            shape=GATEWAY, about="Run the load balancer on one or two separate machines (broker extension)."
        ),
    },
    retired={
        "https": "write `tls: {keyfile: PATH, certfile: PATH}`",
        "port": "write `ports` under `resources`",
        "controller_resources": "remove it: there is no controller",
        "controller": "remove it: there is no controller",
        "auto_restart": "remove it: replicas are always restarted",
    },
    elsewhere={
        **dict.fromkeys(REPLICA_POLICY.fields, "move it to `replica_policy`"),
        **dict.fromkeys(READINESS_PROBE.fields, "move it to `readiness_probe`"),
    },
    exclusive=(("replicas", "replica_policy", "keep `replica_policy`"),),
)
