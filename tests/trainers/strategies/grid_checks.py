"""Strategies along one axis of a 2x2 grid: what they average must come from that axis only."""

from collections.abc import Sequence

import torch
from torch import nn

from tests.trainers.strategies.checks import CONFIG, LOSS, make_model
from trainers.optimizer import Optimizer
from trainers.ranks import Ranks, join_ranks, leave_ranks
from trainers.strategies.allreduce import AllReduce
from trainers.strategies.diloco import Diloco
from trainers.strategies.gossip import Gossip
from trainers.strategies.grid import Grid
from trainers.strategies.options import DilocoOptions, GossipOptions, StrategyOptions
from trainers.strategies.zero import ShardedGradients, ShardedOptimizerStates

OPTIONS = StrategyOptions(
    diloco=DilocoOptions(every_steps=1, learning_rate=1.0, momentum=0.0), gossip=GossipOptions(every_steps=1)
)


def parts_average_along_their_own_axis(_: Sequence[str]) -> int:
    """Ranks 0 and 2 are one pair, 1 and 3 the other; each rank has its number plus one: the means are 2 and 3."""
    ranks = join_ranks()
    mean = float(ranks.rank % 2 + 2)
    check_gradients(ranks, mean)
    for strategy in (Diloco, Gossip):
        check_islands(strategy(ranks, Grid(ranks, ("island", "pipeline"), "2x2"), OPTIONS), ranks, mean)
    leave_ranks()
    return 0


def check_gradients(ranks: Ranks, mean: float) -> None:
    """Two micro-steps add up."""
    for kind, axis in ((AllReduce, "replicate"), (ShardedOptimizerStates, "shard"), (ShardedGradients, "shard")):
        strategy = kind(ranks, Grid(ranks, (axis, "pipeline"), "2x2"), OPTIONS)
        model = make_model()
        wrapped = strategy.wrap(model)
        trained = [tensor for _, tensor in strategy.list_trained(model)]
        for last in (False, True):
            with strategy.micro_step(wrapped, last=last):
                add_gradient(model, float(ranks.rank + 1))
        for tensor in trained:
            assert tensor.grad is not None
            found = getattr(tensor.grad, "_local_tensor", tensor.grad)
            assert torch.equal(found, torch.full_like(found, 2 * mean)), f"{kind.__name__}: {found} for {mean}"


def add_gradient(model: nn.Module, value: float) -> None:
    for parameter in model.parameters():
        earlier = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        parameter.grad = earlier + value


def check_islands(strategy: Diloco | Gossip, ranks: Ranks, mean: float) -> None:
    """An island is two ranks: of its checkpoint each holds a part, and only the second one has its loss."""
    model = make_model()
    wrapped = strategy.wrap(model)
    optimizer = Optimizer(model.named_parameters(), CONFIG)
    is_holder = ranks.rank < 2
    assert all(strategy.shared_state(wrapped, optimizer)[name].is_holder is is_holder for name in ("model", "optimizer"))
    add_gradient(model, 0.0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(ranks.rank + 1)
    optimizer.skip_unless(torch.tensor(False))
    strategy.step(wrapped, optimizer, LOSS)
    for parameter in model.parameters():
        assert torch.equal(parameter, torch.full_like(parameter, mean)), f"{parameter} for {mean}"
    number, stage = divmod(ranks.rank, 2)
    if isinstance(strategy, Gossip):  # DiLoCo reports that of all islands in this step
        found = strategy.all_reduce_loss(LOSS * 0.5 * (number + 1) * stage, weight=0.5, is_stop_asked=False)
        assert found[0] == number + 1, f"the mean loss is {found[0]}"
