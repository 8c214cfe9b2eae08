"""Requests of a launch to EC2: machines that terminate themselves, keep secrets, and admit the right callers only."""

from __future__ import annotations

import base64
import gzip
import json
import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from broker.clouds.aws.image_rules import choose_parameter
from broker.clouds.aws.quotas import find_code
from broker.errors import CapacityError, InvalidRequestError, QuotaError, TransientError, UnknownOutcomeError
from broker.types import MachineSpec, NodeState, Secret, Task
from tests.clouds.aws.bed import OFFER, AwsBed
from tests.clouds.contract import OWNER, make_request, settle, wait_state

CPU = {"accelerator": None, "accelerator_count": 0, "instance_type": "m5.large", "vcpus": 2}


def launch(bed: AwsBed, **request: Any) -> Mapping[str, Any]:
    """Return the parameters of RunInstances."""

    launch_any(bed, **request)
    return next(parameters for action, _, parameters in reversed(bed.account.calls) if action == "ec2:RunInstances")


def launch_any(bed: AwsBed, **request: Any) -> None:
    async def act() -> None:
        await bed.cloud.create_nodes(make_request(bed, **request))

    bed.run(act())


def find_calls(bed: AwsBed, action: str) -> list[Mapping[str, Any]]:
    return [parameters for name, _, parameters in bed.account.calls if name == f"ec2:{action}"]


def test_machine_ends_when_it_switches_itself_off_and_keeps_its_identity_to_itself(bed: AwsBed) -> None:
    asked = launch(bed, node_count=2)
    assert asked["InstanceInitiatedShutdownBehavior"] == "terminate"
    assert asked["MetadataOptions"] == {
        "HttpTokens": "required", "HttpEndpoint": "enabled", "HttpPutResponseHopLimit": 1,
    }  # fmt: skip
    assert (asked["MinCount"], asked["MaxCount"]) == (2, 2)
    assert "IamInstanceProfile" not in asked and "KeyName" not in asked


@pytest.mark.parametrize(
    ("tier", "wanted"),
    [
        (None, {"VolumeType": "gp3", "Iops": 3500, "Throughput": 250}),
        ("low", {"VolumeType": "gp3"}),
        ("best", {"VolumeType": "gp3", "Iops": 16000, "Throughput": 1000}),
        ("ultra", {"VolumeType": "io2", "Iops": 20000}),
    ],
)
def test_disk_is_encrypted_has_the_requested_size_and_is_deleted_with_its_machine(
    bed: AwsBed, tier: str | None, wanted: Mapping[str, Any]
) -> None:
    (disk,) = launch(bed, spec=MachineSpec(disk_size_gib=500, disk_tier=tier))["BlockDeviceMappings"]
    common = {"VolumeSize": 500, "Encrypted": True, "DeleteOnTermination": True}
    assert disk == {"DeviceName": "/dev/sda1", "Ebs": common | wanted}


def test_iops_request_respects_the_disk_size(bed: AwsBed) -> None:
    (disk,) = launch(bed, spec=MachineSpec(disk_size_gib=20, disk_tier="best"))["BlockDeviceMappings"]
    assert disk["Ebs"]["Iops"] == 10_000


def test_disk_is_never_smaller_than_its_image(bed: AwsBed) -> None:
    (disk,) = launch(bed, spec=MachineSpec(disk_size_gib=4))["BlockDeviceMappings"]
    assert disk["Ebs"]["VolumeSize"] == 8


def test_everything_made_carries_the_owner_from_its_first_moment(bed: AwsBed) -> None:
    spec = MachineSpec(labels={"team": "vision", "broker-owner": "mallory"})
    asked = launch(bed, attempt=3, node_count=2, spec=spec, token="t" * 32)
    kinds = {
        each["ResourceType"]: {tag["Key"]: tag["Value"] for tag in each["Tags"]} for each in asked["TagSpecifications"]
    }
    assert set(kinds) == {"instance", "volume", "network-interface"}
    for found in kinds.values():
        assert found == {
            "Name": "train-3", "team": "vision", "broker-owner": OWNER, "broker-cluster": "train",
            "broker-attempt": "3", "broker-token": "t" * 32, "broker-usd-hour": "32.77",
        }  # fmt: skip
    assert asked["ClientToken"] == "t" * 32
    for group in (*bed.account.groups.values(), *bed.account.placement_groups.values()):
        told = {tag["Key"]: tag["Value"] for tag in group["Tags"]}
        assert told == {"broker-owner": OWNER, "broker-cluster": "train", "team": "vision"}


