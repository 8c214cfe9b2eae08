"""Read the state of NVIDIA GPUs from `nvidia-smi`, and their Xid errors from the kernel log. Standard library only."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from typing import Any

QUERY = ("utilization.gpu", "memory.used", "memory.total", "temperature.gpu", "power.draw")
ANSWER_S = 8.0  # without persistence mode each call loads the driver, which takes seconds
PAUSES_MAX = 60  # samples without a call after repeated failures
GPUS_MAX = 16
XIDS_MAX = 16  # kinds of errors
KERNEL_LOG = "/dev/kmsg"
RECORDS_MAX = 50_000  # per read; the kernel's buffer holds fewer
RECORD_BYTES = 8192
PERMISSION_S = 10.0
# NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, GPU has fallen off the bus.
_XID = re.compile(rb"NVRM: Xid \([^)]{1,80}\): (\d{1,4})\b")


class Gpus:
    """The GPUs of this node. If `nvidia-smi` is missing or fails, it is called at growing intervals."""

    def __init__(self) -> None:
        self._pauses = self._failures = 0
        self._xids: Xids | None = None

    def read(self) -> list[list[float | None]]:
        """Return, for each GPU, utilisation (0 to 1), used and total memory in bytes, degrees Celsius and watts."""
        if self._pauses:
            self._pauses -= 1
            return []
        gpus = query()
        self._failures = 0 if gpus else self._failures + 1
        self._pauses = 0 if gpus else min(PAUSES_MAX, 2**self._failures)
        return gpus

    def count_xids(self) -> dict[str, int]:
        """Count the Xid errors by their number since the kernel's buffer began; for nodes that have GPUs."""
        self._xids = self._xids or Xids(KERNEL_LOG)
        return self._xids.count()


def query() -> list[list[float | None]]:
    """Call `nvidia-smi`; return no GPUs if it is missing, fails or hangs."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    argv = [program, f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=ANSWER_S,
            check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [] if done.returncode else parse(done.stdout.decode("utf-8", "replace"))


def parse(text: str) -> list[list[float | None]]:
    """Parse the lines of `nvidia-smi`; a value that a GPU does not report (`[N/A]`) is None."""
    gpus = []
    for line in text.splitlines()[:GPUS_MAX]:
        words = [word.strip() for word in line.split(",")]
        if len(words) == len(QUERY):
            percent, used_mib, total_mib, degrees, watts = (_read_number(word) for word in words)
            gpus.append([_scale(percent, 0.01), _scale(used_mib, 1 << 20), _scale(total_mib, 1 << 20), degrees, watts])
    return gpus


def _read_number(word: str) -> float | None:
    try:
        number = float(word)
    except ValueError:
        return None
    return number if 0 <= number < 1e12 else None


def _scale(number: float | None, factor: float) -> float | None:
    return None if number is None else round(number * factor, 4)


class Xids:
    """Counts of Xid errors. Reads the kernel log itself, or through `sudo -n dmesg` if only root may read it."""

    def __init__(self, path: str) -> None:
        self._counts: dict[str, int] = {}
        self._is_denied = False
        self._fd: int | None = None
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            pass

    def count(self) -> dict[str, int]:
        """Return the counts by number."""
        if self._fd is not None:
            for _ in range(RECORDS_MAX):
                try:
                    record = os.read(self._fd, RECORD_BYTES)
                except BrokenPipeError:  # records were overwritten before we read them
                    continue
                except OSError:  # no further records at present
                    break
                if not record:
                    break
                self._add(record, self._counts)
        elif not self._is_denied:
            self._counts = self._count_errors()
        return dict(sorted(self._counts.items())[:XIDS_MAX])

    @property
    def is_read(self) -> bool:
        """Whether the log could be read, after the first count."""
        return self._fd is not None or not self._is_denied

    def close(self) -> None:
        """Close the log. Idempotent."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _count_errors(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        try:
            done = subprocess.run(
                ["sudo", "-n", "dmesg"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                timeout=PERMISSION_S, check=False,
            )  # fmt: skip
            self._is_denied = done.returncode != 0
            self._add(done.stdout, counts)
        except (OSError, subprocess.TimeoutExpired):
            self._is_denied = True
        return counts

    def _add(self, text: bytes, counts: dict[str, int]) -> None:
        for number in _XID.findall(text):
            key = number.decode("ascii")
            counts[key] = counts.get(key, 0) + 1


def describe(gpus: Gpus) -> dict[str, Any]:
    """Return the part of a sample about GPUs; nothing on a node without them."""
    found = gpus.read()
    if not found:
        return {}
    xids = gpus.count_xids()
    return {"gpus": found, "xids": xids} if xids else {"gpus": found}
