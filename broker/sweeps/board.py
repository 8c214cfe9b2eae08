"""Decide the next step of a sweep from its state. Pure: a command that was killed and rerun decides the same."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import field, replace
from typing import Literal

from broker.errors import StateError
from broker.frozen import frozen
from broker.sweeps.asha import Records, list_rungs, record
from broker.types import Job, JobStatus

Early = Literal["none", "asha"]
FAILURES_MAX = 3  # runs whose program failed, after which no further run starts if none has ever worked
FAILED = (JobStatus.FAILED, JobStatus.FAILED_SETUP)


@frozen
class Board:
    """The record of a sweep, in addition to its jobs: the losses at rungs, and the runs that it stopped at a step."""

    records: Records = field(default_factory=dict)
    stopped: Mapping[int, int] = field(default_factory=dict)


@frozen
class SweepStep:
    """The next actions, and the board to store before they are carried out."""

    board: Board
    starts: tuple[int, ...]
    stops: tuple[int, ...]
    is_over: bool


def decide(
    board: Board, jobs: Mapping[int, Job], *, runs: int, parallel: int, early: Early, is_closed: bool = False
) -> SweepStep:
    """Record new losses, choose runs to stop, and fill free slots with runs in order; a closed sweep starts none."""
    if early == "asha":
        for run, job in sorted(jobs.items()):
            board = _observe(board, run, job)
    live = {run for run, job in jobs.items() if not job.status.is_terminal}
    stops = tuple(sorted(run for run in live if run in board.stopped and not jobs[run].cancel_requested))
    busy = len(live - set(board.stopped))  # the machines of a stopped run are being terminated
    waiting = [] if is_closed else [run for run in range(runs) if run not in jobs]
    starts = tuple(waiting[: max(0, parallel - busy)])
    return SweepStep(board=board, starts=starts, stops=stops, is_over=not live and not waiting)


def is_cancelled(board: Board, jobs: Mapping[int, Job], *, before: Collection[int]) -> bool:
    """Return whether the user has cancelled the sweep: all runs that were live `before` and have not ended otherwise.

    Without this, `broker jobs cancel` would make room for the next runs. One cancelled run of several does so.
    """
    left = [jobs[run] for run in before if run not in board.stopped]
    left = [job for job in left if not job.status.is_terminal or job.status is JobStatus.CANCELLED]
    return bool(left) and all(job.cancel_requested or job.status is JobStatus.CANCELLED for job in left)


def list_failures(jobs: Mapping[int, Job], *, after: int) -> Sequence[Job]:
    """Return the failed runs if they are many and no run has worked, so that the program is at fault; else none.

    Only jobs with an ID above `after` count: those that the current command started.
    """
    if any(job.status is JobStatus.SUCCEEDED or job.progress is not None for job in jobs.values()):
        return ()
    failed = [job for job in jobs.values() if job.status in FAILED and job.id > after]
    return failed if len(failed) >= FAILURES_MAX else ()


def _observe(board: Board, run: int, job: Job) -> Board:
    progress = job.progress
    if run in board.stopped or progress is None or not progress.total:
        return board
    loss = math.nan if progress.is_diverged else progress.loss
    if loss is None:
        return board
    rungs = list_rungs(progress.total)
    records, is_kept = record(board.records, rungs, run, progress.step, loss)
    board = replace(board, records=records)
    if is_kept or job.status.is_terminal:
        return board
    return replace(board, stopped={**board.stopped, run: progress.step})


def rank(jobs: Mapping[int, Job], stopped: Mapping[int, int]) -> Sequence[int]:
    """Order runs: finished ones by loss, then running and stopped ones by the step they reached, then failed ones."""

    def key(run: int) -> tuple[int, float, float, int]:
        job = jobs[run]
        progress = job.progress
        step = progress.step if progress else 0
        loss = progress.loss if progress and progress.loss is not None else math.inf
        if job.status is JobStatus.SUCCEEDED:
            group = 0
        elif run in stopped or not job.status.is_terminal:
            group = 1
        else:
            group = 2
        return group, 0.0 if group == 0 else -step, math.inf if math.isnan(loss) else loss, run

    return sorted(jobs, key=key)


def find_best(jobs: Mapping[int, Job]) -> int | None:
    """Return the finished run with the lowest loss; None if none has finished with a loss."""
    found = [
        (job.progress.loss, run)
        for run, job in jobs.items()
        if job.status is JobStatus.SUCCEEDED and job.progress and job.progress.loss is not None
    ]
    return min((each for each in found if not math.isnan(each[0])), default=(0.0, None))[1]


def encode(board: Board) -> str:
    """Return the board as JSON text, which `decode` reads."""
    return json.dumps({"records": board.records, "stopped": board.stopped})


def decode(text: str | None) -> Board:
    """Read a board; an empty one for None. Raises StateError if it is damaged."""
    if text is None:
        return Board()
    try:
        read = json.loads(text)
        return Board(
            records={
                int(rung): {int(run): float(loss) for run, loss in losses.items()}
                for rung, losses in read["records"].items()
            },
            stopped={int(run): int(step) for run, step in read["stopped"].items()},
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StateError(f"the record of the sweep is damaged: {error}") from error
