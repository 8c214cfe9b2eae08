"""How a run ended, as its gang or what it left in the bucket tells it."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from broker.jobs.log_files import read_last_lines
from broker.nouns import noun
from broker.state.store import Store
from broker.types import Attempt, Progress


@noun
class RunEnd:
    """`failed_rank`: whose program was the first to end with an exit code; the last lines are of that rank. `is_whole`:
    every node runs and answers, so that the next attempt may have them. `unflushed`: the program succeeded, and this is
    why files that it wrote did not arrive."""

    returncode: int | None = None
    reason: str = ""
    progress: Progress | None = None
    failed_rank: int | None = None
    last_lines: tuple[str, ...] = ()
    is_whole: bool = False
    unflushed: str = ""


class TellsEnd(Protocol):
    """A gang's report, or an outcome that was left in the bucket."""

    @property
    def returncode(self) -> int | None: ...
    @property
    def reason(self) -> str: ...
    @property
    def failed_rank(self) -> int | None: ...
    @property
    def unflushed(self) -> str: ...


def read_run_end(
    store: Store, logs: Path, *, attempt: Attempt, told: TellsEnd, progress: Progress | None, is_whole: bool = False
) -> RunEnd:
    """With the last lines that are copied of its log: the caller copies it first."""
    lines = read_last_lines(store, logs, attempt=attempt, rank=told.failed_rank)
    return RunEnd(
        returncode=told.returncode,
        reason=told.reason,
        progress=progress,
        failed_rank=told.failed_rank,
        last_lines=tuple(lines),
        is_whole=is_whole,
        unflushed=told.unflushed,
    )
