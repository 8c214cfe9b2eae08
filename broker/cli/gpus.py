"""`broker gpus`: accelerators with their cheapest prices."""

from __future__ import annotations

from typing import Annotated

import typer

from broker.cli.context import Context
from broker.cli.render import plain, print_json, print_line, print_table, show_usd


def gpus(
    name: Annotated[str | None, typer.Argument(help="NAME or NAME:COUNT; without it, all.", show_default=False)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As data.")] = False,
) -> None:
    """List accelerators with their cheapest prices."""
    book = Context().book
    wanted, _, count = (name or "").partition(":")
    prices = book.list_accelerators(wanted or None, float(count) if count else None)
    if as_json:
        print_json(plain(list(prices)))
        return
    if not wanted:  # one row an accelerator: the cheapest of one unit, or of the smallest count sold
        smallest = {each.name: each.count for each in reversed(prices)}
        prices = [each for each in prices if each.count == smallest[each.name]]
        prices = list({each.name: each for each in reversed(prices)}.values())[::-1]
    rows = [
        [each.name, f"{each.count:g}", f"{each.memory_gib:g}", each.cloud, each.region,
         show_usd(each.ondemand_usd_hour), show_usd(each.spot_usd_hour)]
        for each in prices
    ]  # fmt: skip
    print_table(
        ["ACCELERATOR", "COUNT", "GiB", "CLOUD", "REGION", "USD/h", "SPOT USD/h"],
        rows, right=("COUNT", "GiB", "USD/h", "SPOT USD/h"),
    )  # fmt: skip
    if not wanted:
        print_line("`broker gpus NAME[:COUNT]` shows every count and cloud of one")
