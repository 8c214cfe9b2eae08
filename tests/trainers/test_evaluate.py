"""Evaluation leaves no trace in training: otherwise it would matter when a resumed run evaluates."""

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trainers.config import EvaluateConfig, RunConfig, TrainConfig
from trainers.dataset import DatasetSamples
from trainers.evaluate import Evaluation
from trainers.randomness import RandomNumbers
from trainers.ranks import Ranks, choose_precision
from trainers.recipe import Recipe
from trainers.strategies import create_strategy

CPU = torch.device("cpu")
ALONE = Ranks(rank=0, world_size=1, device=CPU)
ITEMS = [(torch.full((3,), float(index)), torch.tensor(float(index))) for index in range(8)]


def denoise(outputs: Tensor, targets: Tensor) -> Tensor:
    """Draw from every generator, as the loss of a diffusion model draws noise and time steps."""
    noise = torch.rand(outputs.shape) + random.random() + float(np.random.rand())
    return (outputs - targets[:, None] * noise).square().mean()


def open_evaluation(model: nn.Module, numbers: RandomNumbers) -> Evaluation:
    samples: Any = DatasetSamples(ITEMS, seed=0)
    config = RunConfig(train=TrainConfig(batch=4, micro_batch=2), evaluate=EvaluateConfig(every_steps=2, samples=4))
    recipe = Recipe(
        model=model,
        training=samples,
        validation=samples,
        loss=denoise,
        unit="samples",
        units_per_sample=1,
        flops_per_sample=0.0,
    )
    strategy = create_strategy(config.strategy, ALONE, config)
    return Evaluation(config, model, strategy, ALONE, recipe, choose_precision(CPU, "float32"), numbers)


def test_loss_that_draws_is_the_same_each_time_and_the_next_step_draws_as_without_it() -> None:
    numbers = RandomNumbers(CPU)
    numbers.seed(5)
    expected = [torch.rand(1).item(), random.random(), float(np.random.rand())]
    numbers.seed(5)
    evaluation = open_evaluation(nn.Linear(3, 3), numbers)
    numbers.seed(5)
    assert evaluation.run() == evaluation.run()
    assert [torch.rand(1).item(), random.random(), float(np.random.rand())] == expected


def test_frozen_layers_keep_their_mode() -> None:
    """Before, they trained from the first evaluation on, and in a resumed run only from its first one."""
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
    model[1].eval()
    open_evaluation(model, RandomNumbers(CPU)).run()
    assert [module.training for module in model.modules()] == [True, True, False, True]