def test_ssh_comes_from_the_caller_only_and_asked_ports_from_everywhere(bed: AwsBed) -> None:
    launch(bed, spec=MachineSpec(ports=("8080", "9000-9010")))
    ((group_id, group),) = bed.account.groups.items()
    assert group["GroupName"] == f"broker-{OWNER}-train"
    everywhere = {"IpRanges": [{"CidrIp": "0.0.0.0/0"}], "Ipv6Ranges": [{"CidrIpv6": "::/0"}]}
    assert group["rules"] == [
        {"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": group_id}]},
        {"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22, "IpRanges": [{"CidrIp": "203.0.113.7/32"}]},
        {"IpProtocol": "tcp", "FromPort": 8080, "ToPort": 8080, **everywhere},
        {"IpProtocol": "tcp", "FromPort": 9000, "ToPort": 9010, **everywhere},
    ]


def test_clusters_of_a_job_group_admit_each_other_and_no_other_cluster(bed: AwsBed) -> None:
    spec = MachineSpec(group="rl-7f3a")
    for cluster, token, given in (
        ("learner", "1" * 32, spec), ("rollout", "2" * 32, spec), ("other", "3" * 32, MachineSpec(group="rl-b2c4")),
        ("lone", "4" * 32, MachineSpec()),
    ):  # fmt: skip
        launch_any(bed, cluster=cluster, token=token, spec=given)
    groups = {group["GroupName"].removeprefix(f"broker-{OWNER}-"): id for id, group in bed.account.groups.items()}
    asked = {
        next(tag["Value"] for tag in call["TagSpecifications"][0]["Tags"] if tag["Key"] == "broker-cluster"):
        call["NetworkInterfaces"][0]["Groups"]
        for call in find_calls(bed, "RunInstances")
    }  # fmt: skip
    assert asked == {
        "learner": [groups["learner"], groups["group-rl-7f3a"]],
        "rollout": [groups["rollout"], groups["group-rl-7f3a"]],
        "other": [groups["other"], groups["group-rl-b2c4"]], "lone": [groups["lone"]],
    }  # fmt: skip
    shared = groups["group-rl-7f3a"]
    assert bed.account.groups[shared]["rules"] == [{"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": shared}]}]


def test_second_attempt_shares_the_cluster_group_and_adds_new_rules(bed: AwsBed) -> None:
    launch(bed)
    bed.settings = replace(bed.settings, ssh_from=("198.51.100.0/24",))
    bed.cloud = bed.reopen()
    launch(bed, attempt=2)
    (group,) = bed.account.groups.values()
    blocks = [rule["IpRanges"][0]["CidrIp"] for rule in group["rules"] if rule.get("FromPort") == 22]
    assert blocks == ["203.0.113.7/32", "198.51.100.0/24"]


def test_unknown_own_address_refuses_instead_of_opening_to_all_addresses(bed: AwsBed) -> None:
    bed.settings = replace(bed.settings, address_url="http://127.0.0.1:9/")
    bed.cloud = bed.reopen()

    async def act() -> None:
        with pytest.raises(TransientError) as caught:
            await bed.cloud.create_nodes(make_request(bed))
        assert "ssh_from" in caught.value.hints[0]

    bed.run(act())
    assert bed.account.instances == {}


