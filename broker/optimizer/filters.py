"""Named filters: each takes offers out for one reason and can say which came nearest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from broker.types import Offer, Rejection, Resources


@dataclass(frozen=True, kw_only=True)
class Filter:
    """`is_active` says whether the resources ask for anything here; `show` names what a rejected offer has."""

    name: str
    is_active: Callable[[Resources], bool]
    keeps: Callable[[Resources, Offer], bool]
    show: Callable[[Offer], str]


def _same(text: str | None, asked: str | None) -> bool:
    return (text or "").lower() == (asked or "").lower()


FILTERS: tuple[Filter, ...] = (
    Filter(
        name="cloud",
        is_active=lambda asked: asked.cloud is not None,
        keeps=lambda asked, offer: _same(offer.cloud, asked.cloud),
        show=lambda offer: offer.cloud,
    ),
    Filter(
        name="accelerator",
        is_active=lambda asked: asked.accelerator is not None,
        keeps=lambda asked, offer: _same(offer.accelerator, asked.accelerator),
        show=lambda offer: offer.accelerator or "no accelerator",
    ),
    Filter(
        name="accelerator count",
        is_active=lambda asked: asked.accelerator is not None,
        keeps=lambda asked, offer: offer.accelerator_count == asked.accelerator_count,
        show=lambda offer: f"{offer.accelerator}:{offer.accelerator_count:g} ({offer.instance_type})",
    ),
    Filter(
        name="instance type",
        is_active=lambda asked: asked.instance_type is not None,
        keeps=lambda asked, offer: _same(offer.instance_type, asked.instance_type),
        show=lambda offer: offer.instance_type,
    ),
    Filter(
        name="region",
        is_active=lambda asked: asked.region is not None,
        keeps=lambda asked, offer: _same(offer.region, asked.region),
        show=lambda offer: offer.region,
    ),
    Filter(
        name="zone",
        is_active=lambda asked: asked.zone is not None,
        keeps=lambda asked, offer: _same(offer.zone, asked.zone),
        show=lambda offer: offer.zone or offer.region,
    ),
    Filter(
        name="cpus",
        is_active=lambda asked: asked.cpus is not None,
        keeps=lambda asked, offer: asked.cpus is not None and asked.cpus.admits(offer.vcpus),
        show=lambda offer: f"{offer.vcpus:g} vCPU ({offer.instance_type})",
    ),
    Filter(
        name="memory",
        is_active=lambda asked: asked.memory_gib is not None,
        keeps=lambda asked, offer: asked.memory_gib is not None and asked.memory_gib.admits(offer.memory_gib),
        show=lambda offer: f"{offer.memory_gib:g} GiB ({offer.instance_type})",
    ),
)


def apply_filters(resources: Resources, offers: Sequence[Offer]) -> tuple[list[Offer], list[Rejection]]:
    """The offers that fit, and what each filter took out."""
    kept, rejections = list(offers), list[Rejection]()
    for each in FILTERS:
        if not each.is_active(resources):
            continue
        passed = [offer for offer in kept if each.keeps(resources, offer)]
        if len(passed) < len(kept):
            nearest = min((offer for offer in kept if not each.keeps(resources, offer)), key=_price)
            rejections.append(Rejection(filter=each.name, count=len(kept) - len(passed), nearest=each.show(nearest)))
        kept = passed
    return kept, rejections


def _price(offer: Offer) -> float:
    prices = [price for price in (offer.spot_usd_hour, offer.ondemand_usd_hour) if price is not None]
    return min(prices, default=float("inf"))
