"""Read files that users edit while broker runs. A process of days keeps its last valid reading while one is saved.

Editors truncate a file before they write it, or move it away first: for a moment it is missing, empty or cut off.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from broker.clock import Clock, SystemClock
from broker.errors import BrokerError

log = logging.getLogger(__name__)
Reading = TypeVar("Reading")
Stamp = tuple[int, int, int, int] | None  # inode, size, mtime and ctime in nanoseconds; None: missing

SETTLE_S = 3.0  # a file that changed within this time may still be incomplete


class UserFile(Generic[Reading]):
    """A file, read again when it or one of the files `beside` it has changed.

    The first reading takes the file as it is. Later, a change counts once it is `SETTLE_S` old, and an invalid file
    never: the last valid reading holds, and the log says so once.
    """

    def __init__(
        self,
        path: Path,
        read: Callable[[], Reading],
        *,
        beside: Sequence[Path] = (),
        clock: Clock | None = None,
    ) -> None:
        """Create the reader; `read` raises BrokerError for an invalid file. `clock`: that of the file system."""
        self._path = path
        self._read = read
        self._beside = beside
        self._clock = clock or SystemClock()
        self._valid: tuple[Reading] | None = None
        self._stamps: tuple[Stamp, ...] = ()  # of the last reading, valid or not
        self._missing_since_s: float | None = None

    def read(self) -> Reading:
        """Return the content. Raises the BrokerError of `read` if there was no valid reading yet."""
        stamps = tuple(map(_stamp, (self._path, *self._beside)))
        if self._valid and (stamps == self._stamps or self._is_recent(stamps[0])):
            return self._valid[0]
        try:
            reading = self._read()
        except BrokerError as error:
            if self._valid is None:
                raise
            log.warning("%s is invalid, so its last valid content still applies: %s", self._path, error.message)
            reading = self._valid[0]
        self._valid, self._stamps = (reading,), stamps
        return reading

    def _is_recent(self, stamp: Stamp) -> bool:
        """Return whether the file changed, or disappeared, so recently that it may be half-written."""
        now_s = self._clock.now_s()
        if stamp is not None:
            self._missing_since_s = None
            return stamp != self._stamps[0] and 0.0 <= now_s - stamp[2] / 1e9 < SETTLE_S
        if self._missing_since_s is None:
            self._missing_since_s = now_s
        return 0.0 <= now_s - self._missing_since_s < SETTLE_S


def _stamp(path: Path) -> Stamp:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
