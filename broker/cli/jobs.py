"""`broker jobs`: submit, cancel and retry managed jobs. `jobs_queue` and `jobs_show` display them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from broker.app.jobs import check_names, explain_ended, read_status
from broker.app.verbs.jobs import cancel_jobs, find_members, retry_group, retry_job, show_job, wait_for_job
from broker.cli import (
    jobs_forward,
    jobs_import,
    jobs_queue,
    jobs_schedules,
    jobs_show,
    jobs_trace,
    jobs_watch,
    options,
)
from broker.cli.completion import complete_jobs_and_groups
from broker.cli.context import make_session
from broker.cli.jobs_show import JobName, follow_job
from broker.cli.plan_table import describe_plan, has_spot_work, show_plan
from broker.cli.render import print_json, print_line, print_note
from broker.errors import BrokerError, UsageError
from broker.formatting import format_count, format_usd
from broker.types import JobStatus
from broker.types import Secret as SecretValue

if TYPE_CHECKING:
    from broker.app.session import Session
    from broker.types import Job, Plan

app = typer.Typer(
    help="Run managed jobs, which recover from preemptions.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@app.command()
@options.task_options("workdir", *options.RESOURCES, *options.ENVIRONMENT, "max_duration")
def launch(
    entrypoint: options.Entrypoint,
    name: options.Name = None,
    overrides: options.Overrides = options.NO_OVERRIDES,
    hedge: options.Hedge = 2,
    request_id: options.RequestId = None,
    yes: options.Yes = False,
    detach: options.Detach = False,
    dryrun: options.Dryrun = False,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print the jobs (with --dryrun: the plans) as JSON."),
    ] = False,
    output: options.Output = options.Format.TABLE,
) -> None:
    """Submit a task as a managed job.

    The job recovers from preemptions until it succeeds, fails or is cancelled.
    A task with `schedule:` is stored instead, and starts a job at each due time.
    """
    from broker.app.verbs.launching import launch_jobs
    from broker.cli.launch import confirm_price, show_upload

    check_names(name, request_id)
    session = make_session()
    as_json = as_json or output is options.Format.JSON

    show, show_submitted = _make_callbacks(dryrun=dryrun, as_json=as_json)
    tasks = tuple(options.read_tasks(entrypoint, overrides))
    if len(tasks) == 1 and tasks[0].schedule is not None:
        jobs_schedules.store_schedule(
            session, tasks[0], name=name, request_id=request_id, hedge=hedge, is_dryrun=dryrun, show=show,
            confirm=lambda plans: confirm_price(plans, yes=yes), as_json=as_json,
        )  # fmt: skip
        return
    jobs = session.call(
        launch_jobs, tasks=tasks, name=name, request_id=request_id,
        hedge=hedge, is_dryrun=dryrun, show=show, confirm=lambda plans: confirm_price(plans, yes=yes),
        on_submitted=show_submitted, track_upload=show_upload,
    )  # fmt: skip
    if not detach and not as_json:
        if jobs and jobs[0].task.group is not None:
            from broker.cli.jobs_group import follow_members

            follow_members(jobs)
            return
        for job in jobs:
            follow_job(session, job.id)


def _make_callbacks(
    *, dryrun: bool, as_json: bool
) -> tuple[Callable[[Sequence[Plan]], None], Callable[[Sequence[Job]], None]]:
    """Return what prints the plans of a launch, and what prints its jobs."""

    def show(plans: Sequence[Plan]) -> None:
        from broker.cli.forecast import list_forecast_lines

        if as_json:
            if dryrun:
                print_json([describe_plan(plan, 10) for plan in plans])
            return
        for plan in plans:
            show_plan(plan, forecast=list_forecast_lines(plan) if has_spot_work(plan) else ())

    def show_submitted(jobs: Sequence[Job]) -> None:
        if as_json:
            print_json([jobs_show.describe(each, 0.0) for each in jobs])
        else:
            _print_submitted(jobs)

    return show, show_submitted


def _print_submitted(jobs: Sequence[Job]) -> None:
    for job in jobs:
        after = f", to run after {' and '.join(map(str, job.needs))}" if job.needs else ""
        after = f", with group {job.pipeline}" if job.task.group is not None else after
        print_line(f"Submitted managed job {job.id} ({job.name}){after}")
    last = jobs[-1]
    followed = last.pipeline if last.task.group is not None else last.id
    print_note(
        f"follow it with `broker jobs logs {followed}`, cancel it with `broker jobs cancel {last.pipeline or last.id}`"
    )


@app.command()
def cancel(
    jobs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="JOB...",
            help="Job IDs, or names of jobs, pipelines or job groups.",
            autocompletion=complete_jobs_and_groups,
        ),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", "-a", help="Cancel all live jobs.")] = False,
    yes: options.Yes = False,
    as_json: options.AsJson = False,
    output: options.Output = options.Format.TABLE,
) -> None:
    """Cancel jobs and terminate their clusters."""
    if not jobs and not everything:
        raise UsageError("no job was named", hints=["name one with `broker jobs cancel ID`, or pass `--all`"])
    options.confirm("Cancel all live jobs?" if everything else f"Cancel {', '.join(jobs or ())}?", yes=yes)
    found = make_session().call(cancel_jobs, names=tuple(jobs or ()), is_all=everything)
    as_json = as_json or output is options.Format.JSON
    for job in found.jobs if not as_json else ():
        if job.is_live:
            print_line(f"Cancelling job {job.job_id} ({job.name})")
        else:
            print_line(f"Job {job.job_id} ({job.name}) has already ended with status {job.status.value}")
    if everything and not found.jobs and not as_json:
        print_line("no live jobs to cancel")
    if as_json:
        print_json(
            [
                {"id": job.job_id, "name": job.name, "status": job.status.value, "is_cancelling": job.is_live}
                for job in found.jobs
            ]
        )
    if found.missing:
        raise BrokerError(
            f"could not find {format_count(len(found.missing), 'job')}",
            details=[each.message for each in found.missing], hints=found.missing[0].hints,
        )  # fmt: skip


@app.command()
def retry(
    job: Annotated[
        str,
        typer.Argument(
            metavar="JOB",
            help="Job ID or name, or name of a job group.",
            show_default=False,
            autocompletion=complete_jobs_and_groups,
        ),
    ],
    secret: options.Secret = None,
    request_id: options.RequestId = None,
    yes: options.Yes = False,
    detach: options.Detach = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the new job (of a group: all jobs) as JSON without following it.")
    ] = False,
    output: options.Output = options.Format.TABLE,
) -> None:
    """Resubmit an ended job or job group from its checkpoints."""
    session = make_session()
    secrets = {name: SecretValue(value=value) for name, value in options.read_pairs(secret or (), "--secret").items()}
    members = session.call(find_members, job=job)
    _confirm_retry(session, members or [session.call(show_job, job=job).job], yes=yes)
    if members:
        members = session.call(retry_group, job=job, secrets=secrets, request_id=request_id)
        if as_json or output is options.Format.JSON:
            print_json([jobs_show.describe(each, 0.0) for each in members])
        else:
            _print_retried(members, is_followed=not detach)
        return
    again = session.call(retry_job, job=job, secrets=secrets, request_id=request_id)
    if as_json or output is options.Format.JSON:
        print_json(jobs_show.describe(again, 0.0))
        return
    print_line(f"Submitted managed job {again.id} ({again.name}), which resumes from the checkpoints of job {job}")
    if not detach:
        follow_job(session, again.id)


def _confirm_retry(session: Session, ended: Sequence[Job], *, yes: bool) -> None:
    """Ask for confirmation of the price per hour, as a launch does, unless `yes`.

    Jobs that cannot be retried are left to the verb, which refuses them.
    """
    if yes or not all(each.status.is_terminal and each.status is not JobStatus.SUCCEEDED for each in ended):
        return
    from broker.app.verbs.account import plan_tasks
    from broker.jobs.replanning import drop_limits
    from broker.pipelines.concurrency import find_usd_hour_max

    tasks = tuple(drop_limits(each.task) for each in ended)  # a job may be retried after its deadline
    plans = session.call(plan_tasks, tasks=tasks, is_dryrun=False)
    if any(plan.choice.placement.offer.cloud != "local" for plan in plans):
        up_to = "up to " if len(plans) > 1 else ""
        options.ask(f"Start again at {up_to}{format_usd(find_usd_hour_max(plans))} USD/h?")


def _print_retried(members: Sequence[Job], *, is_followed: bool) -> None:
    from broker.cli.jobs_group import follow_members

    _print_submitted(members)
    print_note("each task resumes from its checkpoints")
    if is_followed:
        follow_members(members)


@app.command()
def wait(
    job: JobName,
    state: Annotated[
        str, typer.Option("--for", metavar="STATUS", help="Status to wait for, e.g. RUNNING.")
    ] = "SUCCEEDED",
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", min=0, help="Seconds to wait (0 = no limit).")
    ] = 0,
    as_json: options.AsJson = False,
    output: options.Output = options.Format.TABLE,
) -> None:
    """Wait until a job reaches a status.

    The exit code is 1 if the job ends in another status, or on timeout.
    """
    session, wanted = make_session(), read_status(state)
    job_id = session.call(show_job, job=job).job.id  # a name may have a newer job by the end
    view = session.call(wait_for_job, job=str(job_id), status=wanted, timeout_s=timeout)
    found = view.job
    if as_json or output is options.Format.JSON:
        print_json(jobs_show.describe(found, view.spent_usd))
    elif found.status is wanted:
        print_line(f"Job {job_id} ({found.name}) is {wanted.value}")
    if found.status is not wanted:
        raise explain_ended(found)


app.command()(jobs_queue.queue)
app.command()(jobs_show.logs)
app.command()(jobs_show.events)
app.command()(jobs_show.why)
app.command()(jobs_watch.watch)
app.command()(jobs_trace.trace)
app.command()(jobs_forward.forward)
app.command("import")(jobs_import.import_script)
app.add_typer(jobs_schedules.app, name="schedules")
