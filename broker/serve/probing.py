"""Probe a replica: by a request, or by a connection where the balancer does not speak the program's protocol."""

from __future__ import annotations

import asyncio
import ssl

import aiohttp
from yarl import URL

from broker.serve.routes import BackendRoute
from broker.types import ReadinessProbe

REDIRECTS_MAX = 10
KEEPING_METHOD = (307, 308)  # RFC 9110, section 15.4
REDIRECTS = (301, 302, 303, *KEEPING_METHOD)


async def probe_request(session: aiohttp.ClientSession, route: BackendRoute, probe: ReadinessProbe) -> str:
    """Return why the response to the request is not good; empty if it is.

    A redirect is followed on the replica only, and one to another server is good, as for Kubernetes: a program could
    otherwise send the balancer, with headers and a body of its choice, to servers that only this machine reaches.
    """
    method, data = ("GET", None) if probe.post_data is None else ("POST", probe.post_data)
    headers = {"content-type": "application/json", **probe.headers} if probe.post_data else probe.headers
    try:
        url = URL(f"{route.base_url}/{probe.path.lstrip('/')}")
        async with asyncio.timeout(probe.timeout_s):
            for _ in range(REDIRECTS_MAX + 1):
                async with session.request(method, url, data=data, headers=headers, allow_redirects=False) as response:
                    place = response.headers.get("location") if response.status in REDIRECTS else None
                    if place is None:
                        return "" if response.status < 300 else f"the readiness probe returned {response.status}"
                    target = response.url.join(URL(place))
                if target.origin() != url.origin():
                    return ""
                if response.status not in KEEPING_METHOD:
                    method, data = "GET", None
                url = target
        return f"the readiness probe was redirected more than {REDIRECTS_MAX} times"
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:  # the latter: an invalid header or URL
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
