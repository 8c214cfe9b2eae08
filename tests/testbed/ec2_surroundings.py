"""EC2's actions on what surrounds machines: regions, networks, groups, images, templates, disks; SSM, quotas, STS."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from broker.clouds.aws.quotas import QUOTAS
from tests.testbed.ec2_account import QUOTA_VCPUS, TYPES, ZONES, Account
from tests.testbed.ec2_machines import (
    SUBNET,
    Answer,
    Parameters,
    create_fleet,
    create_tags,
    describe_instances,
    run_instances,
    start_instances,
    stop_instances,
    terminate_instances,
)
from tests.testbed.ec2_wire import ApiError

Action = Callable[[Account, str, Mapping[str, Any]], Answer]
ROOT_DEVICE = "/dev/sda1"
RULES_MAX = 60  # inbound rules of a security group: VPC quotas


def describe_regions(account: Account, region: str, asked: Parameters) -> Answer:
    off = account.disabled_regions
    return {
        "Regions": [
            {"RegionName": each, "OptInStatus": "not-opted-in" if each in off else "opt-in-not-required"}
            for each in ZONES
            if each not in off or asked.get("AllRegions")
        ]
    }


def describe_availability_zones(account: Account, region: str, asked: Parameters) -> Answer:
    return {"AvailabilityZones": [{"ZoneName": zone, "ZoneId": zone_id(zone)} for zone in ZONES[region]]}


def zone_id(zone: str) -> str:
    """Return the zone's id, which is the same for all accounts; its name is the account's own."""
    return f"{zone[:3]}1-az{ord(zone[-1]) - ord('a') + 1}"


def describe_vpcs(account: Account, region: str, asked: Parameters) -> Answer:
    wanted = {each["Name"]: each["Values"] for each in asked.get("Filters", ())}
    vpcs = [
        {"VpcId": f"vpc-made-in-{region}", "IsDefault": False},
        {"VpcId": f"vpc-of-{region}", "IsDefault": account.has_default_vpc},
    ]
    is_default = wanted.get("is-default", ["true", "false"])
    return _page(account, asked, "Vpcs", [each for each in vpcs if str(each["IsDefault"]).lower() in is_default])


def describe_subnets(account: Account, region: str, asked: Parameters) -> Answer:
    wanted = {each["Name"]: each["Values"] for each in asked.get("Filters", ())}
    zones = [zone for zone in ZONES[region] if zone not in account.bare_zones]
    if f"vpc-of-{region}" not in wanted["vpc-id"]:
        zones = []
    # Before each zone's own, one that a user added, and one that is still being made: neither takes our machines.
    kinds = (("subnet-added-{zone}", False, "available"), ("subnet-new-{zone}", True, "pending"))
    found = [
        {"SubnetId": name.format(zone=zone), "AvailabilityZone": zone, "DefaultForAz": is_default, "State": state}
        for zone in zones
        for name, is_default, state in (*kinds, (SUBNET, True, "available"))
        if state in wanted.get("state", [state])
    ]
    return _page(account, asked, "Subnets", found)


def create_security_group(account: Account, region: str, asked: Parameters) -> Answer:
    name = asked["GroupName"]
    if any((each["region"], each["GroupName"]) == (region, name) for each in account.groups.values()):
        raise ApiError("InvalidGroup.Duplicate")
    identity = account.make_id("sg")
    account.groups[identity] = {
        "region": region, "GroupId": identity, "GroupName": name, "VpcId": asked["VpcId"], "rules": [],
        "Tags": _tags_of(asked),
    }  # fmt: skip
    return {"GroupId": identity}


def describe_security_groups(account: Account, region: str, asked: Parameters) -> Answer:
    fields = {"group-name": "GroupName", "vpc-id": "VpcId"}
    found = _select(account.groups.values(), region, asked, fields)
    keys = ("GroupId", "GroupName", "VpcId", "Tags")
    shown = [
        {key: each[key] for key in keys} | {"IpPermissions": [one for one in each["rules"] if "Direction" not in one]}
        for each in found
    ]
    return _page(account, asked, "SecurityGroups", shown)


def authorize(account: Account, region: str, asked: Parameters) -> Answer:
    group = account.groups.get(asked["GroupId"])
    if group is None or group["region"] != region:
        raise ApiError("InvalidGroup.NotFound")
    for rule in asked["IpPermissions"]:
        if any(_without_descriptions(rule) == _without_descriptions(each) for each in group["rules"]):
            raise ApiError("InvalidPermission.Duplicate")
        if sum(len(each.get("IpRanges", ("",))) for each in group["rules"] if "Direction" not in each) >= RULES_MAX:
            raise ApiError("RulesPerSecurityGroupLimitExceeded")
        group["rules"].append(rule)
    return {"Return": True}


def _without_descriptions(rule: Parameters) -> Parameters:
    """Return a rule without the parts that do not tell it apart from others."""
    ranges = {
        key: [{name: text for name, text in each.items() if name != "Description"} for each in rule[key]]
        for key in ("IpRanges", "Ipv6Ranges")
        if key in rule
    }
    return {**rule, **ranges}


def revoke(account: Account, region: str, asked: Parameters) -> Answer:
    group = account.groups[asked["GroupId"]]
    for rule in asked["IpPermissions"]:
        kept = [each for each in group["rules"] if _without_descriptions(rule) != _without_descriptions(each)]
        if len(kept) == len(group["rules"]):
            raise ApiError("InvalidPermission.NotFound")
        group["rules"] = kept
    return {"Return": True}


def authorize_egress(account: Account, region: str, asked: Parameters) -> Answer:
    outward = [{**rule, "Direction": "out"} for rule in asked["IpPermissions"]]
    return authorize(account, region, {**asked, "IpPermissions": outward})


def delete_security_group(account: Account, region: str, asked: Parameters) -> Answer:
    identity = asked["GroupId"]
    if identity not in account.groups or account.groups[identity]["region"] != region:
        raise ApiError("InvalidGroup.NotFound")
    for each in account.instances.values():
        if each.state != "terminated" and identity in each.parameters["NetworkInterfaces"][0]["Groups"]:
            raise ApiError("DependencyViolation")
    del account.groups[identity]
    return {}


def create_placement_group(account: Account, region: str, asked: Parameters) -> Answer:
    key = (region, asked["GroupName"])
    if key in account.placement_groups:
        raise ApiError("InvalidPlacementGroup.Duplicate")
    account.placement_groups[key] = {"region": region, "GroupName": asked["GroupName"], "Tags": _tags_of(asked)}
    return {}


def describe_placement_groups(account: Account, region: str, asked: Parameters) -> Answer:
    found = _select(account.placement_groups.values(), region, asked, {})
    return {"PlacementGroups": [{"GroupName": each["GroupName"], "Tags": each["Tags"]} for each in found]}


def delete_placement_group(account: Account, region: str, asked: Parameters) -> Answer:
    name = asked["GroupName"]
    if (region, name) not in account.placement_groups:
        raise ApiError("InvalidPlacementGroup.Unknown")
    for each in account.list_living(region):
        if each.parameters.get("Placement", {}).get("GroupName") == name:
            raise ApiError("InvalidPlacementGroup.InUse")
    del account.placement_groups[region, name]
    return {}


def describe_images(account: Account, region: str, asked: Parameters) -> Answer:
    found = [each for each in asked["ImageIds"] if each.startswith("ami-")]
    if not found or found[0] == "ami-0missing":
        raise ApiError("InvalidAMIID.NotFound")
    disk = {"DeviceName": ROOT_DEVICE, "Ebs": {"VolumeSize": 8}}
    return {
        "Images": [{"ImageId": each, "RootDeviceName": ROOT_DEVICE, "BlockDeviceMappings": [disk]} for each in found]
    }


def describe_instance_types(account: Account, region: str, asked: Parameters) -> Answer:
    return {
        "InstanceTypes": [
            {
                "InstanceType": each,
                "NetworkInfo": {
                    "EfaSupported": TYPES[each]["efa"] > 0,
                    "MaximumNetworkCards": TYPES[each].get("cards", max(1, TYPES[each]["efa"])),
                    "EfaInfo": {"MaximumEfaInterfaces": TYPES[each]["efa"]},
                },
            }
            for each in asked["InstanceTypes"]
        ]
    }


def create_launch_template(account: Account, region: str, asked: Parameters) -> Answer:
    name = asked["LaunchTemplateName"]
    if any((each["region"], each["name"]) == (region, name) for each in account.templates.values()):
        raise ApiError("InvalidLaunchTemplateName.AlreadyExistsException")
    identity = account.make_id("lt")
    account.templates[identity] = {
        "region": region, "name": name, "data": asked["LaunchTemplateData"], "Tags": _tags_of(asked), "id": identity,
    }  # fmt: skip
    return {"LaunchTemplate": {"LaunchTemplateId": identity, "LaunchTemplateName": name}}


def describe_launch_templates(account: Account, region: str, asked: Parameters) -> Answer:
    found = _select(account.templates.values(), region, asked, {})
    templates = [
        {"LaunchTemplateId": each["id"], "LaunchTemplateName": each["name"], "Tags": each["Tags"]} for each in found
    ]
    return _page(account, asked, "LaunchTemplates", templates)


def delete_launch_template(account: Account, region: str, asked: Parameters) -> Answer:
    for identity, each in account.templates.items():
        known = (region, asked.get("LaunchTemplateId", identity), asked.get("LaunchTemplateName", each["name"]))
        if (each["region"], identity, each["name"]) == known:
            del account.templates[identity]
            return {"LaunchTemplate": {"LaunchTemplateId": identity}}
    raise ApiError("InvalidLaunchTemplateName.NotFoundException")


def describe_volumes(account: Account, region: str, asked: Parameters) -> Answer:
    found = _select(account.volumes.values(), region, asked, {"status": "State"})
    return _page(account, asked, "Volumes", [{"VolumeId": each["VolumeId"], "Tags": each["Tags"]} for each in found])


def delete_volume(account: Account, region: str, asked: Parameters) -> Answer:
    if account.volumes.get(asked["VolumeId"], {}).get("region") != region:
        raise ApiError("InvalidVolume.NotFound")
    del account.volumes[asked["VolumeId"]]
    return {}


def get_spot_placement_scores(account: Account, region: str, asked: Parameters) -> Answer:
    """Score zones if they are requested, and otherwise whole regions, which have no zone."""
    if not asked.get("InstanceTypes") or not asked.get("TargetCapacity"):
        raise ApiError("MissingParameter")
    scored = [(zone, score) for zone, score in account.scores.items() if zone[:-1] in asked.get("RegionNames", ZONES)]
    if not asked.get("SingleAvailabilityZone"):
        return {"SpotPlacementScores": [{"Region": zone[:-1], "Score": score} for zone, score in scored]}
    return {
        "SpotPlacementScores": [
            {"Region": zone[:-1], "AvailabilityZoneId": zone_id(zone), "Score": score} for zone, score in scored
        ]
    }


def get_parameter(account: Account, region: str, asked: Parameters) -> Answer:
    if not asked["Name"].startswith("/aws/service/"):
        raise ApiError("ParameterNotFound")
    kinds = {"deeplearning": "gpu", "neuron": "neuron", "canonical": "plain"}
    arch = "arm" if "arm64" in asked["Name"] else "x86"
    image = f"ami-{kinds[asked['Name'].split('/')[3]]}-{arch}-{region}{account.image_date}"
    return {"Parameter": {"Name": asked["Name"], "Value": image}}


def get_service_quota(account: Account, region: str, asked: Parameters) -> Answer:
    code = asked["QuotaCode"]
    return {"Quota": {"QuotaCode": code, "Value": account.quotas.get((region, code), QUOTA_VCPUS)}}


def list_service_quotas(account: Account, region: str, asked: Parameters) -> Answer:
    """List quotas, one per page: real pages are long, and no test reads a second one by accident."""
    codes = sorted({code for pair in QUOTAS.values() for code in pair})
    place = int(asked.get("NextToken", 0))
    more = {"NextToken": str(place + 1)} if place + 1 < len(codes) else {}
    return {"Quotas": [get_service_quota(account, region, {"QuotaCode": codes[place]})["Quota"]], **more}


def get_caller_identity(account: Account, region: str, asked: Parameters) -> Answer:
    who = f"iam::{account.number}:user/ada"
    if account.caller.startswith("ASIA"):
        who = f"sts::{account.number}:assumed-role/{account.caller}/i-1"
    return {"Account": account.number, "Arn": f"arn:{account.partition}:{who}", "UserId": "AIDAFAKE"}


def _page(account: Account, asked: Parameters, key: str, found: list[Any]) -> Answer:
    start = int(asked.get("NextToken") or 0)
    end = start + account.page_size
    return {key: found[start:end], **({"NextToken": str(end)} if end < len(found) else {})}


def _tags_of(asked: Parameters) -> list[dict[str, str]]:
    return [tag for specification in asked.get("TagSpecifications", ()) for tag in specification["Tags"]]


def _select(things: Any, region: str, asked: Parameters, fields: Mapping[str, str]) -> list[Any]:
    def fits(thing: Mapping[str, Any]) -> bool:
        tags = {f"tag:{tag['Key']}": tag["Value"] for tag in thing["Tags"]}
        for each in asked.get("Filters", ()):
            value = thing[fields[each["Name"]]] if each["Name"] in fields else tags.get(each["Name"])
            if value not in each["Values"]:
                return False
        return bool(thing["region"] == region)

    return [thing for thing in things if fits(thing)]


ACTIONS: dict[str, Action] = {
    "ec2:AuthorizeSecurityGroupEgress": authorize_egress,
    "ec2:AuthorizeSecurityGroupIngress": authorize,
    "ec2:CreateFleet": create_fleet,
    "ec2:CreateLaunchTemplate": create_launch_template,
    "ec2:CreatePlacementGroup": create_placement_group,
    "ec2:CreateSecurityGroup": create_security_group,
    "ec2:CreateTags": create_tags,
    "ec2:DeleteLaunchTemplate": delete_launch_template,
    "ec2:DeletePlacementGroup": delete_placement_group,
    "ec2:DeleteSecurityGroup": delete_security_group,
    "ec2:DeleteVolume": delete_volume,
    "ec2:DescribeAvailabilityZones": describe_availability_zones,
    "ec2:DescribeImages": describe_images,
    "ec2:DescribeInstances": describe_instances,
    "ec2:DescribeInstanceTypes": describe_instance_types,
    "ec2:DescribeLaunchTemplates": describe_launch_templates,
    "ec2:DescribePlacementGroups": describe_placement_groups,
    "ec2:DescribeRegions": describe_regions,
    "ec2:DescribeSecurityGroups": describe_security_groups,
    "ec2:DescribeSubnets": describe_subnets,
    "ec2:DescribeVolumes": describe_volumes,
    "ec2:DescribeVpcs": describe_vpcs,
    "ec2:GetSpotPlacementScores": get_spot_placement_scores,
    "ec2:RevokeSecurityGroupIngress": revoke,
    "ec2:RunInstances": run_instances,
    "ec2:StartInstances": start_instances,
    "ec2:StopInstances": stop_instances,
    "ec2:TerminateInstances": terminate_instances,
    "servicequotas:GetServiceQuota": get_service_quota,
    "servicequotas:ListServiceQuotas": list_service_quotas,
    "ssm:GetParameter": get_parameter,
    "sts:GetCallerIdentity": get_caller_identity,
}