@pytest.mark.parametrize(("is_gpu", "node_count", "is_grouped"), [(True, 2, True), (True, 1, False), (False, 2, False)])
def test_only_gangs_of_gpus_are_placed_close_together(
    bed: AwsBed, is_gpu: bool, node_count: int, is_grouped: bool
) -> None:
    bed.offer = OFFER if is_gpu else replace(OFFER, **CPU)
    asked = launch(bed, node_count=node_count)
    assert ("Placement" in asked) is is_grouped
    assert len(bed.account.placement_groups) == is_grouped


def test_best_network_is_efa_where_the_machine_has_it(bed: AwsBed) -> None:
    spec = MachineSpec(network_tier="best")
    (card,) = launch(bed, spec=spec)["NetworkInterfaces"]
    assert card["InterfaceType"] == "efa"
    (group,) = bed.account.groups.values()
    assert {"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": group["GroupId"]}], "Direction": "out"} in group[
        "rules"
    ]
    bed.offer = replace(OFFER, **CPU)
    (card,) = launch(bed, spec=spec, cluster="other")["NetworkInterfaces"]
    assert "InterfaceType" not in card


def test_machine_with_several_cards_has_efa_on_each_where_nodes_need_no_public_address(bed: AwsBed) -> None:
    bed.settings = replace(bed.settings, uses_private_addresses=True)
    bed.cloud = bed.reopen()
    cards = launch(bed, node_count=2, spec=MachineSpec(network_tier="best"))["NetworkInterfaces"]
    kinds = [(card["NetworkCardIndex"], card["DeviceIndex"], card["InterfaceType"]) for card in cards]
    assert kinds == [(0, 0, "efa"), (1, 1, "efa-only"), (2, 1, "efa-only"), (3, 1, "efa-only")]
    (group_id,) = bed.account.groups
    assert all(card["Groups"] == [group_id] and card["DeleteOnTermination"] for card in cards)
    bed.offer = replace(OFFER, zone=None)
    launch_any(bed, cluster="fleet", spec=MachineSpec(network_tier="best"))
    (template,) = bed.account.templates.values()
    (card,) = template["data"]["NetworkInterfaces"]
    assert card["InterfaceType"] == "efa"


@pytest.mark.parametrize(("instance_type", "vcpus"), [("g6e.48xlarge", 192), ("hpc6id.32xlarge", 64)])
def test_machine_has_as_many_efa_as_it_takes_and_one_on_each_card(bed: AwsBed, instance_type: str, vcpus: int) -> None:
    """The first takes fewer than it has cards, the second more; EC2 refuses both other numbers."""
    bed.settings = replace(bed.settings, uses_private_addresses=True)
    bed.cloud = bed.reopen()
    bed.offer = replace(OFFER, instance_type=instance_type, vcpus=vcpus)
    cards = launch(bed, spec=MachineSpec(network_tier="best"))["NetworkInterfaces"]
    assert [card["NetworkCardIndex"] for card in cards] == [0, 1]


@pytest.mark.parametrize(
    ("instance_type", "accelerator", "words"),
    [
        ("p4d.24xlarge", "A100", ("deeplearning", "x86_64")),
        ("g5g.xlarge", "T4g", ("deeplearning", "arm64")),
        ("trn1.32xlarge", "Trainium", ("neuron",)),
        ("m5.large", None, ("canonical", "amd64")),
        ("c6g.xlarge", None, ("canonical", "arm64")),
    ],
)
def test_image_matches_the_machine(instance_type: str, accelerator: str | None, words: tuple[str, ...]) -> None:
    parameter = choose_parameter(replace(OFFER, instance_type=instance_type, accelerator=accelerator))
    assert all(word in parameter for word in words), parameter


