"""The optimizer's state by name: what checkpoints hold, and optimizers of your own."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trainers.config import TrainConfig
from trainers.errors import TrainerError
from trainers.optimizer import MakeOptimizer, Optimizer, find_learning_rate, read_counters

CONFIG = TrainConfig(steps=20, warmup_steps=2, learning_rate=0.05)


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Linear(4, 3)


def take_steps(model: nn.Module, optimizer: Optimizer, first: int, count: int) -> None:
    for step in range(first, first + count):
        generator = torch.Generator().manual_seed(step)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()


def copy(state: dict[str, object]) -> dict[str, object]:
    """Copy as a checkpoint does: apart from the live tensors."""
    return {
        key: {name: tensor.clone() for name, tensor in value.items()} if isinstance(value, dict) else value
        for key, value in state.items()
    }


def test_state_has_the_names_of_checkpoints_written_before_torchs_adamw_was_used() -> None:
    """0.1's optimizer wrote these keys; a checkpoint of it is read into them."""
    model = make_model()
    optimizer = Optimizer(model.named_parameters(), CONFIG)
    take_steps(model, optimizer, 0, 3)
    state = optimizer.state_dict()
    assert set(state) == {"first", "second", "steps_done", "moves_done"}
    assert set(state["first"]) == set(state["second"]) == {"weight", "bias"}
    assert (state["steps_done"], state["moves_done"]) == (3, 3)
    assert all(bool((each >= 0).all()) for each in state["second"].values()), "the mean of squares"
    assert any(bool((each < 0).any()) for each in state["first"].values())


