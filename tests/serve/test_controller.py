"""The controller of a service, with simulated jobs, machines and balancer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from broker.config import Config
from broker.errors import StateError
from broker.locks import hold_lock
from broker.runtime.reports import ExchangeReply
from broker.serve.canary import Canary, write_canary
from broker.serve.controller import ServiceController
from broker.serve.files import Load, LoadWindow, ReplicaLoad, Routing, ServiceFolder, read_file, write_file
from broker.serve.gateways import Gateways
from broker.serve.keys import create_key
from broker.serve.observing import find_host, observe
from broker.serve.placement import SpotPlace, count_ondemand, observe_places, place_replicas
from broker.serve.reconciling import Slot
from broker.serve.replicas import ReplicaPorts, find_folder, make_replica_task
from broker.serve.slots import Place, PlacementRequest
from broker.state.store import Store
from broker.types import (
    Attempt,
    Cluster,
    ClusterStatus,
    JobStatus,
    Node,
    NodeState,
    Placement,
    ReadinessProbe,
    Replica,
    ReplicaPolicy,
    Resources,
    Secret,
    Service,
    ServiceEventKind,
    ServiceSpec,
    Task,
)
from tests.simulation.world import make_offer


class StillClock:
    now = 1_000_000.0

    def now_s(self) -> float:
        return self.now

    async def sleep(self, duration_s: float) -> None:
        self.now += duration_s


def make_task(count: int = 2, version: str = "a", **policy: Any) -> Task:
    spec = ServiceSpec(probe=ReadinessProbe(path="/"), policy=ReplicaPolicy(replicas_min=count, **policy), port=8080)
    return Task(name="web", run=version, resources=(Resources(cloud="local"),), service=spec)


class World:
    """A store, and a simulation of everything around a controller: jobs, machines and the balancer."""

    def __init__(self, folder: Path, task: Task | None = None) -> None:
        self.config = Config(home=folder, owner="a" * 12)
        self.clock = StillClock()
        self.store = Store(folder / "state.db", clock=self.clock)
        self.service: Service = self.store.services.add(
            "web",
            task or make_task(),
            host="127.0.0.1",
            port=1,
            wanted=(task or make_task()).service.policy.replicas_min,  # type: ignore[union-attr]
        )
        self.folder = find_folder(self.config, self.service)
        self.balancers = 0
        self.failing: Callable[[Task], bool] = lambda task: False
        self.drawn = 0
        self.controller = self.make_controller()
        self.is_refusing = False
        self.in_flight_here = 0
        self.window = LoadWindow()
        self.certificate_ends_s: float | None = None

    def make_controller(self, place: Place = lambda request: [Slot()] * request.count) -> ServiceController:
        def draw(task: Task, spec: ServiceSpec) -> ReplicaPorts:
            self.drawn += 1
            return ReplicaPorts(program=8080, entrance=9000 + self.drawn)

        return ServiceController(
            "web", store=self.store, clock=self.clock, config=self.config,
            place=place, launch_balancer=lambda folder: self.launch_balancer(folder), draw_ports=draw,
            make_gateways=self.make_gateways,
        )  # fmt: skip

    def make_gateways(self, folder: ServiceFolder) -> Gateways:
        return Gateways(
            store=self.store, clock=self.clock, exchange=lambda *parts: self.exchange(*parts),
            write_program=self.write_program, folder=folder,
        )  # fmt: skip

    async def exchange(self, cluster: Cluster, files: Mapping[str, str], read: Sequence[str]) -> ExchangeReply:
        raise AssertionError("only services with gateways have machines to exchange files with")

    def write_program(self, folder: ServiceFolder, *, is_here: bool) -> Path:
        raise AssertionError("only services with gateways have a program for them")

    def launch_balancer(self, folder: ServiceFolder) -> bool:
        self.balancers += 1
        return True

    def play(self) -> None:
        """Let jobs start, fail and be cancelled, and the balancer adopt its file."""
        for job in self.store.jobs.list():
            if job.cancel_requested and not job.status.is_terminal:
                self.store.jobs.set_status(job.id, JobStatus.CANCELLED)
                for each in job.attempts:
                    self.store.clusters.delete(each.cluster)
                    self.store.jobs.put_attempt(
                        Attempt(job_id=job.id, number=each.number, cluster=each.cluster, placement=each.placement,
                                started_s=0.0, ended_s=self.clock.now)
                    )  # fmt: skip
            elif job.status is JobStatus.PENDING and self.failing(job.task):
                self.store.jobs.set_status(job.id, JobStatus.FAILED, "its program failed")
            elif job.status is JobStatus.PENDING:
                self._run(job.id, job.stem)
        routing = None if self.is_refusing else read_file(self.folder.routing, Routing)
        if routing is not None:
            loads = {each.number: ReplicaLoad(is_ready=True, in_flight=0, since_s=0.0) for each in routing.backends}
            write_file(
                self.folder.load,
                Load(
                    generation=routing.generation, time_s=self.clock.now, pid=1, replicas=loads,
                    in_flight=self.in_flight_here, window=self.window, certificate_ends_s=self.certificate_ends_s,
                ),
            )  # fmt: skip

    def _run(self, job_id: int, stem: str) -> None:
        placement = Placement(offer=make_offer("here"), is_spot=False, node_count=1)
        node = Node(
            id=stem, cloud="local", owner="a" * 12, cluster=stem, attempt=1, token=stem, rank=0,
            state=NodeState.RUNNING, address="127.0.0.9",
        )  # fmt: skip
        self.store.clusters.put(
            Cluster(name=stem, status=ClusterStatus.UP, placement=placement, attempt=1, nodes=(node,), job_id=job_id)
        )
        self.store.jobs.put_attempt(
            Attempt(job_id=job_id, number=1, cluster=stem, placement=placement, started_s=0.0, running_s=0.0)
        )
        self.store.jobs.set_status(job_id, JobStatus.RUNNING)

    def fail(self, replica: Replica) -> None:
        """End the running job of a replica."""
        (attempt,) = self.store.jobs.list_attempts(replica.job_id)
        self.store.jobs.set_status(replica.job_id, JobStatus.FAILED, "out of memory")
        self.store.clusters.delete(attempt.cluster)
        self.store.jobs.put_attempt(replace(attempt, ended_s=1.0))

    def settle(self, turns: int = 30) -> None:
        self.folder.path.mkdir(parents=True, exist_ok=True)
        for _ in range(turns):
            if self.is_locked_run():
                return
            self.play()
            self.clock.now += 1

    def is_locked_run(self) -> bool:
        """Take one step while a balancer holds its lock; return whether the service is gone."""
        service = self.store.services.get("web")
        if service is None:
            return True
        if service.down_requested:
            return asyncio.run(self.controller.step()) == float("inf")
        with hold_lock(self.folder.lock):
            asyncio.run(self.controller.step())
        return False

    def check(self) -> None:
        """Check that every live job of the service belongs to one replica, and every replica to one job."""
        rows = self.store.services.list_replicas("web") if self.store.services.get("web") else []
        live = [job.id for job in self.store.jobs.list() if not job.status.is_terminal]
        assert len({row.job_id for row in rows}) == len(rows)
        assert set(live) <= {row.job_id for row in rows}

    def list_ready(self) -> list[int]:
        load = read_file(self.folder.load, Load)
        unfinished = frozenset(self.store.jobs.list_unfinished_ids())
        seen = [observe(self.store, each, load, unfinished) for each in self.store.services.list_replicas("web")]
        return [each.replica.version for each in seen if each.is_ready and each.replica.drained_s is None]

    def list_kinds(self) -> list[ServiceEventKind]:
        return [each.kind for each in self.store.services.list_events("web")]


def test_wanted_replicas_become_ready_and_a_failed_one_is_replaced(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.settle()
    assert world.list_ready() == [1, 1]
    first = world.store.services.list_replicas("web")[0]
    world.fail(first)
    world.settle()
    assert world.list_ready() == [1, 1]
    assert first.number not in [each.number for each in world.store.services.list_replicas("web")]
    assert [each.detail for each in world.store.services.list_events("web") if "FAILED" in each.kind] == [
        "out of memory"
    ]


def test_version_that_never_becomes_ready_is_rolled_back(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.settle()
    world.failing = lambda task: task.run == "b"
    world.store.services.add_version("web", make_task(version="b"))
    world.settle(400)
    assert world.list_ready() == [1, 1]
    assert ServiceEventKind.ROLLED_BACK in world.list_kinds()
    service = world.store.services.get("web")
    assert service is not None and service.version == 1


def test_update_is_not_rolled_back_because_replicas_of_the_old_version_fail(tmp_path: Path) -> None:
    """That they fail is why one updates."""
    world = World(tmp_path)
    world.settle(5)
    failures = iter([True, True])
    world.failing = lambda task: task.run == "b" and next(failures, False)
    world.store.services.add_version("web", make_task(version="b"))
    for each in world.store.services.list_replicas("web"):
        world.fail(each)
    world.settle(120)
    assert world.list_ready() == [2, 2] and not next(failures, False)
    assert ServiceEventKind.ROLLED_BACK not in world.list_kinds()


def test_first_version_that_fails_three_times_fails_the_service(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.failing = lambda task: True
    world.settle(400)
    service = world.store.services.get("web")
    assert service is not None and service.failure == "its program failed"
    routing = read_file(world.folder.routing, Routing)
    assert routing is not None and routing.failure == service.failure, "clients are told, instead of waiting"
    assert 3 <= len(world.store.jobs.list()) <= 4


def test_replica_that_is_not_ready_in_time_is_replaced(tmp_path: Path) -> None:
    world = World(tmp_path, make_task(count=1))
    world.settle()
    number = world.store.services.list_replicas("web")[0].number
    routing = read_file(world.folder.routing, Routing)
    assert routing is not None
    world.is_refusing = True
    bad = {number: ReplicaLoad(is_ready=False, in_flight=0, since_s=world.clock.now, error="503")}
    for _ in range(250):
        load = Load(generation=routing.generation, time_s=world.clock.now, pid=1, replicas=bad)
        write_file(world.folder.load, load)
        world.is_locked_run()
        world.play()
        world.clock.now += 1
    world.is_refusing = False
    world.settle()
    assert [each.number for each in world.store.services.list_replicas("web")] != [number]
    assert world.list_ready() == [1]


def test_recovered_replica_gets_the_time_of_a_first_start_until_it_is_ready_again(tmp_path: Path) -> None:
    """Its model is loaded again on other machines, which takes longer than a running program may fail its probes."""
    world = World(tmp_path, make_task(count=1))
    world.settle()
    (replica,) = world.store.services.list_replicas("web")
    world.store.jobs.set_status(replica.job_id, JobStatus.RECOVERING)
    world.settle(3)
    (lost,) = world.store.jobs.list_attempts(replica.job_id)
    world.store.jobs.put_attempt(replace(lost, number=2, started_s=world.clock.now - 90, running_s=world.clock.now))
    world.store.jobs.set_status(replica.job_id, JobStatus.RUNNING)
    world.is_refusing = True
    report(world, replica.number, is_ready=False, seconds=1_150)
    assert [each.number for each in world.store.services.list_replicas("web")] == [replica.number]
    report(world, replica.number, is_ready=True, seconds=5)
    report(world, replica.number, is_ready=False, seconds=150)
    assert [each.number for each in world.store.services.list_replicas("web")] == [replica.number]
    report(world, replica.number, is_ready=False, seconds=250)
    assert replica.number not in [each.number for each in world.store.services.list_replicas("web")]


def report(world: World, number: int, *, is_ready: bool, seconds: int) -> None:
    """Have the balancer report one replica for this long, as it was at the beginning."""
    since_s = world.clock.now
    for _ in range(seconds):
        routing = read_file(world.folder.routing, Routing)
        assert routing is not None
        seen = {number: ReplicaLoad(is_ready=is_ready, in_flight=0, since_s=since_s, error="" if is_ready else "503")}
        load = Load(generation=routing.generation, time_s=world.clock.now, pid=1, replicas=seen)
        write_file(world.folder.load, load)
        world.is_locked_run()
        world.play()
        world.clock.now += 1


def test_slow_streams_add_replicas_and_fast_ones_remove_them_one_by_one(tmp_path: Path) -> None:
    world = World(tmp_path, make_task(count=1, replicas_max=6, target_ttft_s=0.5, downscale_delay_s=20.0))
    world.settle(5)
    world.in_flight_here, world.window = 1, LoadWindow(ttft_p95_s=0.8)
    world.settle(2)
    assert world.store.services.get("web").wanted == 2  # type: ignore[union-attr]
    world.window = LoadWindow(ttft_p95_s=0.4)
    world.settle(60)
    assert world.list_ready() == [1, 1], "one replica would need 0.8 s"
    world.window = LoadWindow(ttft_p95_s=0.1)
    world.settle(60)
    assert world.list_ready() == [1]
    scaled = [each.detail for each in world.store.services.list_events("web") if each.kind is ServiceEventKind.SCALED]
    assert scaled == ["2", "1"]


@pytest.mark.parametrize("is_predictive", [False, True])
def test_rising_load_adds_replicas_ahead_if_the_policy_says_so(tmp_path: Path, *, is_predictive: bool) -> None:
    policy = {"replicas_max": 40, "target_in_flight": 1.0, "is_predictive": is_predictive}
    world = World(tmp_path, make_task(count=1, **policy))
    world.settle(3)
    for turn in range(30):  # ten minutes
        world.clock.now += 20
        world.in_flight_here = 2 + turn // 2
        world.play()
        world.is_locked_run()
    service = world.store.services.get("web")
    assert service is not None and world.in_flight_here == 16
    assert service.wanted in ((17, 18) if is_predictive else (16,)), "replicas are ready within a minute here"


def test_replica_drains_until_its_requests_have_ended(tmp_path: Path) -> None:
    world = World(tmp_path, make_task(count=1))
    world.settle()
    world.store.services.add_version("web", make_task(count=1, version="b"))
    world.settle(6)
    assert world.list_ready() == [2]
    world.settle()
    assert [each.version for each in world.store.services.list_replicas("web")] == [2]


def test_running_replica_is_not_drained_while_the_balancer_is_silent(tmp_path: Path) -> None:
    """Its last report may be old because this machine was suspended: the replica may be the only ready one."""
    world = World(tmp_path, make_task(count=2))
    world.settle()
    world.is_refusing = True  # reports of the present replicas become old
    world.store.services.add_version("web", make_task(count=1, version="b"))
    world.clock.now += 60
    world.is_locked_run()
    assert [each.drained_s for each in world.store.services.list_replicas("web")] == [None, None]
    world.is_refusing = False
    world.settle()
    assert world.list_ready() == [2]


def drain_old_replica(world: World) -> int:
    """Update a service of one replica until the old one is drained; return the old one's job."""
    world.settle()
    job_id = world.store.services.list_replicas("web")[0].job_id
    world.store.services.add_version("web", make_task(count=1, version="b"))
    while world.store.services.list_replicas("web")[0].drained_s is None:
        world.settle(1)
    return job_id


