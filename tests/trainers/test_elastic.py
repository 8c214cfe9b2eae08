"""Runs that continue while ranks join and leave."""

import itertools
import os
import random
import re
import signal
import subprocess
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tiers import long
from trainers.config import Config, TrainConfig, find_problem
from trainers.elastic import ElasticMember
from trainers.launch import parse_elastic
from trainers.rendezvous import Member, Rendezvous, arrange
from trainers.session import Session
from trainers.state_transfer import Holding, find_version, plan_transfers
from trainers.strategies.grid import Part

from .conftest import STEADY, Start, TrainingFolder, await_line, await_step, count_lost_steps
from .strategies.conftest import Worlds


class Ear:
    """The messages that a member received."""

    def __init__(self) -> None:
        self.received: list[dict[str, Any]] = []

    def send(self, **message: Any) -> None:
        self.received.append(message)

    def take(self) -> list[str]:
        """Return kinds and verdicts since the last call."""
        kinds = [each.get("verdict") or each["kind"] for each in self.received]
        self.received.clear()
        return kinds


class Ears(Member):
    ear: Ear

    def send(self, **message: Any) -> None:
        self.ear.send(**message)


def make_member(
    name: str, *, order: tuple[int, int], step: int = -1, unit: int = 1, part: tuple[int, int] = (0, 1), world: int = 0
) -> Ears:
    holding = (step, world, *part)
    member = Ears(id=name, address=f"host-{name}", port=1, order=order, holding=holding, unit=unit, writer=None)
    member.ear = Ear()
    return member


def gather(least: int = 2, most: int = 3, count: int = 3, *, is_movable: bool = False) -> tuple[Rendezvous, list[Ears]]:
    rendezvous = Rendezvous(least=least, most=most, first_count=count, is_movable=is_movable)
    members = [make_member(name, order=(1, place)) for place, name in enumerate("abcdef"[:count])]
    for member in members:
        rendezvous.arrive(member)
    return rendezvous, members


def come_back(rendezvous: Rendezvous, member: Ears, *, rank: int, step: int) -> Ears:
    again = make_member(member.id, order=(0, rank), step=step)
    rendezvous.depart(member)
    rendezvous.arrive(again)
    return again


def test_first_world_waits_for_all_and_is_in_the_order_of_nodes() -> None:
    rendezvous = Rendezvous(least=2, most=3, first_count=3)
    late, early, middle = (make_member(name, order=(1, place)) for name, place in (("c", 2), ("a", 0), ("b", 1)))
    rendezvous.arrive(late)
    rendezvous.arrive(early)
    assert late.ear.take() == []
    rendezvous.arrive(middle)
    assert [each.ear.received[0]["rank"] for each in (early, middle, late)] == [0, 1, 2]
    assert {each.ear.received[0]["address"] for each in (early, middle, late)} == {"host-a"}


def test_lost_member_is_reported_to_the_others_which_form_the_next_world() -> None:
    rendezvous, (a, b, c) = gather()
    rendezvous.depart(a)
    assert (b.ear.take(), c.ear.take()) == (["world", "change"],) * 2
    b = come_back(rendezvous, b, rank=1, step=7)
    assert b.ear.take() == []
    c = come_back(rendezvous, c, rank=2, step=8)
    for member, rank in ((b, 0), (c, 1)):
        (world,) = member.ear.received
        assert (world["rank"], world["world_size"], world["holdings"]) == (rank, 2, [(7, 0, 0, 1), (8, 0, 0, 1)])
        assert (world["generation"], world["address"]) == (2, "host-b")


def test_survivor_that_does_not_come_back_is_left_behind_when_time_is_up() -> None:
    rendezvous, (a, b, c) = gather(least=1)
    rendezvous.depart(a)
    b = come_back(rendezvous, b, rank=1, step=7)
    rendezvous.depart(c)
    assert b.ear.take() == []
    rendezvous.is_late = True
    rendezvous.consider()
    assert b.ear.take() == ["world"] and rendezvous.generation == 2


def test_too_few_workers_wait_for_a_newcomer() -> None:
    rendezvous, (a, b, _) = gather(least=3)
    rendezvous.depart(a)
    come_back(rendezvous, b, rank=1, step=7)
    rendezvous.is_late = True
    rendezvous.consider()
    assert rendezvous.is_gathering
    rendezvous.give_up()
    waiting = rendezvous.waiting["b"]
    assert (
        isinstance(waiting, Ears)
        and "1 ranks are left, and `--elastic` asks for 3" in waiting.ear.received[0]["reason"]
    )


