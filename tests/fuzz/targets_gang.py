"""Fuzz targets of the two protocols between nodes of a gang: the coordinator's and the elastic rendezvous's.

A target takes bytes. The first says who the peer is, the rest is what it sends. Then the peer hangs up, and correct
members must be served as if it had never come. A target raises for anything else, a hang and a leaked thread included.
"""

from __future__ import annotations

import atexit
import gc
import json
import queue
import shutil
import socket
import ssl
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from broker.agent import FOLDER
from broker.runtime.credentials import make_credential
from trainers.rendezvous import Rendezvous
from trainers.rendezvous_server import RendezvousServer
from trainers.wire import Credential, Wire

sys.path.append(str(FOLDER))  # the agent's files find each other as they do on a node
import agent_gang
import agent_link
import agent_wire

sys.path.pop()

HANG_S = 300.0  # only a broken server reaches it
PEERS = ("plaintext", "half a handshake", "another credential", "member")


@cache
def make_pem(name: str) -> Path:
    """Make a credential's file; the same one for the same name."""
    folder = Path(tempfile.mkdtemp(prefix="broker-fuzz-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = folder / f"{name}.pem"
    path.write_text(make_credential(name).value)
    return path


def await_that(condition: Callable[[], Any], words: str) -> None:
    give_up_s = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < give_up_s, words
        time.sleep(0.002)


def list_threads() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name.startswith(("gang-", "rendezvous"))]


def client_hello() -> bytes:
    """Return the first bytes that a correct member sends."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = agent_wire.make_context(make_pem("gang"), is_server=False).wrap_bio(incoming, outgoing)
    with suppress(ssl.SSLWantReadError):
        tls.do_handshake()
    return outgoing.read()


def open_tls(port: int, name: str) -> ssl.SSLSocket:
    context = agent_wire.make_context(make_pem(name), is_server=False)
    if name != "gang":
        context.verify_mode = ssl.CERT_NONE  # a stranger that takes whatever server it finds
    connection = socket.create_connection(("127.0.0.1", port), timeout=HANG_S)
    try:
        return context.wrap_socket(connection)
    except OSError:
        connection.close()
        raise


@contextmanager
def ignore_closing() -> Iterator[None]:
    """Ignore that the other end closes, which it may do at any time; a peer that never reacts is a hang, and raised."""
    try:
        yield
    except TimeoutError:
        raise
    except OSError:
        pass


def hang_up(connection: socket.socket) -> None:
    """End our half, and wait until the other end has closed its half."""
    with ignore_closing():
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(1 << 16):
            pass
    connection.close()


def visit(port: int, peer: str, payload: bytes, first: bytes = b"") -> None:
    """Act as that peer: send `first` if a member, then the payload, and hang up."""
    if peer in ("plaintext", "half a handshake"):
        plain = socket.create_connection(("127.0.0.1", port), timeout=HANG_S)
        with ignore_closing():
            plain.sendall(client_hello() + payload if peer == "half a handshake" else payload)
        hang_up(plain)
    elif peer == "member":
        member = open_tls(port, "gang")
        with ignore_closing():
            member.sendall(first + payload)
        hang_up(member)
    else:
        with ignore_closing():
            stranger = open_tls(port, "stranger")
            with stranger:
                with ignore_closing():
                    stranger.sendall(payload)
                assert not stranger.recv(1), "a stranger was answered"


class Gang:
    """A coordinator of three ranks, two of which suffice, and members of it."""

    def __init__(self, folder: Path, survey: Any = None) -> None:
        self.log = folder / "log"
        listener = agent_link.listen("127.0.0.1", 3)
        self.port = listener.getsockname()[1]
        context = agent_wire.make_context(make_pem("gang"), is_server=True)
        self.coordinator = agent_gang.Coordinator(
            listener, context=context, num_nodes=3, log=self.log, nodes_min=2, survey=survey
        )
        self.coordinator.start()
        self.links: list[Any] = []

    def join(self, rank: int) -> tuple[Any, queue.Queue[dict[str, Any]]]:
        heard: queue.Queue[dict[str, Any]] = queue.Queue()
        context = agent_wire.make_context(make_pem("gang"), is_server=False)
        self.links.append(agent_link.connect("127.0.0.1", self.port, context, rank, heard.put))
        return self.links[-1], heard

    def close(self) -> None:
        """Close, and treat a thread that ended by an exception as a crash."""
        self.coordinator.close()
        for link in self.links:
            link.close()
        await_that(lambda: not list_threads(), f"threads are left: {list_threads()}")


@contextmanager
def open_gang(survey: Any = None) -> Iterator[Gang]:
    crashes: list[Any] = []
    hook, threading.excepthook = threading.excepthook, crashes.append
    try:
        with tempfile.TemporaryDirectory() as folder:
            gang = Gang(Path(folder), survey)
            try:
                yield gang
            finally:
                gang.close()
    finally:
        threading.excepthook = hook
    assert not crashes, crashes


def fuzz_coordinator(data: bytes) -> None:
    """Fuzz the coordinator. Peers: strangers, a member before its hello, and rank 1 after it."""
    kind, payload = data[:1] or b"\0", data[1:]
    peers = (*PEERS, "rank 1")
    peer = peers[kind[0] % len(peers)]
    with open_gang() as gang:
        if peer == "rank 1":
            visit(gang.port, "member", payload, agent_link.encode("hello", rank=1))
        else:
            visit(gang.port, peer, payload)
        if peer not in ("member", "rank 1"):
            assert not gang.coordinator._links and gang.coordinator._verdict is None
        check_coordinator(gang, is_stranger=peer not in ("member", "rank 1"))


def check_coordinator(gang: Gang, *, is_stranger: bool) -> None:
    """Check that new members are served; if only strangers came, that a whole run succeeds."""
    if not is_stranger:
        taken = set(gang.coordinator._links)  # a member may have said a correct hello of any rank, once
        rank = next(rank for rank in (2, 0) if rank not in taken)
        link, heard = gang.join(rank)
        assert link.send("log", text="still here\n")
        await_that(lambda: b"still here\n" in gang.log.read_bytes(), "the log is not written")
        link.send("exit", returncode=1)
        await_kind(heard, "kill")
        return
    members = [gang.join(rank) for rank in range(3)]
    for link, _ in members:
        link.send("setup", returncode=0)
    for link, heard in members:
        await_kind(heard, "go")
        link.send("log", text="ran\n")
    await_that(lambda: gang.log.read_bytes().count(b"ran\n") == 3, "the log is not written")
    for link, _ in members:
        link.send("exit", returncode=0)
    for _, heard in members:
        assert await_kind(heard, "end")["status"] == "SUCCEEDED"


def await_kind(heard: queue.Queue[dict[str, Any]], kind: str) -> dict[str, Any]:
    while True:
        message = heard.get(timeout=HANG_S)
        if message["type"] == kind:
            return message
        assert message["type"] != "lost", f"lost before `{kind}`"


def make_hello(name: str, place: int = 0) -> dict[str, Any]:
    return {"kind": "hello", "id": name, "port": 1, "order": [1, place], "holding": [-1, 0, 0, 1], "unit": 1}


@contextmanager
def open_rendezvous(
    count: int = 2, credential: Credential | None = None, **options: Any
) -> Iterator[tuple[Rendezvous, RendezvousServer]]:
    """Open a rendezvous of at least two workers that waits for `count` of them."""
    others = list_threads()  # of a rendezvous that is open already
    rendezvous = Rendezvous(least=2, most=count, first_count=count, **options)
    server = RendezvousServer(rendezvous, "127.0.0.1", 0, credential or Credential(pem=make_pem("gang")))
    crashes: list[Any] = []
    server._loop.set_exception_handler(lambda _, context: crashes.append(context))
    try:
        yield rendezvous, server
        gc.collect()  # a task that ended by an exception is reported when it is collected
    finally:
        server.close()
        assert list_threads() == others, list_threads()
    assert not crashes, crashes


def come(
    server: RendezvousServer, name: str, place: int = 0, credential: Credential | None = None, **fields: Any
) -> Wire:
    """Join as a correct worker."""
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=HANG_S)
    wire = Wire(connection, credential or Credential(pem=make_pem("gang")))
    connection.settimeout(HANG_S)
    wire.send(**make_hello(name, place), **fields)
    return wire


def fuzz_rendezvous(data: bytes) -> None:
    """Fuzz the rendezvous.

    Peers: strangers, a member before its hello, one that waits, and one of the current world.
    """
    kind, payload = data[:1] or b"\0", data[1:]
    peers = (*PEERS, "waiting", "current")
    peer = peers[kind[0] % len(peers)]
    hello = json.dumps(make_hello("x", 9)).encode() + b"\n"
    if peer == "current":
        return fuzz_current(payload, hello)
    with open_rendezvous() as (rendezvous, server):
        visit(server.port, "member" if peer == "waiting" else peer, payload, hello if peer == "waiting" else b"")
        assert not rendezvous.is_over and not rendezvous.current and rendezvous.generation == 0
        await_that(lambda: not rendezvous.waiting, "a worker that hung up is still waited for")
        wires = [come(server, name, place) for place, name in enumerate("ab")]
        for rank, wire in enumerate(wires):
            world = wire.read()
            assert (world["kind"], world["rank"], world["world_size"]) == ("world", rank, 2)
        for wire in wires:
            wire.send(kind="vote", is_leaving=False)
        assert [wire.read()["verdict"] for wire in wires] == ["stay", "stay"]
        wires[0].send(kind="done")
        await_that(lambda: rendezvous.is_over, "the end is not heard")
        for wire in wires:
            wire._socket.close()


def fuzz_current(payload: bytes, hello: bytes) -> None:
    """Let one of three workers send the payload and drop out.

    The others are notified, unless it reported that all is done.
    """
    with open_rendezvous(3) as (rendezvous, server):
        wires = [come(server, name, place) for place, name in enumerate("ab")]
        connection = open_tls(server.port, "gang")
        connection.sendall(hello)
        assert [wire.read()["kind"] for wire in wires] == ["world"] * 2
        with ignore_closing():
            connection.sendall(payload)
        hang_up(connection)
        await_that(lambda: "x" not in rendezvous.current, "a lost worker is still counted on")
        if not rendezvous.is_over:
            for wire in wires:
                assert wire.read()["kind"] == "change"
        for wire in wires:
            wire._socket.close()


FUZZ_TARGETS: dict[str, Callable[[bytes], None]] = {"coordinator": fuzz_coordinator, "rendezvous": fuzz_rendezvous}
