"""What an entry point brings to a run."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from trainers.data import Samples


@dataclass(frozen=True, kw_only=True)
class Study:
    """What an entry point brings: a model, what it learns from, and how its errors are measured."""

    model: "torch.nn.Module"  # on the device
    training: "Samples"
    validation: "Samples | None"
    loss_of: "Callable[[torch.Tensor, torch.Tensor], torch.Tensor]"  # outputs and targets -> mean over the samples
    unit: str  # what is counted: tokens, images
    units_per_sample: int
    flops_per_sample: float  # of forward and backward, for the share of the device's peak
    demonstrate: "Callable[[torch.nn.Module], str] | None" = None  # what the trained model can do, as text
    fill: "Callable[[torch.device], None] | None" = None  # of a model made without memory: takes it, and draws weights


# The device, and whether the model gets its memory only when a strategy has spread it over ranks.
Bring = Callable[["torch.device", bool], Study]
