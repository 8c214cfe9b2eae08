"""The rendezvous of an elastic run: its members, their order, and changes of the world.

It runs in the launcher of one node (`rendezvous_server.py`), the first one unless that was lost, and imports no torch.
Each worker keeps one connection, of JSON lines; a connection that ends is a lost worker. Every change begins a new
generation, for which all workers restart.
"""

import json
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

# A worker that is silent for this long is lost even if its connection is open: its machine vanished.
SILENCE_S_MAX = 30.0
# Waits that make up the silence; a suspension of the rendezvous, perhaps with all workers, uses up only one of them.
SILENT_POLLS = 6
# Survivors reconnect within their start-up time; a worker that does not is left out. They import torch, which takes
# more than a minute on a machine whose processors are busy.
RETURN_S_MAX = 180.0
# Wait for more workers while there are too few; then the run ends, and broker restarts it.
WAIT_S_MAX = 600.0
WHOLE_MAX = 2**31


@dataclass(kw_only=True)
class Member:
    """A worker that is connected."""

    id: str
    address: str
    port: int  # free on its machine, for torch's store if this worker becomes rank 0
    order: tuple[int, int]  # ranks of the previous generation come first, in their order
    writer: Any
    # Step in memory (-1: none), name of the world that computed it, index of its part, number of parts.
    holding: tuple[int, int, int, int] = (-1, 0, 0, 1)
    unit: int = 1  # the size of its world must be a multiple of this
    generation: int = 0  # that of its previous world; 0: none
    former: tuple[str, ...] = ()  # ids of that world, sent if it met at another rendezvous
    epoch: int = 0  # that of the leader that broker named
    lost: str = ""  # prefix of the ids on the node whose rendezvous was lost

    def send(self, **message: Any) -> None:
        """Send one line. The reader detects a broken connection."""
        if not self.writer.is_closing():
            self.writer.write(json.dumps(message).encode() + b"\n")


@dataclass(kw_only=True)
class Rendezvous:
    """Gathers members, then watches for members that leave or arrive. Used by one event loop only."""

    least: int
    most: int
    first_count: int  # number of workers that the first generation waits for
    generation: int = 0
    is_gathering: bool = True
    is_over: bool = False
    is_stopped: bool = False  # whether the run ended before its last step, because too many ranks leave
    waiting: dict[str, Member] = field(default_factory=dict)
    current: dict[str, Member] = field(default_factory=dict)
    expected: set[str] = field(default_factory=set)  # survivors that will reconnect
    votes: dict[str, bool] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)  # ids of members that an error ended, perhaps because of a lost one
    # Whether the run continues at another node if this one is lost. After a network partition both parts may try to
    # form a world: only one has more than half of the previous world, or half of it and its rendezvous.
    is_movable: bool = False
    # Under broker it names the node that leads, in a file: then no quorum is required, and this returns the epoch in
    # which this node leads, or None.
    find_epoch: Callable[[], int | None] | None = None
    is_adopted: bool = False  # whether the previous world met elsewhere
    quorum: set[str] = field(default_factory=set)  # ids of the previous world, without those that left by vote
    unit: int = 1
    is_late: bool = False  # whether the time to reconnect has passed
    on_gather: Callable[[], None] = lambda: None

    def arrive(self, member: Member) -> None:
        """Add a worker that requests admission."""
        if member.former and member.generation > self.generation:
            self._adopt(member)
        elif self.is_movable and self.generation == 0 and not self.waiting:
            self.gather(set())  # the time to wait for others begins now
        self.waiting[member.id] = member
        self.expected.discard(member.id)
        self.unit = member.unit  # equal for all, because it follows from the flags
        if self.is_over:
            self._dismiss(member)
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
        """Count the vote of a member. All members are between the same two steps.

        `is_leaving`: its machine is about to be preempted. Votes are ignored while a world is gathering, and from ranks
        outside the current world.
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
            self.is_stopped = True
        for key, member in self.current.items():
            member.send(kind="verdict", verdict=verdicts[key])
        if "again" in verdicts.values():
            self.quorum = staying
            self.gather(staying)
        elif self.is_stopped:
            self.finish()

    def fail(self, member: Member) -> None:
        """Note that an error ended the training of a member. If all failed, none was lost, and they are told so."""
        if self.is_gathering or self.current.get(member.id) is not member:
            return
        self.failed.add(member.id)
        if self.failed >= set(self.current):
            for other in self.current.values():
                other.send(kind="failed")

    def gather(self, expected: set[str]) -> None:
        """Begin a new generation."""
        self.is_gathering, self.is_late = True, False
        self.expected, self.votes, self.failed = expected - set(self.waiting), {}, set()
        self.on_gather()
        self.consider()

    def _adopt(self, member: Member) -> None:
        """Adopt the world of a rendezvous that was lost."""
        for other in self.current.values():  # this node's own world, which continued without it
            other.send(kind="change")
        self.current, self.is_adopted = {}, True
        self.generation, self.quorum = member.generation, set(member.former)
        self.gather({key for key in member.former if not (member.lost and key.startswith(member.lost))})

    def consider(self) -> None:
        """Form a world once all expected members have arrived, or enough of them when the time is up."""
        count = self._fit(len(self.waiting))
        is_complete = not self.expected if self.generation else count >= min(self.first_count, self.most)
        if count >= self.least and (is_complete or self.is_late) and self._has_quorum() and self._may_lead():
            self._form()

    def _may_lead(self) -> bool:
        """Return whether no other node has been named as the leader."""
        return self.find_epoch is None or self.find_epoch() is not None

    def _has_quorum(self) -> bool:
        back = self.quorum & self.waiting.keys()
        return not self.is_movable or self.find_epoch is not None or 2 * len(back) >= len(self.quorum) + self.is_adopted

    def _fit(self, count: int) -> int:
        """Return the largest size of a world with at most `count` members."""
        return min(count, self.most) // self.unit * self.unit

    def finish(self) -> None:
        """End the run after its last step, or before it if it was stopped; waiting workers are dismissed."""
        self.is_over = True
        for member in self.waiting.values():
            self._dismiss(member)

    def _dismiss(self, member: Member) -> None:
        member.send(kind="end", is_over=True, is_stopped=self.is_stopped)

    def give_up(self) -> None:
        """End the run for waiting workers because too few are left."""
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
        name = secrets.randbelow(WHOLE_MAX)
        # Rank 0 last: it is on this node, and if the node is lost at this moment, the others know their world.
        for rank, member in reversed(list(enumerate(chosen))):
            member.send(
                kind="world",
                generation=self.generation,
                name=name,
                rank=rank,
                world_size=len(chosen),
                address=chosen[0].address,
                port=chosen[0].port,
                holdings=holdings,
                **({"members": list(self.current)} if self.is_movable else {}),
            )


def arrange(members: Sequence[Member]) -> list[Member]:
    """Return the members in rank order. If each kept one of several parts, the parts alternate as they did before.

    In this way, the members form a complete state if possible, and few of them must receive a part.
    """
    left = list(members)
    newest = max((member.holding for member in left), default=(-1, 0, 0, 1))
    step, world, _, count = newest
    if count == 1:
        return left
    arranged: list[Member] = []
    while left:
        wanted = (step, world, len(arranged) % count, count)
        place = next((place for place, member in enumerate(left) if member.holding == wanted), None)
        if place is None:  # a member that fits no place
            place = next((place for place, member in enumerate(left) if member.holding[:2] != (step, world)), 0)
        arranged.append(left.pop(place))
    return arranged
