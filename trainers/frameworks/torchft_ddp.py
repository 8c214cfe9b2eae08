"""torchft: replicas agree on their number before each step, and a new one receives the state of another."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchft import Manager, ProcessGroupGloo, ProcessGroupNCCL
from torchft.checkpointing import HTTPTransport

from trainers import bridge
from trainers.frameworks.points import SAVE_STEPS, STEPS, WIDTH, read_points

PARTS = int(os.environ["PARTS"])  # parts of a batch: as many as a complete gang has replicas
OWN = bridge.node_addresses()[bridge.node_rank()]
ANSWER = timedelta(seconds=30)


class Transport(HTTPTransport[dict[str, Any]]):
    """Serve a replica's state under its node's address, not its host name, which other nodes may not resolve."""

    def metadata(self) -> str:
        return super().metadata().replace(socket.gethostname(), OWN)


def main() -> None:
    """Train from the state of the other replicas, or else the newest checkpoint, to the last step."""
    bridge.listen()
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if has_gpu else "cpu")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, 1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    def get_state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    store = dist.TCPStore(OWN, 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupNCCL(timeout=ANSWER) if has_gpu else ProcessGroupGloo(timeout=ANSWER),
        load_state_dict=load,
        state_dict=get_state,
        min_replica_size=1,
        use_async_quorum=False,  # a new replica computes its part from its first step on
        init_sync=False,  # all replicas draw the same weights
        timeout=ANSWER,
        rank=0,
        world_size=1,
        store_addr=OWN,
        store_port=store.port,
        hostname=OWN,
        replica_id=f"node-{bridge.node_rank()}-",
        checkpoint_transport=Transport(timeout=ANSWER, num_chunks=0),
    )
    step, folder = bridge.resume()
    if folder:
        load(torch.load(folder / "state.pt", map_location=device, weights_only=True))
        manager.load_state_dict({"step": step, "batches_committed": 0})
    while manager.current_step() < STEPS:
        manager.start_quorum()
        step, rank, ranks = manager.current_step(), manager.participating_rank(), manager.num_participants()
        if rank is None:
            continue
        optimizer.zero_grad()
        own = range(rank, PARTS, ranks)
        total = 0.0
        for part in own:
            inputs, targets = (torch.from_numpy(each).to(device) for each in read_points(step, part, PARTS))
            torch.manual_seed(step * PARTS + part)  # dropout depends only on step and part: no generator is saved
            loss = nn.functional.mse_loss(model(inputs), targets)
            (loss * (ranks / PARTS)).backward()  # the manager divides the sum by `ranks`
            total += loss.item()
        gradients = [each.grad for each in model.parameters() if each.grad is not None]
        summed = torch.cat([each.flatten() for each in gradients])
        manager.allreduce(summed).wait()
        if not manager.should_commit():
            continue  # a replica was lost: the others repeat this step
        for gradient, value in zip(gradients, summed.split([each.numel() for each in gradients]), strict=True):
            gradient.copy_(value.view_as(gradient))
        optimizer.step()
        step = manager.current_step()
        is_leaving = bridge.preempted()  # the others continue
        if bridge.is_first() and (is_leaving or step % SAVE_STEPS == 0 or step == STEPS):
            torch.save(get_state(), bridge.folder_of(step) / "state.pt")
            bridge.commit(step)
        bridge.progress(step, STEPS, total / len(own), ranks=ranks)
        if is_leaving:
            bridge.leave()
    if bridge.is_first():
        bridge.finish(STEPS, [value.cpu().numpy() for value in model.state_dict().values()])
    manager.shutdown(wait=False)


if __name__ == "__main__":
    main()
