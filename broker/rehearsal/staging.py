"""Set up a rehearsal: the task as a spot job, its market, and the nodes that this machine can run."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from broker.errors import BrokerError, UsageError
from broker.lab.traces import parse_trace
from broker.rehearsal.context import Stage
from broker.rehearsal.market import PlaceMarket, ReplayedMarket, SeededMarket
from broker.rehearsal.result import Rehearsal
from broker.rehearsal.verdict import SHOWN, list_bad
from broker.types import JobStatus, Plan, Task

PLACES_MAX = 2000  # placements of the plan whose clouds are simulated


def choose_resources(task: Task, *, note: Callable[[str], None]) -> Task:
    """Choose spot, and clouds other than `local` if the task names any: they are only simulated."""
    away = tuple(each for each in task.resources if each.cloud != "local") or task.resources
    if any(each.use_spot is False for each in away):
        note("note: the task requests on-demand; rehearsing it as a spot job")
    has_goal = task.goal is not None
    chosen = tuple(each if each.use_spot is None and has_goal else replace(each, use_spot=True) for each in away)
    return replace(task, resources=chosen)


def open_market(traces: Path | None, seed: int) -> PlaceMarket:
    """Open the traces, or a seeded market if `traces` is None.

    Raises UsageError if there are no files, SourceError for an invalid one.
    """
    if traces is None:
        return SeededMarket(seed=seed)
    files = sorted(traces.rglob("*.json")) if traces.is_dir() else [traces]
    if not files or not all(file.is_file() for file in files):
        raise UsageError(
            f"no traces (`*.json`) in `--traces {traces}`", hints=["record some with `broker traces record`"]
        )
    return ReplayedMarket(traces=tuple(parse_trace(file.read_bytes(), file.stem) for file in files), seed=seed)


def set_stage(plan: Plan, market: PlaceMarket, nodes_local: int | None, *, has_given_speed: bool) -> Stage:
    """Simulate all clouds of the plan, and no more nodes than this machine can run."""
    task = lift_stall_limit(plan.task)
    limit = nodes_local or max(2, os.cpu_count() or 1)
    return Stage(
        task=task,
        node_count=min(task.num_nodes, limit),
        clouds=frozenset(each.placement.offer.cloud for each in plan.estimates[:PLACES_MAX]),
        market=market,
        has_given_speed=has_given_speed,
    )


def lift_stall_limit(task: Task) -> Task:
    """Remove `stall_timeout`, which would count simulated time, in which a step takes hours."""
    return replace(task, recovery=replace(task.recovery, stall_timeout_s=None))


def raise_failure(result: Rehearsal, preemptions: int, *, is_shown: bool) -> None:
    """Raise BrokerError if the run failed, or was not preempted as requested.

    `is_shown`: the findings are on the screen already, with their hints.
    """
    bad = list_bad(result.findings)
    hints = [each.hint for each in bad if each.hint and not is_shown]
    if result.status is not JobStatus.SUCCEEDED:
        raise BrokerError(f"the job ended with status {result.status.value}: {result.failure}", hints=hints)
    if result.preemptions < preemptions:
        raise BrokerError(
            f"the job finished after {result.preemptions} of {preemptions} preemptions",
            hints=["use a longer task, and report its steps in `$BROKER_PROGRESS_FILE`"],
        )
    if bad:
        raise BrokerError(SHOWN if is_shown else bad[0].text, hints=hints)
