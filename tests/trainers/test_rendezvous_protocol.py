"""The rendezvous of an elastic run among strangers and workers with bugs."""

import asyncio
import json
import os
import shutil
import socket
import stat
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.targets_gang import (
    HANG_S,
    agent_wire,
    await_that,
    come,
    fuzz_rendezvous,
    make_hello,
    make_pem,
    open_rendezvous,
    visit,
)
from tests.tiers import examples, spread
from trainers import rendezvous_server
from trainers.errors import TrainerError
from trainers.gang_file import find_epoch, read_leader
from trainers.launch import PEM_MISSING, Plan, serve_rendezvous
from trainers.rendezvous import SILENT_POLLS, Member, Rendezvous
from trainers.rendezvous_search import PreviousWorld, RendezvousAddresses
from trainers.rendezvous_server import RendezvousServer, listen
from trainers.wire import Credential, Wire, read_credential

from .conftest import TINY, TrainingFolder

REPOSITORY = Path(__file__).parents[2]
SECRET = Credential(secret="ab" * 32)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
FIELDS = st.sampled_from(["id", "port", "order", "holding", "unit", "is_leaving"])
NEARLY = st.builds(
    lambda kind, base, fields: {**base, **fields, "kind": kind},
    st.sampled_from(["hello", "vote", "failed", "done", "beat", "world", "x"]),
    st.sampled_from([{}, make_hello("y")]),
    st.dictionaries(FIELDS, VALUES | st.lists(st.integers(-2, 3), min_size=2, max_size=3), max_size=2),
)
LINES = st.lists((VALUES | NEARLY).map(lambda value: json.dumps(value).encode() + b"\n"), max_size=6).map(b"".join)
PAYLOADS = st.binary(max_size=300) | LINES | st.builds(bytes.__add__, LINES, st.binary(max_size=30))


@settings(max_examples=examples(60), deadline=None)
@given(peer=st.integers(0, 5), payload=PAYLOADS)
def test_workers_are_served_whatever_a_peer_sends(peer: int, payload: bytes) -> None:
    fuzz_rendezvous(bytes([peer]) + payload)


@pytest.mark.parametrize(
    "payload",
    [b"[" * 60_000 + b"\n", b"9" * 60_000 + b"\n", b"x" * (2 << 20), b'{"kind":"done"}\n'],
    ids=["nested", "number", "endless", "done"],
)
@pytest.mark.parametrize("peer", spread(range(6), every=3))
def test_large_and_odd_lines_change_nothing(peer: int, payload: bytes) -> None:
    fuzz_rendezvous(bytes([peer]) + payload)


@pytest.mark.parametrize("credential", [Credential(pem=make_pem("gang")), SECRET], ids=["PEM", "secret"])
def test_one_line_of_a_stranger_does_not_end_a_run(credential: Credential) -> None:
    """It did: `{"kind":"done"}` from anyone on the network was believed."""
    with open_rendezvous(credential=credential) as (rendezvous, server):
        workers = [come(server, name, place, credential) for place, name in enumerate("ab")]
        assert [each.read()["kind"] for each in workers] == ["world"] * 2
        for payload in (b'{"kind":"done"}\n', json.dumps(make_hello("x")).encode() + b'\n{"kind":"done"}\n'):
            visit(server.port, "plaintext", payload)
        assert not rendezvous.is_over and not rendezvous.waiting and set(rendezvous.current) == {"a", "b"}
        for each in workers:
            each.send(kind="vote", is_leaving=False)
        assert [each.read()["verdict"] for each in workers] == ["stay"] * 2


def test_messages_of_a_worker_outside_the_world_are_ignored() -> None:
    with open_rendezvous(2) as (rendezvous, server):
        first, second = (come(server, name, place) for place, name in enumerate("ab"))
        assert [each.read()["kind"] for each in (first, second)] == ["world"] * 2
        first.send(kind="vote", is_leaving=False)
        waiting = come(server, "c")
        await_that(lambda: "a" in rendezvous.votes and "c" in rendezvous.waiting, "not heard")
        waiting.send(kind="vote", is_leaving=True)
        waiting.send(kind="done")
        waiting.send(kind="vote", is_leaving="yes")  # for which it is dropped: by then the others have been heard
        await_that(lambda: "c" not in rendezvous.waiting, "not dropped")
        assert not rendezvous.is_over and set(rendezvous.votes) == {"a"}


def write_leader(path: Path, *, epoch: int, rank: int, addresses: int = 3) -> None:
    text = json.dumps({"epoch": epoch, "rank": rank, "node_ips": ["127.0.0.1"] * addresses})
    path.write_text(text)


