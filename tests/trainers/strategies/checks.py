"""Checks that single ranks run in a world; each raises where a claim does not hold."""

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from trainers import lm
from trainers.config import TrainConfig
from trainers.optimizer import Optimizer
from trainers.ranks import join_ranks, leave_ranks
from trainers.strategies import create_strategy, ring_attention
from trainers.strategies.base import Strategy
from trainers.strategies.options import DilocoOptions, GossipOptions, ParameterServerOptions, StrategyOptions
from trainers.strategies.ring import ring_all_reduce

LOSS = torch.ones((), dtype=torch.float64)
CONFIG = TrainConfig(steps=12, warmup_steps=3, learning_rate=0.1, batch=12)


def ring_is_the_librarys_sum(_: Sequence[str]) -> int:
    """Whole numbers add up exactly in any order; others to the same bits on every rank, near the library's."""
    ranks = join_ranks()
    generator = torch.Generator().manual_seed(ranks.rank)
    for count in (1, 2, 3, 7, 64, 1001):
        whole = torch.randint(-1000, 1000, (count,), generator=generator).float()
        expected = whole.clone()
        dist.all_reduce(expected)
        ring_all_reduce(whole)
        assert torch.equal(whole, expected), f"{count} whole numbers"
        mine = torch.randn(count, generator=generator)
        expected = mine.clone()
        dist.all_reduce(expected)
        ring_all_reduce(mine)
        torch.testing.assert_close(mine, expected)
        first = mine.clone()
        dist.broadcast(first, 0)
        assert torch.equal(first, mine), "ranks hold different sums"
    if ranks.world_size == 4:  # rings of every second rank: their members are numbered otherwise than the world
        for members in ([0, 2], [1, 3]):
            group = dist.new_group(members)
            if ranks.rank in members:
                part = torch.full((5,), float(ranks.rank + 1))
                ring_all_reduce(part, group)
                assert part.tolist() == [float(sum(members) + 2)] * 5
    leave_ranks()
    return 0


def islands_follow_the_algorithm(arguments: Sequence[str]) -> int:
    """DiLoCo or gossip on real ranks against a simulation of all of them in this process."""
    ranks = join_ranks()
    name = arguments[0]
    options = StrategyOptions(
        diloco=DilocoOptions(every_steps=5, learning_rate=0.7, momentum=0.9), gossip=GossipOptions(every_steps=2)
    )
    strategy = create_strategy(name, ranks, options)
    model = make_model()
    wrapped = strategy.wrap(model)
    optimizer = Optimizer(model.named_parameters(), CONFIG)
    strategy.shared_state(wrapped, optimizer)
    simulated = simulate(name, ranks.world_size)
    for step in range(CONFIG.steps):
        put_gradient(model, step, ranks.rank)
        strategy.step(wrapped, optimizer, LOSS)
        for mine, expected in zip(model.parameters(), simulated[step][ranks.rank], strict=True):
            torch.testing.assert_close(mine.detach(), expected, rtol=1e-5, atol=1e-6)
    leave_ranks()
    return 0


