"""The strategies by name. A new one is a new file and one line in this table."""

import importlib

from trainers.errors import TrainerError
from trainers.ranks import Ranks
from trainers.strategies.base import Strategy

# Import paths as text, so that choosing one strategy does not import the others.
STRATEGIES = {
    "ddp": "trainers.strategies.ddp:DataParallel",
    "allreduce": "trainers.strategies.allreduce:AllReduce",
}


def create_strategy(name: str, ranks: Ranks) -> Strategy:
    """Make the strategy of that name; an unknown name is an error that lists the known ones."""
    if name not in STRATEGIES:
        raise TrainerError(f"no strategy is called `{name}`; known: {', '.join(STRATEGIES)}")
    module_name, _, class_name = STRATEGIES[name].partition(":")
    strategy: Strategy = getattr(importlib.import_module(module_name), class_name)(ranks)
    return strategy
