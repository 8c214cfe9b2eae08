"""What strategies average must come from their own axis of a 2x2 grid, or from all workers of a server."""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from tests.trainers.strategies.checks import CONFIG, LOSS, make_model
from trainers.optimizer import Optimizer
from trainers.ranks import Ranks, join_ranks, leave_ranks
from trainers.strategies import create_strategy
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
    wrong = [*check_gradients(ranks, mean)]
    for strategy in (Diloco, Gossip):
        wrong += check_islands(strategy(ranks, Grid(ranks, ("island", "pipeline"), "2x2"), OPTIONS), ranks, mean)
    leave_ranks()
    assert not wrong, wrong  # only here, where no other rank waits for this one
    return 0


def check_gradients(ranks: Ranks, mean: float) -> Iterator[str]:
    """Two micro-steps add up, and the next step begins at zero."""
    for kind, axis in ((AllReduce, "replicate"), (ShardedOptimizerStates, "shard"), (ShardedGradients, "shard")):
        strategy = kind(ranks, Grid(ranks, (axis, "pipeline"), "2x2"), OPTIONS)
        model = make_model()
        wrapped = strategy.wrap(model)
        trained = [tensor for _, tensor in strategy.list_trained(model)]
        for last in (False, True, False, True):
            if not last:
                for tensor in (*trained, *model.parameters()):
                    tensor.grad = None
            with strategy.micro_step(wrapped, last=last):
                add_gradient(model, float(ranks.rank + 1))
        for tensor in trained:
            found = getattr(tensor.grad, "_local_tensor", tensor.grad)
            if found is None or not torch.equal(found, torch.full_like(found, 2 * mean)):
                yield f"{kind.__name__}: {found} for {mean}"


def add_gradient(model: nn.Module, value: float) -> None:
    for parameter in model.parameters():
        earlier = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        parameter.grad = earlier + value


def check_islands(strategy: Diloco | Gossip, ranks: Ranks, mean: float) -> Iterator[str]:
    """An island is two ranks: of its checkpoint each holds a part, and only the second one has its loss."""
    model = make_model()
    wrapped = strategy.wrap(model)
    optimizer = Optimizer(model.named_parameters(), CONFIG)
    shared = strategy.shared_state(wrapped, optimizer)
    if any(shared[name].is_holder is not (ranks.rank < 2) for name in ("model", "optimizer")):
        yield "the first island holds the shared state"
    add_gradient(model, 0.0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(ranks.rank + 1)
    optimizer.skip_unless(torch.tensor(False))
    strategy.step(wrapped, optimizer, LOSS)
    for parameter in model.parameters():
        if not torch.equal(parameter, torch.full_like(parameter, mean)):
            yield f"{type(strategy).__name__}: {parameter} for {mean}"
    number, stage = divmod(ranks.rank, 2)
    if isinstance(strategy, Gossip):  # DiLoCo reports that of all islands in this step
        found = strategy.all_reduce_loss(LOSS * 0.5 * (number + 1) * stage, weight=0.5, is_stop_asked=False)
        if found[0] != number + 1:
            yield f"the mean loss is {found[0]}"


def server_clips_the_mean_of_its_workers(_: Sequence[str]) -> int:
    """Without staleness there is one update a step; a worker that must skip its own contributes nothing to it."""
    ranks = join_ranks()
    strategy = create_strategy("parameter_server", ranks, StrategyOptions())
    model = make_model()
    wrapped = strategy.wrap(model)
    optimizer = Optimizer(model.named_parameters(), CONFIG)
    wrong = [] if ranks.is_first or strategy.share.draw == ranks.rank else ["workers would drop the same activations"]
    size = sum(parameter.numel() for parameter in model.parameters())
    for step, mean in ((0, 1.5), (1, 1.0)):  # of 1 and 2, and of nothing and 2
        if not ranks.is_first:
            is_skipped = step == 1 and ranks.rank == 1
            add_gradient(model, math.nan if is_skipped else float(ranks.rank))
            optimizer.skip_unless(torch.tensor(not is_skipped))
        norm = strategy.clip(wrapped, 0.5)
        if ranks.is_first:
            clipped = torch.cat(
                [torch.zeros(0) if each.grad is None else each.grad.flatten() for each in model.parameters()]
            )
            if not math.isclose(float(norm), mean * math.sqrt(size), rel_tol=1e-4):
                wrong.append(f"norm {norm} in step {step}")
            if not math.isclose(float(clipped.norm()), 0.5, rel_tol=1e-3):
                wrong.append(f"clipped to {clipped.norm()} in step {step}")
        strategy.step(wrapped, optimizer, LOSS)
    leave_ranks()
    assert not wrong, wrong
    return 0
