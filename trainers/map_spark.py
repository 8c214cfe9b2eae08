"""Process the shards of a `broker map` on the Spark executors of one gang. The first node runs it.

    python -m trainers.map_spark embed.py --batch 64      `process(items)` in embed.py, as for `trainers.map_worker`
    python -m trainers.map_spark -- ./embed.sh            one command per shard

Each shard is a partition, which Spark gives to another executor if its own is lost. An executor starts in a folder of
its own; MAP_FOLDER is the folder on its node with the program. BROKER_MAP names the output.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator, Sequence

from pyspark.accumulators import AccumulatorParam
from pyspark.sql import SparkSession

from trainers.map_engine import Row, get_mapper, run_driver

POLL_S = 0.2


class RowList(AccumulatorParam[list[Row]]):
    """Collects the rows of finished partitions in the driver; Spark adds those of a repeated partition once."""

    def zero(self, value: list[Row]) -> list[Row]:
        """Return the rows before the first partition."""
        return []

    def addInPlace(self, value1: list[Row], value2: list[Row]) -> list[Row]:  # noqa: N802 - Spark's name
        """Return the rows of both."""
        return value1 + value2


class SparkShards:
    """Shards as partitions of jobs on the gang's Spark cluster."""

    def __init__(self, url: str, words: Sequence[str], batch: int, /) -> None:
        self._context = SparkSession.builder.appName("map").getOrCreate().sparkContext
        self._arguments = (url, tuple(words), batch)

    def __call__(self, shards: Sequence[int]) -> Iterator[Row]:
        """Yield a row for each shard when it has been mapped. Raises what ended Spark's job."""
        rows = self._context.accumulator([], RowList())
        arguments = self._arguments
        failures: list[Exception] = []

        def run() -> None:
            try:
                partitions = self._context.parallelize(shards, len(shards))
                partitions.foreach(lambda number: rows.add([map_shard(number, *arguments)]))
            except Exception as error:
                failures.append(error)

        job = threading.Thread(target=run, daemon=True)
        job.start()
        seen = 0
        while True:
            is_over = not job.is_alive()  # before the rows are read: none comes after the end
            found = rows.value
            yield from found[seen:]
            seen = len(found)
            if is_over:
                break
            job.join(POLL_S)
        if failures:
            raise failures[0]


def map_shard(number: int, url: str, words: tuple[str, ...], batch: int) -> Row:
    """Map a shard on an executor."""
    os.chdir(os.environ["MAP_FOLDER"])
    return get_mapper("spark", url, words, batch)({"shard": number})


if __name__ == "__main__":
    sys.exit(run_driver("trainers.map_spark", sys.argv[1:], SparkShards))
