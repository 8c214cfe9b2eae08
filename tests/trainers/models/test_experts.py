"""The router and the experts, against sums written out token by token."""

import dataclasses
from typing import Any

import pytest
import torch
from torch.nn import functional

from trainers.config import ModelConfig
from trainers.models import create_language_model
from trainers.models.experts import MixtureOfExperts, Router, count_idle_parameters

SHAPE = ModelConfig(
    kind="llama", width=12, heads=2, depth=2, hidden_width=8, context=6, vocabulary=16, experts=4, experts_per_token=2
)


def make_mixture(**changes: Any) -> MixtureOfExperts:
    torch.manual_seed(3)
    mixture = MixtureOfExperts(dataclasses.replace(SHAPE, **changes))
    with torch.no_grad():
        for parameter in mixture.parameters():
            parameter.normal_(std=0.3)
    return mixture


def compute_expert(mixture: MixtureOfExperts, place: int, token: torch.Tensor) -> torch.Tensor:
    middle = functional.linear(token, mixture.expand.weight[place])
    if mixture.gate is None:
        middle = functional.gelu(middle)
    else:
        middle = functional.silu(functional.linear(token, mixture.gate.weight[place])) * middle
    return functional.linear(middle, mixture.project.weight[place])


@pytest.mark.parametrize("changes", [{}, {"kind": "gpt", "experts_per_token": 1}, {"experts_per_token": 4}], ids=str)
def test_outputs_are_the_weighted_sum_of_the_preferred_experts(changes: dict[str, Any]) -> None:
    mixture = make_mixture(**changes)
    hidden = torch.randn(2, 5, 12)
    outputs, uses = mixture(hidden), mixture.router.uses
    for token, found in zip(hidden.flatten(0, 1), outputs.flatten(0, 1), strict=True):
        chances = (mixture.router.weight @ token).softmax(0).detach()
        best = chances.argsort(descending=True)[:uses].tolist()
        total = sum(float(chances[place]) for place in best) if uses > 1 else 1.0
        expected = sum(chances[place] / total * compute_expert(mixture, place, token) for place in best)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_tokens_above_the_capacity_skip_the_block_in_order() -> None:
    """Four tokens, two experts, one use: the first two that prefer an expert are computed, the third is zero."""
    mixture = make_mixture(experts=2, experts_per_token=1, expert_capacity=1.0)
    with torch.no_grad():
        mixture.router.weight.zero_()
        mixture.router.weight[0, 0] = 5.0
    hidden = torch.randn(1, 4, 12)
    hidden[0, :, 0] = torch.tensor([1.0, 1.0, -1.0, 1.0])
    outputs = mixture(hidden)[0]
    assert [bool(row.any()) for row in outputs] == [True, True, True, False]


@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_every_expert_and_the_router_get_a_gradient_even_without_tokens(kind: str) -> None:
    mixture = make_mixture(kind=kind, experts_per_token=1)
    mixture(torch.randn(1, 1, 12)).square().sum().backward()
    assert all(parameter.grad is not None for parameter in mixture.parameters())


def test_balance_loss_is_1_for_equal_experts_and_largest_for_a_single_busy_one() -> None:
    router = Router(dataclasses.replace(SHAPE, experts_per_token=1, balance_weight=1.0))
    with torch.no_grad():
        router.weight[:, :4] = 50.0 * torch.eye(4)
    even = torch.eye(4, 12)
    assert float(router(even).loss.detach()) == pytest.approx(1.0)
    assert float(router(even[:1].expand(4, -1)).loss.detach()) == pytest.approx(4.0)


def test_own_loss_reaches_the_router_with_the_scale_of_the_pass() -> None:
    def measure(scale: float, weight: float) -> torch.Tensor:
        mixture = make_mixture(balance_weight=weight, router_z_weight=weight)
        mixture.loss_scale = scale
        torch.manual_seed(7)
        mixture(torch.randn(2, 5, 12)).sum().backward()
        gradient = mixture.router.weight.grad
        assert gradient is not None
        return gradient

    without, once, thrice = measure(1.0, 0.0), measure(1.0, 0.5), measure(3.0, 0.5)
    assert not torch.equal(without, once)
    torch.testing.assert_close(thrice - without, 3 * (once - without), rtol=1e-4, atol=1e-6)


def test_router_loss_decreases_when_it_alone_is_trained() -> None:
    mixture = make_mixture(balance_weight=1.0)
    hidden = torch.randn(4, 16, 12) + 1.0
    optimizer = torch.optim.SGD(mixture.router.parameters(), lr=0.05)
    losses = []
    for _ in range(50):
        loss = mixture.router(hidden.flatten(0, 1)).loss
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < losses[0] and losses[-1] < 1.2


@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_idle_parameters_are_those_of_unused_experts(kind: str) -> None:
    shape = dataclasses.replace(SHAPE, kind=kind)
    with torch.device("meta"):
        model = create_language_model(kind, shape)
        used = create_language_model(kind, dataclasses.replace(shape, experts=2))
    routers = SHAPE.depth * 2 * SHAPE.width  # of two experts fewer
    count = [sum(parameter.numel() for parameter in each.parameters()) for each in (model, used)]
    assert count_idle_parameters(shape) == count[0] - count[1] - routers
    assert count_idle_parameters(ModelConfig()) == 0


def test_experts_are_initialised_like_a_perceptron() -> None:
    torch.manual_seed(0)
    model = create_language_model("llama", dataclasses.replace(SHAPE, width=64, hidden_width=64, heads=2))
    mixture = model.blocks[0].perceptron
    assert float(mixture.expand.weight.detach().std()) == pytest.approx(0.02, rel=0.05)
    assert float(mixture.project.weight.detach().std()) == pytest.approx(0.02 / 2, rel=0.05)
    assert not torch.equal(mixture.expand.weight[0], mixture.expand.weight[1])
