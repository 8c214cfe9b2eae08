"""Persistent sessions with nodes: over real transports to real agents, and with a fake node on the test's own clock."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from local_gang import Rig, make_request, make_task, wait_for
from sshd import REASON, SSHD, Sshd

from broker.clock import SystemClock
from broker.errors import TransientError
from broker.runtime import channels
from broker.runtime.gang import Gang
from broker.runtime.keys import Keys
from broker.runtime.streams import Stream
from broker.runtime.transports.local import LocalTransport
from broker.runtime.transports.ssh import SshTransport
from broker.sites.openssh import Completed
from broker.types import Cluster, ClusterStatus, Node, NodeState, RunStatus
from tests.signals import signal_all
from tests.tiers import long

TICKS = "i=0; while [ ! -e $HOME/enough ]; do i=$((i + 1)); echo line $i; sleep 0.02; done; echo last"


def count_calls(transport: Any) -> list[Sequence[str]]:
    """Count every plain call from now on."""
    made: list[Sequence[str]] = []
    run = transport.run

    async def counted(node: Node, argv: Sequence[str], **options: Any) -> Completed:
        made.append(argv)
        done: Completed = await run(node, argv, **options)
        return done

    transport.run = counted
    return made


def list_processes(home: Path, word: str) -> list[int]:
    """List processes on the node with this home, with that word among their arguments."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and f"HOME={home}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                words = (entry / "cmdline").read_bytes().split(b"\0")
                found += [int(entry.name)] if word.encode() in words and words[0].endswith(b"python3") else []
        except OSError:
            continue
    return found


@dataclass(frozen=True, kw_only=True)
class Way:
    """A cluster of one node whose agent is running, and the transport to it."""

    gang: Gang
    transport: LocalTransport | SshTransport
    cluster: Cluster
    home: Path
    sshd: Sshd | None = None

    async def start(self, run: str) -> None:
        task = make_task(run)
        await self.gang.prepare(self.cluster, task)
        await self.gang.start(self.cluster, task, run_id=1, envs={})

    async def open_channel(self) -> None:
        """Act as a controller does: poll, then wait for news, until the node reports by itself."""

        async def is_open() -> bool:
            await self.gang.poll(self.cluster, 1)
            await self.gang.wait_news(self.cluster, 1, wake=asyncio.Event(), timeout_s=0.01)
            return self.is_heard()

        await wait_for(is_open)

    def is_heard(self) -> bool:
        channel = self.gang._channels.find(self.cluster.nodes[0]) if self.gang._channels else None
        return channel is not None and channel.is_heard()

    def find_session(self) -> int:
        [session] = list_processes(self.home, "follow")
        return session


@pytest.fixture(params=["local", "ssh"])
def way(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Way]:
    monkeypatch.setattr(channels, "RETRY_S_MIN", 0.05)
    monkeypatch.setattr(channels, "SILENCE_S_MAX", 300.0)  # a machine that stalls is not silent
    monkeypatch.setattr(channels, "UNUSED_S", 300.0)
    if request.param == "local":
        rig: Rig = request.getfixturevalue("rig")
        cluster = asyncio.run(rig.make_cluster())
        yield Way(gang=rig.gang, transport=rig.transport, cluster=cluster, home=Path(cluster.nodes[0].handle) / "home")
        return
    if not SSHD:
        pytest.skip(REASON)
    sshd = Sshd(tmp_path / "sshd", keys := Keys(tmp_path / "keys"))
    sshd.start()
    try:
        transport = SshTransport(keys, clock=SystemClock())
        cluster = Cluster(
            name="c", status=ClusterStatus.UP, placement=make_request().placement, attempt=1, nodes=(sshd.node,)
        )
        gang = Gang(transport, clock=SystemClock())
        yield Way(gang=gang, transport=transport, cluster=cluster, home=sshd.home, sshd=sshd)
    finally:
        (sshd.home / "enough").touch()
        for verb in ("_watch", "_run", "follow"):
            signal_all(list_processes(sshd.home, verb))
        sshd.stop()


