"""Train your own model: `from trainers import train`.

This supports everything that `trainers.lm` does except strategies that split the model (`tensor`, `pipeline`,
`context`, `expert`): all other strategies, exact resume, elastic runs, flags and `--help`.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from trainers.config import RunConfig, find_run_problem
from trainers.flags import parse_flags
from trainers.launch import launch_if_needed, run_process
from trainers.recipe import Count, Forward, Loss, Recipe, call_model
from trainers.session import run_session

if TYPE_CHECKING:  # torch is imported after the flags are checked and SIGTERM is handled
    import torch

# Maps named parameters, as accepted by `torch.optim`, to an optimizer.
OwnOptimizer = Callable[[list[tuple[str, Any]]], "torch.optim.Optimizer"]


def train(
    *,
    model: "torch.nn.Module | Callable[[], torch.nn.Module]",
    samples: Any,
    loss: Loss,
    validation: Any = None,
    forward: Forward = call_model,
    optimizer: OwnOptimizer | None = None,
    schedule: Callable[[int], float] | None = None,
    collate: Callable[[list[Any]], Any] | None = None,
    count: Count | None = None,
    on_finish: "Callable[[torch.nn.Module], str] | None" = None,
    unit: str = "samples",
    flops_per_sample: float = 0.0,
    defaults: Mapping[str, Any] | None = None,
) -> NoReturn:
    """Train as the script's flags and the environment specify, and end the process.

    Call it last, below `if __name__ == "__main__":`. Run the same command again after a preemption or a failure: it
    resumes from the newest complete checkpoint, bit-identically on CPUs.

    - `model`: a module, or preferably a function that returns one. It is called once on each rank, with the seed set
      and on the rank's device.
    - `samples`: a map-style Dataset (`len()` and `[index]`; an item may depend only on its index), an object with
      `fingerprint` and `read(first, count)`, or a function that returns either. The same applies to `validation`.
    - `loss(outputs, targets)`: returns the mean over the samples, a scalar. If batches are pairs, the model gets the
      first part and the loss the second; if they are dicts, the model gets keyword arguments and the loss the dict.
    - `forward(model, inputs)`: called instead of `model(inputs)` or `model(**inputs)`.
    - `optimizer(named_parameters)`: replaces AdamW with the flags' learning rate. `schedule(step)` returns a factor of
      the learning rate of each of its groups, for steps from 0; without it, the rate is constant.
    - `collate(items)`: returns a batch from a list of items; default: torch's `default_collate`.
    - `count(targets)`: returns the number of elements over which the loss of a pass is the mean, if not samples: of
      tokens that are not ignored. It gets what the loss gets, and passes are weighted by it.
    - `on_finish(model)`: returns text to print after the last step; called on all ranks.
    - `flops_per_sample`: FLOPs of forward and backward passes, to report MFU.
    - `defaults`: default values of flags by name, such as `{"train.steps": 1000}`.
    """
    recipe = {
        "model": model,
        "samples": samples,
        "loss": loss,
        "validation": validation,
        "forward": forward,
        "optimizer": optimizer,
        "schedule": schedule,
        "collate": collate,
        "count": count,
        "on_finish": on_finish,
        "unit": unit,
        "flops_per_sample": flops_per_sample,
    }
    run_process(partial(run_training, sys.argv[1:], recipe, defaults=defaults or {}))


def run_training(arguments: Sequence[str], recipe: Mapping[str, Any], *, defaults: Mapping[str, Any]) -> int:
    """Train as `train` does, but return the exit code."""
    config = parse_config(arguments, defaults, has_validation=recipe.get("validation") is not None)
    exit_code = launch_if_needed(None, arguments, elastic=config.elastic, is_warm=config.warm)
    return run_session(config, partial(build, config, recipe)) if exit_code is None else exit_code


def parse_config(arguments: Sequence[str], defaults: Mapping[str, Any], *, has_validation: bool) -> RunConfig:
    """Read the script's flags and config file; exit with code 2 on invalid values."""

    def find_problem(config: RunConfig) -> str | None:
        if config.evaluate.every_steps and not has_validation:
            return "`--evaluate.every_steps` needs samples to evaluate on: `train(..., validation=...)`"
        return find_run_problem(config)

    script = sys.modules["__main__"]
    return parse_flags(
        RunConfig,
        arguments,
        program=f"python {sys.argv[0]}" if sys.argv[0] else "train",
        description=script.__doc__ or "Train a model on any number of nodes; run it again to resume.",
        find_problem=find_problem,
        defaults=defaults,
    )


def build(config: RunConfig, recipe: Mapping[str, Any], device: "torch.device", is_spread: bool = False) -> Recipe:
    """Build the recipe, and call the parts of it that are functions."""
    import torch

    from trainers.dataset import open_samples

    seed, collate = config.train.seed, recipe.get("collate")
    model, validation, optimizer = recipe["model"], recipe.get("validation"), recipe.get("optimizer")
    if not isinstance(model, torch.nn.Module):
        with device:
            model = model()
    model = model.to(device)
    share_weights(model)
    return Recipe(
        model=model,
        training=open_samples(recipe["samples"], seed=seed, collate=collate),
        validation=None if validation is None else open_samples(validation, seed=0, collate=collate),
        loss=recipe["loss"],
        forward=recipe.get("forward") or call_model,
        count=recipe.get("count"),
        unit=recipe.get("unit", "samples"),
        units_per_sample=1,
        flops_per_sample=recipe.get("flops_per_sample", 0.0),
        demonstrate=recipe.get("on_finish"),
        make_optimizer=(lambda parameters: optimizer(list(parameters.items()))) if optimizer else None,
        schedule=recipe.get("schedule"),
    )


def share_weights(model: "torch.nn.Module") -> None:
    """Broadcast the first rank's weights and buffers: the model may have been created before the seed was set."""
    import torch
    import torch.distributed as dist

    if dist.is_initialized():
        with torch.no_grad():
            for tensor in [*model.parameters(), *model.buffers()]:
                dist.broadcast(tensor, 0)
