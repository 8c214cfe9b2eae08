"""The worker jobs of a map that are due, from the records of its jobs."""

from __future__ import annotations

import pytest

from broker.batch.workers import plan_crew
from broker.types import Job, JobStatus, Task

RUNNING, SUCCEEDED, CANCELLED = JobStatus.RUNNING, JobStatus.SUCCEEDED, JobStatus.CANCELLED


@pytest.mark.parametrize(
    ("jobs", "retries_from", "due"),
    [
        ({}, 1, ["map-1", "map-2"]),
        ({1: (SUCCEEDED, 5.0), 2: (RUNNING, None)}, 1, []),
        ({1: (SUCCEEDED, 5.0), 2: (SUCCEEDED, 6.0)}, 1, ["map-1", "map-2"]),
        # `broker jobs cancel map` while the command follows it: nothing starts in their place
        ({1: (SUCCEEDED, 5.0), 2: (CANCELLED, 9.0)}, 1, []),
        ({1: (CANCELLED, 9.0)}, 1, []),
        # one worker was cancelled, and the others have continued: its shard is left
        ({1: (SUCCEEDED, 9.0), 2: (CANCELLED, 5.0)}, 1, ["map-1"]),
        # the same command again
        ({1: (SUCCEEDED, 5.0), 2: (CANCELLED, 9.0)}, 3, ["map-1", "map-2"]),
    ],
)
def test_cancelled_workers_are_replaced_by_the_next_command_only(
    jobs: dict[int, tuple[JobStatus, float | None]], retries_from: int, due: list[str]
) -> None:
    known = {
        f"map/{number}/1": Job(
            id=number, name="w", status=status, task=Task(), submitted_s=0.0, ended_s=ended_s, uid=f"u{number}"
        )
        for number, (status, ended_s) in jobs.items()
    }
    crew = plan_crew("map", 2, known.get, left=2, retries_from=retries_from)
    assert [each.name for each in crew.submissions] == due
