"""A call of the health check reaches a real gRPC server, and anything else is a failure with a reason."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from broker.rehearsal.grpc_call import HEADERS, RST_STREAM, call_grpc, is_success, make_frame

grpc = pytest.importorskip("grpc", reason="grpcio is not installed: `pip install grpcio`")
TIMEOUT_S = 60.0
Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def call(answer: bytes) -> str:
    """Call a server that sends this and closes its end."""

    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"application/grpc")
        writer.write(answer)
        writer.write_eof()

    async def run() -> str:
        server = await asyncio.start_server(respond, "127.0.0.1", 0)
        async with server:
            return await call_grpc("127.0.0.1", server.sockets[0].getsockname()[1], timeout_s=TIMEOUT_S)

    return asyncio.run(run())


def test_grpc_server_answers_the_call() -> None:
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        assert asyncio.run(call_grpc("127.0.0.1", port, timeout_s=TIMEOUT_S)) == ""
    finally:
        server.stop(None).wait()
    assert asyncio.run(call_grpc("127.0.0.1", port, timeout_s=TIMEOUT_S)) != "", "the port is closed"


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"", "the connection was closed"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "the answer is not HTTP/2"),
        (make_frame(RST_STREAM, 0, 1, bytes(4)), "the call was reset"),
        (make_frame(7, 0, 0, bytes(8)), "the server ended the connection"),
        (make_frame(HEADERS, 4, 1, b"\x48\x03503"), "the status of the response is not 200"),
        (make_frame(4) + make_frame(HEADERS, 4, 1, b"\x88\x5f"), ""),
    ],
)
def test_answer_of_another_kind_is_a_failure(answer: bytes, why: str) -> None:
    assert call(answer) == why


def test_status_is_read_behind_padding_priority_and_sizes_of_the_table() -> None:
    assert is_success(0x28, bytes(6) + b"\x88") and not is_success(0x28, b"\x88" + bytes(6))
    assert is_success(0, b"\x20\x3f\xe1\x1f\x88") and not is_success(0, b"\x3f\xe1")
    assert not is_success(0, b"")
