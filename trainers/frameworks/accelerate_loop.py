"""Hugging Face Accelerate: a custom loop whose model and optimizer Accelerate wraps and saves."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch import nn

from trainers import bridge
from trainers.bridge_accelerate import load, save
from trainers.bridge_torch import agree
from trainers.frameworks.points import SAVE_STEPS, STEPS, WIDTH, read_points


def main() -> None:
    """Train from the newest checkpoint to the last step."""
    bridge.listen()
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    rank, ranks = accelerator.process_index, accelerator.num_processes
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    step = load(accelerator)
    while step < STEPS:
        inputs, targets = (torch.from_numpy(each).to(accelerator.device) for each in read_points(step, rank, ranks))
        # Seed each step, so that a resumed run is exact: the iterator of a DataLoader would draw from the generators
        # that `load_state` restores.
        torch.manual_seed(step * ranks + rank)
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        step += 1
        is_leaving = agree(bridge.preempted())
        if is_leaving or step % SAVE_STEPS == 0 or step == STEPS:
            save(accelerator, step)
        bridge.progress(step, STEPS, loss.item())
        if is_leaving:
            bridge.leave()
    if accelerator.is_main_process:
        bridge.finish(STEPS, [value.cpu().numpy() for value in accelerator.unwrap_model(model).state_dict().values()])
    accelerator.end_training()


if __name__ == "__main__":
    main()
