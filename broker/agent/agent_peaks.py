"""Peak arithmetic of NVIDIA's data-centre and workstation GPUs, by the name that nvidia-smi prints. Pure."""

from __future__ import annotations

# A share that only a broken, throttled or busy GPU misses. Large products reach 0.5 to 0.9 of the peak; cards that are
# limited by their power (T4, L4, A10) reach a third. The share is our choice: a fault costs a machine.
SHARE_MIN = 0.15
# Beginning of the name -> dense TFLOP/s of bfloat16, or float16 where a GPU has no bfloat16, with accumulation in
# float32. The first match wins. Source: NVIDIA's data sheet of each product; where a sheet states the figure with
# sparsity, half of it.
TFLOPS = (
    ("B300", 2250.0),
    ("GB300", 2500.0),
    ("GB200", 2500.0),
    ("B200", 2250.0),
    ("B100", 1750.0),
    ("GH200", 989.0),
    ("H200 NVL", 835.0),
    ("H200", 989.0),
    ("H100 NVL", 835.0),
    ("H100 PCIe", 756.0),
    ("H100", 989.0),
    ("A100", 312.0),
    ("A40", 149.7),
    ("A30", 165.0),
    ("A10G", 70.0),
    ("A10", 125.0),
    ("L40S", 362.0),
    ("L40", 181.0),
    ("L4", 121.0),
    ("RTX A6000", 154.8),
    ("RTX 6000 Ada", 364.0),
    ("GeForce RTX 4090", 165.0),
    ("GeForce RTX 3090", 71.0),
    ("V100", 112.0),
    ("T4", 65.0),
)
PREFIXES = ("NVIDIA ", "Tesla ")


def find_tflops(name: str) -> float | None:
    """Return the peak in TFLOP/s; None for a GPU that the table does not have. A slice (MIG) has no peak of its own."""
    for prefix in PREFIXES:
        name = name[len(prefix) :] if name.startswith(prefix) else name
    if "MIG" in name:
        return None
    return next((peak for known, peak in TFLOPS if name == known or name.startswith((known + " ", known + "-"))), None)
