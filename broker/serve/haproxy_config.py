"""The configuration of HAProxy for one service, from its replicas and their readiness. Pure.

All files are named relative to the service's folder, which is HAProxy's working directory. Replica 3 is the server `r3`
with the id 3 of the backend `replicas`, or of the canary's.

HAProxy itself takes a replica out as soon as it refuses a connection, and tries the next; broker's probes decide
whether a server is enabled at all.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence

from broker.serve.answers import SCHEME
from broker.serve.connections import CONNECT_S, HANDSHAKE_S
from broker.serve.files import Backend, Routing
from broker.types import ServiceProtocol

CLIENTS_PEM = "clients.pem"  # key and certificate for clients
CLIENT_CA = "client-ca.pem"
REPLICAS_CA = "replicas.crt"
BALANCER_PEM = "balancer.pem"
POOL = "replicas"
WEIGHT_MAX = 256  # HAProxy's
SHARE_UNITS = 10_000
BALANCING = {"round_robin": "roundrobin"}  # all others: the less busy of two drawn ones
OLD_WORKER_S = 3600  # for which a worker that was replaced by a reload serves its open connections
TUNNEL_S = 24 * 3600
HALF_OPEN_S = 300


def render(routing: Routing, ready: Collection[int]) -> str:
    """Return the configuration; the servers of replicas that are not `ready` begin disabled."""
    pools = group_backends(routing)
    blocks = [
        _render_global(),
        _render_defaults(routing),
        _render_frontend(routing, pools),
        *(_render_pool(routing, name, backends, ready) for name, backends in pools.items()),
    ]
    head = "# Written by broker for this service, and replaced by it."
    return "\n\n".join([head, *("\n".join(each) for each in blocks)]) + "\n"


def group_backends(routing: Routing) -> Mapping[str, Sequence[Backend]]:
    """Return the replicas by the name of HAProxy's backend: one for each version with a share, and one for the rest."""
    pools: dict[str, list[Backend]] = {POOL: [], **{_name_share(each): [] for each in sorted(routing.shares)}}
    for each in sorted(routing.backends, key=lambda each: each.number):
        pools[_name_share(each.version) if each.version in routing.shares else POOL].append(each)
    return pools


def name_server(backend: Backend) -> str:
    """Return the name of a replica's server."""
    return f"r{backend.number}"


def choose_state(backend: Backend, ready: Collection[int]) -> str:
    """Return a server's state in the words of HAProxy's command `set server`."""
    if backend.number not in ready:
        return "maint"
    return "drain" if backend.is_draining else "ready"


def is_http(routing: Routing) -> bool:
    """Return whether HAProxy reads requests; otherwise it copies bytes."""
    return routing.protocol is not ServiceProtocol.TCP and not routing.is_tls_passed


def _name_share(version: int) -> str:
    return f"version-{version}"


def _render_global() -> list[str]:
    return [
        "global",
        f"    hard-stop-after {OLD_WORKER_S}s",
        "    ssl-default-bind-options ssl-min-ver TLSv1.2",
        "    tune.ssl.default-dh-param 2048",
    ]


def _render_defaults(routing: Routing) -> list[str]:
    silence_s = math.ceil(routing.stream_timeout_s) if routing.protocol is ServiceProtocol.HTTP else TUNNEL_S
    lines = [
        "defaults",
        f"    mode {'http' if is_http(routing) else 'tcp'}",
        f"    timeout connect {_find_connect_s(routing)}s",
        f"    timeout client {silence_s}s",
        f"    timeout server {silence_s}s",
        f"    timeout tunnel {TUNNEL_S}s",
        f"    timeout client-fin {HALF_OPEN_S}s",
        f"    timeout server-fin {HALF_OPEN_S}s",
        "    timeout check 5s",
        "    option clitcpka",
        "    option srvtcpka",
        "    option redispatch 1",
        "    retries 3",
    ]
    if is_http(routing):
        # Nothing was sent to a replica that refused its connection, so any request may be repeated.
        lines += ["    timeout http-request 30s", "    retry-on conn-failure", "    option forwardfor"]
    return lines


