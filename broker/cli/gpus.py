"""`broker gpus`: list accelerators with their lowest prices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer

from broker.app.container import Context
from broker.cli import options
from broker.cli.context import make_context
from broker.cli.price_dates import show_price_dates
from broker.cli.render import print_json, print_line, print_table
from broker.errors import UsageError
from broker.formatting import format_usd, to_plain

if TYPE_CHECKING:
    from broker.catalog.book import AcceleratorPrice


def gpus(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME[:COUNT]", help="Accelerator (default: all).", show_default=False)
    ] = None,
    all_regions: Annotated[
        bool, typer.Option("--all-regions", help="Show every region, not only the cheapest.")
    ] = False,
    spot: Annotated[bool, typer.Option("--spot", help="Show only spot offers, cheapest first.")] = False,
    cloud: Annotated[str | None, typer.Option("--cloud", metavar="CLOUD", help="Show only this cloud.")] = None,
    as_json: options.AsJson = False,
) -> None:
    """List accelerators with their lowest prices."""
    wanted, _, count = (name or "").partition(":")
    context = make_context()
    book = context.book
    if cloud:
        book.check_cloud(cloud)
    prices = book.list_accelerators(
        wanted or None, _read_count(count), cloud=cloud.lower() if cloud else None, by_region=all_regions, is_spot=spot
    )
    if as_json:
        print_json(to_plain(list(prices)))
        return
    if not wanted:  # one row per accelerator: the cheapest single unit, or the smallest count offered
        smallest = {price.name: price.count for price in reversed(prices)}
        prices = [price for price in prices if price.count == smallest[price.name]]
        if not all_regions:
            prices = list({price.name: price for price in reversed(prices)}.values())[::-1]
    rows = [
        [each.name, f"{each.count:g}", f"{each.memory_gib:g}", each.cloud, each.region,
         format_usd(each.ondemand_usd_hour), format_usd(each.spot_usd_hour)]
        for each in prices
    ]  # fmt: skip
    if not rows:
        print_line("No match; list all accelerators with `broker gpus`")
        return
    print_table(
        ["ACCELERATOR", "COUNT", "GiB", "CLOUD", "REGION", "USD/h", "SPOT USD/h"],
        rows, right=("COUNT", "GiB", "USD/h", "SPOT USD/h"),
    )  # fmt: skip
    _note_age(context, prices)
    if not wanted:
        print_line("Show every count and cloud of one accelerator with `broker gpus NAME[:COUNT]`")


def _note_age(context: Context, prices: Sequence[AcceleratorPrice]) -> None:
    """Print the dates of the prices, and warn of outdated ones, as a plan does."""
    now_s = context.clock.now_s()
    dates = []
    for price in prices:
        age = context.book.describe_age(price.cloud, now_s)
        if price.ondemand_usd_hour is not None:
            dates.append((price.cloud, False, age.ondemand_as_of))
        if price.spot_usd_hour is not None:
            dates.append((price.cloud, True, age.spot_as_of))
    show_price_dates(dates, now_s)


def _read_count(text: str) -> float | None:
    if not text:
        return None
    with suppress(ValueError):
        if 0 < (count := float(text)) < math.inf:
            return count
    raise UsageError(f"invalid count `{text}`", hints=["for example: `broker gpus H100:8`"])
