"""`broker rehearse`: the whole life of a spot job on this machine, with a preemption, in a state folder of its own."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from broker.cli import options
from broker.cli.context import Context
from broker.cli.plan import show_plan
from broker.cli.render import clean, print_line, print_note, show_duration, show_usd
from broker.clouds.base import CanPreempt
from broker.errors import BrokerError
from broker.jobs.daemon import run_daemon
from broker.jobs.summary import RunSummary, summarize
from broker.types import Job, JobStatus, Task

LOOK_S = 0.25
LINE_EVERY_S = 2.0


def rehearse(
    entrypoint: options.Entrypoint,
    preemptions: Annotated[int, typer.Option("--preemptions", min=0, help="How often all nodes are taken away.")] = 1,
    notice: Annotated[float, typer.Option("--notice", min=0, help="Seconds of warning before.")] = 0,
    num_nodes: options.NumNodes = None,
    env: options.Env = None,
    env_file: options.EnvFile = None,
    secret: options.Secret = None,
) -> None:
    """Run a task here as a spot job, with a preemption, and see it recover."""
    from broker.task.override import override_resources

    overrides = options.Overrides(num_nodes=num_nodes, env=env or (), env_file=env_file, secret=secret or ())
    (first, *others) = options.read_tasks(entrypoint, overrides)
    if others:
        print_note(f"note: only the first of {len(others) + 1} tasks is rehearsed")
    home = Path(tempfile.mkdtemp(prefix="broker-rehearsal-"))
    try:
        context = Context(home)
        # What the cloud machine would be is not what this machine has: only the shape of the gang is rehearsed.
        local = override_resources(first, infra="local", use_spot=True)
        options.check_notices([local], is_launch=True)
        local = override_resources(local, cpus="1+") if any(each.accelerator for each in first.resources) else local
        show_plan(context.plan(local), top=6)
        job = asyncio.run(_Rehearsal(context, local, preemptions, notice).run())
        recoveries = show_summary(context, job).recoveries
        if job.status is not JobStatus.SUCCEEDED:
            raise BrokerError(f"the job ended {job.status.value}: {job.failure}")
        if recoveries < preemptions:
            raise BrokerError(
                f"the job finished with {recoveries} of {preemptions} preemptions",
                hints=["the task is too short to be preempted, or reports no step in `$BROKER_PROGRESS_FILE`"],
            )
    finally:
        shutil.rmtree(home, ignore_errors=True)


@dataclass
class _Rehearsal:
    context: Context
    task: Task
    preemptions: int
    notice_s: float
    _told: int = 0
    _struck: int = 0
    _struck_at_step: int = 0
    _line_s: float = 0.0

    async def run(self) -> Job:
        """Drive the job to its end in this process; an interrupt takes everything down first."""
        store = self.context.store
        job = store.add_job(self.task.name or "rehearsal", self.task)
        driving = asyncio.ensure_future(
            run_daemon(
                store=store,
                make_controller=self.context.make_controller,
                provisioner=self.context.provisioner,
                clock=self.context.clock,
                config=self.context.config,
                idle_s=0,
            )
        )
        loop = asyncio.get_running_loop()
        interrupted = asyncio.Event()
        for each in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(each, interrupted.set)
        try:
            while not driving.done() and not interrupted.is_set():
                await self._look(job.id)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(interrupted.wait(), LOOK_S)
            if interrupted.is_set():
                print_note("interrupted: taking the nodes down ...")
                store.request_cancel(job.id)
            await driving
        finally:
            await self._end_all_nodes()
        self._tell(job.id)
        found = store.get_job(job.id)
        assert found is not None
        if interrupted.is_set():
            raise KeyboardInterrupt
        return found

    async def _look(self, job_id: int) -> None:
        self._tell(job_id)
        job = self.context.store.get_job(job_id)
        if job is None or job.status is not JobStatus.RUNNING or job.progress is None:
            return
        progress, now_s = job.progress, self.context.clock.now_s()
        if now_s - self._line_s >= LINE_EVERY_S:
            self._line_s = now_s
            spent = self.context.store.spend_usd(job_id=job_id, now_s=now_s)
            parts = [f"step {progress.step}" + (f"/{progress.total}" if progress.total else "")]
            parts += [f"loss {progress.loss:.4f}"] if progress.loss is not None else []
            parts += [f"{progress.tokens_per_s:,.0f} tokens/s"] if progress.tokens_per_s else []
            parts += [f"checkpoint {progress.checkpoint_step}"] if progress.checkpoint_step else []
            print_line("  " + "  ".join([*parts, f"{show_usd(spent)} USD so far"]))
        if self._is_due(job):
            await self._strike(job)

    def _is_due(self, job: Job) -> bool:
        """Mid-run, and a few steps past a checkpoint, so that something is lost and something is kept."""
        progress = job.progress
        assert progress is not None
        if self._struck >= self.preemptions or not progress.total or progress.step <= self._struck_at_step:
            return False
        due = progress.total * (self._struck + 1) / (self.preemptions + 1)
        return progress.step >= due and progress.step > (progress.checkpoint_step or progress.total)

    async def _strike(self, job: Job) -> None:
        assert job.progress is not None
        cloud = self.context.clouds["local"]
        assert isinstance(cloud, CanPreempt)
        cluster = self.context.store.get_cluster(job.attempts[-1].cluster)
        if cluster is None:
            return
        self._struck, self._struck_at_step = self._struck + 1, job.progress.step
        warning = f"with {show_duration(self.notice_s)} notice" if self.notice_s else "with no warning"
        print_line(f"! the spot market takes all {len(cluster.nodes)} nodes away {warning}")
        await cloud.preempt_nodes([node.id for node in cluster.nodes], notice_s=self.notice_s)

    async def _end_all_nodes(self) -> None:
        """Whatever happened above, nothing is left running."""
        cloud = self.context.clouds["local"]
        nodes = await cloud.list_nodes(self.context.config.owner)
        await cloud.terminate_nodes([node.id for node in nodes])

    def _tell(self, job_id: int) -> None:
        for event in self.context.store.list_events(job_id=job_id, after=self._told):
            self._told = event.id
            print_line(f"* {clean(event.message)}")


def show_summary(context: Context, job: Job) -> RunSummary:
    """The closing account."""
    store, now_s = context.store, context.clock.now_s()
    paid = store.spend_usd(job_id=job.id, now_s=now_s)
    summary = summarize(job, job.attempts, store.list_steps(job.id), paid_usd=paid, now_s=now_s)
    share = 1 - summary.paid_usd / summary.ondemand_usd if summary.ondemand_usd else 0
    total = f" of {summary.steps_total}" if summary.steps_total else ""
    for name, text in [
        ("status", job.status.value),
        ("steps", f"{summary.steps}{total}"),
        ("steps lost", str(summary.steps_lost)),
        ("recoveries", str(summary.recoveries)),
        ("time recovering", show_duration(summary.recovery_s)),
        ("time in all", show_duration(summary.total_s)),
        ("useful time", show_duration(summary.useful_s)),
        ("paid", f"{show_usd(summary.paid_usd)} USD (pretend)"),
        ("on-demand", f"{show_usd(summary.ondemand_usd)} USD; spot saved {share:.0%}"),
    ]:
        print_line(f"{name:>16}  {text}")
    return summary
