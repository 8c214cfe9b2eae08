"""An echo engine without an HTTP library, so that it is not what limits a measurement of the balancer.

python -m tests.bench.serve_engine --port 8000     # answers every request with its own body
"""

from __future__ import annotations

import argparse
import asyncio
import re

LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
HEAD_END = b"\r\n\r\n"
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: application/octet-stream\r\nContent-Length: %d\r\n\r\n%s"


class MessageReader(asyncio.Protocol):
    """Splits what arrives on a kept connection into HTTP/1.1 messages that state their length."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        self._data = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._data += data
        while (head_end := self._data.find(HEAD_END)) >= 0:
            begin = head_end + len(HEAD_END)
            found = LENGTH.search(self._data, 0, head_end)
            end = begin + (int(found[1]) if found else 0)
            if len(self._data) < end:
                return
            head, body, self._data = self._data[:head_end], self._data[begin:end], self._data[end:]
            self.take(head, body)

    def take(self, head: bytes, body: bytes) -> None:
        """Handle one message."""
        raise NotImplementedError


class EchoEngine(MessageReader):
    """One connection of the engine."""

    def take(self, head: bytes, body: bytes) -> None:
        self.transport.write(ANSWER % (len(body), body))


async def echo_forever(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(EchoEngine, "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    asyncio.run(echo_forever(parser.parse_args().port))
