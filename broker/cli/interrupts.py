"""Handle Ctrl-C during start-up: a KeyboardInterrupt within an import would print a traceback."""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import NoReturn

CODE = 130
NOTE = "\ninterrupted\n"


def end_on_interrupt() -> None:
    """Exit at once when interrupted. A SIGINT that is ignored (`nohup`, a background job) stays ignored."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def raise_on_interrupt() -> None:
    """Undo `end_on_interrupt`, for a command that cleans up after itself. Safe to call twice."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    os.write(2, NOTE.encode())
    os._exit(CODE)
