"""Every knob of a training run: one frozen tree of dataclasses, each field a flag with its own help.

Imports nothing heavy, so `--help` and a mistyped flag answer at once.
"""

import argparse
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainers.knobs import knob
from trainers.strategies.options import StrategyOptions


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of the network."""

    depth: int = knob(4, "transformer blocks")
    width: int = knob(128, "size of the residual stream, a multiple of the heads")
    heads: int = knob(4, "attention heads")
    context: int = knob(128, "bytes the model sees at once")
    dropout: float = knob(0.0, "share of activations dropped while training")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What is read, and in which order."""

    path: str = knob("", "file to train on, read as bytes; empty: text that ships with Python")
    seed: int = knob(0, "seed of the shuffle")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The optimisation."""

    steps: int = knob(200, "optimizer steps in the whole run")
    batch: int = knob(16, "samples a step, over all ranks whatever their number")
    micro_batch: int = knob(8, "most samples of one forward pass on one rank")
    learning_rate: float = knob(2e-3, "peak of the learning rate")
    learning_rate_min: float = knob(2e-4, "learning rate at the last step")
    warmup_steps: int = knob(20, "steps of linear rise to the peak")
    weight_decay: float = knob(0.1, "decay of matrices a step, times the learning rate")
    norm_max: float = knob(1.0, "gradients are clipped to this norm")
    precision: str = knob("float32", "arithmetic of the forward pass", ("float32", "bfloat16"))
    seed: int = knob(0, "seed of the weights and of dropout")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """How often the run is saved, and how much is kept."""

    every_steps: int = knob(20, "steps between checkpoints; 0 saves at the end and on preemption only")
    keep: int = knob(3, "complete checkpoints kept")


@dataclass(frozen=True, kw_only=True)
class Config(StrategyOptions):
    """A whole run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)


def parse_config(arguments: Sequence[str], program: str = "python -m trainers.lm") -> Config:
    """Read flags such as `--model.depth 6`; an unknown flag or a value that cannot work exits with code 2."""
    # An abbreviation that is unique today breaks when the next knob arrives.
    parser = argparse.ArgumentParser(prog=program, description="Train a small language model.", allow_abbrev=False)
    for name, knob_field in iterate_knobs(Config):
        parser.add_argument(
            f"--{name}",
            type=type(knob_field.default),
            default=knob_field.default,
            choices=knob_field.metadata["choices"] or None,
            help=f"{knob_field.metadata['help']} (default: {knob_field.default!r})",
        )
    values = vars(parser.parse_args(arguments))
    config: Config = _build(Config, values, "")
    problem = find_problem(config)
    if problem:
        parser.error(problem)
    return config


def to_arguments(config: Config) -> list[str]:
    """Write a config as flags that `parse_config` reads back to an equal one."""
    arguments = []
    for name, _ in iterate_knobs(Config):
        value: Any = config
        for part in name.split("."):
            value = getattr(value, part)
        arguments.append(f"--{name}={value}")
    return arguments


def find_problem(config: Config) -> str | None:
    """Say what cannot work in a config, or None."""
    model, train = config.model, config.train
    positive = {
        "--model.depth": model.depth,
        "--model.width": model.width,
        "--model.heads": model.heads,
        "--model.context": model.context,
        "--train.steps": train.steps,
        "--train.batch": train.batch,
        "--train.micro_batch": train.micro_batch,
        "--checkpoint.keep": config.checkpoint.keep,
    }
    for flag, value in positive.items():
        if value < 1:
            return f"`{flag}` must be at least 1, not {value}"
    if model.width % model.heads:
        return f"`--model.width {model.width}` is not a multiple of `--model.heads {model.heads}`"
    if not 0.0 <= model.dropout < 1.0:
        return f"`--model.dropout` must be in [0, 1), not {model.dropout}"
    if config.checkpoint.every_steps < 0 or train.warmup_steps < 0:
        return "`--checkpoint.every_steps` and `--train.warmup_steps` cannot be negative"
    return None


def iterate_knobs(tree: type, prefix: str = "") -> Iterator[tuple[str, "dataclasses.Field[Any]"]]:
    """Yield every leaf of the tree as its dotted name and field, in order of declaration."""
    for each in dataclasses.fields(tree):
        if dataclasses.is_dataclass(each.type):
            assert isinstance(each.type, type)
            yield from iterate_knobs(each.type, f"{prefix}{each.name}.")
        else:
            yield f"{prefix}{each.name}", each


def _build(tree: Any, values: dict[str, Any], prefix: str) -> Any:
    parts = {}
    for each in dataclasses.fields(tree):
        name = f"{prefix}{each.name}"
        parts[each.name] = values[name] if name in values else _build(each.type, values, f"{name}.")
    return tree(**parts)