def step(world: World, **load: Any) -> None:
    """Take one step with this report of the balancer about the old replica; the new one is ready."""
    routing = read_file(world.folder.routing, Routing)
    assert routing is not None
    fields = {"generation": routing.generation, "time_s": world.clock.now, "is_ready": True, "in_flight": 1, **load}
    first = ReplicaLoad(is_ready=fields["is_ready"], in_flight=fields["in_flight"], since_s=0.0)
    replicas = {1: first, 2: ReplicaLoad(is_ready=True, in_flight=0, since_s=0.0)}
    write_file(
        world.folder.load, Load(generation=fields["generation"], time_s=fields["time_s"], pid=1, replicas=replicas)
    )
    world.is_locked_run()
    world.clock.now += 1


def test_drained_replica_keeps_its_requests_while_its_probe_fails_or_the_balancer_is_silent(tmp_path: Path) -> None:
    world = World(tmp_path, make_task(count=1))
    job_id = drain_old_replica(world)

    def is_cancelled() -> bool:
        job = world.store.jobs.get(job_id)
        return job is not None and job.cancel_requested

    step(world, is_ready=False)
    assert not is_cancelled()
    step(world, time_s=world.clock.now - 60)  # the balancer is alive, but has not written for a minute
    assert not is_cancelled()
    step(world, generation=0, in_flight=0)  # it does not act on the drain yet
    assert not is_cancelled()
    step(world, in_flight=0)
    assert is_cancelled()


