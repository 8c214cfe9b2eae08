"""Runs whose accelerators fit a cluster run side by side, in order, and no kill loses or doubles a reservation."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from local_gang import Rig, make_request, make_task, processes_of, wait_for

from broker.agent import agent
from broker.errors import UsageError
from broker.runtime.reserving import count_gpus, find_reservation
from broker.types import Cluster, ClusterStatus, Resources, RunStatus, Task

sys.path.insert(0, str(Path(agent.__file__).parent))
import agent_turn

WAITS = (
    'echo "$CUDA_VISIBLE_DEVICES|$SKYPILOT_NUM_GPUS_PER_NODE" > ~/begun-$ME; until [ -e ~/go-$ME ]; do sleep 0.05; done'
)


def give_cards(cluster: Cluster, accelerator: str | None = "T4", count: float = 1) -> Cluster:
    """Return the cluster as if each node had these accelerators: missing devices are not used."""
    offer = replace(cluster.placement.offer, accelerator=accelerator, accelerator_count=count)
    return replace(cluster, placement=replace(cluster.placement, offer=offer))


def make_record(accelerator: str | None, count: float) -> Cluster:
    placement = make_request().placement
    return give_cards(Cluster(name="c", status=ClusterStatus.UP, placement=placement, attempt=1), accelerator, count)


def make_run(name: str, *asked: tuple[str, float], num_nodes: int = 1) -> Task:
    resources = tuple(Resources(accelerator=each, accelerator_count=count) for each, count in asked)
    task = make_task(WAITS, num_nodes=num_nodes, envs={"ME": name})
    return replace(task, resources=resources or (Resources(),))


class Queue:
    """A cluster of the rig with cards, and the results of its runs."""

    def __init__(self, rig: Rig, cluster: Cluster) -> None:
        self.rig, self.cluster = rig, cluster
        self.homes = [Path(node.handle) / "home" for node in cluster.nodes]

    async def submit(self, run_id: int, *asked: tuple[str, float]) -> None:
        task = make_run(str(run_id), *asked, num_nodes=len(self.cluster.nodes))
        await self.rig.start(self.cluster, task, run_id)

    async def wait_begun(self, run_id: int) -> list[str]:
        """Wait for the program's start; return what it sees on each node."""
        files = [home / f"begun-{run_id}" for home in self.homes]
        await wait_for(lambda: all(file.exists() and file.read_text() for file in files))
        return [file.read_text().strip() for file in files]

    def let_end(self, run_id: int) -> None:
        for home in self.homes:
            (home / f"go-{run_id}").touch()

    async def finish(self, run_id: int) -> None:
        self.let_end(run_id)
        assert (await self.rig.finish_all(self.cluster, run_id)).status is RunStatus.SUCCEEDED

    async def list_statuses(self) -> list[str]:
        return [run.status.value for run in await self.rig.gang.list_runs(self.cluster)]


async def make_queue(rig: Rig, *, nodes: int = 1, cards: float = 1) -> Queue:
    return Queue(rig, give_cards(await rig.make_cluster(nodes), count=cards))


@pytest.fixture(autouse=True)
def unlimited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_two_halves_share_a_card_and_a_third_waits(rig: Rig) -> None:
    async def act() -> None:
        queue = await make_queue(rig)
        for run_id in (1, 2, 3):
            await queue.submit(run_id, ("T4", 0.5))
        assert await queue.wait_begun(1) == await queue.wait_begun(2) == ["0|1"]
        runs = await rig.gang.list_runs(queue.cluster)
        assert [run.status for run in runs] == [RunStatus.RUNNING, RunStatus.RUNNING, RunStatus.PENDING]
        assert [(run.accelerators, run.cards) for run in runs] == [("T4:0.5", (0,))] * 2 + [("T4:0.5", ())]
        await queue.finish(2)
        assert await queue.wait_begun(3) == ["0|1"]
        await queue.finish(1)
        await queue.finish(3)

    asyncio.run(act())


def test_no_run_overtakes_a_large_one_that_waits(rig: Rig) -> None:
    async def act() -> None:
        queue = await make_queue(rig, cards=4)
        await queue.submit(1, ("T4", 1))
        await queue.submit(2, ("T4", 2))
        assert (await queue.wait_begun(1), await queue.wait_begun(2)) == (["0|1"], ["1,2|2"])
        await queue.submit(3, ("T4", 4))
        await queue.submit(4, ("T4", 1))  # would fit, but is later in the queue
        await queue.finish(2)
        assert await queue.list_statuses() == ["RUNNING", "SUCCEEDED", "PENDING", "PENDING"]
        await queue.finish(1)
        assert await queue.wait_begun(3) == ["0,1,2,3|4"]
        assert (await queue.list_statuses())[3] == "PENDING" and not (queue.homes[0] / "begun-4").exists()
        await queue.finish(3)
        assert await queue.wait_begun(4) == ["0|1"]
        queue.let_end(4)

    asyncio.run(act())


