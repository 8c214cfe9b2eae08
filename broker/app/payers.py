"""The user and project of every bill: those of the request that was admitted for it, else the recorded owner."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from broker.frozen import frozen
from broker.state.clusters import Bill
from broker.state.jobs import REPLICA_REQUEST
from broker.state.limits import Commitment
from broker.state.people import Owned
from broker.state.store import Store

UNOWNED = "(this machine)"  # started without a server, or on the server itself
NO_PROJECT = "(no project)"


@frozen
class Payer:
    """The user of a bill, and the project of the user's token at that time."""

    user: str = UNOWNED
    project: str = NO_PROJECT


class BillIndex:
    """Bills by job and by cluster, to find the bills of a commitment without reading all bills."""

    def __init__(self, bills: Iterable[Bill]) -> None:
        self._of_job: dict[int, list[Bill]] = defaultdict(list)
        self._of_cluster: dict[str, list[Bill]] = defaultdict(list)
        for bill in bills:
            if bill.job_id is None:
                self._of_cluster[bill.cluster].append(bill)
            else:
                self._of_job[bill.job_id].append(bill)

    def list(self, store: Store, commitment: Commitment) -> Sequence[Bill]:
        """List the bills of what a commitment started."""
        if commitment.kind is Owned.JOB:
            jobs = [int(name) for name in commitment.names if name.isdigit()]
            return [bill for job_id in jobs for bill in self._of_job.get(job_id, ())]
        if commitment.kind is Owned.SERVICE:
            jobs = list(store.jobs.list_request_ids(f"{REPLICA_REQUEST}{'/'.join(commitment.names)}/"))
            found = [bill for job_id in jobs for bill in self._of_job.get(job_id, ())]
        else:
            found = [bill for name in commitment.names for bill in self._of_cluster.get(name, ())]
        return [
            bill for bill in found
            if bill.created_s >= commitment.time_s
            and (commitment.ended_s is None or bill.created_s < commitment.ended_s)
        ]  # fmt: skip


def find_payers(store: Store, bills: Sequence[Bill]) -> Mapping[tuple[str, str], Payer]:
    """Find the payer of each bill, by cloud and node."""
    owners = store.owners.list()
    found = {}
    for bill in bills:
        key = (Owned.JOB, str(bill.job_id)) if bill.job_id else (Owned.CLUSTER, bill.cluster)
        found[bill.cloud, bill.node] = Payer(user=owners.get(key, UNOWNED))
    index = BillIndex(bills)
    for commitment in store.commitments.list():
        payer = Payer(user=commitment.user, project=commitment.project or NO_PROJECT)
        for bill in index.list(store, commitment):
            found[bill.cloud, bill.node] = payer
    return found
