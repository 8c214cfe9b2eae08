"""Call the health check of a gRPC server over HTTP/2, without a library for either (RFC 9113, RFC 7541).

A server that does not implement `grpc.health.v1.Health` answers the call as well, with UNIMPLEMENTED: what matters is
that a gRPC server answers through the balancer.
"""

from __future__ import annotations

import asyncio
import contextlib

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, GOAWAY = 0, 1, 3, 4, 7
ACK = END_STREAM = 0x1
END_HEADERS, PADDED, PRIORITY = 0x4, 0x8, 0x20
HEAD_BYTES, FRAME_BYTES_MAX = 9, 1 << 14
STREAM = 1
STATUS_200 = 0x88  # field 8 of HPACK's static table
CALL = (
    *((":method", "POST"), (":scheme", "http"), (":path", "/grpc.health.v1.Health/Check"), (":authority", "localhost")),
    *(("content-type", "application/grpc"), ("te", "trailers")),
)
EMPTY_MESSAGE = bytes(5)  # not compressed, no bytes


async def call_grpc(host: str, port: int, *, timeout_s: float) -> str:
    """Make one call on a connection of its own; return why it was not answered, empty if it was."""
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                fields = b"".join(_write_field(name, value) for name, value in CALL)
                writer.write(PREFACE + make_frame(SETTINGS) + make_frame(HEADERS, END_HEADERS, STREAM, fields))
                writer.write(make_frame(DATA, END_STREAM, STREAM, EMPTY_MESSAGE))
                return await _read_answer(reader, writer)
            finally:
                writer.transport.abort()
    except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
        return str(error) or type(error).__name__


async def _read_answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
    """Read frames up to the headers of the response."""
    while True:
        try:
            head = await reader.readexactly(HEAD_BYTES)
        except asyncio.IncompleteReadError:
            return "the connection was closed"
        size, kind, flags = int.from_bytes(head[:3], "big"), head[3], head[4]
        if size > FRAME_BYTES_MAX:
            return "the answer is not HTTP/2"
        content = await reader.readexactly(size)
        if kind == SETTINGS and not flags & ACK:
            with contextlib.suppress(OSError):
                writer.write(make_frame(SETTINGS, ACK))
        if kind == RST_STREAM:
            return "the call was reset"
        if kind == GOAWAY:
            return "the server ended the connection"
        if kind == HEADERS:
            return "" if is_success(flags, content) else "the status of the response is not 200"


def make_frame(kind: int, flags: int = 0, stream: int = 0, content: bytes = b"") -> bytes:
    """Return a frame."""
    return len(content).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + content


def is_success(flags: int, content: bytes) -> bool:
    """Return whether a HEADERS frame begins with the status 200, which comes first and has an index of its own."""
    start = (1 if flags & PADDED else 0) + (5 if flags & PRIORITY else 0)
    while start < len(content) and content[start] & 0xE0 == 0x20:  # a new size of the dynamic table
        is_long = content[start] & 0x1F == 0x1F
        start += 1
        while is_long and start < len(content):
            is_long = bool(content[start] & 0x80)
            start += 1
    return content[start : start + 1] == bytes((STATUS_200,))


def _write_field(name: str, value: str) -> bytes:
    """Return a literal field without indexing, its name and value as they are: both are shorter than 127 bytes."""
    return b"\x00" + b"".join(bytes((len(each),)) + each.encode() for each in (name, value))
