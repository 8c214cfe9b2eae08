"""Detect that this machine is about to be preempted: SIGTERM, or a file that the broker creates.

Imports nothing heavy: the handler must be in place before torch is imported, which takes a second.
"""

import signal
from pathlib import Path
from types import FrameType

# What a shell reports for a process ended by SIGTERM: 128 + 15.
EXIT_CODE_PREEMPTED = 143


class PreemptionNotice:
    """Remember that a notice arrived. The loop passes one rank's notice on to all ranks."""

    def __init__(self, file: Path | None = None) -> None:
        """Watch for `file`, if one is given, and for SIGTERM from `listen` on."""
        self._file = file
        self._has_signal = False

    def listen(self) -> None:
        """Turn SIGTERM into a notice; a second SIGTERM changes nothing."""
        signal.signal(signal.SIGTERM, self._remember)

    def is_given(self) -> bool:
        """Return whether a notice has arrived, in either way."""
        return self._has_signal or (self._file is not None and self._file.exists())

    def _remember(self, signal_number: int, frame: FrameType | None) -> None:
        self._has_signal = True
