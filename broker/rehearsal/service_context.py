"""Wire the rehearsal of a service: its real controller and balancer, with replicas on simulated clouds."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from broker.app.services import make_service_controller
from broker.clock import Clock, SystemClock
from broker.rehearsal.cloud import Pace
from broker.rehearsal.context import RehearsalContext
from broker.rehearsal.gang import BareGang
from broker.serve.files import Load, ServiceFolder
from broker.serve.observing import read_load
from broker.serve.replicas import ReplicaPorts, draw_free_ports
from broker.types import ServiceSpec, Task

if TYPE_CHECKING:
    import asyncio

    from broker.jobs.daemon_parts import Controller


@dataclass
class ServicePace(Pace):
    """The speed of simulated time for several replicas: real time as long as the program of any of them starts."""

    starting: set[str] = field(default_factory=set)  # clusters whose program is not ready yet

    def wait(self) -> None:
        """Run the clock fast, unless a program starts."""
        if not self.starting:
            super().wait()

    def start(self, cluster: str) -> None:
        """Run the clock at real time until `keep` is called without this cluster."""
        self.starting.add(cluster)
        self.run()

    def keep(self, clusters: Collection[str]) -> None:
        """Forget starting clusters other than these: their program is ready, or they are gone."""
        self.starting.intersection_update(clusters)


@dataclass
class RehearsedLoads:
    """The reports of the balancer, a process of its own whose times are real, for a simulated clock.

    A replica is ready, or not, since the simulated time at which the first report said so.
    """

    _since: dict[int, tuple[bool, float]] = field(default_factory=dict)

    def read(self, folder: ServiceFolder, now_s: float) -> Load | None:
        """Return the newest report, None without a recent one."""
        load = read_load(folder, SystemClock().now_s())
        if load is None:
            return None
        for number, each in load.replicas.items():
            if self._since.get(number, (None, 0.0))[0] is not each.is_ready:
                self._since[number] = each.is_ready, now_s
        replicas = {number: replace(each, since_s=self._since[number][1]) for number, each in load.replicas.items()}
        return replace(load, replicas=replicas)


@dataclass
class PacedController:
    """A controller whose rests are in simulated time, like those of jobs."""

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

    def _make_pace(self) -> ServicePace:
        return ServicePace(self.clock)

    @cached_property
    def loads(self) -> RehearsedLoads:
        """The reports of the balancer."""
        return RehearsedLoads()

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
    """Return free ports for a new replica: all share this machine, whatever port they have on their own ones."""
    return draw_free_ports()