def test_report_from_before_the_drain_does_not_end_a_replica_that_got_a_request_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, make_task(count=1))
    job_id = drain_old_replica(world)
    routing = read_file(world.folder.routing, Routing)
    assert routing is not None
    late = Load(
        generation=routing.generation, time_s=world.clock.now, pid=1,
        replicas={1: ReplicaLoad(is_ready=True, in_flight=1, since_s=0.0)},
    )  # fmt: skip
    reads = list[Any]()

    def read(path: Path, kind: type[Any]) -> Any:
        found = read_file(path, kind)
        if kind is Load:
            reads.append(found)
            write_file(path, late)  # the balancer reports after the controller's first observation
        return found

    monkeypatch.setattr("broker.serve.observing.read_file", read)
    step(world, generation=routing.generation - 1, in_flight=0)
    job = world.store.jobs.get(job_id)
    assert reads and job is not None and not job.cancel_requested


def test_each_version_is_probed_as_it_says(tmp_path: Path) -> None:
    """An update often changes the model that a probe asks for, or its path: the old version serves until then."""
    world = World(tmp_path)
    world.settle(5)
    world.store.services.add_version("web", change_probe(make_task(version="b"), path="/v2"))
    world.is_refusing = True  # the new version stays without a report
    world.settle(5)
    routing = read_file(world.folder.routing, Routing)
    assert routing is not None and {each.version for each in routing.backends} == {1, 2}
    assert [routing.find_probe(version).path for version in (1, 2)] == ["/", "/v2"]
    world.is_refusing = False
    world.settle(30)
    routing = read_file(world.folder.routing, Routing)
    assert routing is not None and not routing.probes and routing.probe.path == "/v2"


