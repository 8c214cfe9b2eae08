"""`broker traces`: recordings of spot markets, to replay tasks over."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from broker.cli import options
from broker.cli.context import Context
from broker.cli.render import print_json, print_note, print_table, show_count, show_hours, show_usd
from broker.errors import UsageError
from broker.provision.recording import Recorder
from broker.types import Estimate, Plan

app = typer.Typer(
    help="Recordings of spot markets, to replay tasks over",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
TICKS_MAX = 100_000


@app.callback()
def root() -> None:
    """Recordings of spot markets, to replay tasks over."""


@app.command()
def info(
    path: Annotated[Path | None, typer.Argument(help="A file or folder; without it, the made-up traces.")] = None,
    as_json: options.AsJson = False,
) -> None:
    """Say how often spot was to be had, and for how long at a time."""
    from broker.cli.trace_files import read_traces
    from broker.spot.traces import make_default_traces, measure_trace

    found = [measure_trace(each) for each in (make_default_traces() if path is None else read_traces(path))]
    if as_json:
        from broker.cli.render import plain

        print_json([plain(each) for each in found])
        return
    columns = ["TRACE", "LENGTH", "TICK", "GANG", "OPEN", "LOST", "MEAN OPEN", "MEAN SHUT", "PRICE"]
    rows = [
        [each.name, show_hours(each.hours), f"{each.gap_hours * 3600:.0f}s", str(each.gang), f"{each.open_share:.0%}",
         str(each.preemptions), show_hours(each.mean_open_hours), show_hours(each.mean_closed_hours),
         show_usd(each.mean_usd_hour)]
        for each in found
    ]  # fmt: skip
    print_table(columns, rows, right=columns[1:], firm=columns[1:])


@app.command()
def record(
    entrypoint: options.Entrypoint,
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder for the recordings, one file a place.")],
    every: Annotated[float, typer.Option("--every", min=0, help="Minutes from one look to the next.")] = 10,
    hours: Annotated[float, typer.Option("--hours", min=0, help="How long to go on.")] = 24,
    places: Annotated[int, typer.Option("--places", min=1, max=20, help="The cheapest so many zones.")] = 1,
    infra: options.Infra = None,
    gpus: options.Gpus = None,
    num_nodes: options.NumNodes = None,
    yes: options.Yes = False,
) -> None:
    """Ask for a task's spot nodes again and again, note who gives, and end them at once."""
    context = Context()
    overrides = options.Overrides(infra=infra, gpus=gpus, num_nodes=num_nodes, use_spot=True)
    task = context.resolve(options.read_task(entrypoint, overrides))
    plan = context.plan(task, usable_clouds=frozenset(context.clouds))
    chosen = _choose_places(plan, places)
    ticks = max(1, round(hours * 60 / every)) if every > 0 else 1
    if ticks > TICKS_MAX:
        raise UsageError(f"{ticks:,} looks are more than {TICKS_MAX:,}", hints=["a larger `--every`"])
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot make the folder {out}: {error.strerror}") from None
    usd_hour = sum(each.placement.usd_hour for each in chosen)
    print_note(
        f"{show_count(ticks, 'look')} at {show_count(len(chosen), 'place')}, {every:g} minutes apart: each starts\n"
        f"the nodes and ends them, and clouds bill the minute or so between ({show_usd(usd_hour)} USD/h)"
    )
    if not yes and usd_hour > 0 and not typer.confirm("Record?", err=True):
        raise typer.Exit(1)
    recorder = Recorder(
        context.provisioner, plan, chosen, clock=context.clock, owner=context.config.owner, out=out,
        every_s=every * 60, tell=print_note,
    )  # fmt: skip
    try:
        asyncio.run(recorder.run(ticks))
    except KeyboardInterrupt:
        print_note("interrupted; what was recorded is kept")
        raise typer.Exit(130) from None


def _choose_places(plan: Plan, count: int) -> list[Estimate]:
    """The cheapest estimate of each zone, for so many zones."""
    found = dict[tuple[str, str], Estimate]()
    for each in plan.estimates:
        offer = each.placement.offer
        if each.placement.is_spot:
            found.setdefault((offer.cloud, offer.zone or offer.region), each)
        if len(found) == count:
            break
    if not found:
        raise UsageError("nothing that fits the task is sold as spot", hints=["broker plan TASK.yaml"])
    return list(found.values())
