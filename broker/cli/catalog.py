"""`broker catalog`: inspect the price catalog, refresh it from live sources, import another, or reset it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from broker.app.freshness import load_own_sources
from broker.app.market import find_cache
from broker.cli import options
from broker.cli.context import make_context
from broker.cli.render import print_json, print_line, print_note, print_table, print_wrapped
from broker.cli.terminal import Bar, is_drawing, show_wait
from broker.errors import SourceError, UsageError
from broker.formatting import to_plain
from broker.task.reading import suggest

if TYPE_CHECKING:
    from broker.catalog.sources.base import Get

app = typer.Typer(
    help="Inspect, update, import or reset the price catalog.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
FAULTS_SHOWN = 5
PAGES_A_NOTE = 100


@app.command()
def info(as_json: options.AsJson = False) -> None:
    """Show the number, age and source of each cloud's offers."""
    from broker.catalog.staleness import ONDEMAND_DAYS_MAX, SPOT_DAYS_MAX

    context = make_context()
    book, now_s = context.book, context.clock.now_s()
    counts, estimated = book.count_offers(), book.count_estimated()
    rows = []
    for cloud, count in counts.items():
        known = {"cloud": cloud, "offers": count, "estimated": estimated.get(cloud, 0)}
        rows.append({**known, "source": book.get_facts(cloud).source, **to_plain(book.describe_age(cloud, now_s))})
    if as_json:
        print_json(rows)
        return
    print_table(
        ["CLOUD", "OFFERS", "~", "ON-DEMAND OF", "SPOT OF", "SOURCE"],
        [
            [row["cloud"], f"{row['offers']:,}", f"{row['estimated'] / row['offers']:.0%}",
             _show_date(row, "ondemand"), _show_date(row, "spot"), row["source"]]
            for row in rows
        ],
        right=("OFFERS", "~"),
    )  # fmt: skip
    print_line(f"{sum(counts.values()):,} offers; ~ is the share with an estimated on-demand price")
    if any(row["is_ondemand_stale"] or row["is_spot_stale"] for row in rows):
        print_line(f"! marks prices older than {ONDEMAND_DAYS_MAX} days (spot: {SPOT_DAYS_MAX})")
        print_note("fetch current prices with `broker catalog update`")


@app.command()
def status(as_json: options.AsJson = False) -> None:
    """Show when prices were last updated and when they are due again.

    Prices of the clouds in use are updated in the background, at most every 7 hours.
    """
    from broker.app.freshness import describe_updates, locate_log
    from broker.config import find_auto_update, find_home

    context = make_context()
    is_on, rows = find_auto_update(), describe_updates(context)
    if as_json:
        print_json({"auto_update": is_on, "log": str(locate_log(find_home(), find_cache())), "clouds": to_plain(rows)})
        return
    print_table(
        ["CLOUD", "ON-DEMAND OF", "SPOT OF", "SOURCE", "LAST UPDATE", "NEXT"],
        [
            [each.cloud, each.ondemand_as_of, each.spot_as_of, each.source,
             f"{_show_time(each.attempted_s)}{' !' if each.error else ''}",
             ("due" if each.next_s is None else _show_time(each.next_s)) if is_on and each.is_used else "-"]
            for each in rows
        ],
    )  # fmt: skip
    for each in rows:
        if each.error:
            print_wrapped(f"! {each.cloud}: {each.error}", indent=2)
    if is_on:
        print_line("Times are in UTC; commands that use prices start updates that are due")
    else:
        print_line("Background price updates are turned off by `auto_update`, `BROKER_OFFLINE` or `CI`")
        print_note("fetch current prices with `broker catalog update`")


def _show_time(time_s: float | None) -> str:
    return "-" if time_s is None else f"{datetime.fromtimestamp(time_s, UTC):%m-%d %H:%M}"


def _show_date(row: Mapping[str, Any], model: str) -> str:
    return f"{row[f'{model}_as_of']}{' !' if row[f'is_{model}_stale'] else ''}"


