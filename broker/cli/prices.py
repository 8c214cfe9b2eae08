"""`broker prices` and `broker history`: prices of one instance type, by location and over time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from broker.app.market import find_cache
from broker.cli import options
from broker.cli.context import make_context
from broker.cli.price_dates import show_price_dates
from broker.cli.render import print_json, print_line, print_note, print_table
from broker.formatting import format_usd, to_plain

if TYPE_CHECKING:
    from broker.catalog.history import PricePoint

BARS = "▁▂▃▄▅▆▇█"
InstanceType = Annotated[
    str, typer.Argument(metavar="TYPE", help="Instance type, e.g. p4d.24xlarge.", show_default=False)
]


def prices(instance_type: InstanceType, as_json: options.AsJson = False) -> None:
    """Show the price of an instance type in every location."""
    context = make_context()
    offers = context.book.find_prices(instance_type)
    if as_json:
        print_json(to_plain(list(offers)))
        return
    first = offers[0]
    accelerators = f", {first.accelerator_count:g} x {first.accelerator}" if first.accelerator else ""
    print_line(f"{instance_type}: {first.vcpus:g} vCPU, {first.memory_gib:g} GiB{accelerators}")
    print_table(
        ["CLOUD", "REGION", "ZONE", "USD/h", "OF", "SPOT", "OF", "INTERRUPTED"],
        [
            [offer.cloud, offer.region, offer.zone or "-",
             format_usd(offer.ondemand_usd_hour, is_estimated=offer.is_estimated),
             offer.as_of[:7] if offer.ondemand_usd_hour else "", format_usd(offer.spot_usd_hour),
             offer.spot_as_of[:7] if offer.spot_usd_hour else "", _show_band(offer.interruption_band)]
            for offer in offers
        ],
        right=("USD/h", "SPOT"),
    )  # fmt: skip
    dates = [(offer.cloud, False, offer.as_of) for offer in offers if offer.ondemand_usd_hour]
    dates += [(offer.cloud, True, offer.spot_as_of) for offer in offers if offer.spot_usd_hour]
    is_marked = any(offer.is_estimated for offer in offers)
    show_price_dates(dates, context.clock.now_s(), more="; ~ marks an estimate" if is_marked else "")


def _show_band(band: float | None) -> str:
    if band is None:
        return "-"
    return "> 20 %/month" if band >= 100 else f"< {band:g} %/month"


def history(
    instance_type: InstanceType,
    region: Annotated[str | None, typer.Option("--region", metavar="REGION", help="Show only this region.")] = None,
    as_json: options.AsJson = False,
) -> None:
    """Show how the prices of an instance type changed.

    Each `broker catalog update` adds to the history.
    """
    from broker.catalog.history import find_points

    context = make_context()
    offers = context.book.find_prices(instance_type)
    instance_type = offers[0].instance_type  # as the catalog spells it
    points = find_points(find_cache(), instance_type, region=region)
    if as_json:
        print_json(to_plain(list(points)))
        return
    if not points:
        days = " and ".join(sorted({date for offer in offers for date in (offer.as_of, offer.spot_as_of)}))
        print_line(f"No price changes are recorded for {instance_type}; the catalog has prices from {days}")
        print_note("each `broker catalog update` adds to the history; see current prices with `broker prices`")
        return
    places: dict[tuple[str, str, str], list[PricePoint]] = {}
    for point in points:
        places.setdefault((point.cloud, point.region, point.zone), []).append(point)
    print_table(
        ["CLOUD", "REGION/ZONE", "SINCE", "SPOT USD/h", "", "USD/h", ""],
        [
            [cloud, zone or where, found[0].day, format_usd(found[-1].spot_usd_hour),
             _draw([each.spot_usd_hour for each in found]), format_usd(found[-1].ondemand_usd_hour),
             _draw([each.ondemand_usd_hour for each in found])]
            for (cloud, where, zone), found in places.items()
        ],
        right=("SPOT USD/h", "USD/h"),
    )  # fmt: skip


def _draw(values: Sequence[float | None]) -> str:
    """Draw one bar per change, for the last sixteen changes."""
    known = [value for value in values[-16:] if value is not None]
    if len(known) < 2:
        return ""
    low, high = min(known), max(known)
    return "".join(BARS[round((value - low) / (high - low) * 7)] if high > low else BARS[3] for value in known)
