"""Operations on services: bring up, update, take down and describe them, and wire their controllers."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from broker.app.container import Context
from broker.app.gateways import (
    FAILED,
    READY,
    SHUTTING_DOWN,
    STARTING,
    GatewayLine,
    describe_gateways,
    show_endpoint,
    show_place,
)
from broker.app.jobs import JobTarget
from broker.app.service_checks import check_service
from broker.errors import NoOfferError, StateError, UsageError
from broker.frozen import frozen
from broker.locks import is_locked
from broker.serve.files import Load, ServiceFolder, read_file
from broker.serve.gateways import list_service_jobs, read_merged_load
from broker.serve.observing import observe, read_load
from broker.serve.processes import launch_process
from broker.serve.replicas import draw_ports, find_folder
from broker.state.services import EVENTS_MAX, ServiceEvent
from broker.types import (
    JobStatus,
    Plan,
    Replica,
    Service,
    ServiceEventKind,
    ServiceSpec,
    Task,
)
from broker.types.outcomes import EventKind

if TYPE_CHECKING:
    from broker.serve.controller import DrawPorts, ReadLoad, ServiceController
    from broker.serve.placement import SpotPlace
    from broker.serve.reconciling import Slot
    from broker.serve.slots import PlacementRequest
    from broker.types import Estimate

POLL_S = 0.3
BALANCER = (sys.executable, "-m", "broker", "balancer")
UPDATED = ServiceEventKind.UPDATED
REPLICAS_MAX = 100  # whose jobs' events are listed: each takes a query, and the dashboard asks often
REPLICA_EVENTS = {
    EventKind.NOTICED: ServiceEventKind.REPLICA_NOTICED,
    EventKind.ATTEMPT_LOST: ServiceEventKind.REPLICA_LOST,
    EventKind.LEASE_EXPIRED: ServiceEventKind.REPLICA_LOST,
    EventKind.PROGRAM_RESTARTED: ServiceEventKind.REPLICA_RESTARTED,
    EventKind.STALL_RESTARTED: ServiceEventKind.REPLICA_RESTARTED,
    EventKind.GANG_RESTARTED: ServiceEventKind.REPLICA_RESTARTED,
    EventKind.ATTEMPT: ServiceEventKind.REPLICA_RECOVERING,
}


@frozen
class ServiceTarget(JobTarget):
    """The launch target for a service: its replicas are managed jobs, so their checks apply."""

    def apply_defaults(self, tasks: Sequence[Task]) -> tuple[Task, ...]:
        """Check each task's `service`, then fill in the checkpoint folders. Raises UsageError.

        Job limits are dropped with a note: they would end each replica, which would count as a failure.
        """
        for task in tasks:
            check_service(task)
        if any(task.max_duration_s is not None for task in tasks):
            self.context.note("`max_duration` has no effect on a service: end it with `broker serve down`")
        if any(task.goal is not None and task.goal.budget_usd is not None for task in tasks):
            self.context.note("`budget` has no effect on a service: limit its cost with `max_replicas`")
        if any(task.goal is not None and task.goal.deadline_hours is not None for task in tasks):
            self.context.note("`deadline` has no effect on a service: it runs until `broker serve down`")
        if any(task.goal is not None and task.goal.hour_value_usd is not None for task in tasks):
            self.context.note("`hour_value` has no effect on a service: its replicas have no work to finish")
        return super().apply_defaults([drop_job_limits(task) for task in tasks])

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
    """One service for `status`. `load` is None if its balancer is not running; `gateways` may be empty."""

    service: Service
    status: str
    replicas: tuple[ReplicaLine, ...]
    load: Load | None
    paid_usd: float
    gateways: tuple[GatewayLine, ...] = ()

    @property
    def endpoint(self) -> str:
        """Address of the balancer, HOST:PORT; of the first serving gateway, else of the first; `-` without one."""
        if not self.gateways:
            return show_endpoint(self.service.host, self.service.port)
        known = [each for each in self.gateways if each.endpoint]
        return next((each.endpoint for each in known if each.status == READY), known[0].endpoint if known else "-")


def count_replicas(spec: ServiceSpec) -> int:
    """Return the initial number of replicas of a service."""
    return max(spec.policy.replicas_min + spec.policy.spare_count, 1)


def drop_job_limits(task: Task) -> Task:
    """Return the task without the limits that end a job, its deadline, and the value of finishing earlier.

    A deadline would move replicas to on-demand as it approaches, and then shorten their leases to an hour.
    """
    goal = task.goal and replace(task.goal, deadline_hours=None, budget_usd=None, hour_value_usd=None)
    return replace(task, max_duration_s=None, goal=goal)


def drop_notice(task: Task) -> Task:
    """Return the task without the notice that other commands only run one replica."""
    return replace(task, notices=tuple(each for each in task.notices if each.field != "service"))


def make_service_controller(
    context: Context, name: str, *, draw_ports: DrawPorts = draw_ports, read_load: ReadLoad = read_load
) -> ServiceController:
    """Wire the controller of a service."""
    from broker.serve.controller import ServiceController
    from broker.serve.gateway_task import write_program
    from broker.serve.gateways import Gateways

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
        read_load=read_load,
        make_gateways=lambda folder: Gateways(
            store=context.store, clock=context.clock, exchange=context.gang.exchange, write_program=write_program,
            folder=folder,
        ),
    )  # fmt: skip


def place(context: Context, request: PlacementRequest) -> Sequence[Slot]:
    """Return a slot for each replica, and for spare ones if `availability` requires them."""
    from broker.serve.placement import count_ondemand, observe_places, place_replicas
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
    ondemand_usd_hour = find_ondemand_usd_hour(context, task)
    lost = request.lost if ondemand_usd_hour < math.inf else ()  # without on-demand, spot may have no other place
    places = list_spot_places(context, task, in_use)
    if ondemand_usd_hour == math.inf:
        places = [replace(each, is_full=False) for each in places]
    found = place_replicas(
        count - policy.spare_count,
        observe_places(places, request.replicas, lost, request.starts_s),
        ondemand_usd_hour=ondemand_usd_hour,
        cold_start_hours=request.cold_start_s / 3600,
        availability=spec.availability,
        ondemand_min=policy.ondemand_min,
        spare_min=policy.spare_count,
        ondemand_present=count_ondemand(request.replicas),
        budget=request.budget,
    )
    return found.slots


def list_spot_places(context: Context, task: Task, in_use: frozenset[Slot] = frozenset()) -> Sequence[SpotPlace]:
    """List the zones that sell spot for this task, each with its cheapest machine and hazard.

    The estimate of a task without a known amount of work has no hazard, so it is read from the market model.
    Zones whose machines were refused recently are omitted, or full if they are in use.
    """
    from broker.jobs.deadline import estimate_hazard
    from broker.serve.placement import PLACES_MAX, SpotPlace
    from broker.serve.reconciling import Slot

    is_refused, history = context.find_refused(), context.read_history() or {}
    found: dict[Slot, SpotPlace] = {}
    free = set[Slot]()  # places with a machine that was not refused
    for each in _rank(context, task, is_spot=True):
        offer, usd_hour = each.placement.offer, each.placement.usd_hour
        slot = Slot(is_spot=True, region=offer.region, zone=offer.zone)
        is_full = is_refused is not None and is_refused(each.placement)
        if slot not in in_use and (len(found) > 2 * PLACES_MAX or is_full):
            continue
        if slot not in found or usd_hour < found[slot].usd_hour:
            hazard = estimate_hazard(each.placement, history)
            found[slot] = SpotPlace(slot=slot, usd_hour=usd_hour, losses_per_hour=hazard)
        free |= set() if is_full else {slot}
    return [replace(each, is_full=slot not in free) for slot, each in found.items()]


def find_ondemand_usd_hour(context: Context, task: Task) -> float:
    """Return the lowest on-demand price; infinity if there is no offer."""
    return min((each.placement.usd_hour for each in _rank(context, task, is_spot=False)[:1]), default=math.inf)


def _rank(context: Context, task: Task, *, is_spot: bool) -> Sequence[Estimate]:
    resources = tuple(replace(each, use_spot=is_spot) for each in task.resources)
    context.market.renew()  # the controller of a service plans for months
    try:
        plan = context.market.rank(
            replace(task, resources=resources), usable_clouds=frozenset(context.clouds), history=context.read_history()
        )
    except NoOfferError:
        return ()
    return plan.estimates


def find_service(context: Context, name: str) -> Service:
    """Find a service by name. Raises UsageError with the known names."""
    service = context.store.services.get(name)
    if service is None:
        names = [each.name for each in context.store.services.list()]
        start = "start one with `broker serve up TASK.yaml`"
        hint = f"known services: {', '.join(f'`{each}`' for each in names)}" if names else start
        raise UsageError(f"unknown service `{name}`", hints=[hint])
    return service


def find_replica_job(context: Context, service: Service, number: int) -> int:
    """Return the job ID of a replica. Raises UsageError if it is unknown."""
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
    gateways, load = describe_gateways(context, service), None
    try:
        load = _read_load(context, service, has_gateways=bool(gateways))
    except StateError as error:
        context.warn(error)
    unfinished = frozenset(store.jobs.list_unfinished_ids())
    now_s = context.clock.now_s()
    lines, replicas = [], store.services.list_replicas(service.name)
    for replica in replicas:
        seen = observe(store, replica, load, unfinished)
        newest = seen.job.attempts[-1] if seen.job and seen.job.attempts else None
        lines.append(
            ReplicaLine(
                replica=replica,
                status=_name_status(replica, seen.job.status if seen.job else None, is_ready=seen.is_ready),
                place=show_place(newest.placement) if newest else "-",
                usd_hour=newest.placement.usd_hour if newest and newest.ended_s is None else 0.0,
                in_flight=seen.in_flight,
                error=seen.error or (seen.job.failure if seen.job else ""),
            )
        )  # fmt: skip
    own_jobs = {*list_service_jobs(store, service), *(each.job_id for each in replicas)}
    paid_usd = sum(store.bills.list_spend_usd(sorted(own_jobs), now_s=now_s).values())
    if service.down_requested:
        status = SHUTTING_DOWN
    elif any(each.status == READY for each in lines):
        status = READY
    else:
        status = FAILED if service.failure else STARTING
    return ServiceLine(
        service=service, status=status, replicas=tuple(lines), load=load, paid_usd=paid_usd, gateways=gateways
    )


def _read_load(context: Context, service: Service, *, has_gateways: bool) -> Load | None:
    folder = find_folder(context.config, service)
    if has_gateways:
        return read_merged_load(folder, now_s=context.clock.now_s())
    return read_file(folder.load, Load) if is_locked(folder.lock) else None


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
    """Wait until these services, their machines and their balancers are gone."""
    while any(context.store.services.get(name) is not None for name in names):
        context.ensure_daemon()
        await context.clock.sleep(POLL_S)


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
        await context.clock.sleep(POLL_S)


def list_service_events(context: Context, name: str) -> Sequence[ServiceEvent]:
    """List the events of a service, and how its newest replicas lost machines and recovered. Raises UsageError."""
    service, store = find_service(context, name), context.store
    found = list(store.services.list_events(service.name))
    for job_id, number in list(store.services.list_replica_jobs(service).items())[-REPLICAS_MAX:]:
        found += [
            ServiceEvent(time_s=each.time_s, kind=REPLICA_EVENTS[each.kind], replica=number, detail=each.message)
            for each in store.events.list_kinds(tuple(REPLICA_EVENTS), job_id=job_id)
            if each.kind is not EventKind.ATTEMPT or each.data.get("number") != 1  # the first start is no recovery
        ]
    return sorted(found, key=lambda each: each.time_s)[-EVENTS_MAX:]
