"""Several strategies on one mesh: `fsdp+tensor --mesh 2x4`, `pipeline+fsdp`, `diloco+fsdp`."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from trainers.errors import TrainerError
from trainers.optimizer import Optimizer
from trainers.ranks import Ranks
from trainers.strategies.base import Passes, Strategy
from trainers.strategies.grid import Grid, Part
from trainers.strategies.options import StrategyOptions

# The order of wrapping: split into stages, slice layers, split sequences, spread experts, replicate or shard, and last
# let replicas drift apart.
ORDER = ("pipeline", "tensor", "context", "expert", "replicate", "shard", "island")


class Combined(Strategy):
    """Strategies along different axes of one grid. Each method is delegated to the part that overrides it."""

    def __init__(self, ranks: Ranks, grid: Grid, options: StrategyOptions, parts: Sequence[Strategy]) -> None:
        """Order the parts by their requirements; the order of names only sets the layout of the ranks."""
        super().__init__(ranks, grid, options)
        self._plain = Strategy(ranks, grid, options)
        for verb in ("step", "run_schedule", "list_trained"):
            names = [type(part).__name__ for part in parts if _has_own(part, verb)]
            if len(names) > 1:
                raise TrainerError(f"cannot be combined because each has its own `{verb}`: {' and '.join(names)}")
        self._parts = sorted(parts, key=lambda part: ORDER.index(part.AXES[0]))

    def wrap(self, model: nn.Module) -> nn.Module:
        """Wrap from the inside out."""
        for part in self._parts:
            model = part.wrap(model)
        return model

    @contextlib.contextmanager
    def micro_step(self, model: nn.Module, *, last: bool) -> Iterator[None]:
        """Enter the contexts of all parts."""
        with contextlib.ExitStack() as stack:
            for part in self._parts:
                stack.enter_context(part.micro_step(model, last=last))
            yield

    def choose_micro_batch(self, batch: int, micro_batch: int) -> int:
        """Delegate to the part with passes of equal size."""
        return self._find_owner("choose_micro_batch").choose_micro_batch(batch, micro_batch)

    @property
    def has_own_schedule(self) -> bool:
        """Return whether one of the parts has its own schedule."""
        return any(part.has_own_schedule for part in self._parts)

    def run_schedule(self, model: nn.Module, passes: Passes) -> Tensor:
        """Run the schedule of the part that has one; for the other parts, all of its passes are one micro-step."""
        with self.micro_step(model, last=True):
            return self._find_owner("run_schedule").run_schedule(model, passes)

    def list_trained(self, model: nn.Module) -> Iterable[tuple[str, Tensor]]:
        """Delegate to the part that selects its own parameters."""
        return self._find_owner("list_trained").list_trained(model)

    def find_mixture(self, model: nn.Module) -> Tensor | None:
        """Delegate to the part that shards parameters."""
        return self._find_owner("find_mixture").find_mixture(model)

    def count_state_bytes(self) -> float:
        """Return the bytes under the part that saves the most memory."""
        return min(part.count_state_bytes() for part in self._parts)

    def cut(self, passes: Passes) -> Passes:
        """Apply the cuts of all parts."""
        for part in self._parts:
            passes = part.cut(passes)
        return passes

    def step(self, model: nn.Module, optimizer: Optimizer, loss: Tensor) -> None:
        """Delegate the update to the part that overrides it."""
        self._find_owner("step").step(model, optimizer, loss)

    def all_reduce_loss(self, loss: Tensor, *, weight: float, is_stop_asked: bool) -> Tensor:
        """Delegate the reduction to the part that overrides `step`."""
        owner = self._find_owner("all_reduce_loss")
        return owner.all_reduce_loss(loss, weight=weight, is_stop_asked=is_stop_asked)

    def shared_state(self, model: nn.Module, optimizer: Optimizer) -> Mapping[str, Any]:
        """Delegate to the part under which ranks hold different values."""
        return self._find_owner("shared_state").shared_state(model, optimizer)

    def own_state(self, model: nn.Module, optimizer: Optimizer) -> Mapping[str, Any]:
        """Delegate to the part under which ranks hold different values."""
        return self._find_owner("own_state").own_state(model, optimizer)

    def find_part(self) -> Part | None:
        """Return the part of the state on this rank if every strategy allows others to hold it too."""
        return self.grid.find_part() if all(part.MOVES_ALONE for part in self._parts) else None

    def has_equal_work(self) -> bool:
        """Return whether work is equal under every part."""
        return all(part.has_equal_work() for part in self._parts)

    def exchanges_last(self) -> bool:
        """Return whether no part exchanges anything earlier."""
        return all(part.exchanges_last() for part in self._parts)

    def _find_owner(self, verb: str) -> Strategy:
        owners = [part for part in self._parts if _has_own(part, verb)]
        assert len(owners) <= 1, f"two parts of a strategy own `{verb}`"
        return owners[0] if owners else self._plain


def _has_own(part: Strategy, verb: str) -> bool:
    return getattr(type(part), verb) is not getattr(Strategy, verb)
