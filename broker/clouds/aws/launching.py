"""One gang, all or none, under one token: RunInstances in a named zone, an instant fleet where any zone will do."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from broker.clock import Clock
from broker.clouds.aws.clients import Clients
from broker.clouds.aws.faults import RefusedError, find_kind, translate
from broker.clouds.aws.fleets import Fleets
from broker.clouds.aws.images import Images
from broker.clouds.aws.machine import Surroundings, describe_machine, pack_boot
from broker.clouds.aws.network import Network
from broker.clouds.aws.quotas import Quotas
from broker.clouds.aws.settings import Settings
from broker.types import NodeRequest

Instance = Mapping[str, Any]


class Launcher:
    def __init__(self, clients: Clients, settings: Settings, quotas: Quotas, *, clock: Clock) -> None:
        self._clients = clients
        self._settings = settings
        self._quotas = quotas
        self._network = Network(clients, settings)
        self._images = Images(clients, settings)
        self._fleets = Fleets(clients, quotas, clock=clock)
        self._efa_types: dict[str, bool] = {}

    async def launch(self, request: NodeRequest) -> Sequence[Instance]:
        """Instances as EC2 describes them. Raises CloudError and RefusedError; see `Cloud.create_nodes`."""
        offer = request.placement.offer
        data = pack_boot(request)
        site, image, has_efa, _ = await asyncio.gather(
            self._network.find_site(offer.region, offer.zone),
            self._images.find(offer, request.spec),
            self._has_efa(request),
            self._quotas.refuse_hopeless(request.placement),
        )
        around = Surroundings(
            image=image,
            group_id=await self._network.ensure_group(request, site),
            placement_group=await self._find_placement_group(request),
            has_efa=has_efa,
            instance_profile=self._settings.instance_profile,
            has_public_address=not self._settings.uses_private_addresses,
        )
        try:
            if offer.zone:
                return await self._run_instances(request, around, data, subnet=site.subnets[offer.zone])
            return await self._fleets.create(request, around, data, site)
        except RefusedError as refusal:
            if find_kind(refusal.code) == "quota":
                raise await self._quotas.explain(request.placement, translate(refusal).message) from refusal
            raise

    async def find_instances(self, region: str, filters: Sequence[Mapping[str, Any]]) -> list[Instance]:
        found = await self._clients.read_all(region, "describe_instances", "Reservations", Filters=list(filters))
        return [instance for reservation in found for instance in reservation["Instances"]]

    async def _find_placement_group(self, request: NodeRequest) -> str | None:
        """Only gangs of accelerators talk so much that standing close is worth the scarcer capacity."""
        offer = request.placement.offer
        if request.placement.node_count == 1 or not offer.accelerator:
            return None
        return await self._network.ensure_placement_group(request, offer.region)

    async def _has_efa(self, request: NodeRequest) -> bool:
        """Whether to attach an Elastic Fabric Adapter: asked for, and the machine can have one."""
        offer = request.placement.offer
        if request.spec.network_tier != "best":
            return False
        if offer.instance_type not in self._efa_types:
            answer = await self._clients.read(
                "ec2", offer.region, "describe_instance_types", InstanceTypes=[offer.instance_type]
            )
            network = answer["InstanceTypes"][0].get("NetworkInfo", {}) if answer.get("InstanceTypes") else {}
            self._efa_types[offer.instance_type] = bool(network.get("EfaSupported"))
        return self._efa_types[offer.instance_type]

    async def _run_instances(
        self, request: NodeRequest, around: Surroundings, data: bytes, *, subnet: str
    ) -> Sequence[Instance]:
        count = request.placement.node_count
        parameters = describe_machine(request, around, subnet=subnet)
        if data:
            parameters["UserData"] = data  # botocore writes it as base64 here, and does not in launch templates
        if request.placement.is_spot:
            parameters["InstanceMarketOptions"] = {
                "MarketType": "spot",
                "SpotOptions": {"SpotInstanceType": "one-time", "InstanceInterruptionBehavior": "terminate"},
            }
        made = await self._clients.change(
            request.placement.offer.region,
            "run_instances",
            **parameters,
            MinCount=count,
            MaxCount=count,
            ClientToken=request.token,
        )
        return list(made["Instances"])