def test_run_is_watched_to_its_end_without_a_call(way: Way) -> None:
    async def act() -> None:
        await way.start("until [ -e $HOME/enough ]; do sleep 0.02; done; echo done; exit 3")
        await way.open_channel()
        calls, wake = count_calls(way.transport), asyncio.Event()
        (way.home / "enough").touch()
        while not (report := await way.gang.poll(way.cluster, 1)).status.is_terminal:
            await way.gang.wait_news(way.cluster, 1, wake=wake, timeout_s=60)
        assert (report.status, report.returncode, report.unreachable) == (RunStatus.FAILED, 3, ())
        assert (await way.gang.read_log(way.cluster, 1, offset=0))[0] == b"done\n"
        await way.gang.renew_lease(way.cluster, lease_s=3600)
        assert not calls
        lease = json.loads((way.home / ".broker/lease.json").read_text())
        assert lease["expires_s"] > SystemClock().now_s() + 3000

    asyncio.run(act())


def test_log_that_has_not_grown_is_not_read(way: Way) -> None:
    async def act() -> None:
        await way.start("echo one; until [ -e $HOME/enough ]; do sleep 0.02; done")
        await way.open_channel()

        async def has_all() -> bool:
            return (await way.gang.read_log(way.cluster, 1, offset=0))[0] == b"one\n"

        await wait_for(has_all)
        channel = way.gang._channels.find(way.cluster.nodes[0]) if way.gang._channels else None
        assert channel is not None
        await wait_for(lambda: channel.has_read_log(4))
        assert not channel.has_read_log(3)
        calls = count_calls(way.transport)
        assert await way.gang.read_log(way.cluster, 1, offset=4) == (b"", 4)
        assert not calls

    asyncio.run(act())


def test_session_that_is_killed_is_noticed_and_opened_again(way: Way) -> None:
    async def act() -> None:
        await way.start("until [ -e $HOME/enough ]; do sleep 0.02; done")
        await way.open_channel()
        first = way.find_session()
        await way.gang.poll(way.cluster, 1)
        os.kill(first, signal.SIGKILL)
        while way.is_heard():  # the start of the program may be news, too
            await way.gang.wait_news(way.cluster, 1, wake=asyncio.Event(), timeout_s=60)
            await asyncio.sleep(0.01)
        assert (await way.gang.poll(way.cluster, 1)).unreachable == (), "the node answers a plain call"
        await way.open_channel()
        assert way.find_session() != first
        (way.home / "enough").touch()

    asyncio.run(act())


def test_log_has_no_gap_and_no_repeat_whatever_happens_to_the_channel(way: Way) -> None:
    async def act() -> tuple[bytes, bytes]:
        await way.start(TICKS)
        copy, kills = b"", 0
        while True:
            report = await way.gang.poll(way.cluster, 1)
            for _ in range(100 if report.status.is_terminal else 1):
                copy += (await way.gang.read_log(way.cluster, 1, offset=len(copy)))[0]
            if report.status.is_terminal:
                return copy, (way.home / ".broker/runs/1/log").read_bytes()
            # A session that was just killed may still count as heard: its end has not been read yet.
            if kills < 3 and way.is_heard() and (sessions := list_processes(way.home, "follow")):
                signal_all(sessions[:1])
                kills += 1
            elif way.is_heard() and copy.count(b"\n") > 50:
                (way.home / "enough").touch()
            await way.gang.wait_news(way.cluster, 1, wake=asyncio.Event(), timeout_s=1)

    copy, log = asyncio.run(act())
    lines = copy.decode().splitlines()
    assert lines == [*(f"line {number}" for number in range(1, len(lines))), "last"] and copy == log


def test_nothing_of_a_severed_channel_remains_on_the_node(way: Way) -> None:
    async def act() -> None:
        await way.start("until [ -e $HOME/enough ]; do sleep 0.02; done")
        await way.open_channel()
        assert len(list_processes(way.home, "follow")) == 1

    asyncio.run(act())  # the broker ends without closing anything
    asyncio.run(wait_for(lambda: not list_processes(way.home, "follow")))
    (way.home / "enough").touch()


