"""Expert parallelism: each rank holds some of the experts, and tokens are sent to them and back (arXiv:2006.16668).

Example: two ranks, four experts, two all-to-alls per block in each direction:

    rank 0: experts 0, 1    rows for 0, 1, 2, 3 -> keeps 0 and 1, sends 2 and 3, gets rank 1's rows for 0 and 1
    rank 1: experts 2, 3    the results return the same way
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainers.errors import TrainerError
from trainers.models.cuts import HasExperts
from trainers.optimizer import local
from trainers.strategies.allreduce import reduce_gradients
from trainers.strategies.base import Strategy


class ExpertParallel(Strategy):
    """Ranks read different samples and hold different experts, and all other parameters."""

    AXES = ("expert",)

    def wrap(self, model: nn.Module) -> nn.Module:
        """Shard the experts of every layer. Raises TrainerError without experts, or if ranks do not divide them."""
        count = self.grid.size("expert")
        if count == 1:
            return model
        mesh, group = self.grid.device_mesh("expert"), self.grid.group("expert")
        layers = [module for module in model.modules() if isinstance(module, HasExperts)]
        for layer in layers:
            if layer.expert_count % count:
                raise TrainerError(f"{layer.expert_count} experts cannot be divided evenly by {count} ranks")
            for stack in layer.list_expert_layers():
                spread_stack(stack, mesh)
            layer.exchange = AllToAll(group, count)
        if not layers and self.grid.size("pipeline") == 1:
            raise TrainerError("this model has no experts; `expert` cannot be used without `--model.experts`")
        return model

    @contextlib.contextmanager
    def micro_step(self, model: nn.Module, *, last: bool) -> Iterator[None]:
        """Average gradients after the last backward pass. Those of experts already sum over the tokens of all ranks."""
        yield
        count = self.grid.size("expert")
        if not last or count == 1:
            return
        layers = [module for module in model.modules() if isinstance(module, HasExperts)]
        stacks = [stack for layer in layers for stack in layer.list_expert_layers()]
        experts = [parameter for stack in stacks for parameter in stack.parameters()]
        for parameter in experts:
            if parameter.grad is not None:
                local(parameter.grad).div_(count)
        known = set(experts)
        others = (parameter for parameter in model.parameters() if parameter not in known)
        reduce_gradients(others, self.options.allreduce, group=self.grid.group("expert"), divisor=count)


def spread_stack(stack: nn.Module, mesh: Any) -> None:
    """Replace every parameter by this rank's shard along the first dimension."""
    from torch.distributed.tensor import Shard, distribute_tensor

    for name, value in list(stack.named_parameters(recurse=False)):
        part = distribute_tensor(
            value.detach(), mesh, [Shard(0)], src_data_rank=None
        )  # the whole tensor is equal on all ranks
        stack.register_parameter(name, nn.Parameter(part, requires_grad=value.requires_grad))


class AllToAll:
    """Sends rows to the ranks of their experts, and the results back. The host waits for the device."""

    def __init__(self, group: Any, count: int) -> None:
        """Exchange within a group of `count` ranks, each with equally many consecutive experts."""
        self._group, self._count = group, count

    def __call__(self, rows: Tensor, counts: Tensor, compute: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Return the result of each row, in the order of rows. A collective call."""
        leaving = counts.view(self._count, -1)
        arriving = torch.empty_like(leaving)
        dist.all_to_all_single(arriving, leaving.contiguous(), group=self._group)
        sent, got = torch.stack([leaving.sum(1), arriving.sum(1)]).tolist()  # the host waits once
        exchange: Any = ExchangeRows.apply
        arrived = exchange(rows, sent, got, self._group)
        # Rows arrive ordered by rank, and are computed ordered by expert.
        experts = torch.arange(arriving.shape[1], device=rows.device).repeat(self._count)
        # With a known length, `repeat_interleave` does not wait for the sum of its counts.
        order = experts.repeat_interleave(arriving.flatten(), output_size=sum(got)).argsort(stable=True)
        results = compute(arrived.index_select(0, order), arriving.sum(0))
        placed = torch.zeros_like(results).index_copy(0, order, results)
        back: Tensor = exchange(placed, got, sent, self._group)
        return back


class ExchangeRows(torch.autograd.Function):
    """All-to-all of runs of rows; the backward pass sends gradients in the opposite direction."""

    @staticmethod
    def forward(context: Any, rows: Tensor, sent: list[int], got: list[int], group: Any) -> Tensor:
        """Send `sent[r]` consecutive rows to rank r; return the received rows in the order of ranks."""
        context.sent, context.got, context.group = sent, got, group
        return exchange_rows(rows, sent, got, group)

    @staticmethod
    def backward(context: Any, outer: Tensor) -> tuple[Tensor, None, None, None]:
        """Send each gradient to the rank of its row."""
        return exchange_rows(outer, context.got, context.sent, context.group), None, None, None


def exchange_rows(rows: Tensor, sent: list[int], got: list[int], group: Any) -> Tensor:
    """Exchange runs of rows between all ranks of a group."""
    arrived = rows.new_empty(sum(got), *rows.shape[1:])
    dist.all_to_all_single(arrived, rows.contiguous(), got, sent, group=group)
    return arrived
