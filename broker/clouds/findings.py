"""What `broker check` found out about a cloud, in the words of whoever looked."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from broker.clock import Clock
from broker.config import Config
from broker.nouns import noun
from broker.types import Offer


@noun
class CheckResult:
    """One thing that was looked at. `command` mends it; where `is_needed` is False it stands in nobody's way."""

    name: str
    is_ok: bool
    note: str
    command: str = ""
    is_needed: bool = True


class Inspector(Protocol):
    """What a module in the table `CHECKS` has."""

    async def inspect(self, config: Config, *, clock: Clock) -> Sequence[CheckResult]:
        """In the order in which things depend on each other; what cannot be asked any more is left out.

        Raises CloudError where the cloud cannot be reached.
        """

    def write_policy(self, config: Config) -> str:
        """The least that the login must be allowed, as a file that the cloud's own tool takes."""


@noun
class TypeCheckResult:
    """Whether the smallest machine with so many accelerators would start now. `ways`: "on-demand" and "spot", as far as
    they would; `why`: what stands in the way of the others, else what is worth knowing; `command` mends it."""

    accelerator: str  # as a task asks for it: `A100:8`
    instance_type: str
    ways: tuple[str, ...]
    region: str  # where it would start, else the last that was looked at
    why: str = ""
    command: str = ""


@runtime_checkable
class InspectsTypes(Protocol):
    """Inspectors that can say of each machine type whether the account, its quotas and our images let it start."""

    async def inspect_types(
        self, config: Config, *, clock: Clock, offers: Sequence[Offer]
    ) -> Sequence[TypeCheckResult]: ...


def group_offers(offers: Sequence[Offer]) -> Mapping[str, Sequence[Offer]]:
    """Accelerator and count -> the offers of its smallest machine, cheapest place first, one a region."""
    found: dict[tuple[str, float], list[Offer]] = {}
    for offer in sorted(offers, key=lambda each: (each.vcpus, each.instance_type, _find_price(each))):
        if offer.accelerator and offer.accelerator_count:
            same = found.setdefault((offer.accelerator, offer.accelerator_count), [])
            is_smallest = not same or offer.instance_type == same[0].instance_type
            if is_smallest and offer.region not in [each.region for each in same]:
                same.append(offer)
    return {f"{accelerator}:{count:g}": same for (accelerator, count), same in sorted(found.items())}


def _find_price(offer: Offer) -> float:
    prices = [price for price in (offer.spot_usd_hour, offer.ondemand_usd_hour) if price is not None]
    return min(prices, default=math.inf)


@runtime_checkable
class CanGlance(Protocol):
    """Inspectors for which a close look is slow: where all clouds are listed, this is asked instead."""

    async def glance(self, config: Config, *, clock: Clock) -> Sequence[CheckResult]: ...
