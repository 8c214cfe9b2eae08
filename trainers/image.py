"""Trains an image classifier: `python -m trainers.image`, alone, on the broker's nodes or under torchrun.

The pictures are generated, so there is nothing to download and the right answers are known. Run again after any end
but success, it goes on from the newest complete checkpoint.
"""

import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from trainers.image_config import ImageConfig, parse_config
from trainers.launch import end_process, launch_if_needed
from trainers.recipe import Recipe
from trainers.session import run_session

if TYPE_CHECKING:  # torch is imported when flags are known to be right and SIGTERM is heard
    import torch

    from trainers.synthetic_images import SyntheticImages

# SyntheticImages to show at the end what was learnt.
SHOWN_COUNT = 256


def main(arguments: Sequence[str]) -> int:
    """Train as the flags and the environment say; return the exit code."""
    config = parse_config(arguments)
    code = launch_if_needed("trainers.image", arguments, elastic=config.elastic)
    return run_session(config, partial(build, config)) if code is None else code


def build(config: ImageConfig, device: "torch.device", is_spread: bool = False) -> Recipe:
    """The pictures, the network, and the loss."""
    from trainers.losses import class_loss
    from trainers.models.resnet import ResNet, count_flops
    from trainers.synthetic_images import SyntheticImages

    training, validation = SyntheticImages(config.data, "training"), SyntheticImages(config.data, "validation")
    with device:
        model = ResNet(config.model, classes=training.class_count)
    return Recipe(
        model=model,
        training=training,
        validation=validation,
        loss=class_loss,
        unit="images",
        units_per_sample=1,
        flops_per_sample=count_flops(model, config.data.size),
        demonstrate=partial(count_right, validation, device),
    )


def count_right(pictures: "SyntheticImages", device: "torch.device", model: "torch.nn.Module") -> str:
    """How many of some pictures that were not trained on are recognised. All ranks look at the same ones."""
    import torch

    images, classes = pictures.read(0, SHOWN_COUNT)
    model.eval()
    with torch.no_grad():
        guesses = model(images.to(device)).argmax(dim=1).cpu()
    model.train()
    right = int((guesses == classes).sum())
    return f"accuracy: {right / SHOWN_COUNT:.3f} on {SHOWN_COUNT} new pictures of {pictures.class_count} classes"


if __name__ == "__main__":
    end_process(main(sys.argv[1:]))