def test_newcomer_waits_for_the_end_of_a_step_and_one_too_many_for_a_loss() -> None:
    rendezvous, members = gather(least=1, most=3, count=2)
    extra = make_member("x", order=(1, 5))
    rendezvous.arrive(extra)
    assert [each.ear.take() for each in members] == [["world", "joiner"]] * 2 and extra.ear.take() == []
    for member in members:
        rendezvous.vote(member, is_leaving=False)
    assert [each.ear.take() for each in members] == [["again"]] * 2
    back = [come_back(rendezvous, each, rank=rank, step=9) for rank, each in enumerate(members)]
    assert [each.ear.received[0]["rank"] for each in (*back, extra)] == [0, 1, 2]
    spare = make_member("y", order=(1, 6))
    rendezvous.arrive(spare)
    assert spare.ear.take() == [] and "joiner" not in back[0].ear.take()


@pytest.mark.parametrize(
    ("least", "leavers", "verdicts"),
    [
        (2, {"c"}, ["again", "again", "go"]),
        (3, {"c"}, ["stop"] * 3),
        (1, {"a", "b", "c"}, ["stop"] * 3),
        (1, set(), ["stay"] * 3),
    ],
    ids=["enough stay", "too few stay", "all leave", "no rank came"],
)
def test_members_receive_the_result_of_their_votes(least: int, leavers: set[str], verdicts: list[str]) -> None:
    rendezvous, members = gather(least=least)
    for member in members:
        member.ear.take()
        rendezvous.vote(member, is_leaving=member.id in leavers)
    assert [each.ear.take() for each in members] == [[verdict] for verdict in verdicts]


def test_end_of_the_run_is_not_a_loss() -> None:
    rendezvous, (a, b, _) = gather()
    spare, late = make_member("y", order=(1, 6)), make_member("z", order=(1, 7))
    rendezvous.arrive(spare)
    rendezvous.finish()
    rendezvous.depart(a)
    rendezvous.arrive(late)
    assert b.ear.take() == ["world"]
    assert spare.ear.received == late.ear.received == [{"kind": "end", "is_over": True, "is_stopped": False}]


def test_workers_that_wait_are_dismissed_when_the_others_stop() -> None:
    """They waited on, and their launcher for them, although no world would form any more."""
    rendezvous, members = gather(least=3)
    spare, late = make_member("y", order=(1, 6)), make_member("z", order=(1, 7))
    rendezvous.most = 3
    rendezvous.arrive(spare)
    for member in members:
        rendezvous.vote(member, is_leaving=member is not members[0])
    rendezvous.arrive(late)
    assert spare.ear.received == late.ear.received == [{"kind": "end", "is_over": True, "is_stopped": True}]


def test_world_is_a_multiple_of_its_unit_and_the_rest_waits() -> None:
    rendezvous, (a, b, c, d) = gather(least=2, most=4, count=4)
    for member in (a, b, c, d):
        member.unit = 2
    rendezvous.unit = 2
    rendezvous.depart(c)
    again = []
    for rank, member in ((0, a), (1, b), (3, d)):
        again.append(make_member(member.id, order=(0, rank), unit=2, step=7, part=(rank % 2, 2)))
        rendezvous.depart(member)
        rendezvous.arrive(again[-1])
    assert [each.ear.take() for each in again] == [["world"], ["world"], []]
    lonely = make_member("e", order=(1, 2), unit=2)
    rendezvous.arrive(lonely)
    assert [each.ear.take() for each in again] == [["joiner"], ["joiner"], []]


def test_parts_alternate_in_their_order_so_that_few_have_to_be_sent() -> None:
    parts = [("a", 1), ("b", 1), ("c", 0), ("d", 0)]
    members = [
        make_member(name, order=(0, place), step=9, part=(index, 2)) for place, (name, index) in enumerate(parts)
    ]
    older, newcomer = make_member("e", order=(0, 4), step=8, part=(0, 2)), make_member("f", order=(1, 0))
    assert [each.id for each in arrange([*members, older, newcomer])] == ["c", "a", "d", "b", "e", "f"]
    # Where a part is missing, whoever would have to be sent one anyway takes its place.
    assert [each.id for each in arrange([*members[2:], newcomer])] == ["c", "f", "d"]
    left_behind = make_member("g", order=(0, 0), step=9, part=(1, 2), world=-1)
    assert [each.id for each in arrange([left_behind, *members[2:]])] == ["c", "g", "d"]


