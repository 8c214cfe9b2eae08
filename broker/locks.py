"""Lock files between processes: the kernel releases a lock when its process ends, however it ends."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def hold_lock(path: Path) -> Iterator[None]:
    """Wait for the exclusive lock and hold it. Raises OSError if the file cannot be opened."""
    with _open(path) as descriptor:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield


@contextmanager
def try_lock(path: Path) -> Iterator[bool]:
    """Yield True with the exclusive lock held, False if another process (or another call in this one) holds it.

    Raises OSError if the file cannot be opened.
    """
    with _open(path) as descriptor:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            is_held = False
        else:
            is_held = True
        yield is_held


def is_locked(path: Path) -> bool:
    """Return whether a process holds the lock.

    Concurrent checks do not see each other, but a `try_lock` at the moment of a check can fail.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)


@contextmanager
def _open(path: Path) -> Iterator[int]:
    """Open the lock file; create it and its folder as private ones. Child processes do not inherit the lock."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
