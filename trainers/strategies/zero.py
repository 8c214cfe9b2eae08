"""ZeRO stages 1 and 2: every rank holds all weights, and the moments of its own shard of them (arXiv:1910.02054).

Example: parameter p of shape [6, w] on 2 ranks, one step of two micro-batches:

    zero1   backward, backward | reduce-scatter: rank 0 gets rows 0-2, rank 1 rows 3-5 | AdamW on own rows | gather
    zero2   backward, reduce-scatter, p.grad is freed; again, and summed               | AdamW on own rows | gather

A rank's shard is a DTensor, sharded along the first dimension, that shares memory with the whole parameter: the update
is in place, and checkpoints contain the moments as `fsdp` writes them.
"""

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainers.errors import TrainerError
from trainers.optimizer import Optimizer
from trainers.strategies.allreduce import fill_buckets
from trainers.strategies.base import GRADIENT_BYTES, WEIGHT_BYTES, Strategy

BUCKET_BYTES = 25 * 2**20  # as in DistributedDataParallel
# Buckets in transit at once under `zero2`: one is sent while the next is filled, so few whole gradients exist.
UNDER_WAY_MAX = 2


class ShardedOptimizerStates(Strategy):
    """`zero1`: moments are sharded. Gradients are accumulated whole, and reduced once per step."""

    AXES: ClassVar[tuple[str, ...]] = ("shard",)
    HAS_PEER_COPIES = True
    PARTNERS = ("pipeline",)
    EXCHANGES_LAST = True

    def wrap(self, model: nn.Module) -> nn.Module:
        """Leave the model whole; `list_trained` creates the shards that this rank updates."""
        self._count, self._place = self.grid.size("shard"), self.grid.index("shard")
        self._trained: list[tuple[str, Tensor]] = []
        self._buckets: list[Bucket] = []
        return model

    def list_trained(self, model: nn.Module) -> Iterable[tuple[str, Tensor]]:
        """Return this rank's shard of every parameter. Raises TrainerError for a parameter without dimensions."""
        if self._count == 1:
            return model.named_parameters()
        if not self._trained:
            self._make_parts(model)
        return self._trained

    @contextlib.contextmanager
    def micro_step(self, model: nn.Module, *, last: bool) -> Iterator[None]:
        """Reduce-scatter gradients after the last backward pass."""
        yield
        if last:
            for bucket in self._buckets:
                bucket.begin(is_first=True)
                bucket.finish()
                bucket.publish()

    def step(self, model: nn.Module, optimizer: Optimizer, loss: Tensor) -> None:
        """Update this rank's shards, then all-gather the parameters."""
        optimizer.step()
        for bucket in self._buckets:
            bucket.gather()

    def count_state_bytes(self) -> float:
        """Return bytes with sharded moments."""
        return WEIGHT_BYTES + GRADIENT_BYTES + self.count_optimizer_bytes() / self.grid.size("shard")

    def _make_parts(self, model: nn.Module) -> None:
        from torch.distributed.tensor import DTensor, Shard

        mesh, group = self.grid.device_mesh("shard"), self.grid.group("shard")

        def spread(own: Tensor, whole: Tensor) -> Any:
            return DTensor.from_local(
                own, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
            )  # fmt: skip

        trained = [(name, value) for name, value in model.named_parameters() if value.requires_grad]
        for name, value in trained:
            if value.dim() == 0:
                raise TrainerError(f"`zero1` and `zero2` cannot shard `{name}`: give it the shape (1,)")
            self._trained.append((name, spread(self._own(value), value).requires_grad_()))
        # The backward pass reaches the last layers first.
        pairs = [(value, part) for (_, value), (_, part) in zip(trained, self._trained, strict=True)][::-1]
        for run in fill_buckets([value for value, _ in pairs], BUCKET_BYTES):
            chosen, pairs = pairs[: len(run)], pairs[len(run) :]
            bucket = Bucket(chosen, count=self._count, place=self._place, group=group)
            for part, own in zip((part for _, part in chosen), bucket.list_gradients(), strict=True):
                bucket.gradients.append((part, spread(own, part)))
            self._buckets.append(bucket)

    def _own(self, whole: Tensor) -> Tensor:
        return own_rows(whole.detach(), count=self._count, place=self._place)


class ShardedGradients(ShardedOptimizerStates):
    """`zero2`: each gradient is reduce-scattered as soon as it is computed, and only the rank's own shard is kept."""

    EXCHANGES_LAST = False

    def wrap(self, model: nn.Module) -> nn.Module:
        """Leave the model whole."""
        self._is_begun = False
        self._next = 0  # index of the next bucket: all ranks send in the same order
        self._ready: set[Tensor] = set()
        self._under_way: deque[Bucket] = deque()
        return super().wrap(model)

    @contextlib.contextmanager
    def micro_step(self, model: nn.Module, *, last: bool) -> Iterator[None]:
        """Reduce-scatter during the backward pass, and the remaining buckets after it."""
        yield
        self._send(is_end=True)
        self._finish(0)
        self._next, self._is_begun = 0, not last
        self._ready.clear()
        if last:
            for bucket in self._buckets:
                bucket.publish()

    def count_state_bytes(self) -> float:
        """Return bytes with sharded gradients and moments."""
        return WEIGHT_BYTES + (GRADIENT_BYTES + self.count_optimizer_bytes()) / self.grid.size("shard")

    def _make_parts(self, model: nn.Module) -> None:
        super()._make_parts(model)
        if self.grid.size("pipeline") > 1:
            return  # several backward passes share one `micro_step`; their gradients are reduced together
        for bucket in self._buckets:
            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(self._note)

    def _note(self, parameter: Tensor) -> None:
        self._ready.add(parameter)
        self._send(is_end=False)

    def _send(self, *, is_end: bool) -> None:
        while self._next < len(self._buckets):
            bucket = self._buckets[self._next]
            if not is_end and not all(parameter in self._ready for parameter in bucket.parameters):
                return
            self._finish(UNDER_WAY_MAX - 1)
            bucket.begin(is_first=not self._is_begun)
            self._under_way.append(bucket)
            self._next += 1

    def _finish(self, count_left: int) -> None:
        while len(self._under_way) > count_left:
            self._under_way.popleft().finish()


