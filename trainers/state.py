"""What a run trains, and all that decides what becomes of it: built once, and brought back by a checkpoint."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import nn

from trainers.blocks import check_shared, find_shared, prepare_blocks
from trainers.config import RunConfig
from trainers.devices import check_memory
from trainers.loop import Position
from trainers.optimizer import AdamW
from trainers.randomness import RandomNumbers
from trainers.ranks import Ranks
from trainers.scaling import LossScale
from trainers.strategies import create_strategy
from trainers.strategies.base import Strategy
from trainers.study import Bring, Study

# Further apart than any two ranks' draws.
SEEDS_A_GENERATION = 1_000_003


@dataclass(frozen=True, kw_only=True)
class RunState:
    """`wrapped` is called; `model` within it holds the parameters that this rank trains."""

    study: Study
    strategy: Strategy
    model: nn.Module
    wrapped: nn.Module
    optimizer: AdamW
    position: Position
    scaling: LossScale
    random_numbers: RandomNumbers

    @cached_property
    def shared(self) -> dict[str, Any]:
        """Of the whole run, by name: each rank holds it or a part of it."""
        shared = {**self.strategy.shared_state(self.model, self.optimizer), "position": self.position}
        if self.scaling.is_on:
            shared["loss_scale"] = self.scaling
        return shared

    @cached_property
    def own(self) -> dict[str, Any]:
        """Of this rank alone, by name."""
        return {**self.strategy.own_state(self.model, self.optimizer), "random_numbers": self.random_numbers}


def build_state(config: RunConfig, bring: Bring, ranks: Ranks, *, generation: int = 1) -> RunState:
    """At step 0, spread over the ranks. `generation`: of the world, where it changes while the run goes on."""
    random_numbers = RandomNumbers(ranks.device)
    random_numbers.seed(config.train.seed)  # equal on all ranks: they draw equal weights
    strategy = create_strategy(config.strategy, ranks, config)
    is_spread = strategy.TAKES_EMPTY and ranks.world_size > 1
    study = bring(ranks.device, is_spread)
    model, fill = study.model, study.fill
    if not is_spread:
        check_memory(model.parameters(), ranks.device, config)
        if fill is not None:
            fill(ranks.device)
            fill = None
    prepare_blocks(model, recompute=config.recompute, is_compiled=config.compile)
    # Unequal: they drop different activations, and others again in another world.
    random_numbers.seed(config.train.seed + 1 + strategy.share.draw + SEEDS_A_GENERATION * (generation - 1))
    tied = find_shared(model)
    wrapped = strategy.wrap(model)
    check_shared(model, tied, config.strategy)
    check_memory(model.parameters(), ranks.device, config)
    if fill is not None:
        fill(ranks.device)
    return RunState(
        study=study,
        strategy=strategy,
        model=model,
        wrapped=wrapped,
        optimizer=AdamW(model.named_parameters(), config.train),
        position=Position(study.training.fingerprint),
        scaling=LossScale(config.dtype),
        random_numbers=random_numbers,
    )
