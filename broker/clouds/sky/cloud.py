"""One cloud behind SkyPilot: four verbs, and stopping. A gang is one SkyPilot cluster, terminated as a whole."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from broker.clock import Clock
from broker.clouds.sky.engine import Engine, WorkerEngine
from broker.clouds.sky.errors import CHECK_HINT, ClusterNotFoundError
from broker.clouds.sky.gangs import (
    FAILED,
    NAME,
    ServerState,
    SkyGang,
    adopt,
    is_broken,
    is_elsewhere,
    judge,
    list_nodes_of,
    make_gang,
    make_name,
    make_prefix,
    read_name,
)
from broker.clouds.sky.state_file import SkyStateFile
from broker.clouds.sky.task_spec import make_task
from broker.errors import (
    AccountError,
    AuthError,
    CapacityError,
    CloudError,
    InvalidRequestError,
    TransientError,
    UnknownOutcomeError,
)
from broker.sites.backends import find_other_backend
from broker.types import Node, NodeList, NodeRequest, NodeState

log = logging.getLogger(__name__)

VERDICT_S = 45.0  # most refusals arrive within this; a launch takes minutes and is not awaited
POLL_S, POLL_S_MAX = 0.5, 5.0
GONE_S = 120.0  # for the remains of a failed launch
REFRESH_EVERY_S = 15.0


class SkyCloud:
    """Cloud, CanStop, CanPrepare and ReadsSites.

    The token is the cluster's name, so a repeated request finds the same cluster.
    """

    settle_s: ClassVar[float] = 10.0
    programs: ClassVar[tuple[str, ...]] = ("ssh",)
    name: str  # one class serves all clouds behind SkyPilot

    def __init__(self, name: str, *, engine: Engine, state_file: SkyStateFile, clock: Clock) -> None:
        self.name = name
        self._engine = engine
        self._state_file = state_file
        self._clock = clock
        self._refreshed_s = float("-inf")

    def prepare(self) -> None:
        """Start the worker, whose import takes seconds; return at once."""
        if isinstance(self._engine, WorkerEngine):
            self._engine.start()

    async def check(self) -> None:
        """Ask SkyPilot whether it has enabled this cloud, and record the answer. Raises AuthError."""
        enabled = await self._engine.list_enabled()
        self._state_file.note_enabled(enabled)
        if self.name not in enabled:
            raise AuthError(f"SkyPilot has not enabled {self.name}", hints=(f"run `sky check {self.name}`",))

    async def create_nodes(self, request: NodeRequest) -> Sequence[Node]:
        """Wait `VERDICT_S` for a refusal; machines still starting by then are PENDING."""
        task = make_task(request)
        name = make_name(request)
        gang = self._state_file.read().get(name)
        if gang is not None and (gang.cluster, gang.attempt) != (request.cluster, request.attempt):
            raise InvalidRequestError(f"token {request.token} was used for another request")
        if gang is None:
            gang = make_gang(request, task=task, now_s=self._clock.now_s())
        if gang.ended_s is None:
            gang = await self._launch(gang)
        try:
            refusal, nodes = await self._await_nodes(gang)
        except CloudError as error:  # even a refusal, as of a login that has just expired: the launch was accepted
            raise UnknownOutcomeError(f"the launch of `{name}` cannot be followed: {error.message}") from error
        if refusal is not None:
            raise refusal
        return nodes

    async def _await_nodes(self, gang: SkyGang) -> tuple[CloudError | None, Sequence[Node]]:
        """Return the refusal of an accepted launch, or its nodes."""
        observed, gang, state = await self._wait_for_verdict(gang)
        is_refused = observed.read_status(gang.request_id) in FAILED and not gang.is_down_asked and not gang.was_up
        if is_refused and (state is NodeState.TERMINATED or is_broken(gang, observed)):
            return await self._read_refusal(gang, observed), ()
        return None, list_nodes_of(gang, state or NodeState.PENDING)

    async def list_nodes(self, owner: str) -> NodeList:
        """List nodes, and take down the remains of failed launches.

        The regions of gangs that were launched through another API server, or as another user, are unseen.
        """
        recorded = {
            name: gang
            for name, gang in self._state_file.read().items()
            if (gang.owner, gang.cloud) == (owner, self.name)
        }
        waiting = [
            gang.request_id for gang in recorded.values() if gang.request_id and not gang.was_up and not gang.ended_s
        ]
        observed = await self._engine.fetch_state(make_prefix(owner), waiting)
        unseen: dict[str, CloudError] = {
            gang.region: make_account_error(gang, observed)
            for gang in recorded.values()
            if is_elsewhere(gang, observed)
        }
        here = {name: gang for name, gang in recorded.items() if not is_elsewhere(gang, observed)}
        gangs = {**self._adopt_strangers(owner, observed), **here}
        nodes: list[Node] = []
        changed: list[SkyGang] = []
        broken: list[str] = []
        for before in gangs.values():
            gang, state = judge(before, observed, now_s=self._clock.now_s())
            gang, state = await self._reach(gang, state, observed)
            if state is None:
                continue
            if gang != recorded.get(gang.name):
                changed.append(gang)
            if is_broken(gang, observed):
                broken.append(gang.name)
            nodes.extend(list_nodes_of(gang, state))
        self._state_file.note(changed, now_s=self._clock.now_s())
        await self._tidy(broken, [node for node in nodes if node.is_spot and node.state is NodeState.RUNNING])
        return NodeList(nodes=tuple(nodes), unseen=unseen)

    async def _tidy(self, broken: Sequence[str], spot: Sequence[Node]) -> None:
        """Take down the remains of failed launches, and refresh spot clusters.

        The next list repeats what fails: one cluster that cannot be taken down must not hide all others.
        """
        try:
            for name in broken:
                await self._engine.end(name)
            await self._refresh(spot)
        except CloudError as error:
            log.warning("SkyPilot: %s", error.message)

    async def terminate_nodes(self, nodes: Sequence[Node]) -> None:
        """Terminate whole gangs: SkyPilot cannot terminate a part of a cluster."""
        others = [other for node in nodes if (other := find_other_backend(node, is_native=False))]
        failures: list[CloudError] = list(others)
        for name in self._list_names([node.id for node in nodes if not find_other_backend(node, is_native=False)]):
            gang = self._state_file.read().get(name)
            if gang is not None and gang.ended_s is None:
                self._state_file.note([replace(gang, is_down_asked=True)], now_s=self._clock.now_s())
            try:
                await self._engine.end(name)
            except ClusterNotFoundError:
                continue
            except CloudError as error:
                failures.append(error)
        if failures:
            raise failures[0]

    def find_removal(self, region: str, node: Node | None = None) -> CloudError | None:
        """Return an AuthError for a node that was launched natively, before the cloud's file was removed."""
        return None if node is None else find_other_backend(node, is_native=False)

    async def stop_nodes(self, ids: Sequence[str]) -> None:
        """Stop whole clusters: SkyPilot cannot stop single nodes. Already stopped is success."""
        for name in self._list_names(ids):
            seen = (await self._engine.fetch_state(name, [])).find(name)
            if seen is not None and seen.status != "STOPPED":
                await self._engine.stop(name)

    async def start_nodes(self, ids: Sequence[str]) -> None:
        """Launch again, which also starts the keeper.

        SkyPilot's own start would leave nodes that cannot end themselves.
        """
        for name in self._list_names(ids):
            gang = self._state_file.read().get(name)
            observed = await self._engine.fetch_state(name, [])
            seen = observed.find(name)
            if seen is None:
                raise InvalidRequestError(f"SkyPilot has no cluster `{name}` to start")
            if seen.status != "STOPPED" or observed.is_launching(name):
                continue
            if gang is None or not gang.task:
                raise InvalidRequestError(
                    f"this state folder does not record how `{name}` was launched", hints=(f"run `sky start {name}`",)
                )
            request_id = await self._engine.launch(name, gang.task)
            self._state_file.note([replace(gang, request_id=request_id)], now_s=self._clock.now_s())

    def _list_names(self, ids: Sequence[str]) -> Sequence[str]:
        return list(dict.fromkeys(read_name(node_id) for node_id in ids))

    async def _launch(self, gang: SkyGang) -> SkyGang:
        """Launch once: adopt a cluster that SkyPilot already has or is creating."""
        observed = await self._engine.fetch_state(gang.name, [gang.request_id] if gang.request_id else [])
        if is_elsewhere(gang, observed):
            raise make_account_error(gang, observed)
        gang = replace(gang, account=observed.account or gang.account)
        if observed.find(gang.name) is None and not observed.is_launching(gang.name) and not gang.was_seen:
            if observed.read_status(gang.request_id) in FAILED:
                return gang
            self._state_file.note([gang], now_s=self._clock.now_s())
            gang = replace(gang, request_id=await self._engine.launch(gang.name, gang.task))
        elif not gang.request_id:
            request_id = next((request.id for request in observed.requests if request.cluster == gang.name), "")
            gang = replace(gang, request_id=request_id)
        self._state_file.note([gang], now_s=self._clock.now_s())
        return gang

    async def _wait_for_verdict(self, gang: SkyGang) -> tuple[ServerState, SkyGang, NodeState | None]:
        start_s, look_s = self._clock.now_s(), POLL_S
        while True:
            observed = await self._engine.fetch_state(gang.name, [gang.request_id] if gang.request_id else [])
            gang, state = judge(gang, observed, now_s=self._clock.now_s())
            gang, state = await self._reach(gang, state, observed)
            is_late = self._clock.now_s() - start_s >= VERDICT_S
            if state not in (None, NodeState.PENDING) or is_broken(gang, observed) or is_late:
                self._state_file.note([gang], now_s=self._clock.now_s())
                return observed, gang, state
            await self._clock.sleep(look_s)
            look_s = min(POLL_S_MAX, look_s * 1.5)

    async def _reach(
        self, gang: SkyGang, state: NodeState | None, observed: ServerState
    ) -> tuple[SkyGang, NodeState | None]:
        """Count a gang that is up as RUNNING once its ssh addresses are known, and again after each start elsewhere."""
        seen = observed.find(gang.name)
        if state is not NodeState.RUNNING or seen is None or seen.launched_at == gang.reached_at:
            return gang, state
        path = await self._engine.write_ssh(gang.name)
        if path is None:
            return gang, NodeState.PENDING
        self._state_file.keep_ssh(gang.name, path)
        return replace(gang, reached_at=seen.launched_at), state

    async def _read_refusal(self, gang: SkyGang, observed: ServerState) -> CloudError:
        """Return why the launch failed, once nothing is left of it; TransientError if that is not known yet."""
        try:
            await self._engine.fetch(gang.request_id)
            reason: CloudError = TransientError(f"SkyPilot no longer reports why `{gang.name}` failed")
        except CloudError as error:
            reason = error
        start_s = self._clock.now_s()
        while observed.find(gang.name) is not None:
            if self._clock.now_s() - start_s >= GONE_S:
                return TransientError(f"a failed launch is not cleaned up yet: {reason.message}")
            await self._engine.end(gang.name)
            await self._clock.sleep(POLL_S_MAX)
            observed = await self._engine.fetch_state(gang.name, [])
        self._state_file.forget(gang.name)
        if isinstance(reason, CapacityError) and self.name not in await self._engine.list_enabled():
            return AuthError(f"SkyPilot has not enabled {self.name}", hints=(CHECK_HINT,))
        return reason

    def _adopt_strangers(self, owner: str, observed: ServerState) -> dict[str, SkyGang]:
        """Adopt clusters that are ours by name but not recorded.

        The state folder was lost, or a command died during a call.
        """
        names = {cluster.name for cluster in observed.clusters}
        names |= {request.cluster for request in observed.requests if observed.is_launching(request.cluster)}
        ours = [name for name in names if (found := NAME.fullmatch(name)) and found["cloud"] == self.name]
        adopted = [adopt(name, owner, observed.find(name)) for name in ours]
        return {gang.name: replace(gang, account=observed.account) for gang in adopted if gang is not None}

    async def _refresh(self, spot: Sequence[Node]) -> None:
        """Refresh spot clusters.

        SkyPilot queries the clouds about each cluster once a minute, which is late for spot.
        """
        now_s = self._clock.now_s()
        if spot and now_s - self._refreshed_s >= REFRESH_EVERY_S:
            self._refreshed_s = now_s
            await self._engine.refresh(self._list_names([node.id for node in spot]))


def make_account_error(gang: SkyGang, observed: ServerState) -> AccountError:
    """Return the error for a gang that this login to SkyPilot cannot see."""
    url = gang.account.partition(" as ")[0]
    return AccountError(
        f"SkyPilot's cluster `{gang.name}` belongs to the API server {gang.account}, but the login is for "
        f"{observed.account}",
        hints=(f"log in to it again (`sky api login -e {url}`), or for a local server `sky api logout`",),
    )
