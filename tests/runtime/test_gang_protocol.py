"""The coordinator of a gang among strangers, members with bugs, and large logs."""

from __future__ import annotations

import asyncio
import json
import math
import queue
import socket
import ssl
import stat
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from local_gang import Rig, make_task, processes_of, wait_for

from broker.errors import TransientError
from broker.runtime import gang
from broker.runtime.credentials import make_credential
from broker.sites.openssh import Completed
from broker.types import Cluster, Node, RunStatus
from tests.fuzz.targets_gang import (
    HANG_S,
    agent_gang,
    agent_link,
    agent_wire,
    await_kind,
    await_that,
    check_coordinator,
    fuzz_coordinator,
    make_pem,
    open_gang,
    open_tls,
    visit,
)
from tests.tiers import examples

CANARY = "canary-in-the-log-4711"
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
KINDS = st.sampled_from(
    ["hello", "setup", "exit", "log", "notice", "cancel", "beat", "lost", "turn", "go", "kill", "end", "network", "x"]
)
NEARLY = st.builds(
    lambda kind, fields: {"type": kind, **fields},
    KINDS,
    st.dictionaries(
        st.sampled_from(
            ["rank", "returncode", "text", "notice_s", "status", "reason", "unflushed", "cards", "network", "answer"]
        ),
        VALUES,
    ),
)
LINES = st.lists((VALUES | NEARLY).map(lambda value: json.dumps(value).encode() + b"\n"), max_size=6).map(b"".join)
PAYLOADS = st.binary(max_size=300) | LINES | st.builds(bytes.__add__, LINES, st.binary(max_size=30))


@settings(max_examples=examples(60), deadline=None)
@given(peer=st.integers(0, 4), payload=PAYLOADS)
def test_members_are_served_whatever_a_peer_sends(peer: int, payload: bytes) -> None:
    fuzz_coordinator(bytes([peer]) + payload)


@pytest.mark.parametrize(
    "payload",
    [b"[" * 200_000 + b"\n", b"9" * 500_000 + b"\n", b"x" * (2 << 20), b'{"type":"log","text":"\\ud800\\n"}\n'],
    ids=["nested", "number", "endless", "surrogate"],
)
@pytest.mark.parametrize("peer", range(5))
def test_large_and_odd_lines_change_nothing(peer: int, payload: bytes) -> None:
    fuzz_coordinator(bytes([peer]) + payload)


@pytest.mark.parametrize(
    "message",
    [
        [],
        "setup",
        {},
        {"type": 1},
        {"type": "setup"},
        {"type": "setup", "returncode": True},
        {"type": "exit", "returncode": None},
        {"type": "exit", "returncode": 2**70},
        {"type": "exit", "returncode": 2**31 + 1},
        {"type": "exit", "returncode": -(2**31) - 1},
        {"type": "exit", "returncode": 0.5},
        {"type": "log", "text": ["a"]},
        {"type": "notice", "notice_s": -1},
        {"type": "notice", "notice_s": math.nan},
        {"type": "notice", "notice_s": math.inf},
        {"type": "network", "answer": []},
        {"type": "measure", "limit_s": "30"},
        {"type": "hello", "rank": -1},
        {"type": "hello", "rank": "0"},
        {"type": "kill", "status": [], "returncode": 0, "reason": ""},
        {"type": "end", "status": "SUCCEEDED", "returncode": 0},
        {"type": "turn", "cards": [-1], "share": 1},
        {"type": "turn", "cards": [0, -1], "share": 1},
        {"type": "turn", "cards": [0], "share": 2},
        {"type": "turn", "cards": "0", "share": 1},
    ],
    ids=str,
)
def test_message_that_no_valid_member_sends_is_refused(message: Any) -> None:
    with pytest.raises(ValueError, match=r"not a message|invalid `"):
        agent_link.parse_message(json.dumps(message).encode())


class Silent:
    """A connection on which nothing arrives; what is sent is recorded."""

    def __init__(self) -> None:
        self.sent: queue.Queue[bytes] = queue.Queue()
        self.is_over = threading.Event()

    def set_timeout(self, timeout_s: float) -> None:
        return

    def write(self, line: bytes) -> None:
        self.sent.put(line)

    def read_line(self) -> bytes:
        self.is_over.wait(HANG_S)
        raise OSError("closed")

    def close(self) -> None:
        self.is_over.set()

    release = close


