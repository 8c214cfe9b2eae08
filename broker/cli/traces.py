"""`broker traces`: record spot availability, and describe recordings for `broker simulate`."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from broker.cli import options
from broker.cli.context import make_context
from broker.cli.render import print_json, print_note, print_table
from broker.errors import UsageError
from broker.formatting import format_count, format_hours, format_usd
from broker.lab.recording import Recorder, check_folder, choose_places

app = typer.Typer(
    help="Record spot availability and describe recordings.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
TICKS_MAX = 100_000


@app.callback()
def root() -> None:
    """Record spot availability and describe recordings."""


@app.command()
def info(
    path: Annotated[
        Path | None, typer.Argument(metavar="PATH", help="File or folder (default: the synthetic traces).")
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Summarize recordings: spot availability and interruptions."""
    from broker.lab.trace_files import read_traces
    from broker.lab.traces import make_default_traces, measure_trace

    found = [measure_trace(each) for each in (make_default_traces() if path is None else read_traces(path))]
    if as_json:
        from broker.formatting import to_plain

        print_json([to_plain(each) for each in found])
        return
    columns = ["TRACE", "LENGTH", "TICK", "GANG", "OPEN", "LOST", "MEAN OPEN", "MEAN SHUT", "PRICE"]
    rows = [
        [each.name, format_hours(each.hours), f"{each.gap_hours * 3600:.0f}s", str(each.gang), f"{each.open_share:.0%}",
         str(each.preemptions), format_hours(each.mean_open_hours), format_hours(each.mean_closed_hours),
         format_usd(each.mean_usd_hour)]
        for each in found
    ]  # fmt: skip
    print_table(columns, rows, right=columns[1:], firm=columns[1:])


@app.command()
def record(
    entrypoint: options.Entrypoint,
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="FOLDER", help="Folder for the recordings, one file per zone.")
    ],
    every: Annotated[
        float, typer.Option("--every", metavar="MINUTES", min=0, help="Minutes between observations.")
    ] = 10,
    hours: Annotated[float, typer.Option("--hours", metavar="HOURS", min=0, help="Total duration in hours.")] = 24,
    places: Annotated[
        int, typer.Option("--places", metavar="N", min=1, max=20, help="Record the N cheapest zones.")
    ] = 1,
    infra: options.Infra = None,
    gpus: options.Gpus = None,
    num_nodes: options.NumNodes = None,
    yes: options.Yes = False,
) -> None:
    """Record spot availability by launching nodes periodically.

    Each observation requests the spot nodes of the task, records the result, and terminates them.
    """
    context = make_context()
    overrides = options.Overrides(infra=infra, gpus=gpus, num_nodes=num_nodes, use_spot=True)
    task = context.resolve(options.read_task(entrypoint, overrides))
    task = replace(task, goal=None)  # a recording observes the market even where no deadline could be met
    plan = context.plan(task, usable_clouds=frozenset(context.clouds))
    chosen = choose_places(plan, places)
    count = hours * 60 / every if every > 0 else 1.0
    if not count <= TICKS_MAX:
        raise UsageError(
            f"{count:,.0f} observations exceed the limit of {TICKS_MAX:,}",
            hints=["pass a larger `--every`, or fewer `--hours`"],
        )
    ticks = max(1, round(count))
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot create folder {out}: {error.strerror}") from None
    check_folder(out, chosen)
    usd_hour = sum(each.placement.usd_hour for each in chosen)
    print_note(
        f"{format_count(ticks, 'observation')} of {format_count(len(chosen), 'zone')}, {every:g} minutes apart; each "
        f"one launches and terminates the nodes,\nfor which clouds bill about a minute at {format_usd(usd_hour)} USD/h"
    )
    if not yes and usd_hour > 0:
        options.ask("Start recording?")
    recorder = Recorder(
        context.provisioner, plan, chosen, clock=context.clock, owner=context.config.owner, out=out,
        every_s=every * 60, on_message=print_note,
    )  # fmt: skip
    try:
        asyncio.run(recorder.run(ticks))
    except KeyboardInterrupt:
        print_note("interrupted; the recordings made so far are kept")
        raise typer.Exit(130) from None
