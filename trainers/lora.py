"""Low-rank adapters (LoRA, arXiv:2106.09685): weights are frozen, and the product of two thin matrices is added.

The names of the weights do not change, so a checkpoint or a Hugging Face folder loads with or without adapters.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainers.config import LoraConfig
from trainers.errors import TrainerError

# Linear layers that get an adapter, by a part of their name.
TARGETS = {"attention": (".attention.",), "all": (".attention.", ".perceptron.")}
DOWN, UP = "lora_a", "lora_b"  # the names in the paper and in the package peft


class LoraLinear(nn.Linear):
    """A linear layer with a low-rank adapter in parallel."""

    def __init__(self, layer: nn.Linear, *, rank: int, scale: float) -> None:
        """Take over the weights of `layer`. The adapter adds zero at first, because `lora_b` is zero."""
        device, dtype = layer.weight.device, layer.weight.dtype
        with torch.device("meta"):  # the base class creates weights that are replaced at once
            super().__init__(layer.in_features, layer.out_features, bias=layer.bias is not None)
        self.weight, self.bias = layer.weight, layer.bias
        self.scale = scale
        self.lora_a = nn.Parameter(torch.zeros(rank, layer.in_features, device=device, dtype=dtype))
        self.lora_b = nn.Parameter(torch.zeros(layer.out_features, rank, device=device, dtype=dtype))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the output of the layer plus that of the adapter, as two thin products."""
        added = functional.linear(functional.linear(inputs, self.lora_a), self.lora_b)
        return super().forward(inputs) + self.scale * added


def add_adapters(model: nn.Module, config: LoraConfig) -> None:
    """Freeze all parameters and add trainable adapters to the layers that `config` selects."""
    if not config.rank:
        return
    model.requires_grad_(False)
    for path, module in list(model.named_modules()):
        for name, layer in list(module.named_children()):
            is_target = any(part in f".{path}.{name}" for part in TARGETS[config.targets])
            if is_target and type(layer) is nn.Linear:
                setattr(module, name, LoraLinear(layer, rank=config.rank, scale=config.alpha / config.rank))


def check_strategy(config: LoraConfig, strategy: str) -> None:
    """Raise a TrainerError if the strategy would have to shard adapters."""
    if config.rank and "tensor" in strategy.split("+"):
        raise TrainerError("`--lora.rank` cannot be combined with `tensor`: adapters cannot be sharded")


def merge_adapters(tensors: Mapping[str, Tensor], *, scale: float) -> dict[str, Tensor]:
    """Return the weights with the adapters merged into them."""
    merged: dict[str, Any] = {name: value for name, value in tensors.items() if not name.endswith((DOWN, UP))}
    for name, down in tensors.items():
        if name.endswith(f".{DOWN}"):
            layer = name.removesuffix(DOWN)
            weight = merged[f"{layer}weight"]
            merged[f"{layer}weight"] = weight + (scale * (tensors[f"{layer}{UP}"] @ down)).to(weight.dtype)
    return merged
