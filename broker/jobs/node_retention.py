"""Decide by cost whether a gang's remaining nodes are kept while a lost one is replaced."""

from __future__ import annotations

from broker.clock import Clock
from broker.errors import NoOfferError
from broker.frozen import frozen
from broker.jobs.acquisition import Acquisition
from broker.jobs.gang import GangReport
from broker.jobs.health import list_leaving_ranks, list_lost_ranks
from broker.provision.lifecycle import Provisioner
from broker.state.store import Store
from broker.types import Attempt, Cluster, Estimate, Job, NodeState, Placement

LEAVES_AT_ONCE = "eager_next_region"
RETENTION_S_MAX = 600.0  # equal to the time that one search waits for nodes to boot


@frozen
class Alternative:
    """The best alternative place: the gang's price there, and the expected saving for the rest of the job."""

    usd_hour: float
    saving_usd: float = 0.0


def measure_retention_s(
    placement: Placement, *, lost_count: int, start_s: float, elsewhere: Alternative | None
) -> float:
    """Return the seconds for which paying for idle survivors is cheaper than starting new nodes elsewhere.

    0 if the lost nodes cannot be replaced, one after another, within that time. `start_s`: seconds until new nodes run.
    Example: 4 nodes at 8 USD/h, one lost, 140 s: a start elsewhere at that price costs 0.31 USD, as much as three nodes
    in 187 s.
    The time for `setup` elsewhere is unknown and would justify a longer wait.
    """
    if elsewhere is None:
        return RETENTION_S_MAX
    idle_usd_hour = placement.usd_hour * (1 - lost_count / placement.node_count)
    worth_usd = elsewhere.usd_hour * start_s / 3600 - elsewhere.saving_usd
    retention_s = RETENTION_S_MAX if idle_usd_hour <= 0 else worth_usd / idle_usd_hour * 3600
    return min(retention_s, RETENTION_S_MAX) if retention_s > lost_count * start_s else 0.0


class NodeRetention:
    """Decide whether to keep the nodes of one job."""

    def __init__(self, store: Store, provisioner: Provisioner, acquisition: Acquisition, clock: Clock) -> None:
        self._store = store
        self._provisioner = provisioner
        self._acquisition = acquisition
        self._clock = clock

    def find_until_s(self, job: Job, attempt: Attempt, cluster: Cluster, report: GangReport) -> float | None:
        """Return the time until which the remaining nodes are kept; None if they are released.

        A node with a preemption notice counts as lost, although it may still be running.
        """
        lost = list_lost_ranks(cluster.nodes)
        leaving = list_leaving_ranks(cluster.nodes, report.noticed)
        others = [node for node in cluster.nodes if node.rank not in leaving]
        is_safe = (
            0 < len(leaving) < len(cluster.nodes)
            and all(node.state is NodeState.TERMINATED for node in cluster.nodes if node.rank in lost)
            and all(node.state is NodeState.RUNNING and node.rank not in report.unreachable for node in others)
            and attempt.started_s > self._store.meta.restored_s  # otherwise a later attempt may run there
            and job.task.recovery.strategy != LEAVES_AT_ONCE
        )
        if not is_safe or not self._provisioner.can_replace_node(cluster):
            return None
        retention_s = measure_retention_s(
            cluster.placement,
            lost_count=len(leaving),
            start_s=self._provisioner.measure_start_s(cluster.placement.offer.cloud),
            elsewhere=self._find_elsewhere(job, cluster.placement),
        )
        return self._clock.now_s() + retention_s if retention_s else None

    def _find_elsewhere(self, job: Job, here: Placement) -> Alternative | None:
        try:
            plan = self._acquisition.plan_rest(job)
        except NoOfferError:
            return None
        other = next((estimate for estimate in plan.estimates if not is_at(estimate.placement, here)), None)
        if other is None:
            return None
        same = next((estimate for estimate in plan.estimates if is_at(estimate.placement, here)), None)
        return Alternative(usd_hour=other.placement.usd_hour, saving_usd=_measure_saving(same, other))


def is_at(a: Placement, b: Placement) -> bool:
    """Return whether both have the same instance type, pricing model and zone."""
    zone = b.offer.zone
    same_zone = zone in (a.offer.zone, *a.other_zones)
    return same_zone and _strip(a) == _strip(b)


def _strip(placement: Placement) -> tuple[object, ...]:
    offer = placement.offer
    return offer.cloud, offer.region, offer.instance_type, placement.is_spot, placement.node_count


def _measure_saving(here: Estimate | None, other: Estimate) -> float:
    if here is None or here.expected_usd is None or other.expected_usd is None:
        return 0.0
    return here.expected_usd - other.expected_usd
