"""Probe a replica: by a request, or by a connection where the balancer does not speak the program's protocol."""

from __future__ import annotations

import asyncio
import ssl

import aiohttp

from broker.serve.routes import BackendRoute
from broker.types import ReadinessProbe


async def probe_request(session: aiohttp.ClientSession, route: BackendRoute, probe: ReadinessProbe) -> str:
    """Return why the response to the request is not good; empty if it is."""
    timeout = aiohttp.ClientTimeout(total=probe.timeout_s)
    method = "GET" if probe.post_data is None else "POST"
    headers = {"content-type": "application/json", **probe.headers} if probe.post_data else probe.headers
    url = f"{route.base_url}/{probe.path.lstrip('/')}"
    try:
        async with session.request(method, url, data=probe.post_data, headers=headers, timeout=timeout) as response:
            return "" if response.status < 300 else f"the readiness probe returned {response.status}"
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:  # the latter: an invalid header
        return f"the readiness probe failed: {str(error) or type(error).__name__}"


async def probe_connection(route: BackendRoute, context: ssl.SSLContext | None, probe: ReadinessProbe) -> str:
    """Return why no connection was accepted; empty if one was, and was not closed at once.

    The entrance of a node connects to the program before it completes the handshake, so this probes the program.
    """
    try:
        async with asyncio.timeout(probe.timeout_s):
            _, writer = await asyncio.open_connection(
                route.backend.host, route.backend.port, ssl=context if route.backend.is_encrypted else None
            )
    except (TimeoutError, OSError) as error:
        return f"the connection failed: {str(error) or type(error).__name__}"
    writer.transport.abort()
    return ""
