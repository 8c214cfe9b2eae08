"""Find the node with the current rendezvous of an elastic run.

The launcher of every node listens (`rendezvous_server.py`), and one leads: the first node at the start, and after the
loss of the leader the next reachable node in order. A launcher that does not lead answers that it has no world. Where
half of the ranks or fewer may continue, they cannot choose: broker names the leader, each time with a higher epoch
(`gang_file.py`).
"""

import json
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from trainers.errors import TrainerError
from trainers.gang_file import NAMED_VARIABLE, VARIABLE, read_leader
from trainers.rendezvous import SILENCE_S_MAX
from trainers.wire import Credential, Wire, read_credential

CONNECT_S_MAX = 120.0
# The wait for a leader that broker names. Its agent ends the program earlier (`AWAY_S_MAX` in `agent_member.py`).
NAMED_S_MAX = 600.0
DIAL_S = 5.0
RETRY_S = 0.2
PLACES_VARIABLE, LEADER_VARIABLE, WORLD_VARIABLE = "BROKER_ELASTIC_AT", "BROKER_ELASTIC_LEADER", "BROKER_ELASTIC_WORLD"


@dataclass(frozen=True, kw_only=True)
class PreviousWorld:
    """The previous world of this worker; generation 0 for a new worker."""

    leader: int = 0  # index of the node of its rendezvous
    generation: int = 0
    members: tuple[str, ...] = ()
    epoch: int = 0

    def write(self) -> dict[str, str]:
        """Return environment variables for `read_past`."""
        return {
            LEADER_VARIABLE: str(self.leader),
            WORLD_VARIABLE: json.dumps([self.generation, ",".join(self.members), self.epoch]),
        }


def read_past(variables: Mapping[str, str]) -> PreviousWorld:
    """Return the past of a restarted worker; that of a new worker is empty."""
    if WORLD_VARIABLE not in variables:
        return PreviousWorld()
    generation, members, epoch = json.loads(variables[WORLD_VARIABLE])
    leader = int(variables[LEADER_VARIABLE])
    return PreviousWorld(leader=leader, generation=generation, members=tuple(members.split(",")), epoch=epoch)


@dataclass(frozen=True, kw_only=True)
class Status:
    """The state of the rendezvous at a node."""

    generation: int  # 0: no world has formed there
    is_gathering: bool
    is_over: bool
    epoch: int | None = None  # the epoch in which the node leads, if broker names it


