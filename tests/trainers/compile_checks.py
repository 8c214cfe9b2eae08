"""Programs of the tests of compiled graphs, each run in a process of its own."""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from trainers.compile_cache import CompileCache
from trainers.restore_progress import LocalCounter
from trainers.storage import FolderStorage

ABOUT = {"torch": torch.__version__, "device": "this"}


class Product(nn.Module):
    """A block without a kernel of its own: the library's product, for which no C++ compiler is called."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(8))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs @ self.weight


def compile_product(storage: Path) -> dict[str, int]:
    """Compile one graph as an attempt on a new machine does; return what was loaded, found and not found."""
    from torch._dynamo.utils import counters

    cache = CompileCache(FolderStorage(storage), ABOUT, LocalCounter())
    loaded = cache.load()
    block = Product()
    block.compile()
    block(torch.ones(2, 8)).sum().backward()
    cache.save()
    cache.wait()
    found = counters["inductor"]
    return {"loaded": loaded, "hits": found["fxgraph_cache_hit"], "misses": found["fxgraph_cache_miss"]}


def train_and_count(arguments: Sequence[str]) -> int:
    """Train, and append the hits and misses of this rank to the file that COUNTED names."""
    from torch._dynamo.utils import counters

    from trainers.lm import main

    code = main(arguments)
    found = counters["inductor"]
    with Path(os.environ["COUNTED"]).open("a") as file:
        print(json.dumps([found["fxgraph_cache_hit"], found["fxgraph_cache_miss"]]), file=file)
    return code


if __name__ == "__main__":
    print(json.dumps(compile_product(Path(sys.argv[1]))))
