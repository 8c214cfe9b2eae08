"""DeepSpeed ZeRO 1, 2 or 3 (`ZERO_STAGE`); `ZERO_OFFLOAD=1` keeps the optimizer state in host memory."""

from __future__ import annotations

import os

import torch
from torch import nn

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1"))

import deepspeed

from trainers import bridge
from trainers.bridge_torch import agree
from trainers.frameworks.points import SAVE_STEPS, STEPS, WIDTH, read_points

BATCH = 32


def make_config(ranks: int) -> dict[str, object]:
    """Return DeepSpeed's configuration; `ZERO_STAGE` and `ZERO_OFFLOAD` select its sharding."""
    zero: dict[str, object] = {"stage": int(os.environ.get("ZERO_STAGE") or 2)}
    if os.environ.get("ZERO_OFFLOAD") == "1":
        zero["offload_optimizer"] = {"device": "cpu"}
    return {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": BATCH // ranks,
        "gradient_clipping": 1.0,
        "zero_optimization": zero,
        # torch's AdamW: DeepSpeed compiles its own at first use, under a lock that a killed process leaves behind.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


def main() -> None:
    """Train from the newest checkpoint to the last step."""
    bridge.listen()
    has_gpu = torch.cuda.is_available()
    if not has_gpu:  # else DeepSpeed compiles a shared-memory all-reduce for minutes, under the same kind of lock
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("nccl" if has_gpu else "gloo")
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=make_config(ranks))
    step, folder = bridge.resume()
    if folder:
        engine.load_checkpoint(str(folder), tag="state")
    while step < STEPS:
        inputs, targets = (torch.from_numpy(each).to(engine.device) for each in read_points(step, rank, ranks))
        torch.manual_seed(step * ranks + rank)  # dropout depends only on the step, so no generator is saved
        loss = nn.functional.mse_loss(engine(inputs), targets)
        engine.backward(loss)
        engine.step()
        step += 1
        is_leaving = agree(bridge.preempted())
        if is_leaving or step % SAVE_STEPS == 0 or step == STEPS:
            engine.save_checkpoint(str(bridge.folder_of(step)), tag="state")  # every rank writes its shard
            torch.distributed.barrier()
            if rank == 0:
                bridge.commit(step)
            torch.distributed.barrier()  # no rank leaves before the checkpoint is complete
        bridge.progress(step, STEPS, loss.item())
        if is_leaving:
            bridge.leave()
    weights = []
    for parameter in model.parameters():
        with deepspeed.zero.GatheredParameters(parameter):  # under ZeRO 3, a rank holds only its shard
            weights.append(parameter.detach().float().cpu().numpy().copy())
    if rank == 0:
        bridge.finish(STEPS, weights)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
