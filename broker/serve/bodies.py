"""Read the bodies of requests: short ones are kept, so that the request can be repeated; others are streamed.

A body of unknown length is kept if its request asks for a generation, whose clients send all of it before they read.
Others, such as recorded sound, may be a conversation: the replica gets each part as it arrives.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import aiohttp
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from broker.serve.losses import ClientGoneError

KEPT_BODY_BYTES_MAX = 4 << 20
# For all open requests together, including those being read; beyond it, bodies are streamed and not repeated.
KEPT_TOTAL_BYTES_MAX = 256 << 20
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
FAULTS = (OSError, aiohttp.ClientError, web.RequestPayloadError, HttpProcessingError)


class PassedBody:
    """A body that is streamed as it arrives: the part that has been read, then the rest. It can be read once."""

    def __init__(self, content: aiohttp.StreamReader, begin: bytes = b"") -> None:
        self._content, self._begin = content, begin

    @property
    def is_broken(self) -> bool:
        """Return whether the client ended the body early, or sent one that cannot be read."""
        return self._content.exception() is not None

    async def read(self) -> AsyncIterator[bytes]:
        """Yield the parts."""
        if self._begin:
            yield self._begin
        async for part in self._content.iter_any():
            yield part


class BodyReader:
    """Reads the bodies of all requests, and limits how much of them is kept at the same time."""

    def __init__(self) -> None:
        self.kept_bytes = 0

    async def read(self, request: web.BaseRequest, *, is_generation: bool) -> bytes | PassedBody:
        """Return the body; `release` has to follow. Raises ClientGoneError, and then keeps nothing."""
        if not request.can_read_body:
            return b""
        await _send_continue(request)
        length = request.content_length
        if length is None and not is_generation:
            return PassedBody(request.content)
        if (length or 0) > KEPT_BODY_BYTES_MAX or self.kept_bytes + (length or 0) > KEPT_TOTAL_BYTES_MAX:
            return PassedBody(request.content)
        parts = bytearray()
        is_whole = False
        try:
            while part := await request.content.readany():
                parts += part
                self.kept_bytes += len(part)
                if len(parts) > KEPT_BODY_BYTES_MAX or self.kept_bytes > KEPT_TOTAL_BYTES_MAX:
                    return PassedBody(request.content, bytes(parts))
            is_whole = True
            return bytes(parts)
        except FAULTS as error:
            raise ClientGoneError from error
        finally:
            if not is_whole:
                self.kept_bytes -= len(parts)

    def release(self, body: bytes | PassedBody) -> None:
        """Release a body that is no longer needed."""
        if isinstance(body, bytes):
            self.kept_bytes -= len(body)


async def _send_continue(request: web.BaseRequest) -> None:
    """Send `100 Continue`: clients such as curl hold long bodies back until then."""
    if request.headers.get("expect", "").lower() != "100-continue":
        return
    try:
        await request.writer.write(CONTINUE)
    except (OSError, aiohttp.ClientError) as error:
        raise ClientGoneError from error
    request.writer.output_size = 0  # as aiohttp's own handler does: the response has not begun
