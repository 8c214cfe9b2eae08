"""Ray Tune: trials on the nodes of a Ray cluster. Lost trials resume from checkpoints; finished ones do not rerun."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from ray import tune

from trainers import bridge
from trainers.bridge_ray import connect
from trainers.frameworks.points import SAVE_STEPS, STEPS, WIDTH, read_points

NAME = "ray-tune"
RATES = [0.3 / 2**place for place in range(8)]
TRIAL_STEPS = STEPS // len(RATES)


def run_trial(config: dict[str, float]) -> None:
    """Train one trial, from its newest checkpoint."""
    step, saved = 0, tune.get_checkpoint()
    weights, moment = np.zeros((WIDTH, 1), np.float32), np.zeros((WIDTH, 1), np.float32)
    if saved:
        with saved.as_directory() as folder:
            state = np.load(Path(folder) / "state.npz")
            step, weights, moment = int(state["step"]), state["weights"], state["moment"]
    while step < TRIAL_STEPS:
        inputs, targets = read_points(step, 0, 1)
        error = inputs @ weights - targets
        moment = 0.9 * moment + inputs.T @ error / len(inputs)
        weights = weights - np.float32(config["rate"]) * moment
        step += 1
        metrics = {"step": step, "loss": float((error**2).mean())}
        if step % SAVE_STEPS and step < TRIAL_STEPS:
            tune.report(metrics)
            continue
        with tempfile.TemporaryDirectory() as folder:
            np.savez(Path(folder) / "state.npz", step=step, weights=weights, moment=moment)
            tune.report(metrics, checkpoint=tune.Checkpoint.from_directory(folder))


class TrialReporter(tune.Callback):
    """Report to broker the steps of all trials, and how many steps were repeated."""

    def __init__(self) -> None:
        self.current: set[str] = set()  # trials with a last result that came from this process and is not lost
        self.repeated = 0

    def on_trial_result(self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **_: Any) -> None:
        self.current.add(trial.trial_id)
        self.repeated += max(0, read_step(trial) - (result["step"] - 1))  # `last_result` is still the earlier one
        steps = [result["step"] if each is trial else self.count(each) for each in trials]
        total = TRIAL_STEPS * len(RATES)
        bridge.progress(sum(steps), total, result["loss"], sum(map(floor, steps)) or None, repeated=self.repeated)

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **_: Any) -> None:
        self.current.discard(trial.trial_id)

    on_trial_recover = on_trial_error

    def count(self, trial: Any) -> int:
        """Return a trial's step, or that of the checkpoint from which it will continue."""
        return read_step(trial) if trial.trial_id in self.current else floor(read_step(trial))


def read_step(trial: Any) -> int:
    """Return the step of the trial's last result, which outlives the process."""
    return int((trial.last_result or {}).get("step", 0))


def floor(step: int) -> int:
    """Return the step of the newest checkpoint at `step`."""
    return step if step == TRIAL_STEPS else step // SAVE_STEPS * SAVE_STEPS


def make_tuner() -> tune.Tuner:
    """Return the tuner of an earlier attempt, or a new one. Trials that have finished are not run again."""
    gpus = int(os.environ["SKYPILOT_NUM_GPUS_PER_NODE"])
    trainable = tune.with_resources(run_trial, {"cpu": 1, "gpu": 1 if gpus else 0})
    space = {"rate": tune.grid_search(RATES)}
    place = bridge.checkpoint_dir()
    if tune.Tuner.can_restore(f"{place}/{NAME}"):
        return tune.Tuner.restore(f"{place}/{NAME}", trainable, resume_errored=True, param_space=space)
    run = tune.RunConfig(
        name=NAME,
        storage_path=place,
        failure_config=tune.FailureConfig(max_failures=-1),  # broker limits restarts
        checkpoint_config=tune.CheckpointConfig(num_to_keep=2),
        callbacks=[TrialReporter()],
        verbose=0,
    )
    return tune.Tuner(trainable, param_space=space, run_config=run)


def main() -> None:
    """Run on the first node, continuing from the checkpoint folder of earlier attempts."""
    connect()
    results = sorted(make_tuner().fit(), key=lambda result: result.metrics["config"]["rate"])
    finals = []
    for result in results:
        with result.checkpoint.as_directory() as folder:
            finals.append(np.load(Path(folder) / "state.npz")["weights"])
    best = min(results, key=lambda result: result.metrics["loss"])
    bridge.finish(TRIAL_STEPS * len(RATES), finals, best_rate=best.metrics["config"]["rate"])


if __name__ == "__main__":
    main()
