"""Looking at nodes until they are what is wanted: all running, or all confirmed gone. Every wait has a limit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from broker.clock import Clock
from broker.clouds.base import Cloud
from broker.errors import TransientError
from broker.provision.listing import RETRYABLE, Lister
from broker.types import Node, NodeState

LOOK_S = 0.1  # first wait between two looks; grows by half each time
LOOK_S_MAX = 5.0
TERMINATE_AGAIN_S = 15.0  # a terminate that was accepted and forgotten is asked again
GONE_S_MAX = 900.0


async def confirm_gone(
    cloud: Cloud,
    lister: Lister,
    *,
    known: Sequence[Node],
    is_ours: Callable[[Node], bool],
    is_uncertain: bool,
    clock: Clock,
) -> Sequence[Node]:
    """Terminate, and look until the cloud says TERMINATED of every node; returns them as last seen.

    A node missing from the list counts as gone only after `settle_s` and two looks. `is_uncertain`: a create may
    still be on its way, so the list must have been empty of ours for that long too. Raises TransientError at its limit.
    """
    start_s = clock.now_s()
    seen: dict[str, Node] = {node.id: node for node in known}
    asked_s: dict[str, float] = {}
    look_s = LOOK_S
    looks = 0
    while clock.now_s() - start_s < GONE_S_MAX:
        listing = await lister.list(cloud)
        listed = [node for node in listing.nodes if is_ours(node) or node.id in seen]
        looks += 1
        seen.update((node.id, node) for node in listed)
        present = {node.id for node in listed}
        live = [node for node in seen.values() if node.state is not NodeState.TERMINATED]
        is_settled = looks >= 2 and clock.now_s() - start_s >= cloud.settle_s
        missing_only = all(node.id not in present for node in live)
        if missing_only and (is_settled or not (live or is_uncertain)):
            return [_mark_gone(node, clock.now_s()) for node in seen.values()]
        due = [
            node.id for node in live if clock.now_s() - asked_s.get(node.id, -TERMINATE_AGAIN_S) >= TERMINATE_AGAIN_S
        ]
        if due and await _terminate(cloud, due):
            asked_s.update((node_id, clock.now_s()) for node_id in due)
        await clock.sleep(look_s)
        look_s = min(LOOK_S_MAX, look_s * 1.2)
    raise TransientError(
        f"{cloud.name} has not confirmed the end of {len(seen)} nodes within {GONE_S_MAX:g} s",
        hints=("Run `broker gc` to try again.",),
    )


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
        look_s = min(LOOK_S_MAX, look_s * 1.2)
        try:
            listing = await lister.list(cloud, tries_max=1)
        except RETRYABLE:
            continue
        before = dict(nodes)
        nodes.update((node.id, node) for node in listing.by_token.get(token, ()))
        if nodes != before:
            on_look(list(nodes.values()))
