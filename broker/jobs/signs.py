"""Record the signs of a preemption that a cloud gives for nodes of a job: recommendations to leave, and notices."""

from __future__ import annotations

from broker.jobs.gang import GangReport
from broker.jobs.monitor import AttemptMonitor
from broker.state.store import Store
from broker.types import Cluster, EventKind, make_event
from broker.wording import make_place


def record_signs(store: Store, job_id: int, monitor: AttemptMonitor, report: GangReport, cluster: Cluster) -> None:
    """Record what the cloud newly announced about the nodes.

    A notice is recorded once per node, even if the controller restarts or another attempt begins on the node within
    it: notices are counted. The events are only read when a notice is new to the monitor.
    """
    for rank in monitor.list_new_advisories(report, cluster):
        store.events.add(make_event(EventKind.ADVISED, rank=rank), job_id=job_id)
    if noticed := monitor.list_new_notices(report, cluster):
        recorded = {event.data.get("node") for event in store.events.list_kinds([EventKind.NOTICED], job_id=job_id)}
        place = make_place(cluster.placement)
        for node in noticed:
            if node.id not in recorded:
                event = make_event(EventKind.NOTICED, rank=node.rank, node=node.id, place=place)
                store.events.add(event, job_id=job_id)