def test_unused_channel_is_closed(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    async def act() -> None:
        await way.start("i=0; until [ -e $HOME/enough ]; do i=$((i + 1)); echo $i; sleep 0.2; done")
        await way.open_channel()
        monkeypatch.setattr(channels, "UNUSED_S", 0.5)
        await wait_for(lambda: not list_processes(way.home, "follow"))
        (way.home / "enough").touch()

    asyncio.run(act())


@pytest.mark.parametrize("way", ["ssh"], indirect=True)
def test_one_ssh_carries_the_session_and_all_calls(way: Way) -> None:
    async def act() -> None:
        await way.start("until [ -e $HOME/enough ]; do sleep 0.02; done")
        await way.open_channel()
        assert isinstance(way.transport, SshTransport)
        control = str(way.transport._find(way.cluster.nodes[0]).control)
        await wait_for(lambda: len(list_clients(control)) == 1)
        assert way.sshd is not None
        before = (way.sshd.folder / "sshd.log").read_text().count("Accepted publickey")
        await way.transport.run(way.cluster.nodes[0], ["true"], timeout_s=300)
        assert (way.sshd.folder / "sshd.log").read_text().count("Accepted publickey") == before == 2
        (way.home / "enough").touch()

    asyncio.run(act())


@pytest.mark.parametrize("way", ["ssh"], indirect=True)
def test_ssh_that_is_killed_costs_no_answer(way: Way) -> None:
    async def act() -> None:
        await way.start("until [ -e $HOME/enough ]; do sleep 0.02; done")
        await way.open_channel()
        assert isinstance(way.transport, SshTransport)
        control = str(way.transport._find(way.cluster.nodes[0]).control)
        await way.gang.poll(way.cluster, 1)
        signal_all(list_clients(control))
        await way.gang.wait_news(way.cluster, 1, wake=asyncio.Event(), timeout_s=60)
        assert (await way.gang.poll(way.cluster, 1)).unreachable == ()
        await way.open_channel()
        await wait_for(lambda: len(list_processes(way.home, "follow")) == 1)
        (way.home / "enough").touch()

    asyncio.run(act())


def list_clients(control: str) -> list[int]:
    """List local ssh processes on this connection.

    A master that runs in the background has put its socket in its title.
    """
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and control.encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


class HandClock:
    """A clock moved by the test; a sleep is one turn of the loop."""

    def __init__(self) -> None:
        self.s = 1_000_000.0

    def now_s(self) -> float:
        return self.s

    async def sleep(self, duration_s: float) -> None:
        self.s += duration_s
        await asyncio.sleep(0)


class FakeNode:
    """A transport to one node whose answers the test sets."""

    def __init__(self) -> None:
        self.is_up = True
        self.is_old = False
        self.calls = 0
        self.opened = 0
        self.feeds: list[asyncio.StreamReader] = []

    async def run(self, node: Node, argv: Sequence[str], **options: Any) -> Completed:
        self.calls += 1
        if not self.is_up:
            raise TransientError("no answer")
        return Completed(returncode=0, stdout=json.dumps(describe("RUNNING")).encode(), stderr=b"")

    async def put(self, node: Node, source: Path, target: str) -> None: ...

    async def open_shell(self, node: Node) -> Any: ...

    async def open_stream(self, node: Node, argv: Sequence[str]) -> Stream:
        self.opened += 1
        if not self.is_up:
            raise TransientError("no answer")
        reader = asyncio.StreamReader()
        self.feeds.append(reader)
        if self.is_old:
            reader.feed_eof()
        return Stream(reader, LostWriter(reader))  # type: ignore[arg-type]

    def say(self, message: Mapping[str, Any]) -> None:
        self.feeds[-1].feed_data(json.dumps(message).encode() + b"\n")

    def send_status(self, status: str = "RUNNING") -> None:
        self.say({"status": describe(status), "log_bytes": 0})


class LostWriter:
    """A writer whose output is lost; closing it ends what is read, as that of a socket does."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader
        self.transport = self

    def is_closing(self) -> bool:
        return False

    def write(self, data: bytes) -> None: ...

    def close(self) -> None:
        self._reader.feed_eof()

    abort = close


def describe(status: str) -> dict[str, Any]:
    run = {"id": 1, "status": status, "returncode": None, "ended_s": None, "reason": "", "progress": None}
    return {"runs": [run], "idle_s": 0.0, "is_advised": False, "lease_left_s": None}


class Desk:
    """A gang of one fake node, and the turns of a controller that watches it."""

    def __init__(self) -> None:
        self.clock = HandClock()
        self.node = FakeNode()
        self.gang = Gang(self.node, clock=self.clock)
        node = Node(
            id="n", cloud="aws", owner="me", cluster="c", attempt=1, rank=0, state=NodeState.RUNNING, token="t",
            address="", handle="",
        )  # fmt: skip
        self.cluster = Cluster(
            name="c", status=ClusterStatus.UP, placement=make_request().placement, attempt=1, nodes=(node,)
        )

    async def poll(self) -> tuple[RunStatus, tuple[int, ...]]:
        report = await self.gang.poll(self.cluster, 1)
        return report.status, report.unreachable

    async def rest(self, *, timeout_s: float = 0.0) -> None:
        await self.gang.wait_news(self.cluster, 1, wake=asyncio.Event(), timeout_s=timeout_s)
        await settle()

    async def open(self) -> None:
        await self.poll()
        await self.rest()
        self.node.send_status()
        await settle()
        self.node.calls = 0


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_first_poll_asks_the_node_and_opens_nothing() -> None:
    async def act() -> None:
        desk = Desk()
        assert await desk.poll() == (RunStatus.RUNNING, ())
        assert (desk.node.calls, desk.node.opened) == (1, 0)

    asyncio.run(act())


def test_a_node_without_a_session_is_polled_soon_and_no_later_than_requested() -> None:
    async def act() -> None:
        desk = Desk()
        begun_s = desk.clock.s
        await desk.rest(timeout_s=0.0)
        assert desk.clock.s == begun_s
        await desk.rest(timeout_s=60.0)
        assert begun_s < desk.clock.s <= begun_s + 5.0

    asyncio.run(act())


def test_silent_node_becomes_unreachable_and_is_reachable_when_it_returns() -> None:
    async def act() -> None:
        desk = Desk()
        await desk.open()
        desk.node.is_up = False  # silently: the connection stays open, like that of a host that lost power
        for _ in range(5):  # polls 5 s apart
            assert await desk.poll() == (RunStatus.RUNNING, ()) and not desk.node.calls
            desk.clock.s += 5.0
        desk.clock.s += 5.0
        assert (await desk.poll())[1] == (0,)
        opened = desk.node.opened
        for _ in range(5):
            await desk.rest(timeout_s=5.0)
            assert (await desk.poll())[1] == (0,)
        assert desk.node.opened == opened, "a node that answers no call is not asked for a session"
        desk.node.is_up = True
        assert await desk.poll() == (RunStatus.RUNNING, ())
        await desk.rest()
        assert desk.node.opened == opened + 1
        desk.node.send_status()
        await settle()
        desk.node.calls = 0
        assert await desk.poll() == (RunStatus.RUNNING, ()) and not desk.node.calls

    asyncio.run(act())


def test_node_that_sends_only_heartbeats_is_not_polled() -> None:
    async def act() -> None:
        desk = Desk()
        await desk.open()
        for _ in range(100):
            desk.node.say({})
            await settle()
            assert await desk.poll() == (RunStatus.RUNNING, ())
            desk.clock.s += 5.0
        assert not desk.node.calls

    asyncio.run(act())


def test_suspended_broker_does_not_count_its_own_sleep_as_silence() -> None:
    async def act() -> None:
        desk = Desk()
        await desk.open()
        for _ in range(10):
            desk.node.is_up = False  # the network comes back last
            desk.clock.s += 3600.0
            assert await desk.poll() == (RunStatus.RUNNING, ())
            desk.node.say({})  # news that arrived meanwhile is read after the first poll
            await settle()
        assert not desk.node.calls

    asyncio.run(act())


@long
def test_older_agent_is_polled_and_offered_a_session_ever_more_rarely() -> None:
    async def act() -> None:
        desk = Desk()
        desk.node.is_old = True
        for _ in range(2 * 3600):
            assert await desk.poll() == (RunStatus.RUNNING, ())
            await desk.rest(timeout_s=5.0)  # half a second without a channel
        assert desk.node.calls == 2 * 3600
        assert 10 <= desk.node.opened <= 40

    asyncio.run(act())


def test_news_that_arrived_before_the_wait_is_not_missed() -> None:
    async def act() -> None:
        desk = Desk()
        await desk.open()
        await desk.poll()
        desk.node.send_status("SUCCEEDED")
        await settle()
        await asyncio.wait_for(desk.rest(timeout_s=3600.0), 60)
        assert await desk.poll() == (RunStatus.SUCCEEDED, ())

    asyncio.run(act())


@pytest.mark.parametrize(
    "line", [b"[]\n", b"\xff\n", b'{"status": {"runs": [1]}}\n', b'{"status": {"runs": []}, "log_bytes": []}\n']
)
def test_node_with_invalid_messages_is_polled(line: bytes) -> None:
    async def act() -> None:
        desk = Desk()
        await desk.open()
        desk.node.feeds[-1].feed_data(line)
        desk.node.feeds[-1].feed_eof()
        await settle()
        assert await desk.poll() == (RunStatus.RUNNING, ())
        assert desk.node.calls == 1

    asyncio.run(act())


def test_call_that_fails_says_whether_the_agent_or_the_session_failed() -> None:
    async def act() -> None:
        desk = Desk()
        await desk.open()
        assert desk.gang._channels
        channel = desk.gang._channels.find(desk.cluster.nodes[0])
        assert channel
        asked = asyncio.ensure_future(channel.call("log", {}))
        await settle()
        desk.node.say({"id": 1, "error": "KeyError: 'run_id'"})
        with pytest.raises(TransientError, match="failed at `log`: KeyError"):
            await asked
        asked = asyncio.ensure_future(channel.call("log", {}))
        await settle()
        desk.node.feeds[-1].feed_eof()
        with pytest.raises(TransientError, match="the session with node `n` ended"):
            await asked
        with pytest.raises(TransientError, match="no session"):
            await channel.call("log", {})

    asyncio.run(act())


def test_news_is_awaited_only_if_every_node_has_a_channel() -> None:
    """Otherwise a node without a channel would not be polled before another has news."""

    async def act() -> None:
        desk = Desk()
        first = desk.cluster.nodes[0]
        nodes = [first, replace(first, id="m", rank=1)]
        kept = channels.Channels(desk.node, ["agent"], clock=desk.clock)
        assert not await kept.wait_news(nodes, 1, wake=asyncio.Event(), timeout_s=3600.0)
        await settle()
        say = json.dumps({"status": describe("RUNNING"), "log_bytes": 0}).encode() + b"\n"
        desk.node.feeds[0].feed_data(say)
        await settle()
        assert not await asyncio.wait_for(kept.wait_news(nodes, 1, wake=asyncio.Event(), timeout_s=3600.0), 60)
        desk.node.feeds[1].feed_data(say)
        await settle()
        assert await asyncio.wait_for(kept.wait_news(nodes, 1, wake=asyncio.Event(), timeout_s=3600.0), 60)

    asyncio.run(act())


def test_many_nodes_are_sent_a_slower_pace_once(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[bytes] = []
    monkeypatch.setattr(LostWriter, "write", lambda self, data: written.append(data))

    async def act() -> None:
        desk = Desk()
        await desk.open()
        monkeypatch.setattr(channels, "CHANNELS_PER_PACE_S", 0.25)
        for _ in range(3):
            await desk.rest()

    asyncio.run(act())
    paces = [message["pace_s"] for message in map(json.loads, written) if "pace_s" in message]
    assert paces == [1.0, 4.0]


def test_wait_without_a_channel_is_short_and_never_longer_than_asked_for() -> None:
    async def act() -> None:
        desk = Desk()
        desk.node.is_old = True
        begun_s = desk.clock.s
        await desk.rest(timeout_s=5.0)
        assert desk.clock.s - begun_s == pytest.approx(0.5)
        await desk.rest(timeout_s=0.1)
        assert desk.clock.s - begun_s == pytest.approx(0.6)

    asyncio.run(act())


def test_a_session_that_never_sends_anything_is_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its agent has another version, or hangs: plain calls continue."""
    monkeypatch.setattr(channels, "SILENCE_S_MAX", 0.05)

    async def act() -> None:
        desk = Desk()
        channel = channels.Channel(desk.cluster.nodes[0], 1, clock=desk.clock)
        channel.used_s = desk.clock.now_s()
        await asyncio.wait_for(channel.keep(desk.node, ["follow"], asyncio.Semaphore()), 60.0)
        assert desk.node.opened == 1 and not channel.is_heard()

    asyncio.run(act())


def test_channels_of_nodes_that_are_gone_are_dropped_unless_they_are_still_opening() -> None:
    """Dropped while it opens, it would be opened a second time."""

    class Hanging(FakeNode):
        async def open_stream(self, node: Node, argv: Sequence[str]) -> Stream:
            await asyncio.Event().wait()
            raise AssertionError("unreachable")

    async def act() -> None:
        desk = Desk()
        (node,) = desk.cluster.nodes
        keep = channels.Channels(Hanging(), ["follow"], clock=desk.clock)
        first = keep.keep(node, 1)
        await settle()
        desk.clock.s += 3 * channels.UNUSED_S
        keep.keep(replace(node, id="other"), 1)
        assert keep.find(node) is first
        assert first.task is not None
        first.task.cancel()
        await asyncio.wait([first.task])
        desk.clock.s += 3 * channels.UNUSED_S
        keep.keep(replace(node, id="third"), 1)
        assert keep.find(node) is None

    asyncio.run(act())
