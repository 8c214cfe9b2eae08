"""The network of nodes: VPC, subnet, one security group per cluster and job group, placement groups of GPU gangs."""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from broker.clouds.aws import tags
from broker.clouds.aws.clients import Clients
from broker.clouds.aws.errors import ApiError
from broker.clouds.aws.settings import Settings
from broker.errors import CapacityError, InvalidRequestError, TransientError
from broker.frozen import frozen
from broker.types import NodeRequest

ADDRESS_S_MAX = 10.0
ANYWHERE = ("0.0.0.0/0", "::/0")
FULL = "RulesPerSecurityGroupLimitExceeded"
RENEWED = "broker: ssh from an address as of"  # begins the description of a later address's rule; the time follows


@frozen
class RegionNetwork:
    """A region's network: `subnets` maps zone to subnet."""

    region: str
    vpc: str
    subnets: Mapping[str, str]


class Network:
    """Find networks, and create the security and placement groups of clusters."""

    def __init__(self, clients: Clients, settings: Settings) -> None:
        self._clients = clients
        self._settings = settings

    async def find_site(self, region: str, *zones: str) -> RegionNetwork:
        """Find the VPC with a subnet of each zone, or of the zones given.

        Raises InvalidRequestError if the region has no usable network, CapacityError if only these zones have none:
        Amazon opens zones in which older VPCs have no subnet.
        """
        named = self._settings.vpcs.get(region)
        vpc = named or await self._find_default_vpc(region)
        filters = [_filter("vpc-id", vpc), _filter("state", "available")]
        found = await self._clients.read_all(region, "describe_subnets", "Subnets", Filters=filters)
        subnets: dict[str, str] = {}
        for subnet in sorted(found, key=lambda each: (not each.get("DefaultForAz"), each["SubnetId"])):
            subnets.setdefault(subnet["AvailabilityZone"], subnet["SubnetId"])
        if not subnets:
            raise InvalidRequestError(
                f"{vpc} has no subnet in {region}", hints=(_hint_subnet(region, next(iter(zones), None), named),)
            )
        chosen = {zone: subnet for zone, subnet in sorted(subnets.items()) if not zones or zone in zones}
        if not chosen:
            message = f"{vpc} has no subnet in {', '.join(zones)}, only in {', '.join(sorted(subnets))}"
            raise CapacityError(message, scope="zone", hints=(_hint_subnet(region, zones[0], named),))
        return RegionNetwork(region=region, vpc=vpc, subnets=chosen)

    async def _find_default_vpc(self, region: str) -> str:
        filters = [_filter("is-default", "true")]
        vpcs = await self._clients.read_all(region, "describe_vpcs", "Vpcs", Filters=filters)
        if not vpcs:
            raise InvalidRequestError(
                f"{region} has no default VPC",
                hints=(
                    f"create one with `aws ec2 create-default-vpc --region {region}`",
                    f'or name your own in `aws.toml`: `vpcs = {{{region} = "vpc-..."}}`',
                ),
            )
        return str(vpcs[0]["VpcId"])

    async def ensure_groups(self, request: NodeRequest, site: RegionNetwork) -> tuple[str, ...]:
        """Return the security groups of the cluster and of its job group, created or found, with their rules.

        A security group that others refer to cannot be deleted. So the clusters of a job group do not refer to each
        other: all are in one more group, which the sweeper deletes once no node is in it.
        """
        own = await self._ensure_group(request, site)
        return (own, await self._ensure_job_group(request, site)) if request.spec.group else (own,)

    async def _ensure_job_group(self, request: NodeRequest, site: RegionNetwork) -> str:
        name = f"group-{request.spec.group}"  # no cluster has this name, so that the sweeper always tries
        shared = replace(request, cluster=name)
        group_id = await self._find_or_create(shared, site, f"broker: all nodes of {request.spec.group}")
        await self._add_rule(site.region, group_id, _allow_group(group_id), "authorize_security_group_ingress")
        return group_id

    async def _ensure_group(self, request: NodeRequest, site: RegionNetwork) -> str:
        group_id = await self._find_or_create(request, site, f"broker: nodes of {request.cluster}")
        blocks = self._settings.ssh_from or await self._find_own_block()
        for rule in make_rules(group_id, request.spec.ports, blocks):
            await self._add_rule(site.region, group_id, rule, "authorize_security_group_ingress")
        if request.spec.network_tier == "best":
            # EFA's traffic has no IP addresses, so the usual rule to everywhere does not cover it (EC2 guide, EFA).
            await self._add_rule(site.region, group_id, _allow_group(group_id), "authorize_security_group_egress")
        return group_id

    async def _find_or_create(self, request: NodeRequest, site: RegionNetwork, description: str) -> str:
        group_id = await self._find_group(request, site)
        if group_id is not None:
            return group_id
        try:
            return await self._create_group(request, site, description)
        except ApiError as refusal:
            if refusal.code != "InvalidGroup.Duplicate":
                raise
        group_id = await self._find_group(request, site)  # another process created it first
        if group_id is None:
            raise TransientError(f"{name_group(request)} exists in {site.region}, but is not listed yet")
        return group_id

    async def _find_group(self, request: NodeRequest, site: RegionNetwork) -> str | None:
        filters = [_filter("group-name", name_group(request)), _filter("vpc-id", site.vpc)]
        groups = await self._clients.read_all(
            site.region, "describe_security_groups", "SecurityGroups", Filters=filters
        )
        return str(groups[0]["GroupId"]) if groups else None

    async def _create_group(self, request: NodeRequest, site: RegionNetwork, description: str) -> str:
        made = await self._clients.change(
            site.region,
            "create_security_group",
            GroupName=name_group(request),
            Description=description,
            VpcId=site.vpc,
            TagSpecifications=tags.specify_tags(tags.make_cluster_tags(request), "security-group"),
        )
        return str(made["GroupId"])

    async def renew_access(self, region: str, *, owner: str, cluster: str, now_s: float) -> bool:
        """Admit ssh from this machine's current address; return whether it was not admitted before."""
        filters = [_filter("group-name", _join_name(owner, cluster)), _filter(f"tag:{tags.OWNER}", owner)]
        groups = await self._clients.read_all(region, "describe_security_groups", "SecurityGroups", Filters=filters)
        blocks = self._settings.ssh_from or await self._find_own_block()
        added = [await self._admit(region, group, block, now_s) for group in groups for block in blocks]
        return any(added)

    async def _admit(self, region: str, group: Mapping[str, Any], block: str, now_s: float) -> bool:
        """Admit ssh from a block; return whether it was not admitted before.

        A group has at most 60 rules (VPC quotas), which a laptop's addresses reach: then the oldest one makes room.
        """
        rule = _allow_ports(22, 22, [block], f"{RENEWED} {now_s:.0f}")
        try:
            return await self._add_rule(region, group["GroupId"], rule, "authorize_security_group_ingress")
        except ApiError as refusal:
            oldest = find_oldest(group, is_new_format=":" in block)
            if refusal.code != FULL or oldest is None:
                raise
        try:
            await self._clients.change(
                region, "revoke_security_group_ingress", GroupId=group["GroupId"], IpPermissions=[oldest]
            )
        except ApiError as refusal:
            if refusal.code != "InvalidPermission.NotFound":  # another process has revoked it
                raise
        return await self._add_rule(region, group["GroupId"], rule, "authorize_security_group_ingress")

    async def _add_rule(self, region: str, group_id: str, rule: Mapping[str, Any], operation: str) -> bool:
        """Add a rule; return whether it is new."""
        try:
            await self._clients.change(region, operation, GroupId=group_id, IpPermissions=[rule])
        except ApiError as refusal:
            if refusal.code != "InvalidPermission.Duplicate":
                raise
            return False
        return True

    async def _find_own_block(self) -> Sequence[str]:
        """Return the address from which AWS sees this machine, as a block of one."""
        try:
            text = await asyncio.to_thread(_fetch, self._settings.address_url)
            address = ipaddress.ip_address(text.strip())
        except (OSError, ValueError) as error:
            raise TransientError(
                f"cannot determine this machine's public address from {self._settings.address_url}: {error}",
                hints=('name it in `aws.toml`: `ssh_from = ["203.0.113.7/32"]`',),
            ) from error
        return (f"{address}/{address.max_prefixlen}",)

    async def ensure_placement_group(self, request: NodeRequest, region: str) -> str:
        """Return the name of the gang's placement group, which keeps its nodes close together."""
        name = name_placement_group(request)
        try:
            await self._clients.change(
                region,
                "create_placement_group",
                GroupName=name,
                Strategy="cluster",
                TagSpecifications=tags.specify_tags(tags.make_cluster_tags(request), "placement-group"),
            )
        except ApiError as refusal:
            if refusal.code != "InvalidPlacementGroup.Duplicate":
                raise
        return name


