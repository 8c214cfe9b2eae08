"""The part of its nodes that a run reserves, as sent to the node's agent."""

from __future__ import annotations

import json

import pytest

from broker.runtime.reserving import Reservation, describe_cluster, describe_turn
from broker.types import Cluster, ClusterStatus, Offer, Placement


def test_a_run_without_accelerators_waits_for_its_turn_too() -> None:
    """The agent lets a gang's head decide for all ranks of a run that has a turn: otherwise gangs block each other."""
    assert describe_turn(None) == {"count": None}


def test_a_reservation_names_its_share_and_the_variable_that_limits_the_program() -> None:
    reserved = Reservation(count=0.5, card_count=8, variable="CUDA_VISIBLE_DEVICES", text="T4:0.5")
    assert describe_turn(reserved) == {"count": 0.5, "card_count": 8, "variable": "CUDA_VISIBLE_DEVICES"}


@pytest.mark.parametrize(("cloud", "name"), [("aws", "AWS"), ("azure", "Azure"), ("kubernetes", "Kubernetes")])
def test_a_run_learns_its_cluster_as_in_skypilot(cloud: str, name: str) -> None:
    offer = Offer(
        cloud=cloud, region="r", zone=None, instance_type="x", vcpus=8, memory_gib=64, ondemand_usd_hour=1.0
    )  # fmt: skip
    placement = Placement(offer=offer, is_spot=False, node_count=1)
    found = json.loads(describe_cluster(Cluster(name="dev", status=ClusterStatus.UP, placement=placement, attempt=1)))
    assert found == {"cluster_name": "dev", "cloud": name, "region": "r", "zone": None}
