"""Ray Train's TorchTrainer: Ray itself restarts a lost worker from the newest checkpoint."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from ray import train
from ray.train.torch import TorchTrainer, prepare_model
from torch import nn

from trainers import bridge
from trainers.bridge_ray import BridgeRayCallback, connect
from trainers.bridge_torch import agree
from trainers.frameworks.points import SAVE_STEPS, STEPS, WIDTH, read_points


def train_worker(config: dict[str, Any]) -> None:
    """Train in one worker process. All workers report each step, as Ray requires; the first one saves."""
    rank, ranks = train.get_context().get_world_rank(), train.get_context().get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, 1))
    step, saved = 0, train.get_checkpoint()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if saved:
        with saved.as_directory() as folder:
            state = torch.load(Path(folder) / "state.pt", weights_only=True)
        step = state["step"]
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    parallel = prepare_model(model)
    device = next(parallel.parameters()).device
    details: dict[str, Any] = {"start_cpu_s": round(sum(os.times()[:4]), 2)}
    has_saved_for_notice = False
    while step < STEPS:
        inputs, targets = (torch.from_numpy(each).to(device) for each in read_points(step, rank, ranks))
        torch.manual_seed(step * ranks + rank)  # dropout depends only on the step, so no generator is saved
        loss = nn.functional.mse_loss(parallel(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        # The other nodes remain, so save once after a notice and continue until the node is gone.
        is_noticed = not has_saved_for_notice and agree(bridge.preempted())
        has_saved_for_notice = has_saved_for_notice or is_noticed
        metrics = {"step": step, "total": STEPS, "loss": loss.item(), **details}
        details = {}
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = None
            if is_noticed or step % SAVE_STEPS == 0 or step == STEPS:
                if rank == 0:
                    state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
                    torch.save(state, Path(folder) / "state.pt")
                checkpoint = train.Checkpoint.from_directory(folder)
            train.report(metrics, checkpoint=checkpoint)
    if rank == 0:
        bridge.finish(STEPS, [value.cpu().numpy() for value in model.state_dict().values()])


def main() -> None:
    """Run on the first node. A run with the same name and storage path resumes from the newest checkpoint."""
    connect()
    scaling = train.ScalingConfig(
        num_workers=int(os.environ["WORKERS"]), use_gpu=bool(int(os.environ["SKYPILOT_NUM_GPUS_PER_NODE"]))
    )
    run = train.RunConfig(
        name="ray-train",
        storage_path=bridge.checkpoint_dir(),
        failure_config=train.FailureConfig(max_failures=-1),  # broker limits restarts
        checkpoint_config=train.CheckpointConfig(num_to_keep=3),
        callbacks=[BridgeRayCallback()],
    )
    TorchTrainer(train_worker, scaling_config=scaling, run_config=run).fit()


if __name__ == "__main__":
    main()
