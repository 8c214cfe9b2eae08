"""Declarations by which a module states where it may be cut, independent of the strategy."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Slicing:
    """The ways in which one linear layer may be split over ranks."""

    # "column": outputs are spread; "row": inputs are, and outputs summed; "whole": as column, outputs put together.
    way: str
    pieces: int  # what the spread dimension is made of, such as heads; ranks must divide it


@runtime_checkable
class Sliceable(Protocol):
    """A module some of whose linear layers may be spread over ranks."""

    def slicings(self) -> dict[str, Slicing]:
        """Return how to spread layers, by the name of a direct child."""
        ...


class Sequence(Protocol):
    """The part of each sequence that a pass computes (`attention.WholeSequence`)."""

    def find_positions(self, length: int, device: torch.device) -> Tensor:
        """Return where the tokens stand in the whole sequence."""
        ...

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, *, dropout_rate: float = 0.0, mask: Tensor | None = None
    ) -> Tensor:
        """Attend from each token to all earlier positions, on any rank."""
        ...


@runtime_checkable
class KnowsSequence(Protocol):
    """A module that uses positions or attends; a sequence can be cut only if all such modules declare this."""

    sequence: Sequence


@runtime_checkable
class HasExperts(Protocol):
    """A module with experts that may be spread over ranks, each of which then holds an equal run of them."""

    expert_count: int
    # Given rows, sorted by expert, and their number for each of all experts, return what the experts make of them.
    # None: all experts are here.
    exchange: "Exchange | None"

    def list_expert_layers(self) -> list[nn.Module]:
        """Return the children whose parameters are stacks with one entry for each expert."""
        ...


class Exchange(Protocol):
    """Sends rows to the ranks of their experts and brings the results back."""

    def __call__(self, rows: Tensor, counts: Tensor, compute: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Return the result for each row. `compute` takes sorted rows and counts of the experts that are here."""
        ...


@runtime_checkable
class HasOwnLoss(Protocol):
    """A module that adds a loss of its own to the model's, in the backward pass only."""

    loss_scale: float  # what the loss of the current pass is multiplied by


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
