"""`broker jobs watch`: jobs and their events as they change."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from broker.app.jobs import explain_ended, find_job
from broker.cli import terminal
from broker.cli.completion import complete_jobs
from broker.cli.context import check_embedded, make_context
from broker.cli.render import format_table, note_damage, print_line, print_note
from broker.formatting import format_duration, strip_control, to_plain
from broker.types import EventKind, JobStatus

if TYPE_CHECKING:
    from broker.app.container import Context
    from broker.state.events import EventRow
    from broker.state.jobs import JobLine

LOOK_S = 1.0
ROWS_MAX, EVENTS_MAX = 15, 8  # of the view on a terminal
WIDTH = 80


def watch(
    job: Annotated[
        str | None,
        typer.Argument(
            help="Job ID or name (default: all live jobs).", show_default=False, autocompletion=complete_jobs
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print each change as a JSON object, one a line.")] = False,
) -> None:
    """Show jobs and their events as they change, until they end.

    Redraws one view on a terminal, and prints a line per change in a pipe. Exit code 1 when the named job ends in
    another status than SUCCEEDED.
    """
    check_embedded("jobs watch")
    context = make_context()
    wanted = None if job is None else find_job(context, job).id
    watcher = Watcher(context, wanted)
    try:
        asyncio.run(_follow(context, watcher, as_json=as_json))
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    ended = None if wanted is None else context.store.jobs.get(wanted)
    if ended is not None and ended.status is not JobStatus.SUCCEEDED:
        raise explain_ended(ended)


class Watcher:
    """The watched jobs as last seen. `look` returns what changed since."""

    def __init__(self, context: Context, wanted: int | None) -> None:
        self._context = context
        self._wanted = wanted
        self._newest = context.store.events.get_newest_id()
        self.lines: Mapping[int, JobLine] = {}

    @property
    def is_over(self) -> bool:
        return all(line.status.is_terminal for line in self.lines.values())

    def look(self) -> tuple[Sequence[JobLine], Sequence[EventRow]]:
        """Return the jobs that changed, by id, and their new events, oldest first."""
        store = self._context.store
        newest = store.events.get_newest_id()
        events = store.events.list(after=self._newest) if newest > self._newest else []
        found = self._read()
        changed = [line for job_id, line in sorted(found.items()) if line != self.lines.get(job_id)]
        self.lines, self._newest = found, newest
        return changed, [each for each in events if each.id <= newest and each.job_id in found]

    def _read(self) -> Mapping[int, JobLine]:
        """Read the wanted job, or every live job and those seen before, which may have ended."""
        jobs = self._context.store.jobs
        live = {line.id: line for line in jobs.list_lines(0, on_damage=note_damage)}
        known = set(self.lines) if self._wanted is None else {self._wanted}
        if known - set(live):
            live = {line.id: line for line in jobs.list_lines(on_damage=note_damage)}
        return {
            job_id: line
            for job_id, line in live.items()
            if job_id in known or (self._wanted is None and not line.status.is_terminal)
        }


async def _follow(context: Context, watcher: Watcher, *, as_json: bool) -> None:
    told: list[EventRow] = []
    if as_json:
        await _print_changes(context, watcher, as_json=True)
        return
    with terminal.show_view() as view:
        if view is None:
            await _print_changes(context, watcher, as_json=False)
            return
        while True:
            _, events = watcher.look()
            told = [*told, *events][-EVENTS_MAX:]
            view.show(list_view(list(watcher.lines.values()), told, now_s=context.clock.now_s()))
            if watcher.is_over:
                return
            context.keep_jobs_going()
            await context.clock.sleep(LOOK_S)


async def _print_changes(context: Context, watcher: Watcher, *, as_json: bool) -> None:
    """Print the jobs as they are, then a line per change."""
    while True:
        changed, events = watcher.look()
        for event in events:
            if as_json:
                _print_json({"event": {**to_plain(event), "message": event.message}})
            elif event.kind is not EventKind.LAST_LINES:
                print_line(describe_change(event))
        for line in changed:
            if as_json:
                _print_json({"job": to_plain(line)})
            else:
                print_line(describe_line(line, now_s=context.clock.now_s()))
        sys.stdout.flush()
        if watcher.is_over:
            if not watcher.lines:
                print_note("no live jobs; list ended ones with `broker jobs queue --all`")
            return
        context.keep_jobs_going()
        await context.clock.sleep(LOOK_S)


def _print_json(data: Mapping[str, object]) -> None:
    print_line(json.dumps(data, ensure_ascii=False))


def describe_line(line: JobLine, *, now_s: float) -> str:
    """Return a job's state as a line: `20:15:03  job 1 (train)  RUNNING  step 40/100  2 recoveries`."""
    step = "" if line.step is None else f"  step {line.step}" + (f"/{line.total}" if line.total else "")
    recoveries = f"  {line.starts - 1} recoveries" if line.starts > 1 else ""
    name = strip_control(line.name)
    return f"{_show_time(now_s)}  job {line.id} ({name})  {line.status.value}{step}{recoveries}"


def describe_change(event: EventRow) -> str:
    """Return an event as one line."""
    message = " ".join(strip_control(event.message).split())
    return f"{_show_time(event.time_s)}  job {event.job_id}  {message}"


def list_view(lines: Sequence[JobLine], events: Sequence[EventRow], *, now_s: float) -> Sequence[str]:
    """List the lines of the view, at most 80 columns wide: the jobs, newest first, and their newest events."""
    rows = [
        [
            str(line.id), strip_control(line.name)[:24], line.status.value,
            "-" if line.step is None else f"{line.step}/{line.total or '?'}", str(max(0, line.starts - 1)),
            format_duration((line.ended_s or now_s) - line.submitted_s),
        ]
        for line in sorted(lines, key=lambda line: -line.id)[:ROWS_MAX]
    ]  # fmt: skip
    if not rows:
        return ["No live jobs"]
    heads = ["JOB", "NAME", "STATUS", "STEP", "RECOVERIES", "TIME"]
    shown = list(format_table(heads, rows, right=("JOB", "STEP", "RECOVERIES", "TIME")))
    if len(lines) > len(rows):
        shown.append(f"... and {len(lines) - len(rows)} more")
    if events:
        shown += ["", *(describe_change(each)[:WIDTH] for each in events)]
    return shown


def _show_time(time_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(time_s))
