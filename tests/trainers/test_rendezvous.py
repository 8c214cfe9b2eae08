"""Who forms a world, and what its members are told: the rendezvous without its connections."""

from __future__ import annotations

import json
from typing import Any

from trainers.rendezvous import Member, Rendezvous


class Inbox:
    """The connection of a member: keeps what it is sent."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []

    def is_closing(self) -> bool:
        return False

    def write(self, line: bytes) -> None:
        self.messages.append(json.loads(line))


def make_member(number: int, **fields: Any) -> Member:
    values = {"id": f"n{number}.0", "address": "127.0.0.1", "port": 1000 + number, "order": (0, number)}
    return Member(**{**values, "writer": Inbox(), **fields})


def read_kinds(member: Member) -> list[str]:
    return [message["kind"] for message in member.writer.messages]


def meet(
    count: int, *, least: int = 1, most: int = 8, first: int = 0, **fields: Any
) -> tuple[Rendezvous, list[Member]]:
    """Return a rendezvous whose first world is that of `count` members."""
    rendezvous = Rendezvous(least=least, most=most, first_count=first or count, **fields)
    members = [make_member(number) for number in range(count)]
    for member in members:
        rendezvous.arrive(member)
    return rendezvous, members


def test_first_world_waits_for_its_members_but_not_for_more_than_fit() -> None:
    rendezvous, members = meet(2, first=3)
    assert rendezvous.is_gathering
    rendezvous.arrive(make_member(2))
    assert not rendezvous.is_gathering and len(rendezvous.current) == 3
    assert read_kinds(members[0]) == ["world"]
    rendezvous, _ = meet(2, most=2, first=5)
    assert not rendezvous.is_gathering, "five could never fit"


def test_world_has_whole_units() -> None:
    rendezvous = Rendezvous(least=2, most=8, first_count=2)
    members = [make_member(number, unit=2) for number in range(4)]
    for member in members[:3]:
        rendezvous.arrive(member)
    assert len(rendezvous.current) == 2 and len(rendezvous.waiting) == 1
    assert read_kinds(members[0]) == ["world"], "one more does not make a larger world"
    rendezvous.arrive(members[3])
    assert read_kinds(members[0]) == ["world", "joiner"]


def test_verdict_comes_with_the_last_vote_and_leavers_go() -> None:
    rendezvous, (first, second, third) = meet(3, least=2)
    for member in (first, second):
        rendezvous.vote(member, is_leaving=member is first)
    assert "verdict" not in read_kinds(first), "the third has not voted"
    rendezvous.vote(third, is_leaving=False)
    verdicts = [each.writer.messages[-1].get("verdict") for each in (first, second, third)]
    assert verdicts == ["go", "again", "again"] and rendezvous.is_gathering


def test_run_stops_if_too_few_stay_and_all_stay_if_none_leaves() -> None:
    rendezvous, members = meet(3, least=3)
    for member in members:
        rendezvous.vote(member, is_leaving=False)
    assert [each.writer.messages[-1]["verdict"] for each in members] == ["stay"] * 3
    for member in members:
        rendezvous.vote(member, is_leaving=member is members[0])
    assert [each.writer.messages[-1]["verdict"] for each in members] == ["stop"] * 3
    assert rendezvous.is_over and rendezvous.is_stopped


def test_error_of_all_ranks_is_no_loss_of_one() -> None:
    rendezvous, members = meet(2)
    rendezvous.fail(members[0])
    assert "failed" not in read_kinds(members[0])
    rendezvous.fail(members[1])
    assert all(read_kinds(each)[-1] == "failed" for each in members)


def test_after_a_partition_only_the_part_with_more_than_half_goes_on() -> None:
    """Of four nodes that met elsewhere, two are half without their rendezvous, and three are more."""
    former = tuple(f"n{number}.0" for number in range(4))
    rendezvous = Rendezvous(least=1, most=8, first_count=4, is_movable=True)
    fields = {"generation": 5, "former": former, "lost": "n0."}
    for number in (1, 2):
        rendezvous.arrive(make_member(number, **fields))
    rendezvous.is_late = True
    rendezvous.consider()
    assert rendezvous.is_gathering, "the other two may have formed a world"
    rendezvous.arrive(make_member(3, **fields))
    assert not rendezvous.is_gathering and rendezvous.generation == 6


def test_members_on_the_lost_node_are_not_waited_for() -> None:
    former = ("n0.0", "n1.0", "n2.0")
    rendezvous = Rendezvous(least=1, most=8, first_count=3, is_movable=True)
    for number in (1, 2):
        rendezvous.arrive(make_member(number, generation=2, former=former, lost="n0."))
    assert not rendezvous.is_gathering and list(rendezvous.current) == ["n1.0", "n2.0"]


def test_loss_restarts_the_others_who_are_waited_for_together() -> None:
    gathered: list[int] = []
    rendezvous, members = meet(3, on_gather=lambda: gathered.append(1))
    rendezvous.depart(members[0])
    assert gathered and [read_kinds(each)[-1] for each in members[1:]] == ["change", "change"]
    again = [make_member(number, order=(0, number)) for number in (1, 2)]
    rendezvous.arrive(again[0])
    assert rendezvous.is_gathering
    rendezvous.arrive(again[1])
    assert not rendezvous.is_gathering and rendezvous.generation == 2


def test_node_that_broker_has_not_named_leads_no_world() -> None:
    rendezvous, _ = meet(2, find_epoch=lambda: None)
    assert rendezvous.is_gathering
    rendezvous.find_epoch = lambda: 1
    rendezvous.consider()
    assert not rendezvous.is_gathering


def test_ranks_keep_the_order_of_the_previous_world() -> None:
    rendezvous = Rendezvous(least=1, most=8, first_count=2)
    late, early = make_member(0, order=(1, 0)), make_member(5, order=(0, 0))
    rendezvous.arrive(late)
    rendezvous.arrive(early)
    assert list(rendezvous.current) == [early.id, late.id]