@pytest.fixture
def gang_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "gang.json"
    monkeypatch.setenv("BROKER_GANG_FILE", str(path))
    monkeypatch.setenv("BROKER_GANG_PEM", str(make_pem("gang")))
    monkeypatch.setenv("BROKER_ELASTIC_NAMED", "1")
    return path


def test_worker_notices_that_the_rendezvous_closed_its_connection() -> None:
    """It read TLS's closing message over and over, and never learned that it was left out."""
    with open_rendezvous() as (rendezvous, server):
        worker = come(server, "a")
        await_that(lambda: "a" in rendezvous.waiting, "not heard")
        worker.send(kind="hello")  # the second: it is dropped
        with pytest.raises(ConnectionError, match="closed"):
            worker.read()


def test_worker_with_another_epoch_is_refused(gang_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_leader(gang_file, epoch=1, rank=1)
    find, admitted = partial(find_epoch, os.environ, 1), list[str]()
    with open_rendezvous(is_movable=True, find_epoch=find) as (rendezvous, server):
        arrive = rendezvous.arrive

        def note(member: Member) -> None:
            admitted.append(member.id)
            arrive(member)

        monkeypatch.setattr(rendezvous, "arrive", note)
        for epoch in (0, 2):
            with pytest.raises(ConnectionError):  # at once, instead of a silence
                come(server, "x", epoch=epoch).read()
        assert not rendezvous.waiting
        workers = [come(server, name, place, epoch=1) for place, name in enumerate("ab")]
        assert [each.read()["kind"] for each in workers] == ["world"] * 2
        write_leader(gang_file, epoch=2, rank=0)
        with pytest.raises(ConnectionError):  # of its own epoch, in which it no longer leads
            come(server, "c", epoch=1).read()
        assert sorted(admitted) == ["a", "b"], "the others were not even admitted for a moment"


def test_worker_finds_the_leader_that_is_named_and_keeps_to_it(gang_file: Path) -> None:
    """Node 0 listens again after it was lost: a worker that knows node 1 by a higher epoch does not go back."""
    leaders: dict[int, int | None] = {0: 0, 1: 1}
    with (
        open_rendezvous(is_movable=True, find_epoch=lambda: leaders[0]) as (_, old),
        open_rendezvous(is_movable=True, find_epoch=lambda: leaders[1]) as (_, new),
    ):
        text = ",".join(f"127.0.0.1:{server.port}" for server in (old, new))
        write_leader(gang_file, epoch=1, rank=1, addresses=2)
        places = RendezvousAddresses(text, PreviousWorld(leader=0, generation=1, members=("a", "b")))
        assert places._find_named()[0] is not None and places.epoch == 1 and not places.find_better(1)
        past = PreviousWorld(leader=1, generation=2, members=("a", "b"), epoch=1)
        write_leader(gang_file, epoch=0, rank=0, addresses=2)
        assert RendezvousAddresses(text, past)._find_named()[0] is None, "an older name"
        gang_file.write_text('{"epoch": 1, "ra')
        assert RendezvousAddresses(text, past)._find_named()[0] is None, "half a name"
        write_leader(gang_file, epoch=1, rank=1, addresses=2)
        leaders[1] = None
        assert RendezvousAddresses(text, past)._find_named()[0] is None, "its launcher does not know yet that it leads"
        leaders[0], places.epoch = 2, 1
        write_leader(gang_file, epoch=2, rank=0, addresses=2)
        assert places.find_better(1), "a higher epoch calls a waiting worker away"
        place, wire = RendezvousAddresses(text, past).connect()
        assert place == 0
        wire.close()


def test_worker_dials_the_present_address_of_a_replaced_node(gang_file: Path) -> None:
    with open_rendezvous(is_movable=True, find_epoch=lambda: 1) as (_, server):
        text = f"192.0.2.1:{server.port},192.0.2.2:{server.port}"  # none of these exists now
        write_leader(gang_file, epoch=1, rank=1, addresses=2)
        place, wire = RendezvousAddresses(text, PreviousWorld()).connect()
        assert place == 1
        wire.close()


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", '{"epoch": 1}', '{"epoch": 1, "rank": 3, "node_ips": ["a"]}', '{"epoch": "x", "rank": 0}'],
)
def test_damaged_file_names_no_leader(content: str, gang_file: Path) -> None:
    gang_file.write_text(content)
    assert read_leader(os.environ) is None and find_epoch(os.environ, 0) is None


