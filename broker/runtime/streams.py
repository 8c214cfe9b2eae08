"""A program on a node whose input and output stay open: lines of JSON both ways."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from broker.errors import TransientError

LINE_BYTES_MAX = 1 << 20
_closed: list[subprocess.Popen[bytes]] = []  # local processes that are ending, to be reaped


class Stream:
    """Ends when either side closes it; `process` carries it, where the way to the node is a local program."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        process: subprocess.Popen[bytes] | None = None,
    ) -> None:
        self._reader = reader
        self._writer = writer
        self.process = process

    async def read(self) -> Mapping[str, Any]:
        """The next message. Raises TransientError at the end, and for what is no line of JSON."""
        try:
            line = await self._reader.readuntil(b"\n")
            message = json.loads(line)
        except (OSError, EOFError, ValueError, asyncio.LimitOverrunError) as error:
            raise TransientError("the session with the node's agent ended") from error
        if not isinstance(message, dict):
            raise TransientError("the node's agent sent something else than an object")
        return message

    def write(self, message: Mapping[str, Any] | None) -> None:
        """One line; None: an empty one. What a closed stream is told is lost."""
        if not self._writer.is_closing():
            self._writer.write(b"\n" if message is None else json.dumps(message).encode() + b"\n")

    def close(self) -> None:
        """The program sees the end of its input. A local ssh may stay a while for calls that share its connection."""
        self._writer.close()
        if self.process is not None:
            _closed.append(self.process)

    def kill(self) -> None:
        """For one that does not answer: what it has not read yet is not waited for."""
        self._writer.transport.abort()
        self.close()
        if self.process is not None:
            self.process.kill()


async def open_program(argv: Sequence[str]) -> Stream:
    """A local program on one socket: no thread waits for it and a thousand take a thousand descriptors, not three."""
    _reap()
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            # In a session of its own: a Ctrl-C in the terminal is for us, not for our connections.
            process = subprocess.Popen(
                argv, stdin=theirs.fileno(), stdout=theirs.fileno(), stderr=subprocess.DEVNULL, start_new_session=True
            )
        except OSError:
            ours.close()
            raise
    reader, writer = await asyncio.open_connection(sock=ours, limit=LINE_BYTES_MAX)
    return Stream(reader, writer, process)


def _reap() -> None:
    _closed[:] = [process for process in _closed if process.poll() is None]
