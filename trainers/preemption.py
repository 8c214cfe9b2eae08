"""Detect that this machine is about to be preempted: SIGTERM, or a file that the broker creates.

This module imports nothing heavy: the handler must be in place before the import of torch, which takes a second.
"""

import os
import signal
from contextlib import suppress
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
        self._arrivals: int | None = None  # the descriptor from which the numbers of signals are read

    def listen(self) -> None:
        """Treat SIGTERM as a notice; further ones have no effect. One before `os.execv` counts, too."""
        self._has_signal = self._has_signal or os.environ.pop(SIGNALLED_VARIABLE, "") == "1"
        signal.signal(signal.SIGTERM, self._remember)
        if hasattr(os, "register_at_fork"):  # not on Windows
            self._open_arrivals()

    def hand_on(self) -> None:
        """Keep a signal for the program that this process is about to execute."""
        if self._is_signalled():
            os.environ[SIGNALLED_VARIABLE] = "1"

    def is_given(self) -> bool:
        """Return whether a notice has arrived by signal or file."""
        return self._is_signalled() or (self._file is not None and self._file.exists())

    def _open_arrivals(self) -> None:
        """Have the numbers of signals written to a pipe at once.

        Python calls the handler in the main thread only, which may be blocked in a collective with a lost peer while
        another thread restarts the program.
        """
        self._arrivals, writing = os.pipe()
        os.set_blocking(self._arrivals, False)
        os.set_blocking(writing, False)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=self._drop_arrivals)

    def _drop_arrivals(self) -> None:
        """Leave the pipe to the parent, whose signals are not those of this child."""
        signal.set_wakeup_fd(-1)
        self._arrivals = None

    def _is_signalled(self) -> bool:
        if self._arrivals is not None and not self._has_signal:
            with suppress(BlockingIOError):  # none has arrived
                self._has_signal = signal.SIGTERM in os.read(self._arrivals, 4096)
        return self._has_signal

    def _remember(self, signal_number: int, frame: FrameType | None) -> None:
        self._has_signal = True
