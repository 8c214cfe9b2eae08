"""Reconcile one service: one step compares the store with the observed replicas, and may be repeated.

A replica is a managed job: intents, leases, recovery and collection are those of every job. A service adds rows to the
store, two files between it and its balancer, and the balancer's process. All durable state is in the store, so that a
new controller continues where a killed one stopped. With `gateway`, balancers run on machines of their own
(`gateways.py`), and the controller starts no process.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from broker.clock import Clock, within
from broker.config import Config
from broker.errors import StateError, UsageError
from broker.locks import is_locked
from broker.provision.refusals import draw_backoff_s
from broker.serve.canary import Canary, read_canary, remove_canary
from broker.serve.certificates import WARN_S
from broker.serve.credentials import ensure_credentials, make_secrets
from broker.serve.files import Load, Routing, ServiceFolder, read_file, write_file
from broker.serve.forecasting import LoadForecaster
from broker.serve.gateways import Gateways
from broker.serve.observing import DemandMeter, ObservedReplica, observe, read_load
from broker.serve.placement_history import HistoryKeeper
from broker.serve.processes import wants_json_logs
from broker.serve.publishing import make_backends, make_routing, read_probes
from broker.serve.reconciling import DRAIN_S_MAX, Slot, decide
from broker.serve.replicas import ReplicaPorts, find_folder, find_needs, make_replica_task, remove_folder
from broker.serve.scaling import ScalingState, count_replicas, scale
from broker.serve.slots import Place, PlacementRequest, SlotChooser
from broker.state.jobs import REPLICA_REQUEST
from broker.state.store import Store
from broker.types import ReadinessProbe, Replica, Service, ServiceEventKind, ServiceSpec, Task

STEP_S = 0.5
FAILURES_MAX = 3  # failed replicas of a version that was never ready
BACKOFF_S_MAX = 60.0
BALANCER_EVERY_S = 2.0  # time between two starts

LaunchBalancer = Callable[[ServiceFolder], bool]
MakeGateways = Callable[[ServiceFolder], Gateways]
DrawPorts = Callable[[Task, ServiceSpec], ReplicaPorts]
ReadLoad = Callable[[ServiceFolder, float], Load | None]  # the float: now, by the controller's clock


class ServiceController:
    """Controls one service.

    `place` returns the slots of a number of replicas; `launch_balancer` does not wait, and returns whether it started a
    process; `make_gateways` is called for services that have some.
    """

    def __init__(
        self,
        name: str,
        *,
        store: Store,
        clock: Clock,
        config: Config,
        place: Place,
        launch_balancer: LaunchBalancer,
        draw_ports: DrawPorts,
        make_gateways: MakeGateways,
        read_load: ReadLoad = read_load,
    ) -> None:
        self._name = name
        self._store, self._clock, self._config = store, clock, config
        self._place, self._launch_balancer, self._draw_ports = place, launch_balancer, draw_ports
        self._history = HistoryKeeper(store)
        self._chooser: SlotChooser | None = None  # until the first step has read its history
        self._read_load = read_load
        self._meter = DemandMeter()
        self._forecaster = LoadForecaster()
        self._scaling: ScalingState | None = None
        self._failures = Counter[int]()  # by version, since one of its replicas became ready
        self._routing: Routing | None = None  # the newest routing file
        self._next_start_s = dict[int, float]()  # by version
        self._next_balancer_s = -math.inf
        self._canary: Canary | None = None
        self._probes: Mapping[int, ReadinessProbe] = {}  # of the versions with replicas
        self._lacks_keys = False  # as recorded in an event
        self._warned_s: float | None = None  # the end of the certificate that an event warns of
        self._make_gateways = make_gateways
        self._gateways: Gateways | None = None  # None: the service has none
        self._has_json_logs = wants_json_logs(config)

    async def rest(self, wait_s: float, wake: asyncio.Event) -> None:
        """Wait until the next step is due, or until `wake` is set."""
        with suppress(TimeoutError):
            await within(wake.wait(), wait_s)
        wake.clear()

    async def step(self) -> float:
        """Take one step; return the seconds until the next, infinity once the service is gone."""
        service = self._store.services.get(self._name)
        if service is None:
            return math.inf
        folder = find_folder(self._config, service)
        if service.down_requested:
            return self._take_down(service, folder, self._observe(None))
        self._require_keys(service, folder)
        task = self._store.services.get_task(self._name, service.version)
        assert task.service is not None, "`serve up` accepts only tasks with a service"
        spec = task.service
        if spec.gateway is not None:
            self._gateways = self._gateways or self._make_gateways(folder)
            await self._gateways.follow(service, task, spec.gateway)
        load = self._gateways.merge() if self._gateways else self._read_load(folder, self._clock.now_s())
        if load is not None and load.certificate_ends_s is not None:
            self._warn_of_expiry(load.certificate_ends_s)
        with suppress(StateError):  # damaged: keep the canary that was read last
            canary = read_canary(folder)
            # A `promote` that was killed may leave a canary of the wanted version.
            self._canary = None if canary is None or canary.version == service.version else canary
        seen = self._observe(load)
        self._probes = read_probes(self._store, service, (each.replica.version for each in seen))
        seen = [kept for each in seen if (kept := self._record_events(service, each, load)) is not None]
        self._reconcile(service, task, seen, load)
        self._publish(service, task, folder, seen)
        if self._gateways is None or spec.gateway is None:
            self._ensure_balancer(folder)
        else:
            ensure_credentials(folder, self._name, has_gateways=True)
            self._gateways.reconcile(service, task, spec.gateway)
            self._gateways.push(service, task, spec.gateway, self._routing)
        return STEP_S

    def _require_keys(self, service: Service, folder: ServiceFolder) -> None:
        """Raise StateError if a service with API keys has lost them: it would be open to everyone."""
        if folder.keys.exists() or not self._store.services.has_keys(service):
            return
        if not self._lacks_keys:
            self._store.services.add_event(self._name, ServiceEventKind.KEYS_MISSING, detail=str(folder.keys))
        self._lacks_keys = True
        raise StateError(
            f"the API keys of service `{self._name}` are not on this machine: {folder.keys} does not exist",
            details=("Without them, the service would admit everyone.",),
            hints=("share `BROKER_HOME` among the machines of all controllers, or copy the file from a backup",),
        )

    def _warn_of_expiry(self, ends_s: float) -> None:
        """Record once that a certificate expires within two weeks, also if this controller replaces another."""
        if ends_s == self._warned_s or ends_s - self._clock.now_s() > WARN_S:
            return
        self._warned_s, store = ends_s, self._store.services
        kind, detail = ServiceEventKind.CERTIFICATE_EXPIRES, time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(ends_s))
        if all((each.kind, each.detail) != (kind, detail) for each in store.list_events(self._name)):
            store.add_event(self._name, kind, detail=detail)

    def _observe(self, load: Load | None) -> list[ObservedReplica]:
        unfinished = frozenset(self._store.jobs.list_unfinished_ids())
        return [observe(self._store, each, load, unfinished) for each in self._store.services.list_replicas(self._name)]

    def _record_events(self, service: Service, seen: ObservedReplica, load: Load | None) -> ObservedReplica | None:
        """Record the events of a replica; return None if it is gone, otherwise the replica."""
        replica, store = seen.replica, self._store.services
        if seen.is_over:
            with self._store.transaction():
                store.delete_replica(replica)
                if replica.drained_s is None:
                    reason = seen.job.failure if seen.job else "its job is unknown"
                    self._record_failure(service, replica, reason or "its program ended")
                else:
                    store.add_event(self._name, ServiceEventKind.REPLICA_DRAINED, replica=replica.number)
            return None
        if seen.is_ready and not seen.was_ready and replica.drained_s is None:
            replica = replace(replica, ready_s=self._clock.now_s())
            with self._store.transaction():
                store.put_replica(replica)
                if not self._is_canary(replica):  # a version that is rolled back must not be returned to
                    store.mark_ready(self._name, replica.version)
                store.add_event(self._name, ServiceEventKind.REPLICA_READY, replica=replica.number)
            self._failures[replica.version] = 0
        elif replica.drained_s is None and (reason := self._find_fault(seen)):
            replica = replace(replica, drained_s=self._clock.now_s(), failure=reason)
            with self._store.transaction():
                store.put_replica(replica)
                self._record_failure(service, replica, reason)
        if replica.drained_s is not None:
            self._end_drained(seen, replica, load)
        return replace(seen, replica=replica)

    def _find_fault(self, seen: ObservedReplica) -> str:
        """Return why a running replica must be replaced; empty if it may stay."""
        probe = self._probes.get(seen.replica.version)
        if probe is None or not seen.is_running or seen.not_ready_since_s is None:
            return ""
        most_s = probe.failure_s if seen.was_ready else probe.initial_delay_s
        if self._clock.now_s() - seen.not_ready_since_s <= most_s:
            return ""
        return f"not ready for {most_s:g} s: {seen.error}"

    def _end_drained(self, seen: ObservedReplica, replica: Replica, load: Load | None) -> None:
        """Cancel the job of a drained replica once its requests have ended, or after the longest time for that.

        A failed probe is not enough: a busy replica may still answer the requests it has. A lost one has none.
        """
        assert replica.drained_s is not None
        is_late = self._clock.now_s() - replica.drained_s >= DRAIN_S_MAX
        if replica.failure or is_late or not (seen.in_flight or self._may_get_requests(replica, load)):
            self._store.jobs.request_cancel(replica.job_id)

    def _may_get_requests(self, replica: Replica, load: Load | None) -> bool:
        """Return whether a drained replica may have received requests since the report of its `in_flight`.

        It may have, until the balancer reports that it uses a routing file in which the replica is draining.
        """
        routing = self._routing
        if load is None or routing is None or load.generation != routing.generation:
            return True
        return any(each.number == replica.number and not each.is_draining for each in routing.backends)

    def _record_failure(self, service: Service, replica: Replica, reason: str) -> None:
        """Count a failed replica; a version that was never ready is given up after three."""
        store = self._store.services
        store.add_event(self._name, ServiceEventKind.REPLICA_FAILED, replica=replica.number, detail=reason)
        self._failures[replica.version] += 1
        failures = self._failures[replica.version]
        self._next_start_s[replica.version] = self._clock.now_s() + draw_backoff_s(failures, cap_s=BACKOFF_S_MAX)
        is_given_up = failures >= FAILURES_MAX
        if self._is_canary(replica):
            if is_given_up:
                self._end_failed_canary(service)
            return
        ready = store.find_ready_version(self._name)
        if replica.version != service.version or ready == service.version or not is_given_up:
            return
        if ready is not None:
            store.set_version(self._name, ready)
            store.add_event(self._name, ServiceEventKind.ROLLED_BACK, detail=str(ready))
        else:
            store.set_failure(self._name, reason)
            store.add_event(self._name, ServiceEventKind.FAILED, detail=reason)
        self._failures[replica.version] = 0

    def _is_canary(self, replica: Replica) -> bool:
        return self._canary is not None and replica.version == self._canary.version

    def _end_failed_canary(self, service: Service) -> None:
        """Roll back the canary; the other replicas continue to serve."""
        assert self._canary is not None
        remove_canary(find_folder(self._config, service))
        self._failures[self._canary.version] = 0
        self._canary = None
        self._store.services.add_event(self._name, ServiceEventKind.ROLLED_BACK, detail=str(service.version))

    def _reconcile_canary(
        self, service: Service, slots: Sequence[Slot], seen: Sequence[ObservedReplica], load: Load | None
    ) -> None:
        """Start and drain the replicas of the canary. A service scaled to zero has none: it would get all requests."""
        if self._canary is None or (not slots and service.wanted):
            return
        task = self._store.services.get_task(self._name, self._canary.version)
        assert task.service is not None, "`serve update` accepts only tasks with a service"
        step = decide(
            self._canary.choose_slots(slots), [each.describe(self._clock.now_s()) for each in seen],
            version=self._canary.version,
        )  # fmt: skip
        self._drain(step.drain, seen, load)
        if self._may_start(self._canary.version):
            for slot in step.start:
                self._start(replace(service, version=self._canary.version), task, task.service, slot)

    def _reconcile(self, service: Service, task: Task, seen: Sequence[ObservedReplica], load: Load | None) -> None:
        """Scale, then start and drain replicas."""
        spec, now_s = task.service, self._clock.now_s()
        assert spec is not None
        first = task.resources[0]
        if self._scaling is None or self._scaling.wanted != service.wanted:
            self._scaling = ScalingState(wanted=service.wanted)
        views = tuple(each.describe(now_s) for each in seen if not self._is_canary(each.replica))
        self._chooser = self._chooser or SlotChooser(self._place, self._history.read(service))
        demand = self._gateways.measure() if self._gateways else self._meter.measure(load)
        if spec.policy.is_predictive:
            self._forecaster.observe(demand, now_s=now_s)
            starts = self._chooser.history.add_starts(views)
            demand = self._forecaster.forecast(demand, lead_s=starts.measure_cold_start_s(service.version))
        asked = count_replicas(
            spec.policy, demand,
            wanted=service.wanted, accelerator=first.accelerator or "", accelerator_count=first.accelerator_count,
        )  # fmt: skip
        self._scaling = scale(spec.policy, self._scaling, asked, now_s=now_s)
        wanted = self._scaling.wanted
        if wanted != service.wanted:
            service = replace(service, wanted=wanted)
            with self._store.transaction():
                self._store.services.set_wanted(self._name, wanted)
                self._store.services.add_event(self._name, ServiceEventKind.SCALED, detail=str(wanted))
        on_trial = [each for each in seen if self._is_canary(each.replica)]
        seen = [each for each in seen if not self._is_canary(each.replica)]
        request = PlacementRequest(
            task=task, spec=spec, count=wanted + spec.policy.spare_count if wanted else 0, replicas=views,
            has_report=load is not None,
        )  # fmt: skip
        chosen = self._chooser.choose(request, version=service.version, now_s=now_s)
        self._history.save(service, self._chooser.history)
        self._reconcile_canary(service, chosen.slots, on_trial, load)
        step = decide(
            chosen.slots, views, version=service.version, mode=service.mode,
            has_fallback=spec.policy.has_ondemand_fallback, needed=chosen.needed,
        )  # fmt: skip
        self._drain(step.drain, seen, load)
        service = self._store.services.get(self._name) or service
        if not service.failure and self._may_start(service.version):
            for slot in step.start:
                self._start(service, task, spec, slot)

    def _may_start(self, version: int) -> bool:
        """Return whether the backoff after the last failure of a version is over."""
        return self._clock.now_s() >= self._next_start_s.get(version, -math.inf)

    def _drain(self, numbers: Sequence[int], seen: Sequence[ObservedReplica], load: Load | None) -> None:
        """Drain these replicas.

        Without a report it is unknown which are ready: running ones are kept until there is one, because they may be
        the only ones that are.
        """
        for each in seen:
            if each.replica.number in numbers and (load is not None or not each.is_running):
                self._store.services.put_replica(replace(each.replica, drained_s=self._clock.now_s()))

    def _start(self, service: Service, task: Task, spec: ServiceSpec, slot: Slot) -> None:
        """Add a replica and its job in one transaction."""
        ports = self._draw_ports(task, spec)
        folder, has_gateways = find_folder(self._config, service), spec.gateway is not None
        secrets = make_secrets(folder, service.name, has_gateways=has_gateways)
        with self._store.transaction():
            number = self._store.services.draw_number(self._name)
            replica_task = make_replica_task(service, task, slot, number=number, ports=ports, secrets=secrets)
            job = self._store.jobs.add(
                f"{service.name}-{number}", replica_task, f"{REPLICA_REQUEST}{service.name}/{service.uid}/{number}",
                needs=find_needs(self._store, task), pipeline=task.pipeline or "",
            )  # fmt: skip
            self._store.services.put_replica(
                Replica(
                    service=service.name, number=number, version=service.version, job_id=job.id, port=ports.entrance,
                    created_s=self._clock.now_s(), is_spot=slot.is_spot, region=slot.region, zone=slot.zone,
                )
            )  # fmt: skip
            self._store.services.add_event(self._name, ServiceEventKind.REPLICA_STARTED, replica=number)

    def _publish(self, service: Service, task: Task, folder: ServiceFolder, seen: Sequence[ObservedReplica]) -> None:
        """Write the routing file if anything in it changed."""
        assert task.service is not None
        drained = {each.number for each in self._store.services.list_replicas(self._name) if each.drained_s is not None}
        try:
            known = read_file(folder.routing, Routing)
        except StateError:
            known = None  # damaged: written again
        wanted = make_routing(
            service, task, make_backends(task.service, seen, drained, now_s=self._clock.now_s()), probes=self._probes,
            canary=self._canary, balancers=self._gateways.count_balancers() if self._gateways else 1,
            has_json_logs=self._has_json_logs,
        )  # fmt: skip
        wanted = replace(wanted, generation=known.generation if known else 0)
        if wanted != known:
            wanted = replace(wanted, generation=int(self._clock.now_s() * 1000) + (known.generation if known else 0))
            write_file(folder.routing, wanted)
        self._routing = wanted

    def _ensure_balancer(self, folder: ServiceFolder) -> None:
        now_s = self._clock.now_s()
        if is_locked(folder.lock) or now_s < self._next_balancer_s:
            return
        self._next_balancer_s = now_s + BALANCER_EVERY_S
        ensure_credentials(folder, self._name)  # it reads them once
        if self._launch_balancer(folder):
            self._store.services.add_event(self._name, ServiceEventKind.BALANCER_STARTED)

    def _take_down(self, service: Service, folder: ServiceFolder, seen: Sequence[ObservedReplica]) -> float:
        """Stop the balancer, cancel all jobs, and delete the service once their machines are gone."""
        routing = None
        with suppress(StateError):
            routing = read_file(folder.routing, Routing)
        if routing is not None and not routing.is_stopped:
            write_file(folder.routing, replace(routing, generation=routing.generation + 1, is_stopped=True))
        for each in seen:
            if each.is_over:
                self._store.services.delete_replica(each.replica)
            else:
                self._store.jobs.request_cancel(each.replica.job_id)
        gateways = self._gateways or self._make_gateways(folder)
        are_gone = gateways.take_down(service)
        if any(not each.is_over for each in seen) or is_locked(folder.lock) or not are_gone:
            return STEP_S
        remove_folder(folder)
        with suppress(UsageError):
            self._store.services.delete(service.name)
        return math.inf
