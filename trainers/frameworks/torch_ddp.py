"""PyTorch DistributedDataParallel under torchrun: all ranks have the same weights, so the first one saves."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn

from trainers import bridge
from trainers.bridge_torch import agree
from trainers.frameworks.points import SAVE_STEPS, STEPS, WIDTH, read_points


def main() -> None:
    """Train from the newest checkpoint to the last step."""
    bridge.listen()
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_gpu else torch.device("cpu")
    if has_gpu:
        torch.cuda.set_device(device)  # NCCL's collectives use the current device
    dist.init_process_group("nccl" if has_gpu else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, 1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step, folder = bridge.resume()
    if folder:
        saved = torch.load(folder / "state.pt", map_location=device, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    parallel = nn.parallel.DistributedDataParallel(model, device_ids=[device.index] if has_gpu else None)
    while step < STEPS:
        inputs, targets = (torch.from_numpy(each).to(device) for each in read_points(step, rank, ranks))
        torch.manual_seed(step * ranks + rank)  # dropout depends only on the step, so no generator is saved
        loss = nn.functional.mse_loss(parallel(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        is_leaving = agree(bridge.preempted())
        if is_leaving or step % SAVE_STEPS == 0 or step == STEPS:
            if rank == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(state, bridge.folder_of(step) / "state.pt")
                bridge.commit(step)
            dist.barrier()  # no rank leaves before the checkpoint is complete
        bridge.progress(step, STEPS, loss.item())
        if is_leaving:
            bridge.leave()
    if rank == 0:
        bridge.finish(STEPS, [value.cpu().numpy() for value in model.state_dict().values()])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
