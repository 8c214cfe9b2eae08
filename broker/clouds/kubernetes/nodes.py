"""The cluster's nodes: their pools, cards and spot labels by well-known names, and the room they have. Pure."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from broker.clouds.kubernetes.manifest import GANG_LABEL, make_resources, name_gang
from broker.frozen import frozen
from broker.sites.facts import Machine, name_accelerator
from broker.sites.kubernetes import KubernetesContext, Pool
from broker.types import NodeRequest

Json = Mapping[str, Any]
# Labels that name a node's pool, of GKE, EKS, AKS, Karpenter and DigitalOcean.
POOL_LABELS = (
    "cloud.google.com/gke-nodepool",
    "eks.amazonaws.com/nodegroup",
    "kubernetes.azure.com/agentpool",
    "karpenter.sh/nodepool",
    "doks.digitalocean.com/node-pool",
)
DEFAULT_POOL = "default"
# Label and value of spot nodes: GKE (also its older kind), EKS, Karpenter, AKS.
SPOT_LABELS = {
    "cloud.google.com/gke-spot": "true",
    "cloud.google.com/gke-preemptible": "true",
    "eks.amazonaws.com/capacityType": "SPOT",
    "karpenter.sh/capacity-type": "spot",
    "kubernetes.azure.com/scalesetpriority": "spot",
}
# Labels that name the cards: NVIDIA's GPU feature discovery, GKE, EKS, Karpenter, SkyPilot, AMD's labeller.
CARD_LABELS = (
    "nvidia.com/gpu.product",
    "cloud.google.com/gke-accelerator",
    "k8s.amazonaws.com/accelerator",
    "karpenter.k8s.aws/instance-gpu-name",
    "skypilot.co/accelerator",
    "amd.com/gpu.product-name",
)
CARD_RESOURCES = ("nvidia.com/gpu", "amd.com/gpu")
# A part of a card, or a card that several pods share, is not the card that its name promises.
SHARED = re.compile(r"-(SHARED|MIG-.*)$", re.IGNORECASE)
# Taints of dedicated nodes that a pod with cards, or with a spot price, is meant to tolerate.
KNOWN_TAINTS = (*CARD_RESOURCES, *SPOT_LABELS, "sku")
UNITS = {"": 1.0, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15} | {
    f"{unit}i": 1024.0**power for power, unit in enumerate("KMGTP", 1)
}
GIB = 1 << 30
PODS_MAX = 110  # per node, by default


@frozen
class Amount:
    """Resources of a node or pod: vCPUs, bytes of memory and of disk, cards."""

    cpu: float = 0.0
    memory: float = 0.0
    disk: float = 0.0
    cards: float = 0.0

    def subtract(self, other: Amount) -> Amount:
        """Return what is left."""
        return Amount(
            cpu=self.cpu - other.cpu,
            memory=self.memory - other.memory,
            disk=self.disk - other.disk,
            cards=self.cards - other.cards,
        )

    def count(self, part: Amount) -> int:
        """Return how many equal parts fit."""
        pairs = [(self.cpu, part.cpu), (self.memory, part.memory), (self.disk, part.disk), (self.cards, part.cards)]
        fits = min((have / need + 1e-9 for have, need in pairs if need), default=PODS_MAX)
        return max(0, int(fits))


def parse_quantity(text: str | int) -> float:
    """Return a quantity of Kubernetes as a number: `7910m` -> 7.91, `16Gi` -> 17179869184.0, `1e3` -> 1000.0."""
    match = re.fullmatch(r"([0-9.]+(?:[eE][+-]?\d+)?)([a-zA-Z]*)", str(text))
    return float(match[1]) * UNITS.get(match[2], 0.0) if match else 0.0


def read_amount(quantities: Json) -> Amount:
    """Return the quantities of a node's `allocatable`, or of a container's `requests`."""
    return Amount(
        cpu=parse_quantity(quantities.get("cpu", 0)),
        memory=parse_quantity(quantities.get("memory", 0)),
        disk=parse_quantity(quantities.get("ephemeral-storage", 0)),
        cards=sum(parse_quantity(quantities.get(name, 0)) for name in CARD_RESOURCES),
    )


def list_pools(nodes: Sequence[Json], pods: Sequence[Json], context: KubernetesContext) -> Sequence[Pool]:
    """Return the pools of usable nodes, with the largest pod that an idle node of each can hold.

    The pods of DaemonSets, and the static ones, run on every node: their requests are subtracted.
    """
    found: dict[tuple[object, ...], list[Pool]] = defaultdict(list)
    overhead = sum_requests([pod for pod in pods if is_overhead(pod)])
    for node in nodes:
        if (pool := make_pool(node, overhead.get(node["metadata"]["name"], Amount()), context)) is not None:
            found[(pool.name, pool.machine.accelerator, pool.machine.accelerator_count, pool.is_spot)].append(pool)
    return [_join(equal) for equal in found.values()]


def _join(pools: Sequence[Pool]) -> Pool:
    """Return one pool for similar nodes: the smallest of them, as their overheads differ a little."""
    least = min(pools, key=lambda each: (each.machine.vcpus, each.machine.memory_gib))
    machine = Machine(
        vcpus=least.machine.vcpus,
        memory_gib=min(each.machine.memory_gib for each in pools),
        accelerator=least.machine.accelerator,
        accelerator_count=least.machine.accelerator_count,
    )
    return Pool(
        name=least.name,
        machine=machine,
        node_count=len(pools),
        is_spot=least.is_spot,
        selector=least.selector,
        tolerations=least.tolerations,
        resource=least.resource,
        disk_gib=min(each.disk_gib for each in pools),
    )


def make_pool(node: Json, overhead: Amount, context: KubernetesContext) -> Pool | None:
    """Return a pool of this node alone; None if pods of broker cannot or should not run there."""
    labels = node["metadata"].get("labels", {})
    tolerations = find_tolerations(node, context)
    if tolerations is None or any(labels.get(key) != value for key, value in (context.node_selector or {}).items()):
        return None
    pool_label = next((label for label in POOL_LABELS if label in labels), None)
    name = labels[pool_label] if pool_label else DEFAULT_POOL
    card_label = next((label for label in CARD_LABELS if label in labels), None)
    spot_label = next((label for label, value in SPOT_LABELS.items() if labels.get(label) == value), None)
    given = node["status"].get("allocatable", {})
    free = read_amount(given).subtract(overhead)
    resource = next((each for each in CARD_RESOURCES if parse_quantity(given.get(each, 0)) >= 1), "")
    if resource and SHARED.search(labels.get(card_label, "") if card_label else ""):
        return None
    accelerator = name_accelerator(labels[card_label] if card_label else "gpu") if resource else None
    return Pool(
        name=name,
        machine=Machine(
            vcpus=int(free.cpu * 10) / 10,
            memory_gib=int(free.memory / GIB * 100) / 100,
            accelerator=accelerator,
            accelerator_count=int(free.cards) if resource else 0,
        ),
        node_count=1,
        is_spot=spot_label is not None or name in context.spot_pools,
        selector={label: labels[label] for label in (pool_label, card_label, spot_label) if label},
        tolerations=tolerations,
        resource=resource,
        disk_gib=int(free.disk / GIB * 0.9),  # an image takes a part of it
    )


def find_tolerations(node: Json, context: KubernetesContext) -> Sequence[Mapping[str, str]] | None:
    """Return the tolerations that a pod needs on this node; None if it cannot, or should not, run there."""
    conditions = {each["type"]: each["status"] for each in node["status"].get("conditions", ())}
    if conditions.get("Ready") != "True" or node["spec"].get("unschedulable"):
        return None
    own = dict(each.partition("=")[::2] for each in context.tolerations)
    found = []
    for taint in node["spec"].get("taints", ()):
        key, value = taint["key"], taint.get("value", "")
        if taint["effect"] == "PreferNoSchedule":
            continue
        if key not in KNOWN_TAINTS and not (key in own and own[key] in ("", value)):
            return None
        found.append({"key": key, "operator": "Exists", "effect": taint["effect"]})
    return found


def is_overhead(pod: Json) -> bool:
    """Return whether a pod belongs to its node: of a DaemonSet, or static."""
    return any(each.get("kind") in ("DaemonSet", "Node") for each in pod["metadata"].get("ownerReferences", ()))


def sum_requests(pods: Sequence[Json]) -> Mapping[str, Amount]:
    """Return the requests of all pods by node."""
    used: dict[str, Amount] = defaultdict(Amount)
    for pod in pods:
        name = pod["spec"].get("nodeName")
        if name and pod.get("status", {}).get("phase") not in ("Succeeded", "Failed"):
            for container in pod["spec"]["containers"]:
                need = read_amount(container.get("resources", {}).get("requests", {}))
                used[name] = used[name].subtract(Amount().subtract(need))
    return used


def count_room(
    nodes: Sequence[Json], pods: Sequence[Json], pool: Pool, request: NodeRequest, *, context: KubernetesContext
) -> int:
    """Return how many pods of the request fit the pool's nodes now, counting those that the gang already has.

    Pods that wait for a node take room too: they came first.
    """
    gang = name_gang(request)
    others = [pod for pod in pods if pod["metadata"].get("labels", {}).get(GANG_LABEL) != gang]
    used = sum_requests(others)
    need = read_amount(make_resources(pool, request)["requests"])
    rooms = 0
    for node in nodes:
        labels = node["metadata"].get("labels", {})
        is_pools = all(labels.get(key) == value for key, value in pool.selector.items())
        if is_pools and find_tolerations(node, context) is not None:
            free = read_amount(node["status"].get("allocatable", {})).subtract(
                used.get(node["metadata"]["name"], Amount())
            )
            rooms += free.count(need)
    return rooms
