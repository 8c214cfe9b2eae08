"""Low-rank adapters (LoRA, arXiv:2106.09685): weights are frozen, and a product of two thin matrices is added.

Names of the weights do not change, so a checkpoint or a Hugging Face folder fits with or without adapters.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainers.config import LoraConfig
from trainers.errors import TrainerError

# Which linear layers get an adapter, by a part of their name.
TARGETS = {"attention": (".attention.",), "all": (".attention.", ".perceptron.")}
DOWN, UP = "lora_a", "lora_b"  # as the paper and the package peft call them


class LoraLinear(nn.Linear):
    """A linear layer with an adapter beside it."""

    def __init__(self, layer: nn.Linear, *, rank: int, scale: float) -> None:
        """Take over the weights of `layer`. The adapter starts at zero, for `lora_b` does."""
        device, dtype = layer.weight.device, layer.weight.dtype
        with torch.device("meta"):  # the weights that the base class creates are replaced at once
            super().__init__(layer.in_features, layer.out_features, bias=layer.bias is not None)
        self.weight, self.bias = layer.weight, layer.bias
        self.scale = scale
        self.lora_a = nn.Parameter(torch.zeros(rank, layer.in_features, device=device, dtype=dtype))
        self.lora_b = nn.Parameter(torch.zeros(layer.out_features, rank, device=device, dtype=dtype))

    def forward(self, inputs: Tensor) -> Tensor:
        """Add the adapter's output, computed in two thin steps."""
        added = functional.linear(functional.linear(inputs, self.lora_a), self.lora_b)
        return super().forward(inputs) + self.scale * added


def add_adapters(model: nn.Module, config: LoraConfig) -> None:
    """Freeze all parameters and give the layers that `config` names adapters that are trained."""
    if not config.rank:
        return
    model.requires_grad_(False)
    for path, module in list(model.named_modules()):
        for name, layer in list(module.named_children()):
            is_target = any(part in f".{path}.{name}" for part in TARGETS[config.targets])
            if is_target and type(layer) is nn.Linear:
                setattr(module, name, LoraLinear(layer, rank=config.rank, scale=config.alpha / config.rank))


def check_strategy(config: LoraConfig, strategy: str) -> None:
    """Raise a TrainerError if adapters cannot be spread."""
    if config.rank and "tensor" in strategy.split("+"):
        raise TrainerError("`--lora.rank` cannot be combined with `tensor`: adapters are not spread over ranks")


def merge_adapters(tensors: Mapping[str, Tensor], *, scale: float) -> dict[str, Tensor]:
    """Return the weights with adapters added into them."""
    merged: dict[str, Any] = {name: value for name, value in tensors.items() if not name.endswith((DOWN, UP))}
    for name, down in tensors.items():
        if name.endswith(f".{DOWN}"):
            layer = name.removesuffix(DOWN)
            weight = merged[f"{layer}weight"]
            merged[f"{layer}weight"] = weight + (scale * (tensors[f"{layer}{UP}"] @ down)).to(weight.dtype)
    return merged
