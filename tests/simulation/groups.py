"""Job groups in histories: drawn groups, and the invariants of their starts, moves and ends (G1 to G7)."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Any

from broker.types import GroupRole, JobStatus, OnLoss, OutcomeKind
from tests.simulation.events import TERMINAL, Event, Violation
from tests.simulation.mixes import JobSpec, Mix, draw_job, draw_mix

if TYPE_CHECKING:
    from tests.simulation.machines import MachineRun
    from tests.simulation.universe import Universe

STALE_S = 180.0  # after the last fault, programs have the present addresses within this time
MOVE_S_MIN = 890.0  # a running group stays where it is for about as long as docs/GROUPS.md promises
ENDLESS = 100_000  # steps of an auxiliary task that waits to be ended


def draw_group_mix(random: Random) -> Mix:
    """Draw the faults of a history, and one group of two or three tasks in place of its jobs."""
    mix = draw_mix(random)
    count = random.choice((2, 2, 3))
    primaries = random.randint(1, count)
    delay_s = random.choice((0.0, 10.0, 60.0))
    is_connected = random.random() < 0.8
    submit_s = random.uniform(0.0, 30.0)
    specs = []
    for index in range(count):
        role = GroupRole(
            name="rl",
            is_primary=index < primaries,
            on_loss=random.choice(tuple(OnLoss)),
            termination_delay_s=delay_s,
            is_connected=is_connected,
        )
        specs.append(_join(random, replace(draw_job(random), submit_s=submit_s), index, role))
    return replace(mix, jobs=tuple(specs), retries_group=random.random() < 0.5)


def _join(random: Random, spec: JobSpec, index: int, role: GroupRole) -> JobSpec:
    """Return the spec as a task of the group, without limits of its own, which would always end the group early."""
    program = spec.program
    if not role.is_primary and random.random() < 0.7:
        program = replace(program, steps=ENDLESS, exit_codes=(), deaths=())
    recovery = replace(spec.task.recovery, strategy=random.choice((None, "failover", "cheapest")))
    if random.random() < 0.6:
        recovery = replace(recovery, nodes_min=None)
    task = replace(spec.task, name=f"task-{index}", group=role, goal=None, pipeline="rl", recovery=recovery)
    cancel_s = spec.cancel_s if random.random() < 0.3 else math.inf
    return replace(spec, task=task, program=program, cancel_s=cancel_s)


def check_g1_the_group_is_up(universe: Universe, event: Event) -> None:
    """Check that a generation begins when all its tasks are set up, in one region, and no earlier program works."""
    run = event.run
    assert run is not None
    own: Any = run.peers["tasks"]
    if len(own[universe.tasks[run.job].name]["addresses"]) != universe.tasks[run.job].num_nodes:
        raise Violation("G5", f"{run.cluster} starts without its own addresses")
    generation, group = _find_generation(universe, run), _find_group(universe, run.job)
    opened = universe.memory.setdefault("G1", set())
    if (group, generation) in opened:
        return
    opened.add((group, generation))
    runs = [run]
    for job_id, attempt, of in _list_live(universe):
        if job_id == run.job:
            continue
        found = _find_run(universe, job_id, attempt)
        if found is None or of != generation or event.time_s < found.started_s + found.program.setup_s:
            raise Violation("G1", f"{run.cluster} starts generation {generation}, and job {job_id} is not set up")
        runs.append(found)
    for old in universe.gang.runs.values():
        is_live = universe.read(f"SELECT 1 FROM jobs WHERE id = ? AND status NOT IN {TERMINAL}", (old.job,))
        if is_live and universe.gang.is_working(old) and _find_generation(universe, old) < generation:
            raise Violation("G2", f"{old.cluster} still works, and generation {generation} starts")
    regions = {node.zone[:-1] for each in runs for node in universe.cloud.find(each.ids) if node.zone}
    role = universe.tasks[run.job].group
    if role is not None and role.is_connected and len(regions) > 1:
        raise Violation("G4", f"generation {generation} starts in {sorted(regions)}")


def check_g3_ends_have_a_cause(universe: Universe, event: Event) -> None:
    """Check that a task is ended with its group only when all primary tasks succeeded, or a required one failed."""
    if "jobs" not in event.written or not universe.has_groups:
        return
    jobs = {row[0]: row[1:] for row in universe.read("SELECT id, status, outcome_kind, pipeline FROM jobs")}
    for job_id, (_, kind, group) in jobs.items():
        others = [each for each in jobs if each != job_id and jobs[each][2] == group]
        roles = {each: universe.tasks[each].group for each in others if each in universe.tasks}
        if kind == OutcomeKind.GROUP_ENDED:
            late = [each for each, role in roles.items() if role and role.is_primary and jobs[each][0] != "SUCCEEDED"]
            if late:
                raise Violation("G3", f"job {job_id} ended with its group, and job {late[0]} is {jobs[late[0]][0]}")
        if kind == OutcomeKind.DEPENDENCY_FAILED:
            has_opened = any(opened == group for opened, _ in universe.memory.get("G1", ()))
            failed = [
                each
                for each, role in roles.items()
                if role and jobs[each][0] in TERMINAL and jobs[each][0] != JobStatus.SUCCEEDED
                if role.is_required or not has_opened or each in universe.memory.get("failed early", ())
            ]
            universe.memory.setdefault("failed early", set()).update(failed)
            if not failed:
                raise Violation("G3", f"job {job_id} failed with its group, and no other task has failed")


def check_g6_delays_are_kept(universe: Universe, event: Event) -> None:
    """Check that an auxiliary task is ended after its termination delay, where the broker's clock is true."""
    if "jobs" not in event.written or not universe.has_groups or not universe.mix.is_clock_true:
        return
    ended_s: dict[int, float] = universe.memory.setdefault("G6", {})
    for job_id, kind, group in universe.read(f"SELECT id, outcome_kind, pipeline FROM jobs WHERE status IN {TERMINAL}"):
        if job_id in ended_s:
            continue
        ended_s[job_id] = event.time_s
        role = universe.tasks[job_id].group if kind == OutcomeKind.GROUP_ENDED else None
        if role is None:
            continue
        rows = universe.read("SELECT id FROM jobs WHERE pipeline = ?", (group,))
        primaries = [each for (each,) in rows if (found := universe.tasks[each].group) and found.is_primary]
        waited_s = event.time_s - max(ended_s[each] for each in primaries)
        if waited_s < role.termination_delay_s - 0.001:
            raise Violation("G6", f"job {job_id} is ended after {waited_s:.0f} of {role.termination_delay_s:.0f} s")


