"""Sharded within a group of ranks, replicated across groups: gathers stay on the fast links inside a node."""

from trainers.strategies.fsdp import FullyShardedDataParallel


class HybridShardedDataParallel(FullyShardedDataParallel):
    """`--mesh 2x8` is two replicas, each spread over eight ranks; fully_shard reads that off its two-axis mesh."""

    AXES = ("replicate", "shard")
