"""The fields of `service` and `pool`: read in full, so that a typo is found, and then said not to be carried out."""

from __future__ import annotations

from broker.task.shapes import Anything, Choice, Either, Flag, MapOf, Number, Text, Whole
from broker.task.tables import Field, Table

_SECONDS = Number(above=None)

READINESS_PROBE = Table(
    name="readiness_probe",
    about="How to tell that a replica is ready.",
    fields={
        "path": Field(shape=Text(), about="The URL's path.", is_required=True),
        "initial_delay_seconds": Field(shape=_SECONDS, about="Grace before the first probe."),
        "timeout_seconds": Field(shape=_SECONDS, about="How long an answer may take."),
        "endpoint_probe_interval_seconds": Field(shape=_SECONDS, about="Time between probes."),
        "consecutive_failure_threshold_timeout": Field(shape=_SECONDS, about="Failing so long is failed."),
        "post_data": Field(shape=Either(shapes=(Text(), MapOf(value=Anything()))), about="A body; makes it a POST."),
        "headers": Field(shape=MapOf(value=Text()), about="HTTP headers."),
    },
)
REPLICA_POLICY = Table(
    name="replica_policy",
    about="How many replicas, by load.",
    fields={
        "min_replicas": Field(shape=Whole(), about="Never fewer.", is_required=True),
        "max_replicas": Field(shape=Whole(), about="Never more."),
        "num_overprovision": Field(shape=Whole(), about="Spare replicas."),
        "target_qps_per_replica": Field(
            shape=Either(shapes=(_SECONDS, MapOf(value=_SECONDS))),
            about="Queries a second that one replica should get; also by accelerator.",
        ),
        "dynamic_ondemand_fallback": Field(shape=Flag(), about="On-demand replicas while spot ones are missing."),
        "base_ondemand_fallback_replicas": Field(shape=Whole(), about="Replicas that are always on-demand."),
        "spot_placer": Field(shape=Choice(words=("dynamic_fallback",)), about="Where spot replicas go."),
        "upscale_delay_seconds": Field(shape=_SECONDS, about="Wait before adding."),
        "downscale_delay_seconds": Field(shape=_SECONDS, about="Wait before removing."),
    },
    retired={
        "qps_upper_threshold": "write `target_qps_per_replica`",
        "qps_lower_threshold": "write `target_qps_per_replica`",
        "auto_restart": "remove it: replicas are always restarted",
    },
)
TLS = Table(
    name="tls",
    about="Certificates of the load balancer.",
    fields={
        "keyfile": Field(shape=Text(), about="The private key's file.", is_required=True),
        "certfile": Field(shape=Text(), about="The certificate's file.", is_required=True),
    },
)
POOL = Table(
    name="pool",
    about="A pool of workers for managed jobs.",
    fields={
        "workers": Field(shape=Whole(), about="How many workers."),
        "min_workers": Field(shape=Whole(), about="Never fewer."),
        "max_workers": Field(shape=Whole(), about="Never more."),
        "queue_length_threshold": Field(shape=Whole(minimum=1), about="Jobs waiting before one is added."),
        "upscale_delay_seconds": Field(shape=_SECONDS, about="Wait before adding."),
        "downscale_delay_seconds": Field(shape=_SECONDS, about="Wait before removing."),
    },
)
SERVICE = Table(
    name="service",
    about="Serve the task behind a load balancer.",
    fields={
        "readiness_probe": Field(
            shape=Either(shapes=(Text(), READINESS_PROBE)), about="A path, or a mapping.", examples=("/health",)
        ),
        "replicas": Field(shape=Whole(), about="A fixed number of replicas."),
        "replica_policy": Field(shape=REPLICA_POLICY, about="Replicas by load."),
        "ports": Field(shape=Whole(minimum=1, maximum=65535), about="The port that replicas answer on."),
        "workers": Field(shape=Whole(), about="Replicas of a pool."),
        "pool": Field(shape=POOL, about="A pool's policy."),
        "load_balancer": Field(
            shape=Table(
                name="load_balancer",
                about="The load balancer.",
                fields={"stream_timeout_seconds": Field(shape=_SECONDS, about="How long a stream may be silent.")},
            ),
            about="The load balancer.",
        ),
        "load_balancing_policy": Field(
            shape=Choice(words=("round_robin", "least_load", "instance_aware_least_load")), about="Who gets a query."
        ),
        "tls": Field(shape=TLS, about="Certificates."),
    },
    retired={
        "https": "write `tls: {keyfile: PATH, certfile: PATH}`",
        "port": "write `ports` under `resources`",
        "controller_resources": "remove it: there is no controller",
        "auto_restart": "remove it: replicas are always restarted",
    },
    exclusive=(("replicas", "replica_policy", "keep `replica_policy`"),),
)
