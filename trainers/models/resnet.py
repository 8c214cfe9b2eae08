"""A residual network for small images.

It uses group normalization instead of batch normalization (arXiv:1803.08494): the result for a sample does not depend
on the others in its pass. So neither the micro-batch nor the number of ranks changes the training, and there are no
running means that could differ between ranks.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainers.image_config import ResNetConfig

# Channels per group, if this divides their number.
GROUP_WIDTH = 8


class ResNet(nn.Module):
    """Maps images `[batch, 3, size, size]` to logits `[batch, classes]`."""

    def __init__(self, config: ResNetConfig, classes: int) -> None:
        """Build the network with weights drawn from the current torch generator."""
        super().__init__()
        self.stem = nn.Conv2d(3, config.width, 3, padding=1, bias=False)
        blocks: list[nn.Module] = []
        width = config.width
        for stage in range(config.stages):
            for place in range(config.blocks):
                is_narrowing = stage > 0 and place == 0
                blocks.append(Block(width, config.width << stage, stride=2 if is_narrowing else 1))
                width = config.width << stage
        self.blocks = nn.ModuleList(blocks)
        self.norm = make_norm(width)
        self.head = nn.Linear(width, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        """Return logits `[batch, classes]` from the mean over positions."""
        hidden = self.stem(images)
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(functional.relu(self.norm(hidden)).mean(dim=(2, 3)))
        return logits


class Block(nn.Module):
    """Two convolutions, each after a norm (arXiv:1603.05027), with a residual connection."""

    def __init__(self, entering: int, leaving: int, stride: int) -> None:
        """Build the layers; a stride of 2 halves the image."""
        super().__init__()
        self.first_norm = make_norm(entering)
        self.first = nn.Conv2d(entering, leaving, 3, stride=stride, padding=1, bias=False)
        self.second_norm = make_norm(leaving)
        self.second = nn.Conv2d(leaving, leaving, 3, padding=1, bias=False)
        is_changing = stride > 1 or entering != leaving
        self.shortcut = nn.Conv2d(entering, leaving, 1, stride=stride, bias=False) if is_changing else None

    def forward(self, hidden: Tensor) -> Tensor:
        """Add the branch to the shortcut, `[batch, channels, height, width]`."""
        normed = functional.relu(self.first_norm(hidden))
        branch = self.second(functional.relu(self.second_norm(self.first(normed))))
        result: Tensor = branch + (hidden if self.shortcut is None else self.shortcut(normed))
        return result


def make_norm(width: int) -> nn.Module:
    """Return a group normalization for `width` channels."""
    norm: nn.Module = nn.GroupNorm(max(1, width // GROUP_WIDTH), width)
    return norm


def count_flops(model: nn.Module, size: int) -> float:
    """Return the FLOPs of one image, forward and backward: three times those of the forward pass."""
    total = 0.0

    def count(module: nn.Module, inputs: tuple[Tensor], outputs: Tensor) -> None:
        nonlocal total
        assert isinstance(module, nn.Conv2d | nn.Linear)
        places = outputs[0, 0].numel() if isinstance(module, nn.Conv2d) else 1
        total += 2 * module.weight.numel() * places

    layers = [module for module in model.modules() if isinstance(module, nn.Conv2d | nn.Linear)]
    hooks = [module.register_forward_hook(count) for module in layers]
    with torch.no_grad():
        model(torch.zeros(1, 3, size, size, device=next(model.parameters()).device))
    for hook in hooks:
        hook.remove()
    return 3 * total
