"""Run a program that needs GPUs on CPUs: `torchrun ... -m tests.frameworks.cpu_stand_in PROGRAM`.

Tensors that the program puts on "cuda" are made on the CPU, and "nccl" is gloo. This checks the program, its use of the
framework, and its checkpoints; it says nothing about CUDA kernels, NCCL or speed.
"""

from __future__ import annotations

import logging
import os
import runpy
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # before torch is imported; compiled code would take minutes

import torch
import torch._dynamo  # its list of torch's functions requires that those below are still the original ones
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


def is_cuda(value: object) -> bool:
    return isinstance(value, str | torch.device) and str(value).startswith("cuda")


class OnCpu(TorchFunctionMode):
    """Replace "cuda" by "cpu" in the arguments of torch's functions."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is torch.Tensor.cuda:
            return args[0]
        args = tuple(CPU if is_cuda(each) else each for each in args)
        options = {name: CPU if is_cuda(each) else each for name, each in (kwargs or {}).items()}
        found = function(*args, **options)
        if function is torch.Tensor.type and isinstance(found, str):  # Megatron asks for 'torch.cuda.FloatTensor'
            return found.replace("torch.", "torch.cuda.")
        return found


def ignore(*_: Any, **__: Any) -> None:
    return None


def replace_cuda() -> None:
    """Replace what torch's CUDA module and the frameworks ask of a device."""
    torch.nn.Module.cuda = lambda self, *_: self
    torch.cuda.current_device = lambda: CPU
    torch.cuda.set_device = torch.cuda.synchronize = torch.cuda.empty_cache = ignore
    torch.cuda.manual_seed, torch.cuda.get_rng_state = torch.manual_seed, torch.get_rng_state
    torch._utils._get_available_device_type = lambda: "cpu"
    memory = SimpleNamespace(total_memory=1 << 34)
    torch.cpu.get_device_name, torch.cpu.get_device_properties = lambda *_: "CPU", lambda *_: memory
    torch.cpu.reset_peak_memory_stats = torch.cpu.empty_cache = ignore
    torch.cpu.memory_stats = lambda *_: {}
    begin = dist.init_process_group
    dist.init_process_group = lambda backend=None, **others: begin("gloo", **others)


def replace_megatron_generators() -> None:
    """Let Megatron's trackers of random states hold those of the CPU."""
    from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    logging.getLogger(random.__name__).setLevel(logging.ERROR)  # it expects that the CPU's state stays as it is


if __name__ == "__main__":
    program = sys.argv[1]
    sys.argv = sys.argv[1:]
    replace_cuda()
    if "megatron" in program:
        replace_megatron_generators()
    with OnCpu():
        runpy.run_module(program, run_name="__main__", alter_sys=True)
