"""The gateways of services, for commands: their addresses, whether a task may have them, and their status."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from broker.app.container import Context
from broker.errors import UsageError
from broker.frozen import frozen
from broker.serve.files import Load
from broker.serve.gateway_task import ANY, find_listener, find_places, find_resources
from broker.serve.gateways import GatewayTry, find_cluster, list_tries, read_loads
from broker.serve.observing import find_host
from broker.serve.replicas import LOCAL, LOOPBACK, find_folder
from broker.types import GATEWAYS_MAX, GatewaySpec, JobStatus, Placement, Plan, Service, Task

PORTS = range(30001, 30101)  # SkyServe's first ports
READY, SHUTTING_DOWN, FAILED, STARTING = "READY", "SHUTTING_DOWN", "FAILED", "STARTING"


@frozen
class GatewayLine:
    """One gateway for `status`. `endpoint` is HOST:PORT, and empty while its machine is not running.

    `load` is None if its balancer has not reported within the last seconds.
    """

    number: int
    job_id: int | None
    status: str
    endpoint: str
    place: str
    usd_hour: float
    load: Load | None
    error: str


def plan_gateways(context: Context, task: Task) -> Sequence[Plan]:
    """Plan the gateways of a service, those of one location together. Raises NoOfferError if nothing fits."""
    spec = task.service.gateway if task.service is not None else None
    if spec is None:
        return ()
    places = find_places(task, spec)
    return [
        context.market.rank(
            Task(
                name=f"{task.name or 'service'}-gateway",
                resources=(find_resources(task, spec, places.index(place) + 1, port=PORTS.start),),
                num_nodes=places.count(place),
            ),
            usable_clouds=frozenset(context.clouds), history=context.read_history(),
        )
        for place in dict.fromkeys(places)
    ]  # fmt: skip


def choose_address(context: Context, task: Task, host: str, port: int | None) -> tuple[str, int]:
    """Return address and port for the balancer of a new service, or for its first gateway. Raises UsageError."""
    spec = task.service.gateway if task.service is not None else None
    if spec is None:
        return host, choose_port(context, host, port)
    if host != LOOPBACK:
        raise UsageError(
            "`--host` is the address of a balancer on this machine, but the service has gateways",
            hints=["omit it: gateways listen on all addresses of their machines, local ones on the loopback address"],
        )
    if all(place.cloud == LOCAL for place in find_places(task, spec)):
        return LOOPBACK, choose_port(context, LOOPBACK, port, count=GATEWAYS_MAX)
    return ANY, PORTS.start if port is None else port


def choose_port(context: Context, host: str, port: int | None, *, count: int = 1) -> int:
    """Return a port for the balancer, the first of `count` adjacent free ones. Raises UsageError if there are none."""
    taken = set(list_ports(context))
    for first in PORTS if port is None else (port,):
        wanted = range(first, first + count)
        if taken.isdisjoint(wanted) and all(is_free(host, each) for each in wanted):
            return first
    if port is None:
        raise UsageError(f"no port from {PORTS.start} to {PORTS.stop - 1} is free on {host}", hints=["pass `--port`"])
    raise UsageError(f"port {port} on {host} is already in use", hints=["pass another `--port`"])


def list_ports(context: Context) -> Sequence[int]:
    """Return the ports of this machine that services use, or may use for their gateways."""
    found: list[int] = []
    for each in context.store.services.list():
        spec = context.store.services.get_task(each.name, each.version).service
        count = 1 if spec is None or spec.gateway is None else GATEWAYS_MAX
        found += range(each.port, each.port + count)
    return found


def is_free(host: str, port: int) -> bool:
    """Return whether a process could listen on a port."""
    try:
        family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except (OSError, OverflowError):
        return False
    return True


def show_endpoint(host: str, port: int) -> str:
    """Return HOST:PORT as URLs have it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check_gateways_stay(context: Context, service: Service, task: Task) -> None:
    """Raise UsageError for an update that moves gateways, adds the first or removes all; their number may change."""
    known = context.store.services.get_task(service.name, service.version).service
    old, new = known.gateway if known else None, task.service.gateway if task.service else None
    if old is None and new is None:
        return
    if old is not None and new is not None and _has_same_places(task, old, new):
        return
    if old is None or new is None:
        raise UsageError(
            f"service `{service.name}` {'has no' if old is None else 'has'} gateways, the update has "
            f"{'some' if old is None else 'none'}: its address would change",
            hints=[f"{'remove' if old is None else 'keep'} `gateway` of `service`", "or start a second service"],
        )
    raise UsageError(
        f"an update cannot move the gateways of service `{service.name}`",
        hints=["keep `infra` and `cpus` of `gateway`; `count` may change"],
    )


def check_has_log(context: Context, service: Service) -> None:
    """Raise UsageError for a service whose balancers run on gateways: their logs are those of jobs."""
    jobs = [each.job_id for each in describe_gateways(context, service) if each.job_id is not None]
    if jobs:
        hints = [f"see `broker jobs logs {job_id}`" for job_id in jobs]
        raise UsageError(f"the balancers of service `{service.name}` run on gateways", hints=hints)


def _has_same_places(task: Task, old: GatewaySpec, new: GatewaySpec) -> bool:
    both = zip(find_places(task, old), find_places(task, new), strict=False)
    return old.vcpus_min == new.vcpus_min and all(before == after for before, after in both)


def describe_gateways(context: Context, service: Service) -> tuple[GatewayLine, ...]:
    """Describe the gateways of a service, except those that it may have but does not run."""
    task = context.store.services.get_task(service.name, service.version)
    spec = task.service.gateway if task.service is not None else None
    if spec is None:
        return ()
    loads = read_loads(find_folder(context.config, service), now_s=context.clock.now_s())
    lines = []
    for each in list_tries(context.store, service):
        if each.number > spec.count and each.is_over:
            continue
        cluster, placement = find_cluster(context.store, each.job), None
        if each.job is not None and each.job.attempts and not each.is_over:
            placement = each.job.attempts[-1].placement
        is_leaving = service.down_requested or each.number > spec.count
        host = find_host(min(cluster.nodes, key=lambda node: node.rank)) if cluster else ""
        port = find_listener(service, task, spec, each.number).port if each.number <= spec.count else service.port
        lines.append(
            GatewayLine(
                number=each.number,
                job_id=each.job.id if each.job is not None else None,
                status=SHUTTING_DOWN if is_leaving else _name_gateway_status(each, is_heard=each.number in loads),
                endpoint=show_endpoint(host, port) if host else "",
                place=show_place(placement) if placement else "-",
                usd_hour=placement.usd_hour if placement else 0.0,
                load=loads.get(each.number),
                error=each.job.failure if each.job is not None else "",
            )
        )  # fmt: skip
    return tuple(lines)


def _name_gateway_status(gateway: GatewayTry, *, is_heard: bool) -> str:
    """Return a gateway's status, in the terms used for replicas; READY if its balancer reports its load."""
    status = gateway.job.status if gateway.job is not None else None
    if status is JobStatus.RUNNING:
        return READY if is_heard else STARTING
    if status is JobStatus.RECOVERING:
        return "LOST"
    if status is not None and status.is_terminal:
        return FAILED
    return "PROVISIONING" if status is JobStatus.STARTING else "PENDING"


def show_place(placement: Placement) -> str:
    """Return a placement in a few words."""
    offer = placement.offer
    return f"{offer.cloud}/{offer.zone or offer.region} {'spot' if placement.is_spot else 'on-demand'}"