def hold(step: int, index: int = 0, count: int = 1, *, world: int = 0) -> Holding:
    return Holding(step=step, world=world, part=Part(index=index, count=count))


def test_rank_that_was_left_behind_takes_the_state_of_the_others_though_it_is_of_the_same_step() -> None:
    """Its machine was paused, and it computed the step in the former world: its weights differ in the last bits."""
    paused, others = hold(8, world=3), [hold(8, world=5)] * 2
    version = find_version([paused, *others], 1)
    assert version == (8, 5)
    assert [each.target for each in plan_transfers([paused, *others], version, [0, 0, 0])] == [0]
    halves = [hold(8, 0, 2, world=3), hold(8, 1, 2, world=5), hold(7, 0, 2, world=3), hold(7, 1, 2, world=3)]
    assert find_version(halves, 2) == (7, 3), "halves of different worlds make no state"


def test_state_belongs_to_the_world_that_computed_its_step() -> None:
    member: Any = ElasticMember.__new__(ElasticMember)
    member.world, live = SimpleNamespace(name=5), SimpleNamespace(holding=(8, 1, 2))
    member._taken = None
    assert member._describe(live) == (8, 5, 1, 2)
    member._taken = (7, 3)
    assert member._describe(live) == (8, 5, 1, 2)
    live.holding = (7, 1, 2)
    assert member._describe(live) == (7, 3, 1, 2), "taken over, and no step was made since"


def test_state_is_not_exchanged_for_another_while_a_restart_keeps_it() -> None:
    """The memory that the restart had just filled was closed, and its program ended with an IndexError."""
    member: Any = ElasticMember.__new__(ElasticMember)
    member._restarting, member._live, member._kept = threading.Lock(), None, []
    member._restarting.acquire()
    offering = threading.Thread(target=member.offer, args=("a state",), daemon=True)
    offering.start()
    offering.join(timeout=0.1)  # it waits: the program is about to be replaced
    assert member._live is None and offering.is_alive()
    member._restarting.release()
    offering.join(timeout=300)
    assert member._live == "a state"


def test_worlds_have_different_names_which_all_their_members_know() -> None:
    rendezvous, members = gather()
    (first,) = {each.ear.received[-1]["name"] for each in members}
    rendezvous.depart(members[2])
    members = [come_back(rendezvous, each, rank=rank, step=7) for rank, each in enumerate(members[:2])]
    (second,) = {each.ear.received[-1]["name"] for each in members}
    assert first != second


def test_state_is_whole_at_the_newest_step_of_which_every_part_is_held() -> None:
    assert find_version([hold(7), hold(8), hold(-1)], 1) == (8, 0)
    halves = [hold(7, 0, 2), hold(7, 1, 2), hold(8, 1, 2)]
    assert find_version(halves, 2) == (7, 0)
    assert find_version(halves, 1) is None and find_version(halves[1:], 2) is None
    assert find_version([hold(-1, 0, 1)], 1) is None


@given(holdings=st.lists(st.tuples(st.integers(6, 8), st.integers(0, 2)), min_size=1, max_size=12), data=st.data())
def test_every_rank_comes_to_hold_its_part_in_few_rounds(holdings: list[tuple[int, int]], data: st.DataObject) -> None:
    held = [hold(step, index, 3) for step, index in holdings]
    version = find_version(held, 3)
    if version is None:
        return
    indexes = st.integers(0, 2)
    wanted = data.draw(st.lists(indexes, min_size=len(held), max_size=len(held)))
    has = [{each.part.index} if each.version == version else set() for each in held]
    for transfer in plan_transfers(held, version, wanted):
        assert transfer.index in has[transfer.source] and transfer.index not in has[transfer.target]
        has[transfer.target].add(transfer.index)
    assert all(index in parts for index, parts in zip(wanted, has, strict=True))


def test_part_that_one_of_sixteen_holds_comes_to_all_in_four_rounds() -> None:
    transfers = plan_transfers([hold(5), *[hold(4)] * 15], (5, 0), [0] * 16)
    round_of = {0: 0}
    busy: dict[int, int] = {}
    for each in transfers:
        busy[each.source] = max(busy.get(each.source, 0), round_of[each.source]) + 1
        round_of[each.target] = busy[each.source]
    assert len(round_of) == 16 and max(round_of.values()) == 4


