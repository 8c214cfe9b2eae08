"""One node of a gang that is up, made anew: its intent first, then the node, then one commit that takes it in."""

from __future__ import annotations

from dataclasses import replace

from broker.errors import UsageError
from broker.provision.launch import Launcher, LaunchSpec
from broker.state.store import Store
from broker.types import Cluster, ClusterStatus, EventKind, IntentEnd, NodeState, make_event


async def replace_node(launcher: Launcher, store: Store, spec: LaunchSpec, *, rank: int) -> Cluster:
    """The cluster with a new node in the place of the one of that rank, which the cloud has confirmed gone.

    At the place where the others are, for they talk to each other. Raises CloudError where that gives none, and
    nothing is left of the try; UsageError where the cluster was taken down meanwhile. Cancelled, it leaves an open
    intent, which is gone on with when asked again, and ended with the cluster or by the collector.
    """
    name = spec.cluster.name
    placement = replace(spec.cluster.placement, node_count=1)
    one = launcher.begin(spec, placement, rank=0, is_addition=True)
    try:
        made = (await one.doing)[0]
    except BaseException:
        one.cancel()
        raise
    new = replace(made, rank=rank)
    with store.transaction():
        cluster = store.clusters.get(name)
        if cluster is None or cluster.status is not ClusterStatus.UP or not store.intents.is_open(made.token):
            raise UsageError(f"{name} was taken down while a node of it was replaced")
        old = next(node for node in cluster.nodes if node.rank == rank)
        assert old.state is NodeState.TERMINATED, "a node is replaced when it is confirmed gone"
        changed = replace(cluster, nodes=tuple(new if node is old else node for node in cluster.nodes))
        store.clusters.put(changed)
        launcher.record([new])
        store.intents.close(made.token, IntentEnd.UP)
        event = make_event(EventKind.REPLACED, cluster=name, rank=rank)
        store.events.add(event, cluster=name, job_id=cluster.job_id)
    return changed