@pytest.mark.parametrize(
    "flaw",
    [
        {"id": 1},
        {"id": ""},
        {"id": "x" * 65},
        {"port": "1"},
        {"port": 0},
        {"port": 65536},
        {"port": True},
        {"order": [1]},
        {"order": [1, 2**80]},
        {"order": [1, None]},
        {"holding": [0, 0, 1, 1]},
        {"holding": [-2, 0, 0, 1]},
        {"holding": [0, 0, 0, 0]},
        {"holding": [0, 0, 1]},
        {"holding": {}},
        {"unit": 0},
        {"unit": 0.5},
        {"unit": 2**40},
    ],
    ids=str,
)
def test_invalid_hello_is_refused(flaw: dict[str, Any]) -> None:
    writer: Any = None
    with pytest.raises(ValueError):
        rendezvous_server.read_member({**make_hello("a"), **flaw}, "127.0.0.1", writer)
    missing = {key: value for key, value in make_hello("a").items() if key not in flaw}
    with pytest.raises(ValueError):
        rendezvous_server.read_member(missing, "127.0.0.1", writer)


@pytest.mark.parametrize("epoch", [-1, "1", True, 2**40])
def test_invalid_epoch_is_refused(epoch: Any) -> None:
    writer: Any = None
    with pytest.raises(ValueError, match="invalid epoch"):
        rendezvous_server.read_member({**make_hello("a"), "epoch": epoch}, "127.0.0.1", writer)


def test_worker_with_other_flags_is_refused_without_delaying_others() -> None:
    with open_rendezvous(2) as (rendezvous, server):
        first = come(server, "a")
        await_that(lambda: rendezvous.waiting, "not heard")
        connection = socket.create_connection(("127.0.0.1", server.port), timeout=HANG_S)
        odd = Wire(connection, Credential(pem=make_pem("gang")))
        odd.send(**{**make_hello("b", 1), "unit": 7})
        assert "joins in units of 7, the others in units of 1" in odd.read()["reason"]
        second = come(server, "c", 2)
        assert [each.read()["kind"] for each in (first, second)] == ["world"] * 2


def test_secret_of_another_launcher_is_refused() -> None:
    with open_rendezvous(credential=SECRET) as (rendezvous, server):
        with pytest.raises(OSError):
            come(server, "x", credential=Credential(secret="cd" * 32))
        assert not rendezvous.waiting
        worker = come(server, "a", credential=SECRET)
        await_that(lambda: rendezvous.waiting, "not heard")
        worker.send(kind="beat")


def test_secret_is_for_one_machine_only_and_does_not_show_itself() -> None:
    rendezvous = Rendezvous(least=1, most=1, first_count=1)
    with pytest.raises(TrainerError, match="on one machine only"):
        RendezvousServer(rendezvous, "0.0.0.0", 0, SECRET)
    assert "abab" not in repr(SECRET)


def test_silent_strangers_do_not_keep_workers_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous_server, "STRANGERS_MAX", 5)
    monkeypatch.setattr(rendezvous_server, "HANDSHAKE_S", 10 * HANG_S)  # they are not closed for their silence
    with open_rendezvous(2) as (_, server):
        strangers = [socket.create_connection(("127.0.0.1", server.port), timeout=HANG_S) for _ in range(30)]
        workers = [come(server, name, place) for place, name in enumerate("ab")]
        assert [each.read()["kind"] for each in workers] == ["world"] * 2
        assert [each.recv(1) for each in strangers[:20]] == [b""] * 20
        for each in strangers:
            each.close()


@pytest.mark.parametrize("credential", [Credential(pem=make_pem("gang")), SECRET], ids=["PEM", "secret"])
def test_silent_stranger_is_disconnected_eventually(credential: Credential, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous_server, "HANDSHAKE_S", 0.2)
    with (
        open_rendezvous(credential=credential) as (_, server),
        socket.create_connection(("127.0.0.1", server.port), timeout=HANG_S) as stranger,
    ):
        assert stranger.recv(1) == b""


def test_suspended_rendezvous_does_not_take_its_workers_for_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """All processes of one machine may be suspended together: a timer has expired then, and nothing has arrived."""
    monkeypatch.setattr(rendezvous_server, "SILENCE_S_MAX", 0.001 * SILENT_POLLS)

    async def play(misses: int) -> bytes:
        reader = asyncio.StreamReader()
        tries = 0

        async def readline() -> bytes:
            nonlocal tries
            tries += 1
            if tries <= misses:
                await asyncio.Event().wait()
            return b"late"

        reader.readline = readline  # type: ignore[method-assign]
        return await rendezvous_server.read_line(reader)

    assert asyncio.run(play(1)) == b"late"
    with pytest.raises(TimeoutError):
        asyncio.run(play(SILENT_POLLS))


def test_server_listens_at_the_first_nodes_address_only() -> None:
    """Another address of this machine is not answered at, and an address that is none of ours means all."""
    for host, bound in (("127.0.0.1", "127.0.0.1"), ("203.0.113.9", "0.0.0.0"), ("localhost", "0.0.0.0")):
        with listen(host, 0) as listener:
            assert listener.getsockname()[0] == bound
    with listen("127.0.0.1", 0) as listener, pytest.raises(OSError, match="in use"):
        listen("127.0.0.1", listener.getsockname()[1])