def come_from(member: Ears, *, generation: int, former: str, lost: str = "a") -> Ears:
    """Make a survivor that comes to another rendezvous after the loss of its own."""
    again = make_member(member.id, order=(0, 0), step=7)
    again.generation, again.former, again.lost = generation, tuple(former), lost
    return again


def test_world_of_a_lost_rendezvous_forms_at_the_next_one_with_a_newcomer() -> None:
    _, (_, b, c) = gather(is_movable=True)
    successor = Rendezvous(least=2, most=3, first_count=3, is_movable=True)
    newcomer = make_member("x", order=(1, 0))
    successor.arrive(newcomer)
    again = [come_from(b, generation=1, former="abc"), come_from(c, generation=1, former="abc")]
    successor.arrive(again[0])
    assert newcomer.ear.take() == [] and successor.is_gathering
    successor.arrive(again[1])
    assert [each.ear.received[0]["rank"] for each in (*again, newcomer)] == [0, 1, 2]
    assert again[0].ear.received[0]["generation"] == 2 and again[0].ear.received[0]["members"] == ["b", "c", "x"]


def test_at_most_half_of_a_world_never_forms_a_new_one() -> None:
    """A leader cut off from two peers of three, given two new ones, and the two peers: only those may continue."""
    leader, (a, b, c) = gather(is_movable=True)
    leader.depart(b)
    leader.depart(c)
    a = come_back(leader, a, rank=0, step=7)
    for name in "xy":
        leader.arrive(make_member(name, order=(1, 1)))
    leader.is_late = True
    leader.consider()
    assert leader.is_gathering and a.ear.take() == []
    leader.give_up()
    assert "may continue elsewhere" in a.ear.received[0]["reason"]
    successor = Rendezvous(least=2, most=3, first_count=3, is_movable=True)
    survivors = [come_from(each, generation=1, former="abc") for each in (b, c)]
    for each in survivors:
        successor.arrive(each)
    assert [each.ear.take() for each in survivors] == [["world"]] * 2


def test_those_who_left_by_vote_are_not_counted_as_lost() -> None:
    rendezvous, members = gather(is_movable=True)
    for member in members:
        rendezvous.vote(member, is_leaving=member.id == "a")
    rendezvous.depart(members[0])
    back = [come_back(rendezvous, each, rank=rank, step=9) for rank, each in enumerate(members[1:], start=1)]
    assert [each.ear.take() for each in back] == [["world"]] * 2


def test_one_of_four_continues_after_the_others_left_by_vote() -> None:
    """Only the former world's quorum counts losses: to leave is none, however many do."""
    rendezvous, members = gather(least=1, most=4, count=4, is_movable=True)
    for member in members:
        rendezvous.vote(member, is_leaving=member is not members[3])
    for member in members[:3]:
        rendezvous.depart(member)
    back = come_back(rendezvous, members[3], rank=3, step=9)
    assert [each["world_size"] for each in back.ear.received] == [1]


def test_rank_that_waits_takes_the_place_of_one_that_leaves() -> None:
    rendezvous, members = gather(least=2, most=2, count=2)
    rendezvous.arrive(make_member("x", order=(1, 5)))
    for member in members:
        member.ear.take()
        rendezvous.vote(member, is_leaving=member is members[0])
    assert [each.ear.take() for each in members] == [["go"], ["again"]]


def test_first_world_does_not_wait_for_more_workers_than_it_takes() -> None:
    _, members = gather(least=1, most=2, count=3)
    assert [each.ear.take() for each in members] == [["world"], ["world"], []]


def test_connection_of_a_worker_that_came_back_is_not_ended_by_its_old_one() -> None:
    """The rendezvous may notice the end of the old connection after the worker has opened another."""
    rendezvous, (a, b, _) = gather(least=1)
    rendezvous.depart(a)
    again = make_member("b", order=(0, 1), step=7)
    rendezvous.arrive(again)
    rendezvous.depart(b)
    assert rendezvous.waiting["b"] is again
    twice = make_member("b", order=(0, 1), step=7)
    rendezvous.arrive(twice)
    rendezvous.depart(again)
    assert rendezvous.waiting["b"] is twice
    rendezvous.is_late = True
    rendezvous.consider()
    rendezvous.depart(again)
    assert rendezvous.current == {"b": twice} and twice.ear.take() == ["world"]


