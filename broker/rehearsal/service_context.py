"""Wire the rehearsal of a service: its real controller and balancer, with replicas on simulated clouds."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from broker.app.services import make_service_controller
from broker.clock import Clock
from broker.rehearsal.cloud import Pace
from broker.rehearsal.context import RehearsalContext
from broker.rehearsal.gang import BareGang
from broker.serve.files import Load, ReplicaLoad, ServiceFolder
from broker.serve.observing import read_load
from broker.serve.replicas import ReplicaPorts, draw_free_ports
from broker.types import ServiceSpec, Task

if TYPE_CHECKING:
    import asyncio

    from broker.jobs.daemon_parts import Controller

BOOT_SPEED = 30.0  # of the clock while machines boot: the real work of a recovery then adds little to its time
PROBE_S_MAX = 1.0  # duration of a successful probe; after a slower one, the replica is ready from the next report on


@dataclass
class ServicePace(Pace):
    """The speed of simulated time for several replicas: real time as long as the program of any of them is starting."""

    starting: set[str] = field(default_factory=set)  # clusters whose program is not ready yet

    def wait(self) -> None:
        """Run the clock fast, unless a program is starting."""
        if not self.starting:
            super().wait()

    def start(self, cluster: str) -> None:
        """Run the clock at real time until `keep` is called without this cluster."""
        self.starting.add(cluster)
        self.run()

    def keep(self, clusters: Collection[str], *, running: Collection[str] = ()) -> None:
        """Forget starting clusters other than these: their program is ready, or they are gone.

        `running`: clusters whose program runs and is not ready, perhaps not any more. Probes take real time, also those
        of a program that only answers slowly on a busy machine: a fast clock would soon give up its replica.
        """
        self.starting.intersection_update(clusters)
        self.starting.update(running)
        if self.starting:
            self.run()


@dataclass
class RehearsedLoads:
    """The reports of the balancer, a separate process that uses real time, translated to the simulated clock.

    A replica is ready, or not, from the simulated time of the first report that says so. A recovered replica has the
    address of the lost one, and may recover in less real time than the balancer takes to notice the loss: it is not
    ready before a probe that began after its start.
    """

    find_started_s: Callable[[int], float | None]  # real time, of the program of a replica
    interval_s: float  # between two probes
    _since: dict[int, tuple[tuple[bool, float], float]] = field(default_factory=dict)

    def read(self, folder: ServiceFolder, now_s: float) -> Load | None:
        """Return the newest report; None while the balancer does not run."""
        load = read_load(folder, age_s_max=math.inf)  # the age shows only how busy this machine is
        if load is None:
            return None
        return replace(load, replicas={number: self._translate(load, number, now_s) for number in load.replicas})

    def _translate(self, load: Load, number: int, now_s: float) -> ReplicaLoad:
        each = load.replicas[number]
        started_s = self.find_started_s(number)
        is_known = started_s is not None and (
            each.since_s >= started_s or load.time_s >= started_s + self.interval_s + PROBE_S_MAX
        )
        key = each.is_ready and is_known, each.since_s
        if self._since.get(number, (None, 0.0))[0] != key:
            self._since[number] = key, now_s
        return replace(each, is_ready=key[0], since_s=self._since[number][1])


@dataclass
class PacedController:
    """A controller that waits in simulated time between its steps, like those of jobs."""

    inner: Controller
    clock: Clock

    async def step(self) -> float:
        """Take one step; return the seconds until the next."""
        return await self.inner.step()

    async def rest(self, wait_s: float, wake: asyncio.Event) -> None:
        """Wait until the next step is due."""
        await self.clock.sleep(wait_s)
        wake.clear()


class ServiceRehearsalContext(RehearsalContext):
    """The objects of the rehearsal of one service, in a state folder of its own."""

    pace: ServicePace

    @property
    def service(self) -> str:
        """The name of the service."""
        return self.stage.task.name or "service"

    def _make_pace(self) -> ServicePace:
        return ServicePace(self.clock, wait_speed=BOOT_SPEED)

    @cached_property
    def loads(self) -> RehearsedLoads:
        """The reports of the balancer."""
        service = self.stage.task.service
        assert service is not None and service.probe is not None, "only services with a probe are staged"
        return RehearsedLoads(self._find_started_s, service.probe.interval_s)

    def _find_started_s(self, number: int) -> float | None:
        replicas = self.store.services.list_replicas(self.service)
        job = next((self.store.jobs.get(each.job_id) for each in replicas if each.number == number), None)
        if job is None or not job.attempts:
            return None
        return self.controlled_gang.started_s.get(job.attempts[-1].cluster)

    @cached_property
    def controlled_gang(self) -> BareGang:
        """The gang of every replica."""
        return BareGang(self.real_gang, self.pace)

    def make_any_controller(self, key: int | str) -> Controller:
        """Make the controller of a replica, by its job, or of the service, by its name."""
        if isinstance(key, int):
            return self.make_controller(key)
        made = make_service_controller(self, key, draw_ports=draw_ports_here, read_load=self.loads.read)
        return PacedController(made, self.clock)


def draw_ports_here(task: Task, spec: ServiceSpec) -> ReplicaPorts:
    """Return free ports for a new replica: on one machine, the replicas cannot all use the same port."""
    return draw_free_ports()
