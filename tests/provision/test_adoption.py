"""Adoption after the records were lost: running nodes are recorded by their tags, not terminated or started twice."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from pathlib import Path

import pytest

from broker.errors import BrokerError, FencedError, StateError, TransientError
from broker.provision.adoption import AdoptionAction, decide
from broker.state.restoring import ATTEMPTS_SKIPPED, find_copy, reset, restore
from broker.types import Attempt, ClusterStatus, EventKind, Job, JobStatus, Node, NodeList, NodeState, Placement, Task
from tests.simulation.world import OWNER, World, make_offer

PLACEMENT = Placement(offer=make_offer("east1a"), is_spot=True, node_count=2)


def make_node(
    rank: int, *, cluster: str = "job-3-k7wq2-2", attempt: int = 2, token: str = "t", **changed: object
) -> Node:
    node = Node(
        id=f"{token}-{rank}", cloud="simulated", owner=OWNER, cluster=cluster, attempt=attempt, rank=rank,
        state=NodeState.RUNNING, token=token, region="east1", zone="east1a", is_spot=True, usd_hour=1.0, created_s=5.0,
    )  # fmt: skip
    return replace(node, **changed)  # type: ignore[arg-type]


def make_job(*numbers: int, status: JobStatus = JobStatus.RUNNING, uid: str = "k7wq2") -> Job:
    attempts = tuple(
        Attempt(job_id=3, number=n, cluster=f"job-3-{uid}-{n}", placement=PLACEMENT, started_s=0.0) for n in numbers
    )
    return Job(id=3, name="train", status=status, task=Task(num_nodes=2), submitted_s=0.0, attempts=attempts, uid=uid)


GANG = [make_node(0), make_node(1)]


def test_the_newest_attempt_of_a_live_job_continues() -> None:
    (found,) = decide(GANG, {3: make_job(1)})
    assert (found.action, found.attempt, found.nodes, found.spare) == (AdoptionAction.CONTINUE, 2, tuple(GANG), ())


@pytest.mark.parametrize(
    ("nodes", "job"),
    [
        (GANG, None),
        (GANG, make_job(1, status=JobStatus.SUCCEEDED)),
        (GANG, make_job(1, uid="other")),
        ([replace(node, cluster="dev") for node in GANG], make_job(1)),
    ],
    ids=["unknown job", "ended job", "job of another life", "plain cluster"],
)
def test_nodes_without_a_matching_live_job_become_a_cluster(nodes: list[Node], job: Job | None) -> None:
    (found,) = decide(nodes, {3: job} if job else {})
    assert (found.action, found.job, len(found.nodes)) == (AdoptionAction.KEEP, None, 2)


def test_an_incomplete_gang_is_replaced() -> None:
    (found,) = decide(GANG[:1], {3: make_job(1)})
    assert found.action is AdoptionAction.REPLACE


def test_the_running_one_of_two_concurrent_launches_is_adopted() -> None:
    other = [make_node(rank, token="u", state=NodeState.PENDING, created_s=1.0) for rank in (0, 1)]
    (found,) = decide([*other, *GANG], {3: make_job()})
    assert (found.action, found.nodes, found.spare) == (AdoptionAction.CONTINUE, tuple(GANG), tuple(other))


def test_a_superseded_attempt_is_left_to_the_collector() -> None:
    assert not decide(GANG, {3: make_job(1, 2)}), "the records show that it was superseded or ended"
    newer = [make_node(rank, cluster="job-3-k7wq2-4", attempt=4, token="u") for rank in (0, 1)]
    (found,) = decide([*GANG, *newer], {3: make_job(1)})
    assert found.attempt == 4


def drive(world: World, *, until_s: float = math.inf, collect_every: int = 20) -> None:
    """Run the job's controller and the collector until the job ends, or for `until_s`."""

    async def run() -> None:
        provisioner = world.make_provisioner()
        controller = world.make_controller(provisioner)
        end_s = world.clock.now_s() + min(until_s, 6 * 3600.0)
        steps = 0
        while world.clock.now_s() < end_s:
            if steps % collect_every == 0:
                await provisioner.collect()
            steps += 1
            try:
                wait_s = await controller.step() if world.store.jobs.get(world.job_id) else 1.0
            except BrokerError:
                wait_s = 1.0
            if math.isinf(wait_s):
                return
            await world.clock.sleep(wait_s)

    world.clock.run(run)


