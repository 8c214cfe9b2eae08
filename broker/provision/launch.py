"""One launch: the attempt to acquire one gang of nodes at one placement, as a state machine.

A launch begins with its intent: a committed record of the request, with the idempotency token of its create calls.

    REQUESTED ----------> CREATED ----> RUNNING
     |    |                ^   |            |
     |    +--> UNKNOWN ----+   +---------> RELEASING ----> CLOSED
     |            |                                          ^
     +------------+-----> ABANDONED -------------------------+

 1. The cloud creates the whole gang, and every node boots: REQUESTED, CREATED, RUNNING.
 2. The cloud refuses (capacity, quota, login, invalid request): nothing was created. REQUESTED, CLOSED.
 3. A call is throttled or fails without a reason: it is repeated with the same token after a backoff. After
    `CREATE_TRIES_MAX` calls, or once the cloud's retry budget, shared by all jobs, is used up: ABANDONED (see 6).
 4. A call is not answered: UNKNOWN. If lists show the whole gang under its token, CREATED; else the call is repeated
    with the same token, for `UNCLEAR_S_MAX` at most. Then ABANDONED (see 6).
 5. An earlier process left the intent open, so its call may have been answered: the launch begins as UNKNOWN, and its
    call is repeated with the same token.
 6. ABANDONED: no further call is made. Nodes that carry the token are searched for and terminated; only then, the error
    is reported and the intent closed: CLOSED. A refusal that follows UNKNOWN ends here too, because the preceding call
    may have created nodes.
 7. Only part of the gang is created, or a node ends or does not boot in time: CREATED, RELEASING, CLOSED. The error is
    a CapacityError for that zone.
 8. Another command takes the cluster down, which closes the intent. The launch itself terminates nodes that arrive
    later: CREATED, RELEASING, CLOSED, with a UsageError.
 9. Another placement has its gang first: the launch is released, in any state. It waits up to
    `ANSWER_GRACE_S` for a call in progress, because the answer names the nodes, and terminates them: RELEASING, CLOSED.
    If no call was made: REQUESTED, CLOSED.
10. The process ends: the intent remains open. The next process continues with 5, or the collector terminates the nodes.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from broker.clouds.base import Cloud
from broker.errors import CloudError, ThrottledError, UsageError
from broker.frozen import frozen
from broker.provision.zones import find_actual_placement
from broker.types import Cluster, MachineSpec, Node, NodeRequest, Placement
from broker.types.outcomes import Event
from broker.wording import describe_place, make_place

HEDGE = 2
UNCLEAR_MIN = 2  # number of calls that failed without a reason after which the whole region is suspect


class LaunchState(StrEnum):
    """The states of a launch; the module's docstring lists the transitions."""

    REQUESTED = "requested"  # the intent is committed; no unanswered call may have created nodes
    UNKNOWN = "unknown"  # a call, possibly of an earlier process, was not answered: nodes may exist
    CREATED = "created"  # the nodes are known and recorded, and are booting
    RUNNING = "running"  # every node of the gang is running
    ABANDONED = "abandoned"  # no further calls: unreported nodes are searched for and terminated
    RELEASING = "releasing"  # nodes are being terminated: the gang is incomplete, taken down, or not needed
    CLOSED = "closed"  # nothing remains, and the intent is closed


_NEXT = {
    LaunchState.REQUESTED: {
        LaunchState.UNKNOWN,
        LaunchState.CREATED,
        LaunchState.ABANDONED,
        LaunchState.RELEASING,
        LaunchState.CLOSED,
    },
    LaunchState.UNKNOWN: {LaunchState.CREATED, LaunchState.ABANDONED, LaunchState.RELEASING},
    LaunchState.CREATED: {LaunchState.RUNNING, LaunchState.RELEASING},
    LaunchState.RUNNING: {LaunchState.RELEASING},
    LaunchState.ABANDONED: {LaunchState.RELEASING, LaunchState.CLOSED},
    LaunchState.RELEASING: {LaunchState.CLOSED},
    LaunchState.CLOSED: {LaunchState.RELEASING},  # released after it failed: its end is confirmed once more
}


