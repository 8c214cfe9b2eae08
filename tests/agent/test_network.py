"""The network of a gang is checked before its first step: only a node that is slow on both sides is at fault."""

from __future__ import annotations

import asyncio
import importlib
import json
import queue
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from local_gang import Rig, make_task

from broker.agent import FOLDER
from broker.runtime.reports import GangReport
from broker.types import RunStatus, SlowNetwork
from tests.agent.fake_gpus import FakeGpus
from tests.fuzz.targets_gang import Gang, await_kind, await_that, open_gang
from tests.tiers import long

sys.path.insert(0, str(FOLDER))  # as on a node: siblings by bare names
agent_network: Any = importlib.import_module("agent_network")
sys.path.remove(str(FOLDER))

Links = dict[tuple[int, int], float]
EXPECTED_GBS = 3.1
TRIES = 20  # far more than required
ORDER = {"gpus": 2.0, "refused": [], "network_gbs": EXPECTED_GBS}


def judge(links: Links, gang_gbs: float | None = None) -> tuple[dict[int, str], bool]:
    judgement = agent_network.judge(links, EXPECTED_GBS, gang_gbs)
    return judgement.faults, judgement.is_slow


def test_node_that_is_slow_with_both_neighbours_is_at_fault() -> None:
    faults, is_slow = judge({(0, 1): 0.2, (1, 2): 0.3, (2, 3): 2.9, (0, 3): 2.8})
    assert faults == {1: "the network to ranks 0 and 2 reaches 1.6 and 2.4 of 24.8 Gbit/s"}
    assert not is_slow, "the fault reports it"


def test_two_neighbours_may_both_be_at_fault() -> None:
    links = {(0, 1): 0.2, (1, 2): 0.3, (2, 3): 0.2, (3, 4): 2.8, (4, 5): 2.9, (0, 5): 3.0}
    assert set(judge(links)[0]) == {1, 2}


@pytest.mark.parametrize(
    "links",
    [
        {(0, 1): 0.2},
        {(0, 1): 0.2, (1, 2): 2.9, (2, 3): 2.9, (0, 3): 2.8},
        {(0, 1): 0.2, (1, 2): 0.2, (0, 2): 0.2},
        {(0, 1): 0.7, (1, 2): 0.7, (2, 3): 0.9, (0, 3): 0.9},
        {(0, 1): 1.0, (1, 2): 1.0, (2, 3): 2.9, (0, 3): 2.9},
        {(0, 1): 0.2, (2, 3): 2.9},
    ],
    ids=["two nodes", "one pair", "all alike", "all nearly alike", "above the limit", "a neighbour is not measured"],
)
def test_slow_network_that_shows_no_node_is_only_reported(links: Links) -> None:
    assert judge(links) == ({}, True)


def test_network_at_the_expected_speed_is_not_reported() -> None:
    assert judge({(0, 1): 1.6, (1, 2): 2.0, (0, 2): 3.0}) == ({}, False)
    assert judge({}, 1.6) == ({}, False)
    assert judge({}, 1.5) == ({}, True)


def make_survey(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int = 3, *, took_s: float = 2.0) -> Any:
    monkeypatch.setattr(agent_network.agent_files, "STATE", tmp_path)
    spec = {"node_ips": [f"10.0.0.{rank}" for rank in range(size)]}
    survey = agent_network.make_survey(spec, ORDER, tmp_path)
    for rank in range(size):
        survey.note(rank, {"port": 20000 + rank, "took_s": took_s if rank else 0.1, "cards": [f"GPU-{rank}"]})
    return survey


def test_gpus_and_network_share_one_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request = make_survey(tmp_path, monkeypatch, took_s=21.0).begin()
    assert request["limit_s"] == 30.0 - 21.0 and request["ports"] == [20000, 20001, 20002]
    late = make_survey(tmp_path, monkeypatch, took_s=26.0)
    assert late.begin() is None and late.is_over


def test_network_that_has_passed_is_measured_again_only_with_other_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    survey = make_survey(tmp_path, monkeypatch)
    survey.begin()
    for rank in range(3):
        is_last = survey.take(rank, {"backend": "nccl", "gang_gbs": 2.9, "links": {}})
    assert is_last and survey.close()[0] == {}
    assert make_survey(tmp_path, monkeypatch).begin() is None
    other = make_survey(tmp_path, monkeypatch)
    other.note(1, {"port": 20001, "took_s": 1.0, "cards": ["GPU-new"]})
    assert other.begin() is not None


def test_one_tcp_connection_is_not_expected_to_fill_a_fast_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    survey = make_survey(tmp_path, monkeypatch, 2)
    survey.begin()
    survey.take(0, {"backend": "tcp", "links": {"1": 0.5}})
    survey.take(1, {"backend": "tcp", "links": {"0": 0.6}})
    line = "network check: the slowest pair, ranks 0 and 1, reaches 4 of 5 Gbit/s (tcp)"
    assert survey.close() == ({}, line)
    assert json.loads((tmp_path / "network.json").read_text()) == {"gang": [["GPU-0"], ["GPU-1"]]}


def test_silent_node_leaves_the_network_unmeasured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    survey = make_survey(tmp_path, monkeypatch)
    survey.begin()
    survey.take(0, {"unmeasured": "no connection to rank 1"})
    assert survey.close() == ({}, "network check: not measured: no answer from rank 1")
    assert make_survey(tmp_path, monkeypatch).begin() is not None, "the next attempt tries again"


