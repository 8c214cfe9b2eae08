"""Protocols by which a module declares how it may be split over ranks, independent of the strategy."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Slicing:
    """The ways in which one linear layer may be split over ranks."""

    # "column": outputs are sharded; "row": inputs are sharded and outputs summed; "whole": column, then all-gather.
    way: str
    pieces: int  # indivisible units of the sharded dimension, such as heads; the number of ranks must divide it


@runtime_checkable
class Sliceable(Protocol):
    """A module with linear layers that may be sharded over ranks."""

    def slicings(self) -> dict[str, Slicing]:
        """Return how to shard layers, by the name of a direct child."""
        ...


class Sequence(Protocol):
    """The part of each sequence that a pass computes (`attention.WholeSequence`)."""

    def find_positions(self, length: int, device: torch.device) -> Tensor:
        """Return the positions of this pass's tokens in the whole sequence, `[length]`."""
        ...

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, *, dropout_rate: float = 0.0, mask: Tensor | None = None
    ) -> Tensor:
        """Attend from each token to all earlier positions, on any rank."""
        ...


@runtime_checkable
class KnowsSequence(Protocol):
    """A module that uses positions or attention; sequences can be split only if all such modules declare this."""

    sequence: Sequence


@runtime_checkable
class HasExperts(Protocol):
    """A module with experts that may be spread over ranks; each rank then holds equally many consecutive ones."""

    expert_count: int
    # Maps rows sorted by expert, and the number of rows for each expert, to the experts' outputs.
    # None: all experts are on this rank.
    exchange: "Exchange | None"

    def list_expert_layers(self) -> list[nn.Module]:
        """Return the children whose parameters are stacked by expert in dimension 0."""
        ...


class Exchange(Protocol):
    """Sends rows to the ranks of their experts, and the results back."""

    def __call__(self, rows: Tensor, counts: Tensor, compute: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Return the result for each row. `compute` takes sorted rows and counts for the experts on this rank."""
        ...


@runtime_checkable
class HasOwnLoss(Protocol):
    """A module that adds an auxiliary loss to the model's, in the backward pass only."""

    loss_scale: float  # factor of the loss of the current pass


@runtime_checkable
class Segmentable(Protocol):
    """A model that consists of consecutive blocks and may be split into stages."""

    blocks: nn.ModuleList

    def cut(self, runs: list[range]) -> list[nn.Module]:
        """Keep only these runs of blocks; return each as a model that shares its parameters with this one.

        The first run of the whole model includes the layers before the blocks, the last those after them. Parameter
        names do not change.
        """
        ...
