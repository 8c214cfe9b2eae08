"""Signals for processes that may have ended since they were listed, or that hold locks."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import time
from collections.abc import Iterable
from pathlib import Path

from broker.locks import is_locked


def signal_all(pids: Iterable[int], number: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal to each process that is still running."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def suspend(pid: int, database: Path, locks: Iterable[Path] = ()) -> None:
    """Stop a process while it holds neither the database nor a lock: others would wait for as long as it is stopped."""
    locks = tuple(locks)
    while True:
        os.kill(pid, signal.SIGSTOP)
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.001)  # it stops at the end of a system call
        if is_free(database) and not any(is_locked(each) for each in locks):
            return
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.01)


def is_free(database: Path) -> bool:
    """Return whether no process writes to the database now."""
    with contextlib.closing(sqlite3.connect(database, timeout=0, isolation_level=None)) as connection:
        try:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("ROLLBACK")
        except sqlite3.OperationalError:
            return False
    return True