def test_first_rank_hears_of_its_world_last() -> None:
    """It is beside the rendezvous: if their node is lost meanwhile, the others know their world."""
    heard: list[int] = []

    class Noting(Ears):
        def send(self, **message: Any) -> None:
            heard.append(message["rank"])

    rendezvous = Rendezvous(least=3, most=3, first_count=3)
    for place, name in enumerate("abc"):
        member = Noting(id=name, address="host", port=1, order=(1, place), writer=None)
        rendezvous.arrive(member)
    assert heard == [2, 1, 0]


def test_survivor_of_the_present_world_does_not_begin_another_at_its_own_rendezvous() -> None:
    """Every survivor names its former world; half of it may continue here, where it met, but not elsewhere."""
    rendezvous, (a, b) = gather(least=1, most=2, count=2, is_movable=True)
    rendezvous.depart(b)
    back = come_from(a, generation=1, former="ab", lost="")
    rendezvous.depart(a)
    rendezvous.arrive(back)
    rendezvous.is_late = True
    rendezvous.consider()
    assert back.ear.take() == ["world"]


def test_leader_of_an_older_world_is_deposed() -> None:
    older, (a, _, _) = gather()
    newer = come_from(make_member("z", order=(0, 0)), generation=5, former="z", lost="")
    older.arrive(newer)
    assert a.ear.take() == ["world", "change"] and older.generation == 5 and not older.current


def test_half_of_a_world_continues_at_its_own_rendezvous_only() -> None:
    rendezvous, (a, b) = gather(least=2, most=2, count=2, is_movable=True)
    rendezvous.depart(b)
    newcomer = make_member("x", order=(1, 1))
    rendezvous.arrive(newcomer)
    assert come_back(rendezvous, a, rank=0, step=3).ear.take() == ["world"]
    successor = Rendezvous(least=2, most=2, first_count=2, is_movable=True)
    successor.arrive(come_from(b, generation=1, former="ab"))
    successor.arrive(make_member("y", order=(1, 0)))
    assert successor.is_gathering


class Broker:
    """Names the node that leads: a file that the rendezvous of each node reads."""

    def __init__(self) -> None:
        self.epoch, self.rank = 0, 0

    def make(self, rank: int, *, least: int = 1) -> Rendezvous:
        return Rendezvous(
            least=least,
            most=3,
            first_count=3,
            is_movable=True,
            find_epoch=lambda: self.epoch if self.rank == rank else None,
        )


def begin(rendezvous: Rendezvous) -> list[Ears]:
    members = [make_member(name, order=(1, place)) for place, name in enumerate("abc")]
    for member in members:
        rendezvous.arrive(member)
    assert rendezvous.generation == 1
    return members


def test_one_survivor_continues_where_broker_names_the_leader() -> None:
    """There is no quorum: broker names one leader only, and knows that the first node is gone."""
    broker = Broker()
    _, b, _ = begin(broker.make(0))
    successor = broker.make(1)
    broker.epoch, broker.rank = 1, 1
    back = come_from(b, generation=1, former="abc")
    successor.arrive(back)
    assert back.ear.take() == [], "the third may come back"
    successor.is_late = True
    successor.consider()
    assert back.ear.received[0]["world_size"] == 1 and back.ear.received[0]["generation"] == 2


def test_leader_that_is_no_longer_named_forms_no_world() -> None:
    broker = Broker()
    first = broker.make(0)
    a, b, c = begin(first)
    broker.epoch, broker.rank = 1, 1
    first.depart(c)
    for member in (a, b):
        come_back(first, member, rank=0, step=1)
    first.is_late = True
    first.consider()
    assert first.is_gathering and first.generation == 1
    broker.epoch, broker.rank = 2, 0  # and it may lead again
    first.consider()
    assert first.generation == 2 and set(first.current) == {"a", "b"}


def test_newcomer_does_not_begin_a_run_of_its_own_at_a_new_leader() -> None:
    """The launcher of the leader has waited for so long that the time for a first world is over."""
    broker = Broker()
    broker.epoch, broker.rank = 1, 1
    successor = broker.make(1)
    successor.is_late = True
    successor.arrive(make_member("d", order=(1, 0)))
    assert successor.is_gathering and successor.generation == 0
    for place, name in enumerate("bc"):
        successor.arrive(come_from(make_member(name, order=(1, place)), generation=1, former="abc"))
    assert successor.generation == 2 and set(successor.current) == {"b", "c", "d"}


