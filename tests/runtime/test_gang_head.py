"""The coordinator of an elastic gang is lost, comes back, and is replaced: over real sockets, with real files."""

from __future__ import annotations

import json
import os
import queue
import socket
import ssl
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from broker.agent import FOLDER
from tests.fuzz.targets_gang import agent_link, agent_wire, await_kind, await_that, list_threads, make_pem

sys.path.append(str(FOLDER))  # as on a node
import agent_files
import agent_head
import agent_lead
import agent_member

sys.path.pop()

RUN = 7
ADDRESSES = ["127.0.0.1"] * 3


class Node:
    """One node of a gang of three, one of which suffices: its files, and the membership of its runner."""

    def __init__(self, root: Path, rank: int, *, is_followed: bool = True) -> None:
        self.rank = rank
        self.runs = root / str(rank) / "runs"
        self.folder = self.runs / str(RUN)
        self.folder.mkdir(parents=True)
        (self.folder / agent_files.CREDENTIAL).write_text(make_pem("gang").read_text())
        self.spec = {"rank": rank, "num_nodes": 3, "nodes_min": 1, "node_ips": ADDRESSES}
        (self.folder / "spec.json").write_text(json.dumps(self.spec))
        if is_followed:
            (self.folder / agent_head.FOLLOWED).touch()
        self.heard: queue.Queue[dict[str, Any]] = queue.Queue()
        self.coordinator: Any = None
        self.member = agent_member.Membership(self.folder, self.spec, self.heard.put, self._lead)

    def _lead(self, head: dict[str, Any]) -> bool:
        self.coordinator = agent_lead.take_over(self.folder, self.spec, head)
        return self.coordinator is not None

    def begin(self, port: int) -> None:
        head = {"address": "127.0.0.1", "coordinator_port": port}
        agent_head.record_first(self.folder, {**self.spec, "head": head})
        assert self.member.join(lambda: False)
        self.member.send("setup", returncode=0)

    def name_head(
        self, epoch: int, rank: int, port: int | None, *, members: tuple[int, ...] = (1, 2)
    ) -> dict[str, Any]:
        """Act as the broker that names a head."""
        request = {"run_id": RUN, "epoch": epoch, "rank": rank, "address": "127.0.0.1", "port": port}
        runs, agent_files.RUNS = agent_files.RUNS, self.runs
        try:
            answer: dict[str, Any] = agent_head.receive({**request, "node_ips": ADDRESSES, "members": list(members)})
            return answer
        finally:
            agent_files.RUNS = runs

    def lead(self, epoch: int) -> int:
        """Make this node the head; return its port."""
        await_that(lambda: self.name_head(epoch, self.rank, None)["port"], "the node does not take over")
        await_that(lambda: self.coordinator, "the node has its port and no coordinator")  # set later, by another thread
        return int(self.name_head(epoch, self.rank, None)["port"])

    def close(self) -> None:
        self.member.end()
        if self.coordinator:
            self.coordinator.close()
        if self.member._link:
            self.member._link.close()


class Stage:
    """A gang of three whose program runs."""

    def __init__(self, root: Path, *, is_followed: bool = True) -> None:
        self.nodes = [Node(root, rank, is_followed=is_followed) for rank in range(3)]
        self.first = agent_lead.coordinate(self.nodes[0].folder, self.nodes[0].spec, self._listen())
        self.nodes[0].coordinator = self.first
        self.port = json.loads((self.nodes[0].folder / agent_head.COORDINATOR).read_text())["port"]
        for node in self.nodes:
            node.begin(self.port)
        for node in self.nodes:
            await_kind(node.heard, "go")
            node.member.mark_started()

    def _listen(self) -> Any:
        return agent_link.listen("127.0.0.1", 3)

    def lose_head(self) -> None:
        self.nodes[0].member.end()
        self.first.close()
        for node in self.nodes[1:]:
            await_that(lambda node=node: node.member.is_headless or not node.heard.empty(), "the loss is not noticed")

    def close(self) -> None:
        for node in self.nodes:
            node.close()
        await_that(lambda: not list_threads(), f"threads are left: {list_threads()}")


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path)
    yield stage
    stage.close()