@frozen
class LaunchSpec:
    """The parameters of a launch that do not depend on the placement.

    `hedge`: maximum number of placements requested at once. `check_budget` is called before each call that may
    cost money; an error that it raises ends the search.
    """

    cluster: Cluster
    make_spec: Callable[[Placement], MachineSpec]
    timeout_s: float
    on_event: Callable[[Event], None]
    hedge: int = HEDGE
    check_budget: Callable[[], None] = lambda: None


@dataclass(kw_only=True, eq=False)
class Launch:
    """One launch: its request, its state, and the nodes that it has created so far."""

    cloud: Cloud
    request: NodeRequest
    rank: int  # position in the plan: 0 is best
    state: LaunchState
    begun_s: float
    entered_s: dict[LaunchState, float] = field(init=False)  # each state entered so far -> time of the first entry
    unclear_count: int = 0  # calls that failed without a reason
    error: CloudError | None = None  # reason why it was abandoned
    nodes: tuple[Node, ...] = ()
    on_doubt: Callable[[], None] = lambda: None  # called when the search may need to request another placement
    call: asyncio.Task[Sequence[Node]] | None = None  # the newest create call
    task: asyncio.Task[Sequence[Node]] = field(init=False)  # the whole launch; its result is the running gang by rank

    def __post_init__(self) -> None:
        self.entered_s = {self.state: self.begun_s}

    def enter(self, state: LaunchState, now_s: float) -> None:
        """Change the state. Entering the current state again has no effect."""
        assert state is self.state or state in _NEXT[self.state], f"a launch goes from {self.state} to {state}"
        self.state = state
        self.entered_s.setdefault(state, now_s)

    @property
    def placement(self) -> Placement:
        """The placement that this launch requests."""
        return self.request.placement

    @property
    def actual_placement(self) -> Placement:
        """The zone of its nodes, out of the requested zones; all of those while there are no nodes."""
        return find_actual_placement(self.placement, self.nodes)

    @property
    def was_unanswered(self) -> bool:
        """Whether a call with this token was not answered, even in an earlier process."""
        return LaunchState.UNKNOWN in self.entered_s

    @property
    def created_s(self) -> float | None:
        """Time when the cloud confirmed the create call, in seconds since the epoch; None before."""
        return self.entered_s.get(LaunchState.CREATED)

    @property
    def is_region_suspect(self) -> bool:
        """Whether the whole region may be at fault; a single failed call may be transient, or only affect its zone."""
        return self.unclear_count >= UNCLEAR_MIN or isinstance(self.error, ThrottledError)

    @property
    def is_suspect(self) -> bool:
        """Whether its region is suspect and has not yet created the gang."""
        return self.is_region_suspect and self.created_s is None

    def note_unclear(self) -> None:
        """Count a call without a clear answer, and notify the search."""
        self.unclear_count += 1
        self.on_doubt()

    def abandon(self, error: CloudError, now_s: float) -> None:
        """Stop waiting for a clear answer; a later check determines whether nodes were created."""
        self.enter(LaunchState.ABANDONED, now_s)
        self.error = error
        self.on_doubt()

    def cancel(self) -> Sequence[asyncio.Task[Sequence[Node]]]:
        """Stop as if the process had ended: the intent remains open for the next process."""
        tasks = [self.task] if self.call is None else [self.task, self.call]
        for task in tasks:
            task.cancel()
        return tasks


def make_token(owner: str, cluster: str, attempt: int, placement: Placement, serial: int) -> str:
    """Return the idempotency token of a launch: the same before and after a crash.

    `serial` counts the closed intents of this cluster name. For a token whose nodes have ended, a cloud returns those
    nodes, so a later launch of the same placement needs another token.
    """
    offer = placement.offer
    place = (offer.cloud, offer.region, offer.zone or "", offer.instance_type, placement.is_spot, placement.node_count)
    text = "\0".join(str(part) for part in (owner, cluster, attempt, *place, *placement.other_zones, serial))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def describe(placement: Placement) -> str:
    """Describe a placement in events and errors: count, machine, pricing and place."""
    return describe_place(make_place(placement))


def make_down_error(name: str) -> UsageError:
    """Make the error for a launch whose cluster was taken down in the meantime."""
    return UsageError(f"{name} was terminated while it was starting")


def retrieve_failure(done: asyncio.Task[Sequence[Node]]) -> None:
    """Retrieve the exception of a task, so that asyncio does not log it as never retrieved."""
    if not done.cancelled():
        done.exception()
