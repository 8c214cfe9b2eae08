"""The same training as `trainers.lm`, written by hand in one file: the baseline for its throughput.

No checkpoints, no resume, no reports except one line per step.
"""

import math
import os
import sys

import torch
import torch.distributed as dist
from torch.nn import functional

from trainers.config import Config
from trainers.models import create_language_model
from trainers.texts import read_shipped_text


def main() -> None:
    steps = int(sys.argv[1])
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.set_num_threads(1)
    config = Config()
    train, context = config.train, config.model.context
    torch.manual_seed(0)
    model = create_language_model(config.model.kind, config.model)
    wrapped = model
    if world_size > 1:
        dist.init_process_group("gloo")
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
    matrices = [each for each in model.parameters() if each.dim() >= 2]
    others = [each for each in model.parameters() if each.dim() < 2]
    groups = [{"params": matrices, "weight_decay": train.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=train.learning_rate, betas=(0.9, 0.95), eps=1e-8)
    text = torch.frombuffer(bytearray(read_shipped_text()), dtype=torch.uint8)
    share = train.batch // world_size
    micro_batch = min(train.micro_batch, share)
    generator = torch.Generator().manual_seed(rank)
    for step in range(steps):
        warmth = min(1.0, (step + 1) / train.warmup_steps)
        rate = train.learning_rate * warmth * (0.55 + 0.45 * math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = rate
        passes = share // micro_batch
        for place in range(passes):
            starts = torch.randint(len(text) - context - 1, (micro_batch,), generator=generator)
            windows = torch.stack([text[start : start + context + 1] for start in starts]).long()
            if world_size > 1:
                wrapped.require_backward_grad_sync = place == passes - 1
            logits = wrapped(windows[:, :-1])
            loss = functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()) / passes
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), train.norm_max)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        # As honest as the trainer: the mean of all ranks, every step.
        total = loss.detach() * passes / world_size
        if world_size > 1:
            dist.all_reduce(total)
        mean = total.item()
        if rank == 0:
            print(f"step {step + 1}/{steps}  loss {mean:.4f}", flush=True)
    if world_size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
