"""Run one rehearsal to its end in this process: the daemon's loop, forced preemptions, and progress output."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Protocol

from broker.clock import SystemClock
from broker.errors import CloudError
from broker.formatting import format_duration, format_usd
from broker.jobs.daemon import run_daemon
from broker.rehearsal.cloud import NOTICE_S, NOTICE_S_MAX
from broker.rehearsal.context import RehearsalContext
from broker.rehearsal.report import Line
from broker.types import Cluster, Job, JobStatus

LOOK_S = 0.25
LINE_EVERY_S = 2.0
INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SILENT_S_MAX = 60.0  # after this, preempt a program that does not report its progress


@dataclass(frozen=True, kw_only=True)
class Strike:
    """A forced preemption of all nodes; `step` is the newest known one, `notice_s` the cloud's warning."""

    attempt: int
    step: int | None
    notice_s: float


class ProgressBar(Protocol):
    """A progress bar with a text."""

    def describe(self, text: str) -> None:
        """Set the text next to the bar."""

    def update(self, completed: float, *, total: float | None = None) -> None:
        """Set the progress, and the total if it is given."""


@dataclass
class Driver:
    """Drive the controller of one job until it ends, and preempt its nodes `preemptions` times."""

    context: RehearsalContext
    preemptions: int
    notice_s: float | None  # None: first no warning, then alternately the cloud's and none
    write: Callable[[str], None]
    bar: ProgressBar | None = None  # shows progress instead of lines, on a terminal
    strikes: list[Strike] = field(default_factory=list)
    real_s: float = 0.0
    _reported: int = 0
    _line_s: float = 0.0

    async def run(self) -> Job:
        """Run the job to its end. An interrupt terminates all nodes, then raises KeyboardInterrupt."""
        context = self.context
        store = context.store
        job = store.jobs.add(context.stage.task.name or "rehearsal", context.stage.played)
        driving = asyncio.ensure_future(self._run_daemon())
        begin_s, interrupted = SystemClock().now_s(), asyncio.Event()
        _listen(interrupted)
        try:
            while not driving.done() and not interrupted.is_set():
                await self._poll(job.id)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(interrupted.wait(), LOOK_S)
            if interrupted.is_set() or not self._read_job(job.id).status.is_terminal:
                interrupted.set()  # the daemon itself exits on SIGTERM: the next one terminates the nodes
                self.write("interrupted: terminating the nodes ...")
                store.jobs.request_cancel(job.id)
                await driving
                _listen(interrupted)
                await self._run_daemon()
            await driving
        finally:
            for cloud in context.rehearsed.values():
                await cloud.end_all(context.config.owner)
        self._report_events(job.id)
        self.real_s = SystemClock().now_s() - begin_s
        if interrupted.is_set():
            raise KeyboardInterrupt
        return self._read_job(job.id)

    def _run_daemon(self) -> Coroutine[Any, Any, None]:
        context = self.context
        return run_daemon(
            store=context.store,
            make_controller=context.make_controller,
            provisioner=context.provisioner,
            clock=context.clock,
            config=context.config,
            idle_s=0,
        )

    def _read_job(self, job_id: int) -> Job:
        job = self.context.store.jobs.get(job_id)
        assert job is not None
        return job

    def report_market(self, message: str) -> None:
        """Print an event of the market with its simulated time."""
        self.write(f"{self._stamp()} ! {message}")

    async def _poll(self, job_id: int) -> None:
        for cloud in self.context.rehearsed.values():
            with contextlib.suppress(CloudError):
                await cloud.take_due()
        self._report_events(job_id)
        job = self.context.store.jobs.get(job_id)
        if job is None or job.status is not JobStatus.RUNNING:
            return
        attempt = job.attempts[-1]
        cluster = self.context.store.clusters.get(attempt.cluster)
        if cluster is None:
            return
        line = self.context.program.read_progress(cluster, attempt.number, is_resumed=attempt.resumed_s is not None)
        is_struck = bool(self.strikes) and self.strikes[-1].attempt == attempt.number
        if line is not None and not is_struck:
            self._report_progress(job, line)
        if self._is_due(attempt.number, line):
            await self._strike(cluster, attempt.number, line)

    def _report_progress(self, job: Job, line: Line) -> None:
        real_s = SystemClock().now_s()
        if self.bar is None and real_s - self._line_s < LINE_EVERY_S:
            return
        self._line_s = real_s
        spent = self.context.store.bills.spend_usd(job_id=job.id, now_s=self.context.clock.now_s())
        if self.bar is not None:  # it shows the step itself and leaves half a line for text
            loss = f" loss {line.loss:.3f}," if line.loss is not None else ""
            self.bar.describe(f"{self._stamp().strip()},{loss} {format_usd(spent)} USD")
            self.bar.update(line.step, total=line.total or None)
            return
        parts = [f"step {line.step}" + (f"/{line.total}" if line.total else "")]
        parts += [f"loss {line.loss:.4f}"] if line.loss is not None else []
        parts += [f"{line.tokens_per_s:,.0f} tokens/s"] if line.tokens_per_s is not None else []
        parts += [f"checkpoint {line.checkpoint_step}"] if line.checkpoint_step else []
        self.write(f"{self._stamp()}   " + "  ".join([*parts, f"{format_usd(spent)} USD so far"]))

    def _is_due(self, number: int, line: Line | None) -> bool:
        """Return whether to preempt now: mid-run and past a checkpoint, so that some steps are lost and some kept."""
        attempts = self.context.program.attempts
        if len(self.strikes) >= self.preemptions or number not in attempts:
            return False
        if self.strikes and self.strikes[-1].attempt == number:
            return False
        if line is None or not line.total:  # without reported progress, go by time
            has_reported = line is None and any(attempt.observations for attempt in attempts.values())
            running_s = attempts[number].running_s
            return not has_reported and running_s is not None and SystemClock().now_s() - running_s >= SILENT_S_MAX
        due = line.total * (len(self.strikes) + 1) / (self.preemptions + 1)
        before = max((strike.step or 0 for strike in self.strikes), default=0)
        is_past = line.checkpoint_step is None or line.step > line.checkpoint_step
        return due <= line.step < line.total and line.step > before and is_past

    async def _strike(self, cluster: Cluster, number: int, line: Line | None) -> None:
        self.context.program.pass_steps()
        cloud = self.context.rehearsed[cluster.placement.offer.cloud]
        notice_s = self._choose_notice_s(cluster)
        self.strikes.append(Strike(attempt=number, step=line.step if line else None, notice_s=notice_s))
        warning = f"with {format_duration(min(notice_s, NOTICE_S_MAX))} notice" if notice_s else "without notice"
        place = cluster.placement.offer.zone or cluster.placement.offer.region
        self.report_market(f"the spot market of {place} preempts all nodes {warning}")
        try:
            await cloud.preempt_nodes([node.id for node in cluster.nodes], notice_s=notice_s)
        except CloudError as error:  # killing a process tree is slow on a busy machine; later polls find it gone
            self.report_market(f"the preemption is slow: {error.message}")

    def _choose_notice_s(self, cluster: Cluster) -> float:
        if self.notice_s is not None:
            return self.notice_s
        return NOTICE_S.get(cluster.placement.offer.cloud, 30.0) if len(self.strikes) % 2 else 0.0

    def _report_events(self, job_id: int) -> None:
        for event in self.context.store.events.list(job_id=job_id, after=self._reported):
            self._reported = event.id
            self.write(f"{self._stamp(event.time_s)} * {event.message}")

    def _stamp(self, time_s: float | None = None) -> str:
        """Format the simulated time since the start: `  4h 07m`."""
        now_s = self.context.clock.now_s() if time_s is None else time_s
        minutes = int(max(0.0, now_s - self.context.start_s) // 60)
        return f"{minutes // 60:3d}h {minutes % 60:02d}m"


def _listen(interrupted: asyncio.Event) -> None:
    for number in INTERRUPTS:
        asyncio.get_running_loop().add_signal_handler(number, interrupted.set)
