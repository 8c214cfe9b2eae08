"""`broker map`: run a program over a file of items on any number of spot workers."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated, Any

import typer

from broker.cli import options
from broker.cli.context import make_session
from broker.cli.render import print_json, print_line, print_note
from broker.cli.terminal import Bar, show_progress
from broker.errors import BrokerError
from broker.formatting import format_count, format_usd, to_plain

if TYPE_CHECKING:
    from broker.app.mapping import MapRequest
    from broker.app.session import Session
    from broker.app.verbs.batches import MapState
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
Workers = Annotated[
    int | None,
    typer.Option(
        "--workers", "-w", metavar="N", min=1, max=1000,
        help="Number of worker jobs (default: 4; 1 with Ray, Dask or Spark).",
        show_default=False,
    ),
]  # fmt: skip
ShardMib = Annotated[
    float | None,
    typer.Option(
        "--shard-mib", metavar="MIB", min=0.001,
        help="Input per shard, in MiB (default: 1/1000 of the input, at most 16).", show_default=False,
    ),
]  # fmt: skip
LeaseS = Annotated[
    float,
    typer.Option("--lease", metavar="SECONDS", min=1, help="Seconds until the shard of a silent worker is reassigned."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result, or with -d the state, as JSON.")]


@options.task_options("name", "workdir", *options.RESOURCES, *options.ENVIRONMENT)
def map(
    entrypoint: options.Entrypoint,
    source: Input,
    output: Output,
    overrides: options.Overrides = options.NO_OVERRIDES,
    workers: Workers = None,
    shard_mib: ShardMib = None,
    lease: LeaseS = 60,
    yes: options.Yes = False,
    detach: options.Detach = False,
    dryrun: options.Dryrun = False,
    as_json: AsJson = False,
) -> None:
    """Run a program over a file of items on spot workers.

    The input is split into shards, which managed jobs process in parallel. Every result is written exactly once.
    Repeat the command to continue an interrupted map.
    """
    from broker.app.mapping import MapRequest

    session = make_session()
    request = MapRequest(
        task=options.read_task(entrypoint, overrides), input=source, output=output, workers=workers,
        shard_bytes=None if shard_mib is None else max(1, round(shard_mib * (1 << 20))), lease_s=lease,
    )  # fmt: skip
    state = _run(session, request, yes=yes, detach=detach, dryrun=dryrun, as_json=as_json)
    if state is None:
        return
    if detach:
        _print_state(state, as_json=as_json)
    else:
        _print_result(state, as_json=as_json)


def _run(
    session: Session, request: MapRequest, *, yes: bool, detach: bool, dryrun: bool, as_json: bool
) -> MapState | None:
    """Run the map with a progress bar; return its state at the end, or at once if detached; None for a dry run."""
    from broker.app.verbs.batches import run_map
    from broker.cli.launch import confirm_price, show_upload
    from broker.cli.plan_table import show_plan

    count = request.worker_count

    def show(plans: Sequence[Plan]) -> None:
        if not as_json:
            show_plan(plans[0])
        print_note(f"{format_count(count, 'worker')}, each at the price of the first placement")

    begun: MapState | None = None
    with ExitStack() as stack:
        bar: Bar | None = None

        def begin(state: MapState) -> None:
            nonlocal begun, bar
            begun = state
            if not detach:  # the price has been confirmed, so the bar no longer hides a prompt
                bar = stack.enter_context(show_progress(state.name))

        def draw(state: MapState) -> None:
            assert bar is not None
            bar.update(state.shards_done, total=state.shards)
            bar.describe(f"{state.name}: {_describe_state(state)}")

        try:
            return session.call(
                run_map, request=request, is_detached=detach, is_dryrun=dryrun, show=show,
                confirm=lambda plans: confirm_price(plans, yes=yes, parallel=count, total=count),
                on_begin=begin, on_change=draw, track_upload=show_upload,
            )  # fmt: skip
        except KeyboardInterrupt:
            if begun is None:
                raise
            stack.close()
            print_note(
                f"interrupted; the workers continue; run the same command to follow them again; {_hint_cancel(begun)}"
            )
            raise typer.Exit(130) from None


def _print_state(state: MapState, *, as_json: bool) -> None:
    if as_json:
        print_json(describe(state))
        return
    print_line(f"{state.name}: {_describe_state(state)}")
    print_note(f"follow it with the same command without `-d`; {_hint_cancel(state)}")


def _describe_state(state: MapState) -> str:
    price = f", {format_usd(1e6 * state.usd / state.items)} USD per million items" if state.items else ""
    workers = format_count(state.live_workers, "live worker")
    return f"{state.shards_done} of {state.shards} shards, {state.items:,} items, {workers}{price}"


def _hint_cancel(state: MapState) -> str:
    return f"cancel them with `broker jobs cancel {state.name}`"


def describe(state: MapState) -> dict[str, Any]:
    """Return a map as JSON-ready data; without a manifest, `items` counts those processed so far."""
    return {name: value for name, value in to_plain(state).items() if name not in ("live_workers", "failures")}


def _print_result(state: MapState, *, as_json: bool) -> None:
    """Print the result. Raises BrokerError if shards failed."""
    if as_json:
        print_json(describe(state))
    else:
        price = format_usd(state.usd_per_million_items)
        print_line(
            f"{state.name}: {format_count(state.shards_done, 'shard')}, {state.items:,} items, "
            f"{format_usd(state.usd)} USD, {price} USD per million items"
        )
        print_line(f"Wrote {state.manifest}")
    if state.shards_failed:
        numbers = state.shards_failed
        shown = ", ".join(str(each) for each in numbers[:5]) + (", ..." if len(numbers) > 5 else "")
        raise BrokerError(
            f"the program failed three times on {format_count(len(numbers), 'shard')} ({shown})",
            details=list(state.failures)[:5],
            hints=["correct the input or the program's environment; the same command then retries only these shards"],
        )
