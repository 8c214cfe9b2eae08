"""Slots in histories of several controllers: limits in total and by project, displacement, and `max_duration`.

Q1: no more jobs are live than the total allows, nor than a project's own limit allows. Q2: a job is displaced only by
one that waits, has a higher priority and displaces no other, only if it runs and has a checkpoint, and not twice within
an hour. Q3: a displaced job returns its slot before it starts again, starts again from its checkpoint, and a request
for its slot is answered. M1: no program works after `max_duration`; M2: no job ends for it before.
"""

from __future__ import annotations

import json
import math
import sqlite3
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from random import Random
from typing import TYPE_CHECKING

from broker.jobs.displacing import AGAIN_S
from broker.jobs.job_limits import find_save_s
from broker.jobs.slot_limits import SlotLimits
from broker.task.codec import decode_task
from broker.types import EventKind, JobStatus, OutcomeKind
from tests.simulation.events import Violation
from tests.simulation.machines import MachineRun, Program
from tests.simulation.mixes import JobSpec, draw_job

if TYPE_CHECKING:
    from tests.simulation.sharing import SharedUniverse

SLOTTED = {each.value for each in (JobStatus.STARTING, JobStatus.RUNNING, JobStatus.RECOVERING)}
PROJECTS = ("vision", "speech")
ANSWER_S = 220.0  # after the last fault; an outage of a cloud lasts up to 200 s, and delays every observation of a job
LATE_S = 5.0  # a reading of the clock, a lease of at least a second, and the call that creates machines
COVERED = ("displacement", "max_duration", "project slots")  # what a fifth of the histories must have, each


def draw_limits(random: Random) -> SlotLimits:
    """Draw the limits of a history: none in a sixth of them, otherwise in total, by project, or both."""
    kind = random.choice(("none", "total", "total", "project", "both", "both"))
    after_s = random.choice((1.0, 1.0, 3.0, 10.0))
    by_project = {name: random.choice((1, 1, 2)) for name in PROJECTS} if kind in ("project", "both") else {}
    total = random.choice((1, 1, 1, 2)) if kind == "total" else random.choice((2, 3)) if kind == "both" else None
    return SlotLimits(total=total, by_project=by_project, preempt_after_s=None if kind == "none" else after_s)


def draw_queued_jobs(random: Random) -> tuple[JobSpec, ...]:
    """Draw jobs with priorities; in half of the histories later ones are higher, so that they displace a long one."""
    jobs = sorted((draw_job(random) for _ in range(random.randint(2, 5))), key=lambda each: each.submit_s)
    priorities = [random.choice((-100, 0, 100)) for _ in jobs]
    if random.random() < 0.5:
        priorities = [*sorted(priorities[:-1]), 200]
        jobs = [replace(job, submit_s=job.submit_s + 30.0 * index) for index, job in enumerate(jobs)]
        jobs[0] = replace(jobs[0], program=Program(steps=400), cancel_s=math.inf)
    return tuple(_draw_queued(random, job, priority) for job, priority in zip(jobs, priorities, strict=True))


def _draw_queued(random: Random, job: JobSpec, priority: int) -> JobSpec:
    limit_s = random.choice((None, None, None, 60.0, 120.0, 300.0))
    task = replace(job.task, priority=priority, max_duration_s=limit_s)
    return replace(job, task=task, project=random.choice(("", *PROJECTS, *PROJECTS)))


