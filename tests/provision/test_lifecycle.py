"""Up, refresh, stop, start and down of a cluster, and the errors of each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import pytest

from broker.errors import (
    AccountError,
    AuthError,
    BrokerError,
    CapacityError,
    CloudError,
    FencedError,
    InvalidRequestError,
    QuotaError,
    TransientError,
    UsageError,
)
from broker.provision.lifecycle import STOP_S_MAX, Provisioner
from broker.provision.nodes import POLL_S_MAX
from broker.types import (
    Autostop,
    Cluster,
    ClusterStatus,
    GroupRole,
    IntentEnd,
    MachineSpec,
    Node,
    NodeRequest,
    NodeState,
    Plan,
    Resources,
    Task,
)
from broker.wording import describe_event
from tests.clouds.simulated import CloudTimings, FaultRates, SimulatedCloud
from tests.simulation.world import OWNER, World, make_plan

T = TypeVar("T")


class Stopping(SimulatedCloud):
    """A cloud that can stop nodes, with lists that lag behind, and that keeps console output."""

    stopped_at_s: float | None = None
    started_at_s: float | None = None
    lag_s = 30.0
    failing_lists = 0

    async def stop_nodes(self, ids: Sequence[str]) -> None:
        self.stopped_at_s, self.started_at_s = self.clock.now_s() + self.lag_s, None

    async def start_nodes(self, ids: Sequence[str]) -> None:
        self.started_at_s = self.clock.now_s() + self.lag_s

    def name_console(self, node: Node) -> str:
        return f"show {node.id}"

    async def list_nodes(self, owner: str) -> Any:
        if self.failing_lists:
            self.failing_lists -= 1
            raise TransientError("no answer")
        listed = await super().list_nodes(owner)
        now_s = self.clock.now_s()
        is_stopped = self.stopped_at_s is not None and now_s >= self.stopped_at_s
        if not is_stopped or (self.started_at_s is not None and now_s >= self.started_at_s):
            return listed
        nodes = tuple(
            replace(node, state=NodeState.STOPPED) if node.state is NodeState.RUNNING else node for node in listed.nodes
        )
        return replace(listed, nodes=nodes)


class Stage:
    def __init__(self, folder: Path) -> None:
        self.world = World(folder)
        self.cloud = self.world.cloud = Stopping(clock=self.world.clock)
        self.provisioner = self.world.make_provisioner()
        self.plan = make_plan(self.world.task)

    def run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        found: list[T] = []

        async def act() -> None:
            found.append(await work())

        self.world.clock.run(act)
        return found[0]

    def up(self, name: str = "c", plan: Plan | None = None, **more: Any) -> Cluster:
        return self.run(lambda: self.provisioner.up(name, plan or self.plan, **more))

    def get(self, name: str = "c") -> Cluster:
        found = self.world.store.clusters.get(name)
        assert found is not None
        return found


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


def test_a_cluster_comes_up_and_is_recorded_as_requested(stage: Stage) -> None:
    autostop = Autostop(idle_minutes=5)
    begun_s = stage.world.clock.now_s()
    cluster = stage.up(attempt=3, autostop=autostop, job_id=stage.world.job_id)
    assert cluster == stage.get()
    assert (cluster.status, cluster.attempt, cluster.autostop) == (ClusterStatus.UP, 3, autostop)
    assert (cluster.job_id, cluster.created_s) == (stage.world.job_id, begun_s)
    assert [(node.state, node.rank, node.attempt) for node in cluster.nodes] == [
        (NodeState.RUNNING, 0, 3),
        (NodeState.RUNNING, 1, 3),
    ]
    assert not stage.world.store.intents.list_open() and len(stage.world.store.bills.list()) == 2
    assert [event.kind for event in stage.world.store.events.list(cluster="c")] == ["up"]


def test_up_of_a_running_cluster_only_refreshes_it(stage: Stage) -> None:
    first = stage.up()
    assert stage.up() == first and len(stage.world.list_live_nodes()) == 2
    stage.cloud.preempt([first.nodes[1].id])
    again = stage.up()
    assert [node.state for node in again.nodes] == [NodeState.RUNNING, NodeState.TERMINATED] and again == stage.get()


def test_a_new_attempt_first_takes_down_the_cluster_of_the_same_name(stage: Stage) -> None:
    first = stage.up()
    second = stage.up(attempt=2)
    assert {node.id for node in first.nodes}.isdisjoint(node.id for node in second.nodes)
    assert len(stage.world.list_live_nodes()) == 2 and second.created_s > first.created_s


def test_a_search_is_repeated_only_with_retry_until_up(stage: Stage) -> None:
    calls: list[float] = []
    create = stage.cloud.create_nodes

    async def create_nodes(request: NodeRequest) -> Sequence[Node]:
        calls.append(stage.world.clock.now_s())
        if len(calls) <= 3:
            raise CapacityError("full", scope="zone")
        return await create(request)

    stage.cloud.create_nodes = create_nodes  # type: ignore[method-assign]
    messages: list[str] = []
    with pytest.raises(CapacityError):
        stage.up(plan=make_plan(stage.world.task, "east1a"))
    assert not stage.world.store.clusters.list(), "nothing is left of it"
    assert (
        stage.up(retry_until_up=True, on_event=lambda event: messages.append(describe_event(event))).status
        is ClusterStatus.UP
    )
    assert any("retrying in" in line for line in messages)


@pytest.mark.parametrize("error", [AuthError("the login has expired"), UsageError("taken down")])
def test_retry_until_up_does_not_repeat_a_search_after_a_lasting_error(stage: Stage, error: BrokerError) -> None:
    calls: list[str] = []

    async def create_nodes(request: NodeRequest) -> Sequence[Node]:
        calls.append(request.token)
        raise error

    stage.cloud.create_nodes = create_nodes  # type: ignore[method-assign]
    with pytest.raises(type(error)):
        stage.up(retry_until_up=True)
    assert len(calls) == 1


def test_polls_of_stopping_and_ending_nodes_slow_down_to_one_in_five_seconds(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.up()
    listed_s: list[float] = []
    list_nodes = stage.cloud.list_nodes

    async def note(owner: str) -> Any:
        listed_s.append(stage.world.clock.now_s())
        return await list_nodes(owner)

    monkeypatch.setattr(stage.cloud, "list_nodes", note)
    stage.cloud.lag_s = 120.0
    stage.run(lambda: stage.provisioner.stop("c"))
    stops = [later - earlier for earlier, later in pairwise(listed_s)]
    listed_s.clear()
    stage.cloud.stopped_at_s, stage.cloud.timings = None, CloudTimings(terminate_s=120.0)
    stage.run(lambda: stage.provisioner.down("c"))
    ends = [later - earlier for earlier, later in pairwise(listed_s)]
    for pauses in (stops, ends):
        assert pauses[0] < 0.2 and pauses[-1] == max(pauses) == pytest.approx(POLL_S_MAX, abs=0.1)
        assert all(later >= earlier - 0.05 for earlier, later in pairwise(pauses)), "calls take a moment too"
        assert len(pauses) > 30


def test_stop_waits_for_every_node_and_closes_bills_and_start_opens_them(stage: Stage) -> None:
    stage.up()
    stage.run(lambda: stage.provisioner.stop("c"))
    stopped_s = stage.world.clock.now_s()
    assert stage.get().status is ClusterStatus.STOPPED and stage.cloud.stopped_at_s is not None
    assert stopped_s >= stage.cloud.stopped_at_s
    spent_usd = stage.world.store.bills.spend_usd(cluster="c", now_s=stopped_s)
    stage.run(lambda: stage.world.clock.sleep(3600.0))
    later_s = stage.world.clock.now_s()
    assert stage.world.store.bills.spend_usd(cluster="c", now_s=later_s) == pytest.approx(spent_usd) and spent_usd > 0
    with pytest.raises(UsageError, match="stopped") as caught:
        stage.up()
    assert "broker start c" in caught.value.hints[0]
    started = stage.run(lambda: stage.provisioner.start("c"))
    assert started.status is ClusterStatus.UP and stage.get().status is ClusterStatus.UP
    assert stage.world.clock.now_s() >= later_s + stage.cloud.lag_s
    assert stage.world.store.bills.spend_usd(cluster="c", now_s=later_s + 3600.0) > spent_usd + 1.0
    assert len([bill for bill in stage.world.store.bills.list() if bill.ended_s is None]) == 2


def test_a_start_that_is_killed_at_its_call_is_not_recorded_as_stopped(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise `broker status` shows a cluster without a price while its machines run."""
    stage.up()
    stage.run(lambda: stage.provisioner.stop("c"))
    start = stage.cloud.start_nodes

    async def be_killed(ids: Sequence[str]) -> None:
        await start(ids)
        raise SystemExit(137)

    monkeypatch.setattr(stage.cloud, "start_nodes", be_killed)
    with pytest.raises(SystemExit):
        stage.run(lambda: stage.provisioner.start("c"))
    assert stage.get().status is ClusterStatus.UP
    monkeypatch.setattr(stage.cloud, "start_nodes", start)
    stage.run(lambda: stage.provisioner.start("c"))
    assert [node.state for node in stage.get().nodes] == [NodeState.RUNNING] * 2
    assert len([bill for bill in stage.world.store.bills.list() if bill.ended_s is None]) == 2


