"""The terminal of a remote user: its input arrives from another thread, and its program has a terminal of its own.

A server runs `ssh` to the node in such a terminal, so the node's key never leaves it, and the user needs no route to
the node (decision 0408).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Mapping, Sequence

from broker.frozen import frozen

CHUNK_BYTES = 16_384
WAITING_BYTES_MAX = 262_144  # input that the program has not read
POLL_MS = 500  # whether the program has ended
HANGUP_S = 5.0  # for the program to end by itself when its terminal is gone
# Makes the terminal the controlling one, so that the program gets Ctrl-C and changes of the size, and starts it. The
# process is a new one because a fork of a process with threads may only start a program. Signals that `nohup` and `&`
# made a server ignore would be ignored by the program, too.
START = """\
import fcntl, os, signal, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
for each in signal.SIGHUP, signal.SIGINT, signal.SIGQUIT:
    signal.signal(each, signal.SIG_DFL)
os.execvp(sys.argv[1], sys.argv[1:])
"""


@frozen
class ScreenSize:
    """The size of a terminal in characters."""

    rows: int = 24
    columns: int = 80


class Console:
    """Input for a running program; every method may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._data = bytearray()
        self._size: ScreenSize | None = None
        self._is_closed = False
        self._wake: int | None = None

    def put(self, data: bytes, size: ScreenSize | None) -> bool:
        """Add typed characters and the new size, if any; return False, and add nothing, if too much is waiting."""
        with self._lock:
            if len(self._data) + len(data) > WAITING_BYTES_MAX:
                return False
            self._data += data
            self._size = size or self._size
            self._notify()
        return True

    def close(self) -> None:
        """End the program's terminal, because its user has left."""
        with self._lock:
            self._is_closed = True
            self._notify()

    def _notify(self) -> None:
        if self._wake is not None:
            with contextlib.suppress(BlockingIOError):  # it has been woken already
                os.write(self._wake, b"x")

    def take(self, bytes_max: int = WAITING_BYTES_MAX) -> tuple[bytes, ScreenSize | None, bool]:
        """Return the next `bytes_max` of input, the new size, and whether the user has left."""
        with self._lock:
            data, size, self._size = bytes(self._data[:bytes_max]), self._size, None
            del self._data[:bytes_max]
            return data, size, self._is_closed

    def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        folder: str,
        size: ScreenSize,
        on_output: Callable[[bytes], None],
    ) -> int:
        """Run a program in a new terminal until it ends or the user leaves; return its exit code. Raises OSError."""
        terminal, inside = pty.openpty()
        looks, wake = os.pipe()
        try:
            os.set_blocking(terminal, False)
            os.set_blocking(wake, False)
            _set_size(terminal, size)
            try:
                process = subprocess.Popen(
                    [sys.executable, "-I", "-S", "-c", START, *argv],
                    stdin=inside, stdout=inside, stderr=inside, env=dict(env), cwd=folder, start_new_session=True,
                )  # fmt: skip
            finally:
                os.close(inside)
            with self._lock:
                self._wake = wake
                self._notify()  # of what was added before
            has_ended = False
            try:
                on_output(b"")
                has_ended = self._relay(process, terminal, looks, on_output)
            finally:
                _end(process, (0, signal.SIGHUP, signal.SIGKILL) if has_ended else (signal.SIGHUP, signal.SIGKILL))
        finally:
            with self._lock:
                self._wake = None
            for each in (terminal, looks, wake):
                os.close(each)
        code = process.wait()
        return code if code >= 0 else 128 - code

    def _relay(
        self, process: subprocess.Popen[bytes], terminal: int, looks: int, on_output: Callable[[bytes], None]
    ) -> bool:
        """Pass input and output on until the program has ended, even if its children have the terminal open.

        Return False if the user has left.
        """
        waiting = b""
        poll = select.poll()
        poll.register(looks, select.POLLIN)
        while True:
            poll.register(terminal, select.POLLIN | (select.POLLOUT if waiting else 0))
            has_ended = process.poll() is not None
            ready = dict(poll.poll(0 if has_ended else POLL_MS))
            if has_ended and not ready.get(terminal, 0) & select.POLLIN:
                return True
            if looks in ready:
                os.read(looks, CHUNK_BYTES)
            if not waiting or looks in ready:
                more, size, is_closed = self.take(WAITING_BYTES_MAX - len(waiting))
                if is_closed:
                    return False
                waiting += more
                if size is not None:
                    _set_size(terminal, size)
            if waiting and ready.get(terminal, 0) & select.POLLOUT:
                with contextlib.suppress(BlockingIOError):
                    waiting = waiting[os.write(terminal, waiting) :]
            if ready.get(terminal, 0) & (select.POLLIN | select.POLLHUP | select.POLLERR):
                try:
                    data = os.read(terminal, CHUNK_BYTES)
                except OSError:  # EIO: no process has the terminal open
                    data = b""
                if not data:
                    return True
                on_output(data)


def _end(process: subprocess.Popen[bytes], signals: Sequence[int]) -> None:
    """Wait for the end of the program after each signal to its session; signal 0 only waits."""
    for number in signals:
        if number and process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(HANGUP_S)
            return


def _set_size(terminal: int, size: ScreenSize) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", size.rows, size.columns, 0, 0))
