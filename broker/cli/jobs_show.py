"""Show a managed job: its logs across recoveries, its events and its history. `jobs_queue` lists jobs."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from broker.app.container import Context
from broker.cli import options
from broker.cli.completion import complete_jobs
from broker.cli.context import make_context
from broker.cli.render import note_damage, print_json, print_line, print_note
from broker.errors import RunFailedError, UsageError
from broker.formatting import format_duration, format_usd, strip_control, to_plain
from broker.types import Attempt, EventKind, Job, JobStatus
from broker.wording import describe_outcome

if TYPE_CHECKING:
    from broker.state.events import EventRow

LOOK_S = 0.3
JobName = Annotated[str, typer.Argument(help="Job ID or name.", show_default=False, autocompletion=complete_jobs)]

# What each status means, for `why`.
MEANING = {
    JobStatus.PENDING: "waits: for the jobs it needs, or for a place that has room",
    JobStatus.STARTING: "is getting its machines",
    JobStatus.RUNNING: "runs",
    JobStatus.RECOVERING: "is being restarted: on its machines where they are well, else on new ones",
    JobStatus.CANCELLING: "was cancelled; its machines are being taken down",
    JobStatus.SUCCEEDED: "ran to its end",
    JobStatus.CANCELLED: "was cancelled",
    JobStatus.FAILED: "failed by itself: its program, or its budget",
    JobStatus.FAILED_SETUP: "failed in `setup`, before `run`",
    JobStatus.FAILED_PRECHECKS: "could not be started at all",
    JobStatus.FAILED_NO_RESOURCE: "found nothing for sale that fits",
    JobStatus.FAILED_CONTROLLER: "was given up because of a fault in broker",
}


def describe(job: Job, spent_usd: float) -> dict[str, object]:
    data: dict[str, object] = to_plain(job)
    del data["task"]
    attempts = [_describe_attempt(each) for each in job.attempts]
    return {**data, "attempts": attempts, "spent_usd": spent_usd}


def _describe_attempt(attempt: Attempt) -> dict[str, object]:
    """`outcome` is a sentence; `outcome_kind` is what scripts compare."""
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
    job: JobName,
    follow: Annotated[bool, typer.Option("--follow/--no-follow", help="Keep printing until the job ends.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print each log line as a JSON object.")] = False,
    output: options.Output = options.Format.TABLE,
) -> None:
    """Print the output of a job across its recoveries."""
    context = make_context()
    found = find_job(context, job)
    as_json = as_json or output is options.Format.JSON
    if follow:
        follow_job(context, found.id, as_json=as_json)
    else:
        context.keep_jobs_going()
        _print_log(context, found.id, 0, as_json=as_json)


def events(job: JobName, as_json: options.AsJson = False, output: options.Output = options.Format.TABLE) -> None:
    """List the events of a job."""
    context = make_context()
    context.keep_jobs_going()
    found = context.store.events.list(job_id=find_job(context, job).id)
    if as_json or output is options.Format.JSON:
        print_json([_describe_event(each) for each in found])
        return
    for event in found:
        print_line(f"{_show_time(event.time_s)}  {strip_control(event.message)}")


def why(job: JobName, as_json: options.AsJson = False, output: options.Output = options.Format.TABLE) -> None:
    """Explain the status of a job: its history, recoveries and cost."""
    from broker.jobs.summary import summarize

    context = make_context()
    context.keep_jobs_going()
    found, now_s = find_job(context, job), context.clock.now_s()
    paid = context.store.bills.spend_usd(job_id=found.id, now_s=now_s)
    summary = summarize(found, found.attempts, context.store.jobs.list_steps(found.id), paid_usd=paid, now_s=now_s)
    story = context.store.events.list(job_id=found.id)
    if as_json or output is options.Format.JSON:
        print_json(
            {**describe(found, paid), "events": [_describe_event(each) for each in story], "summary": to_plain(summary)}
        )
        return
    reason = f": {found.failure}" if found.failure else ""
    print_line(f"Job {found.id} ({found.name}) {MEANING[found.status]}{reason}.")
    if not found.status.is_terminal and (sentence := _describe_allowance(found, paid, now_s)):
        print_line(f"It {sentence}.")
    if found.resumes:
        print_line(f"It goes on with the checkpoints of job {found.resumes}.")
    for other in (context.store.jobs.get(each) for each in found.needs):
        if other:
            print_line(f"It needs job {other.id} ({other.name}), which is {other.status.value}.")
    print_line(f"{_show_time(found.submitted_s)}  submitted")
    for event in story:
        if event.kind is not EventKind.LAST_LINES:
            print_line(f"{_show_time(event.time_s)}  {strip_control(event.message)}")
    if printed := [event.message for event in story if event.kind is EventKind.LAST_LINES]:
        print_line(strip_control(printed[-1]).replace("\n", "\n  "))
    total = f" of {summary.steps_total}" if summary.steps_total else ""
    print_line(
        f"Steps {summary.steps}{total}, {summary.steps_lost} lost in {summary.recoveries} recoveries that took "
        f"{format_duration(summary.recovery_s)}."
    )
    print_line(f"Paid {format_usd(summary.paid_usd)} USD; on-demand {format_usd(summary.ondemand_usd)} USD.")


def _describe_allowance(job: Job, paid_usd: float, now_s: float) -> str:
    """What happens to its machines while this one is away; empty where they are processes of this machine."""
    from broker.jobs.allowance import describe_allowance, measure_allowance_s
    from broker.jobs.checkpoints import HERE

    placement = job.attempts[-1].placement if job.attempts else None
    if placement is None or placement.offer.cloud == HERE:
        return ""
    allowed_s = measure_allowance_s(
        job.task, usd_hour=placement.usd_hour, spent_usd=paid_usd, submitted_s=job.submitted_s, now_s=now_s
    )
    return describe_allowance(allowed_s)


def find_job(context: Context, text: str) -> Job:
    """Find a job by ID, or the newest of a name. Raises UsageError."""
    job = context.store.jobs.get(int(text)) if text.isdigit() else None
    named = [] if job else [each for each in context.store.jobs.list(on_damage=note_damage) if each.name == text]
    if job is None and not named:
        raise UsageError(f"unknown managed job `{text}`", hints=["list jobs with `broker jobs queue`"])
    return job or named[-1]


def follow_job(context: Context, job_id: int, *, as_json: bool = False) -> None:
    """Print the log as it grows, until the job ends. Raises RunFailedError for a failed job."""
    offset = 0
    try:
        while True:
            job = context.store.jobs.get(job_id)
            assert job is not None
            if not job.status.is_terminal:
                context.ensure_daemon()  # restart it if it died
            offset = _print_log(context, job_id, offset, as_json=as_json)
            if job.status.is_terminal:
                offset = _print_log(context, job_id, offset, as_json=as_json)
                break
            asyncio.run(context.clock.sleep(LOOK_S))
    except KeyboardInterrupt:
        print_note(f"\ndetached; the job continues; reattach with `broker jobs logs {job_id}`")
        raise typer.Exit(130) from None
    print_note(f"Job {job_id} ended with status {job.status.value}{': ' + job.failure if job.failure else ''}")
    if job.status is not JobStatus.SUCCEEDED:
        raise RunFailedError(f"job {job_id} ended with status {job.status.value}", returncode=1)


def _print_log(context: Context, job_id: int, offset: int, *, as_json: bool = False) -> int:
    path = context.config.logs / "jobs" / f"{job_id}.log"
    if not path.exists():
        return offset
    with path.open("rb") as file:
        file.seek(offset)
        chunk = file.read()
    complete = chunk[: chunk.rfind(b"\n") + 1]
    for line in complete.decode(errors="replace").splitlines():
        print_line(json.dumps({"job": job_id, "line": strip_control(line)}) if as_json else strip_control(line))
    sys.stdout.flush()
    return offset + len(complete)


def _show_time(time_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(time_s))