@pytest.mark.parametrize(
    ("instance_type", "accelerator", "why"),
    [
        ("p2.xlarge", "K80", "Kepler requires NVIDIA's driver R470"),
        ("g3s.xlarge", "M60", "Maxwell requires NVIDIA's proprietary driver, R580"),
        ("p3.2xlarge", "V100", "Volta requires NVIDIA's proprietary driver, R580"),
        ("p3dn.24xlarge", "V100-32GB", "Volta"),
        ("g4ad.xlarge", "Radeon-Pro-V520", "AMD's driver"),
        ("dl1.24xlarge", "Gaudi", "Habana's driver"),
    ],
)
def test_a_gpu_that_no_public_image_supports_is_refused_before_any_create_unless_an_image_is_named(
    bed: AwsBed, instance_type: str, accelerator: str, why: str
) -> None:
    bed.offer = replace(OFFER, instance_type=instance_type, accelerator=accelerator, vcpus=4)

    async def act() -> None:
        with pytest.raises(InvalidRequestError, match=f"{instance_type}: .*{why}") as caught:
            await bed.cloud.create_nodes(make_request(bed))
        assert "image_id: ami-" in caught.value.hints[0]
        made = {"ec2:RunInstances", "ec2:CreateSecurityGroup", "ec2:CreatePlacementGroup"}
        assert not bed.account.find_actions() & made

    bed.run(act())
    with pytest.raises(
        InvalidRequestError, match="no "
    ):  # the fake has no such machine type; the image is not the problem
        launch(bed, spec=MachineSpec(image_id="ami-0123"))
    assert find_calls(bed, "RunInstances")[-1]["ImageId"] == "ami-0123"


@pytest.mark.parametrize(
    ("image", "booted"),
    [
        (None, "ami-gpu-x86-us-east-1"),
        ("ami-0123", "ami-0123"),
        ("ssm:/aws/service/canonical/x", "ami-plain-x86-us-east-1"),
    ],
)
def test_named_image_boots_instead(bed: AwsBed, image: str | None, booted: str) -> None:
    assert launch(bed, spec=MachineSpec(image_id=image))["ImageId"] == booted


@pytest.mark.parametrize("image", ["docker:ubuntu:22.04", "ami-0missing", "ssm:/nobody/has/this"])
def test_missing_image_is_refused_before_any_create_call(bed: AwsBed, image: str) -> None:
    async def act() -> None:
        with pytest.raises(InvalidRequestError):
            await bed.cloud.create_nodes(make_request(bed, spec=MachineSpec(image_id=image)))

    bed.run(act())
    assert (bed.account.instances, bed.account.groups) == ({}, {})


def test_first_boot_script_arrives_as_it_was_written(bed: AwsBed) -> None:
    asked = launch(bed, boot="#!/bin/sh\necho grüß\n")
    assert base64.b64decode(asked["UserData"]).decode() == "#!/bin/sh\necho grüß\n"


@pytest.mark.parametrize("zone", ["us-east-1b", None], ids=["zone", "fleet"])
def test_long_script_is_packed_and_the_same_each_time(bed: AwsBed, zone: str | None) -> None:
    bed.offer = replace(OFFER, zone=zone)
    boot = "#!/bin/sh\n" + "echo the same again\n" * 2000
    request = make_request(bed, boot=boot)

    async def act() -> None:
        first = await bed.cloud.create_nodes(request)
        again = await bed.reopen().create_nodes(request)
        assert [node.id for node in again] == [node.id for node in first]

    bed.run(act())
    (instance,) = bed.account.instances.values()
    assert len(instance.user_data) < 16384
    assert gzip.decompress(instance.user_data).decode() == boot


def test_script_that_is_too_long_is_refused(bed: AwsBed) -> None:
    noise = random.Random(1).randbytes(20_000).hex()

    async def act() -> None:
        with pytest.raises(InvalidRequestError, match="16384"):
            await bed.cloud.create_nodes(make_request(bed, boot=noise))

    bed.run(act())
    assert bed.account.find_actions() <= {"ec2:DescribeRegions", "ec2:DescribeInstances"}