def test_idle_member_sends_heartbeats_so_that_it_does_not_count_as_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_link, "BEAT_S", 0.01)
    wire = Silent()
    link = agent_link.Link(wire, lambda message: None)
    link.start()
    try:
        beats = [json.loads(wire.sent.get(timeout=HANG_S)) for _ in range(3)]
    finally:
        link.close()
    assert beats == [{"type": "beat"}] * 3


def test_fault_while_a_message_is_handled_counts_as_the_loss_of_the_peer() -> None:
    """The thread that reads was gone then, while the heartbeat went on: the gang waited forever."""
    heard: list[str] = []

    def handle(message: dict[str, Any]) -> None:
        heard.append(message["type"])
        if message["type"] == "go":
            raise LookupError("a fault")

    wire = Silent()
    wire.read_line = lambda: b'{"type": "go"}'  # type: ignore[method-assign]
    link = agent_link.Link(wire, handle)
    with pytest.raises(LookupError):
        link._read()
    assert heard == ["go", "lost"] and wire.is_over.is_set()


def test_suspension_of_a_node_is_not_the_silence_of_its_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """All nodes of a machine may be suspended together: a timer has expired then, and nothing has arrived."""
    waits = list[float]()

    class Poll:
        """The kernel: what arrives, arrives during the last wait."""

        def register(self, connection: socket.socket, events: int) -> None:
            return

        def poll(self, limit_ms: float) -> list[object]:
            waits.append(limit_ms)
            return ["data"] if len(waits) == agent_wire.SILENT_POLLS else []

    ours, theirs = socket.socketpair()
    with ours, theirs:
        wire = agent_wire.Wire(ours, agent_wire.make_context(make_pem("gang"), is_server=True), is_server=True)
        wire.set_timeout(HANG_S)
        monkeypatch.setattr(agent_wire, "select", SimpleNamespace(poll=Poll, POLLIN=1))
        wire._await_data()
        assert sum(waits) == pytest.approx(1000 * HANG_S)
        with pytest.raises(socket.timeout):
            wire._await_data()


def test_kinds_of_a_later_version_are_ignored() -> None:
    assert agent_link.parse_message(b'{"type": "telemetry", "x": []}')["type"] == "telemetry"


def test_member_with_a_bug_is_dropped_and_the_others_continue() -> None:
    """An elastic gang continues: what rank 2 sends is invalid, so rank 2 is lost, as if its machine had gone."""
    with open_gang() as gang:
        (head, heard), (other, _), (broken, lost) = (gang.join(rank) for rank in range(3))
        for link in (head, other, broken):
            link.send("setup", returncode=0)
        await_kind(heard, "go")
        broken.send("notice", notice_s="soon")
        while lost.get(timeout=HANG_S)["type"] != "lost":
            pass
        other.send("log", text="still here\n")
        await_that(lambda: b"still here" in gang.log.read_bytes(), "the log is not written")
        assert gang.coordinator._verdict is None
        again, inbox = gang.join(2)
        again.send("setup", returncode=0)
        await_kind(inbox, "go")


def test_newcomer_whose_setup_fails_leaves_the_others_alone() -> None:
    """Its node could not reach a package index, say: the gang trains, and takes the next newcomer in."""
    with open_gang() as gang:
        (head, heard), (other, _), (lost, inbox) = (gang.join(rank) for rank in range(3))
        for link in (head, other, lost):
            link.send("setup", returncode=0)
        await_kind(inbox, "go")
        lost.close()
        await_that(lambda: 2 in gang.coordinator._gone, "rank 2 is not missed")
        newcomer, inbox = gang.join(2)
        newcomer.send("setup", returncode=1)
        newcomer.send("exit", returncode=1)
        end = await_kind(inbox, "end")
        assert (end["status"], end["reason"]) == ("FAILED_SETUP", "setup exited with 1 on rank 2")
        await_that(lambda: 2 in gang.coordinator._gone, "the newcomer's exit is not heard")
        assert gang.coordinator._verdict is None
        again, inbox = gang.join(2)
        again.send("setup", returncode=0)
        await_kind(inbox, "go")
        assert heard.empty() or heard.get()["type"] == "go"