class Bucket:
    """Parameters whose gradients, and later values, are sent as one message with a segment for each rank.

    Each segment has the length of the first rank's rows, which is the maximum; others leave its end unused. Behind the
    gradients, it has a number for each parameter, whose sum is the number of ranks that used it: a parameter that no
    rank has used in a step gets no gradient, and AdamW leaves it as it is, as under the other strategies.
    """

    def __init__(self, pairs: Sequence[tuple[Tensor, Any]], *, count: int, place: int, group: Any) -> None:
        """Lay out the parameters consecutively. `pairs` are whole parameters and the shards that are updated."""
        self.parameters = [whole for whole, _ in pairs]
        self.gradients: list[tuple[Any, Any]] = []  # the shard that is updated, and its gradient
        self._count, self._place, self._group = count, place, group
        self._lengths = [own_rows(whole, count=count, place=0).numel() for whole in self.parameters]
        first = self.parameters[0]
        self._sums = torch.zeros(sum(self._lengths), dtype=first.dtype, device=first.device)
        self._uses = self._sums.new_zeros(len(pairs))  # by all ranks
        self._used = [False] * len(pairs)  # by this one
        self._under_way: tuple[Any, Tensor, Tensor] | None = None

    def list_gradients(self) -> list[Tensor]:
        """Return this rank's shard of every gradient, in memory that is the same in every step."""
        return self._view(self._sums, self._place)

    def begin(self, *, is_first: bool) -> None:
        """Start the reduce-scatter and free the gradients; `is_first`: they replace the sums instead of being added."""
        length, used = len(self._sums), [whole.grad is not None for whole in self.parameters]
        flat = self._sums.new_zeros(self._count, length + len(used))
        flat[:, length:] = 1 if all(used) else flat.new_tensor(used)
        for place, row in enumerate(flat):
            for target, whole in zip(self._view(row[:length], place), self.parameters, strict=True):
                if whole.grad is not None:
                    target.copy_(own_rows(whole.grad, count=self._count, place=place))
        for whole in self.parameters:
            whole.grad = None
        if is_first:
            self._sums.zero_()
            self._uses.zero_()
        self._used = [now or (before and not is_first) for now, before in zip(used, self._used, strict=True)]
        mine = flat.new_empty(flat.shape[1])
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # renamed in torch 2.13
        work = scatter(mine, flat.view(-1), group=self._group, async_op=True)
        self._under_way = work, mine, flat

    def finish(self) -> None:
        """Wait for the reduce-scatter and add its mean to the sums, and its uses."""
        assert self._under_way is not None, "begun before"
        work, mine, _ = self._under_way
        self._under_way = None
        work.wait()
        gradients, uses = mine.split([len(self._sums), len(self._uses)])
        self._sums.add_(gradients.div_(self._count))
        self._uses.add_(uses)

    def publish(self) -> None:
        """Set the gradients of the shards that are updated. The host waits only if this rank left parameters unused."""
        uses = self._used if all(self._used) else self._uses.tolist()
        for (part, gradient), count in zip(self.gradients, uses, strict=True):
            part.grad = gradient if count else None

    def gather(self) -> None:
        """All-gather the parameters from the shards that each rank has updated."""
        with torch.no_grad():
            mine = torch.zeros_like(self._sums)
            for target, whole in zip(self._view(mine, self._place), self.parameters, strict=True):
                target.copy_(own_rows(whole, count=self._count, place=self._place))
            flat = mine.new_empty(self._count, len(mine))
            gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
            gather(flat.view(-1), mine, group=self._group)
            for place, row in enumerate(flat):
                for source, whole in zip(self._view(row, place), self.parameters, strict=True):
                    if place != self._place:
                        own_rows(whole, count=self._count, place=place).copy_(source)

    def _view(self, row: Tensor, place: int) -> list[Tensor]:
        """Return the rows of each parameter in the segment of the rank at `place`."""
        views = []
        for whole, part in zip(self.parameters, row.split(self._lengths), strict=True):
            shape = own_rows(whole, count=self._count, place=place).shape
            views.append(part[: shape.numel()].view(shape))
        return views


def own_rows(whole: Tensor, *, count: int, place: int) -> Tensor:
    """Return the rows of one of `count` ranks, split as by torch.chunk and DTensor; the last may have none."""
    rows = -(-len(whole) // count)
    start = min(place * rows, len(whole))
    return whole[start : min(start + rows, len(whole))]
