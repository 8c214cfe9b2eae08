"""Find the node with the current rendezvous of an elastic run.

The launcher of every node listens (`rendezvous_server.py`), and one leads: the first node at the start, and after the
loss of the leader the next reachable node in order. A launcher that does not lead answers that it has no world.
"""

import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from trainers.errors import TrainerError
from trainers.rendezvous import SILENCE_S_MAX
from trainers.wire import Credential, Wire, read_credential

CONNECT_S_MAX = 120.0
DIAL_S = 5.0
RETRY_S = 0.2
PLACES_VARIABLE, LEADER_VARIABLE, WORLD_VARIABLE = "BROKER_ELASTIC_AT", "BROKER_ELASTIC_LEADER", "BROKER_ELASTIC_WORLD"


@dataclass(frozen=True, kw_only=True)
class Past:
    """The previous world of this worker; generation 0 for a new worker."""

    leader: int = 0  # index of the node of its rendezvous
    generation: int = 0
    members: tuple[str, ...] = ()

    def write(self) -> dict[str, str]:
        """Return environment variables for `read_past`."""
        return {
            LEADER_VARIABLE: str(self.leader),
            WORLD_VARIABLE: json.dumps([self.generation, ",".join(self.members)]),
        }


def read_past(variables: Mapping[str, str]) -> Past:
    """Return the past of a restarted worker; that of a new worker is empty."""
    if WORLD_VARIABLE not in variables:
        return Past()
    generation, members = json.loads(variables[WORLD_VARIABLE])
    return Past(leader=int(variables[LEADER_VARIABLE]), generation=generation, members=tuple(members.split(",")))


@dataclass(frozen=True, kw_only=True)
class Status:
    """The state of the rendezvous at a node."""

    generation: int  # 0: no world has formed there
    is_gathering: bool
    is_over: bool


class Places:
    """The addresses of all possible rendezvous, in the order of nodes."""

    def __init__(self, text: str, past: Past) -> None:
        """Parse a comma-separated list of `host:port`."""
        self._places = [(host, int(port)) for host, _, port in (place.rpartition(":") for place in text.split(","))]
        self._past = past
        credential = read_credential(os.environ)
        if credential is None:
            words = f"`{PLACES_VARIABLE}` is set without `BROKER_GANG_PEM`: start workers with trainers.launch"
            raise TrainerError(words)
        self._credential: Credential = credential

    @property
    def is_one(self) -> bool:
        """Return whether there is one rendezvous only, so that the run ends with its first node."""
        return len(self._places) == 1

    def connect(self) -> tuple[int, Wire]:
        """Connect to the node at which the run continues, or should begin or continue; return its index and connection.

        Raises TrainerError if none is reachable within `CONNECT_S_MAX`.
        """
        end_s = time.monotonic() + CONNECT_S_MAX
        while True:
            found, problem = self._scan()
            if found is not None:
                return found
            if time.monotonic() > end_s:
                raise TrainerError(f"the rendezvous of `--elastic` cannot be reached: {problem}") from problem
            time.sleep(RETRY_S)

    def find_better(self, own: int) -> bool:
        """Return whether a worker that waits at the node `own` should move to another one."""
        for place in self._order():
            with suppress(OSError, ValueError):
                if place != own and self._is_better(place, self._order().index(place) < self._order().index(own)):
                    return True
        return False

    def _is_better(self, place: int, is_before: bool) -> bool:
        wire = self._dial(place)
        try:
            status = ask(wire)
        finally:
            wire.close()
        if status.is_over or (status.generation > self._past.generation and not status.is_gathering):
            return True
        return is_before and status.generation >= max(1, self._past.generation)

    def _order(self) -> Sequence[int]:
        count = len(self._places)
        return [(self._past.leader + step) % count for step in range(count)]

    def _scan(self) -> tuple[tuple[int, Wire] | None, Exception | None]:
        """Query all nodes: prefer a world that has formed, then one that is gathering, then the next leader."""
        candidates: list[tuple[tuple[bool, bool, int], int, Wire]] = []
        problem: Exception | None = None
        for place in self._order():
            try:
                wire = self._dial(place)
                if self.is_one:
                    return (place, wire), None
                status = ask(wire)
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
        connection = socket.create_connection(self._places[place], timeout=DIAL_S)
        try:
            if hasattr(socket, "TCP_USER_TIMEOUT"):  # a machine that vanished acknowledges no beats
                limit_ms = int(1000 * SILENCE_S_MAX)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limit_ms)
            return Wire(connection, self._credential)
        except BaseException:
            connection.close()
            raise


def ask(wire: Wire) -> Status:
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
    )