@dataclass
class SlotWatch:
    """Check the slots of one history; `seen` counts what occurred, by name."""

    universe: SharedUniverse
    limits: SlotLimits
    requests: dict[int, int] = field(default_factory=dict)  # displaced job -> waiting job, as last committed
    since_s: dict[int, float] = field(default_factory=dict)  # displaced job -> time of the request
    displaced_s: dict[int, float] = field(default_factory=dict)  # job -> time of its last request
    ended: dict[int, int] = field(default_factory=dict)  # displaced job that has not started again -> its checkpoint
    holding: set[int] = field(default_factory=set)  # those of `ended` that have not returned their slot
    limited: set[int] = field(default_factory=set)  # jobs whose end by `max_duration` was checked
    seen: Counter[str] = field(default_factory=Counter)

    def check_commit(self, written: set[str]) -> None:
        """Check what was committed."""
        if not written & {"jobs", "attempts"}:
            return
        rows = {row["id"]: row for row in self._read_jobs()}
        live = {job_id: row for job_id, row in rows.items() if not row["is_terminal"]}
        self._check_counts([job_id for job_id, row in live.items() if row["status"] in SLOTTED])
        self._check_requests(live)
        self._note_displaced(rows)
        self._check_limited(rows)

    def _read_jobs(self) -> list[sqlite3.Row]:
        return self.universe.read(
            "SELECT id, status, is_terminal, task, progress, displaced_by, outcome_kind FROM jobs"
        )

    def _check_counts(self, live: list[int]) -> None:
        total = self.limits.total
        if total is not None and len(live) > total:
            raise Violation("Q1", f"jobs {live} are live, and the limit is {total}")
        projects = {job_id: self.universe.projects.get(job_id, "") for job_id in live}
        for name, limit in self.limits.by_project.items():
            of_project = [job_id for job_id in live if projects[job_id] == name]
            if len(of_project) > limit:
                raise Violation("Q1", f"jobs {of_project} of {name} are live, and its limit is {limit}")

    def _check_requests(self, live: Mapping[int, sqlite3.Row]) -> None:
        now_s = self.universe.loop.time()
        requests = {job_id: row["displaced_by"] for job_id, row in live.items() if row["displaced_by"] is not None}
        for victim, by in requests.items():
            if self.requests.get(victim) != by:
                self._check_request(live[victim], live.get(by), now_s)
                self.since_s[victim] = self.displaced_s[victim] = now_s
                self.seen["request"] += 1
        if len(set(requests.values())) < len(requests):
            raise Violation("Q2", f"one job takes two slots: {requests}")
        self.requests = requests

    def _check_request(self, victim: sqlite3.Row, waiting: sqlite3.Row | None, now_s: float) -> None:
        job_id = victim["id"]
        if waiting is None or waiting["status"] != JobStatus.PENDING.value:
            raise Violation("Q2", f"job {job_id} is displaced by a job that does not wait")
        priorities = [decode_task(row["task"], {}).priority for row in (victim, waiting)]
        if priorities[0] >= priorities[1]:
            raise Violation("Q2", f"job {job_id} is displaced, and the priorities are {priorities}")
        if victim["status"] != JobStatus.RUNNING.value or not _read_checkpoint(victim):
            raise Violation("Q2", f"job {job_id} is displaced, and has no checkpoint")
        again_s = now_s - self.displaced_s.get(job_id, -math.inf)
        if again_s < AGAIN_S - self.universe.spread_s:
            raise Violation("Q2", f"job {job_id} is displaced again after {again_s:.0f} s")

    def _note_displaced(self, rows: Mapping[int, sqlite3.Row]) -> None:
        """Note the jobs whose newest attempt ended for a waiting job, until they start again or end."""
        for (job_id,) in self.universe.read(
            "SELECT job_id FROM attempts AS one WHERE outcome_kind = ? AND number = "
            "(SELECT max(number) FROM attempts AS other WHERE other.job_id = one.job_id)",
            (OutcomeKind.DISPLACED.value,),
        ):
            if job_id not in self.ended and not rows[job_id]["is_terminal"]:
                self.ended[job_id] = _read_checkpoint(rows[job_id])
                self.holding.add(job_id)
                self.seen["displacement"] += 1
        for job_id in list(self.ended):
            if rows[job_id]["status"] not in SLOTTED:
                self.holding.discard(job_id)

    def check_start(self, run: MachineRun) -> None:
        """Check that a displaced job starts again in a slot of its own, from its checkpoint."""
        if run.job in self.holding:
            raise Violation("Q3", f"job {run.job} was displaced, and starts again without returning its slot")
        checkpoint = self.ended.pop(run.job, None)
        if checkpoint is not None:
            self.seen["resumption"] += 1
            if run.first_step < checkpoint:
                raise Violation("Q3", f"job {run.job} had saved step {checkpoint}, and resumes at {run.first_step}")

    def check_tick(self) -> None:
        """Check what must happen in time."""
        now_s = self.universe.loop.time()
        for victim in self.requests.keys() - self.ended.keys():
            waited_s = now_s - max(self.since_s[victim], self.universe.healed_s)
            if self.universe.is_healed and waited_s > ANSWER_S:
                raise Violation("Q3", f"job {victim} is to return its slot for {waited_s:.0f} s")
        for job_id, runs in self.universe.gang.runs_by_job.items():
            self._check_duration(job_id, runs, now_s)

    def _check_duration(self, job_id: int, runs: list[MachineRun], now_s: float) -> None:
        limit_s = self.universe.tasks[job_id].max_duration_s
        if limit_s is None or not self.universe.gang.is_working(runs[-1]):
            return
        used_s = now_s - self.universe.find_begin_s(job_id)
        if used_s > limit_s + self.universe.spread_s + LATE_S:
            raise Violation("M1", f"job {job_id} works for {used_s:.0f} s, and its max_duration is {limit_s:.0f} s")

    def _check_limited(self, rows: Mapping[int, sqlite3.Row]) -> None:
        for job_id, row in rows.items():
            if row["outcome_kind"] != OutcomeKind.MAX_DURATION_EXCEEDED.value or job_id in self.limited:
                continue
            self.limited.add(job_id)
            self.seen["max_duration"] += 1
            limit_s = decode_task(row["task"], {}).max_duration_s
            if limit_s is None:
                raise Violation("M2", f"job {job_id} has no max_duration, and ends for it")
            used_s = self.universe.loop.time() - self.universe.searched_s[job_id]
            if used_s < limit_s - find_save_s(limit_s) - self.universe.spread_s - LATE_S:
                raise Violation(
                    "M2", f"job {job_id} ends after {used_s:.0f} s, and its max_duration is {limit_s:.0f} s"
                )

    def count_covered(self) -> frozenset[str]:
        """Return which of `COVERED` this history had."""
        waits = self.universe.read("SELECT data FROM events WHERE kind = ?", (EventKind.QUEUED.value,))
        if any("project" in json.loads(row["data"]) for row in waits):
            self.seen["project slots"] += 1
        return frozenset(name for name in COVERED if self.seen[name])


def _read_checkpoint(row: sqlite3.Row) -> int:
    return json.loads(row["progress"] or "{}").get("checkpoint_step") or 0
