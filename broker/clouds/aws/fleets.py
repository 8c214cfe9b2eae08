"""Instant fleets: a gang in whichever zone has capacity for all of it. EC2 user guide, "EC2 Fleet"."""

from __future__ import annotations

import asyncio
import base64
import logging
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from broker.clock import Clock
from broker.clouds.aws import tags
from broker.clouds.aws.clients import Clients
from broker.clouds.aws.errors import ApiError, find_kind, translate
from broker.clouds.aws.machine import GangResources, describe_machine
from broker.clouds.aws.network import RegionNetwork
from broker.clouds.aws.nodes import rank_gang
from broker.clouds.aws.quotas import Quotas
from broker.clouds.aws.scores import Scores
from broker.errors import CapacityError, CloudError, InvalidRequestError, QuotaError, UnknownOutcomeError
from broker.types import NodeRequest, Placement

log = logging.getLogger(__name__)

END_WAITS_S = (1.0, 2.0, 4.0, 8.0)  # a machine that is not listed yet cannot be terminated yet
Instance = Mapping[str, Any]


class Fleets:
    """Create a gang by one instant fleet, which chooses among equal zones."""

    def __init__(self, clients: Clients, quotas: Quotas, scores: Scores, *, clock: Clock) -> None:
        self._clients = clients
        self._quotas = quotas
        self._scores = scores
        self._clock = clock

    async def create(
        self, request: NodeRequest, resources: GangResources, data: bytes, site: RegionNetwork
    ) -> Sequence[Instance]:
        """Create all nodes, or raise CapacityError, QuotaError or InvalidRequestError with none created.

        Raises ApiError too.

        A fleet takes its parameters from a launch template only, which is named after the token.
        """
        name = name_template(request)
        await self._ensure_template(request, resources, data, name)
        overrides = await self._list_overrides(request.placement, site)
        try:
            answer = await self._clients.change(
                site.region, "create_fleet", **describe_fleet(request, name, overrides), ClientToken=request.token
            )
        except ApiError as refusal:
            if find_kind(refusal.code, refusal.status) in ("capacity", "quota"):
                await self._drop_template(site.region, name)
            raise
        instances = [
            {
                "InstanceId": instance_id,
                "LaunchTime": datetime.fromtimestamp(self._clock.now_s(), UTC),  # the response has no time
                "InstanceLifecycle": group.get("Lifecycle"),
                "Placement": {"AvailabilityZone": _find_zone(group, site)},
                "Tags": tags.write_tags({**tags.make_tags(request), tags.FLEET: answer["FleetId"]}),
            }
            for group in answer.get("Instances", ())
            for instance_id in group.get("InstanceIds", ())
        ]
        if len(instances) < request.placement.node_count:
            await self._fail_incomplete(request, instances, answer, name)
        await self._write_ranks(site.region, instances)
        return instances

    async def _ensure_template(self, request: NodeRequest, resources: GangResources, data: bytes, name: str) -> None:
        machine = describe_machine(request, resources, subnet=None)
        if data:
            machine["UserData"] = base64.b64encode(data).decode()
        try:
            await self._clients.change(
                request.placement.offer.region,
                "create_launch_template",
                LaunchTemplateName=name,
                LaunchTemplateData=machine,
                TagSpecifications=tags.specify_tags(
                    {**tags.make_cluster_tags(request), tags.TOKEN: request.token}, "launch-template"
                ),
            )
        except ApiError as refusal:
            # the same token has the same template
            if refusal.code != "InvalidLaunchTemplateName.AlreadyExistsException":
                raise

    async def _list_overrides(self, placement: Placement, site: RegionNetwork) -> list[dict[str, Any]]:
        """List a subnet of each zone; for spot, the zones with the best placement score first."""
        scores = await self._scores.read(placement) if placement.is_spot else {}
        if not scores:
            return [{"SubnetId": subnet} for subnet in site.subnets.values()]
        order = sorted(site.subnets, key=lambda zone: (-scores.get(zone, 0), zone))
        return [{"SubnetId": site.subnets[zone], "Priority": float(place)} for place, zone in enumerate(order)]

    async def _fail_incomplete(
        self, request: NodeRequest, instances: Sequence[Instance], answer: Mapping[str, Any], name: str
    ) -> None:
        """Terminate a partial gang and raise the reason for the rest."""
        region = request.placement.offer.region
        if instances:
            await self._end(region, [instance["InstanceId"] for instance in instances])
        elif not answer.get("Errors"):
            raise UnknownOutcomeError(f"create_fleet in {region} returned neither nodes nor a reason")
        await self._drop_template(region, name)
        raise await self._judge(request.placement, answer.get("Errors", ()))

    async def _end(self, region: str, ids: Sequence[str]) -> None:
        """Terminate instances. Raises UnknownOutcomeError if EC2 does not know machines that it has just created."""
        for wait_s in END_WAITS_S:
            try:
                await self._clients.change(region, "terminate_instances", InstanceIds=list(ids))
                return
            except ApiError as refusal:
                log.info("a partial gang is not terminated yet: %s", refusal)
            await self._clock.sleep(wait_s)
        raise UnknownOutcomeError(f"{len(ids)} nodes of a partial gang may run in {region}")

    async def _judge(self, placement: Placement, errors: Sequence[Mapping[str, Any]]) -> CloudError:
        """Merge the errors of the zones into one: an error that no other zone can avoid takes precedence."""
        region = placement.offer.region
        found = [
            translate(
                ApiError(
                    each.get("ErrorCode", ""), each.get("ErrorMessage", ""), operation="create_fleet", region=region
                )
            )
            for each in errors
        ]
        for error in found:
            if isinstance(error, QuotaError):
                return await self._quotas.explain(placement, error.message)
        by_class = {type(error): error for error in reversed(found)}
        if found and CapacityError not in by_class:
            return next((each for each in found if not isinstance(each, InvalidRequestError)), found[0])
        message = (
            "; ".join(dict.fromkeys(error.message for error in found)) or f"{region} provided only part of the gang"
        )
        return CapacityError(message, scope="zone" if placement.offer.zone else "region")

    async def _drop_template(self, region: str, name: str) -> None:
        try:
            await self._clients.change(region, "delete_launch_template", LaunchTemplateName=name)
        except ApiError:
            pass  # the sweep finds it by its tag

    async def _write_ranks(self, region: str, instances: Sequence[Instance]) -> None:
        """Write ranks as tags: a fleet launches machines one by one and numbers none.

        A repeated call writes the same ranks; if it fails, `rank_gang` ranks the gang for as long as all of it is
        listed.
        """
        writes = [
            self._clients.change(
                region,
                "create_tags",
                Resources=[instance["InstanceId"]],
                Tags=[{"Key": tags.RANK, "Value": str(rank)}],
            )
            for instance, rank in zip(instances, rank_gang(instances), strict=True)
        ]
        for outcome in await asyncio.gather(*writes, return_exceptions=True):
            if isinstance(outcome, ApiError):
                log.info("a rank was not written: %s", outcome)
            elif isinstance(outcome, BaseException):
                raise outcome


