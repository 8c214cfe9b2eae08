"""Begin launches, drive them through their states, and terminate what they created; `launch.py` lists the scenarios.

An intent is committed before each create call; its token makes a repeated call harmless.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from broker.clock import Clock
from broker.clouds.base import Cloud, HasQueue
from broker.errors import BrokerError, CapacityError, CloudError
from broker.provision.creation import REFUSED, NodeCreator
from broker.provision.hedge_timer import Answer, HedgeTimer
from broker.provision.launch import (
    Launch,
    LaunchSpec,
    LaunchState,
    describe,
    make_down_error,
    make_token,
    retrieve_failure,
)
from broker.provision.listing import Lister
from broker.provision.nodes import confirm_gone, measure_left_s, wait_running
from broker.provision.refusals import UnavailableOffers, find_intent_end
from broker.state.store import Store
from broker.types import Cluster, ClusterStatus, Node, NodeEnd, NodeRequest, Placement
from broker.types.outcomes import Event, EventKind, IntentEnd, make_event
from broker.wording import make_place

log = logging.getLogger(__name__)


class Launcher:
    """Begin launches, drive them through their states, and terminate what is not kept."""

    def __init__(
        self,
        clouds: Mapping[str, Cloud],
        store: Store,
        *,
        clock: Clock,
        owner: str,
        lister: Lister,
        offers: UnavailableOffers,
        hedge_timer: HedgeTimer,
        write_boot: Callable[[NodeRequest], str],
    ) -> None:
        self._clouds = clouds
        self._store = store
        self._clock = clock
        self._owner = owner
        self._lister = lister
        self._offers = offers
        self._hedge_timer = hedge_timer
        self._creator = NodeCreator(store, clock=clock, lister=lister, offers=offers, write_boot=write_boot)

    def begin(
        self, spec: LaunchSpec, placement: Placement, *, rank: int, is_first: bool = False, is_addition: bool = False
    ) -> Launch:
        """Commit the intent and start the launch in the background. An intent left open by a crash is resumed.

        `is_addition`: the nodes join a cluster that is up; its record does not change.

        Raises the errors of `spec.check_budget`, and UsageError if the cluster was taken down after the first launch.
        """
        resumed = self.find_intent(spec.cluster, placement)
        if resumed is None:
            spec.check_budget()
        launch = Launch(
            cloud=self._clouds[placement.offer.cloud],
            request=resumed or self._open_intent(spec, placement, is_first=is_first, is_addition=is_addition),
            rank=rank,
            state=LaunchState.UNKNOWN if resumed else LaunchState.REQUESTED,
            begun_s=self._clock.now_s(),
        )
        launch.task = asyncio.ensure_future(self._drive(launch, spec))
        launch.task.add_done_callback(retrieve_failure)
        return launch

    def find_intent(self, cluster: Cluster, placement: Placement) -> NodeRequest | None:
        """Return the open intent of an earlier process for this placement and attempt; None if there is none."""
        requests = [intent.request for intent in self._store.intents.list_open(cluster.name)]
        same = (
            request for request in requests if request.placement == placement and request.attempt == cluster.attempt
        )
        return next(same, None)

    async def terminate_unneeded(self, launch: Launch) -> Sequence[Node]:
        """Terminate the nodes of an unneeded launch, confirm their end, and return them.

        Raises TransientError if the cloud does not confirm it; the intent then remains open for the collector.
        """
        launch.task.cancel()
        await asyncio.wait([launch.task])
        refusal = await self._creator.await_answer(launch, launch.call) if launch.call is not None else None
        may_exist = launch.was_unanswered or bool(launch.nodes)
        if may_exist or (launch.call is not None and refusal is None):
            is_left = launch.nodes or self._store.intents.is_open(launch.request.token)
            return await self._release(launch) if is_left else ()
        launch.enter(LaunchState.CLOSED, self._clock.now_s())
        if refusal is None:
            self._store.intents.close(launch.request.token, IntentEnd.NEVER_ASKED)
        else:
            self._store.intents.close(launch.request.token, find_intent_end(refusal), refusal.message)
        return ()

    async def _release(self, launch: Launch) -> Sequence[Node]:
        launch.enter(LaunchState.RELEASING, self._clock.now_s())
        with self._store.transaction(is_durable=False):
            pass  # raises FencedError: a replaced leader must not terminate nodes that its successor may use
        gone = await self.terminate(launch.cloud, launch.request, known=launch.nodes)
        launch.enter(LaunchState.CLOSED, self._clock.now_s())
        return gone

    async def terminate(self, cloud: Cloud, request: NodeRequest, *, known: Sequence[Node] = ()) -> Sequence[Node]:
        """Terminate the nodes of this intent, confirm their end, and only then close the intent; return the nodes."""
        request = self._store.intents.get_request(request.token) or request  # its account may have been recorded since
        known = known or self._store.intents.list_nodes(request.token)
        gone = await confirm_gone(
            cloud,
            self._lister,
            known=known,
            is_ours=lambda node: node.token == request.token,
            expected_count=request.placement.node_count,
            places={(request.account, request.placement.offer.region)},
            clock=self._clock,
        )
        with self._store.transaction():
            self.record(gone)
            self._store.intents.close(request.token, IntentEnd.TERMINATED)
        return gone

    def record(self, nodes: Sequence[Node]) -> None:
        """Record a bill for each node in one transaction. Idempotent."""
        with self._store.transaction():
            for node in nodes:
                self._store.bills.record(node)

    def _open_intent(self, spec: LaunchSpec, placement: Placement, *, is_first: bool, is_addition: bool) -> NodeRequest:
        cluster = spec.cluster
        serial = self._store.intents.count_closed(cluster.name)
        request = NodeRequest(
            owner=self._owner,
            cluster=cluster.name,
            attempt=cluster.attempt,
            token=make_token(f"{self._owner}{self._store.meta.salt}", cluster.name, cluster.attempt, placement, serial),
            placement=placement,
            spec=spec.make_spec(placement),
            # All nodes of a gang are in one account: another login can neither list nor terminate the existing ones.
            account=next((node.account for node in cluster.nodes if node.account), "") if is_addition else "",
        )
        with self._store.transaction():
            current = self._store.clusters.get(cluster.name)
            is_ours = is_first if current is None else current.created_s == cluster.created_s
            if not is_ours or (current and current.status is ClusterStatus.TERMINATING):
                raise make_down_error(cluster.name)
            self._offers.begin(placement)
            if not is_addition:
                self._store.clusters.put(replace(cluster, status=ClusterStatus.INIT, placement=placement, nodes=()))
            self._store.intents.put(request)
        return request

    async def _drive(self, launch: Launch, spec: LaunchSpec) -> Sequence[Node]:
        """Return the running gang. After a CloudError, nothing of the launch remains."""
        launch.nodes = tuple(await self._create(launch, spec))
        created_s = self._clock.now_s()
        launch.enter(LaunchState.CREATED, created_s)
        with self._store.transaction():
            self.record(launch.nodes)
            self._store.intents.note_nodes(launch.request.token, launch.nodes)
        await self._end_unless_open(launch)
        node_count = launch.placement.node_count
        if len(launch.nodes) < node_count:  # the rest will not be created, and these nodes cost money
            await self._release(launch)
            raise CapacityError(f"created only {len(launch.nodes)} of {node_count} nodes", scope="zone")
        if not launch.was_unanswered:  # otherwise the time includes an earlier process or call
            self._hedge_timer.note(launch.cloud.name, Answer.CREATED, created_s - launch.begun_s)
        running = await self._wait_running(launch, spec)
        await self._end_unless_open(launch)
        now_s = self._clock.now_s()
        if not launch.was_unanswered:
            self._hedge_timer.note(launch.cloud.name, Answer.WHOLE, now_s - created_s)
        launch.enter(LaunchState.RUNNING, now_s)
        return running

    async def _wait_running(self, launch: Launch, spec: LaunchSpec) -> Sequence[Node]:
        """Wait for every node to run. Raises CapacityError once an incomplete gang is terminated."""
        is_resumed = launch.was_unanswered
        timeout_s = max(spec.timeout_s, launch.cloud.queue_s) if isinstance(launch.cloud, HasQueue) else spec.timeout_s
        running = await wait_running(
            launch.cloud,
            self._lister,
            token=launch.request.token,
            created=launch.nodes,
            node_count=launch.placement.node_count,
            timeout_s=measure_left_s(launch.nodes, timeout_s, self._clock) if is_resumed else timeout_s,
            clock=self._clock,
            on_look=self.record,
        )
        if running is None:
            gone = await self._release(launch)
            cause = _find_cause(gone, timeout_s)
            raise CapacityError(f"the gang did not come up completely: {cause}", scope="zone")
        return running

    async def _end_unless_open(self, launch: Launch) -> None:
        """Terminate the nodes if the intent was closed: the command that took the cluster down may have missed them.

        Raises UsageError in that case.
        """
        if not self._store.intents.is_open(launch.request.token):
            await self._release(launch)
            raise make_down_error(launch.request.cluster)

    async def _create(self, launch: Launch, spec: LaunchSpec) -> Sequence[Node]:
        """Return the created nodes. Before raising a CloudError, terminate any nodes that may exist."""
        try:
            return await self._creator.create(launch, spec)
        except CloudError as error:
            token = launch.request.token
            if launch.was_unanswered or not isinstance(error, REFUSED):
                spec.on_event(make_event(EventKind.PLACE_GIVEN_UP, place=make_place(launch.placement)))
                launch.abandon(error, self._clock.now_s())
                await self.terminate(launch.cloud, launch.request)
            self._store.intents.close(token, find_intent_end(error), error.message)
            launch.enter(LaunchState.CLOSED, self._clock.now_s())
            raise


class SurplusReleaser:
    """Release, in the background, the launches that a search did not need.

    Their intents remain open until the cloud confirms the end; if the process dies, the collector continues.
    """

    def __init__(self, launcher: Launcher, *, clock: Clock) -> None:
        self._launcher = launcher
        self._clock = clock
        self._tasks: dict[str, asyncio.Task[None]] = {}

    @property
    def tokens(self) -> frozenset[str]:
        """Tokens of the intents that this process is about to close."""
        return frozenset(self._tasks)

    def begin(self, launches: Sequence[Launch], on_event: Callable[[Event], None]) -> None:
        """Terminate surplus launches in the background; the collector continues after a crash."""
        for launch in launches:
            task = asyncio.ensure_future(self._release_launch(launch, on_event))
            self._tasks[launch.request.token] = task
            task.add_done_callback(lambda _, token=launch.request.token: self._tasks.pop(token, None))  # type: ignore[misc]

    async def finish(self) -> None:
        """Wait for all launches that are being released."""
        while self._tasks:
            await asyncio.wait(self._tasks.values())

    async def _release_launch(self, launch: Launch, on_event: Callable[[Event], None]) -> None:
        place, begun_s = make_place(launch.placement), self._clock.now_s()
        try:
            on_event(make_event(EventKind.PLACE_UNNEEDED, place=place))
            gone = await self._launcher.terminate_unneeded(launch)
            usd = sum(node.usd_hour * ((node.ended_s or begun_s) - node.created_s) / 3600 for node in gone)
            took_s = self._clock.now_s() - begun_s
            on_event(make_event(EventKind.PLACE_RETURNED, place=place, took_s=took_s, usd=usd))
        except BrokerError as error:  # the outermost edge of this task; the intent stays open for the collector
            log.warning("cannot release %s now: %s", describe(launch.placement), error.message)


def _find_cause(gone: Sequence[Node], timeout_s: float) -> str:
    """Return the cloud's reasons for nodes that ended on their own, or that the timeout was reached."""
    causes = sorted({node.reason for node in gone} - {"", NodeEnd.TERMINATED, NodeEnd.MISSING})
    if causes:
        return f"a node terminated by itself ({', '.join(causes)})"
    return f"not all nodes were running within {timeout_s:.0f} s"