def test_the_notice_of_a_lost_node_does_not_count_for_the_one_that_takes_its_place() -> None:
    with open_gang() as gang:
        (head, _), (other, _), (leaving, inbox) = (gang.join(rank) for rank in range(3))
        for link in (head, other, leaving):
            link.send("setup", returncode=0)
        await_kind(inbox, "go")
        leaving.send("notice", notice_s=30.0)
        leaving.close()
        await_that(lambda: 2 in gang.coordinator._gone, "rank 2 is not missed")
        newcomer, inbox = gang.join(2)
        newcomer.send("setup", returncode=0)
        await_kind(inbox, "go")
        newcomer.send("exit", returncode=5)
        end = await_kind(inbox, "kill")
        assert (end["status"], end["reason"]) == ("FAILED", "rank 2 exited with 5")


def test_a_rank_whose_files_did_not_arrive_ends_no_program_and_fails_the_run_at_its_end() -> None:
    with open_gang() as gang:
        (head, heard), (early, _), (late, inbox) = (gang.join(rank) for rank in range(3))
        for link in (head, early, late):
            link.send("setup", returncode=0)
        await_kind(inbox, "go")
        early.send("exit", returncode=74, unflushed="written files did not arrive")
        await_that(lambda: 1 in gang.coordinator._gone, "its exit is not heard")
        assert gang.coordinator._verdict is None, "the others still work"
        late.send("exit", returncode=0)
        head.send("exit", returncode=0)
        end = await_kind(heard, "end")
        assert (end["status"], end["returncode"], end["unflushed"]) == ("FAILED", 74, "written files did not arrive")
        assert end["reason"] == "the program succeeded, but on rank 1 written files did not arrive"


def test_member_that_closes_by_tls_is_lost() -> None:
    """The coordinator read its closing message over and over."""
    with open_gang() as gang:
        member = open_tls(gang.port, "gang")
        member.sendall(agent_link.encode("hello", rank=1))
        await_that(lambda: 1 in gang.coordinator._links, "not admitted")
        member.settimeout(HANG_S)
        with suppress(OSError):
            member.unwrap()
        await_that(lambda: 1 in gang.coordinator._gone, "its end is not noticed")
        member.close()


def test_taken_rank_is_not_assigned_again() -> None:
    with open_gang() as gang:
        gang.join(1)
        with pytest.raises(ConnectionError):
            gang.join(1)
        gang.join(2)


def test_another_gangs_credential_is_refused_by_both_ends() -> None:
    with open_gang() as gang:
        context = agent_wire.make_context(make_pem("stranger"), is_server=False)
        with pytest.raises(ConnectionError, match="certificate verify failed"):
            agent_link.connect("127.0.0.1", gang.port, context, 1, print)  # the stranger does not trust us
        visit(gang.port, "another credential", agent_link.encode("hello", rank=1))  # one that trusts everyone
        check_coordinator(gang, is_stranger=True)