def sgd(parameters: Mapping[str, Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(list(parameters.values()), lr=0.1, momentum=0.9)


def adamax(parameters: Mapping[str, Tensor]) -> torch.optim.Optimizer:
    return torch.optim.Adamax(list(parameters.values()), lr=0.1)


@pytest.mark.parametrize("make", [None, sgd, adamax])
def test_state_taken_over_continues_bit_identically(make: MakeOptimizer | None) -> None:
    schedule = (lambda step: 1 / (1 + step)) if make else None
    whole, first, second = make_model(), make_model(), make_model()
    take_steps(whole, Optimizer(whole.named_parameters(), CONFIG, make=make, schedule=schedule), 0, 9)
    optimizer = Optimizer(first.named_parameters(), CONFIG, make=make, schedule=schedule)
    take_steps(first, optimizer, 0, 4)
    second.load_state_dict(first.state_dict())
    later = Optimizer(second.named_parameters(), CONFIG, make=make, schedule=schedule)
    later.load_state_dict(copy(optimizer.state_dict()))
    assert later.learning_rate == optimizer.learning_rate
    take_steps(second, later, 4, 5)
    assert all(torch.equal(whole.state_dict()[name], value) for name, value in second.state_dict().items())


@pytest.mark.parametrize("steps_saved", [0, 2])
@pytest.mark.parametrize(
    "make",
    [
        lambda named: torch.optim.SGD(named, lr=0.1, momentum=0.9, weight_decay=0.1),
        lambda named: torch.optim.SGD(named, lr=0.1, momentum=0.9, dampening=0.5),
        lambda named: torch.optim.Adam(named, lr=0.1, weight_decay=0.1, amsgrad=True),
        lambda named: torch.optim.NAdam(named, lr=0.1),
        lambda named: torch.optim.RAdam(named, lr=0.1),
        lambda named: torch.optim.Adamax(named, lr=0.1),
        lambda named: torch.optim.Adagrad(named, lr=0.1, weight_decay=0.1, initial_accumulator_value=0.1),
        lambda named: torch.optim.Adadelta(named, weight_decay=0.1),
        lambda named: torch.optim.RMSprop(named, centered=True, momentum=0.9, weight_decay=0.1),
        lambda named: torch.optim.ASGD(named, lr=0.1, t0=2),
        lambda named: torch.optim.Rprop(named, lr=0.1),
    ],
    ids=["SGD", "dampened", "Adam", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "ASGD", "Rprop"],
)
def test_optimizer_of_your_own_moves_as_it_does_alone_and_after_a_restart(make: Any, steps_saved: int) -> None:
    """The bias gets its first gradient late, as a layer that is not used at first."""

    def take(model: nn.Module, optimizer: Any, first: int, count: int) -> None:
        for step in range(first, first + count):
            model.zero_grad()
            for name, parameter in model.named_parameters():
                if name != "bias" or step >= 3:
                    generator = torch.Generator().manual_seed(step)
                    parameter.grad = torch.randn(parameter.shape, generator=generator)
            optimizer.step()

    def wrap(model: nn.Module) -> Optimizer:
        return Optimizer(model.named_parameters(), CONFIG, make=lambda named: make(list(named.items())))

    alone, first, second = make_model(), make_model(), make_model()
    take(alone, make(list(alone.named_parameters())), 0, 6)
    optimizer = wrap(first)
    take(first, optimizer, 0, steps_saved)
    later = wrap(second)
    second.load_state_dict(first.state_dict())
    later.load_state_dict(copy(optimizer.state_dict()))
    take(second, later, steps_saved, 6 - steps_saved)
    assert all(torch.equal(alone.state_dict()[name], value) for name, value in second.state_dict().items())


def take_some(model: nn.Module, optimizer: Any, step: int, *, but: str = "") -> None:
    """Take a step in which one parameter gets no gradient."""
    model.zero_grad()
    for name, parameter in model.named_parameters():
        if name != but:
            parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(step))
    optimizer.step()


def fused_sgd(named: Mapping[str, Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(list(named.values()), lr=0.1, momentum=0.9, dampening=0.5, fused=True)


def test_fused_optimizer_whose_first_steps_are_skipped_begins_as_if_they_had_not_been_taken() -> None:
    """Its momenta were left as the allocator gave them: fused SGD fills them in its first step unless it is skipped."""
    alone, model = make_model(), make_model()
    bare = fused_sgd(dict(alone.named_parameters()))
    optimizer = Optimizer(model.named_parameters(), CONFIG, make=fused_sgd)
    for step in range(2):
        optimizer.skip_unless(torch.tensor(False))
        take_some(model, optimizer, step)
    later = Optimizer(model.named_parameters(), CONFIG, make=fused_sgd)
    later.load_state_dict(copy(optimizer.state_dict()))
    for step in range(2, 5):
        take_some(alone, bare, step)
        later.skip_unless(torch.tensor(True))
        take_some(model, later, step)
    assert all(torch.equal(alone.state_dict()[name], value) for name, value in model.state_dict().items())


def test_fused_optimizer_takes_a_parameter_whose_first_gradient_comes_late_also_after_a_skipped_step() -> None:
    model = make_model()
    optimizer = Optimizer(model.named_parameters(), CONFIG, make=fused_sgd)
    take_some(model, optimizer, 0, but="bias")
    optimizer.skip_unless(torch.tensor(False))
    take_some(model, optimizer, 1, but="bias")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    take_some(model, optimizer, 2)
    assert not any(torch.equal(before[name], value) for name, value in model.state_dict().items())


class Mixed(torch.optim.Optimizer):
    """Momentum without a counter for matrices, as in Muon; for others, a counter of updates."""

    def __init__(self, parameters: list[Tensor]) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for value in group["params"]:
                if value.grad is not None and value.dim() > 1:
                    kept = self.state[value].setdefault("momentum", torch.ones_like(value))
                    value.sub_(group["lr"] * kept.mul_(0.9).add_(value.grad))
                elif value.grad is not None:
                    count = self.state[value].setdefault("step", torch.zeros(()))
                    value.sub_(group["lr"] / count.add_(1) * value.grad)


@pytest.mark.parametrize("is_older", [False, True])
def test_momentum_without_a_counter_is_kept_beside_parameters_that_were_updated_less_often(is_older: bool) -> None:
    def make(named: Mapping[str, Tensor]) -> torch.optim.Optimizer:
        return Mixed(list(named.values()))

    torch.manual_seed(3)
    whole = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3))
    torch.manual_seed(3)
    parted = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3))
    optimizer = Optimizer(whole.named_parameters(), CONFIG, make=make)
    for step in range(2):
        take_some(whole, optimizer, step, but="1.bias")
    later = Optimizer(parted.named_parameters(), CONFIG, make=make)
    parted.load_state_dict(whole.state_dict())
    state = copy(optimizer.state_dict())
    if is_older:  # only the counted ones were named
        state["moves_done"] = '{"0.bias": 2, "1.weight": 2, "1.bias": 0}'
    later.load_state_dict(state)
    for step in range(2, 4):
        take_some(whole, optimizer, step)
        take_some(parted, later, step)
    assert all(torch.equal(whole.state_dict()[name], value) for name, value in parted.state_dict().items())


