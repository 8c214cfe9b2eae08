"""`broker jobs`: submit, cancel and retry managed jobs. `jobs_queue` and `jobs_show` display them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from broker.app.container import Context
from broker.cli import jobs_queue, jobs_show, options
from broker.cli.completion import complete_jobs
from broker.cli.context import make_context
from broker.cli.jobs_show import JobName, find_job, follow_job
from broker.cli.plan import show_plan
from broker.cli.render import note_damage, print_json, print_line, print_note
from broker.errors import BrokerError, UsageError
from broker.formatting import format_count
from broker.types import JobStatus

if TYPE_CHECKING:
    from broker.types import Job, Plan, Task

app = typer.Typer(
    help="Run managed jobs, which recover from preemptions.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
LOOK_S = 0.3


@app.command()
def launch(
    entrypoint: options.Entrypoint,
    name: options.Name = None,
    workdir: options.Workdir = None,
    infra: options.Infra = None,
    gpus: options.Gpus = None,
    cpus: options.Cpus = None,
    memory: options.Memory = None,
    instance_type: options.InstanceType = None,
    num_nodes: options.NumNodes = None,
    use_spot: options.UseSpot = None,
    env: options.Env = None,
    env_file: options.EnvFile = None,
    secret: options.Secret = None,
    hedge: options.Hedge = 2,
    request_id: options.RequestId = None,
    yes: options.Yes = False,
    detach: options.Detach = False,
    dryrun: options.Dryrun = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the jobs as JSON without following them.")] = False,
    output: options.Output = options.Format.TABLE,
) -> None:
    """Submit a task as a managed job.

    The job recovers from preemptions until it succeeds, fails or is cancelled.
    """
    from broker.cli.copies import note_copies
    from broker.cli.launch import confirm_price, plan_launch
    from broker.cli.uploads import fill_buckets
    from broker.config import find_checkpoint_url
    from broker.jobs.allowance import describe_allowances, get_unattended_s, read_unattended_s, settle_unattended
    from broker.jobs.checkpoints import check_checkpoints, settle_tasks
    from broker.jobs.submission import submit_tasks
    from broker.task.allowed import JOB_NAME, REQUEST_ID
    from broker.task.checking import check_flag

    check_flag("--name", name, JOB_NAME)
    check_flag("--request-id", request_id, REQUEST_ID)
    context = make_context()
    as_json = as_json or output is options.Format.JSON
    overrides = options.Overrides(
        workdir=workdir, infra=infra, gpus=gpus, cpus=cpus, memory=memory, instance_type=instance_type,
        num_nodes=num_nodes, use_spot=use_spot, env=env or (), env_file=env_file, secret=secret or (),
    )  # fmt: skip
    tasks = tuple(context.resolve(each) for each in options.read_tasks(entrypoint, overrides))
    options.check_notices(tasks, is_launch=not dryrun)
    _check_runnable(tasks)
    tasks = settle_tasks(tasks, find_checkpoint_url(context.config))
    tasks = settle_unattended(tasks, read_unattended_s(context.config))
    plans: list[Plan] = [plan_launch(context, each, is_dryrun=dryrun) for each in tasks]
    options.check_plans(plans, is_launch=not dryrun)
    for plan in plans if not as_json else []:
        show_plan(plan)
    if dryrun:
        return
    for sentence in check_checkpoints(plans):
        print_note(sentence)
    for sentence in describe_allowances(plans):
        print_note(sentence)
    for sentence in context.grants.check(plans, allowances_s=[get_unattended_s(plan.task) for plan in plans]):
        print_note(sentence)
    note_copies(context, plans)
    confirm_price(plans, yes=yes)
    tasks = fill_buckets(tasks)
    jobs = submit_tasks(context.store, tasks, name=name, request_id=request_id, hedge=hedge)
    # Printed before the daemon starts: the jobs are recorded, and repeating the launch would submit them twice.
    if as_json:
        print_json([jobs_show.describe(each, 0.0) for each in jobs])
    else:
        _tell_submitted(jobs)
    context.ensure_daemon()
    if not detach and not as_json:
        for job in jobs:
            follow_job(context, job.id)


def _tell_submitted(jobs: Sequence[Job]) -> None:
    for job in jobs:
        after = f", to run after {' and '.join(map(str, job.needs))}" if job.needs else ""
        print_line(f"Submitted managed job {job.id} ({job.name}){after}")
    last = jobs[-1]
    print_note(
        f"follow it with `broker jobs logs {last.id}`, cancel it with `broker jobs cancel {last.pipeline or last.id}`"
    )


def _check_runnable(tasks: tuple[Task, ...]) -> None:
    if idle := next((task for task in tasks if task.run is None), None):
        raise UsageError(
            f"task {idle.name or '(no name)'} has no `run:`; a managed job requires one, as it ends with its program",
            hints=["add `run:` to the task", "or start a cluster without a program: `broker launch TASK.yaml`"],
        )


@app.command()
def cancel(
    jobs: Annotated[
        list[str] | None, typer.Argument(help="Job IDs, or names of jobs or pipelines.", autocompletion=complete_jobs)
    ] = None,
    everything: Annotated[bool, typer.Option("--all", "-a", help="Cancel all live jobs.")] = False,
    as_json: options.AsJson = False,
    output: options.Output = options.Format.TABLE,
) -> None:
    """Cancel jobs and terminate their clusters."""
    context = make_context()
    known = context.store.jobs.list(on_damage=note_damage)
    wanted: list[Job] = [job for job in known if not job.status.is_terminal] if everything else []
    if not jobs and not everything:
        raise UsageError("no job was named", hints=["name one: `broker jobs cancel ID`, or pass `--all`"])
    missing = []
    for text in [] if everything else jobs or []:
        try:
            wanted += [job for job in known if job.pipeline == text] or [find_job(context, text)]
        except UsageError as error:
            missing.append(error)
    if missing and not wanted:
        raise missing[0]
    as_json = as_json or output is options.Format.JSON
    told = []
    for job in wanted:
        is_live = context.store.jobs.request_cancel(job.id)
        if as_json:
            told.append({"id": job.id, "name": job.name, "status": job.status.value, "is_cancelling": is_live})
        elif is_live:
            print_line(f"Cancelling job {job.id} ({job.name})")
        else:
            print_line(f"Job {job.id} ({job.name}) has already ended with status {job.status.value}")
    if wanted:
        context.ensure_daemon()
    if as_json:
        print_json(told)
    if missing:
        raise BrokerError(
            f"could not find {format_count(len(missing), 'job')}", details=[each.message for each in missing],
            hints=missing[0].hints,
        )  # fmt: skip


@app.command()
def retry(
    job: JobName,
    secret: options.Secret = None,
    request_id: options.RequestId = None,
    detach: options.Detach = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the new job as JSON without following it.")] = False,
    output: options.Output = options.Format.TABLE,
) -> None:
    """Resubmit an ended job, which resumes from its checkpoints."""
    from broker.jobs.submission import retry_job
    from broker.task.allowed import REQUEST_ID
    from broker.task.checking import check_flag
    from broker.types import Secret

    check_flag("--request-id", request_id, REQUEST_ID)
    context = make_context()
    secrets = {name: Secret(value=value) for name, value in options.read_pairs(secret or (), "--secret").items()}
    again = retry_job(
        context.store, find_job(context, job), secrets=secrets, request_id=request_id,
        check=lambda task: _check_access(context, task),
    )  # fmt: skip
    context.ensure_daemon()
    if as_json or output is options.Format.JSON:
        print_json(jobs_show.describe(again, 0.0))
        return
    print_line(f"Submitted managed job {again.id} ({again.name}), which resumes from the checkpoints of job {job}")
    if not detach:
        follow_job(context, again.id)


def _check_access(context: Context, task: Task) -> None:
    """Check, as before a launch, that nodes can access the task's buckets. Raises before anything is paid."""
    from broker.cli.launch import plan_launch
    from broker.jobs.allowance import get_unattended_s
    from broker.jobs.order import drop_limits

    plan = plan_launch(context, drop_limits(task), is_dryrun=False)  # a job that is late may be retried
    for sentence in context.grants.check([plan], allowances_s=[get_unattended_s(task)]):
        print_note(sentence)


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

    Exit code 1 when the job ends in another status, or at the timeout.
    """
    context = make_context()
    try:
        wanted = JobStatus(state.upper())
    except ValueError:
        known = ", ".join(each.value for each in JobStatus)
        raise UsageError(f"unknown job status `{state}`", hints=[f"known statuses: {known}"]) from None
    job_id = find_job(context, job).id
    start_s = context.clock.now_s()
    while True:
        found = context.store.jobs.get(job_id)
        assert found is not None
        if found.status is wanted or found.status.is_terminal:
            if as_json or output is options.Format.JSON:
                spent_usd = context.store.bills.spend_usd(job_id=job_id, now_s=context.clock.now_s())
                print_json(jobs_show.describe(found, spent_usd))
            elif found.status is wanted:
                print_line(f"Job {job_id} ({found.name}) is {wanted.value}")
        if found.status is wanted:
            return
        if found.status.is_terminal:
            reason = f": {found.failure}" if found.failure else ""
            raise BrokerError(f"job {job_id} ended with status {found.status.value}{reason}")
        if timeout and context.clock.now_s() - start_s >= timeout:
            raise BrokerError(
                f"timed out after {timeout:g} s: job {job_id} is {found.status.value}, not {wanted.value}"
            )
        context.ensure_daemon()
        asyncio.run(context.clock.sleep(LOOK_S))


app.command()(jobs_queue.queue)
app.command()(jobs_show.logs)
app.command()(jobs_show.events)
app.command()(jobs_show.why)
