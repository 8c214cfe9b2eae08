"""Shard within a group of ranks and replicate across groups, so that gathers use the fast links within a node."""

from trainers.strategies.fsdp import FullyShardedDataParallel


class HybridShardedDataParallel(FullyShardedDataParallel):
    """With `--mesh 2x8`, two replicas are each sharded over eight ranks: fully_shard accepts a two-axis mesh."""

    AXES = ("replicate", "shard")
    HAS_PEER_COPIES = False  # each part exists several times already