def test_times_of_a_probe_are_those_of_its_version(tmp_path: Path) -> None:
    world = World(tmp_path, make_task(count=1))
    world.settle(5)
    patient = change_probe(make_task(count=1, version="b"), path="/", initial_delay_s=4_000.0)
    write_canary(world.folder, Canary(version=world.store.services.add_version("web", patient), share=0.5))
    world.store.services.set_version("web", 1)
    world.is_refusing = True
    world.settle(3)
    (canary,) = (each.number for each in world.store.services.list_replicas("web") if each.version == 2)
    since_s, loads = world.clock.now, {1: ReplicaLoad(is_ready=True, in_flight=0, since_s=0.0)}
    for _ in range(15):
        world.clock.now += 200
        loads[canary] = ReplicaLoad(is_ready=False, in_flight=0, since_s=since_s, error="503")
        write_file(world.folder.load, Load(generation=1, time_s=world.clock.now, pid=1, replicas=loads))
        world.is_locked_run()
    assert canary in [each.number for each in world.store.services.list_replicas("web") if each.drained_s is None]


def test_replicas_of_a_version_with_another_number_of_them_have_the_same_program(tmp_path: Path) -> None:
    """Only then may the streams of one version continue on the other."""

    def list_programs(world: World) -> list[str]:
        routing = read_file(world.folder.routing, Routing)
        assert routing is not None
        return [each.program for each in routing.backends if not each.is_draining]

    world = World(tmp_path)
    world.settle()
    before = list_programs(world)
    assert len(before) == 2 and len(set(before)) == 1 and before[0]
    world.store.services.add_version("web", make_task(count=3))
    world.settle(60)
    assert list_programs(world) == [before[0]] * 3
    world.store.services.add_version("web", make_task(count=3, version="b"))
    world.settle(60)
    assert before[0] not in list_programs(world)


