"""The part of its nodes that a run reserves, as sent to the node's agent."""

from __future__ import annotations

import json

import pytest

from broker.errors import UsageError
from broker.runtime.packing import digest_setup
from broker.runtime.reserving import Reservation, count_gpus, describe_cluster, describe_turn, find_reservation
from broker.types import Cluster, ClusterStatus, Offer, Placement, Resources, Task


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


def make_cluster(accelerator: str | None, count: float) -> Cluster:
    offer = Offer(
        cloud="aws", region="r", zone=None, instance_type="x", vcpus=8, memory_gib=64, ondemand_usd_hour=1.0,
        accelerator=accelerator, accelerator_count=count,
    )  # fmt: skip
    placement = Placement(offer=offer, is_spot=False, node_count=1)
    return Cluster(name="dev", status=ClusterStatus.UP, placement=placement, attempt=1)


def ask(*requested: tuple[str | None, float]) -> Task:
    return Task(resources=tuple(Resources(accelerator=name, accelerator_count=count) for name, count in requested))


@pytest.mark.parametrize(
    ("requested", "card_count", "count", "text"),
    [
        ([("T4", 1)], 4, 1, "T4:1"),
        ([("T4", 4)], 4, 4, "T4:4"),
        ([("t4", 2)], 4, 2, "T4:2"),
        ([("T4", 1), ("T4", 4)], 4, 4, "T4:4"),  # the alternative for exactly this machine
        ([("A100", 1), ("T4", 2), ("T4", 1)], 4, 2, "T4:2"),  # else the first that fits
        ([("T4", 8), ("T4", 1)], 4, 1, "T4:1"),
        ([("T4", 0.5)], 1, 0.5, "T4:0.5"),
    ],
)
def test_a_run_reserves_the_alternative_that_fits_best(
    requested: list[tuple[str, float]], card_count: int, count: float, text: str
) -> None:
    found = find_reservation(ask(*requested), make_cluster("T4", card_count))
    assert found == Reservation(count=count, card_count=card_count, variable="CUDA_VISIBLE_DEVICES", text=text)


def test_half_a_request_on_half_a_card_is_all_of_the_device_that_is_sold() -> None:
    found = find_reservation(ask(("T4", 0.25)), make_cluster("T4", 0.5))
    assert found == Reservation(count=0.5, card_count=1, variable="CUDA_VISIBLE_DEVICES", text="T4:0.25")


def test_cards_of_amd_have_their_own_variable_and_tpus_are_not_shared() -> None:
    amd = find_reservation(ask(("MI300X", 1)), make_cluster("MI300X", 8))
    assert amd is not None and amd.variable == "HIP_VISIBLE_DEVICES"
    assert find_reservation(ask(("TPU-v5e", 1)), make_cluster("TPU-v5e", 4)) is None


def test_run_that_would_never_start_is_refused_and_one_without_accelerators_gets_the_node() -> None:
    with pytest.raises(UsageError, match=r"requests T4:8 or A100:1 .* have T4:4"):
        find_reservation(ask(("T4", 8), ("A100", 1)), make_cluster("T4", 4))
    with pytest.raises(UsageError, match="have no accelerators"):
        find_reservation(ask(("T4", 1)), make_cluster(None, 0))
    assert find_reservation(ask((None, 0)), make_cluster("T4", 4)) is None
    assert find_reservation(ask(("A100", 1), (None, 0)), make_cluster("T4", 4)) is None


def test_number_of_gpus_of_a_program_is_what_it_reserved_or_all_of_the_node() -> None:
    cluster = make_cluster("T4", 4)
    assert count_gpus(ask(("T4", 1)), cluster, find_reservation(ask(("T4", 1)), cluster)) == 1
    assert count_gpus(ask((None, 0)), cluster, None) == 4
    assert count_gpus(ask(("T4", 2)), make_cluster(None, 0), None) == 2
    assert count_gpus(ask((None, 0)), make_cluster(None, 0), None) == 0


def test_setup_is_run_again_if_its_text_its_image_or_its_variables_change() -> None:
    task = Task(setup="pip install x", envs={"A": "1", "B": "2"})
    others = [
        (Task(setup="pip install y", envs=task.envs), None), (task, "image:1"), (task, "image:2"),
        (Task(setup=task.setup, envs={"A": "1"}), None), (Task(setup=task.setup, envs={"A": "2", "B": "1"}), None),
    ]  # fmt: skip
    assert len({digest_setup(task, None), *(digest_setup(*each) for each in others)}) == 6
    assert digest_setup(task, None) == digest_setup(Task(setup=task.setup, envs={"B": "2", "A": "1"}), None)