def _find_connect_s(routing: Routing) -> int:
    """Return the limit of a connection: HAProxy's covers connecting and the handshake together, ours each.

    With five seconds for both, a replica whose machine is busy would be out of rotation.
    """
    is_encrypted = any(each.is_encrypted for each in routing.backends)
    return math.ceil(CONNECT_S + (HANDSHAKE_S if is_encrypted else 0.0))


def _render_frontend(routing: Routing, pools: Mapping[str, Sequence[Backend]]) -> list[str]:
    host = f"[{routing.host}]" if ":" in routing.host else routing.host
    lines = ["frontend clients", f"    bind {host}:{routing.port}{_describe_bind(routing)}"]
    if routing.tls is not None and is_http(routing):
        lines.append(f"    http-request set-header {SCHEME} https unless {{ req.hdr({SCHEME}) -m found }}")
    names = [name for name in pools if name != POOL]
    left = 1.0
    for name, (_, share) in zip(names, sorted(routing.shares.items()), strict=True):
        units = round(SHARE_UNITS * min(1.0, share / left)) if left > 0 else 0  # of those left by earlier rules
        lines.append(f"    use_backend {name} if {{ rand({SHARE_UNITS}) lt {units} }} {{ nbsrv({name}) gt 0 }}")
        left -= share
    lines += [f"    use_backend {name} if {{ nbsrv({POOL}) eq 0 }} {{ nbsrv({name}) gt 0 }}" for name in names]
    return [*lines, f"    default_backend {POOL}"]


def _describe_bind(routing: Routing) -> str:
    is_grpc = routing.protocol is ServiceProtocol.GRPC and is_http(routing)
    if routing.tls is None:
        return " proto h2" if is_grpc else ""
    words = f" ssl crt {CLIENTS_PEM}"
    if is_http(routing):
        words += " alpn h2" if is_grpc else " alpn h2,http/1.1"
    if routing.tls.client_ca_path is not None:
        words += f" ca-file {CLIENT_CA} verify required"
    return words


def _render_pool(routing: Routing, name: str, backends: Sequence[Backend], ready: Collection[int]) -> list[str]:
    lines = [f"backend {name}", f"    balance {BALANCING.get(routing.balancing, 'random(2)')}"]
    if is_http(routing):
        lines += _list_version_headers(backends)
    if any(each.is_leaving for each in backends):
        lines.append("    option allbackups")
    interval_ms = max(1, round(routing.probe.interval_s * 1000))
    lines.append(
        f"    default-server check inter {interval_ms}ms fall 1 rise 1 observe layer4 error-limit 1 on-error mark-down"
    )
    lines += [f"    server {name_server(each)} {_describe_server(routing, each, ready)}" for each in backends]
    return lines


def _list_version_headers(backends: Sequence[Backend]) -> Iterator[str]:
    """List the rules that name the version of the replica in its response."""
    for version in sorted({each.version for each in backends}):
        ids = " ".join(str(each.number) for each in backends if each.version == version)
        yield f"    http-response set-header x-broker-version {version} if {{ srv_id {ids} }}"


def _describe_server(routing: Routing, backend: Backend, ready: Collection[int]) -> str:
    host = f"[{backend.host}]" if ":" in backend.host else backend.host
    words = [f"{host}:{backend.port}", f"id {backend.number}"]
    if backend.is_encrypted:
        words.append(f"ssl ca-file {REPLICAS_CA} crt {BALANCER_PEM} verify required")
    if routing.protocol is ServiceProtocol.GRPC and is_http(routing):
        words.append("proto h2")
    state = choose_state(backend, ready)
    has_capacities = any(each.capacity != 1.0 for each in routing.backends)
    words += [f"weight {_find_weight(routing, backend)}"] if backend.is_draining or has_capacities else []
    words += ["backup"] if backend.is_leaving else []  # used once no other server is ready
    words += ["disabled"] if state == "maint" else []
    return " ".join(words)


def _find_weight(routing: Routing, backend: Backend) -> int:
    """Return a server's weight in relation to the largest capacity of a replica."""
    if backend.is_draining:
        return 0
    return max(1, round(WEIGHT_MAX * backend.capacity / max(each.capacity for each in routing.backends)))
