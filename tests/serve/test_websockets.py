"""WebSockets find a replica as requests do, and clients see the replica's refusal."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from pathlib import Path

import aiohttp
import pytest
from aiohttp import WSMsgType, web
from yarl import URL

from broker.serve import websockets
from broker.serve.connections import watch_client
from tests.serve.stand_in import StandIn
from tests.serve.test_balancer import Bed, play


class Guarded(StandIn):
    """Refuses WebSockets with `status`, unless it is 101; remembers their targets and headers."""

    def __init__(self, status: int = 101) -> None:
        super().__init__()
        self.status = status
        self.targets: list[str] = []
        self.cookies: list[list[str]] = []

    async def _echo(self, request: web.BaseRequest) -> web.StreamResponse:
        self.targets.append(request.path_qs)
        self.cookies.append(request.headers.getall("x-part", []))
        if self.status != 101:
            return web.Response(status=self.status, text="no", headers={"retry-after": "9"})
        return await super()._echo(request)


async def converse(bed: Bed, path: str = "/socket", headers: Sequence[tuple[str, str]] = ()) -> None:
    async with bed.client.ws_connect(URL(bed.url + path, encoded=True), headers=headers) as socket:
        await socket.send_str("a")
        assert await socket.receive_str() == "echo a"


def test_socket_that_a_replica_refuses_opens_at_another_one(tmp_path: Path) -> None:
    async def scene(bed: Bed) -> None:
        await bed.stands[0].kill()
        while bed.balancer.table.routes[1].is_ready:
            await converse(bed)

    assert play(tmp_path, scene).broken == 0


def test_busy_replica_is_passed_over_and_the_refusal_of_the_last_one_is_the_answer(tmp_path: Path) -> None:
    async def scene(bed: Bed) -> None:
        first, second = bed.stands
        assert isinstance(first, Guarded) and isinstance(second, Guarded)
        while not first.targets:
            await converse(bed)
        for status in (503, 403):
            first.status = second.status = status
            with pytest.raises(aiohttp.WSServerHandshakeError) as failed:
                await converse(bed)
            assert failed.value.status == status
            assert failed.value.headers is not None and failed.value.headers["retry-after"] == "9"

    play(tmp_path, scene, make_stands=lambda count: [Guarded(503), Guarded()])


def test_target_and_headers_arrive_as_the_client_wrote_them(tmp_path: Path) -> None:
    async def scene(bed: Bed) -> None:
        await converse(bed, "/socket?a=%2Fb+%41", headers=[("x-part", "1"), ("x-part", "2")])
        stand = bed.stands[0]
        assert isinstance(stand, Guarded)
        assert (stand.targets, stand.cookies) == (["/socket?a=%2Fb+%41"], [["1", "2"]])

    play(tmp_path, scene, count=1, make_stands=lambda count: [Guarded()])


class Headless(StandIn):
    """Answers a request for a WebSocket as any other."""

    async def _echo(self, request: web.BaseRequest) -> web.StreamResponse:
        return web.Response()


def test_answer_that_is_no_socket_is_an_error_of_the_replica(tmp_path: Path) -> None:
    async def scene(bed: Bed) -> None:
        with pytest.raises(aiohttp.WSServerHandshakeError) as failed:
            await converse(bed)
        assert failed.value.status == 502

    play(tmp_path, scene, count=1, make_stands=lambda count: [Headless()])


class Stuck(StandIn):
    """Accepts connections, and never answers a request for a WebSocket."""

    async def _echo(self, request: web.BaseRequest) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError


def test_socket_that_a_replica_never_opens_is_given_up(tmp_path: Path) -> None:
    async def scene(bed: Bed) -> None:
        with pytest.raises(aiohttp.WSServerHandshakeError) as failed:
            await converse(bed)
        assert failed.value.status == 502

    play(tmp_path, scene, count=1, make_stands=lambda count: [Stuck()], stream_timeout_s=0.1)


class Closing(StandIn):
    """Closes its WebSockets with a code and a reason after a message."""

    async def _echo(self, request: web.BaseRequest) -> web.StreamResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        await socket.receive()
        await socket.close(code=4001, message=b"quota used up")
        return socket


def test_client_learns_why_the_replica_closes_its_socket(tmp_path: Path) -> None:
    async def scene(bed: Bed) -> None:
        async with bed.client.ws_connect(f"{bed.url}/socket") as socket:
            await socket.send_str("a")
            message = await socket.receive()
            assert (message.type, message.data, message.extra) == (WSMsgType.CLOSE, 4001, "quota used up")

    play(tmp_path, scene, count=1, make_stands=lambda count: [Closing()])


@pytest.mark.skipif(not hasattr(socket, "TCP_KEEPIDLE"), reason="this system has no TCP_KEEPIDLE")
def test_kernel_looks_after_the_clients_of_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A laptop that was closed counted as a request in flight for two hours, for which replicas were kept."""
    names = [socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT]
    seen = list[list[int]]()

    def watch(transport: asyncio.BaseTransport) -> None:
        watch_client(transport)
        connection = transport.get_extra_info("socket")
        seen.append([connection.getsockopt(socket.IPPROTO_TCP, name) for name in names])

    monkeypatch.setattr(websockets, "watch_client", watch)
    play(tmp_path, converse, count=1)
    assert seen == [[120, 60, 8]]