@pytest.mark.parametrize("zone", ["us-east-1b", None], ids=["zone", "fleet"])
def test_secrets_of_the_task_and_of_the_login_are_in_nothing_that_amazon_keeps(bed: AwsBed, zone: str | None) -> None:
    """Tags, user data and templates can be read by every user of the account, and by every program on the node."""
    bed.offer = replace(OFFER, zone=zone)
    canary = "canary-task-secret"
    task = Task(secrets={"TOKEN": Secret(value=canary)})

    async def act() -> None:
        request = make_request(bed, node_count=2, is_spot=True, boot=f"#!/bin/sh\n# {task.secrets}\n")
        await bed.cloud.create_nodes(request)
        await wait_state(bed, request.token, NodeState.RUNNING, 2)

    bed.run(act())
    sent = json.dumps([parameters for _, _, parameters in bed.account.calls], default=str)
    kept = sent + "".join(each.user_data.decode() for each in bed.account.instances.values())
    assert "broker-owner" in kept and "***" in kept
    assert canary not in kept and "canary-aws-secret" not in kept


def test_insufficient_quota_is_refused_with_figures_before_any_create_call(bed: AwsBed) -> None:
    bed.account.quotas["us-east-1", "L-417A185B"] = 96.0

    async def act() -> None:
        with pytest.raises(QuotaError) as caught:
            await bed.cloud.create_nodes(make_request(bed, node_count=2))
        assert caught.value.message == (
            "quota of us-east-1: 2 x p4d.24xlarge on-demand requires 192 vCPUs, the account's limit is 96"
        )
        assert "--quota-code L-417A185B --region us-east-1 --desired-value 192`" in caught.value.hints[0]

    bed.run(act())
    assert find_calls(bed, "RunInstances") == []


def test_quota_for_exactly_this_gang_is_enough(bed: AwsBed) -> None:
    bed.account.quotas["us-east-1", "L-417A185B"] = 192.0
    assert launch(bed, node_count=2)["MinCount"] == 2


def test_quota_used_by_other_machines_is_reported_with_figures(bed: AwsBed) -> None:
    bed.account.quotas["us-east-1", "L-417A185B"] = 200.0

    async def act() -> None:
        await bed.cloud.create_nodes(make_request(bed, node_count=2))
        with pytest.raises(
            QuotaError, match="requires 96 vCPUs, the account's limit is 200, and other machines run already"
        ) as caught:
            await bed.cloud.create_nodes(make_request(bed))
        assert "--desired-value 296`" in caught.value.hints[0]

    bed.run(act())


@pytest.mark.parametrize(
    ("instance_type", "is_spot", "code"),
    [
        ("p4d.24xlarge", True, "L-7212CCBC"),
        ("p5.48xlarge", True, "L-C4BD4855"),
        ("p5en.48xlarge", False, "L-417A185B"),
        ("p6-b200.48xlarge", True, None),
        ("g6e.xlarge", True, "L-3819A6DF"),
        ("trn2.48xlarge", False, "L-2C3B7624"),
        ("inf2.xlarge", False, "L-1945791B"),
        ("im4gn.large", False, "L-1216C47A"),
        ("t3.micro", True, "L-34B43A08"),
        ("u-6tb1.metal", False, None),
        ("hpc7a.96xlarge", False, None),
    ],
)
def test_machine_counts_for_its_quota(instance_type: str, is_spot: bool, code: str | None) -> None:
    assert find_code(instance_type, is_spot=is_spot) == code


def test_unreadable_quota_does_not_prevent_a_launch(bed: AwsBed) -> None:
    bed.account.fail("GetServiceQuota", "AccessDeniedException")
    assert launch(bed)["MinCount"] == 1


def test_disabled_region_names_the_command_that_enables_it(bed: AwsBed) -> None:
    bed.account.disabled_regions = {"us-east-1"}

    async def act() -> None:
        with pytest.raises(InvalidRequestError) as caught:
            await bed.cloud.create_nodes(make_request(bed))
        assert "aws account enable-region --region-name us-east-1" in caught.value.hints[0]

    bed.run(act())


@pytest.mark.parametrize("zone", ["us-east-1b", None], ids=["zone", "fleet"])
def test_group_that_is_not_yet_visible_is_queried_again(bed: AwsBed, zone: str | None) -> None:
    bed.offer = replace(OFFER, zone=zone)
    bed.account.fail("RunInstances" if zone else "CreateFleet", "InvalidGroup.NotFound")

    async def act() -> None:
        request = make_request(bed)
        with pytest.raises(TransientError):
            await bed.cloud.create_nodes(request)
        assert len(await bed.cloud.create_nodes(request)) == 1

    bed.run(act())