def name_template(request: NodeRequest) -> str:
    """Return the name of the launch template of a request. It follows from the token, so a repeat finds it."""
    return f"broker-{request.token}"


def describe_fleet(request: NodeRequest, template: str, overrides: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Describe the fleet: all nodes of one type in one zone, or none. EC2 reference, `MinTargetCapacity`."""
    placement = request.placement
    whole = {"SingleInstanceType": True, "SingleAvailabilityZone": True, "MinTargetCapacity": placement.node_count}
    is_ranked = any("Priority" in override for override in overrides)
    options: dict[str, Any]
    if placement.is_spot:
        strategy = "capacity-optimized-prioritized" if is_ranked else "price-capacity-optimized"
        options = {
            "SpotOptions": {"AllocationStrategy": strategy, "InstanceInterruptionBehavior": "terminate", **whole}
        }
    else:
        options = {"OnDemandOptions": {"AllocationStrategy": "lowest-price", **whole}}
    return {
        "Type": "instant",
        "LaunchTemplateConfigs": [
            {
                "LaunchTemplateSpecification": {"LaunchTemplateName": template, "Version": "1"},
                "Overrides": [dict(override) for override in overrides],
            }
        ],
        "TargetCapacitySpecification": {
            "TotalTargetCapacity": placement.node_count,
            "DefaultTargetCapacityType": "spot" if placement.is_spot else "on-demand",
        },
        "TagSpecifications": tags.specify_tags(tags.make_cluster_tags(request), "fleet"),
        **options,
    }


def _find_zone(group: Mapping[str, Any], site: RegionNetwork) -> str | None:
    chosen = group.get("LaunchTemplateAndOverrides", {}).get("Overrides", {})
    zones = {subnet: zone for zone, subnet in site.subnets.items()}
    return chosen.get("AvailabilityZone") or zones.get(chosen.get("SubnetId", ""))