@pytest.mark.parametrize(
    "answer",
    [
        {"links": 3},
        {"links": {"x": 1.0, "7": 1.0, "1": "fast", "2": -1.0}},
        {"links": {"1": float("nan")}, "gang_gbs": True},
        {"backend": ["tcp"]},
    ],
)
def test_invalid_answers_are_not_evidence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: dict[str, Any]
) -> None:
    survey = make_survey(tmp_path, monkeypatch)
    survey.begin()
    for rank in range(3):
        survey.take(rank, answer if rank == 0 else {})
    assert survey.close() == ({}, "network check: not measured: no result")
    assert make_survey(tmp_path, monkeypatch).begin() is not None, "it has not passed"


def test_single_node_or_no_figure_is_not_measured(tmp_path: Path) -> None:
    assert agent_network.make_survey({"node_ips": ["10.0.0.1"]}, ORDER, tmp_path) is None
    assert agent_network.make_survey({"node_ips": ["10.0.0.1", "10.0.0.2"]}, None, tmp_path) is None
    plain = {name: ORDER[name] for name in ("gpus", "refused")}
    assert agent_network.make_survey({"node_ips": ["10.0.0.1", "10.0.0.2"]}, plain, tmp_path) is None


def set_up_members(gang: Gang) -> list[tuple[Any, queue.Queue[dict[str, Any]]]]:
    """Let three members join and report their setup; return them once the coordinator asks them to measure."""
    members = [gang.join(rank) for rank in range(3)]
    for rank, (link, _) in enumerate(members):
        offer = {"port": 20000 + rank, "took_s": 0.0, "cards": []}
        link.send("setup", returncode=0, fault="", network=offer)
    assert [await_kind(heard, "measure")["ports"] for _, heard in members] == [[20000, 20001, 20002]] * 3
    return members


def test_gang_starts_although_a_node_never_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_network.agent_files, "STATE", tmp_path)
    survey = agent_network.make_survey({"node_ips": ["10.0.0.1"] * 3}, ORDER, tmp_path)
    assert survey is not None
    with open_gang(survey) as gang:
        timers: dict[float, Callable[[], None]] = {}
        monkeypatch.setattr(gang.coordinator, "_set_timer", timers.__setitem__)
        members = set_up_members(gang)
        for link, _ in members[:2]:
            link.send("network", answer={"unmeasured": "no connection to rank 2"})
        await_that(lambda: len(survey._answers) == 2, "the answers do not arrive")
        timers[agent_network.LIMIT_S + agent_network.SLACK_S]()
        for _, heard in members:
            await_kind(heard, "go")
        assert b"broker: network check: not measured: no answer from rank 2\n" in gang.log.read_bytes()


def test_node_at_fault_is_named_to_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_network.agent_files, "STATE", tmp_path)
    survey = agent_network.make_survey({"node_ips": ["10.0.0.1"] * 3}, ORDER, tmp_path)
    with open_gang(survey) as gang:
        members = set_up_members(gang)
        answers: list[dict[str, float]] = [{"1": 0.01, "2": 0.6}, {"0": 0.5, "2": 0.02}, {"0": 0.6, "1": 0.5}]
        for (link, _), links in zip(members, answers, strict=True):
            link.send("network", answer={"backend": "tcp", "links": links})
        reason = "the network to ranks 0 and 2 reaches 0.08 and 0.16 of 5 Gbit/s"
        for _, heard in members:
            message = await_kind(heard, "kill")
            assert message["status"] == "FAILED_SETUP" and message["faults"] == {"1": reason}


async def run_checked(rig: Rig, gpus: FakeGpus, *, node_count: int, network_gbs: float) -> tuple[GangReport, str]:
    """Run a gang with the check, and return its report and the head's log.

    A machine that stalls for seconds leaves the network unmeasured; then another gang measures it.
    """
    task = make_task("echo begun", num_nodes=node_count, envs=gpus.envs)
    order = json.dumps({**ORDER, "network_gbs": network_gbs})
    for _ in range(TRIES):
        (gpus.folder / "sick").unlink(missing_ok=True)
        cluster = await rig.make_cluster(node_count)
        await rig.gang.prepare(cluster, task)
        await rig.gang.start(cluster, task, run_id=1, envs={"BROKER_HEALTH": order})
        report = await rig.finish_all(cluster)
        log = await rig.read_log(cluster)
        if "not measured" not in log:
            break
    return report, log


def test_gang_whose_network_is_as_expected_starts(rig: Rig, gpus: FakeGpus) -> None:
    report, log = asyncio.run(run_checked(rig, gpus, node_count=2, network_gbs=0.002))
    assert report.status is RunStatus.SUCCEEDED and report.faults == () and report.network is None
    assert "broker: network check: the slowest pair, ranks 0 and 1, reaches " in log and log.count("begun") == 2


@long
def test_node_with_a_slow_network_ends_the_run_before_its_first_step(rig: Rig, gpus: FakeGpus) -> None:
    gpus.plant("network")
    report, log = asyncio.run(run_checked(rig, gpus, node_count=3, network_gbs=0.02))
    assert report.status is RunStatus.FAILED_SETUP and report.returncode is None and "begun" not in log
    (found,) = report.faults
    assert found.reason.startswith("the network to ranks ") and report.reason == f"rank {found.rank}: {found.reason}"
    assert found.serials and all(gpus.read_sick() in serial for serial in found.serials), "all GPUs of that node"


@pytest.mark.long
def test_slow_network_that_shows_no_node_is_reported_and_the_program_starts(rig: Rig, gpus: FakeGpus) -> None:
    gpus.plant("network")
    report, log = asyncio.run(run_checked(rig, gpus, node_count=2, network_gbs=0.02))
    assert report.status is RunStatus.SUCCEEDED and log.count("begun") == 2 and report.faults == ()
    assert isinstance(report.network, SlowNetwork) and report.network.pair == (0, 1)
    assert report.network.pair_gbs is not None and report.network.pair_gbs < 0.005