def test_secret_of_a_probe_is_in_the_routing_file_and_not_in_the_state_file(tmp_path: Path) -> None:
    task = change_probe(make_task(), path="/", headers={"authorization": "Bearer $LOGIN"})
    world = World(tmp_path, replace(task, secrets={"LOGIN": Secret(value="open-sesame")}))
    world.settle(5)
    routing = read_file(world.folder.routing, Routing)
    assert routing is not None and routing.probe.headers == {"authorization": "Bearer open-sesame"}
    assert world.folder.routing.stat().st_mode & 0o077 == 0
    state = [each.read_bytes() for each in tmp_path.glob("state.db*")]
    assert state and not any(b"open-sesame" in each for each in state)


def change_probe(task: Task, **fields: Any) -> Task:
    assert task.service is not None
    return replace(task, service=replace(task.service, probe=ReadinessProbe(**fields)))


def test_service_that_is_down_leaves_no_job_row_or_file(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.settle()
    world.store.services.request_down("web")
    world.settle()
    assert world.store.services.get("web") is None
    assert world.store.jobs.list_unfinished_ids() == [] and not world.folder.path.exists()


def test_replica_learns_its_number_and_port_and_prefers_its_slot(tmp_path: Path) -> None:
    task = Task(run="x", resources=(Resources(cloud="aws", ports=("8080", "9090")),), service=make_task().service)
    service = Service(name="web", uid="u", version=1, host="h", port=1, created_s=0.0)
    slot = Slot(is_spot=True, region="us-east-1", zone="us-east-1a")
    made = make_replica_task(
        service, task, slot, number=3, ports=ReplicaPorts(program=8080, entrance=19443), secrets={}
    )
    assert made.envs["SKYPILOT_SERVE_REPLICA_ID"] == "3" and made.envs["BROKER_REPLICA_PORT"] == "8080"
    assert [each.zone for each in made.resources] == ["us-east-1a", None] and made.is_ordered
    assert made.envs["BROKER_REPLICA_HOST"] == "127.0.0.1"
    # Nothing but the entrance is open: not even the program's own port.
    assert all(each.use_spot and each.ports == ("19443",) for each in made.resources)
    assert made.service is None


class SpotWorld(World):
    """A world whose replicas run where their task asks."""

    def _run(self, job_id: int, stem: str) -> None:
        super()._run(job_id, stem)
        job = self.store.jobs.get(job_id)
        assert job is not None
        asked = job.task.resources[0]
        placement = Placement(offer=make_offer(asked.zone or "here"), is_spot=bool(asked.use_spot), node_count=1)
        self.store.jobs.put_attempt(replace(job.attempts[0], placement=placement, running_s=self.clock.now))

    def list_live(self) -> list[tuple[bool | None, str | None]]:
        rows = self.store.services.list_replicas("web")
        return sorted((row.is_spot, row.zone) for row in rows if row.drained_s is None)


def test_lost_replica_is_replaced_at_once_where_the_availability_requires_it(tmp_path: Path) -> None:
    task = make_task(2)
    assert task.service is not None
    spec = replace(task.service, availability=0.99)
    task = replace(task, resources=(Resources(cloud="aws", use_spot=True),), service=spec)
    world = SpotWorld(tmp_path, task)
    slots = {zone: Slot(is_spot=True, region=zone[:-1], zone=zone) for zone in ("east1a", "west1a")}

    requests = list[PlacementRequest]()

    def place(request: PlacementRequest) -> Sequence[Slot]:
        requests.append(request)
        places = [SpotPlace(slot=each, usd_hour=0.3, losses_per_hour=0.2) for each in slots.values()]
        return place_replicas(
            request.count, observe_places(places, request.replicas), ondemand_usd_hour=1.0,
            cold_start_hours=0.1, availability=0.99, budget=request.budget,
            ondemand_present=count_ondemand(request.replicas),
        ).slots  # fmt: skip

    world.controller = world.make_controller(place)
    world.settle()
    before = world.list_live()
    assert before == [(True, "east1a")] * 2 + [(True, "west1a")] * 2
    lost = [row for row in world.store.services.list_replicas("web") if row.zone == "east1a"]
    for row in lost:
        world.store.jobs.set_status(row.job_id, JobStatus.RECOVERING)
    world.settle(4)
    assert len(world.list_ready()) >= 2
    rows = world.store.services.list_replicas("web")
    assert {row.number for row in lost}.isdisjoint(row.number for row in rows if row.drained_s is None)
    assert len(world.list_live()) >= 4  # others were started, on-demand or elsewhere
    world.check()
    world.controller = world.make_controller(place)
    world.settle(1)
    assert requests[-1].budget.hours > 0 and requests[-1].cold_start_s == 60, "the next controller knows both"


def test_replica_is_reached_where_ssh_reaches_its_node_not_at_its_private_address() -> None:
    """On AWS, the address of a node is the one within its own network."""
    node = Node(
        id="i-1", cloud="aws", owner="a" * 12, cluster="web-1", attempt=1, token="t", rank=0, state=NodeState.RUNNING,
        address="172.31.0.9", handle="ssh://ubuntu@198.51.100.7:22",
    )  # fmt: skip
    assert find_host(node) == "198.51.100.7"
    assert find_host(replace(node, handle="pool://rack/host/1")) == "172.31.0.9"
    assert find_host(replace(node, cloud="local", handle="/tmp/node")) == "127.0.0.1"


def test_service_with_api_keys_is_not_served_from_a_machine_that_lacks_them(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.store.services.note_keys(world.service)
    for _ in range(2):
        with pytest.raises(StateError, match="API keys of service `web` are not on this machine"):
            world.settle(1)
    assert not world.folder.routing.exists() and world.balancers == 0
    assert world.list_kinds().count(ServiceEventKind.KEYS_MISSING) == 1
    create_key(world.folder, "ann", now_s=0.0)
    world.settle()
    assert world.list_ready() == [1, 1]


def test_service_that_lacks_its_keys_can_be_taken_down(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.store.services.note_keys(world.service)
    world.store.services.request_down("web")
    world.settle()
    assert world.store.services.get("web") is None and not world.store.services.has_keys(world.service)