def name_group(request: NodeRequest) -> str:
    """Return the name of the cluster's security group, the same for all of its attempts."""
    return _join_name(request.owner, request.cluster)


def name_placement_group(request: NodeRequest) -> str:
    """Return the name of a gang's placement group.

    A placement group is in the zone of its first machine until all of them have ended: in any other zone, EC2 refuses
    it (`InvalidPlacementGroup.InUse`). A search may have gangs in two zones at once, so each zone has its own group,
    and so does each fleet, which chooses its zone. A repeated search uses the same ones, as an account may have 500.
    """
    placement = request.placement
    place = placement.offer.zone
    if place is None or placement.other_zones:
        zones = sorted((place or "", *placement.other_zones))
        text = "\0".join((*zones, placement.offer.instance_type, str(placement.is_spot)))
        place = f"fleet-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    return f"{name_group(request)}-{place}"


def _join_name(owner: str, cluster: str) -> str:
    return f"broker-{owner}-{cluster}"


def make_rules(group_id: str, ports: Sequence[str], ssh_from: Sequence[str]) -> list[dict[str, Any]]:
    """Make the ingress rules: ssh from these blocks, the task's ports from anywhere, all traffic between nodes."""
    rules = [_allow_group(group_id), _allow_ports(22, 22, ssh_from)]
    for port in ports:
        first, _, last = port.partition("-")
        rules.append(_allow_ports(int(first), int(last or first), ANYWHERE))
    return rules