@app.command()
def update(
    cloud: Annotated[
        list[str] | None, typer.Option("--cloud", metavar="CLOUD", help="Update only this cloud. Repeatable.")
    ] = None,
    source: Annotated[str | None, typer.Option("--source", metavar="NAME", help="Use only this price source.")] = None,
    as_json: options.AsJson = False,
) -> None:
    """Fetch current prices from live sources.

    If a source returns no plausible prices for a cloud, the old ones are kept and the exit code is 1.
    """
    from broker.catalog.attempts import record_attempts
    from broker.catalog.http_client import HttpGet
    from broker.catalog.refresh import refresh_book
    from broker.catalog.sources import SOURCES

    context = make_context()
    if source is not None and source not in SOURCES:
        raise UsageError(f"unknown price source `{source}`", hints=[f"known sources: {', '.join(SOURCES)}"])
    sources = load_own_sources(None if source is None else [source])
    wanted = [each.lower() for each in cloud or ()] or [
        each for each in context.book.clouds if any(each in one.clouds for one in sources.values())
    ]
    known = sorted({*context.book.clouds, *(each for one in sources.values() for each in one.clouds)})
    if unknown := next((each for each in wanted if each not in known), None):
        hint = suggest(unknown, known) or f"known clouds: {', '.join(known)}"
        raise UsageError(f"unknown cloud `{unknown}`", hints=[hint])
    with show_wait("fetching prices", is_printed=False) as bar:
        reports = refresh_book(
            find_cache(),
            context.book,
            wanted,
            sources=sources,
            get=_count_pages(HttpGet(lambda wait_s: asyncio.run(context.clock.sleep(wait_s))), bar),
            now_s=context.clock.now_s(),
            on_cloud=lambda name, where: print_note(f"{name}: querying {where} ..."),
        )
    with suppress(OSError):  # the prices themselves are already stored
        record_attempts(find_cache(), {each.cloud: each.error for each in reports}, now_s=context.clock.now_s())
    if as_json:
        print_json(to_plain(list(reports)))
    else:
        for each in reports:
            if each.error is None:
                print_line(f"{each.cloud}: {each.offers:,} offers from {each.source}, {each.changed:,} prices changed")
            else:
                print_line(f"{each.cloud}: not updated: {each.error}")
    failed = [report for report in reports if report.error is not None]
    if failed:
        hints = list(dict.fromkeys(hint for each in failed for hint in each.hints))
        raise SourceError(f"could not update {len(failed)} of {len(reports)} clouds", hints=hints)


def _count_pages(get: Get, bar: Bar) -> Get:
    """Count pages on the progress bar, or every hundred in a pipe: Azure's list has more than a thousand."""
    asked, is_drawn = 0, is_drawing(sys.stderr)

    def count(url: str, *, query: Mapping[str, str] | None = None) -> bytes:
        nonlocal asked
        asked += 1
        bar.describe(f"fetching prices, page {asked}")
        if asked % PAGES_A_NOTE == 0 and not is_drawn:
            print_note(f"  {asked} pages ...")
        return get(url, query=query)

    return count


@app.command(name="import")
def import_(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Folder of CLOUD/vms.csv files.", show_default=False)
    ],
    only: Annotated[bool, typer.Option("--only", help="Remove all other clouds from the catalog.")] = False,
    as_json: options.AsJson = False,
) -> None:
    """Import a SkyPilot catalog (versions 5 to 8)."""
    from broker.catalog.importing import import_catalog

    context = make_context()
    report = import_catalog(
        find_cache(), context.book, folder, now_s=context.clock.now_s(), is_alone=only,
        on_cloud=lambda name: print_note(f"{name}: reading ..."),
    )  # fmt: skip
    if as_json:
        print_json({"offers": dict(report.offers), "faults": [str(fault) for fault in report.faults]})
        return
    for cloud, count in report.offers.items():
        print_line(f"{cloud}: {count:,} offers")
    for fault in report.faults[:FAULTS_SHOWN]:
        print_note(f"skipped {fault}")
    if len(report.faults) > FAULTS_SHOWN:
        print_note(f"... and {len(report.faults) - FAULTS_SHOWN} more rows")


@app.command()
def reset() -> None:
    """Reset the catalog to the prices shipped with broker."""
    from broker.catalog.bundle import locate_live_book

    live = locate_live_book(find_cache())
    if live.exists():
        live.unlink()
        print_line("Reset to the shipped prices")
    else:
        print_line("The shipped prices are already in use")