def test_port_in_use_ends_the_first_node_with_a_hint_and_another_one_not(capsys: pytest.CaptureFixture[str]) -> None:
    given = {"BROKER_ELASTIC_SECRET": "ab" * 32}
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        for rank in range(2):
            plan = Plan(
                workers=1, node_rank=rank, node_count=2, master_address="127.0.0.1", master_port=port,
                addresses=("127.0.0.1",) * 2,
            )  # fmt: skip
            if rank == 0:
                with pytest.raises(SystemExit, match=f"port {port}: Address already in use(?s:.*)hint: end the run"):
                    serve_rendezvous(plan, {"least": 1, "most": 2}, port, given)
            else:
                assert serve_rendezvous(plan, {"least": 1, "most": 2}, port, given) is None
                assert f"note: port {port}: Address already in use" in capsys.readouterr().err


def test_worker_and_agent_speak_the_same_tls_in_both_directions_at_once() -> None:
    """`Wire` here and in the agent are twins: each is proved against the other, under load."""
    count = 300
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port, heard = listener.getsockname()[1], []

        def serve() -> None:
            wire = agent_wire.Wire(
                listener.accept()[0], agent_wire.make_context(make_pem("gang"), is_server=True), is_server=True
            )
            wire.shake_hands(time.monotonic() + HANG_S)
            wire.set_timeout(HANG_S)
            wire.write(b'{"kind": "welcome"}\n')
            sender = threading.Thread(
                target=lambda: [wire.write(b'{"kind": "%s"}\n' % (b"x" * n * 50)) for n in range(count)]
            )
            sender.start()
            heard.extend(len(json.loads(wire.read_line())["kind"]) for _ in range(2 * count))
            sender.join()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        wire = Wire(socket.create_connection(("127.0.0.1", port), timeout=HANG_S), Credential(pem=make_pem("gang")))
        senders = [
            threading.Thread(target=lambda: [wire.send(kind="y" * n * 50) for n in range(count)]) for _ in range(2)
        ]
        for each in senders:
            each.start()
        assert [len(wire.read()["kind"]) for _ in range(count)] == [n * 50 for n in range(count)]
        for each in (*senders, thread):
            each.join(HANG_S)
    assert sorted(heard) == sorted([n * 50 for n in range(count)] * 2)


def start_node(count: int, **variables: str) -> "subprocess.CompletedProcess[str]":
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("BROKER_", "SKYPILOT_"))}
    environment |= {"SKYPILOT_NUM_NODES": str(count), "SKYPILOT_NODE_IPS": "\n".join(["127.0.0.1"] * count)}
    command = [sys.executable, "-m", "trainers.launch", "-m", "trainers.lm", "--elastic", "1:2", *TINY]
    return subprocess.run(
        command, cwd=REPOSITORY, env=environment | variables, capture_output=True, text=True, timeout=HANG_S
    )


@pytest.mark.long
def test_several_nodes_without_a_credential_are_refused_with_the_command_that_makes_one(tmp_path: Path) -> None:
    done = start_node(2)
    assert done.returncode == 1 and done.stderr.strip() == PEM_MISSING
    if not shutil.which("openssl"):
        return
    command = PEM_MISSING[PEM_MISSING.index("(umask") :]
    subprocess.run(["sh", "-c", command], cwd=tmp_path, check=True, capture_output=True)
    pem = tmp_path / "gang.pem"
    assert stat.S_IMODE(pem.stat().st_mode) == 0o600
    credential = read_credential({"BROKER_GANG_PEM": str(pem)})
    with open_rendezvous(credential=credential) as (rendezvous, server):
        worker = come(server, "a", credential=credential)
        await_that(lambda: rendezvous.waiting, "not heard")
        worker.send(kind="beat")


@pytest.mark.parametrize("content", [None, "", "-----BEGIN PRIVATE KEY-----\nnot a key\n-----END PRIVATE KEY-----\n"])
def test_invalid_credential_file_is_named(content: str | None, tmp_path: Path) -> None:
    pem = tmp_path / "gang.pem"
    if content is not None:
        pem.write_text(content)
    done = start_node(2, BROKER_GANG_PEM=str(pem))
    assert done.returncode == 1
    assert f"error: `BROKER_GANG_PEM`: {pem} is not a certificate with its key" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux")
def test_workers_of_one_machine_meet_without_a_file(folder: TrainingFolder) -> None:
    code, errors = folder.run("--elastic", "1:2", "--train.steps", "5", workers=2, strategy="allreduce")
    assert code == 0, errors
    assert folder.lines()[-1]["event"] == "finished"
