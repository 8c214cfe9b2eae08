"""Describe how a run ended, from its gang's report or the result in the bucket."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from broker.frozen import frozen
from broker.jobs.log_files import read_last_lines
from broker.state.store import Store
from broker.types import Attempt, ObservedCheckpoints, Progress


@frozen
class RunEnd:
    """The end of a run.

    `failed_rank`: the rank whose program failed first, which printed the last lines. `is_whole`: every node is running
    and responds, so the next attempt may reuse them. `unflushed`: the program succeeded, and this is the reason why
    files that it wrote were not uploaded. `checkpoints`: the checkpoint folder, if the head can list one.
    """

    returncode: int | None = None
    reason: str = ""
    progress: Progress | None = None
    failed_rank: int | None = None
    last_lines: tuple[str, ...] = ()
    is_whole: bool = False
    unflushed: str = ""
    checkpoints: ObservedCheckpoints | None = None


class ReportsEnd(Protocol):
    """A gang's report, or a result in the bucket."""

    @property
    def returncode(self) -> int | None:
        """Exit code of the first failed program; None if none exited."""

    @property
    def reason(self) -> str:
        """The reason for the run's end, if the node knows more than the status shows; otherwise empty."""

    @property
    def failed_rank(self) -> int | None:
        """Rank that failed first; None if it is unknown."""

    @property
    def unflushed(self) -> str:
        """Description of files that did not reach their mounted bucket; empty if all did."""


def read_run_end(
    store: Store,
    logs: Path,
    *,
    attempt: Attempt,
    report: ReportsEnd,
    progress: Progress | None,
    is_whole: bool = False,
    checkpoints: ObservedCheckpoints | None = None,
) -> RunEnd:
    """Return the end of a run with the last lines of the log, which the caller must copy first."""
    lines = read_last_lines(store, logs, attempt=attempt, rank=report.failed_rank)
    return RunEnd(
        returncode=report.returncode,
        reason=report.reason,
        progress=progress,
        failed_rank=report.failed_rank,
        last_lines=tuple(lines),
        is_whole=is_whole,
        unflushed=report.unflushed,
        checkpoints=checkpoints,
    )
