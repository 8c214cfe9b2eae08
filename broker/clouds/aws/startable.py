"""Find the accelerators that would start now in this account, by machine type, image and quota; create nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from functools import partial

from broker.clock import Clock
from broker.clouds.aws.clients import Clients
from broker.clouds.aws.errors import translated
from broker.clouds.aws.images import Images
from broker.clouds.aws.quotas import Quota, Quotas
from broker.clouds.aws.settings import Settings
from broker.clouds.findings import TypeCheckResult, describe_offer, group_offers
from broker.errors import CloudError, InvalidRequestError
from broker.types import MachineSpec, Offer

REGIONS_MAX = 4  # only the cheapest are checked
# Machines with several network cards, of which one is used if nodes have public addresses: EC2 user guide, "Maximize
# network bandwidth on instances with multiple network cards" (read 2026-11-22).
MANY_CARDS = ("p4d.", "p4de.", "p5.48", "p5e.", "p5en.", "p6-", "trn1.32", "trn1n.", "trn2.48")
ONE_CARD = "one EFA card of several: `uses_private_addresses` enables all"


async def judge_types(
    clients: Clients, settings: Settings, offers: Sequence[Offer], *, clock: Clock
) -> Sequence[TypeCheckResult]:
    """Judge each accelerator and count. Raises CloudError if the login or the regions cannot be queried."""
    with translated():
        home = await clients.find_home()
        listed = (await clients.read("ec2", home, "describe_regions"))["Regions"]
    enabled = {each["RegionName"] for each in listed} & set(settings.regions or (each["RegionName"] for each in listed))
    images = Images(clients, settings, clock=clock)
    judge = _Judge(images, Quotas(clients, clock=clock), settings, enabled)
    groups = group_offers(offers)
    return await asyncio.gather(*(judge.judge(name, found) for name, found in groups.items()))


class _Judge:
    def __init__(self, images: Images, quotas: Quotas, settings: Settings, enabled: Collection[str]) -> None:
        self._images = images
        self._quotas = quotas
        self._settings = settings
        self._enabled = enabled
        self._reads = asyncio.Lock()  # what one judgement has read, the next finds in the cache

    async def judge(self, name: str, offers: Sequence[Offer]) -> TypeCheckResult:
        """Choose the cheapest of the regions in which it can start in the most ways."""
        here = [offer for offer in offers if offer.region in self._enabled][:REGIONS_MAX]
        if not here:
            first = offers[0]
            sold = ", ".join(offer.region for offer in offers[:3])
            command = "" if self._settings.regions else f"aws account enable-region --region-name {first.region}"
            why = f"region: sold in {sold}, which is not enabled here"
            return TypeCheckResult(
                accelerator=name, instance_type=first.instance_type, ways=(), region="", why=why, command=command
            )
        results = [await self._judge_in(name, offer) for offer in here]
        return max(results, key=lambda each: len(each.ways))

    async def _judge_in(self, name: str, offer: Offer) -> TypeCheckResult:
        judge = partial(describe_offer, name, offer)

        try:
            async with self._reads:
                with translated():
                    await self._images.find(offer, MachineSpec())
        except InvalidRequestError as error:
            return judge((), f"image: {error.message.rpartition(': ')[2]}")
        except CloudError as error:
            return judge((), f"region: {error.message}")
        ways: list[str] = []
        whys: list[str] = []
        command = ""
        for way, price in (("on-demand", offer.ondemand_usd_hour), ("spot", offer.spot_usd_hour)):
            quota = await self._read_quota(offer, is_spot=way == "spot") if price is not None else None
            if quota is not None and quota.vcpus < offer.vcpus:
                whys.append(f"{way} {quota.vcpus:g} of {offer.vcpus:g} vCPUs")
                command = command or quota.command.replace("VCPUS", f"{offer.vcpus:g}")
            elif price is not None:
                ways.append(way)
        if whys:
            return judge(tuple(ways), f"quota: {', '.join(whys)}", command)
        has_many = offer.instance_type.startswith(MANY_CARDS) and not self._settings.uses_private_addresses
        return judge(tuple(ways), f"network: {ONE_CARD}" if has_many else "")

    async def _read_quota(self, offer: Offer, *, is_spot: bool) -> Quota | None:
        async with self._reads:
            with translated():
                return await self._quotas.find(offer.region, offer.instance_type, is_spot=is_spot)
