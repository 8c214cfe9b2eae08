"""The parts of `trainers.map_ray`, `map_dask` and `map_spark` that need no engine: workers are calls in this process.

`python -m tests.frameworks.map_engines` runs them on their engines, with losses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from broker.app.mapping import MapRequest
from broker.batch import tally
from broker.errors import UsageError
from broker.storage import open_bucket
from broker.task.loader import load_tasks_text
from tests.batch.test_map_worker import begin, read_results, run_worker
from trainers import map_worker
from trainers.map_engine import Row, ShardMapper, drive, list_pending
from trainers.map_leases import read_plan
from trainers.map_places import open_place
from trainers.preemption import EXIT_CODE_PREEMPTED

PROGRAM = """\
def process(items):
    assert "bad" not in items, "bad item"
    return [each + 1 for each in items]
"""
LINES = b"".join(b"%d\n" % number for number in range(10, 50))


class WorkerPool:
    """Workers that map shards in turn; `each` is called after each of them."""

    def __init__(self, folder: Path, *, each: Callable[[int], None] = lambda number: None) -> None:
        (folder / "program.py").write_text(PROGRAM)
        self.mapped: list[int] = []
        self._mapper = ShardMapper("ray", f"file://{folder}/out", [str(folder / "program.py")], 4)
        self._each = each

    def __call__(self, shards: Sequence[int]) -> Iterator[Row]:
        for number in reversed(shards):  # an engine yields rows in any order
            self.mapped.append(number)
            row = self._mapper({"shard": number})
            self._each(number)
            yield row


def run(folder: Path, pool: WorkerPool, is_noticed: Callable[[], bool] = lambda: False) -> int:
    place = open_place(f"file://{folder}/out")
    return drive(place, read_plan(place), pool, is_noticed=is_noticed)


def test_an_engine_and_the_lease_workers_write_the_same_parts(tmp_path: Path) -> None:
    parts = []
    for name in ("engine", "leases"):
        folder = tmp_path / name
        folder.mkdir()
        plan, place = begin(f"file://{folder}", LINES, shard_bytes=12)
        pool = WorkerPool(folder)
        if name == "engine":
            assert run(folder, pool) == 0
        else:
            run_program = map_worker.make_program([str(folder / "program.py")], 4)
            assert run_worker(place, run_program) == 0
        found = tally.take(open_bucket(f"file://{folder}/out"), plan)
        assert found.is_complete and sum(found.items.values()) == 40
        parts.append({path.name: path.read_bytes() for path in (folder / "out").glob("part-*")})
    assert parts[0] == parts[1] and len(parts[0]) == 10


def test_the_next_attempt_maps_only_shards_without_a_part(tmp_path: Path) -> None:
    plan, _ = begin(f"file://{tmp_path}", LINES, shard_bytes=12)

    def lose_driver(number: int) -> None:
        if number == 5:
            raise ConnectionError("the head is gone")

    first = WorkerPool(tmp_path, each=lose_driver)
    with pytest.raises(ConnectionError):
        run(tmp_path, first)
    second = WorkerPool(tmp_path)
    assert run(tmp_path, second) == 0
    assert first.mapped == [9, 8, 7, 6, 5] and second.mapped == [4, 3, 2, 1, 0]
    assert read_results(f"file://{tmp_path}") == list(range(11, 51))
    assert tally.take(open_bucket(f"file://{tmp_path}/out"), plan).is_complete


def test_a_shard_that_is_mapped_twice_has_one_result(tmp_path: Path) -> None:
    begin(f"file://{tmp_path}", LINES, shard_bytes=12)
    pool = WorkerPool(tmp_path)
    assert [row["items"] for row in pool([3])] == [4]
    (part,) = (tmp_path / "out").glob("part-*")
    part.write_bytes(b"first\n")
    list(pool([3]))
    assert part.read_bytes() == b"first\n"
    assert len(list((tmp_path / "out/_map/items").iterdir())) == 1


def test_a_notice_ends_the_driver_and_keeps_the_parts(tmp_path: Path) -> None:
    begin(f"file://{tmp_path}", LINES, shard_bytes=12)
    pool = WorkerPool(tmp_path)
    assert run(tmp_path, pool, lambda: len(pool.mapped) == 3) == EXIT_CODE_PREEMPTED
    assert list_pending(open_place(f"file://{tmp_path}/out"), 10) == list(range(7))


def test_a_shard_on_which_the_program_fails_three_times_is_left_out(tmp_path: Path) -> None:
    plan, _ = begin(f"file://{tmp_path}", b'1\n2\n"bad"\n4\n', shard_bytes=2)
    pool = WorkerPool(tmp_path)
    assert run(tmp_path, pool) == 0
    found = tally.take(open_bucket(f"file://{tmp_path}/out"), plan)
    (number,) = found.failed
    assert pool.mapped.count(number) == 3 and found.left == 0
    bucket = open_bucket(f"file://{tmp_path}/out")
    assert tally.explain_failures(bucket, found) == ["AssertionError: bad item"]
    bucket.write(found.failed[number][0], b'{"reason": "a truncated rep')
    assert tally.explain_failures(bucket, found) == ["unknown"], "a damaged report does not end the command"


def test_a_program_that_fails_on_every_shard_ends_the_driver(tmp_path: Path) -> None:
    begin(f"file://{tmp_path}", b'"bad"\n' * 6, shard_bytes=6)
    pool = WorkerPool(tmp_path)
    assert run(tmp_path, pool) == 1
    assert sorted(pool.mapped) == list(range(6)), "one pass: the environment is at fault rather than a shard"


@pytest.mark.parametrize("engine", ["ray", "dask", "spark"])
def test_an_engine_takes_its_nodes_from_the_task(engine: str) -> None:
    def ask(program: str, workers: int | None) -> MapRequest:
        text = f"run: python -m trainers.{program} x.py\n"
        (task,) = load_tasks_text(text, "task.yaml")
        return MapRequest(task=task, input="in", output="out", workers=workers)

    assert ask("map_worker", None).worker_count == 4 and ask("map_worker", 7).worker_count == 7
    assert ask(f"map_{engine}", None).worker_count == ask(f"map_{engine}", 1).worker_count == 1
    with pytest.raises(UsageError, match="does not apply"):
        ask(f"map_{engine}", 2).worker_count  # noqa: B018
