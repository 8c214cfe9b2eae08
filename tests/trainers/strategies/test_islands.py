"""The state of islands that drift apart: restored whole, on one process that stands for one of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.trainers.strategies.checks import CONFIG, make_model, put_gradient
from trainers.optimizer import Optimizer
from trainers.strategies.diloco import Outer
from trainers.strategies.islands import OwnMoves, OwnTensors, average_loss, hold_by_first, name_layout

MOMENTUM, RATE = 0.9, 0.7


def train(steps: int, *, rank: int = 0) -> tuple[nn.Module, Optimizer]:
    model = make_model()
    optimizer = Optimizer(model.named_parameters(), CONFIG)
    for step in range(steps):
        put_gradient(model, step, rank)
        optimizer.step()
    return model, optimizer


def copy_tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    state = {"model": model.state_dict(), **optimizer.state_dict()}
    return {
        f"{part}.{name}": tensor.clone()
        for part in ("model", "first", "second")
        for name, tensor in state[part].items()
    }


def test_an_island_gets_its_own_weights_moments_and_number_of_updates_back() -> None:
    model, optimizer = train(5)
    saved, moves = OwnTensors(model, optimizer).state_dict(), OwnMoves(optimizer).state_dict()
    other, restored = train(2, rank=1)  # as the shared state of the first island has left it
    restored.steps_done = optimizer.steps_done
    OwnTensors(other, restored).load_state_dict(saved)
    OwnMoves(restored).load_state_dict(moves)
    assert restored.moves_done == optimizer.moves_done == 5
    for each in (0, 1):  # the correction of Adam's moments depends on the number of updates
        found, wanted = copy_tensors(other, restored), copy_tensors(model, optimizer)
        assert all(torch.equal(found[name], wanted[name]) for name in wanted), each
        for some, steps in ((model, optimizer), (other, restored)):
            put_gradient(some, 9, 0)
            steps.step()


def test_tensors_of_an_island_are_the_live_ones() -> None:
    model, optimizer = train(1)
    state = OwnTensors(model, optimizer).state_dict()
    with torch.no_grad():
        next(model.parameters()).fill_(7.0)
    assert (state["model"]["weight"] == 7.0).all()


@pytest.fixture
def two_islands(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The other of two islands: `all_reduce` adds these parameters, oldest first."""
    theirs: list[Tensor] = []
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group=None: tensor.add_(theirs.pop(0)))
    return theirs


def synchronize(outer: Outer, model: nn.Module) -> None:
    outer.synchronize(model, group=None, count=2, learning_rate=RATE, momentum=MOMENTUM)


def flatten(model: nn.Module) -> Tensor:
    return torch.cat([each.detach().reshape(-1) for each in model.parameters()])


def test_the_outer_step_is_nesterov_momentum_on_the_mean_of_the_islands(two_islands: list[Tensor]) -> None:
    model = make_model()
    outer = Outer(model)
    outer.begin(model)
    anchor, velocity = flatten(model).clone(), torch.zeros(24)
    for step in range(3):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.1 * (step + 1)  # the inner steps of this island
        mine, theirs = flatten(model).clone(), anchor - 0.3
        two_islands.append(theirs)
        synchronize(outer, model)
        way = anchor - (mine + theirs) / 2
        velocity = MOMENTUM * velocity + way
        anchor = anchor - RATE * (way + MOMENTUM * velocity)
        torch.testing.assert_close(flatten(model), anchor)


def test_a_restored_outer_optimizer_continues_with_its_anchor_and_its_momentum(two_islands: list[Tensor]) -> None:
    model = make_model()
    outer = Outer(model)
    outer.begin(model)
    two_islands += [flatten(model) + 0.5, flatten(model) - 0.25, flatten(model) - 0.25]
    synchronize(outer, model)
    saved = {part: {name: each.clone() for name, each in state.items()} for part, state in outer.state_dict().items()}
    twin = make_model()
    twin.load_state_dict(model.state_dict())
    with torch.no_grad():
        for each in twin.parameters():
            each += 1.0  # inner steps since then, which the anchor does not know
        model.load_state_dict(twin.state_dict())
    restored = Outer(twin)
    restored.load_state_dict(saved)
    assert restored.is_begun, "or the next step would make the current model the anchor"
    synchronize(outer, model)
    synchronize(restored, twin)
    assert torch.equal(flatten(twin), flatten(model))


def test_frozen_parameters_have_no_outer_state() -> None:
    model = make_model()
    next(model.parameters()).requires_grad_(False)
    assert {tuple(part) for part in Outer(model).state_dict().values()} == {("bias",)}


def make_grid(**sizes: int) -> Any:
    return SimpleNamespace(
        axes=tuple(sizes), sizes=tuple(sizes.values()), size=lambda axis: sizes.get(axis, 1), group=lambda axis: axis
    )


def test_layouts_have_the_same_name_only_where_each_rank_holds_the_same_part() -> None:
    assert name_layout(make_grid(island=4)) == "island" == name_layout(make_grid(island=2, shard=1))
    assert name_layout(make_grid(island=2, shard=2)) == "island2-shard2"
    assert name_layout(make_grid(shard=2, island=2)) == "shard2-island2"
    assert name_layout(make_grid(shard=4, island=1, tensor=2)) == "shard4-tensor2"


def test_the_loss_of_an_island_is_the_mean_by_the_weight_of_its_counted_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    reduced: list[str] = []

    def add_other_rank(totals: Tensor, group: str) -> None:
        reduced.append(group)
        totals += torch.tensor([0.6, 0.3])  # a loss of 2, of 0.3 of the batch

    monkeypatch.setattr(dist, "all_reduce", add_other_rank)
    grid, loss = make_grid(island=2, shard=2), torch.tensor(0.2)  # a loss of 1, of 0.2 of the batch
    mean = average_loss(loss, weight=0.2, grid=grid, share=SimpleNamespace(is_counted=True))  # type: ignore[arg-type]
    assert mean.item() == pytest.approx(1.6) and reduced == ["shard"], "other islands are not asked"
    other = average_loss(loss, weight=0.2, grid=grid, share=SimpleNamespace(is_counted=False))  # type: ignore[arg-type]
    assert other.item() == pytest.approx(2.0)


def test_the_first_island_holds_the_shared_state() -> None:
    model, optimizer = train(1)
    for is_first in (True, False):
        held: Any = hold_by_first(model, optimizer, is_first=is_first)
        assert {name: part.is_holder for name, part in held.items()} == {"model": is_first, "optimizer": is_first}