def test_the_cost_of_a_started_cluster_is_durable_at_once(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    stage.up()
    stage.run(lambda: stage.provisioner.stop("c"))
    store, modes = stage.world.store, list[int]()
    commit = store._commit

    def note() -> None:
        modes.append(store.rows("PRAGMA synchronous")[0][0])
        commit()

    monkeypatch.setattr(store, "_commit", note)
    stage.run(lambda: stage.provisioner.start("c"))
    assert modes and set(modes) == {2}, "SQLite's number for FULL"


def test_stop_waits_for_the_last_node(stage: Stage) -> None:
    nodes = stage.up().nodes
    list_nodes = stage.cloud.list_nodes

    async def list_one_later(owner: str) -> Any:
        listed = await list_nodes(owner)
        is_late = stage.cloud.stopped_at_s is not None and stage.world.clock.now_s() >= stage.cloud.stopped_at_s + 60.0
        late = [node if is_late or node.id != nodes[1].id else nodes[1] for node in listed.nodes]
        return replace(listed, nodes=tuple(late))

    stage.cloud.list_nodes = list_one_later  # type: ignore[method-assign]
    stage.run(lambda: stage.provisioner.stop("c"))
    assert stage.cloud.stopped_at_s and stage.world.clock.now_s() >= stage.cloud.stopped_at_s + 60.0
    assert [node.state for node in stage.get().nodes] == [NodeState.STOPPED] * 2


def test_a_lost_node_is_no_longer_billed(stage: Stage) -> None:
    cluster = stage.up()
    stage.cloud.preempt([cluster.nodes[1].id])
    stage.run(lambda: stage.world.clock.sleep(60.0))
    stage.run(lambda: stage.provisioner.refresh(cluster))
    then_s = stage.world.clock.now_s()
    stage.run(lambda: stage.world.clock.sleep(3600.0))
    more_usd = stage.world.store.bills.spend_usd(now_s=stage.world.clock.now_s()) - stage.world.store.bills.spend_usd(
        now_s=then_s
    )
    assert more_usd == pytest.approx(cluster.nodes[0].usd_hour, rel=0.01), "one node's hour"


def test_a_replacement_node_keeps_the_rank_of_its_record_and_not_of_its_tags(stage: Stage) -> None:
    cluster = stage.up()
    swapped = tuple(replace(node, rank=1 - node.rank) for node in cluster.nodes)
    stage.world.store.clusters.put(replace(cluster, nodes=swapped))
    stage.cloud.preempt([swapped[0].id])
    stage.run(lambda: stage.world.clock.sleep(1.0))
    refreshed = stage.run(lambda: stage.provisioner.refresh(stage.get()))
    assert [(node.id, node.rank) for node in refreshed.nodes] == [(node.id, node.rank) for node in swapped]


def test_stop_survives_failing_lists_and_ends_at_its_limit(stage: Stage) -> None:
    stage.up()
    stage.cloud.failing_lists = 20
    stage.run(lambda: stage.provisioner.stop("c"))
    stage.run(lambda: stage.provisioner.start("c"))
    stage.cloud.lag_s = 1e9
    begun_s = stage.world.clock.now_s()
    with pytest.raises(TransientError, match="STOPPED"):
        stage.run(lambda: stage.provisioner.stop("c"))
    assert STOP_S_MAX <= stage.world.clock.now_s() - begun_s < STOP_S_MAX + 60.0
    assert stage.get().status is ClusterStatus.UP, "it is not known to be stopped"


def test_stop_of_an_unknown_or_unstoppable_cluster_is_an_error_with_a_hint(tmp_path: Path, stage: Stage) -> None:
    for verb in (stage.provisioner.stop, stage.provisioner.start):
        with pytest.raises(UsageError) as caught:
            stage.run(lambda verb=verb: verb("nothing"))  # type: ignore[misc]
        assert "broker status" in caught.value.hints[0]
    plain = World(tmp_path / "plain")
    provisioner = plain.make_provisioner()
    plain.clock.run(lambda: provisioner.up("c", make_plan(plain.task)))
    with pytest.raises(UsageError, match="cannot stop") as caught:
        plain.clock.run(lambda: provisioner.stop("c"))
    assert "broker down c" in caught.value.hints[0]
    assert provisioner.hint_console(plain.store.clusters.list()[0], "n") is None


def test_the_commit_that_records_a_running_cluster_closes_its_intent(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = stage.world.store
    commit = type(store)._commit
    seen: list[tuple[ClusterStatus, bool]] = []

    def note_commit() -> None:
        commit(store)
        if (cluster := store.clusters.get("c")) is not None:
            seen.append((cluster.status, bool(store.intents.list_open("c"))))

    monkeypatch.setattr(store, "_commit", note_commit)
    stage.up()
    assert seen[-1] == (ClusterStatus.UP, False)
    assert not {(ClusterStatus.UP, True), (ClusterStatus.INIT, False)} & set(seen)


def test_a_cluster_and_its_intent_are_one_commit_and_the_closing_of_an_intent_is_durable(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cluster without its intent would never be terminated; an intent reopened by a power cut costs a search."""
    store = stage.world.store
    commit, close = type(store)._commit, store.intents.close
    coming: list[bool] = []
    closed: list[tuple[str, int]] = []

    def note_commit() -> None:
        commit(store)
        cluster = store.clusters.get("c")
        if cluster is not None and cluster.status is ClusterStatus.INIT:
            coming.append(bool(store.intents.list_open("c")))

    def note_close(token: str, outcome: IntentEnd, detail: str = "") -> None:
        closed.append((outcome, store.rows("PRAGMA synchronous")[0][0]))
        close(token, outcome, detail)

    monkeypatch.setattr(store, "_commit", note_commit)
    monkeypatch.setattr(store.intents, "close", note_close)
    stage.cloud.faults = FaultRates(partial=1.0)
    with pytest.raises(CapacityError):
        stage.up(plan=make_plan(stage.world.task, "east1a"))
    assert coming[0] is True
    assert closed == [(IntentEnd.TERMINATED, 2)], "2 is SQLite's number for FULL"


def test_a_replacement_node_is_recorded_and_none_is_created_for_a_cluster_that_was_taken_down(
    stage: Stage,
) -> None:
    first = stage.up()
    stage.cloud.preempt([first.nodes[1].id])
    lost = stage.run(lambda: stage.provisioner.refresh(first))

    def replace_lost() -> Cluster:
        work = stage.provisioner.replace_node
        return stage.run(lambda: work(lost, stage.world.task, rank=1, check_budget=lambda: None))

    again = replace_lost()
    assert again == stage.get() and again.nodes[0].id == first.nodes[0].id != again.nodes[1].id != first.nodes[1].id
    assert [(node.rank, node.state) for node in again.nodes] == [(0, NodeState.RUNNING), (1, NodeState.RUNNING)]
    stage.run(lambda: stage.provisioner.down("c"))
    with pytest.raises(UsageError, match="terminated"):
        replace_lost()
    assert not stage.world.list_live_nodes() and not stage.world.store.intents.list_open()


def test_lists_without_accounts_keep_the_recorded_account(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = stage.up()
    list_nodes = stage.cloud.list_nodes

    async def list_without(owner: str) -> Any:
        listed = await list_nodes(owner)
        return replace(listed, account="", nodes=tuple(replace(node, account="") for node in listed.nodes))

    monkeypatch.setattr(stage.cloud, "list_nodes", list_without)
    refreshed = stage.run(lambda: stage.provisioner.refresh(cluster))
    assert [node.account for node in refreshed.nodes] == ["account-1", "account-1"]


def test_the_console_hint_is_for_nodes_of_the_cluster_only(stage: Stage) -> None:
    cluster = stage.up()
    node_id = cluster.nodes[1].id
    assert f"`show {node_id}`" in (stage.provisioner.hint_console(cluster, node_id) or "")
    assert stage.provisioner.hint_console(cluster, "another") is None


def test_down_leaves_no_node_record_or_open_intent_and_can_be_repeated(stage: Stage) -> None:
    stage.up()
    for _ in range(2):
        stage.run(lambda: stage.provisioner.down("c"))
        assert not stage.world.list_live_nodes() and not stage.world.store.clusters.list()
    assert [event.kind for event in stage.world.store.events.list(cluster="c")] == ["up", "down"]
    assert all(bill.ended_s is not None for bill in stage.world.store.bills.list())


def test_a_refresh_that_began_before_down_does_not_restore_the_record(stage: Stage) -> None:
    """If the record were UP again, a replacement node could be launched into it and lost once `down` ends."""
    seen = stage.up()
    stage.world.store.clusters.put(replace(seen, status=ClusterStatus.TERMINATING))
    stage.cloud.preempt([seen.nodes[1].id])
    stage.run(lambda: stage.world.clock.sleep(1.0))
    refreshed = stage.run(lambda: stage.provisioner.refresh(seen))
    assert [node.state for node in refreshed.nodes] == [NodeState.RUNNING, NodeState.TERMINATED]
    assert stage.get().status is ClusterStatus.TERMINATING and stage.get().nodes == refreshed.nodes


def test_a_refresh_does_not_undo_the_replacement_of_a_node_since_its_record_was_read(stage: Stage) -> None:
    seen = stage.up()
    heir = replace(seen.nodes[1], id="heir")
    stage.world.store.clusters.put(replace(seen, nodes=(seen.nodes[0], heir)))
    stage.cloud.preempt([seen.nodes[1].id])
    stage.run(lambda: stage.world.clock.sleep(1.0))
    stage.run(lambda: stage.provisioner.refresh(seen))
    assert [node.id for node in stage.get().nodes] == [seen.nodes[0].id, "heir"]


def test_down_leaves_the_record_of_a_new_cluster_of_the_same_name(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process has ended the first one meanwhile: without its record, the machines of the new one are lost."""
    first = stage.up()
    new = replace(first, status=ClusterStatus.UP, created_s=first.created_s + 500.0, nodes=())
    terminate = stage.cloud.terminate_nodes

    async def terminate_slowly(nodes: Sequence[Node]) -> None:
        await terminate(nodes)
        stage.world.store.clusters.put(new)

    monkeypatch.setattr(stage.cloud, "terminate_nodes", terminate_slowly)
    stage.run(lambda: stage.provisioner.down("c"))
    assert stage.get() == new and not stage.world.list_live_nodes()


@pytest.mark.parametrize("error", [FencedError("replaced"), TransientError("no answer"), AccountError("another")])
def test_the_record_stays_until_the_end_of_its_nodes_is_confirmed(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, error: BrokerError
) -> None:
    stage.up()

    async def fail(owner: str) -> Any:
        raise error

    monkeypatch.setattr(stage.cloud, "list_nodes", fail)
    with pytest.raises(type(error)):
        stage.run(lambda: stage.provisioner.down("c"))
    assert stage.get().status is ClusterStatus.TERMINATING and len(stage.get().nodes) == 2


@pytest.mark.parametrize("error", [CapacityError("full"), QuotaError("quota")])
def test_a_start_that_is_refused_stops_what_has_started_but_no_cluster_that_was_running(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, error: BrokerError
) -> None:
    stage.up()

    async def refuse(ids: Sequence[str]) -> None:
        raise error

    monkeypatch.setattr(stage.cloud, "start_nodes", refuse)
    with pytest.raises(type(error)):
        stage.run(lambda: stage.provisioner.start("c"))
    assert stage.cloud.stopped_at_s is None and stage.get().status is ClusterStatus.UP
    stage.run(lambda: stage.provisioner.stop("c"))
    stage.cloud.stopped_at_s = None
    with pytest.raises(type(error)):
        stage.run(lambda: stage.provisioner.start("c"))
    assert stage.cloud.stopped_at_s is not None, "a part of the gang would cost money and could not work"
    assert stage.get().status is ClusterStatus.STOPPED


@pytest.mark.parametrize("error", [TransientError("InvalidInstanceID.NotFound"), InvalidRequestError("not found")])
def test_a_start_of_machines_that_were_deleted_elsewhere_says_so_and_what_to_do(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, error: CloudError
) -> None:
    nodes = stage.up().nodes
    stage.run(lambda: stage.provisioner.stop("c"))

    async def refuse(ids: Sequence[str]) -> None:
        raise error

    monkeypatch.setattr(stage.cloud, "start_nodes", refuse)
    with pytest.raises(type(error)):
        stage.run(lambda: stage.provisioner.start("c"))
    stage.run(lambda: stage.cloud.terminate_nodes(nodes[:1]))
    stage.run(lambda: stage.world.clock.sleep(3600.0))
    with pytest.raises(UsageError, match="1 of 2 machines of c no longer exist") as caught:
        stage.run(lambda: stage.provisioner.start("c"))
    assert "broker down c" in caught.value.hints[0]
    stage.cloud.failing_lists = 100
    with pytest.raises(type(error)):
        stage.run(lambda: stage.provisioner.start("c"))


def test_a_stop_does_not_wait_for_a_machine_that_was_preempted_meanwhile(stage: Stage) -> None:
    nodes = stage.up().nodes
    begun_s = stage.world.clock.now_s()

    async def act() -> None:
        doing = asyncio.ensure_future(stage.provisioner.stop("c"))
        await stage.world.clock.sleep(5.0)
        stage.cloud.preempt([nodes[1].id])
        with pytest.raises(UsageError, match="1 of 2 machines of c no longer exist"):
            await doing

    stage.run(act)
    assert stage.world.clock.now_s() - begun_s < STOP_S_MAX / 2


@pytest.mark.parametrize("verb", ["stop", "start"])
def test_a_cluster_taken_down_while_it_stops_or_starts_stays_terminating(stage: Stage, verb: str) -> None:
    stage.up()
    if verb == "start":
        stage.run(lambda: stage.provisioner.stop("c"))

    async def act() -> None:
        doing = asyncio.ensure_future(getattr(stage.provisioner, verb)("c"))
        await stage.world.clock.sleep(5.0)
        stage.world.store.clusters.put(replace(stage.get(), status=ClusterStatus.TERMINATING))
        with pytest.raises(UsageError, match="was terminated"):
            await doing

    stage.run(act)
    assert stage.get().status is ClusterStatus.TERMINATING


def test_nodes_that_have_ended_need_no_list_of_their_region(stage: Stage) -> None:
    cluster = stage.up()
    stage.cloud.preempt([node.id for node in cluster.nodes])
    stage.run(lambda: stage.provisioner.refresh(cluster))
    stage.cloud.silent_regions["east1"] = TransientError("no answer")
    stage.run(lambda: stage.provisioner.down("c"))
    assert not stage.world.store.clusters.list()
    assert all(bill.ended_s is not None for bill in stage.world.store.bills.list())


def test_the_error_names_a_cloud_that_is_no_longer_set_up(stage: Stage) -> None:
    cluster = stage.up()
    without = Provisioner({}, stage.world.store, clock=stage.world.clock, owner=OWNER)
    with pytest.raises(AuthError, match="simulated"):
        stage.run(lambda: without.refresh(cluster))
    assert not without.can_replace_node(cluster)


def test_a_lost_node_is_not_replaced_with_a_login_for_another_account(stage: Stage) -> None:
    cluster = stage.up()
    stage.cloud.preempt([cluster.nodes[1].id])

    async def replace_it() -> Cluster:
        await stage.world.clock.sleep(300.0)  # until the list shows it
        refreshed = await stage.provisioner.refresh(cluster)
        stage.cloud.account = "account-2"
        return await stage.provisioner.replace_node(refreshed, Task(), rank=1, check_budget=lambda: None)

    with pytest.raises(AccountError, match="account-1"):
        stage.run(replace_it)
    assert [node.id for node in stage.world.list_live_nodes()] == [cluster.nodes[0].id]
    assert not stage.world.store.intents.list_open("c")


def test_a_replacement_that_is_cancelled_also_cancels_its_call(stage: Stage) -> None:
    cluster = stage.up()
    stage.cloud.preempt([cluster.nodes[1].id])
    create, asked = stage.cloud.create_nodes, list[str]()

    async def answer_late(request: NodeRequest) -> Sequence[Node]:
        asked.append(request.token)
        await stage.world.clock.sleep(50.0)
        return await create(request)

    async def begin_and_cancel() -> None:
        await stage.world.clock.sleep(300.0)  # until the list shows it
        refreshed = await stage.provisioner.refresh(cluster)
        stage.cloud.create_nodes = answer_late  # type: ignore[method-assign]
        work = asyncio.ensure_future(
            stage.provisioner.replace_node(refreshed, Task(), rank=1, check_budget=lambda: None)
        )
        await stage.world.clock.sleep(20.0)
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        await stage.world.clock.sleep(200.0)

    stage.run(begin_and_cancel)
    assert len(asked) == 1 and [node.id for node in stage.world.list_live_nodes()] == [cluster.nodes[0].id]
    assert [intent.request.token for intent in stage.world.store.intents.list_open("c")] == asked, (
        "a later call resumes it"
    )


def test_a_replaced_leader_does_not_end_the_nodes_of_its_search(stage: Stage) -> None:
    """Its successor continues the search with the same token, and gets the same nodes."""
    stage.world.store.leader.lead()
    stage.cloud.faults = FaultRates(never_boots=1.0)

    async def search_and_lose_the_lead() -> None:
        work = asyncio.ensure_future(stage.provisioner.up("c", stage.plan, timeout_s=60.0, hedge=1))
        await stage.world.clock.sleep(30.0)
        stage.world.open().leader.lead()
        with pytest.raises(FencedError):
            await work

    stage.run(search_and_lose_the_lead)
    assert len(stage.world.list_live_nodes()) == 2


@pytest.mark.parametrize("is_connected", [True, False])
def test_nodes_of_a_connected_job_group_are_requested_as_its_members(stage: Stage, is_connected: bool) -> None:
    task = Task(num_nodes=2, group=GroupRole(name="rl", is_connected=is_connected))
    job = stage.world.store.jobs.add("learner", task, pipeline="rl-7f3a")
    requests: list[NodeRequest] = []
    create = stage.cloud.create_nodes

    async def create_nodes(request: NodeRequest) -> Sequence[Node]:
        requests.append(request)
        return await create(request)

    stage.cloud.create_nodes = create_nodes  # type: ignore[method-assign]
    stage.up("c", make_plan(task), job_id=job.id)
    assert {request.spec.group for request in requests} == {"rl-7f3a" if is_connected else ""}


def test_a_node_request_carries_the_resources_of_the_task(stage: Stage) -> None:
    asked = Resources(
        disk_size_gib=77, disk_tier="high", network_tier="best", image_id="i", ports=("80",), labels={"a": "b"}
    )
    requests: list[NodeRequest] = []
    create = stage.cloud.create_nodes

    async def create_nodes(request: NodeRequest) -> Sequence[Node]:
        requests.append(request)
        return await create(request)

    stage.cloud.create_nodes = create_nodes  # type: ignore[method-assign]
    for image in ("i", "docker:i"):
        task = Task(num_nodes=2, resources=(replace(asked, image_id=image),))
        stage.up(f"c-{image[:1]}", make_plan(task))
    assert requests[0].spec == MachineSpec(
        disk_size_gib=77, disk_tier="high", network_tier="best", image_id="i", ports=("80",), labels={"a": "b"},
        is_replaceable=False,
    )  # fmt: skip
    assert requests[-1].spec.image_id == "docker:i", "this cloud's nodes are not hosts of ours"
    two = Task(num_nodes=2, resources=(asked, Resources(disk_size_gib=99, image_id="second")))
    plan = make_plan(two)
    second = tuple(replace(each, placement=replace(each.placement, alternative=1)) for each in plan.estimates)
    cluster = stage.up("c-two", replace(plan, estimates=second))
    assert requests[-1].spec == MachineSpec(disk_size_gib=99, image_id="second", is_replaceable=False)
    assert cluster.placement.get_resources(two).image_id == "second"
