"""`broker jobs watch`: jobs and their events as they change."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated

import typer

from broker.app.verbs.watching import JobChanges, watch_jobs
from broker.cli import terminal
from broker.cli.completion import complete_jobs
from broker.cli.context import make_session
from broker.cli.render import format_table, print_line, print_note, show_usage
from broker.formatting import format_duration, format_time_of_day, strip_control, to_plain
from broker.types import EventKind, JobUsage

if TYPE_CHECKING:
    from broker.state.events import EventRow
    from broker.state.jobs import JobLine

ROWS_MAX, EVENTS_MAX = 15, 8  # of the view on a terminal
WIDTH = 80
NO_USAGE: Mapping[int, JobUsage] = {}


def watch(
    job: Annotated[
        str | None,
        typer.Argument(
            metavar="JOB",
            help="Job ID or name (default: all live jobs).",
            show_default=False,
            autocompletion=complete_jobs,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print each change as a JSON object, one per line.")] = False,
) -> None:
    """Show jobs and their events as they change, until they end.

    Redraws one view on a terminal; prints a line per change to a pipe. The exit code is 1 if the named job does
    not succeed.
    """
    session = make_session()
    seen = _Changes()
    with terminal.show_view() if not as_json else nullcontext() as view:

        def show(changes: JobChanges) -> None:
            seen.add(changes)
            now_s = session.clock.now_s()
            if view is None:
                _print_changes(changes, now_s=now_s, as_json=as_json)
            else:
                view.show(list_view(list(seen.lines.values()), seen.events, now_s=now_s, usage=changes.usage))

        try:
            session.call(watch_jobs, job=job, on_change=show)
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
    if view is None and not seen.lines:
        print_note("no live jobs; list ended ones with `broker jobs queue --all`")


class _Changes:
    """The jobs and the newest events, of all changes so far."""

    def __init__(self) -> None:
        self.lines: dict[int, JobLine] = {}
        self.events: list[EventRow] = []

    def add(self, changes: JobChanges) -> None:
        self.lines |= {line.id: line for line in changes.lines}
        self.events = [*self.events, *changes.events][-EVENTS_MAX:]


def _print_changes(changes: JobChanges, *, now_s: float, as_json: bool) -> None:
    """Print a line per change."""
    for event in changes.events:
        if as_json:
            _print_json({"event": {**to_plain(event), "message": event.message}})
        elif event.kind is not EventKind.LAST_LINES:
            print_line(describe_change(event))
    for line in changes.lines:
        if as_json:
            usage = changes.usage.get(line.id)
            _print_json({"job": {**to_plain(line), "usage": usage and to_plain(usage)}})
        else:
            print_line(describe_line(line, now_s=now_s))
    sys.stdout.flush()


def _print_json(data: Mapping[str, object]) -> None:
    print_line(json.dumps(data, ensure_ascii=False))


def describe_line(line: JobLine, *, now_s: float) -> str:
    """Return a job's state as a line: `20:15:03  job 1 (train)  RUNNING  step 40/100  2 recoveries`."""
    step = "" if line.step is None else f"  step {line.step}" + (f"/{line.total}" if line.total else "")
    recoveries = f"  {line.starts - 1} recoveries" if line.starts > 1 else ""
    name = strip_control(line.name)
    return f"{format_time_of_day(now_s)}  job {line.id} ({name})  {line.status.value}{step}{recoveries}"


def describe_change(event: EventRow) -> str:
    """Return an event as one line."""
    message = " ".join(strip_control(event.message).split())
    return f"{format_time_of_day(event.time_s)}  job {event.job_id}  {message}"


def list_view(
    lines: Sequence[JobLine], events: Sequence[EventRow], *, now_s: float, usage: Mapping[int, JobUsage] = NO_USAGE
) -> Sequence[str]:
    """List the lines of the view, at most 80 columns wide: the jobs, newest first, and their newest events."""
    rows = [
        [
            str(line.id), strip_control(line.name)[:20], line.status.value,
            "-" if line.step is None else f"{line.step}/{line.total or '?'}", str(max(0, line.starts - 1)),
            format_duration((line.ended_s or now_s) - line.submitted_s), *show_usage(usage.get(line.id)),
        ]
        for line in sorted(lines, key=lambda line: -line.id)[:ROWS_MAX]
    ]  # fmt: skip
    if not rows:
        return ["No live jobs"]
    heads = ["JOB", "NAME", "STATUS", "STEP", "RECOVERIES", "TIME", "CPU", "GPU"]
    shown = list(format_table(heads, rows, right=("JOB", *heads[3:])))
    if len(lines) > len(rows):
        shown.append(f"... and {len(lines) - len(rows)} more")
    if events:
        shown += ["", *(describe_change(each)[:WIDTH] for each in events)]
    return shown