def simulate(name: str, world_size: int) -> list[list[list[Tensor]]]:
    """Return the parameters of every rank after every step, by the papers' update rules, written out."""
    models = [make_model() for _ in range(world_size)]
    optimizers = [Optimizer(model.named_parameters(), CONFIG) for model in models]
    anchor = [each.detach().clone() for each in models[0].parameters()]
    velocity = [torch.zeros_like(each) for each in anchor]
    history = []
    for step in range(CONFIG.steps):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            put_gradient(model, step, rank)
            optimizer.step()
        values = [[each.detach().clone() for each in model.parameters()] for model in models]
        done = step + 1
        if name == "diloco" and (done % 5 == 0 or done == CONFIG.steps):  # also after the last step
            for place in range(len(anchor)):
                outer = anchor[place] - sum(value[place] for value in values) / world_size
                velocity[place] = 0.9 * velocity[place] + outer
                anchor[place] = anchor[place] - 0.7 * (outer + 0.9 * velocity[place])
            values = [anchor] * world_size
        if name == "gossip" and done % 2 == 0:
            distance = 2 ** ((done // 2) % max(1, math.ceil(math.log2(world_size))))
            values = [
                [(mine + theirs) / 2 for mine, theirs in zip(values[rank], values[rank - distance], strict=True)]
                for rank in range(world_size)
            ]
        for model, value in zip(models, values, strict=True):
            for to, each in zip(model.parameters(), value, strict=True):
                to.detach().copy_(each)
        history.append([[each.clone() for each in value] for value in values])
    return history


def stop_is_heard_by_all_at_one_step(arguments: Sequence[str]) -> int:
    """Only the last rank is asked to stop, in its fourth step; all stop after the same one.

    Gossip reports the loss of the rank's island in each step; here a rank's own loss is its number.
    """
    ranks = join_ranks()
    mesh = arguments[1] if len(arguments) > 1 else ""
    options = StrategyOptions(mesh=mesh, diloco=DilocoOptions(every_steps=5), gossip=GossipOptions(every_steps=2))
    strategy = create_strategy(arguments[0], ranks, options)
    model = make_model()
    wrapped = strategy.wrap(model)
    optimizer = Optimizer(model.named_parameters(), CONFIG)
    strategy.shared_state(wrapped, optimizer)
    stopped = None
    for step in range(CONFIG.steps):
        put_gradient(model, step, ranks.rank)
        strategy.step(wrapped, optimizer, LOSS)
        is_asked = step >= 3 and ranks.rank == ranks.world_size - 1
        weight = 1.0 / strategy.share.count
        mean, stops = strategy.all_reduce_loss(LOSS * ranks.rank * weight, weight=weight, is_stop_asked=is_asked)
        if arguments[0].startswith("gossip"):
            size = ranks.world_size // strategy.grid.size("island")
            assert mean == sum(range(size)) / size + ranks.rank // size * size, f"rank {ranks.rank}: {mean}"
        if stops > 0:
            stopped = step + 1
            break
    assert stopped is not None and ranks.collect(stopped) == [stopped] * ranks.world_size, stopped
    leave_ranks()
    return 0


def no_worker_is_more_than_two_steps_ahead(_: Sequence[str]) -> int:
    """The last worker does not begin before the server knows that the first is as far ahead as it may be.

    Were the bound lower, the first worker would never come that far and both would wait forever.
    """
    ranks = join_ranks()
    signals = dist.new_group(backend="gloo")
    options = StrategyOptions(parameter_server=ParameterServerOptions(staleness_max=2))
    strategy: Any = create_strategy("parameter_server", ranks, options)
    model = make_model()
    wrapped = strategy.wrap(model)
    optimizer = Optimizer(model.named_parameters(), CONFIG)
    first, last = 1, ranks.world_size - 1
    if ranks.is_first:
        server = strategy._role
        answer, sent = server._answer, []

        def answer_and_signal() -> None:
            answer()
            if server._done[first] == 3 and not sent:
                assert first in server._waiting, "it was allowed to go three steps ahead"
                sent.append(dist.send(torch.ones(1), last, group=signals))

        server._answer = answer_and_signal
    for step in range(CONFIG.steps):
        if step == 0 and ranks.rank == last:
            dist.recv(torch.ones(1), 0, group=signals)
        if not ranks.is_first:
            put_gradient(model, step, ranks.rank)
        strategy.step(wrapped, optimizer, LOSS)
        strategy.all_reduce_loss(LOSS, weight=1.0, is_stop_asked=False)
    if ranks.is_first:
        assert strategy._role.lead_max == 2, strategy._role.lead_max
        assert optimizer.steps_done == CONFIG.steps
        # Moves are counted one by one, and together went as far as the schedule says.
        assert optimizer.state_dict()["moves_done"] == CONFIG.steps * (ranks.world_size - 1)
    leave_ranks()
    return 0


def checkpoint_is_a_clean_cut(_: Sequence[str]) -> int:
    """The first worker comes to a checkpoint well before the last, and adds nothing to it that is of a later step."""
    ranks = join_ranks()
    signals = dist.new_group(backend="gloo")
    options = StrategyOptions(parameter_server=ParameterServerOptions(staleness_max=2))
    strategy: Any = create_strategy("parameter_server", ranks, options)
    model = make_model()
    wrapped = strategy.wrap(model)
    optimizer = Optimizer(model.named_parameters(), CONFIG)
    state = strategy.shared_state(wrapped, optimizer)["model"]
    for step in range(CONFIG.steps):
        if step == 2 and ranks.rank == 1:
            dist.send(torch.ones(1), 2, group=signals)
        if step == 1 and ranks.rank == 2:
            dist.recv(torch.ones(1), 1, group=signals)
        if not ranks.is_first:
            put_gradient(model, step, ranks.rank)
        strategy.step(wrapped, optimizer, LOSS)
        strategy.all_reduce_loss(LOSS, weight=1.0, is_stop_asked=False)
        if step == 2:
            saved = {name: each.clone() for name, each in state.state_dict().items()}
            if ranks.is_first:
                assert set(strategy._role._done.values()) == {3}, strategy._role._done
            weights = ranks.collect(saved["weight"].tolist())
            assert weights == weights[:1] * ranks.world_size
    leave_ranks()
    return 0


def branches_of_single_ranks_are_averaged(_: Sequence[str]) -> int:
    """Each rank's loss depends on a layer of its own, on a common one, and not on the last one."""
    ranks = join_ranks()
    layers = [make_model() for _ in range(ranks.world_size + 2)]
    model = nn.ModuleList(layers)
    model[0].bias.requires_grad_(False)
    strategy = create_strategy("allreduce", ranks, StrategyOptions())
    wrapped = strategy.wrap(model)
    inputs = torch.full((1, 7), ranks.rank + 1.0)
    with strategy.micro_step(wrapped, last=True):
        (layers[ranks.rank](inputs) + layers[-2](inputs)).sum().backward()
    weights = [layer.weight.grad for layer in layers]
    for rank, gradient in enumerate(weights[:-2]):
        assert torch.allclose(gradient, torch.full((3, 7), (rank + 1.0) / ranks.world_size)), (
            f"layer {rank}: {gradient}"
        )
    assert torch.allclose(weights[-2], torch.full((3, 7), (ranks.world_size + 1.0) / 2)), weights[-2]
    assert weights[-1] is None and layers[-1].bias.grad is None and layers[0].bias.grad is None
    leave_ranks()
    return 0


def parameters_without_gradient_are_left_alone(arguments: Sequence[str]) -> int:
    """All layers are used in the first step, and then one by each rank, a common one, and one by none.

    Moments and weight decay would move the last one, if it had a gradient of zero.
    """
    ranks = join_ranks()
    name, count = arguments[0], ranks.world_size
    model, reference = (nn.ModuleList(make_model() for _ in range(count + 2)) for _ in range(2))
    strategy = create_strategy(name, ranks, StrategyOptions())
    wrapped = strategy.wrap(model)
    optimizer, alone = Optimizer(strategy.list_trained(model), CONFIG), Optimizer(reference.named_parameters(), CONFIG)
    for passes in ([[*range(count + 2)]] * count, [[rank, count] for rank in range(count)]):
        for layer in passes[ranks.rank]:
            with strategy.micro_step(wrapped, last=layer == passes[ranks.rank][-1]):
                model[layer](torch.full((1, 7), ranks.rank + 1.0)).square().sum().backward()
        for rank in range(count):
            for layer in passes[rank]:
                (reference[layer](torch.full((1, 7), rank + 1.0)).square().sum() / count).backward()
        strategy.step(wrapped, optimizer, LOSS)
        alone.step()
    for mine, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine, expected)
    assert optimizer.state_dict()["moves_done"] == alone.state_dict()["moves_done"]
    leave_ranks()
    return 0


def different_layers_are_noticed(arguments: Sequence[str]) -> int:
    """Only the last rank uses another block, of equal shape: torch reports nothing."""
    ranks = join_ranks()
    name, mesh = arguments
    strategy = create_strategy(name, ranks, StrategyOptions(mesh=mesh))
    model = Choice()
    wrapped = strategy.wrap(model)
    for step, (mine, is_mixed) in enumerate([(0, False), (int(ranks.rank == ranks.world_size - 1), True), (1, False)]):
        with strategy.micro_step(wrapped, last=True):
            wrapped(torch.ones(2, 7), mine).sum().backward()
        mixture = strategy.find_mixture(wrapped)
        assert mixture is not None and bool(mixture) == is_mixed, f"step {step}"
        model.zero_grad()
    leave_ranks()
    return 0


class Choice(nn.Module):
    """A model of which one block is used, as the caller says."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(make_model() for _ in range(2))

    def forward(self, inputs: Tensor, block: int) -> Tensor:
        """Return the outputs of the chosen block."""
        outputs: Tensor = self.blocks[block](inputs)
        return outputs


def make_model() -> nn.Module:
    """Return a layer with the same weights everywhere."""
    torch.manual_seed(5)
    return nn.Linear(7, 3)


def put_gradient(model: nn.Module, step: int, rank: int) -> None:
    """Set gradients that differ by step and rank."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def ring_attention_is_attention(arguments: Sequence[str]) -> int:
    """Outputs and gradients against torch's attention over the whole sequence, with fewer heads of keys, in runs."""
    ranks = join_ranks()
    heads, key_heads, batch, length, width = 4, int(arguments[0]), 2, 12 * ranks.world_size, 6
    ring_attention.SCORE_BYTES = 4 * batch * heads * length  # so that queries are taken a few at a time
    ring = ring_attention.Ring(group=None, rank=ranks.rank, count=ranks.world_size)
    generator = torch.Generator().manual_seed(3)
    shapes = [(batch, heads, length, width), *[(batch, key_heads, length, width)] * 2]
    whole = [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]
    outer = torch.randn(shapes[0], generator=generator, dtype=torch.float64)
    expected = scaled_dot_product_attention(*whole, is_causal=True, enable_gqa=True)
    (expected * outer).sum().backward()
    positions = ring.find_positions(length // ranks.world_size, ranks.device)
    parts = [each.detach().float()[:, :, positions].requires_grad_() for each in whole]
    found = ring_attention.attend_in_ring(*parts, ring)
    torch.testing.assert_close(found.double(), expected.detach()[:, :, positions], rtol=1e-5, atol=1e-6)
    (found * outer.float()[:, :, positions]).sum().backward()
    for part, each in zip(parts, whole, strict=True):
        assert part.grad is not None and each.grad is not None
        torch.testing.assert_close(part.grad.double(), each.grad[:, :, positions], rtol=1e-5, atol=1e-5)
    leave_ranks()
    return 0


def dropout_in_a_ring_has_its_own_gradients(_: Sequence[str]) -> int:
    """The backward pass drops what the forward pass dropped: gradients against differences of the whole ring's sum."""
    ranks = join_ranks()
    batch, heads, key_heads, length, width = 1, 4, 2, 8, 3
    ring_attention.SCORE_BYTES = 4 * batch * heads * length * 3  # queries are taken three at a time
    ring = ring_attention.Ring(group=None, rank=ranks.rank, count=ranks.world_size)
    generator = torch.Generator().manual_seed(7 + ranks.rank)
    shapes = [(batch, heads, length, width), *[(batch, key_heads, length, width)] * 2]
    parts = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    ways = [torch.randn(shape, generator=generator) for shape in shapes]
    outer = torch.randn(shapes[0], generator=generator)

    def total(inputs: Sequence[Tensor]) -> Tensor:
        torch.manual_seed(11 + ranks.rank)
        mixed = ring_attention.attend_in_ring(*inputs, ring, dropout_rate=0.4)
        return (mixed * outer).sum()

    total(parts).backward()
    for place, (part, way) in enumerate(zip(parts, ways, strict=True)):
        ends = [
            total([each.detach() + (sign * way if at == place else 0.0) for at, each in enumerate(parts)]).double()
            for sign in (1e-2, -1e-2)
        ]
        assert part.grad is not None
        slopes = torch.stack([(ends[0] - ends[1]) / 2e-2, (part.grad * way).sum().double()])
        dist.all_reduce(slopes)
        torch.testing.assert_close(slopes[0], slopes[1], rtol=2e-2, atol=2e-2)
        assert abs(float(slopes[1])) > 0.1, "too flat to show a difference"
    torch.manual_seed(11 + ranks.rank)
    kept = ring_attention.attend_in_ring(*(each.detach() for each in parts), ring, dropout_rate=0.4)
    again = ring_attention.attend_in_ring(*(each.detach() for each in parts), ring, dropout_rate=0.4)
    assert not torch.equal(kept, again), "the next pass drops others"
    leave_ranks()
    return 0


def train_and_note_norms(arguments: Sequence[str]) -> int:
    """Train as `trainers.lm` does; the first rank notes the norm of each step's gradients before they are clipped."""
    clip, path = Strategy.clip, Path(os.environ["BROKER_PROGRESS_FILE"]).with_name("norms")

    def clip_and_note(self: Strategy, model: nn.Module, norm_max: float) -> Tensor:
        norm = clip(self, model, norm_max)
        if self.ranks.is_first:
            with path.open("a") as file:
                file.write(f"{float(norm)}\n")
        return norm

    Strategy.clip = clip_and_note  # type: ignore[method-assign]
    return lm.main(list(arguments))


def train_with_equal_common_parts(arguments: Sequence[str]) -> int:
    """Train as `trainers.lm` does; all ranks must get the same gradients of the parameters that each holds whole."""
    clip = Strategy.clip

    def check_and_clip(self: Strategy, model: nn.Module, norm_max: float) -> Tensor:
        whole = [each.grad for each in model.parameters() if each.grad is not None and type(each.grad) is Tensor]
        mine = torch.cat([each.reshape(-1) for each in whole])
        first = mine.clone()
        dist.broadcast(first, 0)
        assert torch.equal(mine, first), "ranks would change the parts that they have in common differently"
        return clip(self, model, norm_max)

    Strategy.clip = check_and_clip  # type: ignore[method-assign]
    return lm.main(arguments)
