"""Permissions that an EC2 call needs: every object it touches, with its existing tags and those it is given."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tests.testbed.ec2_account import ACCOUNT, Account
from tests.testbed.ec2_policy import Target

Needed = tuple[str, list[Target]]


def list_targets(account: Account, action: str, region: str, asked: Mapping[str, Any]) -> Iterator[Needed]:
    """List pairs of an action and its target."""
    name = action.partition(":")[2]
    if name.startswith(("Describe", "Get", "List")):
        yield action, [Target(arn="*")]
    elif name == "RunInstances":
        yield from _launch(account, region, asked, action="RunInstances", is_spot="InstanceMarketOptions" in asked)
    elif name == "CreateFleet":
        yield from _fleet(account, region, asked)
    elif name.startswith("Create") and name != "CreateTags":
        yield from _create(region, name, asked)
    else:
        yield action, [_existing(account, region, kind, identity) for kind, identity in _list_existing(asked)]


def _arn(region: str, kind: str, identity: str = "new") -> str:
    return f"arn:aws:ec2:{region}:{'' if kind == 'image' else ACCOUNT}:{kind}/{identity}"


def _tags(asked: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    return {
        each["ResourceType"]: {tag["Key"]: tag["Value"] for tag in each["Tags"]}
        for each in asked.get("TagSpecifications", ())
    }


def _launch(account: Account, region: str, asked: Mapping[str, Any], *, action: str, is_spot: bool) -> Iterator[Needed]:
    given = _tags(asked)
    made = ["instance", "volume", "network-interface", *(["spot-instances-request"] if is_spot else [])]
    targets = [Target(arn=_arn(region, kind), request_tags=given.get(kind, {})) for kind in made]
    card = asked["NetworkInterfaces"][0]
    targets += [
        Target(arn=_arn(region, "image", asked["ImageId"])),
        Target(arn=_arn(region, "subnet", card.get("SubnetId", "any"))),
        _existing(account, region, "security-group", card.get("Groups", ["sg-default"])[0]),
    ]
    if "Placement" in asked:
        targets.append(_existing(account, region, "placement-group", asked["Placement"]["GroupName"]))
    yield "ec2:RunInstances", targets
    tagged = [Target(arn=_arn(region, kind), request_tags=tags, create_action=action) for kind, tags in given.items()]
    yield "ec2:CreateTags", tagged


def _fleet(account: Account, region: str, asked: Mapping[str, Any]) -> Iterator[Needed]:
    (config,) = asked["LaunchTemplateConfigs"]
    name = config["LaunchTemplateSpecification"]["LaunchTemplateName"]
    template = next((each for each in account.templates.values() if each["name"] == name), None)
    fleet_tags = _tags(asked).get("fleet", {})
    targets = [Target(arn=_arn(region, "fleet"), request_tags=fleet_tags)]
    if template:
        targets.append(_existing(account, region, "launch-template", template["id"]))
    yield "ec2:CreateFleet", targets
    yield "ec2:CreateTags", [Target(arn=_arn(region, "fleet"), request_tags=fleet_tags, create_action="CreateFleet")]
    if template:
        is_spot = asked["TargetCapacitySpecification"]["DefaultTargetCapacityType"] == "spot"
        yield from _launch(account, region, template["data"], action="CreateFleet", is_spot=is_spot)


def _create(region: str, name: str, asked: Mapping[str, Any]) -> Iterator[Needed]:
    ((kind, tags),) = _tags(asked).items()
    targets = [Target(arn=_arn(region, kind), request_tags=tags)]
    if "VpcId" in asked:
        targets.append(Target(arn=_arn(region, "vpc", asked["VpcId"])))
    yield f"ec2:{name}", targets
    yield "ec2:CreateTags", [Target(arn=_arn(region, kind), request_tags=tags, create_action=name)]


def _list_existing(asked: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """List existing objects that an action names."""
    for identity in (*asked.get("InstanceIds", ()), *asked.get("Resources", ())):
        yield "instance", identity
    if "GroupId" in asked:
        yield "security-group", asked["GroupId"]
    elif "GroupName" in asked:
        yield "placement-group", asked["GroupName"]
    if "VolumeId" in asked:
        yield "volume", asked["VolumeId"]
    if "LaunchTemplateId" in asked or "LaunchTemplateName" in asked:
        yield "launch-template", asked.get("LaunchTemplateId") or asked["LaunchTemplateName"]


def _existing(account: Account, region: str, kind: str, identity: str) -> Target:
    if kind == "instance":
        known = account.instances.get(identity)
        tags = known.tags if known else {}
    else:
        tables: dict[str, Mapping[Any, dict[str, Any]]] = {
            "security-group": account.groups,
            "placement-group": {each["GroupName"]: each for each in account.placement_groups.values()},
            "volume": account.volumes,
            "launch-template": account.templates | {each["name"]: each for each in account.templates.values()},
        }
        found = tables[kind].get(identity, {})
        tags = {tag["Key"]: tag["Value"] for tag in found.get("Tags", ())}
    return Target(arn=_arn(region, kind, identity), resource_tags=tags)
