"""A schedule on controllers that share a store: D1, each due time has exactly one record in the end; D2, each job
belongs to one started due time and no other; D3, two jobs of the schedule are never alive at once.

`python -m tests.simulation.schedules --seeds 100` plays histories.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from broker.jobs.daemon_parts import StartsSchedules
from broker.jobs.scheduler import Scheduler
from broker.task.due_times import find_next
from broker.types import DueOutcome, DueTime, Job, JobSchedule, Overlap, Plan, ScheduleSpec, Task
from tests.simulation import stories
from tests.simulation.disk import SimulatedStore
from tests.simulation.events import TERMINAL, Violation
from tests.simulation.machines import Program
from tests.simulation.mixes import JobSpec, Mix
from tests.simulation.processes import Process
from tests.simulation.runner import make_folder, watch_log
from tests.simulation.scenes import make_job, make_mix
from tests.simulation.sharing import SharedUniverse, begin_store_faults, draw_shared_mix, one_listener_each
from tests.simulation.universe import make_plan, run_universe

NAME = "minutely"
DUE_COUNT = 5  # due times, a minute apart


@dataclass(frozen=True, kw_only=True)
class Play:
    """The schedule of one history: its rule of overlap, and the job of each due time."""

    overlap: Overlap
    job: JobSpec
    controller_count: int = 2
    has_store_faults: bool = False


class SimulatedLauncher:
    def __init__(self, universe: ScheduledUniverse, store: SimulatedStore) -> None:
        self._universe, self._store = universe, store

    def plan(self, schedule: JobSchedule, task: Task) -> Plan:
        return make_plan(task)

    def submit(self, schedule: JobSchedule, task: Task, plan: Plan, *, request_id: str) -> Job:
        self._universe.requests.add(request_id)
        self._universe.expect_job(request_id, self._universe.play.job)
        return self._store.jobs.add(schedule.name, task, request_id)


class ScheduledUniverse(SharedUniverse):
    def __init__(self, folder: Path, seed: int, mix: Mix, play: Play, *, is_skewed: bool = False) -> None:
        super().__init__(folder, seed, mix, is_skewed=is_skewed, trace=True)
        self.play = play
        self.is_acting = True
        self.first_s: float | None = None
        self.spec = ScheduleSpec(cron="* * * * *", overlap=play.overlap)

    def make_scheduler(self, store: SimulatedStore) -> StartsSchedules | None:
        return Scheduler(store, launches=SimulatedLauncher(self, store))

    async def store_schedule(self, process: Process) -> None:
        store = self.open_store(process)
        now_s = store.read_time_s()
        first_s = find_next(self.spec, now_s)
        assert first_s is not None
        made = store.schedules.add(NAME, self.play.job.task, self.spec, next_s=first_s, request_id="schedule")
        self.first_s = made.next_s
        store.close()

    async def remove_end(self, process: Process) -> None:
        """End the schedule by its `until`, as a user cannot: the store has no verb for it."""
        store = self.open_store(process)
        schedule = store.schedules.get(NAME)
        assert schedule is not None
        store.schedules.set_next(schedule, None)
        store.close()

    def emit(self, kind: str, **data: Any) -> None:
        super().emit(kind, **data)
        if kind == "commit" and {"jobs", "due_times"} & set(data["written"]) and self.failure is None:
            try:
                check_commit(self)
            except Violation as violation:
                self.fail(violation)


def list_due(universe: ScheduledUniverse) -> list[DueTime]:
    rows = universe.read("SELECT due_s, outcome, job_id, count, last_s FROM due_times ORDER BY due_s")
    return [
        DueTime(due_s=row[0], outcome=DueOutcome(row[1]), job_id=row[2], count=row[3], last_s=row[4]) for row in rows
    ]


def check_commit(universe: ScheduledUniverse) -> None:
    """Check what must hold after each commit."""
    live = [row[0] for row in universe.read(f"SELECT id FROM jobs WHERE status NOT IN {TERMINAL}")]
    if len(live) > 1:
        raise Violation("D3", f"jobs {live} of one schedule are alive")
    stored = universe.read("SELECT uid FROM schedules")
    if not stored:
        return
    jobs = universe.read("SELECT id, request_id FROM jobs ORDER BY id")
    started = [each for each in list_due(universe) if each.outcome is DueOutcome.STARTED]
    if sorted(row[0] for row in jobs) != sorted(each.job_id or 0 for each in started):
        raise Violation("D2", f"jobs {[row[0] for row in jobs]}, and due times {started}")
    ((uid,),) = stored
    requests = {row[0]: row[1] for row in jobs}
    for each in started:
        wanted = f"schedule/{NAME}/{uid}/{int(each.due_s)}"
        if requests[each.job_id] != wanted:
            raise Violation("D2", f"job {each.job_id} has the request id {requests[each.job_id]}, not {wanted}")


def check_coverage(universe: ScheduledUniverse) -> None:
    """Check that every due time, from the first to the last, has exactly one record."""
    assert universe.first_s is not None
    covered: list[float] = []
    for each in list_due(universe):
        due_s = each.due_s
        covered += [due_s + 60.0 * index for index in range(each.count)]
        if each.outcome is DueOutcome.WAITING:
            raise Violation("D1", f"the due time {due_s} still waits")
    wanted = [universe.first_s + 60.0 * index for index in range(len(covered))]
    if covered != wanted:
        raise Violation("D1", f"due times {wanted}, and records of {covered}")


@dataclass(frozen=True, kw_only=True)
class ScheduledResult:
    failure: str
    outcomes: Counter[DueOutcome]
    points: int
    faults: Counter[str]
    kills: int
    trace: Sequence[str]


async def act(universe: Any) -> None:
    for number in range(2, universe.play.controller_count + 1):
        universe.begin(universe.keep_broker(f"broker-{number}"))
    universe.begin(watch(universe))
    if universe.play.has_store_faults:
        begin_store_faults(universe)
    await stories.play(universe)
    if universe.failure is None:
        try:
            check_coverage(universe)
        except Violation as violation:
            universe.fail(violation)


async def watch(universe: ScheduledUniverse) -> None:
    """Store the schedule, let it run, end it when enough due times have passed, and wait for the last of them."""
    await stories.insist(universe, "schedule", universe.store_schedule)
    assert universe.first_s is not None
    await asyncio.sleep(universe.first_s + 60.0 * (DUE_COUNT - 1) + 30.0 - universe.loop.time())
    while not universe.is_healed:  # a controller that is away may miss due times, and must catch up
        await asyncio.sleep(1.0)
    await asyncio.sleep(70.0)
    await stories.insist(universe, "end", universe.remove_end)
    while universe.read("SELECT 1 FROM due_times WHERE outcome = 'waiting'"):
        await asyncio.sleep(1.0)
    universe.is_acting = False


def play_scheduled(
    seed: int, mix: Mix, play: Play, *, kill_at: int | None = None, is_skewed: bool = False
) -> ScheduledResult:
    with make_folder() as folder, ExitStack() as stack:
        stack.enter_context(one_listener_each())
        universe = ScheduledUniverse(folder, seed, mix, play, is_skewed=is_skewed)
        universe.kill_at = kill_at
        stack.enter_context(watch_log(universe))
        outcomes: Counter[DueOutcome] = Counter()

        async def story(each: Any) -> None:
            await act(each)
            outcomes.update(each.outcome for each in list_due(universe))

        run_universe(universe, story)
        return ScheduledResult(
            failure=f"{universe.failure!s}" if universe.failure else "", outcomes=outcomes, points=universe.points,
            faults=Counter(fault for fault, _ in universe.cells), kills=sum(universe.kills.values()),
            trace=universe.trace_lines or (),
        )  # fmt: skip


def make_scene(overlap: Overlap) -> tuple[Mix, Play]:
    """Make a scene without chance: jobs of over a minute, so that due times meet a live job."""
    mix = replace(make_mix(heal_s=60.0 * DUE_COUNT), jobs=())
    return mix, Play(overlap=overlap, job=make_job(nodes=1, steps=75))


def draw_play(seed: int) -> tuple[Mix, Play, bool]:
    random = Random(f"{seed}/scheduled")
    mix = replace(
        draw_shared_mix(random), jobs=(), command_every_s=math.inf, heal_s=60.0 * DUE_COUNT,
        restart_s_max=random.choice((1.0, 90.0)), away_at_s=100.0, away_s=random.choice((0.0, 0.0, 170.0)),
    )  # fmt: skip
    steps = random.choice((5, 30, 80))
    job = make_job(nodes=random.choice((1, 2)), steps=steps)
    job = replace(job, program=Program(steps=steps, setup_s=0.5))
    play = Play(
        overlap=random.choice(tuple(Overlap)), job=job, controller_count=random.choice((2, 3)), has_store_faults=True
    )
    return mix, play, random.random() < 0.5


def play_seed(seed: int) -> ScheduledResult:
    mix, play, is_skewed = draw_play(seed)
    return play_scheduled(seed, mix, play, is_skewed=is_skewed)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.schedules")
    parser.add_argument("--seeds", type=int, default=100, help="how many")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, help="this one only")
    parser.add_argument("--kill-at", type=int, help="in the scene of a schedule, instead of a seed")
    parser.add_argument("--overlap", type=Overlap, default=Overlap.SKIP, help="of that scene")
    parser.add_argument("--trace", action="store_true", help="print what happened")
    options = parser.parse_args()
    plays: list[tuple[str, Callable[[], ScheduledResult]]]
    if options.kill_at is not None:
        mix, play = make_scene(options.overlap)
        plays = [("scene", lambda: play_scheduled(0, mix, play, kill_at=options.kill_at))]
    else:
        seeds = [options.seed] if options.seed is not None else range(options.first, options.first + options.seeds)
        plays = [(f"--seed {seed}", lambda seed=seed: play_seed(seed)) for seed in seeds]  # type: ignore[misc]
    failing, outcomes = 0, Counter[str]()
    for label, work in plays:
        result = work()
        if options.trace:
            print("\n".join(result.trace))
        outcomes.update({outcome.value: count for outcome, count in result.outcomes.items()})
        if result.failure:
            failing += 1
            print(f"{label}: {result.failure}", flush=True)
    print(f"{len(plays)} histories, {failing} failing; due times {dict(outcomes)}")
    return int(failing > 0)


if __name__ == "__main__":
    sys.exit(main())