def lose_store(world: World) -> None:
    world.store.close()
    for path in world.folder.glob("state.db*"):
        path.unlink()


def put_back(world: World, copy: Path) -> None:
    world.store.close()
    restore(world.folder / "state.db", copy, clock=world.clock, owner=OWNER)
    world.store = world.open()


@pytest.fixture
def world(tmp_path: Path) -> World:
    """Return the world of a job that has run on two nodes for a while, with a copy from before its start."""
    world = World(tmp_path)
    world.gang.steps = 600
    world.early_copy = world.store.copy()  # type: ignore[attr-defined]
    drive(world, until_s=120.0)
    assert world.get_job().status is JobStatus.RUNNING and len(world.list_live_nodes()) == 2
    return world


def test_a_lost_store_under_a_running_job_is_an_error_and_not_recreated(world: World) -> None:
    lose_store(world)
    with pytest.raises(StateError, match="is missing"):
        world.open()
    assert len(world.list_live_nodes()) == 2


def test_after_a_reset_running_nodes_become_a_cluster_and_keep_running(world: World) -> None:
    lose_store(world)
    name = world.list_live_nodes()[0].cluster
    reset(world.folder / "state.db", clock=world.clock, owner=OWNER)
    world.store = world.open()
    drive(world, until_s=900.0)
    assert len(world.list_live_nodes()) == 2
    (cluster,) = world.store.clusters.list()
    assert (cluster.name, cluster.status, cluster.job_id, len(cluster.nodes)) == (name, ClusterStatus.UP, None, 2)
    assert any(event.kind is EventKind.CLUSTER_ADOPTED for event in world.store.events.list(cluster=name))
    assert world.store.meta.is_adopted("simulated")
    world.clock.run(lambda: world.make_provisioner().down(name))
    assert not world.list_live_nodes() and not world.store.clusters.list()


def test_a_job_after_a_reset_shares_no_names_with_the_old_job_of_its_id(world: World) -> None:
    old = world.get_job()
    lose_store(world)
    reset(world.folder / "state.db", clock=world.clock, owner=OWNER)
    world.store = world.open()
    new = world.store.jobs.add("other", world.task)
    assert new.id == old.id and new.folder != old.folder and new.name_cluster(1) != old.name_cluster(1)


def test_a_copy_from_before_the_start_adopts_the_running_attempt(world: World) -> None:
    put_back(world, world.early_copy)  # type: ignore[attr-defined]
    drive(world)
    job = world.get_job()
    assert job.status is JobStatus.SUCCEEDED
    assert [attempt.number for attempt in job.attempts] == [1] and world.gang.starts == 1
    assert not world.list_live_nodes()


