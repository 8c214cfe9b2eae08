"""The options of the image classifier; those that all trainers share are in trainers.config."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainers.config import RunConfig, TrainConfig, find_run_problem, find_small
from trainers.flags import parse_flags
from trainers.knobs import knob


@dataclass(frozen=True, kw_only=True)
class ResNetConfig:
    """The shape of the network."""

    stages: int = knob(3, "stages; each but the first halves the image and doubles the channels")
    blocks: int = knob(1, "residual blocks per stage")
    width: int = knob(16, "channels of the first stage")


@dataclass(frozen=True, kw_only=True)
class ImagesConfig:
    """The generated images: noisy gratings, whose direction and fineness determine the class."""

    size: int = knob(16, "height and width in pixels")
    directions: int = knob(4, "directions of the gratings")
    finenesses: int = knob(2, "finenesses of the gratings; classes are directions x finenesses")
    noise: float = knob(1.0, "standard deviation of the noise; the grating's amplitude is 1")
    count: int = knob(50_000, "images per epoch")
    seed: int = knob(0, "seed of the images")


@dataclass(frozen=True, kw_only=True)
class ImageConfig(RunConfig):
    """All options of a run of the classifier."""

    train: TrainConfig = field(
        default_factory=lambda: TrainConfig(batch=32, micro_batch=32, learning_rate=5e-3, learning_rate_min=5e-4)
    )
    model: ResNetConfig = field(default_factory=ResNetConfig)
    data: ImagesConfig = field(default_factory=ImagesConfig)


PRESETS: Mapping[str, Mapping[str, Any]] = {
    # CIFAR's ResNet-20, arXiv:1512.03385, section 4.2: three stages of three blocks, 0.27 million weights.
    "resnet20": {"model.blocks": 3, "data.size": 32, "train.batch": 128, "train.micro_batch": 128, "train.steps": 2000},
    # Four stages and eight blocks as in ResNet-18, for small images: 11 million weights.
    "resnet18": {
        "model.stages": 4,
        "model.blocks": 2,
        "model.width": 64,
        "data.size": 32,
        "data.directions": 10,
        "data.finenesses": 10,
        "train.batch": 256,
        "train.micro_batch": 256,
        "train.steps": 5000,
        "train.learning_rate": 1e-3,
        "train.learning_rate_min": 1e-4,
        "dtype": "bfloat16",
    },
}


def parse_config(arguments: Sequence[str]) -> ImageConfig:
    """Read flags, a config file and a preset; exit with code 2 on invalid values."""
    return parse_flags(
        ImageConfig,
        arguments,
        program="python -m trainers.image",
        description="Train a residual network on generated images, on any number of nodes; run it again to resume.",
        presets=PRESETS,
        find_problem=find_problem,
    )


def find_problem(config: ImageConfig) -> str | None:
    """Return the problem in a config, or None."""
    model, data = config.model, config.data
    positive = {
        "--model.stages": model.stages,
        "--model.blocks": model.blocks,
        "--model.width": model.width,
        "--data.directions": data.directions,
        "--data.finenesses": data.finenesses,
        "--data.count": data.count,
    }
    if problem := find_small(positive, 1) or find_small({"--data.noise": data.noise}, 0) or find_run_problem(config):
        return problem
    if model.width % 8 and model.width > 8:
        return f"`--model.width {model.width}` must be a multiple of 8, the channels of a normalisation group"
    least = 1 << (model.stages - 1)
    if data.size < max(8, least):
        return f"`--data.size {data.size}` is too small for {model.stages} stages; the minimum is {max(8, least)}"
    return None
