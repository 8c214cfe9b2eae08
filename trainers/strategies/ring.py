"""Ring all-reduce by sends and receives between neighbours, as a reference for the library's all-reduce.

Each of n ranks sends 2 (n - 1) / n of the data, which is optimal (Patarasuk and Yuan, 2009,
doi:10.1016/j.jpdc.2008.09.002).
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def ring_all_reduce(tensor: Tensor, group: Any = None) -> None:
    """Replace a contiguous tensor by its sum over the ranks of a group, bit-identical on all.

    Raises torch's error if a peer is lost, as torch's own collectives do.
    """
    count, rank = dist.get_world_size(group), dist.get_rank(group)
    if count == 1:
        return
    flat = tensor.view(-1)
    chunks = list(flat.tensor_split(count))
    incoming = torch.empty_like(chunks[0])  # the first chunk is the longest
    # Reduce-scatter: each chunk travels once around the ring, and every rank adds its own values.
    for turn in range(count - 1):
        target = chunks[(rank - turn - 1) % count]
        arrived = incoming[: target.numel()]
        _exchange(chunks[(rank - turn) % count], arrived, group)
        target += arrived
    # All-gather: each finished chunk travels around again and replaces the partial ones.
    for turn in range(count - 1):
        _exchange(chunks[(rank + 1 - turn) % count], chunks[(rank - turn) % count], group)


def _exchange(outgoing: Tensor, incoming: Tensor, group: Any) -> None:
    count, rank = dist.get_world_size(group), dist.get_rank(group)
    group = group or dist.group.WORLD
    to, source = (dist.get_global_rank(group, peer % count) for peer in (rank + 1, rank - 1))
    operations = []
    if outgoing.numel():
        operations.append(dist.P2POp(dist.isend, outgoing, to, group=group))
    if incoming.numel():
        operations.append(dist.P2POp(dist.irecv, incoming, source, group=group))
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()