class Counted(torch.optim.Optimizer):
    """With numbers in its groups, as in schedule-free optimizers and Prodigy, and with a list for each parameter."""

    def __init__(self, parameters: list[Tensor]) -> None:
        super().__init__(parameters, {"lr": 0.1, "k": 0, "rates": []})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] += 1
            group["rates"].append(group["lr"] / group["k"])
            group["sum"] = group.get("sum", 0.0) + group["rates"][-1]
            for value in group["params"]:
                if value.grad is not None:
                    norms = self.state[value].setdefault("norms", [])
                    norms.append(value.grad.norm())
                    value.sub_(group["sum"] / (1 + max(norms)) * value.grad)


def make_counted(named: Mapping[str, Tensor]) -> torch.optim.Optimizer:
    return Counted(list(named.values()))


def test_values_of_an_optimizer_outside_its_tensors_are_those_of_it_alone_and_after_a_restart() -> None:
    alone, first, second = make_model(), make_model(), make_model()
    bare = make_counted(dict(alone.named_parameters()))
    for step in range(6):
        take_some(alone, bare, step)
    optimizer = Optimizer(first.named_parameters(), CONFIG, make=make_counted)
    for step in range(3):
        take_some(first, optimizer, step)
    later = Optimizer(second.named_parameters(), CONFIG, make=make_counted)
    second.load_state_dict(first.state_dict())
    assert later.values is not None and optimizer.values is not None
    saved = optimizer.values.state_dict()
    take_some(first, optimizer, 3)  # the next step does not change what is being written
    later.load_state_dict(copy(optimizer.state_dict()))
    later.steps_done = 3
    later.values.load_state_dict(saved)
    for step in range(3, 6):
        take_some(second, later, step)
    assert all(torch.equal(alone.state_dict()[name], value) for name, value in second.state_dict().items())


def test_options_of_a_group_that_updates_do_not_change_are_those_of_the_program() -> None:
    model = make_model()
    optimizer = Optimizer(model.named_parameters(), CONFIG, make=sgd)
    later = Optimizer(
        model.named_parameters(),
        CONFIG,
        make=lambda named: torch.optim.SGD(list(named.values()), lr=0.2, weight_decay=0.5, momentum=0.8),
    )
    assert later.values is not None and optimizer.values is not None
    later.values.load_state_dict(optimizer.values.state_dict())
    (group,) = later._optimizer.param_groups
    assert (group["lr"], group["weight_decay"], group["momentum"]) == (0.2, 0.5, 0.8)


def test_optimizer_whose_state_cannot_be_saved_is_refused_at_the_start() -> None:
    class Closed(Counted):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for value in self.param_groups[0]["params"]:
                self.state[value]["rule"] = lambda: None

    with pytest.raises(TrainerError, match="cannot be saved"):
        Optimizer(make_model().named_parameters(), CONFIG, make=lambda named: Closed(list(named.values())))


