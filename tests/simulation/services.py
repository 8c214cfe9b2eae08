"""A service in a universe: its controller in the broker's daemon, its replicas as jobs, a balancer, clients.

The balancer is a stand-in with the product's route table; it reads and writes the product's files, holds its lock, and
can be killed at each poll. A client sends a request at each poll, which takes a few seconds.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from random import Random
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import msgspec

from broker.config import Config
from broker.locks import try_lock
from broker.serve import controller
from broker.serve.controller import ServiceController
from broker.serve.files import Backend, Load, Routing, ServiceFolder, read_file, write_file
from broker.serve.gateways import Gateways
from broker.serve.reconciling import Slot
from broker.serve.replicas import ReplicaPorts
from broker.serve.routes import RouteTable
from broker.types import NodeState, ReadinessProbe, Replica, ReplicaPolicy, Resources, ServiceSpec, Task
from tests.simulation.disk import SimulatedStore
from tests.simulation.events import TERMINAL, Event, Violation
from tests.simulation.groups import ENDLESS
from tests.simulation.machines import MachineRun, Program
from tests.simulation.mixes import JobSpec
from tests.simulation.processes import Process
from tests.simulation.world import OWNER

if TYPE_CHECKING:
    from tests.simulation.universe import Universe

NAME = "web"
POLL_S = 1.0
REQUEST_S = 4.0
SETUP_S = 1.0
SILENT_S_MAX = 60.0  # without a balancer while the service is up
END_S_MAX = 600.0  # of each step of a story
WRITERS = ("write_file", "ensure_credentials", "remove_folder")


@dataclass
class ClientRequest:
    """A request that a replica is answering."""

    number: int
    job: int
    end_s: float


@dataclass
class ServiceBed:
    """`least`: replicas that have to serve once that many have; 0 before, and after the service was asked to end."""

    universe: Universe
    demand: int = 0  # requests in flight that the balancer reports on top of the client's
    least: int = 0
    answered: int = 0
    lost: set[int] = field(default_factory=set)  # replicas that were preempted and do not serve again yet
    seen_s: float = 0.0  # when a balancer last polled
    balancers: int = 0
    is_stepping: bool = False  # the controller of the service

    # -- wiring -------------------------------------------------------------------------------------------------------

    def is_own(self, process: Process) -> bool:
        """Return whether an effect of this process now is the service's; scenes of jobs are killed at all others."""
        return self.is_stepping or process.name.startswith(("balancer", "serve"))

    def make_controller(self, name: str, store: SimulatedStore) -> ServiceController:
        return WatchedController(
            self, name, store=store, clock=self.universe.clock, config=Config(home=self.universe.folder, owner=OWNER),
            place=lambda request: [Slot()] * request.count, launch_balancer=self.launch, draw_ports=self.draw_ports,
            make_gateways=lambda folder: Gateways(
                store=store, clock=self.universe.clock, exchange=refuse, write_program=refuse, folder=folder
            ),
        )  # fmt: skip

    def draw_ports(self, task: Task, spec: ServiceSpec) -> ReplicaPorts:
        """Expect the next job to be a replica."""
        job_id = self.universe._next_job_id()
        self.universe.requests.add(f"replica/{job_id}")
        program = Program(steps=ENDLESS, setup_s=SETUP_S)
        self.universe._expect(job_id, JobSpec(submit_s=0.0, task=replace(task, service=None), program=program))
        return ReplicaPorts(program=8000, entrance=19443)

    def launch(self, folder: ServiceFolder) -> bool:
        self.universe._pass_by("balancer:launch")
        self.balancers += 1
        balancer = SimulatedBalancer(self, folder, Random(f"{self.universe.seed}/balancer-{self.balancers}"))

        async def keep() -> None:
            await self.universe.wait_for(process)

        process = self.universe.spawn(f"balancer-{self.balancers}", balancer.run)
        self.universe.begin(keep())
        return True

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Let each file of the controller be an effect, before and after which it may be killed."""

        def guard(name: str) -> Callable[..., Any]:
            do = getattr(controller, name)

            def done(*arguments: Any, **options: Any) -> Any:
                self.universe._pass_by(f"{name}:before")
                result = do(*arguments, **options)
                self.universe._pass_by(f"{name}:after")
                return result

            return done

        with patch.multiple(controller, STEP_S=POLL_S, **{name: guard(name) for name in WRITERS}):
            yield

    # -- what users do ------------------------------------------------------------------------------------------------

    async def insist(self, name: str, work: Callable[[Process], Awaitable[None]]) -> None:
        """Run a command until it has worked."""
        while True:
            process = self.universe.spawn(name, work)
            if await self.universe.wait_for(process) is None and not process.was_killed:
                return
            await asyncio.sleep(POLL_S)

    async def up(self, task: Task) -> None:
        async def work(process: Process) -> None:
            store = self.universe.open_store(process)
            if store.services.get(NAME) is None:
                assert task.service is not None
                wanted = task.service.policy.replicas_min
                store.services.add(NAME, task, host="127.0.0.1", port=1, wanted=wanted)
            store.close()

        await self.insist("serve-up", work)

    async def update(self, task: Task) -> None:
        async def work(process: Process) -> None:
            store = self.universe.open_store(process)
            service = store.services.get(NAME)
            assert service is not None
            if store.services.get_task(NAME, service.version).run != task.run:
                store.services.add_version(NAME, task)
            store.close()

        await self.insist("serve-update", work)

    async def down(self) -> None:
        async def work(process: Process) -> None:
            store = self.universe.open_store(process)
            if store.services.get(NAME) is not None:
                store.services.request_down(NAME)
            store.close()

        self.least = 0
        await self.insist("serve-down", work)
        await self.until(lambda: not self.universe.read("SELECT 1 FROM services"), "the service is never gone")

    async def until_serving(self, count: int, *, version: int) -> None:
        """Wait until exactly this many replicas are left, all of this version, ready, and not drained."""

        def is_there() -> bool:
            rows = self.list_replicas()
            is_ready = all(each.version == version and each.ready_s and not each.drained_s for each in rows)
            return len(rows) == count and is_ready and {each.number for each in rows} == self.list_numbers()

        await self.until(is_there, f"never {count} replicas of version {version}")
        self.lost.clear()

    async def until(self, is_true: Callable[[], bool], wrong: str) -> None:
        begun_s = self.universe.loop.time()
        while not is_true():
            if self.universe.loop.time() - begun_s > END_S_MAX:
                self.universe.fail(Violation("V5", wrong))
            if self.universe.failure is not None:
                raise asyncio.CancelledError
            await asyncio.sleep(POLL_S)

    def preempt(self) -> None:
        """Preempt the newest replica that serves."""
        backend = self.list_serving()[-1]
        run = self.find_run(backend)
        assert run is not None
        self.lost.add(backend.number)
        self.universe.note_fault("preempt", run.cluster)
        self.universe.cloud.preempt([run.ids[0]])

    # -- what is seen from outside ------------------------------------------------------------------------------------

    @property
    def folder(self) -> ServiceFolder | None:
        rows = self.universe.read("SELECT name, uid FROM services")
        if not rows:
            return None
        return ServiceFolder(path=self.universe.folder / "serve" / f"{rows[0]['name']}-{rows[0]['uid']}")

    def list_replicas(self) -> list[Replica]:
        rows = self.universe.read("SELECT CAST(body AS TEXT) FROM service_replicas ORDER BY number")
        return [msgspec.json.decode(body, type=Replica) for (body,) in rows]

    def list_numbers(self) -> set[int]:
        return {each.number for each in self.list_serving()}

    def list_serving(self) -> list[Backend]:
        """List the replicas that the newest file sends requests to, and whose program works."""
        folder = self.folder
        routing = read_file(folder.routing, Routing) if folder else None
        backends = routing.backends if routing else ()
        return [each for each in backends if not each.is_draining and self.find_run(each) is not None]

    def find_run(self, backend: Backend) -> MachineRun | None:
        """Return the program at this address, if it answers."""
        alive = {each.id for each in self.universe.cloud.observe() if each.state is NodeState.RUNNING}
        now_s = self.universe.loop.time()
        for run in reversed(self.universe.gang.runs.values()):
            if run.ids[0] in alive and self.universe.cloud.find(run.ids[:1])[0].address == backend.host:
                gang = self.universe.gang
                return run if gang.is_working(run) and gang.find_begun_s(run) <= now_s else None
        return None


def refuse(*parts: object, **named: object) -> Any:
    raise AssertionError("no service of these scenes has gateways")


class WatchedController(ServiceController):
    """A controller whose effects count while it steps."""

    def __init__(self, bed: ServiceBed, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._bed = bed

    async def step(self) -> float:
        self._bed.is_stepping = True
        try:
            return await super().step()
        finally:
            self._bed.is_stepping = False


class SimulatedBalancer:
    """A balancer's process, with one client."""

    def __init__(self, bed: ServiceBed, folder: ServiceFolder, random: Random) -> None:
        self._bed, self._universe, self._folder = bed, bed.universe, folder
        self._table = RouteTable(clock=self._universe.clock, draw=random)
        self._requests: list[ClientRequest] = []
        self._arrivals = 0

    async def run(self, process: Process) -> None:
        if not self._folder.path.exists():
            return
        with try_lock(self._folder.lock) as is_held:
            while is_held and self._look(process):
                await asyncio.sleep(POLL_S)

    def _look(self, process: Process) -> bool:
        """Adopt the routing file, answer clients, report; return whether to continue."""
        process.pass_by("balancer:look")
        routing = read_file(self._folder.routing, Routing) if self._folder.path.exists() else None
        if routing is None or routing.is_stopped:
            return False
        self._bed.seen_s = self._universe.loop.time()
        self._table.update(routing.backends, routing.shares)
        for route in self._table.routes.values():
            if self._bed.find_run(route.backend) is None:
                self._table.exclude(route, "refused")
            else:
                self._table.admit(route)
        try:
            self._serve()
        except Violation as violation:
            self._universe.fail(violation)
        in_flight = len(self._requests) + self._bed.demand
        load = Load(
            generation=routing.generation, time_s=self._universe.clock.now_s(), pid=os.getpid() + self._bed.balancers,
            arrivals=self._arrivals, in_flight=in_flight, replicas=self._table.describe(),
        )  # fmt: skip
        write_file(self._folder.load, load)
        process.pass_by("balancer:report")
        return True

    def _serve(self) -> None:
        """End the requests that are due, check the others, and send one more."""
        now_s = self._universe.loop.time()
        self._requests = [each for each in self._requests if each.end_s > now_s and each.number not in self._bed.lost]
        for each in self._requests:
            check_v4_requests_end(self._universe, each)
        bed = self._bed
        serving = [each for each in self._table.routes.values() if each.is_ready and not each.backend.is_draining]
        bed.lost -= {each.backend.number for each in serving}
        if len(serving) < bed.least - len(bed.lost):
            raise Violation("V3", f"{len(serving)} replicas serve, not {bed.least - len(bed.lost)}")
        route = self._table.choose()
        if route is not None:
            run = bed.find_run(route.backend)
            assert run is not None
            self._arrivals += 1
            bed.answered += 1
            self._requests.append(ClientRequest(route.backend.number, run.job, now_s + REQUEST_S))
        for each in self._table.routes.values():
            each.in_flight = sum(request.number == each.backend.number for request in self._requests)


