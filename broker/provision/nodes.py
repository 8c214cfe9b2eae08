"""Poll nodes until all of them are running, or until all are confirmed gone. Every wait has a limit."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from broker.clock import Clock, Stopwatch
from broker.clouds.base import Cloud, ReadsSites
from broker.errors import AuthError, CloudError, TransientError
from broker.provision.listing import RETRYABLE, Lister, Listing, Place
from broker.types import Node, NodeEnd, NodeState

POLL_S = 0.1  # first wait between two polls; grows by a fifth each time
POLL_S_MAX = 5.0
WAIT_POLL_S_MAX = 2.0  # while nodes boot, each second costs money and time; all searches share one list
TERMINATE_AGAIN_S = 15.0  # repeat a terminate call that the cloud may have accepted and forgotten
GONE_S_MAX = 900.0
RESUMED_S_MIN = 60.0
# Both are required: time alone failed in simulations with one slow call between two empty lists.
MISSES_MIN = 4
MISSING_S_MIN = 120.0
GAP_S_MAX = 60.0  # maximum time counted between two lists; a throttled list is retried for that long
# in multiples of `settle_s`: time for which lists must lack a node whose create call was never answered
UNSEEN_SETTLES = 6.0


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
    """Terminate nodes and poll until the cloud lists each as TERMINATED; return them as last seen.

    Nodes with known IDs are terminated before the first list is requested, because lists may fail. A node that lists
    omit counts as gone only if a terminate call for it was accepted and it remains missing (`Absence`), in lists that
    cover its account and region. If fewer than `expected_count` nodes were ever listed, a create call may still take
    effect: lists of all `places` must then omit them for `UNSEEN_SETTLES * settle_s`, where the time between two such
    lists counts up to `settle_s`.

    Raises AccountError or AuthError if this login cannot list one of the places, or if the user's file no longer names
    it, TransientError at the limit, and the CloudError of a list that fails.
    """
    waited = Stopwatch(math.inf)  # a clock that is set back adds nothing, and does not extend the limit
    ending = _Ending(cloud, known, clock)
    absence = Absence(cloud.settle_s)
    covered = Stopwatch(cloud.settle_s)  # advances while lists cover all places: a missing region is not evidence
    look_s = POLL_S
    looks = 0
    while waited.observe(clock.now_s()) < GONE_S_MAX:
        await ending.terminate_due()
        listing = await lister.list(cloud)
        now_s = clock.now_s()
        present = ending.note([node for node in listing.nodes if is_ours(node) or node.id in ending.seen])
        live = ending.list_live()
        is_whole = len(ending.seen) >= expected_count
        doubt = find_doubt(cloud, listing, places)
        if doubt is None:
            looks += 1
            is_gone = [
                absence.note(node.id, is_listed=node.id in present, now_s=now_s) or _was_missing(node, present)
                for node in live
            ]
            has_settled = covered.observe(now_s) >= UNSEEN_SETTLES * cloud.settle_s and looks >= MISSES_MIN
            if all(is_gone) and ending.has_accepted(live) and (is_whole or has_settled):
                return ending.list_gone(now_s)
        elif not live and is_whole:
            return ending.list_gone(now_s)
        elif isinstance(doubt, AuthError):
            await ending.terminate_due()  # nodes that appeared first in this list
            raise doubt
        await clock.sleep(look_s)
        look_s = min(POLL_S_MAX, look_s * 1.2)
    raise TransientError(
        f"{cloud.name} did not confirm the termination of {len(ending.seen)} nodes within {GONE_S_MAX:g} s",
        hints=("run `broker gc` to try again",),
    )


def find_doubt(
    cloud: Cloud, listing: Listing, places: Collection[Place], nodes: Sequence[Node] = ()
) -> CloudError | None:
    """Return why an omitted node of these places, or one of `nodes`, may be alive.

    Login errors precede temporary ones.
    """
    doubts = [doubt for place in places if (doubt := listing.find_doubt(place))]
    if isinstance(cloud, ReadsSites):
        removals = [cloud.find_removal(region) for _, region in places]
        removals += [cloud.find_removal(node.region, node) for node in nodes]
        doubts += [removal for removal in removals if removal]
    return min(doubts, key=lambda doubt: not isinstance(doubt, AuthError), default=None)


class _Ending:
    """Nodes being terminated: those seen so far, and when a terminate call was accepted for each."""

    def __init__(self, cloud: Cloud, known: Sequence[Node], clock: Clock) -> None:
        self._cloud = cloud
        self._clock = clock
        self._accepted_s: dict[str, float] = {}
        self.seen: dict[str, Node] = {node.id: node for node in known}

    def note(self, listed: Sequence[Node]) -> Collection[str]:
        """Add the nodes of a list; return their IDs."""
        self.seen.update((node.id, node) for node in listed)
        return {node.id for node in listed}

    def list_live(self) -> list[Node]:
        """Return all nodes that no list has shown as TERMINATED; a node that was only missing may still be running."""
        return [node for node in self.seen.values() if node.state is not NodeState.TERMINATED or is_missing(node)]

    def has_accepted(self, nodes: Sequence[Node]) -> bool:
        """Return whether the cloud has accepted a terminate call for each of them."""
        return all(node.id in self._accepted_s for node in nodes)

    def list_gone(self, now_s: float) -> Sequence[Node]:
        return [_mark_gone(node, now_s) for node in self.seen.values()]

    async def terminate_due(self) -> None:
        """Terminate all live nodes without a recent call; a temporary error is retried at the next poll."""
        now_s = self._clock.now_s()
        due = [
            node
            for node in self.list_live()
            if not 0.0
            <= now_s - self._accepted_s.get(node.id, -math.inf)
            < TERMINATE_AGAIN_S  # also after a clock jump
        ]
        if not due:
            return
        try:
            await self._cloud.terminate_nodes(due)
        except RETRYABLE:
            return
        self._accepted_s.update((node.id, self._clock.now_s()) for node in due)


def is_missing(node: Node) -> bool:
    """Return whether the node counts as TERMINATED only because lists have omitted it."""
    return node.state is NodeState.TERMINATED and node.reason == NodeEnd.MISSING


def _was_missing(node: Node, present: Collection[str]) -> bool:
    """Return whether the node was already considered gone and is still missing."""
    return is_missing(node) and node.id not in present


class Absence:
    """Track nodes that lists omit: considered gone after `MISSES_MIN` lists and `MISSING_S_MIN` seconds.

    One absence is not evidence: lists may be empty or incomplete for a while. If lists never lag, two in a row suffice.
    """

    def __init__(self, settle_s: float) -> None:
        self._misses_min, self._missing_s_min = (MISSES_MIN, MISSING_S_MIN) if settle_s else (2, 0.0)
        self._stopwatch = Stopwatch(GAP_S_MAX)
        # node ID -> number of lists without it, and the time of the first
        self._misses: dict[str, tuple[int, float]] = {}

    def note(self, node_id: str, *, is_listed: bool, now_s: float) -> bool:
        """Record one list; return whether the node is considered gone."""
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
    """Return the remaining part of `timeout_s` for nodes to start running, counted from their creation.

    An earlier process may already have waited for them: otherwise, a repeatedly restarted daemon would pay for nodes
    that never boot. The result is at least `RESUMED_S_MIN`, so that lists can show the current state.
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
    """Return the whole gang by rank; None if a node ended while booting, or after `timeout_s`.

    Only the nodes in `created` count. Others may carry the token, too: those of an earlier zone of the same call, which
    the cloud refused and did not remove completely. They belong to no record, so the collector terminates them.
    """
    nodes = {node.id: node for node in created}
    waited = Stopwatch(math.inf)  # nodes that do not boot cost money: a clock that is set back extends no limit
    look_s = POLL_S
    while True:
        waited_s = waited.observe(clock.now_s())
        if any(node.state is NodeState.TERMINATED for node in nodes.values()):
            return None
        running = [node for node in nodes.values() if node.state is NodeState.RUNNING]
        if len(running) == node_count:
            return sorted(running, key=lambda node: node.rank)
        if waited_s >= timeout_s:
            return None
        await clock.sleep(look_s)
        look_s = min(WAIT_POLL_S_MAX, look_s * 1.2)
        try:
            listing = await lister.list(cloud, tries_max=1)
        except CloudError:
            continue  # even for an expired login: the nodes cost money, and the caller terminates them at the limit
        before = dict(nodes)
        nodes.update((node.id, node) for node in listing.by_token.get(token, ()) if node.id in nodes)
        if nodes != before:
            on_look(list(nodes.values()))
