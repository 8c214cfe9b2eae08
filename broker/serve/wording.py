"""Sentences for the events of services; nothing depends on them."""

from __future__ import annotations

from broker.formatting import format_duration
from broker.serve.certificates import WARN_S
from broker.state.services import ServiceEvent
from broker.types import ServiceEventKind

SENTENCES = {
    ServiceEventKind.CREATED: "created",
    ServiceEventKind.UPDATED: "update to version {detail} requested",
    ServiceEventKind.SCALED: "scaled to {detail}",
    ServiceEventKind.REPLICA_STARTED: "replica {replica} requested",
    ServiceEventKind.REPLICA_READY: "replica {replica} is ready",
    **dict.fromkeys(
        (
            ServiceEventKind.REPLICA_NOTICED,
            ServiceEventKind.REPLICA_LOST,
            ServiceEventKind.REPLICA_RESTARTED,
            ServiceEventKind.REPLICA_RECOVERING,
        ),
        "replica {replica}: {detail}",
    ),
    ServiceEventKind.REPLICA_FAILED: "replica {replica} failed: {detail}",
    ServiceEventKind.REPLICA_DRAINED: "replica {replica} was drained and terminated",
    ServiceEventKind.ROLLED_BACK: "rolled back to version {detail} because no replica of the new one became ready",
    ServiceEventKind.FAILED: "gave up starting replicas: {detail}",
    ServiceEventKind.CANARY_STARTED: "canary of version {detail} requested",
    ServiceEventKind.CANARY_ENDED: "canary rolled back; version {detail} serves all requests",
    ServiceEventKind.BALANCER_STARTED: "started the balancer",
    ServiceEventKind.GATEWAY_STARTED: "gateway {detail} requested",
    ServiceEventKind.GATEWAY_LOST: "gateway {detail}",
    ServiceEventKind.KEYS_MISSING: "not served from this machine, which lacks its API keys: {detail}",
    ServiceEventKind.CERTIFICATE_EXPIRES: "the certificate for clients expires at {detail}: renew the files of `tls`",
    ServiceEventKind.DOWN_REQUESTED: "termination requested",
}


def describe_service_event(event: ServiceEvent) -> str:
    """Return an event as a sentence."""
    return SENTENCES[event.kind].format(replica=event.replica, detail=event.detail)


def warn_of_expiry(certificate_ends_s: float | None, now_s: float) -> str:
    """Return a warning if the certificate for clients expires within two weeks; otherwise an empty text."""
    if certificate_ends_s is None or certificate_ends_s - now_s > WARN_S:
        return ""
    rest_s = certificate_ends_s - now_s
    when = f"expires in {format_duration(rest_s)}" if rest_s > 0 else f"expired {format_duration(-rest_s)} ago"
    return f"the certificate for clients {when}: renew the files of `tls`"
