"""Looking at nodes until they are what is wanted: all running, or all confirmed gone. Every wait has a limit."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from broker.clock import Clock, Stopwatch
from broker.clouds.base import Cloud
from broker.errors import AuthError, CloudError, TransientError
from broker.provision.listing import RETRYABLE, Lister, Listing, Place
from broker.types import Node, NodeEnd, NodeState

LOOK_S = 0.1  # first wait between two looks; grows by half each time
LOOK_S_MAX = 5.0
WAIT_LOOK_S_MAX = 2.0  # while nodes start, each second is paid for and waited for; all searches share one list
TERMINATE_AGAIN_S = 15.0  # a terminate that was accepted and forgotten is asked again
GONE_S_MAX = 900.0
RESUMED_S_MIN = 60.0
# Both together, reliability notes 5.4: time alone failed where one slow call lay between two blank answers.
MISSES_MIN = 4
MISSING_S_MIN = 120.0
GAP_S_MAX = 60.0  # between two lists; a throttled one is asked for as long
UNSEEN_SETTLES = 6.0  # in multiples of `settle_s`: how long lists must lack a node whose create was never answered


async def confirm_gone(
    cloud: Cloud,
    lister: Lister,
    *,
    known: Sequence[Node],
    is_ours: Callable[[Node], bool],
    expected_count: int,
    places: Collection[Place],
    clock: Clock,
) -> Sequence[Node]:
    """Terminate, and look until the cloud says TERMINATED of every node; returns them as last seen.

    Nodes whose ids are known are terminated before any list is asked for: lists may be what fails. A node that lists
    leave out is only believed gone when a terminate call for it was accepted and it stays missing for long, in lists
    that cover its account and region. Where fewer than `expected_count` were ever seen, a create may still be on its
    way: lists of all `places` must have stayed without them for a while, not counting the time between two such lists
    beyond `settle_s`.

    Raises AccountError or AuthError where this login cannot see one of the places, TransientError at its limit, and
    the CloudError of a list that fails.
    """
    start_s = clock.now_s()
    ending = _Ending(cloud, known, clock)
    absence = Absence(cloud.settle_s)
    covered = Stopwatch(cloud.settle_s)  # counts while lists cover all places: a region's silence is not evidence
    look_s = LOOK_S
    looks = 0
    while clock.now_s() - start_s < GONE_S_MAX:
        await ending.terminate_due()
        listing = await lister.list(cloud)
        now_s = clock.now_s()
        present = ending.note([node for node in listing.nodes if is_ours(node) or node.id in ending.seen])
        live = ending.list_live()
        is_whole = len(ending.seen) >= expected_count
        doubt = find_doubt(listing, places)
        if doubt is None:
            looks += 1
            is_gone = [
                absence.note(node.id, is_listed=node.id in present, now_s=now_s) or _was_missing(node, present)
                for node in live
            ]
            has_settled = covered.observe(now_s) >= UNSEEN_SETTLES * cloud.settle_s and looks >= MISSES_MIN
            if all(is_gone) and ending.has_asked(live) and (is_whole or has_settled):
                return ending.list_gone(now_s)
        elif not live and is_whole:
            return ending.list_gone(now_s)
        elif isinstance(doubt, AuthError):
            await ending.terminate_due()  # those that this list has shown
            raise doubt
        await clock.sleep(look_s)
        look_s = min(LOOK_S_MAX, look_s * 1.2)
    raise TransientError(
        f"{cloud.name} has not confirmed the end of {len(ending.seen)} nodes within {GONE_S_MAX:g} s",
        hints=("Run `broker gc` to try again.",),
    )


def find_doubt(listing: Listing, places: Collection[Place]) -> CloudError | None:
    """Why a node of one of these places may live though the list leaves it out; a refusal before what may pass."""
    doubts = [doubt for place in places if (doubt := listing.find_doubt(place))]
    return min(doubts, key=lambda doubt: not isinstance(doubt, AuthError), default=None)


class _Ending:
    """Nodes on their way out: which were seen, and for which a terminate call was accepted."""

    def __init__(self, cloud: Cloud, known: Sequence[Node], clock: Clock) -> None:
        self._cloud = cloud
        self._clock = clock
        self._asked_s: dict[str, float] = {}
        self.seen: dict[str, Node] = {node.id: node for node in known}

    def note(self, listed: Sequence[Node]) -> Collection[str]:
        """Take over what a list shows; returns the ids in it."""
        self.seen.update((node.id, node) for node in listed)
        return {node.id for node in listed}

    def list_live(self) -> list[Node]:
        """All that no list has shown TERMINATED; one that was only missing may run where lists do not reach."""
        return [node for node in self.seen.values() if node.state is not NodeState.TERMINATED or is_missing(node)]

    def has_asked(self, nodes: Sequence[Node]) -> bool:
        """Whether the cloud has accepted to terminate each of them."""
        return all(node.id in self._asked_s for node in nodes)

    def list_gone(self, now_s: float) -> Sequence[Node]:
        return [_mark_gone(node, now_s) for node in self.seen.values()]

    async def terminate_due(self) -> None:
        """Ask for all that were not asked for lately; a refusal that may pass is asked again at the next look."""
        now_s = self._clock.now_s()
        due = [
            node
            for node in self.list_live()
            if not 0.0 <= now_s - self._asked_s.get(node.id, -math.inf) < TERMINATE_AGAIN_S  # also after a clock jump
        ]
        if not due:
            return
        try:
            await self._cloud.terminate_nodes(due)
        except RETRYABLE:
            return
        self._asked_s.update((node.id, self._clock.now_s()) for node in due)


def is_missing(node: Node) -> bool:
    """Whether it counts as TERMINATED only because lists have left it out."""
    return node.state is NodeState.TERMINATED and node.reason == NodeEnd.MISSING


def _was_missing(node: Node, present: Collection[str]) -> bool:
    """It has been missing for long before, and still is."""
    return is_missing(node) and node.id not in present


class Absence:
    """Which nodes have been missing from lists so often and so long that they are believed gone.

    Absence is not evidence: a list may be blank or short for a while. Where lists never lag, two in a row are enough.
    """

    def __init__(self, settle_s: float) -> None:
        self._misses_min, self._missing_s_min = (MISSES_MIN, MISSING_S_MIN) if settle_s else (2, 0.0)
        self._stopwatch = Stopwatch(GAP_S_MAX)
        self._misses: dict[str, tuple[int, float]] = {}  # node id -> lists without it, since when

    def note(self, node_id: str, *, is_listed: bool, now_s: float) -> bool:
        """Whether it is believed gone by now."""
        seen_s = self._stopwatch.observe(now_s)
        if is_listed:
            self._misses.pop(node_id, None)
            return False
        count, since_s = self._misses.get(node_id, (0, seen_s))
        self._misses[node_id] = (count + 1, since_s)
        return count + 1 >= self._misses_min and seen_s - since_s >= self._missing_s_min


def _mark_gone(node: Node, now_s: float) -> Node:
    if node.state is NodeState.TERMINATED and node.ended_s is not None:
        return node
    return replace(
        node, state=NodeState.TERMINATED, ended_s=node.ended_s or now_s, reason=node.reason or NodeEnd.MISSING
    )


def measure_left_s(nodes: Sequence[Node], timeout_s: float, clock: Clock) -> float:
    """Return how much of `timeout_s` is left for nodes to run, counted from when they were created.

    An earlier process has waited for them already: a daemon that is restarted again and again would otherwise pay for
    nodes that never boot. Never less than lists need to show what became of them.
    """
    age_s = clock.now_s() - max(node.created_s for node in nodes)
    return min(timeout_s, max(timeout_s - age_s, RESUMED_S_MIN))


async def wait_running(
    cloud: Cloud,
    lister: Lister,
    *,
    token: str,
    created: Sequence[Node],
    node_count: int,
    timeout_s: float,
    clock: Clock,
    on_look: Callable[[Sequence[Node]], None],
) -> Sequence[Node] | None:
    """The whole gang by rank, or None: a node died while starting, or the time was up."""
    nodes = {node.id: node for node in created}
    start_s = clock.now_s()
    look_s = LOOK_S
    while True:
        if any(node.state is NodeState.TERMINATED for node in nodes.values()):
            return None
        running = [node for node in nodes.values() if node.state is NodeState.RUNNING]
        if len(running) == node_count:
            return sorted(running, key=lambda node: node.rank)
        if clock.now_s() - start_s >= timeout_s:
            return None
        await clock.sleep(look_s)
        look_s = min(WAIT_LOOK_S_MAX, look_s * 1.2)
        try:
            listing = await lister.list(cloud, tries_max=1)
        except CloudError:
            continue  # even an expired login is no reason to forget nodes that cost money: at the limit they are ended
        before = dict(nodes)
        nodes.update((node.id, node) for node in listing.by_token.get(token, ()))
        if nodes != before:
            on_look(list(nodes.values()))