def check_g7_running_groups_stay(universe: Universe, event: Event) -> None:
    """Check that a task whose program runs is moved only when another one has long been without machines."""
    if "attempts" not in event.written or not universe.has_groups or not universe.mix.is_clock_true:
        return
    since_s: dict[int, float] = universe.memory.setdefault("G7", {})
    moved: set[tuple[int, int]] = universe.memory.setdefault("G7 moved", set())
    lacking = {job_id for job_id, attempt, _ in _list_live(universe) if not _has_machines(universe, job_id, attempt)}
    rows = universe.read(
        "SELECT job_id, number, body FROM attempts WHERE outcome_kind = ?", (OutcomeKind.GROUP_MOVED.value,)
    )
    for job_id, number, body in rows:
        if (job_id, number) in moved:
            continue
        moved.add((job_id, number))
        longest_s = max((event.time_s - since_s[each] for each in lacking & set(since_s) - {job_id}), default=0.0)
        if json.loads(body)["released_s"] is not None and longest_s < MOVE_S_MIN:
            raise Violation("G7", f"job {job_id} moves while it runs; another lacks machines for {longest_s:.0f} s")
    universe.memory["G7"] = {each: since_s.get(each, event.time_s) for each in lacking}


def _has_machines(universe: Universe, job_id: int, attempt: int) -> bool:
    rows = universe.read("SELECT outcome_kind FROM attempts WHERE job_id = ? AND number = ?", (job_id, attempt))
    return bool(rows) and rows[0][0] is None


def check_g5_addresses_are_fresh(universe: Universe, event: Event) -> None:
    """Check that after the last fault no program keeps addresses that are no longer true."""
    if not universe.has_groups or not universe.is_healed or universe.mix.leaves_broker_dead:
        return
    since_s: dict[str, float] = universe.memory.setdefault("G5", {})
    live = {job_id: _find_run(universe, job_id, attempt) for job_id, attempt, _ in _list_live(universe)}
    for job_id, run in live.items():
        if run is None or math.isinf(run.released_s) or not universe.gang.is_working(run):
            continue
        known: Any = run.peers["tasks"]
        for other_id, other in live.items():
            name = universe.tasks[other_id].name
            key = f"{job_id} {run.attempt} {name}"
            is_true = other is None or math.isinf(other.released_s) or not universe.gang.is_working(other)
            if not is_true and other is not None:
                last = {each.rank: each.id for each in other.members}
                nodes = universe.cloud.find([last[rank] for rank in sorted(last)])
                is_true = known[name]["addresses"] == [node.address for node in nodes]
            begun_s = since_s.setdefault(key, event.time_s)
            if is_true:
                del since_s[key]
            elif event.time_s - max(begun_s, universe.healed_s) > STALE_S:
                raise Violation("G5", f"{run.cluster} has had old addresses of {name} for {STALE_S:.0f} s")


def _list_live(universe: Universe) -> list[tuple[int, int, int]]:
    """List job, number and generation of the newest attempt of each job that has not ended."""
    rows = universe.read(
        f"SELECT id, (SELECT max(number) FROM attempts WHERE job_id = jobs.id) FROM jobs WHERE status NOT IN {TERMINAL}"
    )
    found = []
    for job_id, number in rows:
        body = universe.read("SELECT body FROM attempts WHERE job_id = ? AND number = ?", (job_id, number))
        found.append((job_id, number or 0, json.loads(body[0][0])["generation"] if body else 0))
    return found


def _find_generation(universe: Universe, run: MachineRun) -> int:
    rows = universe.read("SELECT body FROM attempts WHERE job_id = ? AND number = ?", (run.job, run.attempt))
    return int(json.loads(rows[0][0])["generation"])


def _find_group(universe: Universe, job_id: int) -> str:
    """Return the name of the group that a job is part of; a retry is another group."""
    return str(universe.read("SELECT pipeline FROM jobs WHERE id = ?", (job_id,))[0][0])


def _find_run(universe: Universe, job_id: int, attempt: int) -> MachineRun | None:
    runs = universe.gang.runs_by_job.get(job_id, ())
    return next((run for run in runs if run.attempt == attempt), None)
