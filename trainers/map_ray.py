"""Process the shards of a `broker map` with Ray Data, on the Ray cluster of one gang. The first node runs it.

    python -m trainers.map_ray embed.py --batch 64        `process(items)` in embed.py, as for `trainers.map_worker`
    python -m trainers.map_ray -- ./embed.sh              one command per shard

Each row of the dataset is a shard. Ray Data keeps one actor per GPU, or per node without GPUs, and restarts the actors
of a lost node. An actor commits each shard itself by creating its part, so the parts are the checkpoint: the next
attempt maps only shards without one, and a shard that Ray maps twice has one result. BROKER_MAP names the output.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from trainers.map_leases import FAILED, PART, TRIES, MapPlan, commit_part, read_plan
from trainers.map_places import Place, open_place
from trainers.map_worker import FAILURES_MAX, ProgramError, find_file, make_program, make_report, read_lines
from trainers.preemption import EXIT_CODE_PREEMPTED, PreemptionNotice

WAVE = 10_000  # shards of one dataset: Ray Data holds an object for each of them
IN_FLIGHT = 2  # shards that an actor has at a time; those of a lost node wait until its actor runs again
Row = dict[str, Any]
MapShards = Callable[[Sequence[int]], Iterable[Row]]


def main(arguments: Sequence[str]) -> int:
    """Return 0 if no shard is left, 1 if the program keeps failing, 143 after a preemption notice."""
    parser = argparse.ArgumentParser(prog="python -m trainers.map_ray", description=__doc__.split("\n\n")[0])
    parser.add_argument("program", nargs="+", help="a Python file with `process(items)`, or a command after `--`")
    parser.add_argument("--batch", type=int, default=32, help="items per call of `process` (default: %(default)s)")
    given = parser.parse_args(arguments)
    notice = PreemptionNotice(find_file("BROKER_PREEMPTION_FILE"))
    notice.listen()
    url = os.environ["BROKER_MAP"]
    output = open_place(url)
    plan = read_plan(output)
    dataset = RayShards(url, given.program, given.batch)
    return drive(output, plan, dataset.map, is_noticed=notice.is_given)


def drive(output: Place, plan: MapPlan, map_shards: MapShards, *, is_noticed: Callable[[], bool]) -> int:
    """Map the shards that have no part, in waves, until each has one or its program has failed three times.

    `map_shards` yields the row that `ShardMapper` returns for each shard, in any order.
    """
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
    """Map and commit one shard at a time. It is made once per actor, so the program loads its model once."""

    def __init__(self, url: str, words: Sequence[str], batch: int) -> None:
        self._output = open_place(url)
        self._plan = read_plan(self._output)
        self._source = open_place(self._plan.input)
        self._run = make_program(words, batch)

    def __call__(self, row: Row) -> Row:
        """Return the row with `items`, the number of results, and `reason`, which is empty unless the program failed.

        Raises OSError if the input or output keeps failing, which Ray Data answers by ending the dataset.
        """
        number = int(row["shard"])
        try:
            results = self._run(read_lines(self._source, self._plan.shards[number]), lambda: False)
        except ProgramError as error:
            failure = {
                "worker": "ray",
                "attempt": int(os.environ.get("BROKER_ATTEMPT", 1)),
                "reason": str(error)[-2000:],
            }
            self._output.create(f"{FAILED}/{number:05d}/{uuid.uuid4().hex[:8]}", json.dumps(failure).encode())
            return {"shard": number, "items": 0, "reason": str(error)}
        commit_part(self._output, number, b"".join(each + b"\n" for each in results), items=len(results))
        return {"shard": number, "items": len(results), "reason": ""}


class RayShards:
    """Shards as rows of datasets on the gang's Ray cluster."""

    def __init__(self, url: str, words: Sequence[str], batch: int) -> None:
        from trainers.bridge_ray import connect

        connect()
        gpus = int(os.environ.get("SKYPILOT_NUM_GPUS_PER_NODE", 0))
        self._actors = int(os.environ.get("SKYPILOT_NUM_NODES", 1)) * max(1, gpus)
        self._resources = {"num_gpus": 1} if gpus else {"num_cpus": 1}
        self._arguments = (url, list(words), batch)

    def map(self, shards: Sequence[int]) -> Iterator[Row]:
        """Yield a row for each shard when it has been mapped."""
        import ray

        rows = [{"shard": number} for number in shards]
        pool = ray.data.ActorPoolStrategy(min_size=1, max_size=self._actors, max_tasks_in_flight_per_actor=IN_FLIGHT)
        # A block for each row: an actor returns a shard's row when the shard is done, and a lost one repeats only that.
        dataset = ray.data.from_items(rows, override_num_blocks=len(rows)).map(
            ShardMapper, fn_constructor_args=self._arguments, compute=pool, **self._resources
        )
        yield from dataset.iter_rows()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
