"""A cloud of Kubernetes over our own API server, for the contract of all clouds."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from broker.clock import SystemClock
from broker.clouds.base import Cloud
from broker.clouds.kubernetes.cloud import KubernetesCloud
from broker.clouds.kubernetes.manifest import OWNER_LABEL
from broker.sites.facts import Machine
from broker.sites.kubernetes import KubernetesContext, Pool
from broker.types import Node, Offer
from tests.clouds.beds import Bed
from tests.clouds.kubernetes.api_server import ApiServer
from tests.clouds.kubernetes.cluster import Json, find_root

MACHINE = Machine(vcpus=2, memory_gib=4)
NODE_COUNT = 4
NAMES = itertools.count()


class KubernetesBed(Bed):
    """Four nodes that hold one pod of the offer each; `settings` are further fields of the context."""

    def __init__(self, server: ApiServer, **settings: object) -> None:
        self.server = server
        self.clock = SystemClock()
        self.settings = settings
        for index in range(NODE_COUNT):
            server.cluster.add_node(f"n{index}", cpu="3", memory="8Gi")
        self.pool = Pool(name="default", machine=MACHINE, node_count=NODE_COUNT, selector={}, disk_gib=20)
        self.cloud: KubernetesCloud = self.make_cloud()
        self.offer = Offer(
            cloud="kubernetes", region="test", zone="default", instance_type=MACHINE.name, vcpus=2, memory_gib=4,
            ondemand_usd_hour=0.1, spot_usd_hour=0.03,
        )  # fmt: skip

    def make_cloud(self) -> KubernetesCloud:
        context = KubernetesContext(
            name="test", context="test", kubeconfig=self.server.kubeconfig, namespace="ml", **self.settings,  # type: ignore[arg-type]
        )  # fmt: skip
        files = {"test": context}, {"test": [self.pool]}
        return KubernetesCloud(lambda: files, clock=self.clock)

    def reopen(self) -> Cloud:
        return self.make_cloud()

    def fill(self) -> None:
        self.leave_room(0)

    def leave_room(self, count: int) -> None:
        for _ in range(NODE_COUNT - count):
            self.server.cluster.create("others", make_pod(f"other-{next(NAMES)}", cpu="3"))
        self.server.cluster.wait_until(lambda pods: all("nodeName" in pod["spec"] for pod in pods))

    def exhaust_quota(self) -> None:
        self.server.cluster.quota = 0

    def log_out(self) -> None:
        self.server.is_logged_out = True

    def lose_next_answer(self) -> None:
        self.server.is_answer_lost = True

    def throttle_next_create(self) -> None:
        self.server.is_throttled = True

    def list_orphans(self) -> Sequence[str]:
        return [pod["metadata"]["name"] for pod in self.server.cluster.list("ml")]

    def list_untagged(self) -> Sequence[str]:
        pods = self.server.cluster.list("ml")
        return [pod["metadata"]["name"] for pod in pods if OWNER_LABEL not in pod["metadata"]["labels"]]

    async def preempt(self, node: Node) -> None:
        self.server.cluster.evict(node.id, grace_s=0)

    async def kill_newborn(self, node: Node) -> str:
        self.server.cluster.fail(node.id, "Evicted")
        return "evicted"

    async def end_from_inside(self, node: Node) -> None:
        state = find_root() / node.id / "home" / ".broker"
        while not state.is_dir():  # a pod runs before its first process has made the folder
            await self.clock.sleep(0.05)
        (state / "shutdown").write_text("lease")


def make_pod(name: str, *, cpu: str = "1", labels: dict[str, str] | None = None) -> Json:
    """Return a pod that is not broker's."""
    container = {
        "name": "main", "image": "busybox", "command": ["sleep", "10000"],
        "resources": {"requests": {"cpu": cpu, "memory": "1Mi"}},
    }  # fmt: skip
    return {"metadata": {"name": name, "labels": labels or {}}, "spec": {"containers": [container]}}