def test_survivors_continue_under_the_head_that_is_named_and_end_there(stage: Stage) -> None:
    stage.lose_head()
    _, first, second = stage.nodes
    second.member.send("log", text="while there is no head\n")
    port = first.lead(1)
    assert first.name_head(1, 1, port) == {"epoch": 1, "port": port}
    second.name_head(1, 1, port)
    await_that(lambda: set(first.coordinator._links) == {1, 2}, "a survivor does not join")
    await_that(lambda: b"while there is no head" in (first.folder / "log").read_bytes(), "its log is lost")
    for node in (second, first):
        node.member.send("exit", returncode=0)
    for node in (first, second):
        assert await_kind(node.heard, "end")["status"] == "SUCCEEDED"


def test_what_a_member_reported_is_repeated_to_the_next_head(stage: Stage) -> None:
    stage.lose_head()
    _, first, second = stage.nodes
    second.member.send("exit", returncode=0)
    second.name_head(1, 1, first.lead(1))
    await_that(lambda: 2 in first.coordinator._gone, "the end of the second is not known")
    first.member.send("exit", returncode=0)
    assert await_kind(first.heard, "end")["status"] == "SUCCEEDED"


def test_new_node_joins_the_new_head_and_takes_part(stage: Stage, tmp_path: Path) -> None:
    stage.lose_head()
    _, first, second = stage.nodes
    port = first.lead(1)
    second.name_head(1, 1, port)
    new = Node(tmp_path / "new", 0)
    stage.nodes.append(new)
    head = {"address": "127.0.0.1", "coordinator_port": port, "epoch": 1, "rank": 1}
    agent_head.record_first(new.folder, {**new.spec, "head": head})
    assert new.member.join(lambda: False) and not agent_head.is_head(new.folder, new.spec)
    new.member.send("setup", returncode=0)
    await_kind(new.heard, "go")


def test_head_that_was_only_cut_off_is_refused_and_its_program_ends(stage: Stage) -> None:
    """The survivors of a partition follow another head; the first one still listens, with a rank of its own."""
    first, second = stage.nodes[1:]
    second.name_head(1, 1, first.lead(1))
    await_that(lambda: set(first.coordinator._links) == {1, 2}, "a survivor does not join")
    with pytest.raises(ConnectionError):  # a member that knows the new head does not join the old one
        connect(stage.port, rank=2, epoch=1)
    assert await_kind(stage.nodes[0].heard, "kill")["status"] == "FAILED"
    new_port = json.loads((first.folder / agent_head.COORDINATOR).read_text())["port"]
    with pytest.raises(ConnectionError):
        connect(new_port, rank=0, epoch=0)
    assert set(first.coordinator._links) == {1, 2}


def test_old_name_changes_nothing_and_an_epoch_has_one_head(stage: Stage) -> None:
    stage.lose_head()
    first, second = stage.nodes[1:]
    port = first.lead(1)
    second.name_head(1, 1, port)
    known = (second.folder / agent_head.GANG).read_bytes()
    assert second.name_head(0, 0, stage.port) == {"epoch": 1, "port": None}
    assert second.name_head(1, 2, None) == {"epoch": 1, "port": None}, "two heads of one epoch"
    assert (second.folder / agent_head.GANG).read_bytes() == known and second.coordinator is None


