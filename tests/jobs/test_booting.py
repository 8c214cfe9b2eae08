"""Machines that boot for minutes are waited for, and those that never answer are given up with a helpful message."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from broker.app.launching import wait_booted
from broker.clouds.aws.cloud import AwsCloud
from broker.clouds.gcp.cloud import GcpCloud
from broker.errors import CapacityError, CloudError, TransientError, UnreachedError
from broker.jobs.booting import BOOT_S_MAX, StartVerdict, get_wait_s, judge_start
from broker.jobs.health import UNREACHABLE_S_MIN
from broker.jobs.monitor import AttemptMonitor
from broker.provision.lifecycle import Provisioner
from broker.types import Cluster, ClusterStatus, JobStatus, Node, NodeRequest, NodeState, Placement, Task
from tests.simulation.test_crashes import check, run_to_end
from tests.simulation.world import SimulatedGang, World, make_offer


class SlowGang(SimulatedGang):
    """A transport whose nodes answer only `boot_s` after the first call; each earlier call takes a minute to fail."""

    def __init__(self, *arguments: Any, error: CloudError, boot_s: float) -> None:
        super().__init__(*arguments, exit_codes=())
        self._error, self._boot_s = error, boot_s
        self._first_s: dict[str, float] = {}

    async def prepare(self, cluster: Cluster, task: Task) -> None:
        now_s = self._clock.now_s()
        if now_s < self._first_s.setdefault(cluster.name, now_s) + self._boot_s:
            await self._clock.sleep(60.0)
            raise self._error
        await super().prepare(cluster, task)


@pytest.mark.parametrize(
    ("error", "attempts"),
    [
        (UnreachedError("node `n` cannot be reached", node_id="n"), 1),
        (TransientError("the agent failed"), 3),
    ],
)
def test_job_waits_for_machines_that_boot_and_not_for_agents_that_fail(
    tmp_path: Path, error: CloudError, attempts: int
) -> None:
    world = World(tmp_path)
    world.gang = SlowGang(world.cloud, world.clock, error=error, boot_s=300.0)
    run_to_end(world, "none")
    if attempts == 1:
        check(world, JobStatus.SUCCEEDED)
    assert len(world.get_job().attempts) == attempts


def test_a_long_search_does_not_use_up_the_time_that_a_machine_has_to_boot(tmp_path: Path) -> None:
    world = World(tmp_path)
    error = UnreachedError("node `n` cannot be reached", node_id="n")
    world.gang = SlowGang(world.cloud, world.clock, error=error, boot_s=390.0)
    create_nodes = world.cloud.create_nodes

    async def create_late(request: NodeRequest) -> Sequence[Node]:
        await world.clock.sleep(220.0)
        if request.placement.offer.region == "east1":
            raise CapacityError("full", scope="zone")
        return await create_nodes(request)

    world.cloud.create_nodes = create_late  # type: ignore[method-assign]
    run_to_end(world, "none")
    check(world, JobStatus.SUCCEEDED)
    (attempt,) = world.get_job().attempts
    assert attempt.running_s is not None and attempt.running_s - attempt.started_s > 440.0 + 390.0


class Clock:
    def __init__(self) -> None:
        self.time_s = 1000.0

    def now_s(self) -> float:
        return self.time_s

    async def sleep(self, duration_s: float) -> None:
        self.time_s += duration_s


def test_launch_on_a_machine_that_never_answers_says_where_to_look_and_what_it_costs() -> None:
    offer = replace(make_offer("east1a"), cloud="aws", ondemand_usd_hour=2.0)
    node = Node(
        id="i-1", cloud="aws", owner="me", cluster="c", attempt=1, rank=0, state=NodeState.RUNNING, region="us-east-1",
        usd_hour=2.0,
    )  # fmt: skip
    placement = Placement(offer=offer, is_spot=False, node_count=1)
    cluster = Cluster(name="c", status=ClusterStatus.UP, placement=placement, attempt=1, nodes=(node,))
    clock = Clock()

    async def prepare(cluster: Cluster, task: Task) -> None:
        clock.time_s += 20
        raise UnreachedError("node `i-1` cannot be reached: Connection timed out", node_id="i-1")

    async def refresh(cluster: Cluster) -> Cluster:
        return cluster

    provisioner = SimpleNamespace(refresh=refresh, _clouds={"aws": AwsCloud.__new__(AwsCloud)})
    provisioner.hint_console = lambda *asked: Provisioner.hint_console(provisioner, *asked)  # type: ignore[arg-type]
    notes: list[str] = []
    context: Any = SimpleNamespace(
        clock=clock, gang=SimpleNamespace(prepare=prepare), provisioner=provisioner, note=notes.append
    )
    with pytest.raises(TransientError) as caught:
        asyncio.run(wait_booted(context, cluster, Task()))
    assert "for 7 minutes" in caught.value.message
    assert clock.time_s - 1000.0 >= BOOT_S_MAX
    console, _, end = caught.value.hints
    assert "aws ec2 get-console-output --region us-east-1 --instance-id i-1" in console
    assert "with `broker down c`; until then, it costs 2.00 USD/h" in end and "to keep waiting" in end
    assert all("it may still be booting" in note for note in notes) and len(notes) == 21  # one in 20.3 s


def test_failure_that_repeats_at_once_is_shown_every_fifteen_seconds() -> None:
    clock, notes = Clock(), list[str]()
    cluster = make_cluster(NodeState.RUNNING)

    async def prepare(cluster: Cluster, task: Task) -> None:
        raise TransientError("the agent cannot be installed on node `n`: mktemp: not found")

    async def refresh(cluster: Cluster) -> Cluster:
        return cluster

    provisioner = SimpleNamespace(refresh=refresh, hint_console=lambda *asked: None)
    context: Any = SimpleNamespace(
        clock=clock, gang=SimpleNamespace(prepare=prepare), provisioner=provisioner, note=notes.append
    )
    with pytest.raises(TransientError):
        asyncio.run(wait_booted(context, cluster, Task()))
    waited_s = clock.time_s - 1000.0
    assert waited_s >= UNREACHABLE_S_MIN
    assert len(notes) <= waited_s / 15 + 1


def make_cluster(state: NodeState) -> Cluster:
    placement = Placement(offer=make_offer("east1a"), is_spot=False, node_count=1)
    node = Node(id="n", cloud="simulated", owner="me", cluster="c", attempt=1, rank=0, state=state)
    return Cluster(name="c", status=ClusterStatus.UP, placement=placement, attempt=1, nodes=(node,))


@pytest.mark.parametrize(
    ("error", "limit_s"),
    [
        (UnreachedError("node `n` cannot be reached", node_id="n"), BOOT_S_MAX),
        (TransientError("the agent failed"), UNREACHABLE_S_MIN),
    ],
)
def test_a_start_fails_only_after_the_time_limit_of_its_error(error: CloudError, limit_s: float) -> None:
    monitor, cluster = AttemptMonitor("c"), make_cluster(NodeState.RUNNING)
    verdicts = {now_s: judge_start(error, cluster, monitor, float(now_s)) for now_s in range(0, 500, 10)}
    assert [now_s for now_s, each in verdicts.items() if each is StartVerdict.WAIT] == list(range(0, int(limit_s), 10))
    assert set(verdicts.values()) == {StartVerdict.WAIT, StartVerdict.FAILED} and get_wait_s(error) == limit_s


@pytest.mark.parametrize("state", [NodeState.TERMINATED, NodeState.STOPPED])
def test_a_start_on_lost_nodes_is_not_waited_for(state: NodeState) -> None:
    error = UnreachedError("node `n` cannot be reached", node_id="n")
    assert judge_start(error, make_cluster(state), AttemptMonitor("c"), 0.0) is StartVerdict.LOST


def test_google_names_its_own_console() -> None:
    node = Node(
        id="proj/us-central1-a/broker-x-0", cloud="gcp", owner="me", cluster="c", attempt=1, rank=0,
        state=NodeState.RUNNING,
    )  # fmt: skip
    command = GcpCloud.name_console(GcpCloud.__new__(GcpCloud), node)
    assert command.endswith("get-serial-port-output broker-x-0 --project proj --zone us-central1-a")
