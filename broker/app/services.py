"""Operations on services: bring up, update, take down, describe; and the wiring of their controllers."""

from __future__ import annotations

import math
import socket
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from broker.app.container import Context
from broker.app.jobs import JobTarget
from broker.errors import NoOfferError, StateError, UsageError
from broker.frozen import frozen
from broker.locks import is_locked
from broker.serve.files import Load, ServiceFolder, read_file
from broker.serve.observing import observe
from broker.serve.processes import launch_process
from broker.serve.replicas import draw_ports, find_folder, find_port, is_local
from broker.state.services import ServiceEvent
from broker.types import JobStatus, Placement, Plan, Replica, Service, ServiceEventKind, ServiceSpec, Task

if TYPE_CHECKING:
    from broker.serve.controller import ServiceController
    from broker.serve.placement import SpotPlace
    from broker.serve.reconciling import Slot
    from broker.serve.slots import PlacementRequest
    from broker.types import Estimate

PORTS = range(30001, 30101)  # SkyServe's first ports
LOOK_S = 0.3
BALANCER = (sys.executable, "-m", "broker", "balancer")
UPDATED = ServiceEventKind.UPDATED
READY, SHUTTING_DOWN, FAILED, STARTING = "READY", "SHUTTING_DOWN", "FAILED", "STARTING"


@frozen
class ServiceTarget(JobTarget):
    """The launch target for a service: its replicas are managed jobs, so their checks apply."""

    def settle(self, tasks: Sequence[Task]) -> tuple[Task, ...]:
        """Check each task's `service`, then fill in the checkpoint folders. Raises UsageError."""
        for task in tasks:
            check_service(task)
        return super().settle(tasks)

    def check(self, plans: Sequence[Plan]) -> bool:
        """Accept: replicas write no checkpoints."""
        return True


@frozen
class ReplicaLine:
    """One replica for `status`."""

    replica: Replica
    status: str
    place: str
    usd_hour: float
    in_flight: int | None
    error: str


@frozen
class ServiceLine:
    """One service for `status`. `load` None: its balancer does not run."""

    service: Service
    status: str
    replicas: tuple[ReplicaLine, ...]
    load: Load | None
    paid_usd: float

    @property
    def endpoint(self) -> str:
        """Address of the balancer, HOST:PORT."""
        return f"{self.service.host}:{self.service.port}"


def check_service(task: Task) -> ServiceSpec:
    """Return the task's service. Raises UsageError if it has none, or one that cannot be run."""
    spec = task.service
    if any(each.field in ("pool", "workers") for each in task.notices):
        raise UsageError("worker pools are not supported", hints=["launch one managed job per worker"])
    if spec is None:
        raise UsageError(
            "the task has no `service:`", hints=["for example `service: {readiness_probe: /, replicas: 2}`"]
        )
    if spec.probe is None:
        raise UsageError("`service` requires `readiness_probe`", hints=["for example `readiness_probe: /health`"])
    policy = spec.policy
    if policy.replicas_max not in (None, policy.replicas_min) and not (policy.target_qps or policy.target_in_flight):
        hint = "add `target_qps_per_replica`, or `target_requests_in_flight_per_replica`"
        raise UsageError("`max_replicas` requires a target load per replica", hints=[hint])
    if not is_local(task):
        find_port(task)
    return spec


def count_replicas(spec: ServiceSpec) -> int:
    """Return the number of replicas that a service starts with."""
    return max(spec.policy.replicas_min + spec.policy.spare_count, 1)


def check_store(context: Context) -> None:
    """Raise UsageError for a shared store: its daemons claim jobs, and the balancer belongs to one machine."""
    if context.store.is_shared:
        raise UsageError(
            "services require a state folder of their own, not a shared store",
            hints=["set `BROKER_HOME` to a folder whose config.toml has no `state`"],
        )


def check_library() -> None:
    """Raise UsageError if the balancer's library is missing."""
    import importlib.util

    if importlib.util.find_spec("aiohttp") is None:
        raise UsageError(
            "the balancer requires aiohttp", hints=["install it with `pip install 'intercloud-broker[serve]'`"]
        )


def drop_notice(task: Task) -> Task:
    """Return the task without the notice that other commands run one replica only."""
    return replace(task, notices=tuple(each for each in task.notices if each.field != "service"))


