"""The state of a run (model, optimizer, position, random numbers): built once, and restored from a checkpoint."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import nn

from trainers.blocks import check_shared, find_shared, prepare_blocks
from trainers.checkpoint import HeldByOne
from trainers.config import RunConfig
from trainers.devices import check_dtype, check_memory
from trainers.errors import TrainerError
from trainers.float8 import convert_linears
from trainers.loop import Position
from trainers.optimizer import Optimizer
from trainers.randomness import RandomNumbers
from trainers.ranks import Ranks
from trainers.recipe import Build, Recipe
from trainers.scaling import LossScale
from trainers.strategies import create_strategy, find_axes
from trainers.strategies.base import Strategy

# Larger than the difference between the seeds of any two ranks.
SEEDS_A_GENERATION = 1_000_003


@dataclass(frozen=True, kw_only=True)
class RunState:
    """The state of one rank. Call `wrapped`; `model` within it has the parameters that this rank trains."""

    recipe: Recipe
    strategy: Strategy
    model: nn.Module
    wrapped: nn.Module
    optimizer: Optimizer
    position: Position
    scaling: LossScale
    random_numbers: RandomNumbers

    @cached_property
    def shared(self) -> dict[str, Any]:
        """The state of the whole run by name; each rank holds all or a part of it."""
        shared = {**self.strategy.shared_state(self.model, self.optimizer), "position": self.position}
        if self.optimizer.values is not None:
            is_holder = getattr(shared["optimizer"], "is_holder", True)
            shared["optimizer_values"] = HeldByOne(self.optimizer.values, is_holder=is_holder)
        if self.scaling.is_on:
            shared["loss_scale"] = self.scaling
        return shared

    @cached_property
    def own(self) -> dict[str, Any]:
        """The state of this rank alone, by name."""
        suffix = self.strategy.grid.name_draws()
        drawn = {f"{name}{suffix}": generators for name, generators in self.random_numbers.list_states().items()}
        own = {**self.strategy.own_state(self.model, self.optimizer), **drawn}
        if self.optimizer.values is not None:
            own["optimizer_values"] = self.optimizer.values
        return own


def build_state(config: RunConfig, build: Build, ranks: Ranks, *, generation: int = 1) -> RunState:
    """Build the state of step 0, sharded over the ranks. `generation` is that of the world of an elastic run."""
    check_dtype(ranks.device, config)
    random_numbers = RandomNumbers(ranks.device)
    random_numbers.seed(config.train.seed)  # equal on all ranks, which draw equal weights
    strategy = create_strategy(config.strategy, ranks, config)
    is_spread = strategy.TAKES_EMPTY and ranks.world_size > 1
    recipe = build(ranks.device, is_spread)
    if recipe.count is not None:
        check_counted(strategy, config.strategy)
    model, fill = recipe.model, recipe.fill
    if not is_spread:
        check_memory(model.parameters(), ranks.device, config, state_bytes=strategy.count_state_bytes())
        if fill is not None:
            fill(ranks.device)
            fill = None
    if config.dtype == "float8":
        convert_linears(model, ranks.device, find_axes(config.strategy))
    prepare_blocks(model, recompute=config.recompute, is_compiled=config.compile)
    # Different on each rank and in each world, so that dropout differs.
    random_numbers.seed(config.train.seed + 1 + strategy.share.draw + SEEDS_A_GENERATION * (generation - 1))
    tied = find_shared(model)
    wrapped = strategy.wrap(model)
    check_shared(model, tied, config.strategy)
    check_memory(model.parameters(), ranks.device, config, state_bytes=strategy.count_state_bytes())
    if fill is not None:
        fill(ranks.device)
    return RunState(
        recipe=recipe,
        strategy=strategy,
        model=model,
        wrapped=wrapped,
        optimizer=Optimizer(
            strategy.list_trained(model),
            config.train,
            make=recipe.make_optimizer,
            schedule=recipe.schedule,
            is_offloaded=config.offload == "optimizer",
        ),
        position=Position(recipe.training.fingerprint),
        scaling=LossScale(config.dtype),
        random_numbers=random_numbers,
    )


def check_counted(strategy: Strategy, name: str) -> None:
    """Raise TrainerError unless all ranks take each step together, each with whole samples of its own."""
    if any(strategy.grid.size(axis) > 1 for axis in strategy.grid.axes if axis not in ("replicate", "shard")):
        raise TrainerError(
            f"`count` needs ranks that take each step together on whole samples, unlike those of `{name}`\n\n"
            "hint: ddp, allreduce, zero1, zero2, fsdp or hsdp"
        )
