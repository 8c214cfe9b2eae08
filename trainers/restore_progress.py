"""The progress of a restore, for the watchdog of every rank and for the progress file of the first.

A rank that has read its part waits for the others and makes no progress itself. So the ranks sum the bytes that all of
them have read: while the sum grows, no rank hangs, however long the restore takes.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

UPDATE_S = 2.0
REPORT_S = 10.0  # time between lines in the progress file; a shorter restore reports only its result


class Counter(Protocol):
    """Named counters that all ranks share."""

    def add(self, name: str, amount: int) -> int:
        """Add to the counter of this name, which starts at 0, and return its value."""
        ...


class LocalCounter:
    """The counters of a process that trains alone."""

    def __init__(self) -> None:
        """Start all counters at 0."""
        self._values: dict[str, int] = {}

    def add(self, name: str, amount: int) -> int:
        """Add to the counter of this name and return its value."""
        self._values[name] = self._values.get(name, 0) + amount
        return self._values[name]


@dataclass(frozen=True, kw_only=True)
class RestoreStatus:
    """The ranks' progress in reading one checkpoint."""

    step: int
    read_bytes: int
    wanted_bytes: int  # total over all ranks; grows until each has planned its reads


class RestoreProgress:
    """One rank's view of the bytes that all ranks have read."""

    def __init__(
        self,
        counter: Counter,
        *,
        beat: Callable[[str], None],
        report: Callable[[RestoreStatus], None],
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Call `beat` whenever the sum has grown, and `report` at most once per `REPORT_S`."""
        self._counter, self._beat, self._report, self._now_s = counter, beat, report, now_s
        self._lock = threading.Lock()
        self._step, self._name = 0, ""
        self._read, self._wanted = 0, 0  # not yet added to the shared counters
        self._last = -1
        self._reported_s = now_s()

    @contextmanager
    def follow(self, step: int, name: str) -> Iterator[None]:
        """Follow the restore of one checkpoint while the body runs. A new name starts at 0."""
        self._step, self._name, self._last, self._reported_s = step, name, -1, self._now_s()
        self.update()
        is_over = threading.Event()

        def update_until_over() -> None:
            while not is_over.wait(UPDATE_S):
                try:
                    self.update()
                except RuntimeError:  # the store ended with the first rank; the main thread raises as well
                    return

        thread = threading.Thread(target=update_until_over, name="progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()

    def note_wanted(self, count: int) -> None:
        """Count bytes that this rank is going to read."""
        with self._lock:
            self._wanted += count

    def note_read(self, count: int) -> None:
        """Count bytes that this rank has read. Thread-safe."""
        with self._lock:
            self._read += count

    def update(self) -> None:
        """Add new bytes to the shared counters; beat and report if the sum grew."""
        with self._lock:
            read, wanted, self._read, self._wanted = self._read, self._wanted, 0, 0
        total = self._counter.add(f"restore/{self._name}/read", read)
        total_wanted = self._counter.add(f"restore/{self._name}/wanted", wanted)
        if total == self._last:
            return
        self._last = total
        self._beat(f"restoring step {self._step}")
        if self._now_s() - self._reported_s >= REPORT_S:
            self._reported_s = self._now_s()
            self._report(RestoreStatus(step=self._step, read_bytes=total, wanted_bytes=total_wanted))