def choose_port(context: Context, host: str, port: int | None) -> int:
    """Return a port for the balancer. Raises UsageError if it is taken."""
    taken = {each.port for each in context.store.services.list()}
    for each in PORTS if port is None else (port,):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, each))
            except OSError:
                continue
        if each not in taken:
            return each
    if port is None:
        raise UsageError(f"no port from {PORTS.start} to {PORTS.stop - 1} is free on {host}", hints=["pass `--port`"])
    raise UsageError(f"port {port} on {host} is already in use", hints=["pass another `--port`"])


def make_service_controller(context: Context, name: str) -> ServiceController:
    """Wire the controller of a service."""
    from broker.serve.controller import ServiceController

    def launch(folder: ServiceFolder) -> bool:
        return launch_process((*BALANCER, str(folder.path)), folder.log)

    return ServiceController(
        name,
        store=context.store,
        clock=context.clock,
        config=context.config,
        place=lambda request: place(context, request),
        launch_balancer=launch,
        draw_ports=draw_ports,
    )


def place(context: Context, request: PlacementRequest) -> Sequence[Slot]:
    """Return a slot for each of the replicas; more, where `availability` needs spare ones."""
    from broker.serve.placement import observe_places, place_replicas
    from broker.serve.reconciling import Slot
    from broker.serve.slots import is_placed_by_availability

    task, spec, count = request.task, request.spec, request.count
    policy = spec.policy
    if not any(each.use_spot for each in task.resources):
        return [Slot()] * count
    if not is_placed_by_availability(task, spec) or not count:
        ondemand = min(policy.ondemand_min, count)
        return [*[Slot(is_spot=False)] * ondemand, *[Slot(is_spot=True)] * (count - ondemand)]
    assert spec.availability is not None
    in_use = frozenset(each.slot for each in request.replicas)
    found = place_replicas(
        count - policy.spare_count,
        observe_places(list_spot_places(context, task, in_use), request.replicas),
        ondemand_usd_hour=find_ondemand_usd_hour(context, task),
        cold_start_hours=request.cold_start_s / 3600,
        availability=spec.availability,
        ondemand_min=policy.ondemand_min,
        spare_min=policy.spare_count,
        budget=request.budget,
    )
    return found.slots


def list_spot_places(context: Context, task: Task, in_use: frozenset[Slot] = frozenset()) -> Sequence[SpotPlace]:
    """List the zones that sell spot for this task, the cheapest machine of each, with its hazard.

    The estimate of a task without a known amount of work has no hazard, so it is read from the market model.
    Zones whose machine was refused recently are left out, those in use are always listed.
    """
    from broker.jobs.deadline import estimate_hazard
    from broker.serve.placement import PLACES_MAX, SpotPlace
    from broker.serve.reconciling import Slot

    is_refused, history = context.find_refused(), context.read_history() or {}
    found: dict[Slot, SpotPlace] = {}
    for each in _rank(context, task, is_spot=True):
        offer, usd_hour = each.placement.offer, each.placement.usd_hour
        slot = Slot(is_spot=True, region=offer.region, zone=offer.zone)
        if slot not in in_use and (
            len(found) > 2 * PLACES_MAX or (is_refused is not None and is_refused(each.placement))
        ):
            continue
        if slot not in found or usd_hour < found[slot].usd_hour:
            hazard = estimate_hazard(each.placement, history)
            found[slot] = SpotPlace(slot=slot, usd_hour=usd_hour, losses_per_hour=hazard)
    return list(found.values())


def find_ondemand_usd_hour(context: Context, task: Task) -> float:
    """Return the lowest on-demand price; infinity if there is no offer."""
    return min((each.placement.usd_hour for each in _rank(context, task, is_spot=False)[:1]), default=math.inf)


def _rank(context: Context, task: Task, *, is_spot: bool) -> Sequence[Estimate]:
    resources = tuple(replace(each, use_spot=is_spot) for each in task.resources)
    try:
        plan = context.market.rank(
            replace(task, resources=resources), usable_clouds=frozenset(context.clouds), history=context.read_history()
        )
    except NoOfferError:
        return ()
    return plan.estimates


