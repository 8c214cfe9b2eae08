"""Results of `broker check`, as each cloud's inspector words them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from broker.clock import Clock
from broker.config import Config
from broker.errors import BrokerError, TaskError
from broker.frozen import frozen
from broker.types import Offer


@frozen
class CheckResult:
    """One checked item. `command` fixes it; `is_needed` False means that launches work without it."""

    name: str
    is_ok: bool
    note: str
    command: str = ""
    is_needed: bool = True


def report_invalid_file(name: str, path: Path, error: BrokerError) -> Sequence[CheckResult]:
    """Return a result for each error in a file that describes machines."""
    notes = [f"{path}: {error.message}"]
    if isinstance(error, TaskError):
        notes = [f"{path}:{each.line}:{each.column}: {each.message}" for each in error.issues]
    return [CheckResult(name=name, is_ok=False, note=note, command=f"edit {path}") for note in notes]


class Inspector(Protocol):
    """The interface of a module in the table `CHECKS`."""

    async def inspect(self, config: Config, *, clock: Clock) -> Sequence[CheckResult]:
        """Return results in order of dependency, leaving out checks that a failed one makes impossible.

        Raises CloudError if the cloud cannot be reached.
        """

    def write_policy(self, config: Config) -> str:
        """Return the minimal permissions for this login, as a file that the cloud's own tool accepts."""


@frozen
class TypeCheckResult:
    """Whether the smallest machine with this number of accelerators would start now.

    `ways`: the pricing models ("on-demand", "spot") that would start. `why`: the obstacle to the others, else a
    remark. `command` removes the obstacle.
    """

    accelerator: str  # as written in a task: `A100:8`
    instance_type: str
    ways: tuple[str, ...]
    region: str  # where it would start, else the last region checked
    why: str = ""
    command: str = ""


def describe_offer(name: str, offer: Offer, ways: tuple[str, ...], why: str, command: str = "") -> TypeCheckResult:
    """Return the result for the accelerators `name` on this offer."""
    return TypeCheckResult(
        accelerator=name, instance_type=offer.instance_type, ways=ways, region=offer.region, why=why, command=command
    )


@runtime_checkable
class InspectsTypes(Protocol):
    """An inspector that can say for each machine type whether account, quotas and images allow it to start."""

    async def inspect_types(
        self, config: Config, *, clock: Clock, offers: Sequence[Offer]
    ) -> Sequence[TypeCheckResult]:
        """Return a result for each accelerator and count of `offers`. Create nothing."""


def group_offers(offers: Sequence[Offer]) -> Mapping[str, Sequence[Offer]]:
    """Map (accelerator, count) to offers of its smallest machine, one per region, cheapest first."""
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
class CanInspectQuickly(Protocol):
    """An inspector whose full check is slow: `broker check` without a cloud calls `inspect_quickly` instead."""

    async def inspect_quickly(self, config: Config, *, clock: Clock) -> Sequence[CheckResult]:
        """Return quick findings that do not query every region."""
