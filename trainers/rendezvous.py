"""The rendezvous of an elastic run: its members, their order, and when the world changes.

Runs in the launcher of one node (`rendezvous_server.py`), the first unless that was lost, and imports no torch. Each
worker keeps one connection, of JSON lines; the connection that ends is a worker that is gone. Every change begins a new
generation, for which all workers start again.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

# A worker silent for this time is lost, though its connection is open: the machine vanished.
SILENCE_S_MAX = 30.0
# Survivors come back within their start-up time; a worker that does not is left behind.
RETURN_S_MAX = 60.0
# With fewer than the least, others may still come; then the run ends, and the broker starts it again.
WAIT_S_MAX = 600.0


@dataclass(kw_only=True)
class Member:
    """A worker that is connected."""

    id: str
    address: str
    port: int  # free on its machine, for torch's store should it come first
    order: tuple[int, int]  # ranks of the generation before come first, in their order
    writer: Any
    holding: tuple[int, int, int] = (-1, 0, 1)  # step of the state in its memory, -1 for none; which of how many parts
    unit: int = 1  # the ranks of its world must be a multiple of this many
    generation: int = 0  # the world it comes from, 0 for none
    former: tuple[str, ...] = ()  # ids of that world, sent where its rendezvous was another
    lost: str = ""  # how ids of the node begin whose rendezvous was lost

    def send(self, **message: Any) -> None:
        """Send one line; a connection that broke is noticed where it is read."""
        if not self.writer.is_closing():
            self.writer.write(json.dumps(message).encode() + b"\n")


@dataclass(kw_only=True)
class Rendezvous:
    """Gather members, then watch them until one leaves or another arrives. Used by one event loop only."""

    least: int
    most: int
    first_count: int  # how many the first generation waits for
    generation: int = 0
    is_gathering: bool = True
    is_over: bool = False
    waiting: dict[str, Member] = field(default_factory=dict)
    current: dict[str, Member] = field(default_factory=dict)
    expected: set[str] = field(default_factory=set)  # survivors that will come back
    votes: dict[str, bool] = field(default_factory=dict)
    # Whether the run continues at another node when this one is lost. Two parts of a divided network may then both look
    # for a world: only one of them has more than half of the world before, or half of it and its rendezvous.
    is_movable: bool = False
    is_adopted: bool = False  # whether the world before met elsewhere
    quorum: set[str] = field(default_factory=set)  # ids of the world before, without those that left by vote
    unit: int = 1
    is_late: bool = False  # whether the time to come back has passed
    on_gather: Callable[[], None] = lambda: None

    def arrive(self, member: Member) -> None:
        """Add a worker that asks to be let in."""
        if member.former and member.generation > self.generation:
            self._adopt(member)
        self.waiting[member.id] = member
        self.expected.discard(member.id)
        self.unit = member.unit  # equal for all: it follows from the flags
        if self.is_over:
            member.send(kind="end", is_over=True)
        elif self.is_gathering:
            self.consider()
        elif self._fit(len(self.current) + len(self.waiting)) > len(self.current):
            for other in self.current.values():
                other.send(kind="joiner")

    def depart(self, member: Member) -> None:
        """Remove a worker whose connection ended."""
        if self.waiting.get(member.id) is member:
            del self.waiting[member.id]
        if self.current.get(member.id) is not member:
            return
        del self.current[member.id]
        if self.is_over or self.is_gathering:
            return
        for other in self.current.values():
            other.send(kind="change")
        self.gather(set(self.current))

    def vote(self, member: Member, *, is_leaving: bool) -> None:
        """Count a vote. All members stand between the same two steps, and say whether their machine is about to go.

        Of no weight while a world is gathering, and from a rank outside the current one.
        """
        if self.is_gathering or self.current.get(member.id) is not member:
            return
        self.votes[member.id] = is_leaving
        if set(self.votes) < set(self.current):
            return
        leavers = {key for key, is_leaving in self.votes.items() if is_leaving}
        staying = set(self.current) - leavers
        self.votes = {}
        if not leavers and not self.waiting:
            verdicts = dict.fromkeys(self.current, "stay")
        elif staying and self._fit(len(staying) + len(self.waiting)) >= self.least:
            verdicts = {key: "go" if key in leavers else "again" for key in self.current}
        else:
            verdicts = dict.fromkeys(self.current, "stop")
            self.is_over = True
        for key, member in self.current.items():
            member.send(kind="verdict", verdict=verdicts[key])
        if "again" in verdicts.values():
            self.quorum = staying
            self.gather(staying)

    def gather(self, expected: set[str]) -> None:
        """Begin a new generation."""
        self.is_gathering, self.is_late = True, False
        self.expected, self.votes = expected - set(self.waiting), {}
        self.on_gather()
        self.consider()

    def _adopt(self, member: Member) -> None:
        """Gather the world of a rendezvous that was lost."""
        for other in self.current.values():  # of a world that continued without this node
            other.send(kind="change")
        self.current, self.is_adopted = {}, True
        self.generation, self.quorum = member.generation, set(member.former)
        self.gather({key for key in member.former if not (member.lost and key.startswith(member.lost))})

    def consider(self) -> None:
        """Admit the members when all have arrived, or when enough have and the time is up."""
        count = self._fit(len(self.waiting))
        is_complete = not self.expected if self.generation else count >= min(self.first_count, self.most)
        if count >= self.least and (is_complete or self.is_late) and self._has_quorum():
            self._form()

    def _has_quorum(self) -> bool:
        back = self.quorum & self.waiting.keys()
        return not self.is_movable or 2 * len(back) >= len(self.quorum) + self.is_adopted

    def _fit(self, count: int) -> int:
        """Return how many of the members can make up a world."""
        return min(count, self.most) // self.unit * self.unit

    def finish(self) -> None:
        """End the run: all steps are done, and no rank needs to wait for a place."""
        self.is_over = True
        for member in self.waiting.values():
            member.send(kind="end", is_over=True)

    def give_up(self) -> None:
        """End the run for the waiting ranks: too few are left."""
        reason = f"{len(self.waiting)} ranks are left, and `--elastic` asks for {self.least}"
        if self._fit(len(self.waiting)) >= self.least and not self._has_quorum():
            reason = f"too many of the {len(self.quorum)} ranks were lost at once; they may continue elsewhere"
        for member in self.waiting.values():
            member.send(kind="end", reason=reason)

    def _form(self) -> None:
        members = arrange(sorted(self.waiting.values(), key=lambda member: member.order))
        size = self._fit(len(members))
        chosen, spare = members[:size], members[size:]
        self.generation += 1
        self.is_gathering = False
        self.expected, self.votes = set(), {}
        self.current = {member.id: member for member in chosen}
        self.quorum, self.is_adopted = set(self.current), False
        self.waiting = {member.id: member for member in spare}
        holdings = [member.holding for member in chosen]
        # The first rank last: it is on this node, and when it is lost in its first moment the others know their world.
        for rank, member in reversed(list(enumerate(chosen))):
            member.send(
                kind="world",
                generation=self.generation,
                rank=rank,
                world_size=len(chosen),
                address=chosen[0].address,
                port=chosen[0].port,
                holdings=holdings,
                **({"members": list(self.current)} if self.is_movable else {}),
            )


def arrange(members: Sequence[Member]) -> list[Member]:
    """Order members by rank, but where each kept one part of several, the parts take turns as they did before.

    So a world is whole where its members can make it so, and few have to be sent what they did not keep.
    """
    left = list(members)
    newest = max((member.holding for member in left), default=(-1, 0, 1))
    if newest[2] == 1:
        return left
    arranged: list[Member] = []
    while left:
        wanted = (newest[0], len(arranged) % newest[2], newest[2])
        place = next((place for place, member in enumerate(left) if member.holding == wanted), None)
        if place is None:  # a member that fits no other place either
            place = next((place for place, member in enumerate(left) if member.holding[0] != newest[0]), 0)
        arranged.append(left.pop(place))
    return arranged
