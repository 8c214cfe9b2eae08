"""Looking at nodes until they are what is wanted: all running, or all confirmed gone. Every wait has a limit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from broker.clock import Clock, Stopwatch
from broker.clouds.base import Cloud
from broker.errors import TransientError
from broker.provision.listing import RETRYABLE, Lister
from broker.types import Node, NodeState

LOOK_S = 0.1  # first wait between two looks; grows by half each time
LOOK_S_MAX = 5.0
WAIT_LOOK_S_MAX = 2.0  # while nodes start, each second is paid for and waited for; all searches share one list
TERMINATE_AGAIN_S = 15.0  # a terminate that was accepted and forgotten is asked again
GONE_S_MAX = 900.0
# Both together, reliability notes 5.4: time alone failed where one slow call lay between two blank answers.
MISSES_MIN = 4
MISSING_S_MIN = 120.0
GAP_S_MAX = 60.0  # between two lists; a throttled one is asked for as long
UNSEEN_SETTLES = 4.0  # so many times `settle_s` without a node whose create was never answered


async def confirm_gone(
    cloud: Cloud,
    lister: Lister,
    *,
    known: Sequence[Node],
    is_ours: Callable[[Node], bool],
    expected_count: int,
    clock: Clock,
) -> Sequence[Node]:
    """Terminate, and look until the cloud says TERMINATED of every node; returns them as last seen.

    A node that lists leave out is only believed gone when it is missing for long. Where fewer than `expected_count`
    were ever seen, a create may still be on its way: lists must have stayed without them for a while. Raises
    TransientError at its limit.
    """
    start_s = clock.now_s()
    seen: dict[str, Node] = {node.id: node for node in known}
    asked_s: dict[str, float] = {}
    absence = Absence(cloud.settle_s)
    look_s = LOOK_S
    looks = 0
    while clock.now_s() - start_s < GONE_S_MAX:
        listing = await lister.list(cloud)
        listed = [node for node in listing.nodes if is_ours(node) or node.id in seen]
        looks += 1
        now_s = clock.now_s()
        seen.update((node.id, node) for node in listed)
        present = {node.id for node in listed}
        live = [node for node in seen.values() if node.state is not NodeState.TERMINATED]
        is_gone = [absence.note(node.id, is_listed=node.id in present, now_s=now_s) for node in live]
        is_whole = len(seen) >= expected_count
        if all(is_gone) and (is_whole or (looks >= MISSES_MIN and now_s - start_s >= UNSEEN_SETTLES * cloud.settle_s)):
            return [_mark_gone(node, now_s) for node in seen.values()]
        due = [node.id for node in live if now_s - asked_s.get(node.id, -TERMINATE_AGAIN_S) >= TERMINATE_AGAIN_S]
        if due and await _terminate(cloud, due):
            asked_s.update((node_id, clock.now_s()) for node_id in due)
        await clock.sleep(look_s)
        look_s = min(LOOK_S_MAX, look_s * 1.2)
    raise TransientError(
        f"{cloud.name} has not confirmed the end of {len(seen)} nodes within {GONE_S_MAX:g} s",
        hints=("Run `broker gc` to try again.",),
    )


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
        seen_s = self._stopwatch.look(now_s)
        if is_listed:
            self._misses.pop(node_id, None)
            return False
        count, since_s = self._misses.get(node_id, (0, seen_s))
        self._misses[node_id] = (count + 1, since_s)
        return count + 1 >= self._misses_min and seen_s - since_s >= self._missing_s_min


async def _terminate(cloud: Cloud, ids: Sequence[str]) -> bool:
    """Whether the cloud accepted it; where not, the next look asks again."""
    try:
        await cloud.terminate_nodes(ids)
    except RETRYABLE:
        return False
    return True


def _mark_gone(node: Node, now_s: float) -> Node:
    if node.state is NodeState.TERMINATED and node.ended_s is not None:
        return node
    return replace(node, state=NodeState.TERMINATED, ended_s=node.ended_s or now_s, reason=node.reason or "missing")


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
        except RETRYABLE:
            continue
        before = dict(nodes)
        nodes.update((node.id, node) for node in listing.by_token.get(token, ()))
        if nodes != before:
            on_look(list(nodes.values()))
