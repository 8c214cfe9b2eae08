"""Users at the terminal: one submits, repeats, cancels and retries; another one only reads."""

from __future__ import annotations

import random
import subprocess
import threading
import time
from collections.abc import Callable, Sequence

from tests.torture.bed import LocalBed
from tests.torture.history import History
from tests.torture.ledger import View, read_store
from tests.torture.workloads import Workload, draw_workload

NODES_MAX = 4  # at work at once: torture needs few processors
TICK_S = 0.5
# The first ones bring back a daemon that was killed; the others only read.
REVIVING: tuple[tuple[str, ...], ...] = (
    ("status", "--json"),
    ("status", "--refresh"),
    ("jobs", "queue", "--json"),
    ("jobs", "queue"),
)
LOOKS: tuple[tuple[str, ...], ...] = (("gc",), ("gc", "--dry-run"), ("cost", "--json"))


class Submitter(threading.Thread):
    """A user that keeps a few nodes busy until stopped, then carries out pending cancels, retries and downs."""

    def __init__(
        self, bed: LocalBed, history: History, *, seed: int, jobs_max: int | None = None, kinds: Sequence[str] = ()
    ) -> None:
        super().__init__(name="submitter", daemon=True)
        self._bed, self._history = bed, history
        self._draw = random.Random(f"{seed}-jobs")
        self._left = jobs_max
        self._kinds = list(kinds)
        self._ended = threading.Event()
        self._owed: list[tuple[float, Workload]] = []
        self.submitted: list[Workload] = []

    def run(self) -> None:
        while not self._ended.wait(TICK_S):
            view = read_store(self._bed.database)
            if self._has_room(view):
                self._submit(self._draw_next())
            self._follow_up(view, time.monotonic())
        while self._owed:
            self._follow_up(read_store(self._bed.database), float("inf"))
            time.sleep(TICK_S)

    def end(self) -> None:
        """Submit no new jobs from here on; `is_alive` while something is outstanding."""
        self._ended.set()

    @property
    def is_exhausted(self) -> bool:
        return self._left == 0

    def _draw_next(self) -> Workload:
        if self._left is not None:
            self._left -= 1
        kind = self._kinds.pop(0) if self._kinds else ""
        return draw_workload(self._draw, len(self.submitted) + 1, self._bed.setting, kind)

    def _has_room(self, view: View | None) -> bool:
        if self._left == 0:
            return False
        if view is None:
            return not self.submitted
        live = {job.name for job in view.jobs.values() if job.is_live} | set(view.clusters)
        busy = sum(each.nodes for each in self.submitted if each.name in live or live & set(each.ends))
        return busy < NODES_MAX

    def _submit(self, work: Workload) -> None:
        """Submit until accepted, always with the same request: some answers are lost, some commands killed."""
        self.submitted.append(work)
        path = self._bed.write_task(work.name, work.text)
        arguments = (
            "jobs",
            "launch",
            path,
            *self._bed.launch_flags,
            "--yes",
            "--detach-run",
            "--request-id",
            work.name,
        )
        if work.kind == "cluster":
            arguments = ("launch", path, "-c", work.name, "--yes", "--detach-run")
        if self._draw.random() < 0.25:
            self._start_and_kill(arguments)
        while self._bed.run(*arguments).returncode and not (work.kind == "cluster" and self._ended.is_set()):
            time.sleep(1.0)
        self._history.act("submit", name=work.name, of=work.kind)
        if work.kind != "cluster" and self._draw.random() < 0.25:
            self._repeat(arguments)
        if work.follow_up:
            self._owed.append((time.monotonic() + self._draw.uniform(5, 40), work))

    def _start_and_kill(self, arguments: Sequence[str]) -> None:
        process = self._bed.start(*arguments)
        try:
            process.communicate(timeout=self._draw.uniform(0.05, 2.0))
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            self._history.act("command-kill", arguments=arguments)

    def _repeat(self, arguments: Sequence[str]) -> None:
        self._bed.run(*arguments)
        self._history.act("command-repeat", arguments=arguments)

    def _follow_up(self, view: View | None, now_s: float) -> None:
        actions: dict[str, Callable[[Workload, View], bool]] = {
            "cancel": self._cancel, "retry": self._retry, "down": self._down,
        }  # fmt: skip
        for owed in list(self._owed):
            due_s, work = owed
            if view is not None and now_s >= due_s and actions[work.follow_up](work, view):
                self._owed.remove(owed)

    def _cancel(self, work: Workload, view: View) -> bool:
        if self._bed.run("jobs", "cancel", work.name).returncode:
            return False
        self._repeat(("jobs", "cancel", work.name))
        return True

    def _retry(self, work: Workload, view: View) -> bool:
        """Repair and retry a job when it has failed, as it must."""
        job = next((each for each in view.list_named(work.name) if each.resumes is None), None)
        if job is None or job.is_live:
            return False
        evidence = self._bed.evidence / work.name
        evidence.mkdir(exist_ok=True)  # its program may have been killed before it made it
        (evidence / "repaired").touch()
        arguments = ("jobs", "retry", str(job.id), "--yes", "--detach-run", "--request-id", f"{work.name}-again")
        if self._bed.run(*arguments).returncode:
            return False
        self._repeat(arguments)
        return True

    def _down(self, work: Workload, view: View) -> bool:
        if work.name not in view.clusters:
            return True
        done = self._bed.run("down", work.name, "--yes").returncode == 0
        self._repeat(("down", work.name, "--yes"))
        return done


class Looker(threading.Thread):
    """A user that occasionally reads everything. Every second reading brings back a daemon that was killed."""

    def __init__(self, bed: LocalBed, *, seed: int, every_s: float) -> None:
        super().__init__(name="looker", daemon=True)
        self._bed = bed
        self._draw = random.Random(f"{seed}-looks")
        self._every_s = every_s
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.wait(self._draw.uniform(0.5, 1.5) * self._every_s):
            self._bed.run(*self._draw.choice(REVIVING))
            if self._ended.wait(self._draw.uniform(0.5, 1.5) * self._every_s):
                return
            view = read_store(self._bed.database)
            looks = list(LOOKS)
            if view and view.jobs:
                job = str(self._draw.choice(sorted(view.jobs)))
                looks += [("jobs", "why", job), ("jobs", "events", job), ("jobs", "logs", job, "--no-follow")]
            self._bed.run(*self._draw.choice(looks))

    def end(self) -> None:
        self._ended.set()
        self.join()
