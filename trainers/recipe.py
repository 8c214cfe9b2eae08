"""The part of a run that differs between entry points: a model, samples and a loss."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # entry points import this before torch
    import torch

    from trainers.data import Samples
    from trainers.optimizer import MakeOptimizer

Forward = Callable[["torch.nn.Module", Any], Any]  # model and inputs of a micro-batch -> outputs
Loss = Callable[[Any, Any], "torch.Tensor"]  # outputs and targets -> mean over the samples, a scalar
Count = Callable[[Any], Any]  # targets of a micro-batch -> number of elements over which its loss is the mean


def call_model(model: "torch.nn.Module", inputs: Any) -> Any:
    """Call the model. A dict of inputs is passed as keyword arguments."""
    return model(**inputs) if isinstance(inputs, Mapping) else model(inputs)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A model, its samples and its loss.

    A batch is a pair (inputs, targets), or a dict, which serves as both inputs and targets.
    """

    model: "torch.nn.Module"  # on the device, or on the `meta` device if `fill` is given
    training: "Samples"
    validation: "Samples | None"
    loss: Loss
    unit: str  # the unit of throughput: tokens, images
    units_per_sample: int
    flops_per_sample: float  # forward and backward, for the share of the device's peak (MFU); 0: unknown
    forward: Forward = call_model
    count: Count | None = None  # default: the loss is the mean over the samples
    demonstrate: "Callable[[torch.nn.Module], str] | None" = None  # text that demonstrates the trained model
    fill: "Callable[[torch.device], None] | None" = None  # allocates and initializes a model on the `meta` device
    make_optimizer: "MakeOptimizer | None" = None  # default: AdamW with the flags' options
    schedule: Callable[[int], float] | None = None  # step -> factor of the learning rate of each group
    about: Mapping[str, Any] = field(default_factory=dict)  # JSON stored with each checkpoint, for `trainers.export`
    # Takes the `about` of a checkpoint; returns why its weights are those of another model, or "".
    find_conflict: Callable[[Mapping[str, Any]], str] = lambda about: ""


# Arguments: the device, and whether the strategy accepts a model on the `meta` device.
Build = Callable[["torch.device", bool], Recipe]
