"""Signals for processes that may have ended since they were listed."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable


def signal_all(pids: Iterable[int], number: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal to each process that is still running."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
