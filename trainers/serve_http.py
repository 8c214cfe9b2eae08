"""A small HTTP/1.1 server on asyncio that answers with JSON or a stream of events."""

import asyncio
import contextlib
import json
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

BODY_BYTES_MAX = 8 << 20
HEAD_BYTES_MAX = 64 << 10
HEAD_S_MAX = 75.0  # also the limit for idle connections
LEFT_EVERY_S = 0.2  # between two looks at the connection of a client that waits for its answer
REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed", 413: "Content Too Large"}
REASONS |= {429: "Too Many Requests", 500: "Internal Server Error", 503: "Service Unavailable"}


class RequestError(Exception):
    """A request that cannot be answered; `status` is the HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        """Set the HTTP status and the message."""
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, kw_only=True)
class Request:
    """A complete request."""

    method: str
    path: str
    body: bytes

    def read_json(self) -> dict[str, Any]:
        """Parse the body as a JSON object. Raises RequestError."""
        try:
            found = json.loads(self.body)
        except (ValueError, RecursionError) as error:
            raise RequestError(400, f"the body is not JSON: {error}") from error
        if not isinstance(found, dict):
            raise RequestError(400, "the body is not a JSON object")
        return found


@dataclass(frozen=True, kw_only=True)
class Response:
    """A complete response (`content`), or a stream of server-sent events (`events`)."""

    status: int = 200
    content: bytes = b""
    content_type: str = "application/json"
    events: AsyncIterator[str] | None = None


Handler = Callable[[Request], Awaitable[Response]]


def make_error(status: int, message: str) -> Response:
    """Return an error in the format of OpenAI's API."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    content = json.dumps({"error": {"message": message, "type": kind, "code": status}})
    return Response(status=status, content=content.encode())


async def start_server(handler: Handler, host: str, port: int) -> asyncio.Server:
    """Listen on a port; 0 selects a free one."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.TimeoutError, asyncio.LimitOverrunError):
            while await _serve_one(handler, reader, writer):
                pass
        writer.close()

    return await asyncio.start_server(serve, host, port, limit=HEAD_BYTES_MAX)


async def _serve_one(handler: Handler, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    """Answer one request; return whether the connection remains open for another."""
    try:
        request, is_kept = await _read(reader)
        response = await _answer(handler, request, reader)
    except RequestError as error:
        response, is_kept = make_error(error.status, str(error)), False
    except (OSError, EOFError, asyncio.TimeoutError, asyncio.LimitOverrunError):
        raise  # of the connection
    except Exception:  # a fault of ours: without an answer, the client would wait forever
        traceback.print_exc()
        response, is_kept = make_error(500, "internal error"), False
    head = f"HTTP/1.1 {response.status} {REASONS.get(response.status, 'Status')}\r\n"
    head += f"content-type: {response.content_type}\r\nconnection: {'keep-alive' if is_kept else 'close'}\r\n"
    if response.status == 429:
        head += "retry-after: 1\r\n"
    if response.events is None:
        writer.write(f"{head}content-length: {len(response.content)}\r\n\r\n".encode() + response.content)
        await writer.drain()
        return is_kept
    writer.write(f"{head}cache-control: no-cache\r\ntransfer-encoding: chunked\r\n\r\n".encode())
    async with contextlib.aclosing(response.events) as events:  # type: ignore[type-var]
        async for event in events:
            data = f"data: {event}\n\n".encode()
            writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
            await writer.drain()  # raises if the client has disconnected, which closes the generation
    writer.write(b"0\r\n\r\n")
    await writer.drain()
    return is_kept


async def _answer(handler: Handler, request: Request, reader: asyncio.StreamReader) -> Response:
    """Return the response. A client that closes its connection before has left, which ends its generation.

    Raises ConnectionResetError then, and whatever the handler raises.
    """
    answering = asyncio.ensure_future(handler(request))
    try:
        while not (await asyncio.wait((answering,), timeout=LEFT_EVERY_S))[0]:
            if reader.at_eof():
                raise ConnectionResetError("the client has left")
    finally:
        answering.cancel()
    return answering.result()


async def _read(reader: asyncio.StreamReader) -> tuple[Request, bool]:
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), HEAD_S_MAX)
    first, *lines = head.decode("latin-1").split("\r\n")
    parts = first.split(" ")
    if len(parts) != 3:
        raise RequestError(400, "invalid request line")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if "transfer-encoding" in headers:
        body = await _read_chunks(reader)
    else:
        text = headers.get("content-length", "0")
        if not text.isdigit() or int(text) > BODY_BYTES_MAX:
            raise RequestError(413, f"a body may have at most {BODY_BYTES_MAX} bytes")
        body = await reader.readexactly(int(text))
    is_kept = headers.get("connection", "").lower() != "close" and parts[2] == "HTTP/1.1"
    return Request(method=parts[0], path=parts[1].partition("?")[0], body=body), is_kept


async def _read_chunks(reader: asyncio.StreamReader) -> bytes:
    body = b""
    while True:
        line = (await reader.readline()).strip()
        try:
            size = int(line.partition(b";")[0], 16)
        except ValueError:
            raise RequestError(400, "invalid chunk size") from None
        if size < 0 or len(body) + size > BODY_BYTES_MAX:
            raise RequestError(413, f"a body may have at most {BODY_BYTES_MAX} bytes")
        body += await reader.readexactly(size)
        await reader.readline()
        if size == 0:
            return body
