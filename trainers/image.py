"""Train an image classifier: `python -m trainers.image`, in one process, on broker's nodes or under torchrun.

The images are generated, so nothing is downloaded and the true classes are known. Run the same command again after a
preemption or a failure: it resumes from the newest complete checkpoint.
"""

import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from trainers.image_config import ImageConfig, parse_config
from trainers.launch import launch_if_needed, run_process
from trainers.recipe import Recipe
from trainers.session import run_session

if TYPE_CHECKING:  # torch is imported after the flags are checked and SIGTERM is handled
    import torch

    from trainers.synthetic_images import SyntheticImages

# Images for the accuracy that is printed at the end.
SHOWN_COUNT = 256


def main(arguments: Sequence[str]) -> int:
    """Train as the flags and the environment specify; return the exit code."""
    config = parse_config(arguments)
    code = launch_if_needed("trainers.image", arguments, elastic=config.elastic, is_warm=config.warm)
    return run_session(config, partial(build, config)) if code is None else code


def build(config: ImageConfig, device: "torch.device", is_spread: bool = False) -> Recipe:
    """Build the images, the network and the loss."""
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
        demonstrate=partial(measure_accuracy, validation, device),
    )


def measure_accuracy(images_source: "SyntheticImages", device: "torch.device", model: "torch.nn.Module") -> str:
    """Return the accuracy on new images as text. All ranks use the same ones."""
    import torch

    images, classes = images_source.read(0, SHOWN_COUNT)
    model.eval()
    with torch.no_grad():
        guesses = model(images.to(device)).argmax(dim=1).cpu()
    model.train()
    right = int((guesses == classes).sum())
    return f"accuracy: {right / SHOWN_COUNT:.3f} on {SHOWN_COUNT} new images of {images_source.class_count} classes"


if __name__ == "__main__":
    run_process(partial(main, sys.argv[1:]))