def test_known_token_without_listed_nodes_is_an_unknown_outcome(bed: AwsBed) -> None:
    """They may be listed later: this is neither a refusal nor a list of nodes."""
    bed.account.fail("RunInstances", "IdempotentParameterMismatch")

    async def act() -> None:
        with pytest.raises(UnknownOutcomeError):
            await bed.cloud.create_nodes(make_request(bed))

    bed.run(act())


def test_token_of_another_cluster_is_refused(bed: AwsBed) -> None:
    async def act() -> None:
        await bed.cloud.create_nodes(make_request(bed, token="t" * 32))
        await settle(bed)
        with pytest.raises(InvalidRequestError, match="another request"):
            await bed.cloud.create_nodes(make_request(bed, token="t" * 32, cluster="other"))

    bed.run(act())


def test_own_vpc_profile_and_private_addresses_are_used(bed: AwsBed) -> None:
    settings = replace(
        bed.settings, vpcs={"us-east-1": "vpc-of-us-east-1"}, instance_profile="reader", uses_private_addresses=True
    )
    bed.settings = settings
    bed.cloud = bed.reopen()
    asked = launch(bed)
    assert asked["IamInstanceProfile"] == {"Name": "reader"}
    assert asked["NetworkInterfaces"][0]["AssociatePublicIpAddress"] is False
    assert find_calls(bed, "DescribeVpcs") == []

    async def act() -> None:
        await bed.clock.sleep(60)
        (node,) = await bed.cloud.list_nodes(OWNER)
        assert node.handle == f"ssh://ubuntu@{node.address}:22"

    bed.run(act())


def test_vpc_without_any_subnet_is_refused(bed: AwsBed) -> None:
    bed.settings = replace(bed.settings, vpcs={"us-east-1": "vpc-empty"})
    bed.cloud = bed.reopen()

    async def act() -> None:
        with pytest.raises(InvalidRequestError, match="vpc-empty has no subnet in us-east-1") as caught:
            await bed.cloud.create_nodes(make_request(bed))
        assert "aws ec2 create-subnet --vpc-id vpc-empty" in caught.value.hints[0]

    bed.run(act())


def test_zone_without_a_subnet_counts_as_full_and_others_do_not(bed: AwsBed) -> None:
    """Amazon opens zones in which an old default VPC has no subnet: the search continues elsewhere."""
    bed.account.bare_zones = {"us-east-1b"}

    async def act() -> None:
        with pytest.raises(CapacityError) as caught:
            await bed.cloud.create_nodes(make_request(bed))
        assert caught.value.scope == "zone"
        assert caught.value.message == "vpc-of-us-east-1 has no subnet in us-east-1b, only in us-east-1a, us-east-1c"
        command = "aws ec2 create-default-subnet --region us-east-1 --availability-zone us-east-1b"
        assert command in caught.value.hints[0]
        assert bed.account.groups == {}
        bed.offer = replace(OFFER, zone="us-east-1c")
        assert len(await bed.cloud.create_nodes(make_request(bed))) == 1
        bed.offer = replace(OFFER, zone=None)
        (node,) = await bed.cloud.create_nodes(make_request(bed))
        assert node.zone != "us-east-1b"

    bed.run(act())


def test_spot_zone_with_the_lowest_score_is_skipped_once(bed: AwsBed) -> None:
    """A caller that asks again has no alternative."""
    bed.account.scores = {"us-east-1a": 3, "us-east-1b": 1, "us-east-1c": 9}

    async def act() -> None:
        request = make_request(bed, is_spot=True, node_count=2)
        with pytest.raises(CapacityError) as caught:
            await bed.cloud.create_nodes(request)
        assert caught.value.scope == "zone"
        assert caught.value.message == (
            "AWS rates the chance of 2 x p4d.24xlarge spot in us-east-1b at 1 of 10 now, and in us-east-1c at 9"
        )
        assert find_calls(bed, "RunInstances") == []
        assert len(await bed.cloud.create_nodes(request)) == 2

    bed.run(act())