def find_service(context: Context, name: str) -> Service:
    """Find a service by name. Raises UsageError."""
    service = context.store.services.get(name)
    if service is None:
        names = [each.name for each in context.store.services.list()]
        hint = (
            f"known services: {', '.join(f'`{each}`' for each in names)}" if names else "start one: `broker serve up`"
        )
        raise UsageError(f"unknown service `{name}`", hints=[hint])
    return service


def find_replica_job(context: Context, service: Service, number: int) -> int:
    """Return the job of a replica. Raises UsageError."""
    known = {each.number: each.job_id for each in context.store.services.list_replicas(service.name)}
    if number not in known:
        numbers = ", ".join(str(each) for each in known) or "none yet"
        raise UsageError(f"service `{service.name}` has no replica {number}", hints=[f"its replicas: {numbers}"])
    return known[number]


def describe_services(context: Context, names: Sequence[str] = ()) -> Sequence[ServiceLine]:
    """Describe these services, or all. Raises UsageError for an unknown name."""
    services = [find_service(context, each) for each in names] or context.store.services.list()
    return [_describe(context, each) for each in services]


def _describe(context: Context, service: Service) -> ServiceLine:
    store = context.store
    folder = find_folder(context.config, service)
    load = None
    if is_locked(folder.lock):
        try:
            load = read_file(folder.load, Load)
        except StateError as error:
            context.warn(error)
    unfinished = frozenset(store.jobs.list_unfinished_ids())
    now_s = context.clock.now_s()
    lines, paid_usd = [], 0.0
    for replica in store.services.list_replicas(service.name):
        seen = observe(store, replica, load, unfinished)
        paid_usd += store.bills.spend_usd(job_id=replica.job_id, now_s=now_s)
        placement = seen.job.attempts[-1].placement if seen.job and seen.job.attempts else None
        lines.append(
            ReplicaLine(
                replica=replica,
                status=_name_status(replica, seen.job.status if seen.job else None, is_ready=seen.is_ready),
                place=_show_place(placement) if placement else "-",
                usd_hour=placement.usd_hour if placement else 0.0,
                in_flight=seen.in_flight,
                error=seen.error or (seen.job.failure if seen.job else ""),
            )
        )  # fmt: skip
    if service.down_requested:
        status = SHUTTING_DOWN
    elif any(each.status == READY for each in lines):
        status = READY
    else:
        status = FAILED if service.failure else STARTING
    return ServiceLine(service=service, status=status, replicas=tuple(lines), load=load, paid_usd=paid_usd)


def _show_place(placement: Placement) -> str:
    offer = placement.offer
    return f"{offer.cloud}/{offer.zone or offer.region} {'spot' if placement.is_spot else 'on-demand'}"


def _name_status(replica: Replica, status: JobStatus | None, *, is_ready: bool) -> str:
    """Return a replica's status in SkyServe's words."""
    if replica.drained_s is not None:
        return SHUTTING_DOWN
    if status is JobStatus.RUNNING:
        return READY if is_ready else STARTING if replica.ready_s is None else "NOT_READY"
    if status is JobStatus.RECOVERING:
        return "PREEMPTED"
    if status is None or status.is_terminal:
        return FAILED
    return "PROVISIONING" if status is JobStatus.STARTING else "PENDING"


async def wait_until_down(context: Context, names: Sequence[str]) -> None:
    """Wait until these services, their machines and balancers are gone."""
    while any(context.store.services.get(name) is not None for name in names):
        context.ensure_daemon()
        await context.clock.sleep(LOOK_S)


async def wait_until_ready(context: Context, name: str) -> ServiceLine:
    """Wait until a replica is ready. Raises UsageError for a service that is gone, StateError for one that failed."""
    while True:
        line = _describe(context, find_service(context, name))
        if line.status == READY:
            return line
        if line.status == FAILED:
            raise StateError(
                f"service `{name}` has no ready replica: {line.service.failure}",
                hints=[f"see `broker serve logs {name} REPLICA` and `broker serve why {name}`"],
            )
        context.ensure_daemon()
        await context.clock.sleep(LOOK_S)


def list_service_events(context: Context, name: str) -> Sequence[ServiceEvent]:
    """List the events of a service. Raises UsageError."""
    return context.store.services.list_events(find_service(context, name).name)
