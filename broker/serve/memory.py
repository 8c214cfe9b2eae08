"""Keep the balancer's heap small and its garbage collections short.

A TLS handshake takes about 50 KiB for a moment. After a burst of them, what was freed lies between what each connection
keeps, and glibc by itself returns only free memory at the end of its heap: 400 idle streams with TLS to clients held 81
KiB each, and 58 after a request to return the rest.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable

CHANGE_MIN = 100  # requests in flight


def freeze_heap() -> None:
    """Exempt all existing objects from garbage collection.

    Those of imported modules, 42,000, live as long as the process. Under short requests, a full collection stopped all
    of them for 28 ms every few seconds; without those objects it takes 3.
    """
    gc.collect()
    gc.freeze()


def find_malloc_trim() -> Callable[[], None] | None:
    """Return a function that returns free memory to the system; None if the C library has none (macOS, musl)."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError):
        return None
    return lambda: trim(0)


class MemoryTrimmer:
    """Trims once the number of requests in flight has changed by `CHANGE_MIN` or more and then settled.

    Trimming takes time in proportion to the free memory, so it is not done while connections are opened.
    """

    def __init__(self, trim: Callable[[], None] | None) -> None:
        self._trim = trim
        self._last = self._trimmed = 0  # in flight at the last observation, and at the last trimming

    def observe(self, in_flight: int) -> None:
        """Trim if it is due; called at regular intervals."""
        is_settled = abs(in_flight - self._last) < CHANGE_MIN
        self._last = in_flight
        if self._trim is not None and is_settled and abs(in_flight - self._trimmed) >= CHANGE_MIN:
            self._trimmed = in_flight
            self._trim()
