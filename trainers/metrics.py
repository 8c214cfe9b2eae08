"""Write the metrics of steps to files: JSON lines, and TensorBoard events on request."""

import math
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from trainers.config import LogConfig
from trainers.devices import find_peak_flops, measure_memory_gib
from trainers.errors import TrainerError
from trainers.progress import append_line


class Meter:
    """Computes rates from sample counts and elapsed time."""

    def __init__(self, *, units_per_sample: int, flops_per_sample: float, peak_flops: float | None, ranks: int) -> None:
        """Count `units_per_sample` units (tokens, images) per sample. `peak_flops` is the peak FLOP/s of one device."""
        self._units, self._flops = units_per_sample, flops_per_sample
        self._peak_flops, self._ranks = peak_flops, ranks
        self._samples = 0
        self._begin = time.perf_counter()
        self._paused_s = 0.0

    def count(self, samples: int) -> None:
        """Count the samples of a step."""
        self._samples += samples

    def pause(self, seconds: float) -> None:
        """Exclude time that was not spent on training."""
        self._paused_s += seconds

    def read(self) -> dict[str, float]:
        """Return rates since the last reading. MFU is the model's FLOP/s as a share of the devices' peak."""
        now = time.perf_counter()
        elapsed_s = max(1e-9, now - self._begin - self._paused_s)
        rates = {"tokens_per_s": round(self._samples * self._units / elapsed_s, 1)}
        if self._peak_flops and self._flops:
            used = self._samples * self._flops / elapsed_s / self._ranks
            rates["mfu"] = round(used / self._peak_flops, 4)
        self._begin, self._samples, self._paused_s = now, 0, 0.0
        return rates


class MetricFiles:
    """Writes metrics on the first rank; a silent instance (any other rank) does nothing."""

    def __init__(self, config: LogConfig, attempt: int, *, is_silent: bool) -> None:
        """Open the requested outputs. Raises TrainerError if a package is missing."""
        self._path = Path(config.metrics) if config.metrics and not is_silent else None
        self._attempt = attempt
        self._has_failed = False
        self._board = _open_board(config.tensorboard) if config.tensorboard and not is_silent else None
        if self._path:
            self._path.parent.mkdir(parents=True, exist_ok=True)

    def write(self, step: int, values: Mapping[str, float | None]) -> None:
        """Append one line, with null for non-finite values. A resumed run writes repeated steps again."""
        if self._path:
            finite = {name: value if value is None or math.isfinite(value) else None for name, value in values.items()}
            line = {"time": time.time(), "attempt": self._attempt, "step": step, **finite}
            try:
                append_line(self._path, line)
            except OSError as error:  # a full disk must not end the run
                if not self._has_failed:
                    print(f"warning: metrics are not written: {error}", file=sys.stderr, flush=True)
                self._has_failed = True
        if self._board is not None:
            for name, value in values.items():
                if value is not None:
                    self._board.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush buffered output."""
        if self._board is not None:
            self._board.close()


def make_meter(
    log: LogConfig, dtype: str, device: torch.device, *, units_per_sample: int, flops_per_sample: float, ranks: int
) -> Meter:
    """Return a meter with this device's peak rate."""
    peak_flops = find_peak_flops(device, dtype, log.peak_tflops)
    return Meter(
        units_per_sample=units_per_sample, flops_per_sample=flops_per_sample, peak_flops=peak_flops, ranks=ranks
    )


def read_memory(device: torch.device) -> dict[str, float]:
    """Return the peak memory of this process so far, in GiB."""
    return {"memory_gib": round(measure_memory_gib(device), 3)}


def _open_board(folder: str) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise TrainerError(
            "`--log.tensorboard` requires the package tensorboard\n\nhint: `pip install tensorboard`"
        ) from error
    return SummaryWriter(folder)
