"""Process the shards of a `broker map` on an engine that spreads them over the nodes of one gang: Ray, Dask, Spark.

The first node runs the driver. The engine calls `ShardMapper` on its workers, which commits each shard itself by
creating its part. So the parts are the checkpoint: the next attempt maps only shards without one, and a shard that an
engine maps twice has one result.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from trainers.map_leases import FAILED, PART, TRIES, MapPlan, commit_part, read_plan
from trainers.map_places import Place, open_place
from trainers.map_worker import FAILURES_MAX, ProgramError, find_file, make_program, make_report, read_lines
from trainers.preemption import EXIT_CODE_PREEMPTED, PreemptionNotice

WAVE = 10_000  # shards that an engine has at a time: its driver holds an object for each of them
Row = dict[str, Any]
MapShards = Callable[[Sequence[int]], Iterable[Row]]  # yields what `ShardMapper` returns for each shard, in any order
OpenEngine = Callable[[str, Sequence[str], int], MapShards]  # takes output URL, program words, batch


def run_driver(name: str, arguments: Sequence[str], open_engine: OpenEngine) -> int:
    """Return 0 if no shard is left, 1 if the program keeps failing, 143 after a preemption notice."""
    parser = argparse.ArgumentParser(prog=f"python -m {name}", description=__doc__.split("\n\n")[0])
    parser.add_argument("program", nargs="+", help="a Python file with `process(items)`, or a command after `--`")
    parser.add_argument("--batch", type=int, default=32, help="items per call of `process` (default: %(default)s)")
    given = parser.parse_args(arguments)
    notice = PreemptionNotice(find_file("BROKER_PREEMPTION_FILE"))
    notice.listen()
    url = os.environ["BROKER_MAP"]
    output = open_place(url)
    plan = read_plan(output)
    return drive(output, plan, open_engine(url, given.program, given.batch), is_noticed=notice.is_given)


def drive(output: Place, plan: MapPlan, map_shards: MapShards, *, is_noticed: Callable[[], bool]) -> int:
    """Map the shards that have no part, in waves, until each has one or its program has failed three times."""
    count = len(plan.shards)
    report = make_report(count)
    done, failed = count - len(list_pending(output, count)), 0
    has_success = False
    while pending := list_pending(output, count)[:WAVE]:
        for row in map_shards(pending):
            if is_noticed():
                return EXIT_CODE_PREEMPTED
            if reason := row["reason"]:
                print(f"shard {row['shard']}: {reason}", file=sys.stderr, flush=True)
                failed += 1
            else:
                has_success, done = True, done + 1
                report(done)
        if not has_success and failed >= FAILURES_MAX:  # the environment is at fault rather than a shard
            return 1
    return 0


def list_pending(output: Place, count: int) -> list[int]:
    """Return the shards without a part, in the input's order, except where the program has failed too often."""
    done = {int(found[1]) for name in output.list_files() if (found := PART.fullmatch(name))}
    failures: dict[int, int] = {}
    for entry in output.list_entries(FAILED):
        number = int(entry.key.split("/")[-2])
        failures[number] = failures.get(number, 0) + 1
    return [number for number in range(count) if number not in done and failures.get(number, 0) < TRIES]


class ShardMapper:
    """Map and commit one shard at a time. It is made once per worker, so the program loads its model once."""

    def __init__(self, engine: str, url: str, words: Sequence[str], batch: int) -> None:
        self._engine = engine
        self._output = open_place(url)
        self._plan = read_plan(self._output)
        self._source = open_place(self._plan.input)
        self._run = make_program(words, batch)

    def __call__(self, row: Row) -> Row:
        """Return the row with `items`, the number of results, and `reason`, which is empty unless the program failed.

        Raises OSError if the input or output keeps failing; an engine then retries or ends the map.
        """
        number = int(row["shard"])
        try:
            results = self._run(read_lines(self._source, self._plan.shards[number]), lambda: False)
        except ProgramError as error:
            failure = {
                "worker": self._engine,
                "attempt": int(os.environ.get("BROKER_ATTEMPT", 1)),
                "reason": str(error)[-2000:],
            }
            self._output.create(f"{FAILED}/{number:05d}/{uuid.uuid4().hex[:8]}", json.dumps(failure).encode())
            return {"shard": number, "items": 0, "reason": str(error)}
        commit_part(self._output, number, b"".join(each + b"\n" for each in results), items=len(results))
        return {"shard": number, "items": len(results), "reason": ""}


@functools.lru_cache(maxsize=1)
def get_mapper(engine: str, url: str, words: tuple[str, ...], batch: int) -> ShardMapper:
    """Return the mapper of this process, for engines whose workers run functions rather than actors."""
    return ShardMapper(engine, url, words, batch)