def test_making_an_optimizer_of_your_own_changes_no_parameter() -> None:
    model, untouched = make_model(), make_model()
    Optimizer(model.named_parameters(), CONFIG, make=sgd)
    assert all(torch.equal(untouched.state_dict()[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("make", [None, sgd])
def test_skipped_step_changes_neither_parameters_nor_moments(make: MakeOptimizer | None) -> None:
    model = make_model()
    optimizer = Optimizer(model.named_parameters(), CONFIG, make=make)
    take_steps(model, optimizer, 0, 2)
    before, state = {name: value.clone() for name, value in model.state_dict().items()}, copy(optimizer.state_dict())
    optimizer.skip_unless(torch.tensor(False))
    take_steps(model, optimizer, 2, 1)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    after = optimizer.state_dict()
    assert after.pop("steps_done") == 3 and state.pop("steps_done") == 2
    torch.testing.assert_close(after, state, rtol=0, atol=0)


def test_frozen_parameters_have_no_state() -> None:
    model = make_model()
    next(model.parameters()).requires_grad_(False)
    assert set(Optimizer(model.named_parameters(), CONFIG).state_dict()["first"]) == {"bias"}


def test_parameter_that_was_not_given_is_an_error() -> None:
    model = make_model()
    with pytest.raises(TrainerError, match="not among those"):
        Optimizer(model.named_parameters(), CONFIG, make=lambda _: torch.optim.SGD([nn.Parameter(torch.ones(1))]))


def test_counters_on_a_device_are_read_with_one_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("__int__", "__float__", "item"):
        monkeypatch.setattr(Tensor, name, lambda tensor: pytest.fail("read alone"))
    counters = {"a": torch.tensor(3.0), "b": 2, "c": torch.tensor(5.0), "d": 7.0}
    assert list(read_counters(counters).items()) == [("a", 3), ("b", 2), ("c", 5), ("d", 7)]
    assert read_counters({}) == {}


def test_weight_decay_applies_to_matrices_only() -> None:
    """As in GPT-2 and Llama; without gradients, decay alone moves a weight."""
    values = {"matrix": torch.ones(2, 2), "norm": torch.ones(2), "scale": torch.ones(())}
    parameters = {name: nn.Parameter(value) for name, value in values.items()}
    config = TrainConfig(steps=10, warmup_steps=0, learning_rate=0.1, learning_rate_min=0.1, weight_decay=0.5)
    optimizer = Optimizer(parameters.items(), config)
    for parameter in parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert parameters["matrix"].tolist() == [[pytest.approx(0.95)] * 2] * 2
    assert parameters["norm"].tolist() == [1.0, 1.0] and parameters["scale"].item() == 1.0


def test_moments_decay_at_the_usual_rates_of_language_models() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    optimizer = Optimizer([("x", parameter)], TrainConfig(warmup_steps=0))
    parameter.grad = torch.ones(2)
    optimizer.step()
    state = optimizer.state_dict()
    assert state["first"]["x"].tolist() == pytest.approx([0.1, 0.1])
    assert state["second"]["x"].tolist() == pytest.approx([0.05, 0.05])


def test_each_of_several_updates_in_a_step_has_its_share_of_the_rate() -> None:
    def move(rate_share: float) -> float:
        parameter = nn.Parameter(torch.zeros(1))
        config = TrainConfig(steps=10, warmup_steps=0, learning_rate=0.1, learning_rate_min=0.1)
        optimizer = Optimizer([("x", parameter)], config)
        parameter.grad = torch.ones(1)
        optimizer.step(schedule_step=3, rate_share=rate_share)
        assert optimizer.steps_done == 4
        return parameter.item()

    assert move(1.0) == pytest.approx(-0.1) and move(0.25) == pytest.approx(-0.025)


def test_run_is_finished_after_its_last_step_and_not_before() -> None:
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = Optimizer([("x", parameter)], TrainConfig(steps=2, warmup_steps=0))
    found = []
    for _ in range(2):
        found.append(optimizer.is_finished)
        parameter.grad = torch.ones(1)
        optimizer.step()
    assert [*found, optimizer.is_finished] == [False, False, True]


def test_first_step_of_a_warm_up_moves_and_the_last_step_has_the_least_rate() -> None:
    config = TrainConfig(steps=11, warmup_steps=4, learning_rate=1.0, learning_rate_min=0.1)
    rates = [find_learning_rate(step, config) for step in range(11)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0] and rates[10] == pytest.approx(0.1)
    assert rates[7] == pytest.approx(0.55) and rates[4:] == sorted(rates[4:], reverse=True)