@pytest.mark.parametrize("is_server", [True, False])
def test_tls_before_1_2_is_refused_although_an_old_python_would_accept_it(
    is_server: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to Python 3.9 the least version is that of the OpenSSL library."""

    def make_old(protocol: int) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
        return context

    monkeypatch.setattr(agent_wire, "ssl", SimpleNamespace(**{**vars(ssl), "SSLContext": make_old}))
    context = agent_wire.make_context(make_pem("gang"), is_server=is_server)
    assert context.minimum_version is ssl.TLSVersion.TLSv1_2


def test_a_rank_that_never_leaves_holds_the_head_for_a_limited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_gang, "LEAVE_S", 0.01)
    with open_gang() as gang:
        links = [gang.join(rank) for rank in range(3)]
        waiting = threading.Thread(target=gang.coordinator.wait_until_left, daemon=True)
        waiting.start()
        waiting.join(HANG_S)
        assert not waiting.is_alive() and len(links) == 3


def test_the_head_ends_when_the_others_have_left_and_not_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_gang, "LEAVE_S", 10 * HANG_S)
    with open_gang() as gang:
        links = [gang.join(rank)[0] for rank in range(3)]
        for link in links:
            link.send("setup", returncode=0)
            link.send("exit", returncode=0)
        waiting = threading.Thread(target=gang.coordinator.wait_until_left, daemon=True)
        waiting.start()
        waiting.join(0.5)
        assert waiting.is_alive(), "its outcome would come before those of the others"
        for link in links[1:]:
            link.close()
        waiting.join(HANG_S)
        assert not waiting.is_alive()


def test_silent_strangers_do_not_keep_members_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """With more strangers than may wait, the oldest are closed, and members get through before their turn."""
    monkeypatch.setattr(agent_link, "STRANGERS_MAX", 5)
    monkeypatch.setattr(agent_link, "HANDSHAKE_S", 10 * HANG_S)  # they are not closed for their silence
    with open_gang() as gang:
        strangers = [socket.create_connection(("127.0.0.1", gang.port), timeout=HANG_S) for _ in range(30)]
        check_coordinator(gang, is_stranger=True)
        assert [each.recv(1) for each in strangers[:20]] == [b""] * 20
        for each in strangers:
            each.close()


@pytest.mark.parametrize("is_trickling", [False, True], ids=["silent", "a byte at a time"])
def test_handshake_has_a_time_limit(is_trickling: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_link, "HANDSHAKE_S", 0.3)
    with open_gang() as gang, socket.create_connection(("127.0.0.1", gang.port), timeout=HANG_S) as stranger:
        stop = threading.Event()

        def trickle() -> None:
            try:
                for _ in range(16_000):  # a record of that length is being announced
                    stranger.sendall(b"\0")
                    if stop.wait(0.02):
                        return
            except OSError:
                pass

        if is_trickling:
            stranger.sendall(b"\x16\x03\x01\x3f\xff\x01\x00\x3f\xfb")
            threading.Thread(target=trickle, daemon=True).start()
        try:
            assert not stranger.recv(1)
        except ConnectionResetError:
            pass  # closed with bytes of ours unread
        stop.set()


def test_both_directions_carry_large_logs_from_many_threads_at_once() -> None:
    """One reader and four writers per end, whose records interleave: order and content are kept."""
    server, client = make_links()
    count, writers = 150, 4
    threads = []
    for link, _ in (server, client):
        for writer in range(writers):

            def send(link: Any = link, writer: int = writer) -> None:
                for number in range(count):
                    text = f"{writer} {number} " + chr(97 + number % 26) * (number * 131 % 20_000)
                    assert link.send("log", text=text)

            threads.append(threading.Thread(target=send))
    for thread in threads:
        thread.start()
    for _, heard in (server, client):
        found: dict[int, int] = dict.fromkeys(range(writers), 0)
        for _ in range(count * writers):
            writer, number, text = heard.get(timeout=HANG_S)["text"].split(" ")
            assert int(number) == found[int(writer)]
            assert text == chr(97 + int(number) % 26) * (int(number) * 131 % 20_000)
            found[int(writer)] += 1
    for thread in threads:
        thread.join(HANG_S)
    client[0].close()
    while server[1].get(timeout=HANG_S)["type"] != "lost":
        pass
    await_that(lambda: not [each for each in threading.enumerate() if each.name.startswith("gang-")], "threads left")


def make_links(relay: Callable[[int], int] = lambda port: port) -> Sequence[tuple[Any, queue.Queue[dict[str, Any]]]]:
    """Make two ends of one connection, the server's first, and the messages each receives."""
    heard: tuple[queue.Queue[dict[str, Any]], ...] = (queue.Queue(), queue.Queue())
    ends: list[Any] = []
    contexts = [agent_wire.make_context(make_pem("gang"), is_server=is_server) for is_server in (True, False)]

    def admit(wire: Any, rank: int, epoch: int) -> None:
        link = agent_link.Link(wire, heard[0].put)
        ends.append(link)  # before the welcome, which releases the client and the test
        link.send("welcome")
        link.start()

    listener = agent_link.listen("127.0.0.1", 1)
    door = agent_link.MemberListener(listener, contexts[0], 1, admit)
    door.start()
    port = relay(listener.getsockname()[1])
    client = agent_link.connect("127.0.0.1", port, contexts[1], 0, heard[1].put)
    door.close()
    return (ends[0], heard[0]), (client, heard[1])


def test_captured_bytes_hold_neither_key_nor_log() -> None:
    captured = bytearray()

    def relay(port: int) -> int:
        listener = socket.create_server(("127.0.0.1", 0))

        def copy(source: socket.socket, target: socket.socket) -> None:
            while data := source.recv(1 << 16):
                captured.extend(data)
                target.sendall(data)
            with suppress(OSError):  # its other end may be gone already
                target.shutdown(socket.SHUT_WR)

        def serve() -> None:
            near, far = listener.accept()[0], socket.create_connection(("127.0.0.1", port))
            for pair in ((near, far), (far, near)):
                threading.Thread(target=copy, args=pair, daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        return int(listener.getsockname()[1])

    (_, heard), (client, _) = make_links(relay)
    client.send("log", text=f"{CANARY}\n")
    assert CANARY in heard.get(timeout=HANG_S)["text"]
    client.close()
    while heard.get(timeout=HANG_S)["type"] != "lost":
        pass
    assert len(captured) > 500
    key = make_pem("gang").read_text().partition("-----END")[0].split("\n")[1:-1]
    for secret in (CANARY, "returncode", "hello", *key):
        assert secret.encode() not in captured


@pytest.mark.parametrize(
    ("address", "size", "bound"),
    [
        ("127.0.0.1", 2, "127.0.0.1"),
        ("203.0.113.9", 2, "0.0.0.0"),  # of a documentation network: not ours, as behind a NAT
        ("localhost", 2, "0.0.0.0"),  # a name may be another address on the other nodes
        ("203.0.113.9", 1, "127.0.0.1"),
        ("10.0.0.5", 1, "127.0.0.1"),
    ],
)
def test_listener_is_on_the_gangs_interface_only(address: str, size: int, bound: str) -> None:
    with agent_link.listen(address, size) as listener:
        assert listener.getsockname()[0] == bound
        assert agent_link.find_own(bound) == "127.0.0.1"


def read_pems(cluster: Cluster) -> list[str]:
    return [(Path(node.handle) / "home/.broker/runs/1/gang.pem").read_text() for node in cluster.nodes]


def test_key_is_in_one_private_file_of_each_node_and_nowhere_else(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def make(subject: str) -> Any:
        made.append(make_credential(subject).value)
        return make_credential(subject).__class__(value=made[-1])

    monkeypatch.setattr(gang, "make_credential", make)

    async def act() -> None:
        cluster = await rig.make_cluster(2)
        run = """
            echo "pem ${BROKER_GANG_PEM#$HOME} $(grep -c BEGIN "$BROKER_GANG_PEM")"
            until [ -e ~/go ]; do sleep 0.05; done
        """
        await rig.start(cluster, make_task(run, num_nodes=2))
        await rig.wait_log(cluster, "(rank1) pem /.broker/runs/1/gang.pem 2")
        key = made[0].split("\n")[1].encode()
        for node in cluster.nodes:
            processes = processes_of(node)
            assert processes
            for pid in processes:
                for name in ("cmdline", "environ"):
                    with suppress(FileNotFoundError, ProcessLookupError):  # the program's `sleep` ends meanwhile
                        assert key not in Path(f"/proc/{pid}/{name}").read_bytes()
            (Path(node.handle) / "home/go").touch()
        assert (await rig.finish(cluster)).status is RunStatus.SUCCEEDED
        found = [path for path in rig.root.rglob("*") if path.is_file() and key in path.read_bytes()]
        assert sorted(path.name for path in found) == ["gang.pem"] * 2
        assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in found)

    asyncio.run(act())


def test_credential_of_the_first_submission_is_every_nodes(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The controller dies between the head's submission and the others': the next one makes another credential."""
    made: list[str] = []

    def make(subject: str) -> Any:
        secret = make_credential(subject)
        made.append(secret.value)
        return secret

    monkeypatch.setattr(gang, "make_credential", make)
    run = rig.transport.run

    async def run_on_head(node: Node, argv: Sequence[str], **options: Any) -> Any:
        if node.rank and argv[-1] == "submit":
            raise TransientError("cut off")
        return await run(node, argv, **options)

    async def act() -> None:
        cluster = await rig.make_cluster(2)
        task = make_task("true", num_nodes=2)
        await rig.gang.prepare(cluster, task)
        monkeypatch.setattr(rig.transport, "run", run_on_head)
        with pytest.raises(TransientError, match="cut off"):
            await rig.gang.start(cluster, task, run_id=1, envs={})
        monkeypatch.setattr(rig.transport, "run", run)
        await rig.gang.start(cluster, task, run_id=1, envs={})
        assert (await rig.finish(cluster)).status is RunStatus.SUCCEEDED
        await rig.gang.start(cluster, task, run_id=1, envs={})
        assert len(set(made)) == 3 and read_pems(cluster) == [made[0]] * 2

    asyncio.run(act())


def test_a_rank_that_cannot_join_fails_without_having_run_anything(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    run = rig.transport.run

    async def mislead(node: Node, argv: Sequence[str], **options: Any) -> Completed:
        done = await run(node, argv, **options)
        if node.rank or argv[-1] != "submit":
            return done
        answer = {**json.loads(done.stdout), "coordinator_port": 1}
        return Completed(returncode=0, stdout=json.dumps(answer).encode(), stderr=b"")

    async def act() -> None:
        cluster = await rig.make_cluster(2)
        monkeypatch.setattr(rig.transport, "run", mislead)
        task = make_task("true", setup="touch ~/was-set-up", num_nodes=2)
        await rig.gang.prepare(cluster, task)
        home = Path(cluster.nodes[1].handle) / "home"
        constants = home / ".broker/agent/agent_gang.py"
        text = constants.read_text()
        constants.write_text(text.replace(f"JOIN_S = {agent_gang.JOIN_S}", "JOIN_S = 0.5"))
        assert constants.read_text() != text
        await rig.gang.start(cluster, task, run_id=1, envs={})
        outcome = home / ".broker/runs/1/outcome.json"
        await wait_for(outcome.exists)
        found = json.loads(outcome.read_text())
        assert (found["status"], found["own_returncode"]) == ("FAILED", None)
        assert not (home / "was-set-up").exists()

    asyncio.run(act())


def test_node_that_hangs_does_not_hide_the_pending_uploads_of_the_others(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    mount = {"pending": [{"url": "s3://bucket/out", "file_count": 1, "size_bytes": 7}], "sent_bytes": 3}

    async def answer_on_head(node: Node, argv: Sequence[str], **options: Any) -> Completed:
        if node.rank:
            await asyncio.Event().wait()
        return Completed(returncode=0, stdout=json.dumps({"uploads": mount}).encode(), stderr=b"")

    async def act() -> None:
        cluster = await rig.make_cluster(2)
        monkeypatch.setattr(rig.transport, "run", answer_on_head)
        found = await rig.gang.read_uploads(cluster, timeout_s=0.05)
        assert (found.file_count, found.size_bytes, found.urls) == (1, 7, ("s3://bucket/out",))
        assert found.has_mounts and found.silent == (cluster.nodes[1].id,)

    asyncio.run(act())


@pytest.mark.parametrize(("head", "asked"), [("SUCCEEDED", 2), ("RUNNING", 1)])
def test_a_rank_that_answered_before_the_head_ended_is_asked_again(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, head: str, asked: int
) -> None:
    """The head ends last: a report that shows its success shows that of all."""
    calls: list[int] = []

    async def answer(node: Node, argv: Sequence[str], **options: Any) -> Completed:
        calls.append(node.rank)
        status = head if node.rank == 0 or calls.count(1) > 1 else "RUNNING"
        run = {"status": status, "returncode": None, "progress": None}
        return Completed(returncode=0, stdout=json.dumps({"runs": [run]}).encode(), stderr=b"")

    async def act() -> None:
        cluster = await rig.make_cluster(2)
        monkeypatch.setattr(rig.transport, "run", answer)
        report = await rig.gang.poll(cluster, 1)
        assert report.statuses == (RunStatus(head),) * 2 and calls.count(1) == asked

    asyncio.run(act())