@pytest.mark.parametrize(
    ("scores", "is_spot"),
    [
        ({"us-east-1a": 3, "us-east-1b": 1}, True),
        ({"us-east-1a": 9, "us-east-1b": 2}, True),
        ({"us-east-1a": 9}, True),
        ({"us-east-1a": 9, "us-east-1b": 1}, False),
    ],
    ids=["nowhere better", "not hopeless", "unknown", "on-demand"],
)
def test_other_scores_do_not_prevent_a_launch(bed: AwsBed, scores: dict[str, int], is_spot: bool) -> None:
    bed.account.scores = scores
    assert launch(bed, is_spot=is_spot)["MinCount"] == 1
    assert len(find_calls(bed, "GetSpotPlacementScores")) == is_spot


@pytest.mark.parametrize("is_spot", [False, True], ids=["on-demand", "spot"])
def test_a_spot_machine_is_bought_once_and_ends_when_it_is_interrupted(bed: AwsBed, is_spot: bool) -> None:
    asked = launch(bed, is_spot=is_spot)
    options = {"SpotInstanceType": "one-time", "InstanceInterruptionBehavior": "terminate"}
    assert asked.get("InstanceMarketOptions") == ({"MarketType": "spot", "SpotOptions": options} if is_spot else None)
    (card,) = asked["NetworkInterfaces"]
    assert card == {
        "DeviceIndex": 0, "Groups": list(bed.account.groups), "DeleteOnTermination": True,
        "SubnetId": "subnet-of-us-east-1b", "AssociatePublicIpAddress": True,
    }  # fmt: skip


def test_the_task_chooses_the_image_before_the_settings_and_these_for_their_region_only(bed: AwsBed) -> None:
    bed.settings = replace(bed.settings, images={"us-east-1": "ami-mine"})
    bed.cloud = bed.reopen()
    assert launch(bed)["ImageId"] == "ami-mine"
    assert launch(bed, spec=MachineSpec(image_id="ami-task"))["ImageId"] == "ami-task"
    bed.offer = replace(OFFER, region="us-west-2", zone="us-west-2a")
    assert launch(bed)["ImageId"] == "ami-gpu-x86-us-west-2", "an image is of one region"
    bed.offer = replace(OFFER, **CPU)
    bed.settings = replace(bed.settings, images={})
    bed.cloud = bed.reopen()
    assert launch(bed)["ImageId"] == "ami-plain-x86-us-east-1"


def test_one_process_boots_each_region_from_an_image_of_its_own(bed: AwsBed) -> None:
    """A public image has one name everywhere, and another id in each region."""
    west = replace(OFFER, region="us-west-2", zone="us-west-2a")
    for offer in (OFFER, west, OFFER):
        bed.offer = offer
        asked = launch(bed, cluster=offer.region)
        assert asked["ImageId"] == f"ami-gpu-x86-{offer.region}"
        assert asked["NetworkInterfaces"][0]["SubnetId"] == f"subnet-of-{offer.zone}"
    assert len(find_calls(bed, "DescribeImages")) == 2


def test_region_without_a_default_vpc_names_both_ways_out(bed: AwsBed) -> None:
    bed.account.has_default_vpc = False

    async def act() -> None:
        with pytest.raises(InvalidRequestError, match="us-east-1 has no default VPC") as caught:
            await bed.cloud.create_nodes(make_request(bed))
        one, other = caught.value.hints
        assert "aws ec2 create-default-vpc --region us-east-1" in one and 'vpcs = {us-east-1 = "vpc-..."}' in other

    bed.run(act())
    assert launch(bed_with_vpc(bed))["NetworkInterfaces"][0]["SubnetId"] == "subnet-of-us-east-1b"


def bed_with_vpc(bed: AwsBed) -> AwsBed:
    bed.settings = replace(bed.settings, vpcs={"us-east-1": "vpc-of-us-east-1"})
    bed.cloud = bed.reopen()
    return bed
