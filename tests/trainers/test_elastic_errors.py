"""Errors in elastic runs: a lost peer causes errors of many kinds, but so do mistakes in a program."""

import os
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest

from tests.fuzz.targets_gang import await_that, come, open_rendezvous
from trainers import elastic
from trainers.elastic import ElasticMember
from trainers.preemption import PreemptionNotice
from trainers.rendezvous_search import PreviousWorld
from trainers.wire import Credential, Wire

from .test_elastic import come_back, gather

SECRET = Credential(secret="cd" * 32)


def test_members_that_all_failed_are_told_that_none_was_lost() -> None:
    rendezvous, members = gather()
    for member in members:
        member.ear.take()
    rendezvous.fail(members[0])
    rendezvous.fail(members[0])
    rendezvous.fail(members[1])
    assert [each.ear.take() for each in members] == [[], [], []]
    rendezvous.fail(members[2])
    assert [each.ear.take() for each in members] == [["failed"]] * 3


def test_failures_before_the_loss_of_a_member_count_no_more() -> None:
    rendezvous, (a, b, c) = gather()
    rendezvous.fail(a)
    rendezvous.fail(b)
    rendezvous.depart(c)  # the cause
    a, b = come_back(rendezvous, a, rank=0, step=7), come_back(rendezvous, b, rank=1, step=7)
    assert [each.ear.take() for each in (a, b)] == [["world"]] * 2
    rendezvous.fail(c)
    rendezvous.fail(a)
    assert a.ear.take() == []
    rendezvous.fail(b)
    assert a.ear.take() == b.ear.take() == ["failed"]


def test_error_that_no_lost_peer_causes_is_not_waited_for() -> None:
    member = ElasticMember.__new__(ElasticMember)  # without a rendezvous: it is not asked
    for error in (KeyError("x"), TypeError("x"), AttributeError("x"), NameError("x"), ImportError("x")):
        member.await_change(error)


def prepare_member(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the environment of a worker, but for the address of its rendezvous."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):  # set by the member
        monkeypatch.setenv(name, "")
    for name in ("BROKER_ELASTIC_WORLD", "BROKER_GANG_PEM", "BROKER_ELASTIC_NAMED"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("BROKER_ELASTIC_MEMBER", "0.b")
    monkeypatch.setenv("BROKER_ELASTIC_ORDER", "[1, 1]")
    monkeypatch.setenv("BROKER_ELASTIC_SECRET", SECRET.secret or "")


@pytest.mark.parametrize("is_reached", [True, False])
def test_worker_that_waits_for_its_first_world_leaves_at_a_preemption_notice(
    is_reached: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ignored the notice, as it does between two steps, until it was killed or had waited for 20 minutes."""
    prepare_member(monkeypatch)
    monkeypatch.setattr(elastic, "SEARCH_S", 0.01)
    notice = PreemptionNotice(tmp_path / "notice")
    with open_rendezvous(2, credential=SECRET) as (rendezvous, server):
        # Nothing listens on the port 1.
        monkeypatch.setenv("BROKER_ELASTIC_AT", f"127.0.0.1:{server.port if is_reached else 1}")
        notify = Thread(target=lambda: (await_that(lambda: rendezvous.waiting, ""), (tmp_path / "notice").touch()))
        notify.start() if is_reached else (tmp_path / "notice").touch()
        with pytest.raises(SystemExit) as leave:
            ElasticMember(os.environ["BROKER_ELASTIC_AT"], notice=notice)
        assert leave.value.code == 143
        await_that(lambda: not rendezvous.waiting, "it still waits")


def test_survivor_comes_back_though_it_has_a_preemption_notice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others wait for it, and need it for a majority; it leaves between two steps of the next world."""
    prepare_member(monkeypatch)
    monkeypatch.setattr(elastic, "SEARCH_S", 0.01)
    monkeypatch.setattr(ElasticMember, "restart", lambda self: None)
    for name, value in PreviousWorld(generation=1, members=("0.a", "0.b")).write().items():
        monkeypatch.setenv(name, value)
    (tmp_path / "notice").touch()
    with open_rendezvous(2, credential=SECRET) as (rendezvous, server):
        monkeypatch.setenv("BROKER_ELASTIC_AT", f"127.0.0.1:{server.port}")
        members: list[ElasticMember] = []
        joining = Thread(
            target=lambda: members.append(
                ElasticMember(os.environ["BROKER_ELASTIC_AT"], notice=PreemptionNotice(tmp_path / "notice"))
            )
        )
        joining.start()
        await_that(lambda: rendezvous.waiting, "it does not come")
        other = come(server, "a", 0, SECRET)
        joining.join(timeout=300)
        assert [each.world.rank for each in members] == [1] and other.read()["kind"] == "world"
        other.close()
        close(members[0])


def close(member: ElasticMember) -> None:
    """End its connection, and wait until its thread has heard of it: after the test it would execute pytest again."""
    member._wire.close()
    assert member._is_lost.wait(300.0), "it still listens"


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[ElasticMember, Wire]]:
    """A member of a world of two, and the connection of the other one."""
    prepare_member(monkeypatch)
    # At the loss of the other one it would execute pytest again.
    monkeypatch.setattr(ElasticMember, "restart", lambda self: None)
    with open_rendezvous(credential=SECRET) as (_, server):
        monkeypatch.setenv("BROKER_ELASTIC_AT", f"127.0.0.1:{server.port}")
        other = come(server, "a", 0, SECRET)
        member = ElasticMember(os.environ["BROKER_ELASTIC_AT"])
        try:
            assert other.read()["kind"] == "world" and member.world.world_size == 2
            yield member, other
        finally:
            close(member)
            other.close()


def test_rank_whose_peers_have_failed_too_does_not_wait(
    pair: tuple[ElasticMember, Wire], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(elastic, "EXPLAINED_S_MAX", 300.0)
    member, other = pair
    other.send(kind="failed")
    member.await_change(RuntimeError("shapes"))
    assert capsys.readouterr().err == ""


def test_rank_that_alone_has_failed_says_so_before_the_wait_ends(
    pair: tuple[ElasticMember, Wire], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(elastic, "EXPLAINED_S_MAX", 0.0)
    monkeypatch.setattr(elastic, "CHANGE_S_MAX", 0.01)
    member, _ = pair
    member.await_change(RuntimeError("mat1 and mat2\nmore"))
    assert "note: rank 1 failed with RuntimeError: mat1 and mat2; this ends it in" in capsys.readouterr().err
