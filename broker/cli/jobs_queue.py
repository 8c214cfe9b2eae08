"""`broker jobs queue`: list managed jobs in a table, grouped by pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from broker.app.job_sentences import describe_forecast
from broker.app.session import Session
from broker.app.verbs.jobs import list_jobs, list_queue
from broker.cli import options, terminal
from broker.cli.context import make_session
from broker.cli.jobs_show import describe
from broker.cli.render import format_table, print_json, print_line
from broker.clock import pause
from broker.formatting import format_count, format_duration, format_time_of_day, format_usd, to_plain
from broker.types import JobStatus, JobWait, WaitReason
from broker.wording import describe_wait

if TYPE_CHECKING:
    from broker.state.jobs import JobLine

WATCH_S = 2.0
NO_USERS: Mapping[int, str] = {}
NEWEST = 50
WAITS_MAX = 10  # lines for jobs that wait
FORECASTS_MAX = 10  # each takes as long as a plan


def queue(
    everything: Annotated[
        bool, typer.Option("--all", "-a", help="Include all ended jobs, not only the newest.")
    ] = False,
    all_users: options.AllUsers = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Refresh the list every two seconds.")] = False,
    as_json: options.AsJson = False,
    output: options.Output = options.Format.TABLE,
) -> None:
    """List managed jobs, newest first."""
    session = make_session()
    as_json = as_json or output is options.Format.JSON
    newest = None if everything else NEWEST
    if not watch:
        _print_jobs(session, all_users) if as_json else _show(list_lines(session, newest, all_users))
        return
    try:
        _watch(session, newest, all_users, as_json=as_json)
    except KeyboardInterrupt:
        return


def _watch(session: Session, newest: int | None, all_users: bool, *, as_json: bool) -> None:
    """Redraw one view on a terminal; print one list after another in a pipe."""
    if as_json:
        while True:
            _print_jobs(session, all_users)
            pause(WATCH_S)
    with terminal.show_view() as view:
        while True:
            lines = list_lines(session, newest, all_users)
            if view is None:
                _show(lines)
            else:
                stamp = format_time_of_day(session.clock.now_s())
                view.show([*lines, "", terminal.paint(f"{stamp}, every {WATCH_S:g} s; Ctrl-C to exit", terminal.FAINT)])
            pause(WATCH_S)


def _show(lines: Sequence[str]) -> None:
    for line in lines:
        print_line(line)


def _print_jobs(session: Session, all_users: bool) -> None:
    print_json(
        [
            {
                **describe(view.job, view.spent_usd),
                "forecast": view.forecast and to_plain(view.forecast),
                "wait": view.wait and to_plain(view.wait),
                "user": view.user,
            }
            for view in session.call(list_jobs, of_all_users=all_users)
        ]
    )


def list_lines(session: Session, newest: int | None, all_users: bool) -> list[str]:
    """Return the table, and lines with the numbers of jobs that it omits."""
    found = session.call(list_queue, newest=newest, of_all_users=all_users)
    others = f"{format_count(found.other_count, 'job')} of other users; show them with `--all-users`"
    users = found.users if all_users else {}
    rows = list_rows(found.lines, found.spent_usd, session.clock.now_s(), users=users)
    if not rows:
        none = "No managed jobs; submit one with `broker jobs launch TASK.yaml`"
        return [none, others] if found.other_count else [none]
    table = format_table(
        ["ID", "NAME", *(["USER"] if users else []), "STATUS", "STEP", "RECOVERIES", "TIME", "USD"],
        rows, right=("ID", "STEP", "RECOVERIES", "TIME", "USD"),
    )  # fmt: skip
    hidden = found.count - len(found.lines)
    return [
        *table,
        *([f"... and {hidden} older; show them with `--all`"] if hidden else []),
        *([others] if found.other_count else []),
        *_list_waits(found.waits, session.clock.now_s()),
        *(f"Job {job_id}: {describe_forecast(each)}" for job_id, each in sorted(found.forecasts.items(), reverse=True)),
    ]


def _list_waits(waits: Mapping[int, JobWait], now_s: float) -> list[str]:
    """List what jobs are waiting for, next to start first. Jobs that depend on others have no line of their own."""
    shown = [
        (wait.position or 0, f"Job {job_id} waits {describe_wait(wait, now_s=now_s)}")
        for job_id, wait in sorted(waits.items())
        if wait.reason in (WaitReason.LIMIT, WaitReason.CAPACITY)
    ]
    lines = [line for _, line in sorted(shown)]
    more = [f"... and {len(lines) - WAITS_MAX} more jobs wait"] if len(lines) > WAITS_MAX else []
    return lines[:WAITS_MAX] + more


def list_rows(
    lines: Sequence[JobLine], spent: Mapping[int, float], now_s: float, *, users: Mapping[int, str] = NO_USERS
) -> list[list[str]]:
    """List rows, newest first; a pipeline takes the position of its newest job, with its jobs in order below.

    With `users`, the owner of each job follows its name.
    """
    pipelines: dict[str, list[JobLine]] = {}
    for line in lines:
        pipelines.setdefault(line.pipeline or str(line.id), []).append(line)
    rows = []
    for group in pipelines.values():
        owners = [users.get(line.id, "-") for line in group]
        indent = ""
        if group[0].pipeline:
            indent = "  "
            rows.append(_add_user(_list_pipeline_cells(group, spent, now_s), owners[0] if users else ""))
        cells = [_list_cells(line, indent, spent.get(line.id, 0.0), now_s) for line in group]
        rows += [_add_user(each, owner if users else "") for each, owner in zip(cells[::-1], owners[::-1], strict=True)]
    return rows


def _add_user(cells: list[str], user: str) -> list[str]:
    """Insert the owner after ID and name."""
    return [*cells[:2], user, *cells[2:]] if user else cells


def _list_cells(line: JobLine, indent: str, usd: float, now_s: float) -> list[str]:
    step = "-" if line.step is None else f"{line.step}" + (f"/{line.total}" if line.total else "")
    duration = format_duration((line.ended_s or now_s) - line.submitted_s)
    recoveries = str(max(0, line.starts - 1))
    return [str(line.id), indent + line.name, line.status.value, step, recoveries, duration, format_usd(usd)]


def _list_pipeline_cells(group: Sequence[JobLine], spent: Mapping[int, float], now_s: float) -> list[str]:
    done = sum(line.status is JobStatus.SUCCEEDED for line in group)
    ended_s = now_s if any(line.ended_s is None for line in group) else max(line.ended_s or 0.0 for line in group)
    return [
        "", group[0].pipeline, sum_up([line.status for line in group]).value, f"{done}/{len(group)} jobs",
        str(sum(max(0, line.starts - 1) for line in group)),
        format_duration(ended_s - min(line.submitted_s for line in group)),
        format_usd(sum(spent.get(line.id, 0.0) for line in group)),
    ]  # fmt: skip


def sum_up(statuses: Sequence[JobStatus]) -> JobStatus:
    """Summarize a pipeline: the most advanced live job, else the last failure, else the last job."""
    for status in (JobStatus.RUNNING, JobStatus.RECOVERING, JobStatus.STARTING, JobStatus.CANCELLING):
        if status in statuses:
            return status
    if JobStatus.PENDING in statuses:
        return JobStatus.PENDING
    ended_badly = [each for each in statuses if each not in (JobStatus.SUCCEEDED, JobStatus.CANCELLED)]
    others = [each for each in statuses if each is not JobStatus.SUCCEEDED]  # jobs after a failed one are cancelled
    return (ended_badly or others or list(statuses))[-1]