def test_a_run_that_asks_for_no_accelerator_has_the_whole_node(rig: Rig) -> None:
    async def act() -> None:
        queue = await make_queue(rig, cards=2)
        await queue.submit(1, ("T4", 1))
        await queue.wait_begun(1)
        await queue.submit(2)
        await queue.submit(3, ("T4", 1))
        assert await queue.list_statuses() == ["RUNNING", "PENDING", "PENDING"]
        await queue.finish(1)
        assert await queue.wait_begun(2) == ["|2"]
        assert (await queue.list_statuses())[2] == "PENDING"
        await queue.finish(2)
        assert await queue.wait_begun(3) == ["0|1"]
        queue.let_end(3)

    asyncio.run(act())


def test_all_nodes_of_a_cluster_follow_the_head(rig: Rig) -> None:
    async def act() -> None:
        queue = await make_queue(rig, nodes=2)
        for run_id in (2, 1, 3):  # the commands of two terminals: the newer run came first
            await queue.submit(run_id, ("T4", 0.5 if run_id < 3 else 1))
        assert await queue.wait_begun(1) == await queue.wait_begun(2) == ["0|1", "0|1"]
        await rig.gang.cancel(queue.cluster, 2)
        await rig.finish_all(queue.cluster, 2)
        await queue.finish(1)
        assert await queue.wait_begun(3) == ["0|1", "0|1"]
        queue.let_end(3)

    asyncio.run(act())


def test_reservations_are_correct_after_runner_and_watcher_were_killed(rig: Rig) -> None:
    async def act() -> None:
        queue = await make_queue(rig)
        await queue.submit(1, ("T4", 0.5))
        await queue.submit(2, ("T4", 0.5))
        await queue.wait_begun(1)
        await queue.wait_begun(2)
        await queue.submit(3, ("T4", 1))
        killed = 0
        for pid in processes_of(queue.cluster.nodes[0]):
            words = read_words(pid)
            if "_watch" in words or words[4:6] == ["_run", "1"]:
                os.kill(pid, signal.SIGKILL)
                killed += 1
        assert killed == 2
        await wait_for(lambda: not any(is_program(pid, "1") for pid in processes_of(queue.cluster.nodes[0])))
        assert (await queue.list_statuses())[1:] == ["RUNNING", "PENDING"], "the second half is still in use"
        await queue.finish(2)
        assert await queue.wait_begun(3) == ["0|1"]
        queue.let_end(3)

    asyncio.run(act())


def read_words(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return []


def is_program(pid: int, name: str) -> bool:
    try:
        return f"ME={name}" in Path(f"/proc/{pid}/environ").read_text().split("\0")
    except OSError:
        return False


@pytest.mark.parametrize(
    ("count", "cards", "held", "found"),
    [
        (0.5, 1, [], ([0], 0.5)),
        (0.3, 1, [([0], 0.3)] * 2, ([0], 0.3)),
        (0.3, 1, [([0], 0.3)] * 3, None),
        (0.1, 1, [([0], 0.1)] * 9, ([0], 0.1)),
        (0.5, 2, [([1], 0.5)], ([1], 0.5)),  # the fullest device that has room
        (0.7, 2, [([1], 0.5)], ([0], 0.7)),
        (2, 4, [([1], 0.5)], ([0, 2], 1.0)),
        (2, 2, [([1], 0.5)], None),
        (0.5, 3, [], ([0], 0.5)),  # of equal devices the first
        (0.2, 3, [([2], 0.5), ([1], 0.5)], ([1], 0.2)),
        (8, 4, [], ([0, 1, 2, 3], 1.0)),  # all that this node has
        (8, 4, [([3], 0.1)], None),
        (0.5, 2, [(None, 1.0)], None),
        (None, 2, [([1], 0.5)], None),
        (None, 2, [], (None, 1.0)),
    ],
)
def test_run_receives_its_reserved_devices(count: float | None, cards: int, held: list[Any], found: Any) -> None:
    others = [{"cards": each, "share": share} for each, share in held]
    expected = {"cards": found[0], "share": found[1]} if found else None
    assert agent_turn.choose(count, cards, others) == expected
    assert expected is None or agent_turn.fits(expected, others)


def test_devices_that_the_head_reserved_are_free_only_if_each_of_them_is() -> None:
    given = {"cards": [0, 1], "share": 1.0}
    assert agent_turn.fits(given, [{"cards": [2], "share": 1.0}])
    for taken in (0, 1):
        assert not agent_turn.fits(given, [{"cards": [taken], "share": 0.1}])
    assert not agent_turn.fits({"cards": [1], "share": 0.5}, [{"cards": [1], "share": 0.3}] * 2)
    assert not agent_turn.fits(agent_turn.WHOLE_NODE, [{"cards": [2], "share": 0.1}])
    assert agent_turn.fits(agent_turn.WHOLE_NODE, [])


def test_earlier_runs_that_wait_come_first_and_ended_ones_hold_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def put(run_id: int, name: str, content: dict[str, Any]) -> None:
        folder = tmp_path / "runs" / str(run_id)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(content))

    def take(run_id: int) -> Any:
        return agent_turn.take(run_id, {"queue": {"count": 1, "card_count": 1}}, lambda **fields: None)

    monkeypatch.setattr(agent_turn.files, "STATE", tmp_path)
    monkeypatch.setattr(agent_turn.files, "RUNS", tmp_path / "runs")
    put(1, "state.json", {"status": "RUNNING", "held": {"cards": [0], "share": 1.0}})
    for waiting in (2, 3):
        put(waiting, "state.json", {"status": "PENDING"})
    for each in (1, 2, 3):
        put(each, "spec.json", {})
    assert take(2) is None and take(3) is None
    put(1, "outcome.json", {"status": "SUCCEEDED"})
    assert take(3) is None, "the second one is waiting, too"
    assert take(2) == {"cards": [0], "share": 1.0}


