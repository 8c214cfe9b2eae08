"""EC2's actions on machines: launched, described, stopped, started, ended; fleets with their templates."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from tests.testbed.ec2_account import ACCOUNT, QUOTA_VCPUS, TYPES, ZONES, Account, Instance
from tests.testbed.ec2_wire import ApiError

Parameters = Mapping[str, Any]
Answer = dict[str, Any]
SUBNET = "subnet-of-{zone}"


def run_instances(account: Account, region: str, asked: Parameters) -> Answer:
    zone = _find_zone(region, asked["NetworkInterfaces"][0].get("SubnetId"))
    _check_cards(asked["NetworkInterfaces"], asked["InstanceType"])
    token = asked.get("ClientToken", "")
    text = json.dumps({**asked, "ClientToken": ""}, sort_keys=True, default=str)
    known = account.launches.get((zone, token))
    if token and known:
        before, ids = known
        if before != text:
            raise ApiError("IdempotentParameterMismatch")
        if all(id not in account.instances or account.instances[id].state == "terminated" for id in ids):
            raise ApiError("IdempotentInstanceTerminated")
    else:
        is_spot = "InstanceMarketOptions" in asked
        count = _count_available(account, region, zone, asked["InstanceType"], asked["MaxCount"], is_spot=is_spot)
        if count < asked["MinCount"]:
            raise ApiError("InsufficientInstanceCapacity", status=500)
        _check_placement_group(account, region, zone, asked)
        data = base64.b64decode(asked.get("UserData", ""))
        ids = [_launch(account, region, zone, asked, index, is_spot, data).id for index in range(count)]
        account.launches[zone, token] = (text, ids)
    machines = [describe(account, account.instances[id]) for id in ids if id in account.instances]
    return {"ReservationId": account.make_id("r"), "OwnerId": ACCOUNT, "Instances": machines}


def _check_placement_group(account: Account, region: str, zone: str, asked: Parameters) -> None:
    """Refuse a group that does not exist, or whose machines are in another zone until all of them have ended."""
    name = asked.get("Placement", {}).get("GroupName")
    if name is None:
        return
    if (region, name) not in account.placement_groups:
        raise ApiError("InvalidPlacementGroup.Unknown")
    for each in account.instances.values():
        is_in_group = each.region == region and each.parameters.get("Placement", {}).get("GroupName") == name
        if is_in_group and each.state != "terminated" and each.zone != zone:
            raise ApiError("InvalidPlacementGroup.InUse", f"{name} is in use in another availability zone: {each.zone}")


def _check_cards(cards: Any, kind: str) -> None:
    if len(cards) > 1 and any("AssociatePublicIpAddress" in each for each in cards):
        raise ApiError("InvalidParameterCombination", "no public address for several network interfaces")
    fabric = [each for each in cards if each.get("InterfaceType", "").startswith("efa")]
    places = {(each.get("NetworkCardIndex", 0), each["DeviceIndex"]) for each in cards}
    if len(fabric) > TYPES.get(kind, {"efa": 0})["efa"] or len(places) < len(cards):
        raise ApiError("InvalidParameterCombination", "more interfaces than the machine has cards for")


def _find_zone(region: str, subnet: str | None) -> str:
    for zone in ZONES[region]:
        if subnet in (None, SUBNET.format(zone=zone)):
            return zone
    raise ApiError("InvalidSubnetID.NotFound")


def _count_available(account: Account, region: str, zone: str, kind: str, count: int, *, is_spot: bool) -> int:
    from broker.clouds.aws.quotas import find_code

    if kind not in TYPES:
        raise ApiError("InvalidParameterValue", f"no {kind}")
    code = find_code(kind, is_spot=is_spot)
    if code:
        mine = (each for each in account.list_living(region) if find_code(each.type, is_spot=each.is_spot) == code)
        used = sum(TYPES[each.type]["vcpus"] for each in mine if each.is_spot is is_spot)
        if used + TYPES[kind]["vcpus"] * count > account.quotas.get((region, code), QUOTA_VCPUS):
            raise ApiError("MaxSpotInstanceCountExceeded" if is_spot else "VcpuLimitExceeded")
    standing = sum((each.zone, each.type) == (zone, kind) for each in account.list_living(region))
    return 0 if (zone, kind) in account.full else min(count, account.room.get((zone, kind), 10**6) - standing)


def _launch(
    account: Account, region: str, zone: str, asked: Parameters, index: int, is_spot: bool, data: bytes
) -> Instance:
    now_s = account.clock.now_s()
    group = asked["NetworkInterfaces"][0]["Groups"][0]
    if account.groups.get(group, {}).get("region") != region:
        raise ApiError("InvalidGroup.NotFound")
    if len(data) > 16384:
        raise ApiError("InvalidParameterValue", "User data is limited to 16384 bytes")
    tags = {
        tag["Key"]: tag["Value"]
        for specification in asked.get("TagSpecifications", ())
        if specification["ResourceType"] == "instance"
        for tag in specification["Tags"]
    }
    instance = Instance(
        id=account.make_id("i"), region=region, zone=zone, type=asked["InstanceType"], index=index, is_spot=is_spot,
        tags=tags, launched_s=now_s, visible_s=now_s + account.list_lag_s, parameters=asked, user_data=data,
    )  # fmt: skip
    account.instances[instance.id] = instance
    account.boot(instance)
    return instance


def describe(account: Account, instance: Instance) -> Answer:
    is_up = instance.state not in ("shutting-down", "terminated")
    found: Answer = {
        "InstanceId": instance.id,
        "InstanceType": instance.type,
        "ImageId": instance.parameters["ImageId"],
        "AmiLaunchIndex": instance.index,
        "LaunchTime": instance.launched_s,
        "State": {"Name": instance.state, "Code": 0},
        "Placement": {"AvailabilityZone": instance.zone},
        "Tags": [{"Key": key, "Value": value} for key, value in instance.tags.items() if not key.startswith("fake:")],
    }
    if is_up and instance.private_address:
        found["PrivateIpAddress"] = instance.private_address
    if is_up and instance.public_address:
        found["PublicIpAddress"] = instance.public_address
    if instance.is_spot:
        found["InstanceLifecycle"] = "spot"
    if instance.reason_code:
        found["StateReason"] = {"Code": instance.reason_code, "Message": instance.reason}
        text = instance.reason
        if text.startswith("User initiated") and "fake:ended" in instance.tags:
            text += datetime.fromtimestamp(account.clock.now_s(), UTC).strftime(" (%Y-%m-%d %H:%M:%S GMT)")
            instance.reason = text
        found["StateTransitionReason"] = text
    return found


def describe_instances(account: Account, region: str, asked: Parameters) -> Answer:
    """Describe machines, eventually consistently: a machine younger than the lag is missing."""
    now_s = account.clock.now_s()
    wanted = [
        each
        for each in account.instances.values()
        if each.region == region and each.visible_s <= now_s and _matches(each, asked.get("Filters", ()))
    ]
    start = int(asked.get("NextToken") or 0)
    page = wanted[start : start + account.page_size]
    answer: Answer = {"Reservations": [{"Instances": [describe(account, each)]} for each in page]}
    if start + account.page_size < len(wanted):
        answer["NextToken"] = str(start + account.page_size)
    return answer


def _matches(instance: Instance, filters: Any) -> bool:
    for each in filters:
        name = each["Name"]
        if name.startswith("tag:"):
            value = instance.tags.get(name.removeprefix("tag:"))
        else:
            value = {"instance-id": instance.id, "instance-state-name": instance.state}[name]
        if value not in each["Values"]:
            return False
    return True


def _find(account: Account, region: str, asked: Parameters) -> list[Instance]:
    """Find all requested ids or none, as EC2 does."""
    now_s = account.clock.now_s()
    found = [account.instances.get(id) for id in asked["InstanceIds"]]
    if any(each is None or each.region != region or each.visible_s > now_s for each in found):
        raise ApiError("InvalidInstanceID.NotFound")
    return [each for each in found if each]


def _change(key: str, is_possible: Callable[[Instance], bool], effect: Callable[[Account, Instance], None]) -> Any:
    def act(account: Account, region: str, asked: Parameters) -> Answer:
        found = _find(account, region, asked)
        for each in found:
            if key != "TerminatingInstances" and each.state in ("shutting-down", "terminated"):
                raise ApiError("IncorrectInstanceState")
            if key == "StoppingInstances" and each.is_spot:
                raise ApiError("UnsupportedOperation")
        # One protected machine keeps those of its zone; others are terminated, and yet the call is an error.
        kept = {each.zone for each in found if each.is_protected and key == "TerminatingInstances"}
        for each in found:
            if is_possible(each) and each.zone not in kept:
                effect(account, each)
        if kept:
            raise ApiError("OperationNotPermitted")
        return {key: [{"InstanceId": each.id, "CurrentState": {"Name": each.state, "Code": 0}} for each in found]}

    return act


terminate_instances = _change(
    "TerminatingInstances",
    lambda each: True,
    lambda account, each: account.end(each, "Client.UserInitiatedShutdown", "User initiated"),
)
stop_instances = _change("StoppingInstances", lambda each: each.state in ("pending", "running"), Account.halt)
start_instances = _change("StartingInstances", lambda each: each.state == "stopped", Account.boot)


def create_tags(account: Account, region: str, asked: Parameters) -> Answer:
    for identity in asked["Resources"]:
        if identity not in account.instances or account.instances[identity].region != region:
            raise ApiError("InvalidInstanceID.NotFound")
        account.instances[identity].tags.update({tag["Key"]: tag["Value"] for tag in asked["Tags"]})
    return {}


def create_fleet(account: Account, region: str, asked: Parameters) -> Answer:
    """Create an instant fleet: all machines in the first zone that has them, by priority."""
    token = asked["ClientToken"]
    text = json.dumps({**asked, "ClientToken": ""}, sort_keys=True)
    if (region, token) in account.launches:
        before, answer = account.launches[region, token]
        if before != text:
            raise ApiError("IdempotentParameterMismatch")
        return dict(answer)
    (config,) = asked["LaunchTemplateConfigs"]
    name = config["LaunchTemplateSpecification"]["LaunchTemplateName"]
    template = next(
        (each for each in account.templates.values() if (each["region"], each["name"]) == (region, name)), None
    )
    if template is None:
        raise ApiError("InvalidLaunchTemplateName.NotFoundException")
    capacity = asked["TargetCapacitySpecification"]
    count, is_spot = capacity["TotalTargetCapacity"], capacity["DefaultTargetCapacityType"] == "spot"
    options = asked["SpotOptions" if is_spot else "OnDemandOptions"]
    assert options["MinTargetCapacity"] == count and options["SingleAvailabilityZone"], "a gang is all or nothing"
    answer = _fill_fleet(account, region, template["data"], config["Overrides"], count, is_spot=is_spot)
    account.launches[region, token] = (text, answer)
    return answer


def _fill_fleet(
    account: Account, region: str, data: Parameters, overrides: Any, count: int, *, is_spot: bool
) -> Answer:
    fleet = account.make_id("fleet")
    answer: Answer = {"FleetId": fleet, "Errors": [], "Instances": []}
    given = count if account.partial_fleet is None else account.partial_fleet
    for override in sorted(overrides, key=lambda each: each.get("Priority", 0.0)):
        zone = _find_zone(region, override["SubnetId"])
        chosen = {"Overrides": {"SubnetId": override["SubnetId"], "AvailabilityZone": zone}}
        try:
            if zone in account.fleet_errors:
                raise ApiError(account.fleet_errors[zone])
            if _count_available(account, region, zone, data["InstanceType"], count, is_spot=is_spot) < count:
                raise ApiError("InsufficientInstanceCapacity")
            _check_placement_group(account, region, zone, data)
        except ApiError as error:
            failed = {"ErrorCode": error.code, "ErrorMessage": error.message, "LaunchTemplateAndOverrides": chosen}
            answer["Errors"].append(failed)
            continue
        boot = base64.b64decode(data.get("UserData", ""))
        _check_cards(data["NetworkInterfaces"], data["InstanceType"])
        made = [_launch(account, region, zone, data, 0, is_spot, boot) for _ in range(given)]
        for instance in made:
            instance.tags["aws:ec2:fleet-id"] = fleet
        for first in range(0, len(made), account.fleet_group_size):
            group = {
                "LaunchTemplateAndOverrides": chosen,
                "Lifecycle": "spot" if is_spot else "on-demand",
                "InstanceIds": [each.id for each in made[first : first + account.fleet_group_size]],
                "InstanceType": data["InstanceType"],
            }
            answer["Instances"].append(group)
        if given < count and not account.partial_is_silent:
            short = {
                "ErrorCode": "InsufficientInstanceCapacity",
                "ErrorMessage": "",
                "LaunchTemplateAndOverrides": chosen,
            }
            answer["Errors"].append(short)
        break
    return answer
