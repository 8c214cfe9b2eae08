"""Tells that a restore gets on: to the watchdog of every rank, and to whoever reads the first rank's progress.

A rank that has read its part waits for the others, and has nothing to tell of itself. So the ranks add up what all of
them have read: while that sum grows, none of them hangs, however long it takes.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

LOOK_S = 2.0
TELL_S = 10.0  # between two lines for people and the broker; a short restore is told by its result alone


class Counter(Protocol):
    """A number that all ranks add to."""

    def add(self, name: str, amount: int) -> int:
        """Add to the number of this name, which begins at 0, and return it."""
        ...


class LocalCounter:
    """What one process counts alone."""

    def __init__(self) -> None:
        """Begin at 0."""
        self._values: dict[str, int] = {}

    def add(self, name: str, amount: int) -> int:
        """Add to the number of this name and return it."""
        self._values[name] = self._values.get(name, 0) + amount
        return self._values[name]


@dataclass(frozen=True, kw_only=True)
class Restoring:
    """How far the ranks are with one checkpoint."""

    step: int
    read_bytes: int
    wanted_bytes: int  # of all ranks; grows until each has found out what it needs


class Headway:
    """One rank's view of what all ranks have read."""

    def __init__(
        self,
        counter: Counter,
        *,
        beat: Callable[[str], None],
        tell: Callable[[Restoring], None],
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`beat` is called while the sum grows; `tell` as well, but not more often than every TELL_S."""
        self._counter, self._beat, self._tell, self._now_s = counter, beat, tell, now_s
        self._lock = threading.Lock()
        self._step, self._name = 0, ""
        self._read, self._wanted = 0, 0  # not yet added to the shared numbers
        self._last = -1
        self._told_s = now_s()

    @contextmanager
    def follow(self, step: int, name: str) -> Iterator[None]:
        """Tell about the restore of one checkpoint for as long as the body takes. A new name begins at 0."""
        self._step, self._name, self._last, self._told_s = step, name, -1, self._now_s()
        self.look()
        is_over = threading.Event()

        def look_again() -> None:
            while not is_over.wait(LOOK_S):
                try:
                    self.look()
                except RuntimeError:  # the store is gone with the first rank; the main thread is told by its own call
                    return

        thread = threading.Thread(target=look_again, name="headway", daemon=True)
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
        """Count bytes that this rank has read. Called by any thread."""
        with self._lock:
            self._read += count

    def look(self) -> None:
        """Add what is new to the shared numbers, and tell if they grew."""
        with self._lock:
            read, wanted, self._read, self._wanted = self._read, self._wanted, 0, 0
        total = self._counter.add(f"restore/{self._name}/read", read)
        total_wanted = self._counter.add(f"restore/{self._name}/wanted", wanted)
        if total == self._last:
            return
        self._last = total
        self._beat(f"restoring step {self._step}")
        if self._now_s() - self._told_s >= TELL_S:
            self._told_s = self._now_s()
            self._tell(Restoring(step=self._step, read_bytes=total, wanted_bytes=total_wanted))
