"""The only failover loop: it follows the plan's order, remembers refusals, and never creates a gang twice.

An intent is committed before each create call; its token makes a repeat harmless; an unknown outcome is looked up.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from broker.clock import Clock
from broker.clouds.base import Cloud
from broker.errors import (
    AuthError,
    CapacityError,
    CloudError,
    InvalidRequestError,
    QuotaError,
    ThrottledError,
    TransientError,
    UnknownOutcomeError,
    UsageError,
)
from broker.nouns import noun
from broker.provision.backoff import draw_backoff_s
from broker.provision.listing import Lister
from broker.provision.nodes import confirm_gone, wait_running
from broker.state.store import Store
from broker.types import Cluster, ClusterStatus, MachineSpec, Node, NodeRequest, Placement

CAPACITY_REFUSAL_S = 600.0
QUOTA_REFUSAL_S = 3600.0
REFUSAL_S_MAX = 4 * 3600.0  # however often a place refuses
REFUSAL_S_SHORT = 60.0  # a place that answered nothing clear
CREATE_TRIES_MAX = 6


@noun
class Wanted:
    """What `up` was asked for, apart from where."""

    cluster: Cluster
    spec: MachineSpec
    timeout_s: float
    on_event: Callable[[str], None]


def make_token(owner: str, cluster: str, attempt: int, placement: Placement, serial: int) -> str:
    """The same try gives the same token, before and after a crash. `serial` counts this name's settled tries:

    a cloud answers a token whose nodes have ended with those dead nodes, so a later try needs another."""
    offer = placement.offer
    place = (offer.cloud, offer.region, offer.zone or "", offer.instance_type, placement.is_spot, placement.node_count)
    text = "\0".join(str(part) for part in (owner, cluster, attempt, *place, serial))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def describe(placement: Placement) -> str:
    offer = placement.offer
    pricing = "spot" if placement.is_spot else "on-demand"
    where = offer.zone or offer.region
    return f"{placement.node_count} x {offer.instance_type} {pricing} in {where} ({offer.cloud})"


class Failover:
    def __init__(
        self,
        clouds: Mapping[str, Cloud],
        store: Store,
        *,
        clock: Clock,
        owner: str,
        lister: Lister,
        write_boot: Callable[[NodeRequest], str],
    ) -> None:
        self._clouds = clouds
        self._store = store
        self._clock = clock
        self._owner = owner
        self._lister = lister
        self._write_boot = write_boot

    async def acquire(self, wanted: Wanted, placements: Sequence[Placement]) -> tuple[Placement, Sequence[Node]]:
        """The first place that gives the whole gang. Raises CapacityError when all refused for now,
        the AuthError or InvalidRequestError itself when no place would ever answer otherwise."""
        lasting: dict[str, CloudError] = {}
        reasons: list[str] = []
        has_temporary = False
        for placement in placements:
            cloud_name = placement.offer.cloud
            if cloud_name in lasting:
                continue
            cloud = self._clouds.get(cloud_name)
            if cloud is None:
                lasting[cloud_name] = AuthError(f"cloud {cloud_name} is not set up", hints=("Run `broker check`.",))
                continue
            known = self._find_refusal(placement)
            if known and self._find_intent(wanted.cluster, placement) is None:  # what was begun there is seen to
                has_temporary = True
                reasons.append(f"{describe(placement)}: {known} (remembered)")
                continue
            try:
                nodes = await self._try_place(cloud, wanted, placement)
                self._store.forgive(placement)
                return placement, nodes
            except AuthError as error:
                lasting[cloud_name] = error
                wanted.on_event(f"{cloud_name} skipped: {error.message}")
            except InvalidRequestError as error:
                lasting[describe(placement)] = error
                wanted.on_event(f"{describe(placement)} skipped: {error.message}")
            except CloudError as error:
                has_temporary = True
                reasons.append(f"{describe(placement)}: {error.message}")
                self._refuse(placement, error)
                wanted.on_event(f"{describe(placement)} refused: {error.message}")
        if lasting and not has_temporary:
            raise next(iter(lasting.values()))
        raise CapacityError(
            f"no place would give {wanted.cluster.name} its nodes now",
            scope="cloud",
            hints=(*reasons[:5], "Wait some minutes, or allow more regions or accelerators."),
        )

    async def bury(self, cloud: Cloud, request: NodeRequest, *, known: Sequence[Node] = ()) -> None:
        """End whatever this intent made, confirm it, and only then close the intent."""
        gone = await confirm_gone(
            cloud,
            self._lister,
            known=known,
            is_ours=lambda node: node.token == request.token,
            expected_count=request.placement.node_count,
            clock=self._clock,
        )
        with self._store.transaction():
            self.record(gone)
            self._store.close_intent(request.token, "terminated")

    def record(self, nodes: Sequence[Node]) -> None:
        with self._store.transaction():
            for node in nodes:
                self._store.record_node(node)

    async def _try_place(self, cloud: Cloud, wanted: Wanted, placement: Placement) -> Sequence[Node]:
        request, is_resumed = self._open_intent(wanted, placement)
        created = await self._create(cloud, request, is_uncertain=is_resumed)
        self.record(created)
        nodes = await wait_running(
            cloud,
            self._lister,
            token=request.token,
            created=created,
            node_count=placement.node_count,
            timeout_s=wanted.timeout_s,
            clock=self._clock,
            on_look=self.record,
        )
        if nodes is None:
            await self.bury(cloud, request, known=created)
            raise CapacityError("the gang did not come up whole", scope="zone")
        return nodes

    def _open_intent(self, wanted: Wanted, placement: Placement) -> tuple[NodeRequest, bool]:
        """Commit what is about to be made; an intent left open by a crash is taken up, token and all."""
        cluster = wanted.cluster
        known = self._find_intent(cluster, placement)
        if known is not None:
            return known, True
        serial = self._store.count_closed_intents(cluster.name)
        request = NodeRequest(
            owner=self._owner,
            cluster=cluster.name,
            attempt=cluster.attempt,
            token=make_token(self._owner, cluster.name, cluster.attempt, placement, serial),
            placement=placement,
            spec=wanted.spec,
        )
        with self._store.transaction():
            current = self._store.get_cluster(cluster.name)
            is_ours = current is not None and current.created_s == cluster.created_s  # else the name came up anew
            if current is None or not is_ours or current.status is ClusterStatus.TERMINATING:
                raise UsageError(f"{cluster.name} was taken down while it came up")
            self._store.put_cluster(replace(cluster, status=ClusterStatus.INIT, placement=placement, nodes=()))
            self._store.put_intent(request)
        return request, False

    def _find_intent(self, cluster: Cluster, placement: Placement) -> NodeRequest | None:
        requests = [intent.request for intent in self._store.list_open_intents(cluster.name)]
        same = (each for each in requests if each.placement == placement and each.attempt == cluster.attempt)
        return next(same, None)

    async def _create(self, cloud: Cloud, request: NodeRequest, *, is_uncertain: bool) -> Sequence[Node]:
        """Ask until answered, always with the same token; what may have been made is ended before a refusal is told.

        `is_uncertain`: an earlier call, of a process that is gone, may have worked.
        """
        bootable = replace(request, boot=self._write_boot(request))
        try:
            for tries in range(CREATE_TRIES_MAX):
                if not self._store.is_intent_open(request.token):
                    raise UsageError(f"{request.cluster} was taken down while it came up")
                try:
                    return await cloud.create_nodes(bootable)
                except (ThrottledError, TransientError):
                    await self._clock.sleep(draw_backoff_s(tries))
                except UnknownOutcomeError:
                    is_uncertain = True
                    adopted = await self._look_for(cloud, request)
                    if adopted:
                        return adopted
            raise TransientError(f"{cloud.name} gave no clear answer in {CREATE_TRIES_MAX} tries")
        except CloudError as error:
            is_refused = isinstance(error, CapacityError | QuotaError | AuthError | InvalidRequestError)
            if is_uncertain or not is_refused:
                await self.bury(cloud, request)
            self._store.close_intent(request.token, f"refused: {error.message}")
            raise

    async def _look_for(self, cloud: Cloud, request: NodeRequest) -> Sequence[Node]:
        """Nodes carrying this token, waited for until the list has settled; empty: ask again."""
        start_s = self._clock.now_s()
        while True:
            found = (await self._lister.list(cloud)).by_token.get(request.token, [])
            if found or self._clock.now_s() - start_s >= cloud.settle_s:
                return found
            await self._clock.sleep(min(1.0, cloud.settle_s))

    def _find_refusal(self, placement: Placement) -> str | None:
        refusals = self._store.active_refusals(self._clock.now_s())
        return next((refusal.reason for refusal in refusals if refusal.covers(placement)), None)

    def _refuse(self, placement: Placement, error: CloudError) -> None:
        offer = placement.offer
        region, zone, lasts_s = offer.region, offer.zone, REFUSAL_S_SHORT
        if isinstance(error, QuotaError):
            zone, lasts_s = None, QUOTA_REFUSAL_S
        elif isinstance(error, CapacityError):
            lasts_s = CAPACITY_REFUSAL_S
            region = "" if error.scope == "cloud" else region
            zone = zone if error.scope == "zone" else None
        self._store.add_refusal(
            offer.cloud,
            region,
            zone,
            offer.instance_type,
            placement.is_spot,
            lasts_s,
            error.message,
            lasts_s_max=REFUSAL_S_MAX,
        )
