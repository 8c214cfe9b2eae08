"""Show a managed job: its logs across recoveries, its events and its history. `jobs_queue` lists jobs."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from broker.app.clusters import LogChunk
from broker.app.job_sentences import list_expectations, list_reasons
from broker.app.session import Session
from broker.app.verbs.jobs import explain_job, find_members, follow_log, list_events, show_job
from broker.cli import options
from broker.cli.completion import complete_jobs, complete_jobs_and_groups
from broker.cli.context import make_session
from broker.cli.render import print_json, print_line, print_note, print_wrapped
from broker.errors import RunFailedError
from broker.formatting import format_duration, format_time_of_day, format_usd, strip_control, to_plain
from broker.types import Attempt, EventKind, Job, JobStatus
from broker.wording import describe_outcome

if TYPE_CHECKING:
    from broker.app.verbs.jobs import JobExplanation
    from broker.state.events import EventRow

JobName = Annotated[
    str, typer.Argument(metavar="JOB", help="Job ID or name.", show_default=False, autocompletion=complete_jobs)
]
JobOrGroup = Annotated[
    str,
    typer.Argument(
        metavar="JOB",
        help="Job ID or name, or name of a pipeline or job group.",
        show_default=False,
        autocompletion=complete_jobs_and_groups,
    ),
]


def describe(job: Job, spent_usd: float) -> dict[str, object]:
    """Return a job as JSON-ready data, without its task."""
    data: dict[str, object] = to_plain(job)
    del data["task"]
    attempts = [_describe_attempt(attempt) for attempt in job.attempts]
    return {**data, "attempts": attempts, "spent_usd": spent_usd}


def _describe_attempt(attempt: Attempt) -> dict[str, object]:
    """Describe an attempt: `outcome` is a sentence for people, `outcome_kind` is for scripts."""
    outcome = attempt.outcome
    return {
        **to_plain(attempt),
        "outcome": describe_outcome(outcome),
        "outcome_kind": outcome and outcome.kind.value,
        "outcome_step": outcome and outcome.step,
        "exit_code": outcome and outcome.exit_code,
        "returncode": attempt.returncode,
    }


def _describe_event(event: EventRow) -> dict[str, object]:
    return {**to_plain(event), "message": event.message}


def logs(
    job: JobOrGroup,
    follow: Annotated[bool, typer.Option("--follow/--no-follow", help="Keep printing until the job ends.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print each log line as a JSON object.")] = False,
    output: options.Output = options.Format.TABLE,
) -> None:
    """Print the output of a job across its recoveries."""
    session = make_session()
    as_json = as_json or output is options.Format.JSON
    if members := session.call(find_members, job=job):
        from broker.cli.jobs_group import follow_members

        follow_members(members, is_following=follow, as_json=as_json)
        return
    job_id = session.call(show_job, job=job).job.id
    if follow:
        follow_job(session, job_id, as_json=as_json)
    else:
        session.call(follow_log, job=str(job_id), on_chunk=_make_printer(job_id, as_json=as_json), is_following=False)


def events(job: JobOrGroup, as_json: options.AsJson = False, output: options.Output = options.Format.TABLE) -> None:
    """List the events of a job, pipeline or group."""
    session = make_session()
    if members := session.call(find_members, job=job):
        from broker.cli.jobs_group import gather_events

        pairs = gather_events(members)
        if as_json or output is options.Format.JSON:
            print_json([{**_describe_event(event), "task": task} for event, task in pairs])
            return
        for event, task in pairs:
            print_line(f"{format_time_of_day(event.time_s)}  ({task}) {strip_control(event.message)}")
        return
    found = session.call(list_events, job=job)
    if as_json or output is options.Format.JSON:
        print_json([_describe_event(each) for each in found])
        return
    for event in found:
        print_line(f"{format_time_of_day(event.time_s)}  {strip_control(event.message)}")


def why(job: JobOrGroup, as_json: options.AsJson = False, output: options.Output = options.Format.TABLE) -> None:
    """Explain the status of a job, pipeline or group.

    Shows the history, recoveries and cost of each job.
    """
    session = make_session()
    members = session.call(find_members, job=job)
    stories = [session.call(explain_job, job=name) for name in [str(each.id) for each in members] or [job]]
    if as_json or output is options.Format.JSON:
        data = [_describe_story(each) for each in stories]
        print_json(data if members else data[0])
        return
    for number, each in enumerate(stories):
        if number:
            print_line()
        _print_story(each, session.clock.now_s())


def _describe_story(story: JobExplanation) -> dict[str, object]:
    return {
        **describe(story.job, story.paid_usd),
        "events": [_describe_event(each) for each in story.events],
        "summary": to_plain(story.summary),
        "forecast": story.forecast and to_plain(story.forecast),
        "wait": story.wait and to_plain(story.wait),
        "deadline_chances": to_plain(story.chances),
        "nodes": to_plain(story.nodes),
        "starts": story.starts and to_plain(story.starts),
    }


def _print_story(story: JobExplanation, now_s: float) -> None:
    found, summary = story.job, story.summary
    for sentence in list_reasons(found, paid_usd=story.paid_usd, wait=story.wait, needs=story.needs, now_s=now_s):
        print_line(sentence)
    print_line(f"{format_time_of_day(found.submitted_s)}  submitted")
    for event in story.events:
        if event.kind is not EventKind.LAST_LINES:
            print_line(f"{format_time_of_day(event.time_s)}  {strip_control(event.message)}")
    if printed := [event.message for event in story.events if event.kind is EventKind.LAST_LINES]:
        print_line(strip_control(printed[-1]).replace("\n", "\n  "))
    total = f" of {summary.steps_total}" if summary.steps_total else ""
    took = f", taking {format_duration(summary.recovery_s)}" if summary.recoveries else ""
    print_line(f"Steps: {summary.steps}{total}, {summary.steps_lost} lost. Recoveries: {summary.recoveries}{took}.")
    ondemand = format_usd(summary.ondemand_usd)
    print_line(f"Paid {format_usd(summary.paid_usd)} USD; on-demand would have cost {ondemand} USD.")
    for sentence in list_expectations(found, forecast=story.forecast, starts=story.starts):
        print_wrapped(sentence, indent=2)


def follow_job(session: Session, job_id: int, *, as_json: bool = False) -> None:
    """Print the log as it grows, until the job ends. Raises RunFailedError for a failed job."""
    try:
        session.call(follow_log, job=str(job_id), on_chunk=_make_printer(job_id, as_json=as_json))
    except KeyboardInterrupt:
        print_note(f"\ndetached; the job continues; reattach with `broker jobs logs {job_id}`")
        raise typer.Exit(130) from None
    job = session.call(show_job, job=str(job_id)).job
    print_note(f"Job {job_id} ended with status {job.status.value}{': ' + job.failure if job.failure else ''}")
    if job.status is not JobStatus.SUCCEEDED:
        raise RunFailedError(f"job {job_id} ended with status {job.status.value}", returncode=1)


def _make_printer(job_id: int, *, as_json: bool) -> Callable[[LogChunk], None]:
    def show(chunk: LogChunk) -> None:
        for line in chunk.lines:
            print_line(json.dumps({"job": job_id, "line": line}) if as_json else line)

    return show