def test_adoption_ignores_nodes_of_other_owners_and_moves_a_pending_job_to_starting(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_back(world, world.early_copy)  # type: ignore[attr-defined]
    assert world.get_job().status is JobStatus.PENDING
    list_nodes = world.cloud.list_nodes

    async def list_all(owner: str) -> NodeList:
        """List nodes of all owners, as a cloud whose lists do not filter by owner."""
        listed = await list_nodes(owner)
        other = make_node(0, cluster="dev", attempt=1, token="x", owner="somebody else")
        return replace(listed, nodes=(*listed.nodes, other))

    monkeypatch.setattr(world.cloud, "list_nodes", list_all)
    assert world.clock.run(world.make_provisioner().adopt) == [world.get_job().attempts[0].cluster]
    assert world.get_job().status is JobStatus.STARTING


def test_a_copy_of_an_earlier_attempt_adopts_the_newest_one(world: World) -> None:
    first = world.store.copy()
    world.cloud.preempt([node.id for node in world.list_live_nodes()])  # all: survivors would be kept
    drive(world, until_s=300.0)
    assert [each.number for each in world.get_job().attempts if each.ended_s is None] == [2]
    put_back(world, first)
    drive(world)
    job = world.get_job()
    assert job.status is JobStatus.SUCCEEDED and world.gang.starts == 2
    assert [attempt.number for attempt in job.attempts] == [1, 2]


def test_attempt_numbers_are_skipped_if_no_node_runs_after_a_restore(world: World) -> None:
    """The checkpoints may carry attempt numbers that the copy does not know."""
    for restores in (1, 2):
        world.cloud.preempt([node.id for node in world.list_live_nodes()])
        put_back(world, world.early_copy)  # type: ignore[attr-defined]
        drive(world, until_s=300.0)
        assert world.get_job().attempts[-1].number == 1 + restores * ATTEMPTS_SKIPPED


def test_an_incomplete_gang_is_confirmed_gone_before_the_next_attempt(world: World) -> None:
    put_back(world, world.early_copy)  # type: ignore[attr-defined]
    world.cloud.preempt([world.list_live_nodes()[0].id])
    drive(world)
    job = world.get_job()
    assert job.status is JobStatus.SUCCEEDED and not world.list_live_nodes()
    assert [attempt.number for attempt in job.attempts] == [1, 1 + ATTEMPTS_SKIPPED + 1]


def test_no_second_start_while_lists_fail(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(owner: str) -> list[Node]:
        await asyncio.sleep(0)
        raise TransientError("no list today")

    put_back(world, world.early_copy)  # type: ignore[attr-defined]
    list_nodes = world.cloud.list_nodes
    monkeypatch.setattr(world.cloud, "list_nodes", fail)
    drive(world, until_s=1800.0)
    assert world.gang.starts == 1 and len(world.list_live_nodes()) == 2
    monkeypatch.setattr(world.cloud, "list_nodes", list_nodes)
    drive(world)
    assert world.get_job().status is JobStatus.SUCCEEDED


def test_one_empty_list_does_not_prove_that_no_node_runs(world: World) -> None:
    put_back(world, world.early_copy)  # type: ignore[attr-defined]
    world.cloud.black_out(30.0)
    drive(world)
    assert world.get_job().status is JobStatus.SUCCEEDED and world.gang.starts == 1


def test_a_fenced_daemon_stops_adopting(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed list is retried later; FencedError, by which another daemon leads, is raised."""
    world.store.meta.forget_adoptions()

    async def fail(owner: str) -> NodeList:
        raise error

    monkeypatch.setattr(world.cloud, "list_nodes", fail)
    error: BrokerError = TransientError("no answer")
    world.clock.run(world.make_provisioner().adopt)
    error = FencedError("another daemon leads")
    with pytest.raises(FencedError):
        world.clock.run(world.make_provisioner().adopt)


def test_a_damaged_copy_does_not_replace_the_store(world: World) -> None:
    copy = find_copy(world.folder / "state.db", None)
    content = bytearray(copy.read_bytes())
    content[5000:9000] = b"\xff" * 4000
    copy.write_bytes(content)
    world.store.close()
    with pytest.raises(StateError, match="copy"):
        restore(world.folder / "state.db", copy, clock=world.clock, owner=OWNER)
    world.store = world.open()
    assert world.get_job().status is JobStatus.RUNNING


def test_a_cloud_with_an_unlisted_region_does_not_count_as_adopted(world: World) -> None:
    put_back(world, world.early_copy)  # type: ignore[attr-defined]
    world.cloud.silent_regions["east1"] = TransientError("no answer")  # where the job runs
    drive(world, until_s=900.0)
    assert not world.store.meta.is_adopted("simulated") and world.gang.starts == 1
    world.cloud.silent_regions.clear()
    drive(world)
    assert world.get_job().status is JobStatus.SUCCEEDED and world.gang.starts == 1


def test_a_cloud_listed_with_another_account_does_not_count_as_adopted(world: World) -> None:
    copy = world.store.copy()
    (cluster,) = world.store.clusters.list()
    put_back(world, copy)
    nodes = tuple(replace(node, account="111") for node in cluster.nodes)
    world.store.clusters.put(replace(cluster, nodes=nodes))
    world.cloud.account = "222"

    async def adopt() -> None:
        provisioner = world.make_provisioner()
        for _ in range(3):
            await provisioner.adopt()
            await world.clock.sleep(120.0)

    world.clock.run(adopt)
    assert not world.store.meta.is_adopted("simulated")
