"""`broker jobs`: managed jobs, driven by the daemon of the state folder."""

from __future__ import annotations

import sys
import time
from typing import Annotated

import typer

from broker.cli import options
from broker.cli.context import Context
from broker.cli.plan import show_plan
from broker.cli.render import clean, plain, print_json, print_line, print_note, print_table, show_duration, show_usd
from broker.errors import RunFailedError, UsageError
from broker.types import Job, JobStatus

app = typer.Typer(
    help="Managed jobs: they survive preemption and your terminal",
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
    yes: options.Yes = False,
    detach: options.Detach = False,
    dryrun: options.Dryrun = False,
) -> None:
    """Promise a task: it runs until it succeeds or fails by itself."""
    from broker.cli.clusters import confirm_price, plan_launch

    context = Context()
    overrides = options.Overrides(
        name=name, workdir=workdir, infra=infra, gpus=gpus, cpus=cpus, memory=memory, instance_type=instance_type,
        num_nodes=num_nodes, use_spot=use_spot, env=env or (), env_file=env_file, secret=secret or (),
    )  # fmt: skip
    one = options.read_task(entrypoint, overrides)
    plan = plan_launch(context, one, is_dryrun=dryrun)
    show_plan(plan)
    if dryrun:
        return
    confirm_price(plan, yes=yes)
    job = context.store.add_job(one.name or "job", one)
    context.ensure_daemon()
    print_line(f"Managed job {job.id} ({job.name}) is submitted")
    print_note(f"`broker jobs logs {job.id}` follows it, `broker jobs cancel {job.id}` ends it")
    if not detach:
        _follow(context, job.id)


@app.command()
def queue(as_json: Annotated[bool, typer.Option("--json", help="As data.")] = False) -> None:
    """List managed jobs."""
    context = Context()
    jobs = context.store.list_jobs()
    if any(not job.status.is_terminal for job in jobs):
        context.ensure_daemon()
    now_s = context.clock.now_s()
    spent = {job.id: context.store.spend_usd(job_id=job.id, now_s=now_s) for job in jobs}
    if as_json:
        print_json([_describe(job, spent[job.id]) for job in jobs])
        return
    rows = []
    for job in reversed(jobs):
        step = "-"
        if job.progress:
            step = f"{job.progress.step}" + (f"/{job.progress.total}" if job.progress.total else "")
        recoveries = max(0, sum(1 for each in job.attempts if each.running_s is not None) - 1)
        duration = show_duration((job.ended_s or now_s) - job.submitted_s)
        rows.append([str(job.id), job.name, job.status.value, step, str(recoveries), duration, show_usd(spent[job.id])])
    if not rows:
        print_line("No managed jobs; `broker jobs launch TASK.yaml` submits one")
        return
    print_table(
        ["ID", "NAME", "STATUS", "STEP", "RECOVERIES", "TIME", "USD"],
        rows, right=("ID", "STEP", "RECOVERIES", "TIME", "USD"),
    )  # fmt: skip


def _describe(job: Job, spent_usd: float) -> dict[str, object]:
    data: dict[str, object] = plain(job)
    del data["task"]
    return {**data, "spent_usd": spent_usd}


@app.command()
def logs(
    job: Annotated[str, typer.Argument(help="Job id or name.")],
    follow: Annotated[bool, typer.Option("--follow/--no-follow", help="Go on until the job ends.")] = True,
) -> None:
    """Show what a job prints, across its recoveries."""
    context = Context()
    found = find_job(context, job)
    if follow:
        _follow(context, found.id)
    else:
        _print_log(context, found.id, 0)


@app.command()
def cancel(
    jobs: Annotated[list[str] | None, typer.Argument(help="Job ids or names.")] = None,
    everything: Annotated[bool, typer.Option("--all", "-a", help="Every live job.")] = False,
) -> None:
    """End jobs and their machines."""
    context = Context()
    if everything:
        wanted = [job for job in context.store.list_jobs() if not job.status.is_terminal]
    else:
        wanted = [find_job(context, each) for each in jobs or []]
        if not wanted:
            raise UsageError("no job was named", hints=["`broker jobs cancel ID`, or `--all`"])
    for job in wanted:
        if context.store.request_cancel(job.id):
            print_line(f"Job {job.id} ({job.name}) is being cancelled")
        else:
            print_line(f"Job {job.id} ({job.name}) has ended already: {job.status.value}")
    if wanted:
        context.ensure_daemon()


@app.command()
def events(
    job: Annotated[str, typer.Argument(help="Job id or name.")],
    as_json: Annotated[bool, typer.Option("--json", help="As data.")] = False,
) -> None:
    """Tell the story of a job."""
    context = Context()
    found = context.store.list_events(job_id=find_job(context, job).id)
    if as_json:
        print_json(plain(list(found)))
        return
    for event in found:
        stamp = time.strftime("%H:%M:%S", time.localtime(event.time_s))
        print_line(f"{stamp}  {clean(event.message)}")


def find_job(context: Context, text: str) -> Job:
    """By id, or by name: then the newest."""
    jobs = context.store.list_jobs()
    found = [job for job in jobs if str(job.id) == text or job.name == text]
    if not found:
        raise UsageError(f"there is no managed job `{text}`", hints=["`broker jobs queue` lists them"])
    return found[-1]


def _follow(context: Context, job_id: int) -> None:
    """Print the log as it grows, until the job ends; its failure is this command's."""
    import asyncio

    offset = 0
    try:
        while True:
            job = context.store.get_job(job_id)
            assert job is not None
            if not job.status.is_terminal:
                context.ensure_daemon()  # whoever killed it, the one who waits brings it back
            offset = _print_log(context, job_id, offset)
            if job.status.is_terminal:
                offset = _print_log(context, job_id, offset)
                break
            asyncio.run(context.clock.sleep(LOOK_S))
    except KeyboardInterrupt:
        print_note(f"\ndetached; the job goes on. `broker jobs logs {job_id}` comes back")
        return
    print_note(f"Job {job_id} ended {job.status.value}{': ' + job.failure if job.failure else ''}")
    if job.status is not JobStatus.SUCCEEDED:
        raise RunFailedError(f"job {job_id} ended {job.status.value}", returncode=1)


def _print_log(context: Context, job_id: int, offset: int) -> int:
    path = context.config.logs / "jobs" / f"{job_id}.log"
    if not path.exists():
        return offset
    with path.open("rb") as file:
        file.seek(offset)
        chunk = file.read()
    complete = chunk[: chunk.rfind(b"\n") + 1]
    for line in complete.decode(errors="replace").splitlines():
        print_line(clean(line))
    sys.stdout.flush()
    return offset + len(complete)
