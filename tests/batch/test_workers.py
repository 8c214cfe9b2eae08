"""The worker jobs of a map that are due, from the records of its jobs; its shards, and those that are finished."""

from __future__ import annotations

import pytest

from broker.batch.plan_file import MapPlan, list_changed_files
from broker.batch.splitting import SHARD_BYTES_MIN, split
from broker.batch.tally import read
from broker.batch.workers import plan_workers
from broker.storage.base import StoredKey
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
    workers = plan_workers("map", 2, known.get, left=2, retries_from=retries_from)
    assert [each.name for each in workers.submissions] == due


def make_keys(*sizes: tuple[str, int]) -> list[StoredKey]:
    return [StoredKey(key=key, size_bytes=size, modified_s=5.0) for key, size in sizes]


def test_no_more_workers_are_started_than_shards_are_left() -> None:
    workers = plan_workers("map", 8, lambda request_id: None, left=3, retries_from=1)
    assert [each.name for each in workers.submissions] == ["map-1", "map-2", "map-3"]


def test_shards_that_live_workers_may_take_start_no_further_worker() -> None:
    running = Job(id=1, name="w", status=RUNNING, task=Task(), submitted_s=0.0, uid="u1")
    find = {"map/1/1": running}.get
    assert [each.name for each in plan_workers("map", 8, find, left=3, retries_from=1).submissions] == [
        "map-2",
        "map-3",
    ]
    assert plan_workers("map", 8, find, left=1, retries_from=1).submissions == ()
    assert plan_workers("map", 1, find, left=3, retries_from=1).submissions == ()


def test_small_inputs_are_split_into_shards_that_are_worth_a_request() -> None:
    found = split(make_keys(("a.jsonl", 3 * SHARD_BYTES_MIN), ("b.png", 9), ("c.txt", 0), ("d.txt", 1)))
    sizes = [(each.file, each.end - each.start) for each in found.shards]
    assert found.files == ("a.jsonl", "d.txt") and sizes == [(0, SHARD_BYTES_MIN)] * 3 + [(1, 1)]


def test_a_shard_is_skipped_after_three_failures_unless_it_has_its_part() -> None:
    failures = [
        (f"_map/failed/{shard}/{report}", 1) for shard, times in ((0, 3), (1, 2), (2, 3)) for report in range(times)
    ]
    tally = read(make_keys(*failures, ("part-00002.jsonl", 5), ("_map/items/2.7", 0)), shards=4)
    assert (set(tally.failed), set(tally.parts), tally.items, tally.left) == ({0}, {2}, {2: 7}, 2)
    assert not tally.is_complete


def test_a_file_of_the_program_that_is_gone_has_changed() -> None:
    whole = split(make_keys(("a.txt", 1)))
    known = MapPlan(
        uid="u", input="i", program="p", lease_s=1.0, split=whole, files={"a.py": "1", "b.py": "2", "c.py": "3"}
    )
    assert list_changed_files(known, {"a.py": "1", "b.py": "9", "new.py": "4"}) == ["b.py", "c.py"]
