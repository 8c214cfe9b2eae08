"""An entry point's part: a model, samples and a loss. Everything else of a run is the same for all of them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # imported by entry points before torch is
    import torch

    from trainers.data import Samples
    from trainers.optimizer import MakeOptimizer

Forward = Callable[["torch.nn.Module", Any], Any]  # model and inputs of a micro-batch -> outputs
Loss = Callable[[Any, Any], "torch.Tensor"]  # outputs and targets -> mean over the samples, a scalar


def call_model(model: "torch.nn.Module", inputs: Any) -> Any:
    """Call the model: a dict of inputs becomes keyword arguments."""
    return model(**inputs) if isinstance(inputs, Mapping) else model(inputs)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A model, its samples and its loss.

    A batch is a pair (inputs, targets) or a dict; of a dict, inputs and targets are the whole dict.
    """

    model: "torch.nn.Module"  # on the device, or without memory on torch's `meta` device if `fill` is given
    training: "Samples"
    validation: "Samples | None"
    loss: Loss
    unit: str  # what is counted: tokens, images
    units_per_sample: int
    flops_per_sample: float  # forward and backward, for the share of the device's peak (MFU); 0: unknown
    forward: Forward = call_model
    demonstrate: "Callable[[torch.nn.Module], str] | None" = None  # text that shows what the trained model can do
    fill: "Callable[[torch.device], None] | None" = None  # allocates and initializes a model on the `meta` device
    make_optimizer: "MakeOptimizer | None" = None  # default: AdamW with the flags' options
    schedule: Callable[[int], float] | None = None  # step -> factor of each group's own learning rate
    about: Mapping[str, Any] = field(default_factory=dict)  # JSON kept with each checkpoint, for `trainers.export`


# The device, and whether the strategy accepts a model without memory (on the `meta` device).
Build = Callable[["torch.device", bool], Recipe]