class RendezvousAddresses:
    """The addresses of all possible rendezvous, in the order of nodes."""

    def __init__(self, text: str, past: PreviousWorld) -> None:
        """Parse a comma-separated list of `host:port`."""
        self._places = [(host, int(port)) for host, _, port in (place.rpartition(":") for place in text.split(","))]
        self._past = past
        self._is_named = bool(os.environ.get(NAMED_VARIABLE))
        self.epoch = 0  # that of the leader to which the last connection was made
        credential = read_credential(os.environ)
        if credential is None:
            words = f"`{PLACES_VARIABLE}` is set without `BROKER_GANG_PEM`: start workers with trainers.launch"
            raise TrainerError(words)
        self._credential: Credential = credential

    @property
    def is_one(self) -> bool:
        """Return whether there is one rendezvous only, so that the run ends with its first node."""
        return len(self._places) == 1

    def connect(self, check: Callable[[], object] = lambda: None) -> tuple[int, Wire]:
        """Connect to the node at which the run continues, or should begin or continue; return its index and connection.

        `check` is called before each try, and may raise. Raises TrainerError if no node is reachable within
        `CONNECT_S_MAX`.
        """
        end_s = time.monotonic() + (NAMED_S_MAX if self._is_named else CONNECT_S_MAX)
        while True:
            check()
            found, problem = self._find_named() if self._is_named else self._scan()
            if found is not None:
                return found
            if time.monotonic() > end_s:
                raise TrainerError(f"the rendezvous of `--elastic` cannot be reached: {problem}") from problem
            time.sleep(RETRY_S)

    def find_better(self, own: int) -> bool:
        """Return whether a worker that waits at the node `own` should move to another one."""
        if self._is_named:
            leader = read_leader(os.environ)
            return leader is not None and leader.epoch > self.epoch
        for place in self._order():
            with suppress(OSError, ValueError):
                if place != own and self._is_better(place, self._order().index(place) < self._order().index(own)):
                    return True
        return False

    def _is_better(self, place: int, is_before: bool) -> bool:
        wire = self._dial(place)
        try:
            status = request_status(wire)
        finally:
            wire.close()
        if status.is_over or (status.generation > self._past.generation and not status.is_gathering):
            return True
        return is_before and status.generation >= max(1, self._past.generation)

    def _order(self) -> Sequence[int]:
        count = len(self._places)
        return [(self._past.leader + step) % count for step in range(count)]

    def _find_named(self) -> tuple[tuple[int, Wire] | None, Exception | None]:
        """Connect to the leader that broker names, once its launcher knows that it leads."""
        leader = read_leader(os.environ)
        if leader is None or leader.epoch < self._past.epoch:
            return None, ValueError(f"{os.environ.get(VARIABLE)} names no leader")
        try:
            wire = self._dial(leader.rank)
            status = request_status(wire)
        except (OSError, ValueError) as error:
            return None, error
        if status.epoch != leader.epoch:
            wire.close()
            return None, ValueError(f"node {leader.rank} does not lead yet")
        self.epoch = leader.epoch
        return (leader.rank, wire), None

    def _scan(self) -> tuple[tuple[int, Wire] | None, Exception | None]:
        """Query all nodes: prefer a world that has formed, then one that is gathering, then the next leader."""
        candidates: list[tuple[tuple[bool, bool, int], int, Wire]] = []
        problem: Exception | None = None
        for place in self._order():
            try:
                wire = self._dial(place)
                if self.is_one:
                    return (place, wire), None
                status = request_status(wire)
            except (OSError, ValueError) as error:
                problem = error
                continue
            is_active = status.generation >= max(1, self._past.generation) or status.is_over
            if is_active and (place == self._past.leader or not status.is_gathering):
                for _, _, other in candidates:
                    other.close()
                return (place, wire), None
            rank = (not is_active, self._past.generation > 0 and place == self._past.leader, len(candidates))
            candidates.append((rank, place, wire))
        chosen = min(candidates, key=lambda candidate: candidate[0], default=None)
        if chosen is not None and self._past.generation == 0 and chosen[0][0] and chosen[1] != 0:
            chosen = None  # a run begins at its first node only
        for candidate in candidates:
            if candidate is not chosen:
                candidate[2].close()
        return (chosen and (chosen[1], chosen[2])), problem

    def _dial(self, place: int) -> Wire:
        host, port = self._places[place]
        leader = read_leader(os.environ)  # nodes may have been replaced since this worker started
        if leader is not None and len(leader.addresses) == len(self._places):
            host = leader.addresses[place]
        connection = socket.create_connection((host, port), timeout=DIAL_S)
        try:
            if hasattr(socket, "TCP_USER_TIMEOUT"):  # a machine that vanished acknowledges no beats
                limit_ms = int(1000 * SILENCE_S_MAX)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limit_ms)
            return Wire(connection, self._credential)
        except BaseException:
            connection.close()
            raise


def request_status(wire: Wire) -> Status:
    """Ask a launcher for its state. Raises OSError, or ValueError for an invalid answer."""
    wire.limit(DIAL_S)
    wire.send(kind="where")
    answer = wire.read()
    wire.limit(None)
    if answer.get("kind") != "where" or not isinstance(answer.get("generation"), int):
        raise ValueError("not an answer")
    return Status(
        generation=answer["generation"],
        is_gathering=bool(answer.get("is_gathering")),
        is_over=bool(answer.get("is_over")),
        epoch=answer.get("epoch"),
    )
