"""The registry of strategies, and their combinations. A new strategy is a new file and one line in this table."""

import importlib
from typing import TYPE_CHECKING

from trainers.errors import TrainerError
from trainers.strategies.options import StrategyOptions, find_problem

# This module does not import torch: configs inherit the options above, and flags are read before torch is imported.
if TYPE_CHECKING:
    from trainers.ranks import Ranks
    from trainers.strategies.base import Strategy

# Import paths as text, so that choosing one strategy does not import the others.
STRATEGIES = {
    "ddp": "trainers.strategies.ddp:DataParallel",
    "allreduce": "trainers.strategies.allreduce:AllReduce",
    "zero1": "trainers.strategies.zero:ShardedOptimizerStates",
    "zero2": "trainers.strategies.zero:ShardedGradients",
    "fsdp": "trainers.strategies.fsdp:FullyShardedDataParallel",
    "hsdp": "trainers.strategies.hsdp:HybridShardedDataParallel",
    "tensor": "trainers.strategies.tensor:TensorParallel",
    "expert": "trainers.strategies.expert:ExpertParallel",
    "context": "trainers.strategies.context:ContextParallel",
    "pipeline": "trainers.strategies.pipeline:PipelineParallel",
    "parameter_server": "trainers.strategies.parameter_server:ParameterServer",
    "diloco": "trainers.strategies.diloco:Diloco",
    "gossip": "trainers.strategies.gossip:Gossip",
}


def create_strategy(name: str, ranks: "Ranks", options: StrategyOptions | None = None) -> "Strategy":
    """Create the strategy of a name, or of several joined by `+`, the first along the slowest axis of the mesh.

    Raises TrainerError for an unknown name, an invalid option, an axis used twice or a mesh that does not fit.
    """
    from trainers.strategies.combined import Combined
    from trainers.strategies.grid import Grid

    options = options or StrategyOptions()
    problem = find_problem(options)
    if problem:
        raise TrainerError(problem)
    axes = find_axes(name)
    classes = [_load(part) for part in name.split("+")]
    if len(classes) > 1 and "server" in axes:
        raise TrainerError("`parameter_server` cannot be combined")
    for part, strategy in zip(name.split("+"), classes, strict=True):
        others = [other for other in name.split("+") if other != part]
        if strategy.PARTNERS is not None and not set(others) <= set(strategy.PARTNERS):
            raise TrainerError(f"`{part}` can be combined with {', '.join(strategy.PARTNERS)} only")
    grid = Grid(ranks, axes, options.mesh)
    if len(classes) == 1:
        return classes[0](ranks, grid, options)
    return Combined(ranks, grid, options, [strategy(ranks, grid, options) for strategy in classes])


def find_axes(name: str) -> tuple[str, ...]:
    """Return the axes of a strategy's mesh. Raises TrainerError for an unknown name or an axis used twice."""
    names = name.split("+")
    for part in names:
        if part not in STRATEGIES:
            raise TrainerError(f"unknown strategy `{part}`; known: {', '.join(STRATEGIES)}")
    axes = tuple(axis for part in names for axis in _load(part).AXES)
    if len(set(axes)) < len(axes):
        raise TrainerError(f"`{name}` uses an axis twice: {' x '.join(axes)}")
    return axes


def _load(name: str) -> "type[Strategy]":
    module_name, _, class_name = STRATEGIES[name].partition(":")
    strategy: type[Strategy] = getattr(importlib.import_module(module_name), class_name)
    return strategy
