"""Time a matrix product on each GPU, in the Python of the task, which needs torch: `python3 - RESULT LIMIT_S`.

Writes a JSON object: `tflops` by the GPU's UUID, or by its index if torch does not report the UUID; otherwise
`unchecked`, the reason. A GPU on which the program does not end in time is unchecked: torch may be slow to import.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

SIDE = 8192  # 1.1 TFLOP: milliseconds on any GPU of the table, far longer than a kernel's launch
ROUNDS = 3  # the best counts: the first ones run while clocks still rise
PRODUCTS = 4  # per round


def main(result: str, limit_s: float) -> None:
    """Write the result; the kernel ends this process at the limit, even in a call that hangs."""
    write(result, {"unchecked": f"torch did not answer within {limit_s:g} s"})
    signal.alarm(int(limit_s))
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # as nvidia-smi numbers them
    try:
        torch = importlib.import_module("torch")
        if not torch.cuda.is_available():
            write(result, {"unchecked": "torch sees no GPU"})
            return
        write(result, {"tflops": measure_all(torch)})
    except Exception as error:  # torch raises errors of many kinds; none of them is evidence against a GPU
        write(result, {"unchecked": f"{type(error).__name__}: {error}"[:300]})


def measure_all(torch: Any) -> dict[str, float]:
    """Return TFLOP/s of each GPU that torch sees."""
    found = {}
    for index in range(torch.cuda.device_count()):
        uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
        key = str(index) if uuid is None else str(uuid)
        found[key if uuid is None or key.startswith("GPU-") else "GPU-" + key] = measure(torch, index)
    return found


def measure(torch: Any, index: int) -> float:
    """Return TFLOP/s of the best round on one GPU; half precision where its tensor cores have no bfloat16."""
    is_recent = torch.cuda.get_device_capability(index)[0] >= 8
    dtype = torch.bfloat16 if is_recent else torch.float16
    device = f"cuda:{index}"
    a = torch.ones((SIDE, SIDE), dtype=dtype, device=device)
    b = torch.ones((SIDE, SIDE), dtype=dtype, device=device)
    a @ b
    best_s = float("inf")
    for _ in range(ROUNDS):
        torch.cuda.synchronize(index)
        begin_s = time.perf_counter()
        for _ in range(PRODUCTS):
            a @ b
        torch.cuda.synchronize(index)
        best_s = min(best_s, time.perf_counter() - begin_s)
    return float(PRODUCTS * 2.0 * SIDE**3 / best_s / 1e12)


def write(path: str, value: dict[str, Any]) -> None:
    """Replace the result at once: the process may end at any moment."""
    new = Path(path + ".new")
    new.write_text(json.dumps(value), encoding="utf-8")
    new.replace(path)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