def make_task(count: int = 2, *, run: str = "a", **policy: Any) -> Task:
    spec = ServiceSpec(probe=ReadinessProbe(path="/"), policy=ReplicaPolicy(replicas_min=count, **policy), port=8000)
    return Task(name=NAME, run=run, resources=(Resources(),), service=spec)


# -- invariants ---------------------------------------------------------------------------------------------------


def check_v1_no_double_replica(universe: Universe, event: Event) -> None:
    """Check that no version has more replicas than were ever wanted at once, and each has a job of its own."""
    bed = universe.services
    if bed is None or "service_replicas" not in event.written:
        return
    for (wanted,) in universe.read("SELECT wanted FROM services"):
        universe.memory["V1"] = max(universe.memory.get("V1", 0), wanted)
    rows = bed.list_replicas()
    counts = Counter(each.version for each in rows if each.drained_s is None)
    if counts and max(counts.values()) > universe.memory["V1"]:
        raise Violation("V1", f"{max(counts.values())} replicas of one version, not {universe.memory['V1']}")
    if len({each.job_id for each in rows}) < len(rows):
        raise Violation("V1", "two replicas are one job")


def check_v2_no_replica_is_forgotten(universe: Universe, event: Event) -> None:
    """Check that a job that serves has a row of its service, until it has ended or was asked to."""
    if universe.services is None or not {"jobs", "service_replicas"} & set(event.written):
        return
    rows = universe.read(
        f"SELECT id FROM jobs WHERE status NOT IN {TERMINAL} AND NOT cancel_requested "
        "AND id NOT IN (SELECT job_id FROM service_replicas)"
    )
    if rows:
        raise Violation("V2", f"job {rows[0][0]} serves, and no service knows of it")


