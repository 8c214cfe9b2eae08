"""Pass WebSocket connections through, message by message."""

from __future__ import annotations

import asyncio

import aiohttp
from aiohttp import WSMsgType, web
from yarl import URL

from broker.serve.answers import METER, find_target, make_request_headers
from broker.serve.connections import watch_client
from broker.serve.losses import ClientGoneError, ReplicaLostError
from broker.serve.routes import BackendRoute, RouteTable

MESSAGE_BYTES_MAX = 16 << 20
OWN_HEADERS = (
    *("host", "sec-websocket-key", "sec-websocket-version", "sec-websocket-extensions", "sec-websocket-protocol"),
)
NORMAL, GOING_AWAY = 1000, 1001
UNSENDABLE = frozenset((1004, 1005, 1006, 1015))  # RFC 6455, section 7.4.1: reserved for what was observed


def is_websocket(request: web.BaseRequest) -> bool:
    """Return whether a request asks for a WebSocket."""
    return request.headers.get("upgrade", "").lower() == "websocket" and web.WebSocketResponse().can_prepare(request).ok


async def connect_websocket(
    request: web.BaseRequest,
    table: RouteTable,
    route: BackendRoute,
    session: aiohttp.ClientSession,
    *,
    has_keys: bool,
) -> aiohttp.ClientWebSocketResponse | web.Response:
    """Connect to a replica, or return the response with which it refuses. Raises ReplicaLostError."""
    names = [each.strip() for each in request.headers.get("sec-websocket-protocol", "").split(",") if each.strip()]
    headers = make_request_headers(request, has_keys=has_keys)
    for name in OWN_HEADERS:
        headers.popall(name, None)
    url = URL(route.base_url + find_target(request), encoded=True)  # as the client wrote it
    try:
        return await session.ws_connect(url, headers=headers, protocols=names, max_msg_size=MESSAGE_BYTES_MAX)
    except aiohttp.WSServerHandshakeError as error:
        if error.status < 400:
            raise ReplicaLostError("the replica did not open a WebSocket", is_alive=True) from None
        kept = {name: value for name, value in (error.headers or {}).items() if name.lower() == "retry-after"}
        return web.Response(status=error.status, text=error.message, headers=kept)
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
        table.exclude(route, f"the connection failed: {error}")
        raise ReplicaLostError("the replica refused the connection", was_sent=False) from None
    except (aiohttp.ClientError, OSError) as error:
        table.record_break(route, "no response", error)
        is_alive = isinstance(error, aiohttp.ServerTimeoutError)
        raise ReplicaLostError("the replica did not respond", is_alive=is_alive) from None


async def join_websockets(request: web.BaseRequest, replica: aiohttp.ClientWebSocketResponse) -> web.StreamResponse:
    """Copy messages in both directions until one end closes, then close the other."""
    async with replica:
        chosen = [replica.protocol] if replica.protocol else []
        client = web.WebSocketResponse(protocols=chosen, max_msg_size=MESSAGE_BYTES_MAX)
        try:
            await client.prepare(request)
        except (OSError, aiohttp.ClientError) as error:
            raise ClientGoneError from error
        if request.transport is not None:
            watch_client(request.transport)  # the program's own pings end here, so it would not notice
        request[METER].is_switched = True
        copies = [asyncio.ensure_future(_copy(*pair)) for pair in ((client, replica), (replica, client))]
        try:
            await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in copies:
                each.cancel()
            _, end = await asyncio.gather(*copies, return_exceptions=True)
        code, reason = end if isinstance(end, tuple) else (GOING_AWAY, "")
        await client.close(code=GOING_AWAY if code in UNSENDABLE else code, message=reason.encode())
        return client


async def _copy(
    source: web.WebSocketResponse | aiohttp.ClientWebSocketResponse,
    target: web.WebSocketResponse | aiohttp.ClientWebSocketResponse,
) -> tuple[int, str] | None:
    """Copy messages; return the code and the reason with which the source closes the connection, None if it breaks off.

    A client's are not passed on: once it has closed the connection, this is cancelled.
    """
    while True:
        message = await source.receive()
        if message.type is WSMsgType.TEXT:
            await target.send_str(message.data)
        elif message.type is WSMsgType.BINARY:
            await target.send_bytes(message.data)
        elif message.type is WSMsgType.CLOSE:
            return message.data or NORMAL, message.extra or ""  # 0: without a code
        else:
            return None
