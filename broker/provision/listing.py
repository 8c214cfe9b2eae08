"""Share lists of a cloud's nodes between all callers, so that ten thousand jobs make no more calls than one."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from broker.clock import Clock
from broker.clouds.base import Cloud
from broker.errors import AccountError, CloudError, ThrottledError, TransientError, UnknownOutcomeError
from broker.provision.refusals import draw_backoff_s
from broker.types import Node, NodeList, NodeState

RETRYABLE = (ThrottledError, TransientError, UnknownOutcomeError)
TRIES_MAX = 8


Place = tuple[str, str]  # account ("" if unknown) and region


class Listing:
    """One list of our nodes in a cloud, requested at `asked_s`."""

    def __init__(self, cloud: str, listed: NodeList, asked_s: float) -> None:
        self.nodes = listed.nodes
        self.asked_s = asked_s
        self._cloud = cloud
        self._listed = listed

    def find_doubt(self, place: Place) -> CloudError | None:
        """Return why an omitted node of this place may be alive; None if the list covers the place."""
        (account, region), login = place, self._listed.account
        if account and login and account != login:
            return AccountError(
                f"nodes of {self._cloud} account {account} are not visible to a login for account {login}",
                hints=(f"log in to {account} (`broker check {self._cloud}` shows the current login) and try again",),
            )
        return self._listed.unseen.get(region)

    @cached_property
    def by_id(self) -> dict[str, Node]:
        """The listed nodes by ID."""
        return {node.id: node for node in self.nodes}

    @cached_property
    def by_token(self) -> dict[str, list[Node]]:
        """The listed nodes by the token of the request that created them."""
        nodes: dict[str, list[Node]] = {}
        for node in self.nodes:
            nodes.setdefault(node.token, []).append(node)
        return nodes


@dataclass
class _Shared:
    newest: Listing | None = None
    running: asyncio.Task[Listing] | None = None
    following: asyncio.Task[Listing] | None = field(default=None)


class Lister:
    """List each cloud's nodes of one owner. Callers that arrive while a list is in progress share the next one."""

    def __init__(self, owner: str, *, clock: Clock) -> None:
        self._owner = owner
        self._clock = clock
        self._shared: dict[str, _Shared] = {}

    async def list(self, cloud: Cloud, *, age_s_max: float = 0.0, tries_max: int = TRIES_MAX) -> Listing:
        """Return a list requested after the call, or at most `age_s_max` ago. Retries throttled and failed calls.

        Raises the CloudError of the last of `tries_max` tries.
        """
        newest = self._shared.setdefault(cloud.name, _Shared()).newest
        # A list from the future counts as expired: the clock was set back, and the list would hide losses until then.
        if newest is not None and age_s_max > 0 and 0.0 <= self._clock.now_s() - newest.asked_s <= age_s_max:
            return newest
        for tries in range(tries_max - 1):
            try:
                return await self._share(cloud)
            except RETRYABLE:
                await self._clock.sleep(draw_backoff_s(tries))
        return await self._share(cloud)

    async def _share(self, cloud: Cloud) -> Listing:
        shared = self._shared[cloud.name]
        if shared.following is not None and shared.following.done():
            shared.following = None  # it was cancelled before it began, with its event loop
        if shared.following is None:
            if shared.running is None or shared.running.done():
                shared.running = _begin(self._query(cloud, after=None))
                return await asyncio.shield(shared.running)
            # The list in progress may predate the caller's last action; only the next one counts.
            shared.following = _begin(self._query(cloud, after=shared.running))
        return await asyncio.shield(shared.following)

    async def _query(self, cloud: Cloud, after: asyncio.Task[Listing] | None) -> Listing:
        if after is not None:
            await asyncio.wait([after])
            shared = self._shared[cloud.name]
            shared.running, shared.following = asyncio.current_task(), None  # later callers need another list
        asked_s = self._clock.now_s()
        listing = Listing(cloud.name, await cloud.list_nodes(self._owner), asked_s)
        self._shared[cloud.name].newest = listing
        return listing


def _begin(work: Coroutine[Any, Any, Listing]) -> asyncio.Task[Listing]:
    """Start a task and retrieve its exception, so that asyncio does not log one that no caller awaits."""
    task = asyncio.ensure_future(work)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return task


def was_restarted(before: Node, node: Node) -> bool:
    """Return whether the node has started since it was stopped; an outdated list does not show a later start."""
    is_up = node.state in (NodeState.PENDING, NodeState.RUNNING)
    return (
        is_up and before.state is NodeState.STOPPED and before.ended_s is not None and node.created_s > before.ended_s
    )
