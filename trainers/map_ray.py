"""Process the shards of a `broker map` with Ray Data, on the Ray cluster of one gang. The first node runs it.

    python -m trainers.map_ray embed.py --batch 64        `process(items)` in embed.py, as for `trainers.map_worker`
    python -m trainers.map_ray -- ./embed.sh              one command per shard

Each row of the dataset is a shard. Ray Data keeps one actor per GPU, or per node without GPUs, and restarts the actors
of a lost node. BROKER_MAP names the output.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence

from trainers.map_engine import Row, ShardMapper, run_driver

IN_FLIGHT = 2  # shards that an actor has at a time; those of a lost node wait until its actor runs again


class RayShards:
    """Shards as rows of datasets on the gang's Ray cluster."""

    def __init__(self, url: str, words: Sequence[str], batch: int, /) -> None:
        from trainers.bridge_ray import connect

        connect()
        gpus = int(os.environ.get("SKYPILOT_NUM_GPUS_PER_NODE", 0))
        self._actors = int(os.environ.get("SKYPILOT_NUM_NODES", 1)) * max(1, gpus)
        self._resources = {"num_gpus": 1} if gpus else {"num_cpus": 1}
        self._arguments = ("ray", url, list(words), batch)

    def __call__(self, shards: Sequence[int]) -> Iterator[Row]:
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
    sys.exit(run_driver("trainers.map_ray", sys.argv[1:], RayShards))
