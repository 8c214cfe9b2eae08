"""Invariants of program starts: one attempt of a job at a time, a whole gang, and never after the job's end."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import TYPE_CHECKING

from broker.jobs.node_health import ROW as UNHEALTHY
from broker.types import JobStatus, OutcomeKind
from tests.simulation.events import TERMINAL, Event, Violation

DEATHS_MAX = 3  # as docs/RECOVERY.md promises

if TYPE_CHECKING:
    from tests.simulation.universe import Universe


def check_s4_one_active_attempt(universe: Universe, event: Event) -> None:
    """Check that no attempt of a job starts while another works, and that their numbers grow."""
    run = event.run
    assert run is not None
    roots = universe.gang.roots
    for old in universe.gang.runs.values():
        if old is run or roots.get(old.job, old.job) != roots.get(run.job, run.job):
            continue
        if universe.gang.is_working(old):
            raise Violation("S4", f"{old.cluster} still works while {run.cluster} starts")
        if old.attempt >= run.attempt:
            raise Violation("S4", f"attempt {run.attempt} of job {run.job} starts after attempt {old.attempt}")


def check_s7_no_start_after_the_end(universe: Universe, event: Event) -> None:
    """Check that an ended job does not run again, even by a leader stopped meanwhile: its nodes are gone by then."""
    assert event.run is not None
    status = universe.read("SELECT status FROM jobs WHERE id = ?", (event.run.job,))[0][0]
    if status in TERMINAL:
        raise Violation("S7", f"job {event.run.job} is {status} and its program starts on {event.run.cluster}")


def check_s7_no_start_after_success(universe: Universe, event: Event) -> None:
    """Check that an attempt recorded as succeeded is the last: its outcome and the job's end are one commit."""
    assert event.run is not None
    for number, kind in universe.read("SELECT number, outcome_kind FROM attempts WHERE job_id = ?", (event.run.job,)):
        if kind == OutcomeKind.SUCCEEDED:
            raise Violation("S7", f"attempt {number} has succeeded and {event.run.cluster} starts after it")


def check_s7_no_start_after_a_cancel(universe: Universe, event: Event) -> None:
    """Check that no job starts well after its cancel was acknowledged to a user."""
    run = event.run
    assert run is not None
    asked_s = universe.memory.get("cancels", {}).get(run.job, math.inf)
    was_stopped = event.process is not None and event.process.was_stopped
    if event.time_s - asked_s > universe.mix.poll_s + 1.0 and not was_stopped:  # the next life begins with the cancel
        late_s = event.time_s - asked_s
        raise Violation("S7", f"{run.cluster} starts {late_s:.0f} s after job {run.job} was to be cancelled")


def check_whole_gang(universe: Universe, event: Event) -> None:
    """Check that a program starts on as many nodes as its task asks for, all of one zone."""
    run = event.run
    assert run is not None
    wanted = universe.tasks[run.job].num_nodes
    zones = {node.zone for node in universe.cloud.find(run.ids)}
    if len(set(run.ids)) != wanted or len(zones) != 1:
        raise Violation("S2", f"{run.cluster} starts on {len(run.ids)} of {wanted} nodes in {sorted(map(str, zones))}")


def check_s15_needs_come_first(universe: Universe, event: Event) -> None:
    """Check that a job of a pipeline starts when all that it needs have succeeded."""
    assert event.run is not None
    needs = json.loads(universe.read("SELECT needs FROM jobs WHERE id = ?", (event.run.job,))[0][0])
    for other in needs:
        status = universe.read("SELECT status FROM jobs WHERE id = ?", (other,))[0][0]
        if status != JobStatus.SUCCEEDED:
            raise Violation("S15", f"{event.run.cluster} starts, and job {other}, which it needs, is {status}")


def check_s17_restarts_are_bounded(universe: Universe, event: Event) -> None:
    """Check that a program that dies restarts as often as its task says, or until three deaths without headway."""
    run = event.run
    assert run is not None
    restarts_max = universe.tasks[run.job].recovery.max_restarts_on_errors
    rows = universe.read(
        "SELECT number, (SELECT max(max(last_step, coalesce(checkpoint_step, 0))) FROM attempt_steps AS steps "
        "WHERE steps.job_id = attempts.job_id AND steps.number <= attempts.number) FROM attempts "
        "WHERE job_id = ? AND outcome_kind = ? ORDER BY number",
        (run.job, OutcomeKind.PROGRAM_FAILED.value),
    )
    deaths = [reached or 0 for _, reached in rows]
    if restarts_max is not None and len(deaths) > restarts_max:
        raise Violation("S17", f"{run.cluster} starts after {len(deaths)} deaths; {restarts_max} restarts are allowed")
    if restarts_max is None and deaths and max(Counter(deaths).values()) >= DEATHS_MAX:
        raise Violation("S17", f"{run.cluster} starts after deaths at steps {deaths}")
    if restarts_max is None and 0 in deaths:
        raise Violation("S17", f"{run.cluster} starts, and its program died before its first step")


def check_s19_broken_gpus_are_left(universe: Universe, event: Event) -> None:
    """Check that no program starts on a node whose GPUs have failed a check.

    A gang may be lost before its check is read, and a broker may be killed before it records what it read.
    """
    assert event.run is not None
    rows = universe.read("SELECT value FROM meta WHERE key = ?", (UNHEALTHY,))
    known = rows[0]["value"] if rows else ""
    sick = [
        each
        for each in event.run.ids
        if each in universe.gang.reported_sick and (f'"{each}"' in known or not universe.kills)
    ]
    if sick:
        raise Violation("S19", f"{event.run.cluster} starts on {sick[0]}, which has a broken GPU")


def check_s7_deaths_are_true(universe: Universe, event: Event) -> None:
    """Check that a recorded exit code is the program's own, and not of a rank whose peer's machine was lost."""
    if "attempts" not in event.written:
        return
    known = universe.memory.setdefault("deaths", set())
    for key in universe.read(
        "SELECT job_id, number FROM attempts WHERE outcome_kind = ?", (OutcomeKind.PROGRAM_FAILED.value,)
    ):
        runs = universe.gang.runs_by_job.get(key[0], ())
        run = next((each for each in runs if each.attempt == key[1]), None)
        if key not in known and run is not None and not universe.gang.has_died(run):
            raise Violation("S7", f"attempt {key[1]} of job {key[0]} counts as failed, and its program did not fail")
        known.add(key)


def note_moves(universe: Universe, event: Event) -> None:
    """Note that a job is moved to another place, displaced, or restarted with its group, while it works."""
    if "attempts" in event.written and (universe.follows_deadline or universe.has_groups or universe.displaces):
        moved = universe.memory.setdefault("moved", set())
        for (cluster,) in universe.read(
            "SELECT json_extract(body, '$.cluster') FROM attempts WHERE outcome_kind IN (?, ?, ?, ?)",
            (
                OutcomeKind.MOVED.value,
                OutcomeKind.GROUP_MOVED.value,
                OutcomeKind.GROUP_RESTARTED.value,
                OutcomeKind.DISPLACED.value,
            ),
        ):
            if cluster not in moved:
                moved.add(cluster)
                universe.note_fault("move", cluster)
