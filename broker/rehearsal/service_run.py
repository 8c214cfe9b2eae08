"""Run one rehearsal of a service: its replicas serve requests, lose their machines, and are replaced."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from broker.clock import SystemClock
from broker.clouds import local_machine
from broker.formatting import format_count, format_usd
from broker.locks import is_locked
from broker.rehearsal.cloud import WAIT_SPEED
from broker.rehearsal.driver import Driver
from broker.rehearsal.request_load import RequestSender
from broker.rehearsal.service_context import BOOT_SPEED, ServiceRehearsalContext
from broker.rehearsal.service_verdict import Orphans
from broker.rehearsal.service_watch import ReplicaWatch, WatchedReplica
from broker.serve.replicas import LOOPBACK, draw_free_port, find_folder
from broker.serve.wording import describe_service_event
from broker.task.expansion import fill_probe
from broker.types import Cluster, NodeState, Service, ServiceProtocol

LONG_WAIT_S = 600.0  # after this, the wait is for capacity, and its length matters less than its end
JUMP_REAL_S_MAX = 1.0  # of undisturbed service that one poll represents; a busy machine may poll less often


@dataclass
class ServiceDriver(Driver[ServiceRehearsalContext]):
    """Drive the controllers of one service and its replicas for `duration_s` of simulated service."""

    duration_s: float = 0.0
    failure: str = ""  # the newest reason why the service or a replica is not ready
    left: Orphans = field(default_factory=Orphans)
    _lock: Path | None = None  # of the balancer
    _full_s: float | None = None  # when all wanted replicas were first ready
    _outage_s: float = 0.0  # without a ready replica, up to the newest poll
    _looked_s: float = 0.0  # real
    _wait_since_s: float | None = None  # since when a replica has waited for machines
    _events: int = 0

    def __post_init__(self) -> None:
        task = self.context.stage.task
        spec = task.service
        assert spec is not None and spec.probe is not None, "only services with a probe are staged"
        self.spec, self.probe = spec, fill_probe(spec.probe, task.secrets)
        self.watch = ReplicaWatch(self.context)
        self.requests = RequestSender(
            "", self.probe, self._read_outage_s, is_grpc=spec.protocol is ServiceProtocol.GRPC
        )

    async def run(self) -> None:
        """Run to the end, and send requests once a replica has been ready."""
        sending = asyncio.ensure_future(self.requests.send_forever())
        try:
            await super().run()
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)

    def submit(self) -> None:
        """Record the service."""
        context = self.context
        port = draw_free_port()  # another rehearsal may begin at the same time
        made = context.store.services.add(
            context.service, context.stage.played, host=LOOPBACK, port=port, wanted=self.spec.policy.replicas_min
        )
        self._lock = find_folder(context.config, made).lock
        self.requests.url = f"http://{LOOPBACK}:{port}/{self.probe.path.lstrip('/')}"

    def is_over(self) -> bool:
        """Return whether the service is gone."""
        return self._find_service() is None

    def request_end(self) -> None:
        """Request the end of the service."""
        if self._find_service() is not None:
            self.context.store.services.request_down(self.context.service)

    def report_events(self) -> None:
        """Print the events of the service and of its replicas' jobs, oldest first."""
        store, jobs = self.context.store, self.watch.jobs
        found = [
            (each.time_s, f"replica {jobs[each.job_id or 0]}: {each.message}") for each in self.list_new_events(jobs)
        ]
        if self._find_service() is not None:
            events = store.services.list_events(self.context.service)
            found += [
                (each.time_s, ("service: " if each.replica is None else "") + describe_service_event(each))
                for each in events[self._events :]
            ]
            self._events = len(events)
        for time_s, message in sorted(found):
            self.report_event(time_s, message)

    async def poll(self) -> None:
        """Watch the replicas, set the pace of the clock, and preempt replicas or end when it is time."""
        service = self._find_service()
        if service is None or service.down_requested:
            self.report_events()
            self.context.pace.keep(())
            return
        self._outage_s = self._read_outage_s()
        replicas = self.watch.observe(service)
        self.report_events()
        ready = sum(each.is_ready for each in replicas)
        self.failure = service.failure or next((each.seen.error for each in reversed(replicas) if each.seen.error), "")
        # A service without replicas starts one for a request. The balancer reports once it listens.
        is_listening = find_folder(self.context.config, service).load.exists()
        is_asked = bool(self.watch.placements) or (not service.wanted and is_listening)
        can_send = self.spec.protocol is not ServiceProtocol.TCP and not self.spec.is_tls_passed
        self.requests.is_sending = can_send and is_asked
        if self._full_s is None and service.wanted and ready >= service.wanted:
            self._full_s = self.context.clock.now_s()
        is_full = self._full_s is not None and len(replicas) >= service.wanted
        is_steady = is_full and all(each.is_settled for each in replicas)
        self._report_progress(service, ready)
        if self._is_done(service, is_steady=is_steady):
            await self.requests.stop()
            self.watch.note_count(service, replicas)
            self.request_end()
        elif is_steady and self._is_preemption_due() and (victims := self._choose_victims(replicas)):
            await self.preempt(victims, attempt=len(self.forced_preemptions) + 1)
        else:
            self._set_pace(replicas, is_steady=is_steady)

    def _read_outage_s(self) -> float:
        """Return the total simulated seconds without a ready replica, during which requests had to wait."""
        newest = self.watch.counts[-1] if self.watch.counts else None
        is_out = newest is not None and not newest.ready
        return self._outage_s + (self.context.clock.now_s() - newest.time_s if newest and is_out else 0.0)

    def _find_service(self) -> Service | None:
        return self.context.store.services.get(self.context.service)

    def _is_done(self, service: Service, *, is_steady: bool) -> bool:
        """Return whether the time is over: not while replicas recover, unless that takes longer than a start may."""
        now_s = self.context.clock.now_s()
        if service.failure:
            return True
        if self._full_s is None:
            return now_s - self.context.start_s >= self.duration_s + self.probe.initial_delay_s
        over_s = now_s - self._full_s - self.duration_s
        return over_s >= self.probe.initial_delay_s or (over_s >= 0 and is_steady and not self._is_preemption_due())

    def _find_preemption_s(self) -> float:
        """Return when the next forced preemption is due: they divide the time into equal parts."""
        assert self._full_s is not None
        return self._full_s + self.duration_s * (len(self.forced_preemptions) + 1) / (self.preemptions + 1)

    def _is_preemption_due(self) -> bool:
        if len(self.forced_preemptions) >= self.preemptions or self._full_s is None or not self._has_spot():
            return False
        return self.context.clock.now_s() >= self._find_preemption_s()

    def _has_spot(self) -> bool:
        return any(each.is_spot for each in self.watch.placements)

    def _choose_victims(self, replicas: Sequence[WatchedReplica]) -> Sequence[Cluster]:
        """Return the spot clusters of the market with the most replicas: a market preempts its nodes together."""
        markets: dict[tuple[str, str, str, str], list[Cluster]] = defaultdict(list)
        for each in replicas:
            if each.cluster is not None and each.cluster.placement.is_spot:
                offer = each.cluster.placement.offer
                markets[offer.cloud, offer.region, offer.zone or "", offer.instance_type].append(each.cluster)
        return max(markets.values(), key=len, default=[])

    def _set_pace(self, replicas: Sequence[WatchedReplica], *, is_steady: bool) -> None:
        """Run the clock at real time while programs start, fast while machines boot, and skip undisturbed hours."""
        context, real_s = self.context, SystemClock().now_s()
        passed_s, self._looked_s = min(real_s - self._looked_s, JUMP_REAL_S_MAX), real_s
        context.pace.keep(
            [each.cluster.name for each in replicas if each.cluster and not each.is_ready and not each.is_taken],
            running=[
                each.cluster.name
                for each in replicas
                if each.cluster and each.seen.is_running and not each.is_ready and not each.is_taken
            ],
        )
        if not is_steady:
            is_waiting = any(each.waits_for_machines for each in replicas)
            self._wait_since_s = (self._wait_since_s or context.clock.now_s()) if is_waiting else None
            is_long = is_waiting and context.clock.now_s() - (self._wait_since_s or 0.0) > LONG_WAIT_S
            context.pace.wait_speed = WAIT_SPEED if is_long else BOOT_SPEED
            (context.pace.wait if is_waiting else context.pace.run)()
            return
        self._wait_since_s = None
        context.pace.run()
        assert self._full_s is not None
        is_forced = len(self.forced_preemptions) >= self.preemptions or not self._has_spot()
        until_s = self._full_s + self.duration_s if is_forced else self._find_preemption_s()
        jump_s = min(passed_s * (context.speed - 1), max(0.0, until_s - context.clock.now_s()))
        context.clock.advance(jump_s)

    def _report_progress(self, service: Service, ready: int) -> None:
        if not self.is_line_due():
            return
        context, tally = self.context, self.requests.tally
        spent = format_usd(context.store.bills.spend_usd(now_s=context.clock.now_s()))
        if self.bar is not None:
            self.bar.describe(f"{self.stamp().strip()}, {ready}/{service.wanted} ready, {spent} USD")
            if self._full_s is not None:
                self.bar.update(min(context.clock.now_s() - self._full_s, self.duration_s), total=self.duration_s)
            return
        requests = f"{format_count(tally.sent, 'request')}, {tally.failed} failed"
        self.write(f"{self.stamp()}   {ready} of {service.wanted} ready  {requests}  {spent} USD so far")

    async def check_end(self) -> None:
        """Count the orphans: machines that still run, processes of any machine, and the balancer."""
        machines = processes = 0
        for cloud in self.context.rehearsed.values():
            for node in await cloud.list_nodes(self.context.config.owner):
                machines += node.state is not NodeState.TERMINATED
                processes += len(local_machine.find_marked(node.handle))
        assert self._lock is not None
        self.left = Orphans(machines=machines, processes=processes, has_balancer=is_locked(self._lock))