@pytest.mark.parametrize("keeps_state", [True, False])
def test_update_of_a_state_that_is_handed_over_waits_for_the_gradients_of_all(keeps_state: bool) -> None:
    """On a GPU the host would otherwise queue it behind an all-reduce that may never end."""
    done: list[str] = []
    session: Any = SimpleNamespace(
        member=SimpleNamespace(keeps_state=keeps_state),
        ranks=SimpleNamespace(wait_for_device=lambda: done.append("device")),
    )
    checkpoints, peers = (
        SimpleNamespace(wait_for_copy=lambda name=name: done.append(name)) for name in ("checkpoint", "peers")
    )
    Session._wait_for_copies(session, checkpoints, peers)  # type: ignore[arg-type]
    assert done == ["device"] * keeps_state + ["checkpoint", "peers"]


@pytest.mark.parametrize("text", ["2", "0:2", "3:2", "a:b", "2:", ":2"])
def test_invalid_bounds_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not like `2:4`"):
        parse_elastic(text)
    assert find_problem(Config(elastic=text)) is not None and find_problem(Config(elastic="2:4")) is None


def test_more_ranks_than_samples_are_refused_before_they_arrive_and_end_the_run() -> None:
    few = TrainConfig(batch=4)
    problem = find_problem(Config(elastic="2:5", train=few))
    assert problem == "`--elastic 2:5` may have more ranks than `--train.batch 4` has samples"
    assert find_problem(Config(elastic="2:4", train=few)) is None
    assert find_problem(Config(elastic="2:8", train=few, strategy="allreduce+pipeline", mesh="*x2")) is None


def check_losses(worlds: Worlds, folder: TrainingFolder, path: Path, *, gaps_max: int) -> None:
    """Check that each step was taken once, with the loss of an undisturbed run: no sample was left out or repeated.

    The first rank may lose a peer between moving the parameters and receiving the others' losses: that step is taken
    without reporting a loss.
    """
    found = {step: losses[-1] for step, losses in folder.losses().items()}
    last = max(found)
    path.mkdir()
    alone = TrainingFolder(path=path)
    ended = alone.fork(worlds, "--train.steps", str(last), "--checkpoint.every_steps", "0", *STEADY)
    assert ended.codes == [0], ended.errors
    expected = {step: losses[0] for step, losses in alone.losses().items()}
    assert len(set(expected) - set(found)) <= gaps_max
    assert found == pytest.approx({step: expected[step] for step in found}, abs=1e-4)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux")
@long
def test_run_continues_without_a_lost_node_with_a_new_one_and_after_a_removal(
    worlds: Worlds, folder: TrainingFolder, tmp_path: Path, start_node: Start
) -> None:
    """Three ranks, then two, three, two, and an end when all are asked to leave; no checkpoint is ever read."""
    flags = ("--checkpoint.every_steps", "0")
    head, second, third = (start_node(rank, *flags) for rank in range(3))
    await_step(head, 10)
    os.killpg(third.pid, signal.SIGKILL)
    await_line(head, "resumed from memory  ranks 2")
    newcomer = start_node(2, *flags)
    await_line(head, "resumed from memory  ranks 3")
    await_line(head, "loss")
    newcomer.terminate()
    assert newcomer.wait(timeout=300) == 143
    await_line(head, "resumed from memory  ranks 2")
    await_line(head, "loss")
    head.terminate()
    second.terminate()
    assert (head.wait(timeout=300), second.wait(timeout=300)) == (143, 143)
    lines = folder.lines()
    steps = [int(str(line["step"])) for line in lines if line["loss"] is not None]
    assert all(later > sooner for sooner, later in itertools.pairwise(steps))
    assert lines[-1]["event"] == "preempted, checkpoint committed" and lines[-1]["checkpoint_step"] == steps[-1]
    assert count_lost_steps(folder) == [0, 0, 0], "a step that was under way is the most that is lost"
    check_losses(worlds, folder, tmp_path / "alone", gaps_max=1)


