"""Find this node's accelerator, and the build of torch that fits it. Standard library only, Python 3.8 and later."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Mapping

TORCH = "2.13.0"  # as in tests/constraints.txt: the release that the trainers are tested with
# Builds of torch 2.13 and the GPUs that their kernels support: PyTorch's RELEASE.md and issue 178665, 2026-11.
# CUDA 13.0 needs driver 580 and has no kernels for Volta and older. CUDA 12.6 runs on any driver from 525.60 by minor
# version compatibility (NVIDIA, "CUDA Compatibility"), and has none for Blackwell.
DRIVER_OF_CUDA_13, DRIVER_OF_CUDA_12 = (580,), (525, 60, 13)
TURING, HOPPER = (7, 5), (9, 0)
ROCM = "rocm7.2"
NVIDIA_VERSION = Path("/proc/driver/nvidia/version")
PCI = Path("/sys/bus/pci/devices")
NVIDIA_VENDOR, DISPLAY_CLASSES = "0x10de", ("0x0300", "0x0302")
QUERY = ["--query-gpu=name,driver_version,compute_cap", "--format=csv,noheader"]
QUERY_S = 60.0


class SetupError(Exception):
    """The reason why the trainers cannot run here; `hint` names the remedy."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


@dataclass(frozen=True)
class Accelerator:
    """`kind` is "cuda", "rocm" or "cpu". An unknown capability is empty."""

    kind: str
    name: str
    driver: tuple[int, ...] = ()
    capability: tuple[int, ...] = ()


CPU = Accelerator("cpu", "CPU")


def find_accelerator(variables: Mapping[str, str]) -> Accelerator:
    """Return the accelerator of this node: its GPUs, unless the task requests none.

    Raises SetupError if requested GPUs cannot be used, rather than let a node with eight GPUs train on its CPU.
    """
    asked = variables.get("SKYPILOT_NUM_GPUS_PER_NODE", "")
    if asked == "0":
        return CPU
    accelerator = find_nvidia(variables) or (Accelerator("rocm", "AMD GPU") if Path("/dev/kfd").exists() else None)
    is_here = "BROKER_NODE_DIR" in variables  # the local cloud: this machine stands in for one with GPUs
    if accelerator or not asked or is_here:
        return accelerator or CPU
    if is_without_driver():
        raise SetupError(
            "this node has NVIDIA GPUs but no driver for them", "choose an image with a driver: `image_id:` in the task"
        )
    raise SetupError(
        f"the task requests {asked} accelerators per node, but this node shows none",
        "the bundled trainers run on NVIDIA and AMD GPUs, and on CPUs",
    )


def find_nvidia(variables: Mapping[str, str]) -> Accelerator | None:
    """Query `nvidia-smi`, or read the driver's own file; return None without a driver.

    Raises SetupError if `nvidia-smi` fails on a node that should have GPUs: no installation of torch would help.
    """
    program = shutil.which("nvidia-smi", path=variables.get("PATH"))
    if program:
        said, is_well = query(program)
        fields = [field.strip() for field in said.partition("\n")[0].split(",")]
        if is_well and len(fields) == 3:
            return Accelerator("cuda", fields[0], read_version(fields[1]), read_version(fields[2]))
        if variables.get("SKYPILOT_NUM_GPUS_PER_NODE") and "BROKER_NODE_DIR" not in variables:
            last = said.strip().rpartition("\n")[2]
            raise SetupError(f"`nvidia-smi` fails on this node: {last}", "its driver or a GPU is faulty")
    if NVIDIA_VERSION.exists():
        words = NVIDIA_VERSION.read_text(encoding="ascii", errors="replace").partition("\n")[0].split()
        drivers = [read_version(word) for word in words if word.count(".") and word[0].isdigit()]
        return Accelerator("cuda", "NVIDIA GPU", drivers[0] if drivers else ())
    return None


def query(program: str) -> tuple[str, bool]:
    """Return the output of `nvidia-smi`, and whether it succeeded."""
    try:
        done = subprocess.run([program, *QUERY], capture_output=True, text=True, timeout=QUERY_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error), False
    return done.stdout if done.returncode == 0 else done.stdout + done.stderr, done.returncode == 0


def is_without_driver() -> bool:
    """Return whether the PCI bus shows an NVIDIA GPU."""
    devices = list(PCI.iterdir()) if PCI.exists() else []
    return any(
        (device / "vendor").read_text().strip() == NVIDIA_VENDOR
        and (device / "class").read_text().startswith(DISPLAY_CLASSES)
        for device in devices
        if (device / "vendor").exists() and (device / "class").exists()
    )


def choose_build(accelerator: Accelerator) -> str:
    """Return the name of the build in PyTorch's index. Raises SetupError if no build supports this accelerator."""
    if accelerator.kind != "cuda":
        return ROCM if accelerator.kind == "rocm" else "cpu"
    is_old, is_new = (0,) < accelerator.capability < TURING, accelerator.capability > HOPPER
    if accelerator.driver >= DRIVER_OF_CUDA_13 and not is_old:
        return "cu130"
    if accelerator.driver >= DRIVER_OF_CUDA_12 and not is_new:
        return "cu126"
    needed = DRIVER_OF_CUDA_13 if is_new else DRIVER_OF_CUDA_12
    raise SetupError(
        f"torch {TORCH} needs NVIDIA driver {show_version(needed)} for {accelerator.name}; "
        f"this node has {show_version(accelerator.driver) or 'an unknown one'}",
        "choose an image with a newer driver, or one that has torch already: `image_id:` in the task",
    )


def read_version(text: str) -> tuple[int, ...]:
    """Parse `580.95.05` as numbers, up to the first part that is not a number."""
    numbers = []
    for part in text.split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def show_version(numbers: tuple[int, ...]) -> str:
    """Format a version: `(12, 4)` as `12.4`."""
    return ".".join(str(number) for number in numbers)
