"""Keep the input and output of a program on a node open: JSON lines in both directions."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from broker.errors import TransientError

LINE_BYTES_MAX = 1 << 20
NOISE_LINES_MAX = 1000  # printed by the start-up files of a login shell, before the first message
_closed: list[subprocess.Popen[bytes]] = []  # local processes that are ending, to be reaped


class Stream:
    """A stream of messages, which ends when either side closes it. `process`: the local program behind it, if any."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        process: subprocess.Popen[bytes] | None = None,
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._noise_left = NOISE_LINES_MAX  # lines that may still precede the first message
        self.process = process

    async def read(self) -> Mapping[str, Any]:
        """Return the next message. Raises TransientError at the end, and for a line that is not an object in JSON.

        Lines before the first message are skipped: `~/.bashrc` on the host may print, and a program may extend it.
        """
        while True:
            try:
                line = await self._reader.readuntil(b"\n")
            except (OSError, EOFError, asyncio.LimitOverrunError) as error:
                raise TransientError("the session with the node's agent ended") from error
            message = _parse(line if not self._noise_left else line[max(0, line.find(b"{")) :])
            if message is not None:
                self._noise_left = 0
                return message
            if not self._noise_left:
                raise TransientError("the node's agent sent a message that is not an object")
            self._noise_left -= 1

    def write(self, message: Mapping[str, Any] | None) -> None:
        """Write a message as one line, None as an empty line. Messages to a closed stream are dropped."""
        if not self._writer.is_closing():
            self._writer.write(b"\n" if message is None else json.dumps(message).encode() + b"\n")

    def close(self) -> None:
        """Close the program's input. A local ssh may stay for a while for calls that share its connection."""
        self._writer.close()
        if self.process is not None:
            _closed.append(self.process)

    def kill(self) -> None:
        """Close a stream that does not answer, without waiting for unread data."""
        self._writer.transport.abort()
        self.close()
        if self.process is not None:
            self.process.kill()


def _parse(line: bytes) -> Mapping[str, Any] | None:
    try:
        message = json.loads(line)
    except ValueError:
        return None
    return message if isinstance(message, dict) else None


async def open_program(argv: Sequence[str], *, first: bytes = b"") -> Stream:
    """Start a local program on one socket: no thread waits for it, and it takes one descriptor instead of three.

    `first` is written to the program before any message.
    """
    _reap()
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            # In its own session, so that Ctrl-C in the terminal does not reach our connections.
            process = subprocess.Popen(
                argv, stdin=theirs.fileno(), stdout=theirs.fileno(), stderr=subprocess.DEVNULL, start_new_session=True
            )
        except OSError:
            ours.close()
            raise
    reader, writer = await asyncio.open_connection(sock=ours, limit=LINE_BYTES_MAX)
    if first:
        writer.write(first)
    return Stream(reader, writer, process)


def _reap() -> None:
    _closed[:] = [process for process in _closed if process.poll() is None]