def _allow_group(group_id: str) -> dict[str, Any]:
    return {"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": group_id}]}


def find_oldest(group: Mapping[str, Any], *, is_new_format: bool) -> dict[str, Any] | None:
    """Return the rule of the oldest address that `renew_access` admitted; None if there is none.

    The descriptions of these rules hold the time. All other rules stay: those of the launch, and the user's own.
    """
    ranges, cidr = ("Ipv6Ranges", "CidrIpv6") if is_new_format else ("IpRanges", "CidrIp")
    found = [
        (float(match[1]), str(each[cidr]), str(each["Description"]))
        for rule in group.get("IpPermissions", ())
        for each in rule.get(ranges, ())
        if rule.get("FromPort") == rule.get("ToPort") == 22
        and (match := re.fullmatch(rf"{RENEWED} (\d+)", each.get("Description", "")))
    ]
    if not found:
        return None
    _, block, description = min(found)
    return _allow_ports(22, 22, [block], description)


def _allow_ports(first: int, last: int, blocks: Sequence[str], description: str = "") -> dict[str, Any]:
    rule: dict[str, Any] = {"IpProtocol": "tcp", "FromPort": first, "ToPort": last}
    about = {"Description": description} if description else {}
    old = [{"CidrIp": block, **about} for block in blocks if ":" not in block]
    new = [{"CidrIpv6": block, **about} for block in blocks if ":" in block]
    return rule | ({"IpRanges": old} if old else {}) | ({"Ipv6Ranges": new} if new else {})


def _hint_subnet(region: str, zone: str | None, vpc: str | None) -> str:
    """Return the command that creates a subnet.

    In the user's own VPC, it must be run by hand, because only its owner assigns address ranges.
    """
    if vpc is None:
        verb = f"create-default-subnet --region {region}"
    else:
        verb = f"create-subnet --vpc-id {vpc} --region {region} --cidr-block BLOCK"
    return f"create one with `aws ec2 {verb} --availability-zone {zone or 'ZONE'}`"


def _filter(name: str, value: str) -> dict[str, Any]:
    return {"Name": name, "Values": [value]}


def _fetch(url: str) -> str:
    import urllib.request  # 30 ms

    with urllib.request.urlopen(url, timeout=ADDRESS_S_MAX) as answer:
        text: bytes = answer.read(200)
    return text.decode("ascii", errors="replace")
