"""A gang's open ports, and their removal."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from broker.clouds.base import CanSweep
from broker.clouds.gcp.settings import Settings
from broker.errors import AuthError, QuotaError, UnknownOutcomeError
from broker.types import MachineSpec, NodeRequest

Make = Callable[..., NodeRequest]


def read_rules(bench: Any) -> dict[str, Any]:
    bench.gce.answer("GET", "/compute/v1/projects/pretend/global/firewalls", {}, {})
    return {name.rpartition("-")[2]: rule for name, rule in bench.gce.firewalls.items()}


def test_ssh_is_for_the_caller_ports_for_all_and_nodes_are_among_themselves(bench: Any, request_of: Make) -> None:
    spec = MachineSpec(ports=("8080", "9000-9010"))
    nodes = bench.run(bench.cloud.create_nodes(request_of(node_count=2, spec=spec)))
    rules = read_rules(bench)
    assert rules.keys() == {"shut", "ssh", "nodes", "ports"}
    tags = set(bench.gce.find(nodes[0].id.rpartition("/")[2])["tags"]["items"])
    gang = rules["ssh"]["targetTags"]
    peers = rules["nodes"]["targetTags"]
    assert set(rules["shut"]["targetTags"]) | set(gang) | set(peers) == tags
    assert rules["ssh"]["sourceRanges"] == ["127.0.0.1/32"]
    assert rules["ssh"]["allowed"] == [{"IPProtocol": "tcp", "ports": ["22"]}]
    assert rules["nodes"]["sourceTags"] == peers != gang
    assert rules["ports"]["allowed"] == [{"IPProtocol": "tcp", "ports": ["8080", "9000-9010"]}]
    assert rules["shut"]["denied"] == [{"IPProtocol": "all"}]
    # Lower numbers win, and the default network allows ssh with 65534.
    assert {rules[each]["priority"] for each in ("ssh", "nodes", "ports")} == {900}
    assert 900 < rules["shut"]["priority"] < 65534


def test_a_node_made_later_for_the_same_attempt_is_among_the_others(bench: Any, request_of: Make) -> None:
    bench.run(bench.cloud.create_nodes(request_of(node_count=2)))
    (later,) = bench.run(bench.cloud.create_nodes(request_of(token="1" * 32)))
    (other,) = bench.run(bench.cloud.create_nodes(request_of(token="2" * 32, attempt=2)))
    rules = read_rules(bench)
    (peers,) = rules["nodes"]["targetTags"]
    has_tag = [peers in bench.gce.find(node.id.rpartition("/")[2])["tags"]["items"] for node in (later, other)]
    assert has_tag == [True, False]


def test_clusters_of_a_job_group_admit_each_other_and_no_other_cluster(bench: Any, request_of: Make) -> None:
    def launch(cluster: str, token: str, group: str) -> tuple[str, set[str]]:
        request = request_of(cluster=cluster, token=token * 32, spec=MachineSpec(group=group))
        (node,) = bench.run(bench.cloud.create_nodes(request))
        name = node.id.rpartition("/")[2]
        return name.rpartition("-")[0], set(bench.gce.find(name)["tags"]["items"])

    (learner, learner_tags), (_, rollout_tags), (_, other_tags), (lone, lone_tags) = (
        launch("learner", "1", "rl-7f3a"), launch("rollout", "2", "rl-7f3a"), launch("other", "3", "rl-b2c4"),
        launch("lone", "4", ""),
    )  # fmt: skip
    read_rules(bench)
    rule = bench.gce.firewalls[f"{learner}-group"]
    assert rule["targetTags"] == [learner] and rule["allowed"] == [{"IPProtocol": "all"}]
    sources = set(rule["sourceTags"])
    assert sources <= learner_tags and sources <= rollout_tags
    assert not sources & other_tags and not sources & lone_tags
    assert f"{lone}-group" not in bench.gce.firewalls


def test_a_lone_node_without_ports_has_one_rule_of_its_own(bench: Any, request_of: Make) -> None:
    bench.run(bench.cloud.create_nodes(request_of()))
    assert read_rules(bench).keys() == {"shut", "ssh"}


@pytest.mark.parametrize("how", ["terminated", "preempted"])
def test_rules_are_deleted_with_the_last_node_of_their_gang(bench: Any, request_of: Make, how: str) -> None:
    nodes = bench.run(bench.cloud.create_nodes(request_of(node_count=2)))
    names = [node.id.rpartition("/")[2] for node in nodes]
    bench.gce.preempt(names[0])
    bench.run(bench.cloud.list_nodes(nodes[0].owner))
    assert read_rules(bench).keys() == {"shut", "ssh", "nodes"}
    if how == "preempted":
        bench.gce.preempt(names[1])
    else:
        bench.run(bench.cloud.terminate_nodes([nodes[1]]))
    bench.run(bench.cloud.list_nodes(nodes[0].owner))
    assert read_rules(bench).keys() == {"shut"}


def test_rules_of_a_call_that_was_cut_short_are_swept_and_others_are_not(bench: Any, request_of: Make) -> None:
    assert isinstance(bench.cloud, CanSweep)
    bench.run(bench.cloud.create_nodes(request_of(cluster="living")))
    bench.gce.fail("POST", "us-central1-a/instances")  # nothing is created, nothing answered
    with pytest.raises(UnknownOutcomeError):
        bench.run(bench.cloud.create_nodes(request_of(cluster="starting", token="1" * 32)))
    bench.gce.fail("POST", "us-central1-a/instances")
    with pytest.raises(UnknownOutcomeError):
        bench.run(bench.cloud.create_nodes(request_of(cluster="lost", token="2" * 32)))
    assert len(bench.gce.firewalls) == 4
    assert bench.run(bench.cloud.sweep("0123456789ab", {"starting"})) == 1
    read_rules(bench)
    assert len(bench.gce.firewalls) == 3
    assert not any("lost" in rule["description"] for rule in bench.gce.firewalls.values())
    assert bench.run(bench.cloud.sweep("0123456789ab", {"starting"})) == 0
    assert bench.run(bench.cloud.sweep("somebody", set())) == 0


def test_an_unreachable_gang_is_terminated(bench: Any, request_of: Make) -> None:
    bench.gce.fail("POST", "global/firewalls", code="QUOTA_EXCEEDED", times=9)
    with pytest.raises(QuotaError):
        bench.run(bench.cloud.create_nodes(request_of(node_count=2)))
    assert bench.gce.list_names() == []


def test_without_permission_to_open_ports_no_machine_is_created(bench: Any, request_of: Make) -> None:
    from broker.clouds.gcp.policy import PERMISSIONS

    bench.gce.allowed = set(PERMISSIONS) - {"compute.firewalls.create"}
    with pytest.raises(AuthError) as caught:
        bench.run(bench.cloud.create_nodes(request_of()))
    assert "compute.firewalls.create" in caught.value.message
    assert bench.gce.calls["POST zones/instances"] == 0


def test_an_adopted_gang_gets_the_firewall_rules_its_first_call_missed(bench: Any, request_of: Make) -> None:
    nodes = bench.run(bench.cloud.create_nodes(request_of()))
    bench.gce.firewalls.clear()
    assert bench.run(bench.make_cloud().create_nodes(request_of())) == nodes
    assert read_rules(bench).keys() == {"shut", "ssh"}


def test_ssh_from_a_new_address_is_admitted_once_and_the_old_one_stays(bench: Any, request_of: Make) -> None:
    nodes = bench.run(bench.cloud.create_nodes(request_of(node_count=2)))
    assert bench.run(bench.cloud.renew_access(nodes)) is False
    moved = bench.make_cloud()
    moved._launcher._find_callers = lambda login: ("198.51.100.9/32",)
    assert bench.run(moved.renew_access(nodes)) is True
    assert read_rules(bench)["ssh"]["sourceRanges"] == ["127.0.0.1/32", "198.51.100.9/32"]
    assert read_rules(bench)["ssh"]["allowed"] == [{"IPProtocol": "tcp", "ports": ["22"]}]
    assert bench.run(moved.renew_access(nodes)) is False


def test_an_address_is_queried_again_after_a_minute(bed: Any, request_of: Make) -> None:
    """A daemon outlives its address: later gangs admit its new one."""
    addresses = iter(["203.0.113.7/32", "198.51.100.9/32"])
    cloud = bed.reopen()
    cloud._launcher._find_callers = lambda login: (next(addresses),)

    async def act() -> None:
        await cloud.create_nodes(request_of(token="1" * 32))
        await bed.clock.sleep(120)
        await cloud.create_nodes(request_of(token="2" * 32))

    asyncio.run(act())
    ranges = [rule["sourceRanges"] for name, rule in sorted(bed.gce.firewalls.items()) if name.endswith("-ssh")]
    assert sorted(ranges) == [["198.51.100.9/32"], ["203.0.113.7/32"]]


@pytest.mark.parametrize(
    "named", ["projects/pretend/regions/us-east4/subnetworks/mine", "regions/us-east4/subnetworks/mine"]
)
def test_rules_are_in_the_network_of_the_subnetwork_that_the_settings_name(
    bench: Any, request_of: Make, named: str
) -> None:
    bench.gce.subnetworks = {
        ("us-east4", "mine"): "projects/pretend/global/networks/vpc",
        ("us-central1", "mine"): "projects/pretend/global/networks/other",
    }
    bench.gce.networks = {"vpc"}
    cloud = bench.make_cloud(settings=Settings(network=named))
    (node,) = bench.run(cloud.create_nodes(request_of(spec=MachineSpec(ports=("80",)))))
    assert {rule["network"] for rule in read_rules(bench).values()} == {"projects/pretend/global/networks/vpc"}
    (interface,) = bench.gce.find(node.id.rpartition("/")[2])["networkInterfaces"]
    assert interface["subnetwork"] == named and "network" not in interface
    bench.run(cloud.check())
    bench.gce.networks = {"other"}
    with pytest.raises(AuthError, match="network"):
        bench.run(cloud.check())


def test_rules_of_a_shared_network_are_in_the_project_that_shares_it(bench: Any, request_of: Make) -> None:
    """Google refuses a rule whose network is in another project, so that no launch in a Shared VPC succeeded."""
    bench.gce.host_project, bench.gce.networks = "host", {"vpc"}
    bench.gce.subnetworks = {("us-east4", "mine"): "projects/host/global/networks/vpc"}
    settings = Settings(network="projects/host/regions/us-east4/subnetworks/mine")
    cloud = bench.make_cloud(settings=settings)
    (node,) = bench.run(cloud.create_nodes(request_of()))
    assert node.account == bench.gce.project and len(read_rules(bench)) == 2
    later = bench.make_cloud(settings=replace(settings, ssh_from=("198.51.100.9/32",)))
    assert bench.run(later.renew_access([node])) is True
    bench.run(cloud.terminate_nodes([node]))
    bench.run(cloud.list_nodes(node.owner))
    assert {name.rpartition("-")[2] for name in bench.gce.firewalls} == {"shut"}
