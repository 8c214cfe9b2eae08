"""Hedging: while a launch is late another begins; one gang is kept, the others are confirmed gone after any crash."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from broker.errors import BrokerError, CapacityError, ThrottledError, TransientError, UnknownOutcomeError
from broker.provision.hedge_timer import LIMITS, Answer, HedgeTimer, bound, update_response_time
from broker.provision.launch import Launch, LaunchState
from broker.provision.lifecycle import Provisioner
from broker.provision.refusals import FAILURES_MAX, PROBE_S, UnavailableOffers
from broker.types import Cluster, ClusterStatus, Node, NodeList, NodeRequest, NodeState
from broker.wording import describe_event
from tests.clouds.simulated import CloudTimings, FaultRates, SimulatedCloud
from tests.simulation.test_crashes import check, run_to_end
from tests.simulation.world import OWNER, World, make_plan
from tests.tiers import exhaustive, long

HANG_S = 300.0


class SlowCloud(SimulatedCloud):
    """A cloud in which some zones answer create calls late."""

    slow_zones: dict[str, float]
    asked: list[tuple[str, float]]

    async def create_nodes(self, request: NodeRequest) -> Sequence[Node]:
        zone = str(request.placement.offer.zone)
        self.asked.append((zone, self.clock.now_s()))
        await self.clock.sleep(self.slow_zones.get(zone, 0.0))
        return await super().create_nodes(request)


class SlowWorld(World):
    cloud: SlowCloud


def make_world(folder: Path, *, crash_at: int | None = None, slow: dict[str, float] | None = None) -> SlowWorld:
    world = SlowWorld(folder, crash_at=crash_at)
    world.cloud.__class__ = SlowCloud
    world.cloud.slow_zones, world.cloud.asked = slow or {}, []
    return world


def up(world: World, *, hedge: int = 2, name: str = "c", messages: list[str] | None = None) -> Cluster:
    provisioner = world.make_provisioner()
    on_event = (lambda event: None) if messages is None else (lambda event: messages.append(describe_event(event)))

    async def scenario() -> Cluster:
        cluster = await provisioner.up(name, make_plan(world.task), hedge=hedge, on_event=on_event)
        await provisioner.finish()
        return cluster

    cluster = world.clock.run(scenario)
    assert isinstance(cluster, Cluster)
    return cluster


def test_a_hanging_placement_does_not_block_the_next_one(tmp_path: Path) -> None:
    world = make_world(tmp_path, slow={"east1a": HANG_S})
    world.cloud.full_zones["east1a"] = float("inf")
    start_s, messages = world.clock.now_s(), []
    provisioner = world.make_provisioner()

    async def scenario() -> float:
        cluster = await provisioner.up(
            "c", make_plan(world.task), on_event=lambda event: messages.append(describe_event(event))
        )
        assert cluster.placement.offer.zone == "east1b"
        up_s = world.clock.now_s() - start_s
        await provisioner.finish()
        return up_s

    up_s = world.clock.run(scenario)
    assert LIMITS[Answer.CREATED].prior_s < up_s < LIMITS[Answer.CREATED].prior_s + 60.0
    assert [zone for zone, _ in world.cloud.asked] == ["east1a", "east1b"]
    assert not world.store.intents.list_open()
    story = "\n".join(messages)
    for words in (
        "requesting 2 x big spot in east1a",
        "has not responded for 20 s",
        "up to 4.00 USD/h at once",
        "all nodes are running after",
    ):
        assert words in story, story


def test_a_placement_of_a_fast_cloud_counts_as_late_within_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HedgeTimer, "measure_s", lambda self, cloud, answer: 0.8)
    world = make_world(tmp_path, slow={"east1a": HANG_S})
    start_s = world.clock.now_s()
    assert up(world).placement.offer.zone == "east1b"
    assert [(zone, pytest.approx(at_s - start_s, abs=0.05)) for zone, at_s in world.cloud.asked[:2]] == [
        ("east1a", 0.0),
        ("east1b", 0.8),
    ]


def test_without_hedging_the_search_waits_for_the_answer(tmp_path: Path) -> None:
    world = make_world(tmp_path, slow={"east1a": HANG_S})
    world.cloud.full_zones["east1a"] = float("inf")
    start_s = world.clock.now_s()
    assert up(world, hedge=1).placement.offer.zone == "east1b"
    assert world.clock.now_s() - start_s > HANG_S
    assert world.cloud.asked[1][1] - world.cloud.asked[0][1] > HANG_S


def test_the_gang_of_a_slow_placement_is_released_and_confirmed_gone(tmp_path: Path) -> None:
    world = make_world(tmp_path, slow={"east1a": 40.0})
    messages: list[str] = []
    cluster = up(world, messages=messages)
    assert cluster.placement.offer.zone == "east1b"
    assert {node.zone for node in world.list_live_nodes()} == {"east1b"}
    given = [node for node in world.cloud.observe() if node.zone == "east1a"]
    assert len(given) == 2 and all(node.state is NodeState.TERMINATED for node in given), "created, then terminated"
    assert not world.store.intents.list_open()
    (end,) = (line for line in messages if "east1a" in line and line.startswith("terminated"))
    given_usd = sum(node.usd_hour * ((node.ended_s or 0.0) - node.created_s) / 3600 for node in given)
    reported_usd = float(end.rpartition("(cost ")[2].removesuffix(" USD)"))
    assert reported_usd == pytest.approx(given_usd, abs=0.0001) and given_usd > 0.0005
    spent_usd = world.store.bills.spend_usd(cluster="c", now_s=world.clock.now_s())
    assert spent_usd == pytest.approx(world.cloud.bill_usd(), rel=0.01), "both gangs are on the bill"


def test_a_late_gang_is_terminated_even_if_lists_fail(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    world = make_world(tmp_path, slow={"east1a": 100.0})
    world.cloud.timings = CloudTimings(list_lag_s=0.0)
    provisioner = world.make_provisioner()

    async def fail(owner: str) -> NodeList:
        raise TransientError("no answer")

    async def scenario() -> None:
        assert (await provisioner.up("c", make_plan(world.task))).placement.offer.zone == "east1b"
        world.cloud.list_nodes = fail  # type: ignore[method-assign]
        await provisioner.finish()
        await world.clock.sleep(10.0)

    world.clock.run(scenario)
    given = [node for node in world.cloud.observe() if node.zone == "east1a"]
    assert [node.state for node in given] == [NodeState.TERMINATED] * 2, "its answer names them"
    assert len(world.store.intents.list_open("c")) == 1, "their termination is not confirmed"
    assert "cannot release 2 x big spot in east1a (simulated) now: no answer" in caplog.text


def test_resumed_launches_of_a_killed_command_are_reported_as_resumed(tmp_path: Path) -> None:
    world = make_world(tmp_path, slow={"east1a": HANG_S, "east1b": HANG_S})

    async def cut_short() -> None:
        coming = asyncio.ensure_future(world.make_provisioner().up("c", make_plan(world.task)))
        await world.clock.sleep(40.0)
        coming.cancel()
        await asyncio.gather(coming, return_exceptions=True)

    world.clock.run(cut_short)
    assert len(world.store.intents.list_open("c")) == 2
    messages: list[str] = []
    up(world, messages=messages)
    assert [line.partition(" at ")[0] for line in messages[:2]] == [
        f"resuming 2 x big spot in {zone} (simulated)" for zone in ("east1a", "east1b")
    ]


def test_a_throttled_call_is_retried_with_growing_backoff_within_the_shared_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("random.uniform", lambda low, high: high)
    world = make_world(tmp_path)
    called_s: list[float] = []

    async def throttle(request: NodeRequest) -> Sequence[Node]:
        called_s.append(world.clock.now_s())
        raise ThrottledError("slow down")

    world.cloud.create_nodes = throttle  # type: ignore[method-assign]

    def search(name: str) -> list[float]:
        """Return the seconds between the calls of one search."""
        called_s.clear()
        with pytest.raises(CapacityError):
            world.clock.run(lambda: world.make_provisioner().up(name, make_plan(world.task, "east1a")))
        return [later - earlier for earlier, later in pairwise(called_s)]

    assert search("c") == pytest.approx([1.0, 2.0, 4.0, 8.0, 16.0], abs=0.1)
    world.clock.run(lambda: world.clock.sleep(3600.0))
    memory = UnavailableOffers(world.store)
    for _ in range(int(FAILURES_MAX) - 1):
        memory.note_failed_call("simulated")
    assert search("d") == [] and len(called_s) == 1, "the last of the budget"


def test_nodes_of_a_lost_answer_are_adopted_once_lists_show_all_of_them(tmp_path: Path) -> None:
    world = make_world(tmp_path)
    world.cloud.timings = CloudTimings(list_lag_s=4.0)
    create, note, begun_s = world.cloud.create_nodes, world.store.intents.note_nodes, world.clock.now_s()
    calls: list[str] = []
    made_s: list[float] = []

    async def lose(request: NodeRequest) -> Sequence[Node]:
        calls.append(request.token)
        nodes = await create(request)
        if len(calls) == 1:
            raise UnknownOutcomeError("no answer")
        return nodes

    def note_made(token: str, nodes: Sequence[Node]) -> None:
        made_s.append(world.clock.now_s() - begun_s)
        note(token, nodes)

    world.cloud.create_nodes = lose  # type: ignore[method-assign]
    world.store.intents.note_nodes = note_made  # type: ignore[method-assign]
    up(world)
    assert len(calls) == 1, "lists lag: that they show nothing yet is not a reason to request again"
    assert 0.5 < made_s[0] < 6.0 < world.cloud.settle_s


def test_nodes_of_an_unanswered_call_are_released_although_the_next_call_was_refused(tmp_path: Path) -> None:
    world = make_world(tmp_path)
    placement = make_plan(world.task).estimates[0].placement
    request = NodeRequest(owner=OWNER, cluster="c", attempt=1, token="t", placement=placement)
    world.store.intents.put(request)

    async def refuse() -> Sequence[Node]:
        raise CapacityError("full")

    async def scenario() -> int:
        await world.cloud.create_nodes(request)
        made = len(world.list_live_nodes())
        launch = Launch(
            cloud=world.cloud, request=request, rank=0, state=LaunchState.UNKNOWN, begun_s=world.clock.now_s()
        )
        launch.task = launch.call = asyncio.ensure_future(refuse())
        await asyncio.wait([launch.task])
        await world.make_provisioner()._failover.launcher.terminate_unneeded(launch)
        return made

    assert world.clock.run(scenario) == 2
    assert not world.list_live_nodes() and not world.store.intents.list_open()


def test_the_slow_placement_wins_if_its_gang_runs_first(tmp_path: Path) -> None:
    world = make_world(tmp_path, slow={"east1a": 21.0, "east1b": 100.0})
    assert up(world).placement.offer.zone == "east1a"
    assert {node.zone for node in world.list_live_nodes()} == {"east1a"}
    assert not world.store.intents.list_open()


def test_a_gang_that_never_boots_does_not_block_the_next_placement(tmp_path: Path) -> None:
    world = make_world(tmp_path)
    world.cloud.faults = FaultRates(never_boots=1.0)
    provisioner = world.make_provisioner()
    start_s = world.clock.now_s()

    async def scenario() -> None:
        coming = asyncio.ensure_future(provisioner.up("c", make_plan(world.task)))
        await world.clock.sleep(1.0)
        world.cloud.faults = FaultRates()
        assert (await coming).placement.offer.zone == "east1b"
        assert world.clock.now_s() - start_s < LIMITS[Answer.WHOLE].prior_s + 60.0
        await provisioner.finish()

    world.clock.run(scenario)
    assert {node.zone for node in world.list_live_nodes()} == {"east1b"}


def test_an_incomplete_gang_is_terminated_at_once(tmp_path: Path) -> None:
    world = make_world(tmp_path)
    world.cloud.faults = FaultRates(partial=1.0)
    provisioner = world.make_provisioner()
    start_s = world.clock.now_s()

    async def scenario() -> None:
        coming = asyncio.ensure_future(provisioner.up("c", make_plan(world.task)))
        await world.clock.sleep(0.2)
        world.cloud.faults = FaultRates()
        assert (await coming).placement.offer.zone == "east1b"

    world.clock.run(scenario)
    assert world.clock.now_s() - start_s < 110.0, "the search does not wait for nodes that will not come"
    assert {node.zone for node in world.list_live_nodes()} == {"east1b"}


def test_concurrent_launches_are_in_different_zones(tmp_path: Path) -> None:
    world = make_world(tmp_path, slow={"east1a": HANG_S})
    plan = make_plan(world.task, "east1a", "west1a")
    dear = replace(plan.estimates[0], placement=replace(plan.estimates[0].placement, is_spot=False))
    plan = replace(plan, estimates=(plan.estimates[0], dear, plan.estimates[1]))
    provisioner = world.make_provisioner()

    async def scenario() -> Cluster:
        return await provisioner.up("c", plan)

    assert world.clock.run(scenario).placement.offer.zone == "west1a"
    assert [zone for zone, _ in world.cloud.asked] == ["east1a", "west1a"]


def test_the_hedge_timer_is_learned_from_answers_and_bounded() -> None:
    limits = LIMITS[Answer.CREATED]
    assert bound(None, limits) == limits.prior_s
    pace = None
    for _ in range(50):
        pace = update_response_time(pace, 8.0)
    assert bound(pace, limits) == pytest.approx(8.0, abs=0.1)
    for _ in range(50):
        pace = update_response_time(pace, 500.0)
    assert bound(pace, limits) == limits.most_s
    assert bound(update_response_time(None, 0.01), limits) == limits.least_s


def test_clock_that_jumped_by_a_day_is_forgotten_after_thirty_answers(tmp_path: Path) -> None:
    world = make_world(tmp_path)
    timer = HedgeTimer(world.store.response_times)
    timer.note("here", Answer.CREATED, 86400.0)
    for _ in range(30):
        timer.note("here", Answer.CREATED, 0.5)
    assert timer.measure_s("here", Answer.CREATED) < LIMITS[Answer.CREATED].most_s / 2


def test_a_fast_cloud_counts_as_late_sooner_the_second_time(tmp_path: Path) -> None:
    world = make_world(tmp_path)
    up(world, name="first")
    world.cloud.slow_zones = {"east1a": HANG_S}
    start_s = world.clock.now_s()
    messages: list[str] = []
    up(world, name="second", messages=messages)
    assert world.cloud.asked[-1][1] - start_s == pytest.approx(LIMITS[Answer.CREATED].least_s, abs=0.5)


@pytest.mark.parametrize(
    ("slow", "every"),
    [
        pytest.param({"east1a": 60.0}, 4, marks=long, id="late"),
        pytest.param({"east1a": HANG_S}, 4, marks=exhaustive, id="never"),
        pytest.param({"east1a": 60.0}, 1, marks=exhaustive, id="late, every step"),
        pytest.param({"east1a": HANG_S}, 1, marks=exhaustive, id="never, every step"),
    ],
)
def test_after_a_kill_at_any_step_of_a_hedge_the_job_ends_once_and_leaves_nothing(
    tmp_path: Path, slow: dict[str, float], every: int
) -> None:
    (tmp_path / "calm").mkdir()
    calm = make_world(tmp_path / "calm", slow=slow)
    run_to_end(calm, "plain")
    assert len(calm.cloud.asked) > 1, "placements are requested concurrently"
    crashes = 0
    for crash_at in range(1, calm.points.count + 1, every):
        folder = tmp_path / str(crash_at)
        folder.mkdir()
        world = make_world(folder, crash_at=crash_at, slow=slow)
        crashes += run_to_end(world, "plain")
        try:
            check_end(world)
        except AssertionError as error:
            raise AssertionError(f"replay: slow={slow} crash_at={crash_at}: {error}") from error
        world.store.close()
    assert crashes >= calm.points.count * 0.9 // every


def check_end(world: World) -> None:
    from broker.types import JobStatus

    check(world, JobStatus.SUCCEEDED)
    assert world.gang.starts <= 1 + len(world.get_job().attempts)


def test_a_command_killed_during_a_release_leaves_it_to_the_collector_and_keeps_the_cluster(tmp_path: Path) -> None:
    world = make_world(tmp_path, slow={"east1a": HANG_S})
    provisioner = world.make_provisioner()

    async def come_up() -> None:
        await provisioner.up("c", make_plan(world.task))

    world.clock.run(come_up)  # its loop ends here, as its process would: the call to east1a is still under way
    (intent,) = world.store.intents.list_open()
    assert intent.request.placement.offer.zone == "east1a"
    world.reborn()
    late = world.cloud._make_gang(intent.request, world.clock.now_s())  # the cloud carries it out after all
    world.clock.run(lambda: world.clock.sleep(2 * 3600.0))
    lost = world.clock.run(lambda: world.make_provisioner().find_lost())
    assert {node.id for node in lost.nodes} == set(late) and not lost.names
    world.clock.run(lambda: world.make_provisioner().collect())
    assert not world.store.intents.list_open()
    assert {node.zone for node in world.list_live_nodes()} == {"east1b"}
    cluster = world.store.clusters.get("c")
    assert cluster is not None and cluster.status is ClusterStatus.UP, "what is in use is left alone"


def test_down_ends_a_search_and_all_its_launches(tmp_path: Path) -> None:
    world = make_world(tmp_path, slow={"east1a": 90.0, "east1b": 90.0})
    provisioner, other = world.make_provisioner(), world.make_provisioner()

    async def scenario() -> None:
        coming = asyncio.ensure_future(provisioner.up("c", make_plan(world.task)))
        await world.clock.sleep(60.0)
        assert len(world.store.intents.list_open()) == 2
        await other.down("c")
        with pytest.raises(BrokerError):
            await coming

    world.clock.run(scenario)
    world.clock.run(lambda: world.make_provisioner().collect())
    world.clock.run(lambda: world.clock.sleep(60.0))
    assert not world.list_live_nodes() and not world.store.intents.list_open()


def test_only_one_of_two_searches_probes_an_expired_refusal(tmp_path: Path) -> None:
    world = make_world(tmp_path)
    world.cloud.full_zones["east1a"] = world.clock.now_s() + 5.0
    up(world, name="first")
    world.clock.run(lambda: world.clock.sleep(700.0))
    world.cloud.asked.clear()
    provisioner = world.make_provisioner()

    async def scenario() -> list[str | None]:
        both = [provisioner.up(name, make_plan(world.task)) for name in ("second", "third")]
        return [cluster.placement.offer.zone for cluster in await asyncio.gather(*both)]

    assert sorted(map(str, world.clock.run(scenario))) == ["east1a", "east1b"]
    assert [zone for zone, _ in world.cloud.asked].count("east1a") == 1
    assert up(world, name="fourth").placement.offer.zone == "east1a", "it granted nodes: all may request again"


def test_a_dead_probe_blocks_others_for_a_limited_time(tmp_path: Path) -> None:
    world = make_world(tmp_path)
    placement = make_plan(world.task).choice.placement
    offer = placement.offer
    world.store.refusals.add(offer.cloud, offer.region, offer.zone, offer.instance_type, True, 1.0, "full")
    world.clock.run(lambda: world.clock.sleep(2.0))
    world.store.refusals.begin_probe(placement, lasts_s=PROBE_S)
    assert up(world, name="one").placement.offer.zone == "east1b"
    world.clock.run(lambda: world.clock.sleep(PROBE_S))
    assert up(world, name="two").placement.offer.zone == "east1a"


def test_failed_calls_use_one_budget_per_cloud_that_refills_with_time(tmp_path: Path) -> None:
    world = make_world(tmp_path)
    calls = 0

    async def throttle(request: NodeRequest) -> Sequence[Node]:
        nonlocal calls
        calls += 1
        raise ThrottledError("slow down")

    create = world.cloud.create_nodes
    world.cloud.create_nodes = throttle  # type: ignore[method-assign]
    provisioner: Provisioner = world.make_provisioner()

    async def storm() -> list[object]:
        searches = [provisioner.up(f"c{n}", make_plan(world.task)) for n in range(100)]
        return list(await asyncio.gather(*searches, return_exceptions=True))

    errors = world.clock.run(storm)
    assert all(isinstance(error, CapacityError) for error in errors)
    assert FAILURES_MAX <= calls < 400, "a hundred searches of three places, six tries each, do not make 1,800 calls"
    world.cloud.create_nodes = create  # type: ignore[method-assign]
    world.clock.run(lambda: world.clock.sleep(3600.0))
    assert up(world, name="later").status is ClusterStatus.UP


def test_a_partial_gang_created_by_a_lost_answer_does_not_count_as_the_gang(tmp_path: Path) -> None:
    world = make_world(tmp_path)
    create, answers = world.cloud.create_nodes, 0

    async def lose(request: NodeRequest) -> Sequence[Node]:
        nonlocal answers
        answers += 1
        nodes = await create(request)
        if answers == 1:
            raise UnknownOutcomeError("no answer")
        return nodes

    world.cloud.create_nodes = lose  # type: ignore[method-assign]
    cluster = up(world)
    assert len(cluster.nodes) == 2 and len(world.list_live_nodes()) == 2