def test_a_reservation_is_recorded_before_another_run_can_decide(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded: list[Any] = []

    def record(**fields: Any) -> None:
        assert agent_turn.files.try_lock(tmp_path / "turn.lock") is None
        recorded.append(fields)

    monkeypatch.setattr(agent_turn.files, "STATE", tmp_path)
    monkeypatch.setattr(agent_turn.files, "RUNS", tmp_path / "runs")
    (tmp_path / "runs").mkdir()
    held = agent_turn.take(1, {"queue": {"count": 1, "card_count": 2}}, record)
    assert held == {"cards": [0], "share": 1.0} and recorded == [{"held": held}]


def test_a_record_that_cannot_be_read_counts_as_the_whole_node() -> None:
    for damaged in (None, {}, {"cards": 3}, {"cards": ["x"], "share": 1}, {"cards": [0]}, 7):
        assert agent_turn.read_held(damaged) == agent_turn.WHOLE_NODE


def test_cards_are_named_among_those_that_the_agent_may_use() -> None:
    held = {"cards": [0, 2], "share": 1.0}
    spec = {"queue": {"count": 2, "card_count": 4, "variable": "CUDA_VISIBLE_DEVICES"}}

    def name(around: dict[str, str]) -> dict[str, str]:
        return agent_turn.name_cards(held, spec, around)

    assert name({}) == {"CUDA_VISIBLE_DEVICES": "0,2"}
    assert name({"CUDA_VISIBLE_DEVICES": "4,5, GPU-6,7"}) == {"CUDA_VISIBLE_DEVICES": "4,GPU-6"}
    assert name({"CUDA_VISIBLE_DEVICES": "4,5"}) == {}, "too few for the third"
    assert name({"CUDA_VISIBLE_DEVICES": ""}) == {}, "hidden from us: not ours to show"
    assert agent_turn.name_cards({"cards": None, "share": 1.0}, spec, {}) == {}


@pytest.mark.parametrize(
    ("has", "asked", "found"),
    [
        (("T4", 1), [("t4", 0.5)], "T4:0.5"),
        (("A100", 8), [("T4", 1), ("A100", 2)], "A100:2"),
        (("A100", 8), [("A100", 2), ("A100", 8)], "A100:8"),
        (("A10", 0.5), [("A10", 0.25)], "A10:0.25"),
        (("MI300X", 8), [("MI300X", 1)], "MI300X:1"),
        (("TPU-v5e", 8), [("TPU-v5e", 4)], None),  # not shared
        (("T4", 1), [], None),
    ],
)
def test_task_reserves_the_requested_devices(has: Any, asked: Any, found: str | None) -> None:
    cluster = make_record(*has)
    reserved = find_reservation(make_run("x", *asked), cluster)
    assert (reserved.text if reserved else None) == found
    if reserved is not None and reserved.text == "A10:0.25":
        assert (reserved.count, reserved.card_count) == (0.5, 1), "half of the half that is sold"
    assert count_gpus(make_run("x", *asked), cluster, reserved) == (reserved.count if reserved else has[1])


@pytest.mark.parametrize(
    ("has", "asked"), [(("T4", 1), ("T4", 2)), (("T4", 1), ("A100", 0.5)), ((None, 0), ("T4", 0.5))]
)
def test_request_that_no_node_can_meet_is_refused_at_once(has: Any, asked: Any) -> None:
    cluster = make_record(*has)
    with pytest.raises(UsageError, match="the task requests"):
        find_reservation(make_run("x", asked), cluster)
