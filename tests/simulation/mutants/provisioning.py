"""Bugs planted into requesting nodes, believing lists, ending nodes and collecting lost ones."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from broker.errors import CapacityError, CloudError, TransientError, UnknownOutcomeError
from broker.jobs import health, monitor
from broker.jobs.teardown import AttemptTeardown
from broker.provision import creation, launcher, lifecycle, nodes
from broker.provision.bring_up import ClusterBuilder
from broker.provision.collection import Collector
from broker.provision.creation import NodeCreator
from broker.provision.launcher import Launcher, SurplusReleaser
from broker.provision.lifecycle import Provisioner
from broker.state.clusters import IntentRows
from broker.state.refusals import Refusal, RefusalRows
from broker.types import Cluster, ClusterStatus, IntentEnd, Node, NodeState
from tests.simulation.world import FOREIGN

Patches = Sequence[Any]


# -- asking for nodes ---------------------------------------------------------------------------------------------


def effect_before_intent() -> Patches:
    """Write the record when the nodes already exist."""
    create = Launcher._create

    def open_intent(self: Any, wanted: Any, placement: Any, **more: Any) -> Any:
        with patch.object(IntentRows, "put"):
            return open_as_usual(self, wanted, placement, **more)

    async def create_then_write(self: Any, one: Any, wanted: Any) -> Any:
        made = await create(self, one, wanted)
        self._store.intents.put(one.request)
        return made

    async def note_nothing(self: Any, one: Any) -> None:
        return

    open_as_usual = Launcher._open_intent
    return (
        patch.object(Launcher, "_open_intent", open_intent),
        patch.object(Launcher, "_create", create_then_write),
        patch.object(NodeCreator, "_note_account", note_nothing),
        patch.object(IntentRows, "is_open", lambda self, token: True),
    )


def fresh_token_after_a_crash() -> Patches:
    """Ignore what the last process began (`find_intent` finds nothing)."""
    count = itertools.count()
    make_token = launcher.make_token

    def make_fresh(*arguments: Any) -> str:
        return make_token(*arguments[:-1], f"{arguments[-1]}/{next(count)}")  # type: ignore[arg-type]

    return (
        patch.object(Launcher, "find_intent", lambda self, cluster, placement: None),
        patch.object(launcher, "make_token", make_fresh),
    )


def fresh_token_on_retry() -> Patches:
    """Repeat an unanswered call with another token, as botocore does by filling one in for each call."""

    async def create(self: Any, one: Any, wanted: Any) -> Any:
        for serial in range(6):
            try:
                return await one.cloud.create_nodes(one.request)
            except UnknownOutcomeError:
                self._store.intents.close(one.request.token, IntentEnd.UNCLEAR)
                one.request = replace(one.request, token=f"{one.request.token[:24]}/{serial}")
                self._store.intents.put(one.request)
            except CloudError as error:
                self._store.intents.close(one.request.token, IntentEnd.REFUSED, error.message)
                raise
        raise TransientError("no clear answer")

    return (patch.object(Launcher, "_create", create),)


def forget_unanswered_intent() -> Patches:
    """Count a missing answer as a refusal."""

    async def create(self: Any, one: Any, wanted: Any) -> Any:
        try:
            return await one.cloud.create_nodes(one.request)
        except CloudError as error:
            self._store.intents.close(one.request.token, IntentEnd.REFUSED, error.message)
            raise

    return (patch.object(Launcher, "_create", create),)


def intent_closed_before_the_record() -> Patches:
    """Split one commit in two: in between the nodes are unrecorded."""

    def enter(self: Any, wanted: Any, placement: Any, nodes: Any) -> Any:
        self._store.intents.close(nodes[0].token, IntentEnd.UP)
        with patch.object(IntentRows, "is_open", lambda self, token: True):
            return enter_as_usual(self, wanted, placement, nodes)

    enter_as_usual = ClusterBuilder._enter
    return (patch.object(ClusterBuilder, "_enter", enter),)


def part_of_a_gang_accepted() -> Patches:
    """Accept the nodes that came up in time as the whole gang."""
    wait_running = nodes.wait_running

    async def wait(cloud: Any, lister: Any, **named: Any) -> Any:
        whole = await wait_running(cloud, lister, **named)
        if whole is not None:
            return whole
        listed = (await lister.list(cloud)).by_token.get(named["token"], [])
        return [node for node in listed if node.state is NodeState.RUNNING] or None

    return (patch.object(launcher, "wait_running", wait),)


def refusal_of_another_zone_believed() -> Patches:
    """Treat all zones as full when one is."""
    return (patch.object(Refusal, "covers", lambda self, placement: self.cloud == placement.offer.cloud),)


def refusal_for_ever() -> Patches:
    add = RefusalRows.add

    def add_for_ever(self: Any, *arguments: Any, **named: Any) -> None:
        add(self, *arguments[:5], 1e6, *arguments[6:], **{**named, "lasts_s_max": 1e6})

    return (patch.object(RefusalRows, "add", add_for_ever),)


def late_gang_kept() -> Patches:
    """Record the gang that won a hedge and forget the other one, which no collector looks for either."""
    return (
        patch.object(SurplusReleaser, "begin", lambda self, others, on_event: None),
        patch.object(Collector, "_find_orphans", lambda self: []),
    )


def late_call_unheard() -> Patches:
    """Assume that a place released before its answer came has made nothing."""

    async def hear_nothing(self: Any, one: Any, call: Any) -> CloudError:
        call.cancel()
        return CapacityError("not needed any more", scope="zone")

    return (patch.object(NodeCreator, "await_answer", hear_nothing),)


def late_nodes_of_a_closed_intent_kept() -> Patches:
    """Assume that the process that closed the intent has ended its nodes."""

    async def do_nothing(self: Any, one: Any) -> None:
        return

    return (patch.object(Launcher, "_end_unless_open", do_nothing),)


def answer_awaited_for_ever() -> Patches:
    """Leave each call unbounded except by its cloud."""
    return (patch.object(creation, "ANSWER_S_MAX", 1e9),)


# -- believing lists ----------------------------------------------------------------------------------------------


def one_miss_believed() -> Patches:
    """Treat a node missing from one list as gone (SkyPilot #4443)."""
    return (patch.object(nodes.Absence, "note", lambda self, node_id, *, is_listed, now_s: not is_listed),)


def absence_by_a_short_time_only() -> Patches:
    """Treat two lists as independent although both fall within the seconds in which a cloud forgets."""
    return (patch.object(nodes, "MISSES_MIN", 1), patch.object(nodes, "MISSING_S_MIN", 8.0))


def absence_by_count_only() -> Patches:
    """Believe two lists without the node, however soon one follows the other."""
    return (patch.object(nodes, "MISSES_MIN", 2), patch.object(nodes, "MISSING_S_MIN", 0.0))


def empty_list_trusted() -> Patches:
    """Conclude from an empty list that all nodes are gone (SkyPilot #7854)."""
    refresh = Provisioner.refresh

    async def refresh_trusting(self: Any, cluster: Cluster, **named: Any) -> Cluster:
        cloud = self._clouds[cluster.placement.offer.cloud]
        if (await self._lister.list(cloud)).nodes:
            return await refresh(self, cluster, **named)
        now_s = self._clock.now_s()
        return replace(
            cluster, nodes=tuple(replace(node, state=NodeState.TERMINATED, ended_s=now_s) for node in cluster.nodes)
        )

    return (patch.object(Provisioner, "refresh", refresh_trusting),)


def silence_believed_at_once() -> Patches:
    """Recover a healthy job after one poll without an answer (SkyPilot #10155)."""
    return (
        patch.object(health, "UNREACHABLE_S_MIN", 0.0),
        patch.object(health, "MISSES_MIN", 1),
        patch.object(monitor, "UNREACHABLE_S_MIN", 0.0),
    )


# -- ending nodes -------------------------------------------------------------------------------------------------


def dead_on_request_accepted() -> Patches:
    """Count an accepted terminate request as a confirmed end."""

    async def confirm(cloud: Any, lister: Any, *, known: Any, is_ours: Any, clock: Any, **rest: Any) -> Any:
        listing = await lister.list(cloud)
        seen = {node.id: node for node in [*known, *(node for node in listing.nodes if is_ours(node))]}
        await cloud.terminate_nodes([seen[node_id] for node_id in sorted(seen)])
        now_s = clock.now_s()
        return [replace(node, state=NodeState.TERMINATED, ended_s=now_s) for node in seen.values()]

    return (patch.object(launcher, "confirm_gone", confirm), patch.object(lifecycle, "confirm_gone", confirm))


def failed_teardown_forgotten() -> Patches:
    """Report a teardown that fails, and drop the record (SkyPilot #2990)."""
    confirm = nodes.confirm_gone

    async def confirm_or_forget(*arguments: Any, **named: Any) -> Any:
        try:
            await arguments[0].terminate_nodes(named["known"])
        except CloudError:
            return named["known"]
        return await confirm(*arguments, **named)

    return (
        patch.object(launcher, "confirm_gone", confirm_or_forget),
        patch.object(lifecycle, "confirm_gone", confirm_or_forget),
    )


def relaunch_without_confirmed_end() -> Patches:
    """Start the next attempt while the last one's nodes are still to be ended."""

    async def terminate(self: Any, attempt: Any) -> None:
        cluster = self._store.clusters.get(attempt.cluster)
        if cluster is not None:
            self._store.clusters.put(replace(cluster, status=ClusterStatus.TERMINATING))
        self.close(attempt)  # the collector ends what is left

    return (patch.object(AttemptTeardown, "terminate", terminate),)


def collector_ends_foreign_nodes() -> Patches:
    """Treat a node without a local record as lost, whatever its owner."""
    find = Collector._find_lost_nodes

    async def find_any(self: Any, cloud: Any) -> Sequence[Node]:
        foreign = await cloud.list_nodes(FOREIGN.owner)
        return [*await find(self, cloud), *(node for node in foreign if node.state is NodeState.RUNNING)]

    return (patch.object(Collector, "_find_lost_nodes", find_any),)


# -- collecting ---------------------------------------------------------------------------------------------------


def collector_reads_records_first() -> Patches:
    """Collect without sparing young nodes, which hides the bug: nodes recorded while the list is read count as lost."""

    async def find(self: Any, cloud: Any) -> Sequence[Node]:
        recorded = {node.id for cluster in self._store.clusters.list() for node in cluster.nodes}
        tokens = {intent.request.token for intent in self._store.intents.list_open()}
        await self._clock.sleep(4.0)
        return [
            node
            for node in await cloud.list_nodes(self._owner)
            if node.id not in recorded and node.token not in tokens and node.state is not NodeState.TERMINATED
        ]

    return (patch.object(Collector, "_find_lost_nodes", find),)


def collector_blind_to_intents() -> Patches:
    """Treat a node without a record as lost although its intent is open; young nodes are not spared either."""

    async def find(self: Any, cloud: Any) -> Sequence[Node]:
        recorded = {node.id for cluster in self._store.clusters.list() for node in cluster.nodes}
        listed = await cloud.list_nodes(self._owner)
        return [node for node in listed if node.id not in recorded and node.state is not NodeState.TERMINATED]

    return (patch.object(Collector, "_find_lost_nodes", find),)
