"""AdamW's state in CPU memory: the same bits, and checkpoints that runs with and without it exchange."""

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.tiers import spread
from trainers.config import Config, find_problem
from trainers.errors import TrainerError
from trainers.optimizer import Optimizer
from trainers.ranks import Ranks
from trainers.state_transfer import keep
from trainers.strategies import create_strategy
from trainers.strategies.options import StrategyOptions

from .strategies.conftest import Worlds
from .test_optimizer import CONFIG, copy, make_model, sgd, take_steps

OFFLOAD = ("--offload", "optimizer")


def make_optimizer(model: nn.Module, *, is_offloaded: bool = True) -> Optimizer:
    return Optimizer(model.named_parameters(), CONFIG, is_offloaded=is_offloaded)


def test_update_on_copies_is_bit_identical_and_the_copies_are_apart() -> None:
    plain, offloaded = make_model(), make_model()
    optimizer = make_optimizer(offloaded)
    take_steps(plain, make_optimizer(plain, is_offloaded=False), 0, 9)
    take_steps(offloaded, optimizer, 0, 9)
    assert all(torch.equal(plain.state_dict()[name], value) for name, value in offloaded.state_dict().items())
    assert optimizer._copies is not None
    for name, parameter in offloaded.named_parameters():
        assert optimizer._copies.values[name].data_ptr() != parameter.data_ptr()
        assert torch.equal(optimizer._copies.values[name], parameter.detach())
        assert parameter.grad is None and optimizer._copies.values[name].grad is None


@pytest.mark.parametrize(("first", "second"), [(True, False), (False, True), (True, True)])
def test_state_is_interchangeable_with_that_of_a_run_without_offload(first: bool, second: bool) -> None:
    """The parameters are loaded after the optimizer's state, as a restore may do: the copies must follow them."""
    whole, before, after = make_model(), make_model(), make_model()
    take_steps(whole, make_optimizer(whole, is_offloaded=False), 0, 9)
    earlier, later = make_optimizer(before, is_offloaded=first), make_optimizer(after, is_offloaded=second)
    take_steps(before, earlier, 0, 4)
    take_steps(after, later, 0, 2)
    later.load_state_dict(keep(copy(earlier.state_dict())))
    after.load_state_dict(before.state_dict())
    take_steps(after, later, 4, 5)
    assert all(torch.equal(whole.state_dict()[name], value) for name, value in after.state_dict().items())


def test_skipped_step_changes_nothing() -> None:
    model = make_model()
    optimizer = make_optimizer(model)
    take_steps(model, optimizer, 0, 2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer.skip_unless(torch.tensor(False))
    take_steps(model, optimizer, 2, 1)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_optimizer_of_your_own_is_not_offloaded() -> None:
    with pytest.raises(TrainerError, match="of AdamW only"):
        Optimizer(make_model().named_parameters(), CONFIG, make=sgd, is_offloaded=True)


def test_strategy_that_changes_parameters_outside_the_optimizer_is_refused() -> None:
    for strategy in ("diloco", "gossip", "parameter_server", "diloco+fsdp"):
        ranks = Ranks(rank=0, world_size=1, device=torch.device("cpu"))
        with pytest.raises(TrainerError, match="cannot be combined with"):
            create_strategy(strategy, ranks, StrategyOptions(strategy=strategy, offload="optimizer"))
    assert find_problem(Config(strategy="fsdp", offload="optimizer")) is None


@pytest.mark.parametrize(
    ("device", "offload", "expected"),
    [("cpu", "none", 16), ("cpu", "optimizer", 24), ("cuda:0", "none", 16), ("cuda:0", "optimizer", 8)],
)
def test_memory_that_a_parameter_takes_on_the_device(device: str, offload: str, expected: float) -> None:
    ranks = Ranks(rank=0, world_size=1, device=torch.device(device))
    assert create_strategy("fsdp", ranks, StrategyOptions(offload=offload)).count_state_bytes() == expected


@pytest.mark.parametrize("strategy", spread(["fsdp", "zero1", "zero2", "ddp"], every=0, more=4))
def test_killed_run_resumes_bit_identically_with_and_without_offload(
    worlds: Worlds, tmp_path: Path, strategy: str
) -> None:
    """Offloaded until a kill, then not, then offloaded again: each step has the loss of a run that never was."""
    expected = worlds.train(tmp_path / "plain", strategy, ranks=2)
    path = tmp_path / "offloaded"
    worlds.train(path, strategy, *OFFLOAD, ranks=2, kill_after=3)
    worlds.train(path, strategy, ranks=2, kill_after=5, attempt=2)
    losses = worlds.train(path, strategy, *OFFLOAD, ranks=2, attempt=3)
    assert {step: set(found) for step, found in losses.items()} == {step: {loss[0]} for step, loss in expected.items()}
