"""Lightning: a LightningModule under its ddp strategy, started by torchrun."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import lightning
import torch
from torch import nn

from trainers import bridge
from trainers.bridge_lightning import BridgeLightningCallback, find_checkpoint
from trainers.frameworks.points import SAVE_STEPS, STEPS, WIDTH, read_points


class Points(torch.utils.data.IterableDataset):
    """Batches from `step` on: a restored Lightning run reads its epoch's data from the beginning."""

    def __init__(self, step: int) -> None:
        self.step = step

    def __iter__(self) -> Iterator[Any]:
        rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
        for step in range(self.step, STEPS):
            inputs, targets = read_points(step, rank, ranks)
            yield step * ranks + rank, torch.from_numpy(inputs), torch.from_numpy(targets)


class Module(lightning.LightningModule):
    """A small regression network as a Lightning module."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, 1))

    def training_step(self, batch: Any, batch_index: int) -> Any:
        seed, inputs, targets = batch
        torch.manual_seed(int(seed))  # dropout depends only on the step, because checkpoints contain no generators
        return nn.functional.mse_loss(self.model(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main() -> None:
    """Train from the newest checkpoint to the last step."""
    torch.manual_seed(0)
    module = Module()
    step, path = find_checkpoint()
    trainer = lightning.Trainer(
        max_steps=STEPS,
        num_nodes=bridge.node_count(),
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        strategy="ddp",
        callbacks=[BridgeLightningCallback(every_steps=SAVE_STEPS)],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    trainer.fit(module, torch.utils.data.DataLoader(Points(step), batch_size=None), ckpt_path=path)
    if trainer.is_global_zero:
        bridge.finish(STEPS, [value.cpu().numpy() for value in module.state_dict().values()])


if __name__ == "__main__":
    main()
