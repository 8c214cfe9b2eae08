"""`broker map`: run a program over a file of items on any number of spot workers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from broker.cli import options
from broker.cli.context import make_context
from broker.cli.render import print_json, print_line, print_note
from broker.cli.terminal import show_progress
from broker.errors import BrokerError
from broker.formatting import format_count, format_usd

if TYPE_CHECKING:
    from broker.app.mapping import MapDriver, MapResult, MapView
    from broker.types import Plan

Input = Annotated[
    str,
    typer.Option(
        "--input", metavar="URL", help="File of JSON lines, or folder of such files, in a bucket or on this machine."
    ),
]
Output = Annotated[
    str, typer.Option("--output", metavar="URL", help="Folder for the results, in a bucket or on this machine.")
]
Workers = Annotated[int, typer.Option("--workers", "-w", metavar="N", min=1, max=1000, help="Number of worker jobs.")]
ShardMib = Annotated[
    float | None,
    typer.Option(
        "--shard-mib", metavar="MIB", min=0.001,
        help="Input per shard (default: a thousandth of it, at most 16 MiB).", show_default=False,
    ),
]  # fmt: skip
LeaseS = Annotated[
    float,
    typer.Option(
        "--lease", metavar="SECONDS", min=1, help="Time after which the shard of a silent worker is reassigned."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result, or with -d the state, as JSON.")]


@options.task_options("name", "workdir", *options.RESOURCES, *options.ENVIRONMENT)
def map(
    entrypoint: options.Entrypoint,
    source: Input,
    output: Output,
    overrides: options.Overrides = options.NO_OVERRIDES,
    workers: Workers = 4,
    shard_mib: ShardMib = None,
    lease: LeaseS = 60,
    yes: options.Yes = False,
    detach: options.Detach = False,
    dryrun: options.Dryrun = False,
    as_json: AsJson = False,
) -> None:
    """Run a program over a file of items on spot workers.

    The input is split into shards, which any number of managed jobs share. Every result is written exactly once, and
    the same command continues an interrupted map.
    """
    from broker.app.mapping import MapDriver, MapRequest
    from broker.cli.launch import make_callbacks
    from broker.cli.plan_table import show_plan

    def show(plans: Sequence[Plan]) -> None:
        if not as_json:
            show_plan(plans[0])
        print_note(f"{format_count(workers, 'worker')}, each at the price of the first placement")

    context = make_context()
    request = MapRequest(
        task=options.read_task(entrypoint, overrides), input=source, output=output, workers=workers,
        shard_bytes=None if shard_mib is None else max(1, round(shard_mib * (1 << 20))), lease_s=lease,
    )  # fmt: skip
    driver = MapDriver(context, request, callbacks=make_callbacks(show, yes=yes))
    print_note(f"input: {format_count(len(driver.split.shards), 'shard')}, {sum(driver.split.sizes):,} bytes")
    if dryrun:
        driver.show()
        return
    if not driver.begin():
        print_note(f"continuing {driver.plan.group}")
    driver.submit(driver.look().crew)  # asks for the price, so before any bar
    if detach:
        _tell_state(driver, as_json=as_json)
        return
    try:
        with show_progress(driver.plan.group) as bar:
            view = asyncio.run(_follow(driver, bar))
    except KeyboardInterrupt:
        print_note(f"interrupted; the workers continue, and so does the same command; {_hint_cancel(driver)}")
        raise typer.Exit(130) from None
    _print_result(driver, driver.finish(view), as_json=as_json)


def _tell_state(driver: MapDriver, *, as_json: bool) -> None:
    view = driver.look()
    if as_json:
        print_json(describe(driver, view))
        return
    print_line(f"{driver.plan.group}: {_describe_state(view)}")
    print_note(f"follow it with the same command without `-d`; {_hint_cancel(driver)}")


async def _follow(driver: MapDriver, bar: Any) -> MapView:
    view = None
    async for view in driver.follow():
        bar.update(len(view.tally.parts), total=view.tally.shards)
        bar.describe(f"{driver.plan.group}: {_describe_state(view)}")
    assert view is not None
    return view


def _describe_state(view: MapView) -> str:
    items = sum(view.tally.items.values())
    price = f", {format_usd(1e6 * view.usd / items)} USD per million items" if items else ""
    workers = format_count(len(view.crew.live), "live worker")
    return f"{len(view.tally.parts)} of {view.tally.shards} shards, {items:,} items, {workers}{price}"


def _hint_cancel(driver: MapDriver) -> str:
    return f"cancel them with `broker jobs cancel {driver.plan.group}`"


def describe(driver: MapDriver, view: MapView, result: MapResult | None = None) -> dict[str, Any]:
    """Describe a map as JSON; without a result, its items are those counted so far."""
    return {
        "name": driver.plan.group,
        "input": driver.plan.input,
        "output": driver.output_url,
        "shards": view.tally.shards,
        "shards_done": len(view.tally.parts),
        "shards_failed": sorted(view.tally.failed),
        "items": result.items if result else sum(view.tally.items.values()),
        "jobs": list(view.crew.job_ids),
        "usd": view.usd,
        "usd_per_million_items": result.usd_per_million_items if result else None,
        "manifest": result.manifest if result else None,
    }


def _print_result(driver: MapDriver, result: MapResult, *, as_json: bool) -> None:
    """Print the result. Raises BrokerError if shards were left out."""
    if as_json:
        print_json(describe(driver, result.view, result))
    else:
        price = format_usd(result.usd_per_million_items)
        print_line(
            f"{driver.plan.group}: {format_count(len(result.view.tally.parts), 'shard')}, {result.items:,} items, "
            f"{format_usd(result.view.usd)} USD, {price} USD per million items"
        )
        print_line(f"Wrote {result.manifest}")
    if result.view.tally.failed:
        numbers = sorted(result.view.tally.failed)
        shown = ", ".join(str(each) for each in numbers[:5]) + (", ..." if len(numbers) > 5 else "")
        raise BrokerError(
            f"the program failed three times on {format_count(len(numbers), 'shard')} ({shown})",
            details=list(result.failures)[:5],
            hints=["mend the input or the program's environment; the same command tries only these shards again"],
        )
