"""Pass WebSocket connections through, message by message."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import aiohttp
from aiohttp import WSMsgType, web

if TYPE_CHECKING:
    from broker.serve.routes import BackendRoute

MESSAGE_BYTES_MAX = 16 << 20
OWN_HEADERS = (
    "host",
    "connection",
    "upgrade",
    "sec-websocket-key",
    "sec-websocket-version",
    "sec-websocket-extensions",
)


async def forward_websocket(
    request: web.BaseRequest, route: BackendRoute, session: aiohttp.ClientSession, *, has_keys: bool = False
) -> web.StreamResponse:
    """Connect the client to a replica until one of them closes; `has_keys`: the replica must not get the API key."""
    dropped = (*OWN_HEADERS, "sec-websocket-protocol", *(("authorization",) if has_keys else ()))
    names = [each.strip() for each in request.headers.get("sec-websocket-protocol", "").split(",") if each.strip()]
    headers = {name: value for name, value in request.headers.items() if name.lower() not in dropped}
    route.in_flight += 1
    try:
        async with session.ws_connect(
            route.base_url + request.path_qs, headers=headers, protocols=names, max_msg_size=MESSAGE_BYTES_MAX
        ) as replica:
            chosen = [replica.protocol] if replica.protocol else []
            client = web.WebSocketResponse(protocols=chosen, max_msg_size=MESSAGE_BYTES_MAX)
            await client.prepare(request)
            copies = [asyncio.ensure_future(_copy(*pair)) for pair in ((client, replica), (replica, client))]
            await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
            for each in copies:
                each.cancel()
            await asyncio.gather(*copies, return_exceptions=True)
            await client.close(code=replica.close_code or 1001)
            return client
    except (aiohttp.ClientError, OSError):
        return web.json_response({"error": {"message": "the replica refused the connection", "code": 502}}, status=502)
    finally:
        route.in_flight -= 1


async def _copy(
    source: web.WebSocketResponse | aiohttp.ClientWebSocketResponse,
    target: web.WebSocketResponse | aiohttp.ClientWebSocketResponse,
) -> None:
    async for message in source:
        if message.type is WSMsgType.TEXT:
            await target.send_str(message.data)
        elif message.type is WSMsgType.BINARY:
            await target.send_bytes(message.data)