def test_member_that_does_not_learn_of_the_new_head_waits_and_then_ends(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.lose_head()
    first, second = stage.nodes[1:]
    first.lead(1)
    await_that(lambda: set(first.coordinator._links) == {1}, "the head does not join itself")
    assert second.member.is_headless and second.heard.empty(), "it waits"
    monkeypatch.setattr(agent_member, "AWAY_S_MAX", 0.0)
    assert second.heard.get(timeout=300) == {"type": "lost"}
    assert not second.member.is_headless or second.member._is_over


def test_survivor_that_does_not_reach_the_new_head_is_lost(stage: Stage) -> None:
    stage.lose_head()
    first = stage.nodes[1]
    first.lead(1)
    await_that(lambda: set(first.coordinator._links) == {1}, "the head does not join itself")
    first.coordinator._nodes_min = 2
    first.coordinator._check_joined()
    assert await_kind(first.heard, "kill")["reason"] == "rank 2 is lost"


def test_program_that_does_not_follow_ends_with_its_head(tmp_path: Path) -> None:
    stage = Stage(tmp_path, is_followed=False)
    stage.lose_head()
    assert [node.heard.get(timeout=300) for node in stage.nodes[1:]] == [{"type": "lost"}] * 2
    stage.close()


def test_program_that_failed_when_its_head_was_lost_is_not_blamed(stage: Stage) -> None:
    """The next head would report the exit code as the program's own failure."""
    second = stage.nodes[2]
    stage.first._lock.acquire()  # the head is gone before it can answer
    second.member.send("exit", returncode=1)
    stage.first._verdict = {"status": "FAILED", "returncode": None, "reason": ""}
    stage.first._lock.release()
    stage.nodes[0].member.end()
    stage.first.close()
    assert second.heard.get(timeout=300) == {"type": "lost"}


def test_lost_connection_to_a_living_head_is_opened_again(stage: Stage) -> None:
    second = stage.nodes[2]
    old = stage.first._links[2]
    second.member._link._wire.close()
    await_that(lambda: stage.first._links[2] is not old and not second.member.is_headless, "it does not come back")
    assert {each["type"] for each in second.heard.queue} <= {"go"} and stage.first._verdict is None


def connect(port: int, *, rank: int, epoch: int) -> Any:
    context = agent_wire.make_context(make_pem("gang"), is_server=False)
    return agent_link.connect("127.0.0.1", port, context, rank, print, epoch=epoch)


def write_in_place(path: Path, text: str, *, is_durable: bool = True) -> None:
    with path.open("w") as file:
        file.write(text[: len(text) // 2])
        file.flush()
        os.fsync(file.fileno())
        file.write(text[len(text) // 2 :])


@pytest.mark.parametrize("is_planted", [False, True])
def test_program_never_reads_half_a_name(stage: Stage, is_planted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is read at the worst moment, when a write is half done; a planted writer in place is detected."""
    if is_planted:
        monkeypatch.setattr(agent_files, "write_text", write_in_place)
    node, sync, torn = stage.nodes[2], os.fsync, []

    def read_and_sync(descriptor: int) -> None:
        if threading.current_thread() is threading.main_thread():
            torn.append(not agent_head.read_head(node.folder))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", read_and_sync)
    node.name_head(1, 1, 4711)
    assert torn and any(torn) == is_planted


def check_cut_off_head(stage: Stage) -> None:
    """Check that the old head does not admit a member that follows another head, whatever epoch it states."""
    stage.first._gone.add(2)
    with socket.create_connection(("127.0.0.1", stage.port), timeout=300) as connection:
        wire = agent_wire.Wire(connection, agent_wire.make_context(make_pem("gang"), is_server=False), is_server=False)
        give_up_s = time.monotonic() + 300
        wire.shake_hands(give_up_s)
        wire.write(agent_link.encode("hello", rank=2, epoch=1))
        with pytest.raises((ConnectionError, ssl.SSLError)):
            wire.read_line(give_up_s)


def test_coordinator_refuses_a_member_that_knows_a_higher_epoch(stage: Stage) -> None:
    check_cut_off_head(stage)


def test_coordinator_that_ignores_the_epoch_is_detected(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug: every epoch counts as the coordinator's own."""
    admit = stage.first._admit
    monkeypatch.setattr(stage.first._door, "_on_member", lambda wire, rank, epoch: admit(wire, rank, 0))
    with pytest.raises(pytest.fail.Exception):
        check_cut_off_head(stage)
