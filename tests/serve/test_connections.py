"""Connections to replicas are opened a few at a time, so that no entrance cuts a burst off."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable

import aiohttp
import pytest
from multidict import CIMultiDict

from broker.serve import connections
from broker.serve.connections import CONNECTING_MAX, SHORT_BYTES_MAX, ReplicaConnector, is_short
from broker.serve.tcp_path import _connect
from tests.serve.stand_in import StandIn


def test_burst_opens_no_more_connections_to_one_replica_than_its_entrance_admits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opening: dict[int, int] = {1: 0, 2: 0}
    most: dict[int, int] = {1: 0, 2: 0}

    async def connect(self: object, req: aiohttp.ClientRequest, traces: object, timeout: object) -> None:
        port = req.url.port or 0
        opening[port] += 1
        most[port] = max(most[port], opening[port])
        await asyncio.sleep(0)
        opening[port] -= 1
        raise aiohttp.ClientOSError("refused")

    monkeypatch.setattr(aiohttp.TCPConnector, "_create_connection", connect)

    async def run() -> None:
        async with aiohttp.ClientSession(connector=ReplicaConnector(None)) as session:

            async def ask(port: int) -> None:
                with pytest.raises(aiohttp.ClientOSError):
                    await session.get(f"http://127.0.0.1:{port}/")

            await asyncio.gather(*(ask(port) for port in (1, 2) for _ in range(200)))

    asyncio.run(run())
    assert most == {1: CONNECTING_MAX, 2: CONNECTING_MAX}


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="this system has no TCP_USER_TIMEOUT")
def test_kernel_ends_connections_to_a_machine_without_power(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long body may wait for a busy program, and what follows an upgrade as well."""
    opened: list[socket.socket] = []
    watch = connections.watch_peer

    def watch_and_keep(transport: asyncio.BaseTransport) -> None:
        watch(transport)
        opened.append(transport.get_extra_info("socket"))

    def read(*names: int) -> list[int]:
        return [opened[0].getsockopt(socket.IPPROTO_TCP, name) for name in names]

    monkeypatch.setattr(connections, "watch_peer", watch_and_keep)

    async def run() -> None:
        stand = StandIn()
        await stand.start()
        url = f"http://127.0.0.1:{stand.port}/a"
        async with aiohttp.ClientSession(connector=ReplicaConnector(None)) as session:
            for size, limit_ms in ((0, 25_000), (SHORT_BYTES_MAX + 1, 0), (SHORT_BYTES_MAX, 25_000)):
                async with session.post(url, data=b"x" * size) as response:
                    assert len(await response.read()) == size
                    assert read(socket.TCP_USER_TIMEOUT) == [limit_ms]
            assert read(socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT) == [10, 5, 3]
            assert opened[0].getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        await stand.kill()

    asyncio.run(run())
    assert len(opened) == 1, "each request sets the limit of a connection that is used again"
    assert not is_short(CIMultiDict({"Transfer-Encoding": "chunked"})) and not is_short(CIMultiDict({"Upgrade": "x"}))


def test_connection_that_was_closed_meanwhile_is_not_an_error() -> None:
    closed = socket.socket()
    closed.close()
    connections.watch_peer(asyncio.Transport({"socket": closed}))


@pytest.mark.parametrize(("limits_s", "has_connected"), [((0.0, 60.0), False), ((60.0, 0.0), True)])
def test_connecting_and_the_handshake_have_a_limit_each(
    monkeypatch: pytest.MonkeyPatch, limits_s: tuple[float, float], has_connected: bool
) -> None:
    monkeypatch.setattr(connections, "CONNECT_S", limits_s[0])
    monkeypatch.setattr(connections, "HANDSHAKE_S", limits_s[1])

    async def open_connection(*, has_connected: bool) -> None:
        async with connections.limit_connecting(lambda: "protocol") as make_protocol:
            if has_connected:
                assert make_protocol() == "protocol"
            for _ in range(5):
                await asyncio.sleep(0)

    async def run() -> None:
        with pytest.raises(TimeoutError):
            await open_connection(has_connected=has_connected)
        await open_connection(has_connected=not has_connected)  # the other limit is far away

    asyncio.run(run())


async def connect_by_aiohttp(port: int) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    async with aiohttp.ClientSession(connector=ReplicaConnector(context)) as session:
        await session.get(f"https://127.0.0.1:{port}/")


async def connect_by_streams(port: int) -> None:
    await _connect("127.0.0.1", port, ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))


@pytest.mark.parametrize("connect", [connect_by_aiohttp, connect_by_streams])
def test_handshake_that_is_not_answered_ends_by_its_own_limit(
    monkeypatch: pytest.MonkeyPatch, connect: Callable[[int], Awaitable[None]]
) -> None:
    monkeypatch.setattr(connections, "CONNECT_S", 600.0)
    monkeypatch.setattr(connections, "HANDSHAKE_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # the kernel accepts; nothing answers

        async def run() -> None:
            with pytest.raises(TimeoutError):
                await connect(silent.getsockname()[1])

        asyncio.run(run())
