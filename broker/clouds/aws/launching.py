"""Launching a gang, all or nothing, with one token: RunInstances in a given zone, an instant fleet in any zone."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from broker.clock import Clock
from broker.clouds.aws.clients import Clients
from broker.clouds.aws.errors import ApiError, find_kind, translate
from broker.clouds.aws.fleets import Fleets
from broker.clouds.aws.images import Images
from broker.clouds.aws.machine import GangResources, describe_machine, pack_boot
from broker.clouds.aws.network import Network
from broker.clouds.aws.quotas import Quotas
from broker.clouds.aws.scores import Scores
from broker.clouds.aws.settings import Settings
from broker.types import NodeRequest

Instance = Mapping[str, Any]


class NodeLauncher:
    """Launch gangs on EC2: quota, network, image, then `RunInstances` or a fleet."""

    def __init__(self, clients: Clients, settings: Settings, quotas: Quotas, *, clock: Clock) -> None:
        self._clients = clients
        self._settings = settings
        self._clock = clock
        self._quotas = quotas
        self._network = Network(clients, settings)
        self._images = Images(clients, settings, clock=clock)
        self._scores = Scores(clients, clock=clock)
        self._fleets = Fleets(clients, quotas, self._scores, clock=clock)
        self._efa_counts: dict[str, int] = {}
        self._identities: dict[str, str] = {}  # cluster -> instance profile

    def set_identity(self, cluster: str, instance_profile: str) -> None:
        """Give the machines of `cluster` another instance profile than that of the settings."""
        self._identities[cluster] = instance_profile

    async def launch(self, request: NodeRequest) -> Sequence[Instance]:
        """Return instances as EC2 describes them. Raises CloudError and ApiError; see `Cloud.create_nodes`."""
        offer = request.placement.offer
        data = pack_boot(request)
        self._images.choose(offer, request.spec)  # before any create call
        zones = (offer.zone, *request.placement.other_zones) if offer.zone else ()
        site, image, efa_count, *_ = await asyncio.gather(
            self._network.find_site(offer.region, *zones),
            self._images.find(offer, request.spec),
            self._count_efa(request),
            self._quotas.refuse_hopeless(request.placement),
            self._scores.refuse_unlikely(request.placement),
        )
        resources = GangResources(
            image=image,
            group_ids=await self._network.ensure_groups(request, site),
            placement_group=await self._find_placement_group(request),
            efa_count=efa_count,
            instance_profile=self._identities.get(request.cluster, self._settings.instance_profile),
            has_public_address=not self._settings.uses_private_addresses,
        )
        try:
            if offer.zone and not request.placement.other_zones:
                return await self._run_instances(request, resources, data, subnet=site.subnets[offer.zone])
            return await self._fleets.create(request, resources, data, site)
        except ApiError as refusal:
            if find_kind(refusal.code) == "quota":
                raise await self._quotas.explain(request.placement, translate(refusal).message) from refusal
            raise

    async def renew_access(self, region: str, *, owner: str, cluster: str) -> bool:
        """Add this machine's current address to a cluster's security group; return whether it changed."""
        return await self._network.renew_access(region, owner=owner, cluster=cluster, now_s=self._clock.now_s())

    async def find_instances(self, region: str, filters: Sequence[Mapping[str, Any]]) -> list[Instance]:
        """Return the instances that match the filters, over all pages. Raises CloudError."""
        reservations = await self._clients.read_all(region, "describe_instances", "Reservations", Filters=list(filters))
        return [instance for reservation in reservations for instance in reservation["Instances"]]

    async def _find_placement_group(self, request: NodeRequest) -> str | None:
        """Return a placement group for gangs with accelerators: only their traffic justifies the scarcer capacity."""
        offer = request.placement.offer
        if request.placement.node_count == 1 or not offer.accelerator:
            return None
        return await self._network.ensure_placement_group(request, offer.region)

    async def _count_efa(self, request: NodeRequest) -> int:
        """Count the Elastic Fabric Adapters to attach.

        None unless requested; one per network card if nodes have no public address, otherwise one.

        A fleet that searches for a zone supports one card only.
        """
        offer = request.placement.offer
        if request.spec.network_tier != "best":
            return 0
        if offer.instance_type not in self._efa_counts:
            answer = await self._clients.read(
                "ec2", offer.region, "describe_instance_types", InstanceTypes=[offer.instance_type]
            )
            network = answer["InstanceTypes"][0].get("NetworkInfo", {}) if answer.get("InstanceTypes") else {}
            most = int(network.get("EfaInfo", {}).get("MaximumEfaInterfaces", 1))
            cards = int(network.get("MaximumNetworkCards", 1))
            self._efa_counts[offer.instance_type] = min(most, cards) if network.get("EfaSupported") else 0
        count = self._efa_counts[offer.instance_type]
        is_placed = offer.zone and not request.placement.other_zones
        return count if self._settings.uses_private_addresses and is_placed else min(1, count)

    async def _run_instances(
        self, request: NodeRequest, resources: GangResources, data: bytes, *, subnet: str
    ) -> Sequence[Instance]:
        count = request.placement.node_count
        parameters = describe_machine(request, resources, subnet=subnet)
        if data:
            parameters["UserData"] = data  # botocore encodes it as base64 here, but not in launch templates
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
