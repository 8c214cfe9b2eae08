"""All-reduce gradients by explicit collectives after the backward pass, one bucket at a time.

There is no overlap, but no import beyond torch itself: a recovery starts to train one second sooner than with `ddp`.
"""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainers.optimizer import local
from trainers.strategies.base import Strategy
from trainers.strategies.options import AllReduceOptions
from trainers.strategies.ring import ring_all_reduce


class AllReduce(Strategy):
    """Every rank holds the whole model, or all of its part in a combination, and all-reduces gradients."""

    AXES = ("replicate",)
    MOVES_ALONE = True
    EXCHANGES_LAST = True

    @contextlib.contextmanager
    def micro_step(self, model: nn.Module, *, last: bool) -> Iterator[None]:
        """All-reduce gradients after the last backward pass of the step."""
        yield
        if last and self.grid.size("replicate") > 1:
            group, count = self.grid.group("replicate"), self.grid.size("replicate")
            reduce_gradients(model.parameters(), self.options.allreduce, group=group, divisor=count)


def reduce_gradients(parameters: Iterable[Tensor], options: AllReduceOptions, *, group: Any, divisor: float) -> None:
    """Replace gradients by their sum over a group, divided by `divisor`. A fixed layout keeps sums reproducible.

    A parameter that took no part in the loss on this rank gets the others' sum; one without a gradient anywhere gets
    none, as in DistributedDataParallel.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not trained:
        return
    unused = [parameter for parameter in trained if parameter.grad is None]
    for parameter in unused:
        parameter.grad = torch.zeros_like(parameter)
    gradients = [local(parameter.grad) for parameter in trained if parameter.grad is not None]
    buckets = fill_buckets(gradients, int(options.bucket_mib * 2**20))
    flat = [torch.cat([gradient.reshape(-1) for gradient in bucket]) for bucket in buckets]
    # The first message also counts the ranks that used each parameter.
    uses = flat[0].new_ones(len(trained))
    if unused:
        known = set(unused)
        uses -= uses.new_tensor([parameter in known for parameter in trained])
    flat[0] = torch.cat([flat[0], uses])
    if options.algorithm == "ring":
        for bucket_flat in flat:
            ring_all_reduce(bucket_flat, group)
    else:
        for work in [dist.all_reduce(bucket_flat, group=group, async_op=True) for bucket_flat in flat]:
            work.wait()
    flat[0], uses = flat[0].split([len(flat[0]) - len(trained), len(trained)])
    for bucket, whole in zip(buckets, flat, strict=True):
        if divisor != 1:
            whole /= divisor
        parts = whole.split([gradient.numel() for gradient in bucket])
        torch._foreach_copy_(bucket, [part.view_as(to) for part, to in zip(parts, bucket, strict=True)])
    if unused:  # only then does the host wait for the counts
        for parameter, count in zip(trained, uses.tolist(), strict=True):
            if not count:
                parameter.grad = None


def fill_buckets(tensors: list[Tensor], bytes_max: int) -> list[list[Tensor]]:
    """Split a list into runs of one dtype with at most `bytes_max` bytes; a larger tensor is a run by itself."""
    buckets: list[list[Tensor]] = []
    room = 0
    for tensor in tensors:
        if not buckets or tensor.nbytes > room or tensor.dtype != buckets[-1][0].dtype:
            buckets.append([])
            room = bytes_max
        buckets[-1].append(tensor)
        room -= tensor.nbytes
    return buckets
