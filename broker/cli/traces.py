"""`broker traces`: recordings of spot markets, to replay tasks over."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from broker.cli import options
from broker.cli.context import Context
from broker.cli.render import print_json, print_note, print_table, show_hours, show_usd
from broker.errors import CapacityError, UsageError
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
        f"{ticks} looks at {len(chosen)} places, {every:g} minutes apart; each starts the nodes and ends them, "
        f"and clouds bill the minute or so between: {show_usd(usd_hour)} USD/h while all are up"
    )
    if not yes and usd_hour > 0 and not typer.confirm("Record?", err=True):
        raise typer.Exit(1)
    try:
        asyncio.run(_Recorder(context, plan, chosen, out, every * 60).run(ticks))
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


class _Recorder:
    """One cluster a place, brought up and taken down at every look: intents and tags as for any other."""

    def __init__(self, context: Context, plan: Plan, chosen: Sequence[Estimate], out: Path, every_s: float) -> None:
        self._context, self._plan, self._chosen = context, plan, chosen
        self._out, self._every_s = out, every_s
        self._counts: list[list[int]] = [[] for _ in chosen]
        self._started_s = context.clock.now_s()

    async def run(self, ticks: int) -> None:
        clock = self._context.clock
        for tick in range(ticks):
            await clock.sleep(max(self._started_s + tick * self._every_s - clock.now_s(), 0.0))
            for index, estimate in enumerate(self._chosen):
                is_open = await self._look(index, estimate)
                self._counts[index].append(self._plan.task.num_nodes if is_open else 0)
                self._write(index, estimate)
            given = sum(counts[-1] > 0 for counts in self._counts)
            print_note(f"look {tick + 1} of {ticks}: {given} of {len(self._chosen)} places give the nodes")

    async def _look(self, index: int, estimate: Estimate) -> bool:
        name = f"broker-trace-{self._context.config.owner[:4]}-{index}"
        provisioner = self._context.provisioner
        try:
            await provisioner.up(name, replace(self._plan, estimates=(estimate,)))
            return True
        except CapacityError:
            return False
        finally:
            await provisioner.down(name)

    def _write(self, index: int, estimate: Estimate) -> None:
        """After every look, so that an end at any moment loses nothing."""
        from broker.spot.traces import Trace, write_trace

        offer, counts = estimate.placement.offer, tuple(self._counts[index])
        name = f"{offer.cloud}-{offer.zone or offer.region}-{offer.instance_type}".replace("/", "-")
        trace = Trace(
            name=name,
            gap_hours=max(self._every_s, 1.0) / 3600,
            counts=counts,
            gang=self._plan.task.num_nodes,
            prices=(offer.spot_usd_hour,) * len(counts) if offer.spot_usd_hour is not None else (),
            ondemand_usd_hour=offer.ondemand_usd_hour,
            started_s=self._started_s,
        )
        target = self._out / f"{name}.json"
        aside = target.with_suffix(".part")
        aside.write_text(write_trace(trace))
        aside.replace(target)
