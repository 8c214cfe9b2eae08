"""Sample rows for tests of the store, and a clock that they set by hand."""

from __future__ import annotations

from broker.types import Attempt, Cluster, ClusterStatus, Node, NodeRequest, NodeState, Placement
from tests.simulation.world import make_offer

PLACEMENT = Placement(offer=make_offer("east1a"), is_spot=True, node_count=2)
START_S = 1_800_000_000.0
NODE = Node(
    id="n", cloud="x", owner="me", cluster="c", attempt=1, rank=0, state=NodeState.RUNNING, usd_hour=2.0, created_s=0.0
)
REQUEST = NodeRequest(owner="me", cluster="c", attempt=1, token="t", placement=PLACEMENT)
ATTEMPT = Attempt(job_id=1, number=1, cluster="c", placement=PLACEMENT, started_s=0.0)
CLUSTER = Cluster(name="c", status=ClusterStatus.UP, placement=PLACEMENT, attempt=1)


class Hands:
    """A clock that moves only when it is set or slept on."""

    def __init__(self) -> None:
        self.time_s = START_S

    def now_s(self) -> float:
        return self.time_s

    async def sleep(self, duration_s: float) -> None:
        self.time_s += duration_s
