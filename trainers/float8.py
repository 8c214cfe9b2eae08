"""Linear layers that multiply in float8 (`--dtype float8`), by torchao. Parameters and checkpoints stay float32.

Inputs, weights and gradients are scaled by their maximum (torchao's tensorwise recipe) before each product.
"""

import importlib.util
from typing import Any

import torch
from torch import nn

from trainers.blocks import find_blocks
from trainers.errors import TrainerError

# Matrix units multiply float8 in tiles: both sides of a weight must be multiples of this.
SIDE_MULTIPLE = 16
# Ada and Hopper are the first NVIDIA generations with float8.
CAPABILITY_MIN = (8, 9)
# Axes along which each rank multiplies with whole weights.
AXES = {"replicate", "shard", "island"}


def convert_linears(model: nn.Module, device: torch.device, axes: tuple[str, ...]) -> None:
    """Replace the linear layers of the model's blocks, in place; names and parameters remain.

    Embeddings, norms and the last layer keep their dtype. On a CPU float8 is emulated. Raises TrainerError if torchao
    is missing, the GPU has no float8, or no layer qualifies.
    """
    if importlib.util.find_spec("torchao") is None:
        raise TrainerError("`--dtype float8` requires the package torchao\n\nhint: `pip install torchao`")
    if not set(axes) <= AXES:
        raise TrainerError(
            "`--dtype float8` needs whole weights on each rank: use ddp, allreduce, zero1, zero2 or fsdp"
        )
    if device.type == "cuda" and not has_float8(device):
        name = torch.cuda.get_device_name(device)
        raise TrainerError(
            f"`--dtype float8` requires a GPU with float8 (NVIDIA Ada, Hopper or newer, AMD MI300), not {name}\n\n"
            "hint: `--dtype bfloat16`"
        )
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    def is_suitable(module: nn.Module, _: str) -> bool:
        weight: Any = getattr(module, "weight", None)
        return type(module) is nn.Linear and all(side % SIDE_MULTIPLE == 0 for side in weight.shape)

    chosen = [block for block in find_blocks(model) if any(is_suitable(module, "") for module in block.modules())]
    if not chosen:
        raise TrainerError(
            f"`--dtype float8` found no linear layer within a block whose sides are multiples of {SIDE_MULTIPLE}"
        )
    config = Float8LinearConfig(emulate=device.type == "cpu")
    for block in chosen:
        convert_to_float8_training(block, module_filter_fn=is_suitable, config=config)


def has_float8(device: torch.device) -> bool:
    """Return whether a GPU multiplies in float8."""
    if torch.version.hip is not None:
        return "MI3" in torch.cuda.get_device_name(device)
    return torch.cuda.get_device_capability(device) >= CAPABILITY_MIN
