"""Peak rates and memory of devices, and hints for when memory is insufficient."""

import os
import resource
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainers.config import RunConfig
from trainers.errors import TrainerError

# Dense bfloat16 and TensorFloat-32 rates in TFLOP/s, without sparsity, from the vendors' data sheets. The first name
# contained in the device's name applies, so longer names come first. V100 and T4 have no bfloat16; theirs is float16.
PEAKS: tuple[tuple[str, float, float], ...] = (
    ("GB200", 2500.0, 1250.0),
    ("B200", 2250.0, 1125.0),
    ("GH200", 989.4, 494.7),
    ("H200", 989.4, 494.7),
    ("H100 PCIe", 756.0, 378.0),
    ("H100 NVL", 835.0, 417.5),
    ("H100", 989.4, 494.7),
    ("A100", 312.0, 156.0),
    ("A10G", 70.0, 35.0),
    ("A10", 125.0, 62.5),
    ("A40", 149.7, 74.8),
    ("L40S", 362.0, 183.0),
    ("L40", 181.0, 90.5),
    ("L4", 121.0, 60.0),
    ("RTX 4090", 165.2, 82.6),
    ("RTX 3090", 71.0, 35.6),
    ("V100", 125.0, 15.7),
    ("T4", 65.0, 8.1),
    ("MI300X", 1307.4, 653.7),
    ("MI250X", 383.0, 95.7),
)
# Weight, gradient and two moments, all float32.
BYTES_A_PARAMETER, BYTES_FROZEN = 16, 4


def configure_arithmetic(config: RunConfig) -> None:
    """Set torch's global precision and determinism flags. Call once, before any computation."""
    if torch.cuda.is_available():
        # TensorFloat-32 has 10 bits of mantissa and 8 times the rate of float32 on an A100; MFU counts that rate.
        torch.set_float32_matmul_precision(config.matmul_precision)
        if config.matmul_precision == "highest":
            torch.backends.cudnn.allow_tf32 = False  # convolutions have a setting of their own
    if config.deterministic:
        torch.use_deterministic_algorithms(True)
        settings: Any = torch.utils.deterministic  # a module with properties, which mypy cannot see
        settings.fill_uninitialized_memory = False  # every tensor is written before it is read
        torch.backends.cudnn.benchmark = False
        # The backward passes of these two attention kernels sum in no fixed order.
        torch.backends.cuda.enable_mem_efficient_sdp(False)
        torch.backends.cuda.enable_cudnn_sdp(False)


def check_dtype(device: torch.device, config: RunConfig) -> None:
    """Raise a TrainerError if a GPU has no bfloat16, which torch would emulate at a fraction of float32's speed."""
    is_gathered = "bfloat16" in (config.fsdp.param_dtype, config.fsdp.reduce_dtype)
    is_sharded = not {"fsdp", "hsdp"}.isdisjoint(config.strategy.split("+"))
    needs = config.dtype == "bfloat16" or (is_sharded and is_gathered)
    if device.type == "cuda" and needs and not torch.cuda.is_bf16_supported(including_emulation=False):
        flags = "--dtype float16" + (" --fsdp.param_dtype float32 --fsdp.reduce_dtype float32" if is_sharded else "")
        raise TrainerError(f"{torch.cuda.get_device_name(device)} has no bfloat16\n\nhint: `{flags}`")


def find_peak_flops(device: torch.device, dtype: str, given_tflops: float) -> float | None:
    """Return the peak FLOP/s of one device; None if unknown, as for CPUs. `given_tflops` overrides the table."""
    if given_tflops:
        return given_tflops * 1e12
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    for part, bfloat16, float32 in PEAKS:
        if part in name:
            return (float32 if dtype == "float32" else bfloat16) * 1e12
    return None


def measure_memory_gib(device: torch.device) -> float:
    """Return the peak memory of this process in GiB: tensors on a GPU, the resident set on a CPU."""
    if device.type == "cuda":
        allocated: int = torch.cuda.max_memory_allocated(device)
        return allocated / 2**30
    # Linux reports KiB, macOS bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def check_memory(
    parameters: Iterable[Tensor], device: torch.device, config: RunConfig, *, state_bytes: float = BYTES_A_PARAMETER
) -> None:
    """Raise a TrainerError if the device has less memory than each step requires, not counting activations.

    `state_bytes` is the size of weight, gradient and optimizer state for each trained element on this rank.
    """
    count, needed = 0, 0.0
    for parameter in parameters:
        size = (parameter.to_local() if hasattr(parameter, "to_local") else parameter).numel()
        count += size
        needed += size * (state_bytes if parameter.requires_grad else BYTES_FROZEN)
    present = find_memory(device)
    if present is not None and needed > present:
        raise TrainerError(
            f"weights, gradients and moments of {count / 1e6:,.0f} million parameters take {needed / 2**30:.1f} GiB "
            f"per rank, but only {present / 2**30:.1f} GiB are available{advise(config)}"
        )


def find_memory(device: torch.device) -> int | None:
    """Return the bytes of a rank's device, or on a CPU its share of the machine or container; None if unknown."""
    if device.type == "cuda":
        total: int = torch.cuda.get_device_properties(device).total_memory
        return total
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.exists() else "max"
    total = min(total, int(text)) if text.isdigit() else total
    return total // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory ran out. On a CPU torch raises a plain RuntimeError that names its allocator."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


def advise(config: RunConfig) -> str:
    """Return hints that reduce memory under this config, the cheapest first, to append to a message."""
    changes = []
    if config.train.micro_batch > 1:
        half = config.train.micro_batch // 2
        changes.append(f"`--train.micro_batch {half}` computes the same batch in more, smaller passes")
    if config.dtype == "float32":
        changes.append("`--dtype bfloat16` halves activations")
    if config.recompute != "full":
        changes.append("`--recompute full` recomputes activations instead of storing them, at a third more compute")
    if config.offload == "none" and torch.cuda.is_available():
        changes.append("`--offload optimizer` keeps AdamW's moments in CPU memory, at the cost of a slower step")
    if not any(name in config.strategy for name in ("fsdp", "hsdp", "pipeline", "tensor")):
        changes.append("`--strategy fsdp` shards weights, gradients and moments over the ranks")
    changes.append("use more ranks, larger devices, or a smaller `--preset`")
    return "\n" + "".join(f"\nhint: {change}" for change in changes)
