"""PyTorch under torchrun's elastic agents: with fewer nodes, each node computes more parts of every batch."""

from __future__ import annotations

import os
from contextlib import nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from trainers import bridge
from trainers.bridge_torch import agree
from trainers.frameworks.points import SAVE_STEPS, STEPS, WIDTH, read_points

PARTS = int(os.environ["PARTS"])  # parts of a batch: as many as a complete gang has ranks
PEER_S = 60  # a rank whose peer is silent ends after this time; gloo's default is 30 minutes


def main() -> None:
    """Train from the newest checkpoint to the last step, or until torchrun changes the gang."""
    bridge.listen()  # torchrun sends SIGTERM before it admits a node, as broker does before a preemption
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_gpu else torch.device("cpu")
    if has_gpu:
        torch.cuda.set_device(device)  # NCCL's collectives use the current device
    dist.init_process_group("nccl" if has_gpu else "gloo", timeout=timedelta(seconds=PEER_S))
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
    own = range(rank, PARTS, ranks)
    while step < STEPS:
        optimizer.zero_grad()
        total = 0.0
        for part in own:
            inputs, targets = (torch.from_numpy(each).to(device) for each in read_points(step, part, PARTS))
            torch.manual_seed(step * PARTS + part)  # dropout depends only on step and part: no generator is saved
            with nullcontext() if part == own[-1] else parallel.no_sync():
                loss = nn.functional.mse_loss(parallel(inputs), targets)
                (loss * (ranks / PARTS)).backward()  # DDP divides the sum by `ranks`
            total += loss.item()
        optimizer.step()
        step += 1
        is_leaving = agree(bridge.preempted())
        if is_leaving or step % SAVE_STEPS == 0 or step == STEPS:
            if bridge.is_first():  # not rank 0, which may be on a node that leaves
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(state, bridge.folder_of(step) / "state.pt")
                bridge.commit(step)
            dist.barrier()  # no rank leaves before the checkpoint is complete
        bridge.progress(step, STEPS, total / len(own), ranks=ranks)
        if is_leaving:
            bridge.leave()
    if bridge.is_first():
        bridge.finish(STEPS, [value.cpu().numpy() for value in model.state_dict().values()])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
