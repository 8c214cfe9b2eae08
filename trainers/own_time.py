"""Measure the time that a rank spends on its own part of a step, without its waits for other ranks.

Ranks that step together finish each step together, so the duration of a step does not show which of them is slow.
Broker compares the `own_s` of the nodes and names the slow one.

On a CPU this is the time for which the training thread runs or waits for a core, plus its waits for samples; a rank
that waits for another one is blocked and does neither. On a GPU it is the time between two events on the training
stream, at the start of the step and at the end of the last backward pass. It is measured only under strategies that
exchange nothing before that point. Nothing here synchronises ranks or waits for a device.
"""

import os
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from trainers.ranks import Ranks
from trainers.strategies.base import Strategy

# Of a thread, in ns: time on a core, time waiting for one (Linux, Documentation/scheduler/sched-stats.rst).
SCHEDULER_FILE = Path("/proc/thread-self/schedstat")
SHARES_RATIO_MAX = 1.1  # ranks with unequal numbers of samples are comparable up to this ratio
SLOT = struct.Struct("<d")


class WorkClock:
    """Measure nothing; the subclasses measure. Called by the thread that trains."""

    def begin(self) -> None:
        """Start a step."""

    def note_samples(self) -> None:
        """Note that the samples of the step have been read."""

    def watch(self, loss: Tensor) -> None:
        """Prepare for the last backward pass of the step, which starts from this loss."""

    def end(self) -> None:
        """Note that the parameters have been updated."""

    def read(self) -> float | None:
        """Return the seconds of the last step, or None if unknown. Called when the host has waited for the device."""
        return None


class CpuClock(WorkClock):
    """Measure the training thread by the scheduler's accounts."""

    def __init__(self) -> None:
        """Open the accounts of the calling thread; without them (macOS), waits for a core are not counted."""
        self._file: BinaryIO | None = None
        with suppress(OSError):
            self._file = SCHEDULER_FILE.open("rb", buffering=0)
        self._begin_s = self._busy_s = 0.0
        self._own_s: float | None = None

    def begin(self) -> None:
        """Start the wall clock, which counts while samples are read."""
        self._begin_s = time.perf_counter()

    def note_samples(self) -> None:
        """Change from the wall clock to the thread's own time."""
        self._own_s = time.perf_counter() - self._begin_s
        self._busy_s = self._measure_busy()

    def end(self) -> None:
        """Add the thread's own time since the samples were read."""
        if self._own_s is not None:
            self._own_s += self._measure_busy() - self._busy_s

    def read(self) -> float | None:
        """Return the seconds of the last step."""
        return self._own_s

    def _measure_busy(self) -> float:
        """Return the seconds for which this thread has run or waited for a core."""
        waited_ns = 0
        if self._file is not None:
            fields = os.pread(self._file.fileno(), 128, 0).split()
            waited_ns = int(fields[1]) if len(fields) > 1 else 0
        return time.thread_time() + waited_ns / 1e9


class GpuClock(WorkClock):
    """Measure a GPU by two events on the training stream. Never executed: no GPU was available."""

    def __init__(self) -> None:
        """Create the events; they are reused at every step."""
        self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._is_recorded = False

    def begin(self) -> None:
        """Record the first event."""
        self._start.record()

    def watch(self, loss: Tensor) -> None:
        """Record the second event after the backward pass, before DistributedDataParallel waits for its peers."""
        call_after_backward(loss, self._record_end)

    def read(self) -> float | None:
        """Return the seconds between the events of the last step, which are over when the host has read its loss."""
        if not self._is_recorded:
            return None
        elapsed_ms: float = self._start.elapsed_time(self._end)
        return elapsed_ms / 1000.0

    def _record_end(self) -> None:
        self._end.record()
        self._is_recorded = True


def call_after_backward(loss: Tensor, function: Callable[[], None]) -> None:
    """Call the function at the end of the backward pass from this loss, before callbacks that later hooks queue.

    Autograd runs callbacks in the order in which they were queued. The gradient of the loss is the first one computed,
    so this callback precedes the one in which DistributedDataParallel waits for its all-reduces.
    """
    engine = torch.autograd.Variable._execution_engine  # as torch's own FSDP uses it
    loss.register_hook(lambda _: engine.queue_callback(function))


def choose_clock(strategy: Strategy, device: torch.device, batch: int) -> WorkClock:
    """Return the clock of a rank: one that measures nothing if times of ranks would not be comparable."""
    if not strategy.has_equal_work() or not are_shares_comparable(batch, strategy.share.count):
        return WorkClock()
    if device.type == "cpu":
        return CpuClock()
    return GpuClock() if device.type == "cuda" and strategy.exchanges_last() else WorkClock()


def are_shares_comparable(batch: int, share_count: int) -> bool:
    """Return whether ranks that split a batch have about equally many samples: 34, 33 and 33, but not 2, 1 and 1."""
    if share_count < 1:
        return False
    return -(-batch // share_count) <= SHARES_RATIO_MAX * (batch // share_count)


class NodeTimes:
    """Find the slowest rank of this node, for the one rank that reports it. Off in a run on a single node."""

    def __init__(self, ranks: Ranks, progress_file: Path | None) -> None:
        """Learn which ranks share this node's progress file. A collective call."""
        nodes = ranks.collect((socket.gethostname(), str(progress_file)))
        peers = [rank for rank, node in enumerate(nodes) if node == nodes[ranks.rank]]
        self.is_on = progress_file is not None and len(set(nodes)) > 1
        self._place, self._count = peers.index(ranks.rank), len(peers)
        self._slots: int | None = None
        if self.is_on and progress_file is not None and self._count > 1:
            progress_file.parent.mkdir(parents=True, exist_ok=True)
            self._slots = os.open(progress_file.with_name("own_times"), os.O_RDWR | os.O_CREAT, 0o600)

    def publish(self, own_s: float) -> float | None:
        """Return the longest time of this node's ranks, each as it last reported; None on ranks that do not report."""
        if self._slots is None:
            return own_s if self._place == 0 else None
        os.pwrite(self._slots, SLOT.pack(own_s), SLOT.size * self._place)
        if self._place:
            return None
        written = os.pread(self._slots, SLOT.size * self._count, 0)
        whole = written[: len(written) // SLOT.size * SLOT.size]
        times_s: list[float] = [time_s for (time_s,) in SLOT.iter_unpack(whole)]
        return max(times_s)