@pytest.mark.long
@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux")
def test_sharded_run_continues_from_its_newest_checkpoint(
    worlds: Worlds, folder: TrainingFolder, tmp_path: Path, start_node: Start
) -> None:
    """A lost shard is in no other memory."""
    head, second, third = (start_node(rank, strategy="fsdp") for rank in range(3))
    await_step(head, 12)
    os.killpg(second.pid, signal.SIGKILL)
    await_line(head, "resumed  ranks 2")
    await_line(head, "loss")
    for node in (head, third):
        node.terminate()
    assert (head.wait(timeout=300), third.wait(timeout=300)) == (143, 143)
    resumed = [int(str(line["step"])) for line in folder.lines() if line["event"] == "resumed"]
    assert len(resumed) == 1 and resumed[0] % 5 == 0 and resumed[0] > 0
    check_losses(worlds, folder, tmp_path / "alone", gaps_max=0)


@pytest.mark.exhaustive
@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux")
def test_replica_of_shards_is_lost_and_the_other_continues_from_memory(
    worlds: Worlds, folder: TrainingFolder, tmp_path: Path, start_node: Start
) -> None:
    """Two replicas of two shards each; one rank is lost, its neighbour waits, and a new one makes it two again."""
    flags = ("--elastic", "2:4", "--mesh", "*x2", "--checkpoint.every_steps", "0", "--model.dropout", "0")
    nodes = [start_node(rank, *flags, count=4, strategy="hsdp") for rank in range(4)]
    head = nodes[0]
    await_step(head, 10)
    os.killpg(nodes[2].pid, signal.SIGKILL)
    await_line(head, "resumed from memory  ranks 2")
    await_line(head, "loss")
    start_node(2, *flags, count=4, strategy="hsdp")
    await_line(head, "resumed from memory  ranks 4")
    await_line(head, "loss")
    (folder.path / "preempted").touch()
    assert head.wait(timeout=300) == 143
    assert count_lost_steps(folder) == [0, 0]
    check_losses(worlds, folder, tmp_path / "alone", gaps_max=1)


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux")
@pytest.mark.exhaustive
def test_run_outlives_the_nodes_that_lead_it(
    worlds: Worlds, folder: TrainingFolder, tmp_path: Path, start_node: Start
) -> None:
    """The node of rank 0, at which all meet, is killed and replaced, four times."""
    kills = 4
    flags = ("--checkpoint.every_steps", "0", "--model.dropout", "0")
    # The next rank leads next, and a new node becomes the last rank.
    nodes = [(rank, start_node(rank, *flags)) for rank in range(3)]
    await_step(nodes[0][1], 5)
    for _ in range(kills):
        place, leader = nodes.pop(0)
        os.killpg(leader.pid, signal.SIGKILL)
        await_line(nodes[0][1], "resumed from memory  ranks 2")
        nodes.append((place, start_node(place, *flags)))
        await_line(nodes[0][1], "resumed from memory  ranks 3")
        await_line(nodes[0][1], "loss")
    for _, node in nodes:
        node.terminate()
    assert [node.wait(timeout=300) for _, node in nodes] == [143] * 3
    # When all are asked to leave, one may leave before the others.
    assert count_lost_steps(folder)[: 2 * kills] == [0] * 2 * kills
    check_losses(worlds, folder, tmp_path / "alone", gaps_max=kills)


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux")
@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.exhaustive)])
def test_rendezvous_outlives_the_nodes_that_lead_it(kills: int, start_node: Start) -> None:
    """As above with workers that do no arithmetic, and with a new node that comes at any moment of the move."""
    draw = random.Random(20261123)
    nodes = [(rank, start_node(rank, module="tests.trainers.elastic_worker")) for rank in range(3)]
    generation = await_world(nodes[0][1], ranks=3, after=0)
    for kill in range(kills):
        place, leader = nodes.pop(0)
        is_early = draw.random() < 0.5
        os.killpg(leader.pid, signal.SIGKILL)
        if not is_early:
            generation = await_world(nodes[0][1], ranks=2, after=generation)
        nodes.append((place, start_node(place, module="tests.trainers.elastic_worker")))
        generation = await_world(nodes[0][1], ranks=3, after=generation)
        for _, node in nodes[1:]:  # more than half must know of a world for it to outlive its leader
            await_world(node, ranks=3, after=generation - 1)
        print(f"kill {kill + 1}: node {place}, {'before' if is_early else 'after'} the others met")


def await_world(process: "subprocess.Popen[str]", *, ranks: int, after: int) -> int:
    """Read until the worker is in a later world of that size; its generation."""
    assert process.stdout is not None
    for line in process.stdout:
        _, generation, size = map(int, re.findall(r"\d+", line))
        if size == ranks and generation > after:
            return generation
    raise AssertionError(f"the worker ended: {process.stderr and process.stderr.read()}")
