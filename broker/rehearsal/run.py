"""Run one rehearsal of a job to its end: steps measure its progress, and preemptions come between checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, field

from broker.clock import SystemClock
from broker.formatting import format_usd
from broker.rehearsal.context import RehearsalContext
from broker.rehearsal.driver import Driver
from broker.rehearsal.report import Line
from broker.types import Job, JobStatus

SILENT_S_MAX = 60.0  # after this, preempt a program that does not report its progress


@dataclass
class JobDriver(Driver[RehearsalContext]):
    """Drive the controller of one job."""

    _job_id: int = field(default=0, init=False)

    @property
    def job(self) -> Job:
        """The job as recorded."""
        job = self.context.store.jobs.get(self._job_id)
        assert job is not None
        return job

    def submit(self) -> None:
        """Record the job."""
        stage = self.context.stage
        self._job_id = self.context.store.jobs.add(stage.task.name or "rehearsal", stage.played).id

    def is_over(self) -> bool:
        """Return whether the job has ended."""
        return self.job.status.is_terminal

    def request_end(self) -> None:
        """Cancel the job."""
        self.context.store.jobs.request_cancel(self._job_id)

    def report_events(self) -> None:
        """Print the events of the job."""
        for event in self.list_new_events({self._job_id}):
            self.report_event(event.time_s, event.message)

    async def poll(self) -> None:
        """Report progress, and preempt the gang when it is time."""
        self.report_events()
        job = self.context.store.jobs.get(self._job_id)
        if job is None or job.status is not JobStatus.RUNNING:
            return
        attempt = job.attempts[-1]
        cluster = self.context.store.clusters.get(attempt.cluster)
        if cluster is None:
            return
        line = self.context.program.read_progress(cluster, attempt.number, is_resumed=attempt.resumed_s is not None)
        is_forced = bool(self.forced_preemptions) and self.forced_preemptions[-1].attempt == attempt.number
        if line is not None and not is_forced:
            self._report_progress(job, line)
        if self._is_due(attempt.number, line):
            self.context.program.pass_steps()
            await self.preempt([cluster], attempt=attempt.number, step=line.step if line else None)

    def _report_progress(self, job: Job, line: Line) -> None:
        if not self.is_line_due():
            return
        spent = self.context.store.bills.spend_usd(job_id=job.id, now_s=self.context.clock.now_s())
        if self.bar is not None:  # it shows the step itself and leaves half a line for text
            loss = f" loss {line.loss:.3f}," if line.loss is not None else ""
            self.bar.describe(f"{self.stamp().strip()},{loss} {format_usd(spent)} USD")
            self.bar.update(line.step, total=line.total or None)
            return
        parts = [f"step {line.step}" + (f"/{line.total}" if line.total else "")]
        parts += [f"loss {line.loss:.4f}"] if line.loss is not None else []
        parts += [f"{line.tokens_per_s:,.0f} tokens/s"] if line.tokens_per_s is not None else []
        parts += [f"checkpoint {line.checkpoint_step}"] if line.checkpoint_step else []
        self.write(f"{self.stamp()}   " + "  ".join([*parts, f"{format_usd(spent)} USD so far"]))

    def _is_due(self, number: int, line: Line | None) -> bool:
        """Return whether to preempt now: mid-run and past a checkpoint, so that some steps are lost and some kept."""
        attempts = self.context.program.attempts
        if number not in attempts or (self.forced_preemptions and self.forced_preemptions[-1].attempt == number):
            return False
        # Of a program that has reported progress since, one before its first step tells nothing: it was only slow.
        made = (
            sum(each.step is not None for each in self.forced_preemptions)
            if line and line.total
            else len(self.forced_preemptions)
        )
        if made >= self.preemptions:
            return False
        if line is None or not line.total:  # without reported progress, go by time
            has_reported = line is None and any(attempt.observations for attempt in attempts.values())
            running_s = attempts[number].running_s
            return not has_reported and running_s is not None and SystemClock().now_s() - running_s >= SILENT_S_MAX
        due = line.total * (made + 1) / (self.preemptions + 1)
        before = max((each.step or 0 for each in self.forced_preemptions), default=0)
        is_past = line.checkpoint_step is None or line.step > line.checkpoint_step
        return due <= line.step < line.total and line.step > before and is_past
