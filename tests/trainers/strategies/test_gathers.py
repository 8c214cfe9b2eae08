"""How often `fsdp` gathers parameters, with a process group that sends nothing."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from trainers.ranks import Ranks
from trainers.strategies import create_strategy
from trainers.strategies.options import FsdpOptions, StrategyOptions

BLOCKS = 3


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(BLOCKS))
        self.last = nn.Linear(4, 4)

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        points = self.first(points)
        for block in self.blocks:
            points = block(points)
        outputs: torch.Tensor = self.last(points)
        return outputs


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        yield Ranks(rank=0, world_size=2, device=torch.device("cpu"))
    finally:
        dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # of the hooks that count
@pytest.mark.parametrize(("reshard", "expected"), [("always", 1 + 2 * BLOCKS), ("never", 1 + BLOCKS)])
def test_blocks_are_gathered_for_each_pass_and_the_rest_once(ranks: Ranks, reshard: str, expected: int) -> None:
    """The rest, of which the embeddings are large, is needed from the end of the forward pass on."""
    options = StrategyOptions(strategy="fsdp", fsdp=FsdpOptions(reshard=reshard))
    strategy, model = create_strategy("fsdp", ranks, options), Model()
    wrapped = strategy.wrap(model)
    from torch.distributed.tensor.debug import CommDebugMode  # over a second, in every worker if above

    with CommDebugMode() as sent, strategy.micro_step(model, last=True):
        wrapped(torch.ones(2, 4, requires_grad=True)).sum().backward()
    gathers = sum(count for name, count in sent.get_comm_counts().items() if "allgather" in str(name))
    assert gathers == expected, sent.get_comm_counts()
