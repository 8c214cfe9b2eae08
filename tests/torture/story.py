"""One bed's run: jobs under the killer for some minutes, then healing, the end of every job, and the checks."""

from __future__ import annotations

import signal
import threading
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tests.torture.bed import LocalBed
from tests.torture.checks import LAST, check_jobs, check_locks, check_rest
from tests.torture.history import History
from tests.torture.killer import Killer
from tests.torture.ledger import Monitor, View, read_store
from tests.torture.references import References
from tests.torture.users import Looker, Submitter

POLL_S = 1.0
PRINT_EVERY_S = 30.0
# After healing, something must move within this time. The product's longest pause is ten minutes: a gang may be silent
# as a whole for that long while its cloud lists it as running.
STALL_S_MAX = 900.0


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The totals of one bed's run."""

    bed: str
    seed: int
    elapsed_s: float
    kinds: Counter[str]
    statuses: Counter[str]
    attempts: int
    outcomes: Counter[str]
    acts: Counter[str]
    skipped: Sequence[str]
    violations: Sequence[str]
    history: str


class Story:
    """A run that opens nothing and closes nothing: the bed is its caller's."""

    def __init__(
        self,
        bed: LocalBed,
        history: History,
        *,
        seed: int,
        minutes: float,
        jobs_max: int | None,
        killer: Killer,
        kinds: Sequence[str] = (),
        look_every_s: float = 6.0,
    ) -> None:
        self._bed, self._history, self._seed, self._minutes = bed, history, seed, minutes
        self._killer = killer
        self._submitter = Submitter(bed, history, seed=seed, jobs_max=jobs_max, kinds=kinds)
        self._looker = Looker(bed, seed=seed, every_s=look_every_s)
        self._monitor = Monitor(history)
        self._view: View | None = None

    def play(self, references: References) -> Outcome:
        threading.excepthook = self._report_thread
        for thread in (self._submitter, self._looker, self._killer):
            thread.start()
        self._torture()
        self._submitter.end()
        self._killer.end()
        self._history.write("healed")
        print(f"{self._history.elapsed_s:6.0f} s  {self._bed.name}: healed; the jobs that are left end now", flush=True)
        self._wait_until_ended()
        self._looker.end()
        self._leave_nothing()
        print(
            f"{self._history.elapsed_s:6.0f} s  {self._bed.name}: all have ended; checks, and reference runs",
            flush=True,
        )
        self._check(references)
        return self._sum_up()

    def _report_thread(self, failed: threading.ExceptHookArgs) -> None:
        """Report a user or a killer that stopped by an error of its own: such a run has proven nothing."""
        if self._bed.is_closed:
            return  # the run was interrupted: threads that fail now say nothing about the product
        text = "".join(traceback.format_exception(failed.exc_type, failed.exc_value, failed.exc_traceback))
        name = failed.thread.name if failed.thread else "a thread"
        self._history.violate(f"the test itself failed: {name}: {failed.exc_value!r}", traceback=text)

    def _torture(self) -> None:
        """Torture until the time is up or, where the number of jobs is given, until all have ended."""
        printed_s = self._history.elapsed_s
        while self._history.elapsed_s < self._minutes * 60:
            self._look()
            if self._submitter.is_exhausted and self._is_quiet():
                return
            if self._history.elapsed_s - printed_s >= PRINT_EVERY_S:
                printed_s = self._history.elapsed_s
                self.print_progress()
            time.sleep(POLL_S)

    def _look(self) -> None:
        view = read_store(self._bed.database)
        if view is not None:
            self._monitor.look(view)
            self._view = view

    def _is_quiet(self) -> bool:
        view = self._view
        return (
            view is not None
            and bool(view.jobs)
            and not view.clusters
            and not any(job.is_live for job in view.jobs.values())
        )

    def _wait_until_ended(self) -> None:
        """Wait as long as anything moves; only a standstill is a violation."""
        stamp, moved_s, printed_s = "", time.monotonic(), time.monotonic()
        while True:
            self._look()
            if self._is_quiet() and not self._submitter.is_alive():
                return
            new = f"{self._view.stamp if self._view else ''}"
            if new != stamp:
                stamp, moved_s = new, time.monotonic()
            if time.monotonic() - moved_s > STALL_S_MAX:
                view = self._view
                left = [job.name for job in view.jobs.values() if job.is_live] if view else []
                clusters = sorted(view.clusters) if view else []
                self._history.violate(f"healed, and nothing moves for {STALL_S_MAX:g} s: {left} {clusters}")
                return
            if time.monotonic() - printed_s >= PRINT_EVERY_S:
                printed_s = time.monotonic()
                self.print_progress()
            time.sleep(POLL_S)

    def _leave_nothing(self) -> None:
        """Run a last job to show that nothing blocks a start; then call the collector and ask the daemon to leave."""
        bed = self._bed
        hello = f"name: {LAST}\nresources: {{{bed.setting.resources}}}\nrun: echo hello\n"
        done = bed.run("jobs", "launch", bed.write_task(LAST, hello), *bed.launch_flags, "--yes")
        if done.returncode or "hello" not in done.stdout:
            self._history.violate("a job that is launched at the end does not succeed", stderr=done.stderr)
        bed.run("gc")
        self._wait_until_ended()

    def _check(self, references: References) -> None:
        bed, history = self._bed, self._history
        view = read_store(bed.database)
        if view is None:
            history.violate("the store cannot be read at the end")
            return
        check_rest(bed, history, view)
        bed.check_nodes()
        check_jobs(bed, history, view, self._submitter.submitted, references)
        for each in bed.list_processes():
            if each.kind == "daemon":
                bed.signal(each, signal.SIGTERM)
        left_s = time.monotonic()
        while (left := bed.list_processes()) and time.monotonic() - left_s < STALL_S_MAX:
            threading.Event().wait(0.2)
        if left:
            history.violate(f"processes are left: {sorted(each.kind for each in left)}", processes=left)
        check_locks(bed, history)

    def print_progress(self) -> None:
        """Print one line of progress."""
        view = self._view
        jobs = list(view.jobs.values()) if view else []
        ended = sum(1 for job in jobs if not job.is_live)
        attempts = sum(len(job.attempts) for job in jobs)
        acts = ", ".join(f"{kind} {count}" for kind, count in sorted(self._history.acts.items()))
        print(
            f"{self._history.elapsed_s:6.0f} s  {self._bed.name}: {ended} of {len(jobs)} jobs ended, "
            f"{attempts} attempts, {len(self._history.violations)} violations; {acts}",
            flush=True,
        )

    def _sum_up(self) -> Outcome:
        jobs = list(self._view.jobs.values()) if self._view else []
        return Outcome(
            bed=self._bed.name,
            seed=self._seed,
            elapsed_s=self._history.elapsed_s,
            kinds=Counter(work.kind for work in self._submitter.submitted),
            statuses=Counter(job.status for job in jobs),
            attempts=sum(len(job.attempts) for job in jobs),
            outcomes=Counter(attempt.get("outcome") or "" for job in jobs for attempt in job.attempts),
            acts=self._history.acts,
            skipped=self._bed.skipped,
            violations=self._history.violations,
            history=str(self._history.path),
        )
