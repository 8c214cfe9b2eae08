"""How a module says where it may be cut, without knowing by whom."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import nn


@dataclass(frozen=True, kw_only=True)
class Slicing:
    """How one linear layer may be spread over ranks."""

    # "column": outputs are spread; "row": inputs are, and outputs summed; "whole": as column, outputs put together.
    way: str
    pieces: int  # what the spread dimension is made of, such as heads; ranks must divide it


@runtime_checkable
class Sliceable(Protocol):
    """A module some of whose linear layers may be spread over ranks."""

    def slicings(self) -> dict[str, Slicing]:
        """Return how to spread layers, by the name of a direct child."""
        ...


@runtime_checkable
class Segmentable(Protocol):
    """A model that is a row of blocks and may be spread over ranks in runs of them."""

    blocks: nn.ModuleList

    def cut(self, runs: list[range]) -> list[nn.Module]:
        """Keep these runs of blocks only and return each as a model of its own, sharing parameters with this one.

        The first run of all includes what comes before the blocks, the last what comes after. Names of what is kept
        do not change.
        """
        ...
