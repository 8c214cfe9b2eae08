"""A shell on a node through the server: its output is the stream of a verb, and each input a request of its own.

The keys that are typed while one request is under way travel together in the next one, in order. Input is never sent
twice: if a request for input fails, the shell ends.
"""

from __future__ import annotations

import base64
import json
import os
import select
import signal
import sys
import termios
import threading
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

from broker.app.consoles import ScreenSize
from broker.app.verbs.shells import ShellInput, ShellOutput, UserTerminal, open_shell
from broker.client.wire import encode
from broker.clock import SystemClock
from broker.errors import BrokerError, UsageError

if TYPE_CHECKING:
    from http.client import HTTPConnection

    from broker.client.remote import RemoteSession

CHUNK_BYTES = 16_384
IDLE_S_MAX = 10.0  # the server closes connections that are idle for longer
RETRY_S = 0.1
END_OF_INPUT = b"\x04"  # Ctrl-D


def use_shell(session: RemoteSession, *, cluster: str, rank: int) -> int:
    """Connect this terminal to a shell on a node until it ends; return its exit code. Raises BrokerError."""
    forwarder = InputForwarder(session, sys.stdin.fileno())

    def show(output: ShellOutput) -> None:
        forwarder.begin()
        sys.stdout.buffer.write(output.read())
        sys.stdout.buffer.flush()

    terminal = UserTerminal(term=os.getenv("TERM", "dumb"), size=measure_screen())
    with _set_raw(sys.stdin.fileno()), forwarder.take_signals():
        try:
            return session.call(open_shell, cluster=cluster, rank=rank, terminal=terminal, on_output=show)
        except KeyboardInterrupt:
            raise forwarder.error or KeyboardInterrupt from None
        finally:
            forwarder.end()


def measure_screen() -> ScreenSize:
    """Return the size of this terminal, or 80 x 24 without one."""
    try:
        found = os.get_terminal_size(sys.stdout.fileno())
    except OSError:
        return ScreenSize()
    return ScreenSize(rows=max(1, found.lines), columns=max(1, found.columns))


class InputForwarder:
    """Sends what is typed, and the size of the terminal, from a thread of its own."""

    def __init__(self, session: RemoteSession, keyboard: int) -> None:
        self._session = session
        self._keyboard = keyboard
        self._looks, self._wake = os.pipe()
        self._thread: threading.Thread | None = None
        self._has_ended = threading.Event()
        self._has_new_size = threading.Event()
        self.error: BrokerError | None = None  # why nothing more can be sent

    def begin(self) -> None:
        """Start to send, once; the server must have named the request of the shell."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._send_all, daemon=True)
            self._thread.start()

    def end(self) -> None:
        """Stop sending, and wait for the thread."""
        self._has_ended.set()
        os.write(self._wake, b"x")
        if self._thread is not None:
            self._thread.join()
        for each in (self._looks, self._wake):
            os.close(each)

    @contextmanager
    def take_signals(self) -> Iterator[None]:
        """Send the size of the terminal whenever it changes in the block, and let a failed sender interrupt it."""

        def note(number: int, frame: FrameType | None) -> None:
            self._has_new_size.set()
            os.write(self._wake, b"x")

        before = signal.signal(signal.SIGWINCH, note)
        # It ends the shell if nothing can be sent; a script that starts broker with `&` had it ignored.
        interrupt = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, interrupt)
            signal.signal(signal.SIGWINCH, before)

    def _send_all(self) -> None:
        sender = InputSender(self._session)
        wanted = [self._looks, self._keyboard]
        try:
            while True:
                ready, _, _ = select.select(wanted, [], [])
                data, size = b"", None
                if self._looks in ready:
                    os.read(self._looks, CHUNK_BYTES)
                if self._has_ended.is_set():
                    return
                if self._has_new_size.is_set():
                    self._has_new_size.clear()
                    size = measure_screen()
                if self._keyboard in ready:
                    data = os.read(self._keyboard, CHUNK_BYTES)
                    if not data:
                        data, wanted = END_OF_INPUT, [self._looks]
                while not sender.send(data, size):  # the program does not read
                    if self._has_ended.wait(RETRY_S):
                        return
        except UsageError:
            return  # the shell has ended, as the stream of its output says
        except BrokerError as error:  # without a keyboard, the user could not end the shell
            self.error = error
            if not self._has_ended.is_set():
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        finally:
            sender.close()


class InputSender:
    """Sends input to the newest request of a session, over one connection while it is in use."""

    def __init__(self, session: RemoteSession) -> None:
        self._session = session
        self._connection: HTTPConnection | None = None
        self._clock = SystemClock()
        self._used_s = 0.0

    def send(self, data: bytes, size: ScreenSize | None) -> bool:
        """Send keys and a new size; return False if the shell takes no more for now. Raises BrokerError."""
        if not 0.0 <= self._clock.now_s() - self._used_s < IDLE_S_MAX:
            self.close()
        body = json.dumps(encode(ShellInput(data=base64.b64encode(data).decode(), size=size))).encode()
        path = f"/v1/input/{self._session.request_id}"
        self._connection, answer = self._session.post(path, body, self._connection)
        self._used_s = self._clock.now_s()
        return bool(answer["is_accepted"])

    def close(self) -> None:
        """Close the connection, if one is open."""
        if self._connection is not None:
            self._connection.close()
        self._connection = None


@contextmanager
def _set_raw(keyboard: int) -> Iterator[None]:
    """Pass each key on at once, with Ctrl-C among them, while in the block; no effect without a terminal."""
    before: list[Any] | None = termios.tcgetattr(keyboard) if os.isatty(keyboard) else None
    if before is None:
        yield
        return
    tty.setraw(keyboard, termios.TCSADRAIN)  # keys that are typed ahead are kept
    try:
        yield
    finally:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)
