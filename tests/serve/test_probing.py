"""The balancer's own requests to replicas: a program answers them, and must not lead them elsewhere."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

from broker.serve.engines import EngineFacts
from broker.serve.files import Backend
from broker.serve.probing import REDIRECTS_MAX, probe_request
from broker.serve.routes import BackendRoute
from broker.types import ReadinessProbe

Respond = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def serve(respond: Respond) -> AsyncIterator[int]:
    runner = web.ServerRunner(web.Server(respond))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield int(runner.addresses[0][1])
    finally:
        await runner.cleanup()


def redirect(status: int, place: str) -> web.Response:
    return web.Response(status=status, headers={"location": place})


def make_route(port: int) -> BackendRoute:
    return BackendRoute(Backend(number=1, version=1, host="127.0.0.1", port=port), now_s=time.time())


@pytest.mark.parametrize("status", [302, 307])
def test_probe_is_not_redirected_to_another_server(status: int) -> None:
    """It would reach services that only the balancer's machine can reach, with headers that the task chooses."""
    seen: list[str] = []

    async def hidden(request: web.BaseRequest) -> web.StreamResponse:
        seen.append(f"{request.method} {dict(request.headers)}")
        return web.Response()

    async def scene() -> str:
        async with serve(hidden) as port:

            async def lead_away(request: web.BaseRequest) -> web.StreamResponse:
                return redirect(status, f"http://127.0.0.1:{port}/secret")

            async with serve(lead_away) as own, aiohttp.ClientSession() as session:
                probe = ReadinessProbe(path="/", post_data="{}", headers={"x-api-key": "k"})
                found = await probe_request(session, make_route(own), probe)
                assert await EngineFacts().find_context(session, make_route(own)) is None
                return found

    assert asyncio.run(scene()) == "", "a program that redirects is ready, as for Kubernetes"
    assert seen == []


@pytest.mark.parametrize(("status", "method"), [(301, "GET"), (303, "GET"), (308, "POST")])
def test_probe_follows_redirects_on_the_replica(status: int, method: str) -> None:
    async def respond(request: web.BaseRequest) -> web.StreamResponse:
        if request.path == "/":
            return redirect(status, "health?a=1")
        assert request.query_string == "a=1"
        return web.Response(status=200 if request.method == method else 500)

    async def scene() -> str:
        async with serve(respond) as port, aiohttp.ClientSession() as session:
            return await probe_request(session, make_route(port), ReadinessProbe(path="/", post_data="{}"))

    assert asyncio.run(scene()) == ""


@pytest.mark.parametrize(
    ("place", "words"),
    [("/", f"more than {REDIRECTS_MAX} times"), ("http://[", "readiness probe failed"), (None, "returned 302")],
)
def test_redirect_that_leads_nowhere_is_an_error(place: str | None, words: str) -> None:
    async def respond(request: web.BaseRequest) -> web.StreamResponse:
        return web.Response(status=302) if place is None else redirect(302, place)

    async def scene() -> str:
        async with serve(respond) as port, aiohttp.ClientSession() as session:
            return await probe_request(session, make_route(port), ReadinessProbe(path="/"))

    assert words in asyncio.run(scene())
