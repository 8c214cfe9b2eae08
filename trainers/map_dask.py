"""Process the shards of a `broker map` on the Dask workers of one gang. The first node runs it.

    python -m trainers.map_dask embed.py --batch 64       `process(items)` in embed.py, as for `trainers.map_worker`
    python -m trainers.map_dask -- ./embed.sh             one command per shard

SCHEDULER is the address of the scheduler. Each shard is a task, which Dask gives to another worker if its own is lost.
Workers must have one thread each, because a program maps one shard at a time. BROKER_MAP names the output.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence

from trainers.map_engine import Row, get_mapper, run_driver

CONNECT_S_MAX = 300  # the scheduler may still be starting, on a busy machine
RETRIES = 10  # per shard, if its input or output fails


class DaskShards:
    """Shards as tasks of a Dask cluster; its TLS settings are those of Dask's own configuration."""

    def __init__(self, url: str, words: Sequence[str], batch: int, /) -> None:
        from distributed import Client

        self._client = Client(os.environ["SCHEDULER"], timeout=CONNECT_S_MAX)
        self._arguments = {"url": url, "words": tuple(words), "batch": batch}

    def __call__(self, shards: Sequence[int]) -> Iterator[Row]:
        """Yield a row for each shard when it has been mapped."""
        from distributed import as_completed

        futures = self._client.map(map_shard, shards, pure=False, retries=RETRIES, **self._arguments)
        for future, row in as_completed(futures, with_results=True):
            future.release()
            yield row


def map_shard(number: int, *, url: str, words: Sequence[str], batch: int) -> Row:
    """Map a shard on a worker."""
    return get_mapper("dask", url, tuple(words), batch)({"shard": number})


if __name__ == "__main__":
    sys.exit(run_driver("trainers.map_dask", sys.argv[1:], DaskShards))