def check_v4_requests_end(universe: Universe, request: ClientRequest) -> None:
    """Check that a replica is not ended while it answers a request."""
    row = universe.read("SELECT cancel_requested FROM jobs WHERE id = ?", (request.job,))[0]
    if row[0] and universe.services is not None and universe.services.least:
        raise Violation("V4", f"replica {request.number} is ended, and it has a request")


def check_v6_a_balancer_is_there(universe: Universe, event: Event) -> None:
    """Check that a balancer that was killed is started again."""
    bed = universe.services
    if bed is not None and bed.least and event.time_s - bed.seen_s > SILENT_S_MAX:
        raise Violation("V6", f"no balancer for {event.time_s - bed.seen_s:.0f} s")


def check_service_end(universe: Universe) -> None:
    """Raise a violation unless nothing of the service is left: rows, files, a balancer."""
    bed = universe.services
    assert bed is not None
    if bed.list_replicas() or universe.read("SELECT 1 FROM services"):
        raise Violation("V5", "rows of the service are left")
    if left := sorted(each.name for each in (universe.folder / "serve").glob("*")):
        raise Violation("V5", f"{left[0]} is left")
    if any(each.name.startswith("balancer") and each.is_alive for each in universe.processes):
        raise Violation("V5", "a balancer is left")
    if not bed.answered:
        raise Violation("V5", "no request was answered")
