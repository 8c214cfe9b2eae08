"""GPT-2 trained as nanoGPT's `train.py` does it, on one device, without checkpoints: the baseline of `bench_gpu`.

The whole model compiled, fused AdamW, autocast, TensorFloat-32, pinned batches, gradients accumulated and clipped, the
loss read every tenth step, and no biases: nanoGPT's defaults (github.com/karpathy/nanoGPT).
"""

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

READ_STEPS = 10


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.mix = nn.Linear(width, 3 * width, bias=False)
        self.project = nn.Linear(width, width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        batch, time_, width = hidden.shape
        parts = self.mix(hidden).split(width, dim=2)
        query, key, value = (part.view(batch, time_, self.heads, -1).transpose(1, 2) for part in parts)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        result: Tensor = self.project(mixed.transpose(1, 2).reshape(batch, time_, width))
        return result


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.first_norm, self.second_norm = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.attention = Attention(width, heads)
        self.expand = nn.Linear(width, 4 * width, bias=False)
        self.project = nn.Linear(4 * width, width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.first_norm(hidden))
        result: Tensor = hidden + self.project(functional.gelu(self.expand(self.second_norm(hidden))))
        return result


class Model(nn.Module):
    def __init__(self, asked: argparse.Namespace) -> None:
        super().__init__()
        self.tokens = nn.Embedding(asked.vocabulary, asked.width)
        self.places = nn.Embedding(asked.context, asked.width)
        self.blocks = nn.ModuleList(Block(asked.width, asked.heads) for _ in range(asked.depth))
        self.norm = nn.LayerNorm(asked.width, bias=False)
        self.head = nn.Linear(asked.width, asked.vocabulary, bias=False)
        self.tokens.weight = self.head.weight
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(self.norm(hidden))
        return functional.cross_entropy(logits.view(-1, logits.shape[-1]), targets.reshape(-1))


def main() -> None:
    parser = argparse.ArgumentParser(description="Train GPT-2 as nanoGPT does; print tokens/s as JSON.")
    for name in ("depth", "width", "heads", "context", "vocabulary", "batch", "micro_batch", "steps"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--data", required=True, help="a file of 16-bit tokens")
    asked = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.manual_seed(1337)
    model: Any = Model(asked).to(device)
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95), fused=True)
    model = torch.compile(model)
    text = torch.from_file(asked.data, size=Path(asked.data).stat().st_size // 2, dtype=torch.uint16)

    def read_batch() -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(text) - asked.context - 1, (asked.micro_batch,)).tolist()
        inputs, targets = (
            torch.stack([text[start + ahead : start + ahead + asked.context].long() for start in starts])
            for ahead in (0, 1)
        )
        if device.type == "cuda":
            inputs, targets = inputs.pin_memory(), targets.pin_memory()
        return inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)

    passes = asked.batch // asked.micro_batch
    inputs, targets = read_batch()
    rates, begin_s = [], time.perf_counter()
    for step in range(1, asked.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = 6e-4 * (0.55 + 0.45 * math.cos(math.pi * step / asked.steps))
        for _ in range(passes):
            with torch.autocast(device.type, dtype=torch.bfloat16):
                loss = model(inputs, targets) / passes
            inputs, targets = read_batch()  # while the device computes
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % READ_STEPS == 0:
            loss.item()
            now_s = time.perf_counter()
            rates.append(READ_STEPS * asked.batch * asked.context / (now_s - begin_s))
            begin_s = now_s
    print(json.dumps({"tokens_per_s": rates}))


if __name__ == "__main__":
    main()
