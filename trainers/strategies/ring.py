"""All-reduce written with sends and receives between neighbours: the reference the library's is compared with.

Each of n ranks sends 2 (n - 1) / n of the data, whatever n: the least possible (Patarasuk and Yuan, 2009,
doi:10.1016/j.jpdc.2008.09.002).
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def ring_all_reduce(tensor: Tensor, group: Any = None) -> None:
    """Replace a contiguous tensor by its sum over a group's ranks, equal on all to the last bit.

    A peer that is gone is torch's error, as with its own collectives.
    """
    count, rank = dist.get_world_size(group), dist.get_rank(group)
    if count == 1:
        return
    flat = tensor.view(-1)
    chunks = list(flat.tensor_split(count))
    incoming = torch.empty_like(chunks[0])  # the first chunk is the longest
    # Reduce-scatter: each chunk goes once round, and every rank it passes adds its own numbers.
    for turn in range(count - 1):
        target = chunks[(rank - turn - 1) % count]
        arrived = incoming[: target.numel()]
        _exchange(chunks[(rank - turn) % count], arrived, group)
        target += arrived
    # All-gather: each finished chunk goes round again and replaces what it meets.
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
