"""Detect that this machine is about to be preempted: SIGTERM, or a file that the broker creates.

This module imports nothing heavy: the handler must be in place before the import of torch, which takes a second.
"""

import os
import signal
from pathlib import Path
from types import FrameType

# The code that a shell reports for a process ended by SIGTERM: 128 + 15.
EXIT_CODE_PREEMPTED = 143
# Set while a program re-executes itself after a signal that it could not act on yet.
SIGNALLED_VARIABLE = "BROKER_ELASTIC_SIGNALLED"


class PreemptionNotice:
    """Records that a notice arrived. The loop forwards the notice of one rank to all ranks."""

    def __init__(self, file: Path | None = None) -> None:
        """Watch for `file`, if given, and, after `listen`, for SIGTERM."""
        self._file = file
        self._has_signal = False

    def listen(self) -> None:
        """Treat SIGTERM as a notice; further ones have no effect. One before `os.execv` counts, too."""
        self._has_signal = self._has_signal or os.environ.pop(SIGNALLED_VARIABLE, "") == "1"
        signal.signal(signal.SIGTERM, self._remember)

    def hand_on(self) -> None:
        """Keep a signal for the program that this process is about to execute."""
        if self._has_signal:
            os.environ[SIGNALLED_VARIABLE] = "1"

    def is_given(self) -> bool:
        """Return whether a notice has arrived by signal or file."""
        return self._has_signal or (self._file is not None and self._file.exists())

    def _remember(self, signal_number: int, frame: FrameType | None) -> None:
        self._has_signal = True
