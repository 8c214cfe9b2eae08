"""Node pools, their cards and prices by well-known labels, and the room that is left."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.clouds.kubernetes.manifest import GANG_LABEL, name_gang
from broker.clouds.kubernetes.nodes import (
    CARD_LABELS,
    SPOT_LABELS,
    Amount,
    count_room,
    list_pools,
    parse_quantity,
    sum_requests,
)
from broker.sites.facts import Machine
from broker.sites.kubernetes import KubernetesContext, Pool
from broker.types import NodeRequest, Placement

CONTEXT = KubernetesContext(name="lab", context="lab")
NO_SCHEDULE = "NoSchedule"


def make_node(name: str = "n0", *, taints: tuple[dict[str, str], ...] = (), gpus: int = 0, **labels: str) -> Any:
    amount = {"cpu": "7910m", "memory": "16Gi", "ephemeral-storage": "100Gi"}
    amount |= {"nvidia.com/gpu": str(gpus)} if gpus else {}
    return {
        "metadata": {"name": name, "labels": {key.replace("__", "/"): value for key, value in labels.items()}},
        "spec": {"taints": list(taints)},
        "status": {"allocatable": amount, "conditions": [{"type": "Ready", "status": "True"}]},
    }


def make_pod(node: str, *, cpu: str, owner: str = "ReplicaSet", phase: str = "Running", **labels: str) -> Any:
    container = {"resources": {"requests": {"cpu": cpu, "memory": "1Gi"}}}
    metadata = {"ownerReferences": [{"kind": owner}], "labels": labels}
    return {"metadata": metadata, "spec": {"nodeName": node, "containers": [container]}, "status": {"phase": phase}}


def find_pools(*nodes: Any, pods: Any = (), context: KubernetesContext = CONTEXT) -> list[Pool]:
    return list(list_pools(nodes, pods, context))


@pytest.mark.parametrize(
    ("text", "value"),
    [("7910m", 7.91), ("16Gi", 2**34), ("2", 2.0), ("1e3", 1000.0), ("129M", 129e6), ("?", 0.0), (3, 3.0)],
)
def test_quantities_of_kubernetes_are_parsed_to_numbers(text: str, value: float) -> None:
    assert parse_quantity(text) == pytest.approx(value)


@given(st.integers(0, 10**9), st.sampled_from(["Ki", "Mi", "Gi"]))
def test_binary_units_are_powers_of_1024(number: int, unit: str) -> None:
    assert parse_quantity(f"{number}{unit}") == number * 1024 ** (["Ki", "Mi", "Gi"].index(unit) + 1)


@pytest.mark.parametrize(
    ("label", "value", "name"),
    [
        ("nvidia.com/gpu.product", "NVIDIA-H100-80GB-HBM3", "H100"),
        ("nvidia.com/gpu.product", "NVIDIA-A100-SXM4-80GB", "A100-80GB"),
        ("nvidia.com/gpu.product", "Tesla-T4", "T4"),
        ("cloud.google.com/gke-accelerator", "nvidia-l4", "L4"),
        ("cloud.google.com/gke-accelerator", "nvidia-tesla-v100", "V100"),
        ("cloud.google.com/gke-accelerator", "nvidia-a100-80gb", "A100-80GB"),
        ("k8s.amazonaws.com/accelerator", "nvidia-tesla-t4", "T4"),
        ("karpenter.k8s.aws/instance-gpu-name", "a10g", "A10G"),
        ("skypilot.co/accelerator", "h200", "H200"),
    ],
)
def test_cards_have_the_names_of_the_price_book(label: str, value: str, name: str) -> None:
    assert label in CARD_LABELS
    (pool,) = find_pools(make_node(gpus=8, **{label: value}))
    assert (pool.machine.accelerator, pool.machine.accelerator_count) == (name, 8)
    assert pool.selector == {label: value} and pool.resource == "nvidia.com/gpu"


@pytest.mark.parametrize("product", ["NVIDIA-A100-SXM4-80GB-MIG-1g.10gb", "Tesla-T4-SHARED"])
def test_parts_of_cards_are_not_offered_as_whole_ones(product: str) -> None:
    assert not find_pools(make_node(gpus=4, **{"nvidia.com/gpu.product": product}))


@pytest.mark.parametrize(("label", "value"), SPOT_LABELS.items())
def test_spot_nodes_are_recognised_and_their_taint_tolerated(label: str, value: str) -> None:
    (pool,) = find_pools(make_node(taints=({"key": label, "value": value, "effect": NO_SCHEDULE},), **{label: value}))
    assert pool.is_spot and pool.selector[label] == value
    assert pool.tolerations == [{"key": label, "operator": "Exists", "effect": NO_SCHEDULE}]
    (other,) = find_pools(make_node(**{label: "on-demand"}))
    assert not other.is_spot


def test_pool_named_by_the_user_is_spot() -> None:
    context = KubernetesContext(name="lab", context="lab", spot_pools=("cheap",))
    (pool,) = find_pools(make_node(**{"cloud.google.com/gke-nodepool": "cheap"}), context=context)
    assert pool.is_spot and pool.name == "cheap"


def test_equal_nodes_are_one_pool_without_the_share_of_daemon_sets() -> None:
    pods = [
        make_pod("n0", cpu="500m", owner="DaemonSet"),
        make_pod("n1", cpu="4"),
        make_pod("n1", cpu="1", owner="Node"),
    ]
    (pool,) = find_pools(make_node("n0"), make_node("n1"), pods=pods)
    assert pool.node_count == 2
    assert pool.machine == Machine(vcpus=6.9, memory_gib=15.0), "the smaller of both; other pods come and go"


def test_pool_of_unlike_nodes_offers_what_each_of_them_has() -> None:
    small = make_node("n1")
    small["status"]["allocatable"] |= {"memory": "12Gi", "ephemeral-storage": "50Gi"}
    for nodes in ((make_node("n0"), small), (small, make_node("n0"))):
        (pool,) = find_pools(*nodes, pods=[make_pod("n0", cpu="1", owner="DaemonSet")])
        assert (pool.machine, pool.disk_gib) == (Machine(vcpus=6.9, memory_gib=12.0), 45)


def test_shares_that_fit_exactly_are_counted() -> None:
    assert Amount(cpu=0.3).count(Amount(cpu=0.1)) == 3
    assert Amount(cpu=0.3, memory=2.0).count(Amount(cpu=0.1, memory=1.0)) == 2, "the scarcest resource decides"


@pytest.mark.parametrize(
    ("key", "value"), [("eks.amazonaws.com/capacityType", "SPOT"), ("karpenter.sh/capacity-type", "spot")]
)
def test_spot_is_written_as_each_cloud_writes_it(key: str, value: str) -> None:
    assert find_pools(make_node(**{key: value}))[0].is_spot
    assert not find_pools(make_node(**{key: "on-demand"}))[0].is_spot


def test_nodes_that_take_no_pods_are_left_out() -> None:
    cordoned, silent = make_node("a"), make_node("b")
    cordoned["spec"]["unschedulable"] = True
    silent["status"]["conditions"] = [{"type": "Ready", "status": "Unknown"}]
    dedicated = make_node("c", taints=({"key": "dedicated", "value": "db", "effect": NO_SCHEDULE},))
    assert not find_pools(cordoned, silent, dedicated)
    own = KubernetesContext(name="lab", context="lab", tolerations=("dedicated=db",))
    (pool,) = find_pools(cordoned, silent, dedicated, context=own)
    assert pool.tolerations == [{"key": "dedicated", "operator": "Exists", "effect": NO_SCHEDULE}]
    other = KubernetesContext(name="lab", context="lab", tolerations=("dedicated=web",))
    assert not find_pools(dedicated, context=other)
    assert not find_pools(make_node("d", taints=({"key": "maintenance", "effect": "NoExecute"},)))
    preferred = make_node(taints=({"key": "x", "effect": "PreferNoSchedule"},))
    assert find_pools(preferred)[0].tolerations == []


def test_node_selector_of_the_entry_chooses_nodes() -> None:
    context = KubernetesContext(name="lab", context="lab", node_selector={"team": "vision"})
    assert not find_pools(make_node(), context=context)
    assert find_pools(make_node(team="vision"), context=context)


def test_ended_and_unplaced_pods_request_nothing() -> None:
    pods = [make_pod("n0", cpu="1"), make_pod("n0", cpu="2", phase="Succeeded"), make_pod("", cpu="4")]
    assert sum_requests(pods) == {"n0": Amount(cpu=1.0, memory=2.0**30)}


def test_room_is_allocatable_minus_requested() -> None:
    machine = Machine(vcpus=2, memory_gib=4)
    offer = machine.make_offer("kubernetes", "lab", zone="default", ondemand_usd_hour=0.0)
    placement = Placement(offer=offer, is_spot=False, node_count=1)
    request = NodeRequest(owner="o", cluster="c", attempt=1, token="t", placement=placement)
    pool = Pool(name="default", machine=Machine(vcpus=7.9, memory_gib=16), node_count=2, selector={}, disk_gib=90)

    def count(*pods: Any) -> int:
        return count_room([make_node("n0"), make_node("n1")], pods, pool, request, context=CONTEXT)

    assert count() == 6
    assert count(make_pod("n0", cpu="2")) == 5
    assert count(make_pod("n0", cpu="7900m"), make_pod("n1", cpu="7")) == 0
    assert count(make_pod("n0", cpu="2", **{GANG_LABEL: name_gang(request)})) == 6, "its own pods are counted as room"
    assert count(make_pod("n0", cpu="2", **{GANG_LABEL: "another"})) == 5
